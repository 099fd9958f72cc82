"""To MLA: a few rotary components shared by all heads, and a latent that holds the rest of the keys and the values.

Sources: TransMLA (2502.07864) turns the heads of each frequency by a real rotation before it keeps some, here by a
complex one; MHA2MLA (2502.14837) keeps a part of the rotation.

Shapes: E hidden size, H query heads, G key/value heads, D head size, n rotary planes, R latent size, P rotary size,
N unrotated key size, V value size, C = P / 2 complex rotary components.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from .heads import Heads, rotary_fields
from .moments import DAMPING, Moments, square_root

# What is tried for a layer, the default first: weights of the keys' errors against the values' in the latent, and the
# powers to which the mean rotation's length is taken. With 1 a score is nearest on average, with 0 it keeps its size.
ALPHAS = (1.0, 0.55, 0.3)
GAINS = (1.0, 0.5, 0.0)
# Shares of their mean by which keys count where rotary components are chosen and the mean is kept beside the cache.
# With 0 no component is spent on it, but keys far from the mean, as the first token's, then lose more.
MEAN_SHARES = (0.0, 1.0)


@dataclass(frozen=True)
class RotaryKey:
    """The rotary key that all heads share, in C complex components.

    Args:
        plane: (C,) index of the rotary plane that each component is made of.
        encoder: (C, G) component c is the sum over the heads of encoder * z of that plane.
        decoder: (C, G) head g's plane is restored as decoder * component.
        loss: what the other components lose by not being rotated, in the metric of the layer's output.
        zeros: number of zeros behind the components: all of the rotary key of a layer without rotation, else none.
    """

    plane: torch.Tensor
    encoder: torch.Tensor
    decoder: torch.Tensor
    loss: float
    zeros: int = 0


@dataclass(frozen=True)
class Latent:
    """The latent that all heads share.

    Args:
        rows: (R, E) make the latent from the layer's input.
        restore: (G, N + V, R) make unrotated keys and values from the latent.
        offset: (G, V) the values' mean less the part of it that the latent holds; the output's bias adds it.
    """

    rows: torch.Tensor
    restore: torch.Tensor
    offset: torch.Tensor


def rotary_key(moments: Moments, size: int) -> RotaryKey:
    """Choose the `size` / 2 components that lose most by not being rotated.

    A component loses its eigenvalue times 2 (1 - Re mean e^{j omega lag}).
    """
    if not moments.plane_weight.numel():  # a head without rotary planes
        nothing = moments.plane_mean.new_zeros(0, len(moments.plane_weight))
        return RotaryKey(torch.zeros(0, dtype=torch.long, device=nothing.device), nothing, nothing, 0.0, zeros=size)
    root = moments.plane_weight.T.sqrt()  # (n, G)
    mean = moments.plane_mean
    second = moments.plane_covariance + mean[:, :, None] * mean[:, None, :].conj()
    values, vectors = torch.linalg.eigh(root[:, :, None] * second * root[:, None, :])  # (n, G), (n, G, G)
    turned = 2 * (1 - moments.rotation.mean(0).real)  # (n,)
    gain = (values.clamp(min=0) * turned[:, None]).flatten()
    order = gain.argsort(descending=True, stable=True)
    kept, heads = order[: size // 2].sort().values, values.shape[1]
    plane = kept // heads
    leading = vectors.mT.flatten(0, 1)[kept]  # (C, G)
    # Each component gets the mean power of the keys' planes, so that it quantizes and trains as they do.
    power = second.diagonal(dim1=1, dim2=2).real.mean() / values.flatten()[kept].clamp(min=1e-12 * values.max())
    factor = power.sqrt()[:, None]
    return RotaryKey(
        plane,
        leading.conj() * root[plane] * factor,
        leading / root[plane] / factor,
        gain[order[size // 2 :]].sum().item(),
    )


def unrotated_keys(heads: Heads, rotary: RotaryKey) -> torch.Tensor:
    """Return what the rotary components leave of the keys, which will not be rotated: (G, D, E).

    Where they leave nothing of the rotary planes, it is (G, D - 2 n, E): the dimensions that were never rotated.
    """
    n, planes = heads.planes, heads.complex_planes["k"]  # (G, n, E)
    if rotary.encoder.numel() == n * len(heads.k) ** 2:
        return heads.k[:, 2 * n :]
    component = torch.einsum("cg,gce->ce", rotary.encoder, planes[:, rotary.plane])  # (C, E)
    restored = torch.zeros_like(planes)
    restored.index_add_(1, rotary.plane, torch.einsum("cg,ce->gce", rotary.decoder, component))
    left = planes - restored
    return torch.cat((left.real, left.imag, heads.k[:, 2 * n :]), dim=1)


def to_latent(
    heads: Heads,
    moments: Moments,
    rank: int,
    size: int,
    alpha: float = ALPHAS[0],
    gain: float = GAINS[0],
    key_mean: bool = False,
    mean_share: float = MEAN_SHARES[0],
) -> tuple[dict[str, torch.Tensor], dict[str, Any], float]:
    """Convert a layer to MLA; for MQA with `rank` and `size` D that is exact.

    Args:
        heads: the layer's weights; with qk_norm those behind the norms, as `normed.behind_norms` gives them.
        moments: of the layer.
        rank: size R of the latent.
        size: size P of the rotary key.
        alpha: weight of the keys' errors against the values' in the latent.
        gain: of the queries of unrotated keys; see `query_turn`.
        key_mean: whether the mean of the keys is kept exactly, as `GQAKeyMean`, where the layer has a place for it.
        mean_share: one of `MEAN_SHARES`, where it is.

    Returns:
        The parameters of a `LatentAttention`, the configuration fields of its layer, and the loss in the metric of the
        layer's output: what is no longer rotated, and keys and values outside the latent.
    """
    counted = replace(moments, plane_mean=mean_share * moments.plane_mean) if key_mean else moments
    rotary, turn = rotary_key(counted, size), query_turn(heads, moments, gain)
    keys = unrotated_keys(heads, rotary)
    mean = lost_mean(moments, rotary) if key_mean and keys.shape[1] == heads.k.shape[1] else None
    mean = mean if mean is not None and mean.any() else None
    first = turn.shape[1] - keys.shape[1]  # of the dimensions that are not rotated
    metric = (turn @ moments.query_metric @ turn.mT)[:, first:, first:].unflatten(0, (len(keys), -1)).sum(1)
    latent, lost = shared_latent(heads, moments, keys, metric, rank, alpha)
    return *write_latent(heads, rotary, latent, turn, mean), rotary.loss + lost


def keeps_mean(heads: Heads) -> bool:
    """Return whether MLA of a layer has a place for the mean of its keys: all frequencies must be there, in order."""
    return heads.planes > 0 and heads.frequencies.tolist() == list(range(heads.frequency_dim // 2))


def lost_mean(moments: Moments, rotary: RotaryKey) -> torch.Tensor:
    """Return what the rotary components do not restore of the mean of the keys' planes, (G, n)."""
    mean = moments.plane_mean  # (n, G)
    component = (rotary.encoder * mean[rotary.plane]).sum(1)  # (C,)
    return mean.index_add(0, rotary.plane, -rotary.decoder * component[:, None]).T


def query_turn(heads: Heads, moments: Moments, gain: float = GAINS[0]) -> torch.Tensor:
    """Return what the query of an unrotated key is multiplied by, (H, D, D): the mean rotation of all heads.

    Its length in each plane, at most 1, is taken to the power `gain`. It includes rotary_scaling squared: rotation
    scales a query and a key by it, and what is no longer rotated must not lose that.
    """
    mean = moments.rotation.mean(0).expand_as(moments.rotation)  # (H, n)
    length = mean.abs().clamp(min=torch.finfo(torch.float32).tiny)
    mean = mean / length * length**gain
    return _real_matrix(mean * heads.rotary_scaling**2, heads.k.shape[1])


def write_latent(
    heads: Heads, rotary: RotaryKey, latent: Latent, turn: torch.Tensor, mean: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parameters of a `LatentAttention` and the configuration fields that its layer needs.

    Args:
        heads: the layer's weights.
        rotary: the rotary key to write.
        latent: the latent to write.
        turn: (H, D, D) what the query of an unrotated key is multiplied by.
        mean: (G, n) the part of the keys' mean to keep as `GQAKeyMean`, where N is D.
    """
    planes, shared, restore = heads.complex_planes, heads.key_heads, latent.restore[heads.key_heads]
    kept = {}
    if mean is not None:
        # The mean meets the query that is multiplied by `turn`. So that no plane of that gets small, `turn` keeps its
        # angle alone, and the keys get its length.
        n, plane = heads.planes, torch.arange(heads.planes, device=turn.device)
        angle = torch.complex(turn[:, plane, plane], turn[:, plane + n, plane])  # (H, n)
        length = angle.abs().clamp(min=torch.finfo(torch.float32).tiny)
        angle = angle / length
        restore = torch.cat((restore[:, : 2 * n] * length.repeat(1, 2)[..., None], restore[:, 2 * n :]), dim=1)
        turn, mean = _real_matrix(angle, turn.shape[1]), angle * mean[shared]
        kept["key_mean.bias"] = torch.cat((mean.real, mean.imag), dim=1).flatten()
    rank, head_dim = len(latent.rows), heads.k.shape[1]
    nope = latent.restore.shape[1] - head_dim

    def query(name: str) -> torch.Tensor:  # (H, D, ...) to (H, N + P, ...)
        rotated = planes[name][:, rotary.plane]
        rotated = torch.einsum("hc,hc...->hc...", rotary.decoder[:, shared].T.conj(), rotated)
        unrotated = torch.einsum("hij,hj...->hi...", turn, getattr(heads, name))[:, head_dim - nope :]
        zeros = unrotated.new_zeros(len(unrotated), rotary.zeros, *unrotated.shape[2:])
        return torch.cat((unrotated, rotated.real, rotated.imag, zeros), dim=1)

    def key(name: str) -> torch.Tensor:  # (G, D, ...) to (P, ...)
        component = torch.einsum("cg,gc...->c...", rotary.encoder, planes[name][:, rotary.plane])
        return torch.cat((component.real, component.imag, heads.k.new_zeros(rotary.zeros, *component.shape[1:])))

    query_bias, key_value_bias, output_bias = heads.biases
    output_bias = output_bias or key_value_bias or rank < latent.restore[..., 0].numel()
    state = {
        "q_proj.weight": query("q").flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((latent.rows, key("k"))),
        "kv_b_proj.weight": restore.flatten(0, 1),
        "o_proj.weight": heads.o.transpose(0, 1).flatten(1),
        **kept,
    }
    if query_bias:
        state["q_proj.bias"] = query("q_bias").flatten()
    if key_value_bias:
        # A constant in an unrotated key drops out of the softmax; in a value it has gone to the output's bias.
        state["kv_a_proj_with_mqa.bias"] = torch.cat((torch.zeros_like(latent.rows[:, 0]), key("k_bias")))
    if output_bias:
        state["o_proj.bias"] = heads.o_bias + torch.einsum("hed,hd->e", heads.o, latent.offset[shared])
    biases = {"query_bias": query_bias, "key_value_bias": key_value_bias, "output_bias": output_bias}
    fields = {**written_sizes(heads, rotary, rank, nope), **biases, "key_mean": bool(kept)}
    if heads.before_norms is None:
        return state, fields
    from .normed import add_norms

    return add_norms(heads.before_norms, state, fields)


def written_sizes(heads: Heads, rotary: RotaryKey, rank: int, nope: int) -> dict[str, Any]:
    """Return the configuration fields of an MLA layer but its biases, for a latent of size R `rank` and N `nope`."""
    frequencies = torch.cat((heads.frequencies[rotary.plane], heads.frequencies.new_zeros(rotary.zeros // 2)))
    size = 2 * len(frequencies)
    return {
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": size,
        "v_head_dim": heads.k.shape[1],
        "latent_norm": False,
        "rope_interleave": False,
        "softmax_scale": heads.scaling,
        **rotary_fields(frequencies, heads.frequency_dim, size),
    }


def _real_matrix(planes: torch.Tensor, size: int) -> torch.Tensor:
    """Return matrices (H, D, D) that multiply each plane by its complex number in `planes` (H, n) and keep the rest."""
    n, index = planes.shape[1], torch.arange(planes.shape[1], device=planes.device)
    matrix = torch.eye(size, dtype=planes.real.dtype, device=planes.device).repeat(len(planes), 1, 1)
    matrix[:, index, index] = matrix[:, index + n, index + n] = planes.real
    matrix[:, index, index + n], matrix[:, index + n, index] = -planes.imag, planes.imag
    return matrix


def shared_latent(
    heads: Heads, moments: Moments, keys: torch.Tensor, key_metric: torch.Tensor, rank: int, alpha: float
) -> tuple[Latent, float]:
    """Return the latent of `rank` components that loses least of keys and values, and its loss with alpha 1.

    Args:
        heads: the layer's weights.
        moments: of the layer.
        keys: (G, N, E) unrotated keys.
        key_metric: (G, N, N) their metric.
        rank: size R of the latent.
        alpha: weight of the keys' errors against the values'.
    """
    groups, nope, _ = keys.shape
    rows = torch.cat((keys, heads.v), dim=1)  # (G, N + V, E)
    roots = zip(alpha * square_root(key_metric, DAMPING), moments.value_root, strict=True)
    root = torch.stack([torch.block_diag(*pair) for pair in roots])  # (G, N + V, N + V)
    weighed = (root @ rows).flatten(0, 1)  # (G (N + V), E)
    values, vectors = leading_vectors(weighed, moments.input_covariance, rank)
    power = moments.value_covariance.flatten(2).flatten(0, 1).diagonal().mean()
    factor = (power / values.clamp(min=1e-12 * values.max())).sqrt()
    compress = factor[:, None] * (vectors.T @ weighed)  # (R, E)
    restore = torch.linalg.solve(root, vectors.unflatten(0, (groups, -1))) / factor  # (G, N + V, R)

    left = rows - restore @ compress
    errors = left @ moments.input_covariance @ left.mT  # (G, N + V, N + V)
    lost = (errors[:, :nope, :nope] * key_metric).sum() + (errors[:, nope:, nope:] * moments.value_metric).sum()
    brought = restore[:, nope:] @ (compress @ moments.input_mean)
    missing = rank - compress.shape[0]  # components beyond what there is to hold
    pad = torch.nn.functional.pad
    rows, restore = pad(compress, (0, 0, 0, missing)), pad(restore, (0, missing))
    return Latent(rows, restore, moments.value_offset - brought), lost.item()


def leading_vectors(rows: torch.Tensor, covariance: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `rank` largest eigenvalues and eigenvectors (M, rank) of rows covariance rows^T for `rows` (M, E)."""
    if len(rows) <= rows.shape[1]:
        values, vectors = torch.linalg.eigh(rows @ covariance @ rows.T)
    else:  # the smaller product has the same eigenvalues
        side = rows @ square_root(covariance)  # (M, E)
        values, vectors = torch.linalg.eigh(side.T @ side)
        vectors = side @ vectors / values.clamp(min=1e-12 * values.max()).sqrt()
    return values[-rank:].flip(0), vectors[:, -rank:].flip(1)
