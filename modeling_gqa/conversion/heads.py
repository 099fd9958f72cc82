"""Fewer key/value heads: the heads of a group become one, and queries and output take up what can be taken up.

A group of m heads is merged by an encoder and a decoder: per rotary plane the new key is the sum of encoder * z over
the heads and head g's key is restored as decoder_g times it (complex numbers commute with rotation); values, and key
dimensions that are not rotated, use real matrices. Decoders go into the queries and the output. Baselines: mean pooling
(Ainslie et al., 2305.13245), orthogonal alignment before it (2412.20677); `lowrank` keeps the leading subspace of the
group in the metric of the layer's output (low-rank key/value compression: 2406.07056, whitening: 2403.07378).

Shapes: E hidden size, H query heads, G key/value heads, m heads of a group, D head size, n rotary planes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .calibration import square_root
from .matrices import Heads
from .moments import Moments, plane_rows

# Share of the mean eigenvalue that is added to a metric before its root is inverted.
DAMPING = 1e-4


@dataclass(frozen=True)
class Merge:
    """How a group's m heads become one: `keys` and `key_decoder` (n, m) complex; `rest` (D - 2 n, m, D - 2 n) and
    `rest_decoder` (m, D - 2 n, D - 2 n) for unrotated key dimensions; `values` (D, m, D), `value_decoder` (m, D, D)."""

    keys: torch.Tensor
    key_decoder: torch.Tensor
    rest: torch.Tensor
    rest_decoder: torch.Tensor
    values: torch.Tensor
    value_decoder: torch.Tensor


# -- methods: (moments, the group's heads) -> Merge


def choose(moments: Moments, group: list[int], share: torch.Tensor) -> Merge:
    """The average of the heads in shares (m,), read by all queries as it is."""
    size, n = moments.key_mean.shape[1], moments.planes
    identity = torch.eye(size, dtype=share.dtype, device=share.device)
    rest = identity[: size - 2 * n, : size - 2 * n]
    planes = share.expand(n, -1).to(torch.complex128)
    return Merge(
        planes,
        torch.ones_like(planes),
        torch.einsum("m,ij->imj", share, rest),
        rest.expand(len(group), -1, -1),
        torch.einsum("m,ij->imj", share, identity),
        identity.expand(len(group), -1, -1),
    )


def mean(moments: Moments, group: list[int]) -> Merge:
    return choose(moments, group, moments.key_mean.new_full((len(group),), 1 / len(group)))


def first(moments: Moments, group: list[int]) -> Merge:
    share = moments.key_mean.new_zeros(len(group))
    share[0] = 1
    return choose(moments, group, share)


def procrustes(moments: Moments, group: list[int]) -> Merge:
    """The mean of the heads after each is turned towards it: planes by a phase, values by an orthogonal matrix."""
    count, n = len(group), moments.planes
    phases = align_phases(key_planes(moments, group))
    values = align(block(moments.value_covariance, group))
    rest = align(block(moments.key_covariance[:, 2 * n :, :, 2 * n :], group))
    return Merge(
        phases / count,
        phases.conj(),
        rest.transpose(0, 1) / count,
        rest.mT,
        values.transpose(0, 1) / count,
        values.mT,
    )


def align_phases(covariance: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Phases (n, m) that turn the heads of `covariance` (n, m, m) towards their mean, found by iteration."""
    phases = torch.ones(covariance.shape[:2], dtype=torch.complex128, device=covariance.device)
    for _ in range(rounds):
        towards = torch.einsum("nij,nj->ni", covariance, phases.conj())  # E[z_i conj(mean)]
        phases = torch.where(towards.abs() > 0, torch.polar(torch.ones_like(towards.abs()), -towards.angle()), phases)
    return phases


def align(covariance: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Orthogonal matrices (m, D, D) that turn vectors of `covariance` (m, D, m, D) towards their mean, by iteration."""
    count, size = covariance.shape[:2]
    turns = torch.eye(size, dtype=covariance.dtype, device=covariance.device).repeat(count, 1, 1)
    for _ in range(rounds if size else 0):
        for j in range(count):
            towards = torch.einsum("iab,ibc->ac", turns, covariance[:, :, j])  # E[sum of the turned, v_j^T]
            u, _, vh = torch.linalg.svd(towards)
            turns[j] = u @ vh
    return turns


def lowrank(moments: Moments, group: list[int]) -> Merge:
    """The leading component of each plane and the leading subspace of the values, in the output's metric."""
    n = moments.planes
    keys, key_decoder = leading_component(key_planes(moments, group), moments.plane_weight[group].mT)
    rest, rest_decoder = leading_subspace(
        block(moments.key_covariance[:, 2 * n :, :, 2 * n :], group), moments.key_metric[group][:, 2 * n :, 2 * n :]
    )
    values, value_decoder = leading_subspace(block(moments.value_covariance, group), moments.value_metric[group])
    return Merge(keys, key_decoder, rest, rest_decoder, values, value_decoder)


MERGES: dict[str, Callable[[Moments, list[int]], Merge]] = {
    "mean": mean,
    "first": first,
    "random": mean,  # shapes only: keys and values are drawn afterwards
    "procrustes": procrustes,
    "lowrank": lowrank,
}


def leading_component(covariance: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoder and decoder (n, m) of one complex component that lose least of `covariance` (n, m, m) under `weight`
    (n, m); the loss is the sum of the other eigenvalues. The component gets the heads' mean power."""
    root = weight.sqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * covariance * root[:, None, :])
    leading = vectors[..., -1]
    power = covariance.diagonal(dim1=1, dim2=2).real.mean(-1)
    factor = (power / values[:, -1].clamp(min=torch.finfo(values.dtype).tiny)).sqrt()[:, None]
    return leading.conj() * root * factor, leading / root / factor


def leading_subspace(covariance: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoder (D, m, D) and decoder (m, D, D) of D components that lose least of `covariance` (m, D, m, D) under the
    block-diagonal `metric` (m, D, D); every component gets the heads' mean power."""
    count, size = covariance.shape[:2]
    if not size:
        return covariance.new_zeros(0, count, 0), metric
    root = square_root(metric, DAMPING)
    values, vectors = torch.linalg.eigh(weigh(covariance, root).reshape(count * size, -1))
    leading = vectors[:, count * size - size :].unflatten(0, (count, size))  # (m, D, D)
    power = covariance.reshape(count * size, -1).diagonal().mean()
    kept = values[count * size - size :]
    factor = (power / kept.clamp(min=1e-12 * kept[-1])).sqrt()
    encoder = torch.einsum("mic,mij->cmj", leading, root) * factor[:, None, None]
    return encoder, torch.linalg.solve(root, leading) / factor


def weigh(covariance: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """`covariance` (m, D, m, D) of what the blocks of `root` (m, D, D) make of each head."""
    return torch.einsum("aij,ajbk,blk->aibl", root, covariance, root)


def block(covariance: torch.Tensor, group: list[int]) -> torch.Tensor:
    return covariance[group][:, :, group]


def key_planes(moments: Moments, group: list[int]) -> torch.Tensor:
    """What a group's planes (n, m, m) must keep: their covariance, and of their mean what rotation does not cancel."""
    mean, varies = moments.plane_mean()[:, group], 1 - moments.rotation.mean(0).abs().pow(2)
    constant = varies[:, None, None] * mean[:, :, None] * mean[:, None, :].conj()
    return moments.plane_covariance()[:, group][:, :, group] + constant


# -- the conversion itself


def merge_heads(
    heads: Heads,
    moments: Moments,
    partition: list[list[int]],
    method: str,
    output_bias: bool,
    std: float = 0.02,
    seed: int = 0,
) -> tuple[Heads, float | None]:
    """Grouped attention with a key/value head for each group of `partition`, whose query heads move with it.

    Args:
        method: a key of MERGES; "random" draws keys and values anew with standard deviation `std`.
        output_bias: the result may have one: it takes up the mean of what the values lose.

    Returns:
        The heads, and the mean squared error of keys and values in the metric of the output (`None` for "random").
    """
    if len(partition[0]) == 1:
        return permuted(heads, partition), 0.0
    merge_group = MERGES[method]
    if heads.q_norm is not None and method in ("lowrank", "procrustes"):
        heads, merge_group = balanced_norms(heads, moments.key_scale), merge_with_norm(merge_group)
    merges = [merge_group(moments, group) for group in partition]
    loss: float | None = sum(
        merging_error(moments, group, merge) for group, merge in zip(partition, merges, strict=True)
    )
    parts = [_merge_group(heads, moments, group, merge) for group, merge in zip(partition, merges, strict=True)]
    fields: dict[str, Any] = {
        name: torch.cat([part[name] for part in parts]) for name in ("q", "q_bias", "k", "k_bias", "v", "v_bias", "o")
    }
    if method == "random":
        generator = torch.Generator().manual_seed(seed)  # the processor's, for the same numbers on every device
        for name in ("k", "v"):
            drawn = torch.randn(fields[name].shape, generator=generator, dtype=torch.float64)
            fields[name] = std * drawn.to(heads.k.device)
            fields[f"{name}_bias"] = torch.zeros_like(fields[f"{name}_bias"])
        loss = None
    biases = (*heads.biases[:2], heads.biases[2] or output_bias)
    lost = sum(part["lost"] for part in parts) if output_bias and method == "lowrank" else 0
    return replace(heads, **fields, o_bias=heads.o_bias + lost, biases=biases), loss


def merging_error(moments: Moments, group: list[int], merge: Merge) -> float:
    """The mean squared error of a group's keys and values after `merge`, in the metric of the layer's output; for
    `lowrank` that is the sum of the eigenvalues it drops."""
    n, count = moments.planes, len(group)
    kept = torch.einsum("na,nb->nab", merge.key_decoder, merge.keys)  # (n, m, m)
    lost = torch.eye(count, device=kept.device) - kept
    keys = lost @ key_planes(moments, group) @ lost.mH
    error = (keys.diagonal(dim1=1, dim2=2).real * moments.plane_weight[group].mT).sum()
    for covariance, metric, encoder, decoder in (
        (moments.value_covariance, moments.value_metric, merge.values, merge.value_decoder),
        (
            moments.key_covariance[:, 2 * n :, :, 2 * n :],
            moments.key_metric[:, 2 * n :, 2 * n :],
            merge.rest,
            merge.rest_decoder,
        ),
    ):
        size = metric.shape[-1]
        lost = torch.eye(count * size, dtype=metric.dtype, device=metric.device).view(count, size, count, size)
        lost = lost - torch.einsum("aij,jbk->aibk", decoder, encoder)
        left = torch.einsum("aibk,bkcl,djcl->aidj", lost, block(covariance, group), lost)
        error = error + torch.einsum("aiaj,aij->", left, metric[group])
    return float(error)


def permuted(heads: Heads, partition: list[list[int]]) -> Heads:
    """The same function with its key/value heads in another order."""
    order = torch.tensor([group[0] for group in partition], device=heads.k.device)
    queries = torch.arange(len(heads.q), device=heads.k.device).view(-1, heads.groups)[order].flatten()
    fields: dict[str, Any] = {name: getattr(heads, name)[order] for name in ("k", "k_bias", "v", "v_bias")}
    return replace(heads, **fields, **{name: getattr(heads, name)[queries] for name in ("q", "q_bias", "o")})


def _merge_group(heads: Heads, moments: Moments, group: list[int], merge: Merge) -> dict[str, torch.Tensor]:
    n = heads.planes
    queries = [query for head in group for query in range(head * heads.groups, (head + 1) * heads.groups)]
    decoder = merge.key_decoder.repeat_interleave(heads.groups, dim=1).T  # (queries, n)
    rest_decoder = merge.rest_decoder.repeat_interleave(heads.groups, dim=0)
    value_decoder = merge.value_decoder.repeat_interleave(heads.groups, dim=0)

    def key(x: torch.Tensor) -> torch.Tensor:  # (G, D, ...) to (1, D, ...)
        planes = torch.einsum("nm,mn...->n...", merge.keys, plane_rows(x[group], n))
        rest = torch.einsum("imj,mj...->i...", merge.rest, x[group][:, 2 * n :])
        return torch.cat((planes.real, planes.imag, rest))[None]

    def query(x: torch.Tensor) -> torch.Tensor:  # (H, D, ...) to (queries, D, ...)
        planes = torch.einsum("hn,hn...->hn...", decoder.conj(), plane_rows(x[queries], n))
        rest = torch.einsum("hji,hj...->hi...", rest_decoder, x[queries][:, 2 * n :])
        return torch.cat((planes.real, planes.imag, rest), dim=1)

    def value(x: torch.Tensor) -> torch.Tensor:  # (G, D, ...) to (1, D, ...)
        return torch.einsum("imj,mj...->i...", merge.values, x[group])[None]

    output = heads.o[queries]  # (queries, E, D)
    lost = moments.value_offset[group] - merge.value_decoder @ value(moments.value_offset)[0]  # (m, D)
    return {
        "q": query(heads.q),
        "q_bias": query(heads.q_bias),
        "k": key(heads.k),
        "k_bias": key(heads.k_bias),
        "v": value(heads.v),
        "v_bias": value(heads.v_bias),
        "o": output @ value_decoder,
        "lost": torch.einsum("hed,hd->e", output, lost.repeat_interleave(heads.groups, dim=0)),
    }


def balanced_norms(heads: Heads, key_scale: torch.Tensor) -> Heads:
    """Each plane's two norm weights set to their root mean square, so that the plane may be turned, and keys (G, D, E)
    scaled as their norm does, so that no head outweighs another by a size that the norm takes away again."""
    n = heads.planes

    def balanced(weight: torch.Tensor) -> torch.Tensor:
        pair = ((weight[:n].square() + weight[n : 2 * n].square()) / 2).sqrt()
        return torch.cat((pair, pair, weight[2 * n :]))

    return replace(
        heads,
        k=heads.k * key_scale[:, None, None],
        k_bias=heads.k_bias * key_scale[:, None],
        q_norm=balanced(heads.q_norm),
        k_norm=balanced(heads.k_norm),
    )


def merge_with_norm(merge_group: Callable[[Moments, list[int]], Merge]) -> Callable[[Moments, list[int]], Merge]:
    """The method's values, but keys that an RMSNorm on each head lets through: turned by phases, then averaged."""

    def merge(moments: Moments, group: list[int]) -> Merge:
        phases, average = align_phases(key_planes(moments, group)), mean(moments, group)
        values = merge_group(moments, group)
        return replace(
            values,
            keys=phases / len(group),
            key_decoder=phases.conj(),
            rest=average.rest,
            rest_decoder=average.rest_decoder,
        )

    return merge
