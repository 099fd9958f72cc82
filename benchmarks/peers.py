"""The published conversions to MLA, written from their papers: TransMLA (2502.07864) and MHA2MLA (2502.14837).

Both keep the rotation of some components of the keys, drop that of all others, and put these and the values into a
latent of low rank. TransMLA finds the components by PCA of the keys over heads and neighbouring frequencies (RoRoPE,
section 4.2, with FreqFold, appendix C) and the latent by PCA of balanced keys and values (section 4.3). MHA2MLA keeps
each head's planes of largest 2-norm (section 3.1), and its latent is the truncated SVD of the weights (section 3.2).

Checked on SmolLM2-135M-Instruct against their authors' code, in KL of the same text: TransMLA at R + P = 64 + 32 1.3690
here and 1.3697 there (32k calibration tokens), at 128 + 64 0.872 and 0.869; MHA2MLA at 168 + 24 4.996 and 4.998, at
72 + 24 6.743 and 6.755 (2k tokens).

Shapes: E hidden size, H query heads, G key/value heads, D head size, n rotary planes (dimensions i and i + n of a
head), R latent size, P rotary size, F frequencies of a fold, K = G D - P unrotated key components.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from modeling_gqa import GQAForCausalLM
from modeling_gqa.common.batches import MODEL_INPUTS, Batch, evaluating, hooks
from modeling_gqa.conversion import target_config
from modeling_gqa.conversion.layers.heads import Heads, read_heads, rotary_fields
from modeling_gqa.conversion.layers.latent import leading_vectors
from modeling_gqa.conversion.layers.moments import Statistics
from modeling_gqa.conversion.sequential import State, assemble
from modeling_gqa.conversion.targets import Fields, configuration, layer_fields
from modeling_gqa_cli.errors import UserError

from .layerwise import collect


@dataclass(frozen=True)
class PartialRope:
    """Two orthonormal sets of components of a layer's keys k (G D): those that stay rotated, and the others.

    Args:
        rotated: (P, G D) makes the rotary key; component c is the plane of the rows c and c + P / 2.
        plane: (P / 2,) index of the rotary plane of a head with whose frequency each component turns.
        unrotated: (K, G D) makes the other components.
    """

    rotated: torch.Tensor
    plane: torch.Tensor
    unrotated: torch.Tensor


@dataclass(frozen=True)
class LowRank:
    """A latent of keys and values.

    Args:
        rows: (R, E + 1) make the latent from the layer's input and a constant 1.
        keys: (K, R) restore the unrotated components of the keys.
        values: (G D, R) restore the values.
        offset: (G D,) what the values have besides; the output's bias adds it.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    offset: torch.Tensor


# -- the two methods


@torch.no_grad()
def transmla(
    model: GQAForCausalLM, batches: Sequence[Batch], rank: int, rope_size: int, freqfold: int = 4
) -> GQAForCausalLM:
    """Convert every layer to MLA as TransMLA does, without training.

    Args:
        model: grouped attention without qk_norm.
        batches: calibration text; it goes through the source for RoRoPE, and through the model without the dropped
            rotations for the latent.
        rank: size R of the latent.
        rope_size: size P of the rotary key.
        freqfold: frequencies F that share one PCA.
    """
    parts = {
        index: rorope(plain_heads(model, index), seen, rope_size, freqfold)
        for index, seen in collect(model, batches, first_share=0.0)
    }
    sources = ((plain_heads(model, index), part) for index, part in parts.items())
    derotated = assembled(model, ((heads, part, unreduced(heads, part)) for heads, part in sources))
    seen_there = (
        (plain_heads(model, index), parts[index], seen) for index, seen in collect(derotated, batches, first_share=0.0)
    )
    return assembled(
        model, ((heads, part, balanced_latent(heads, part, seen, rank)) for heads, part, seen in seen_there)
    )


@torch.no_grad()
def mha2mla(model: GQAForCausalLM, batches: Sequence[Batch], rank: int, rope_size: int) -> GQAForCausalLM:
    """Convert every layer to MLA as MHA2MLA does, without training.

    Args:
        model: grouped attention without qk_norm.
        batches: text on which the 2-norms of the planes are taken; the rest is decided by the weights.
        rank: size R of the latent.
        rope_size: size P of the rotary key, P / G dimensions of each key/value head.
    """
    sources = ((plain_heads(model, index), norms) for index, norms in enumerate(plane_norms(model, batches)))
    parts = ((heads, largest_planes(heads, norms, rope_size)) for heads, norms in sources)
    return assembled(model, ((heads, part, weight_latent(heads, part, rank)) for heads, part in parts))


def plain_heads(model: GQAForCausalLM, index: int) -> Heads:
    """Return layer `index` of `model`; raises `UserError` where its heads are normed or not grouped attention."""
    if model.config.per_layer_config[index].attention_kind == "mla":
        raise UserError(f"layer {index} is MLA, and these methods convert grouped attention")
    heads = read_heads(model, index)
    if heads.q_norm is not None:
        raise UserError("qk_norm=True: neither TransMLA nor MHA2MLA converts normed heads")
    return heads


def assembled(model: GQAForCausalLM, layers: Iterable[tuple[Heads, PartialRope, LowRank]]) -> GQAForCausalLM:
    """Return `model` with each layer written from its weights, its partial rotation and its latent."""
    states: dict[int, State] = {}
    found: list[Fields] = []
    for index, (heads, partial, low) in enumerate(layers):
        state, layer = write_layer(heads, partial, low)
        states[index] = {name: tensor.to(model.dtype).contiguous() for name, tensor in state.items()}
        found.append(layer)
    sizes = {name: found[0][name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
    target = target_config(model.config, "mla", **sizes)
    fields = [{**before, **layer} for before, layer in zip(layer_fields(target), found, strict=True)]
    return assemble(model, configuration(target, fields), states)


# -- TransMLA


def rorope(heads: Heads, seen: Statistics, size: int, freqfold: int) -> PartialRope:
    """Return the leading components of the keys, `size` / 2 spread evenly over the folds of `freqfold` frequencies.

    A fold's G F planes are turned by the eigenvectors of E[Re z Re z^T + Im z Im z^T], real, so that at F = 1 rotation
    commutes with it (equation 19). Of a fold's F frequencies its kept components take evenly spaced ones, the component
    of most variance the fastest.
    """
    n, groups, head_dim = heads.planes, len(heads.k), heads.k.shape[1]
    if n % freqfold:
        raise UserError(f"freqfold={freqfold} does not divide the {n} rotary planes of a head")
    folds = n // freqfold
    kept, rest = divmod(size // 2, folds)
    if size % 2 or rest or not 0 < kept <= groups * freqfold or (kept % freqfold and freqfold % kept):
        raise UserError(
            f"qk_rope_head_dim={size} does not give {folds} folds of {freqfold} frequencies an equal number of "
            "components each that divides them, or is a multiple of them"
        )
    planes = augmented(heads.k, heads.k_bias)[:, : 2 * n].unflatten(1, (2, folds, freqfold))  # (G, 2, n / F, F, E + 1)
    parts = planes.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (2, n / F, G F, E + 1), the real and the imaginary
    vectors = torch.linalg.eigh((parts @ augmented_second(seen) @ parts.mT).sum(0))[1].flip(2)  # (n / F, G F, G F)
    basis = vectors.new_zeros(folds, groups * freqfold, groups, folds, freqfold)
    for fold in range(folds):
        basis[fold, :, :, fold] = vectors[fold].mT.unflatten(1, (groups, freqfold))
    basis = basis.flatten(3)  # (n / F, G F, G, n), components over the planes of all heads
    component = torch.arange(kept)
    turning = component * freqfold // kept if kept <= freqfold else component % freqfold
    plane = (torch.arange(folds)[:, None] * freqfold + turning).flatten()
    rotated, dropped = (_complex_rows(part.flatten(0, 1), head_dim) for part in basis.tensor_split((kept,), dim=1))
    never = torch.block_diag(*[torch.eye(head_dim)[2 * n :].to(basis)] * groups)  # dimensions that no plane has
    return PartialRope(rotated, plane, torch.cat((dropped, never)))


def _complex_rows(basis: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows (2 C, G D) of the real and then the imaginary parts of components `basis` (C, G, n) of planes."""
    pad, n = torch.nn.functional.pad, basis.shape[2]
    return torch.cat([pad(basis, (start, head_dim - n - start)) for start in (0, n)]).flatten(1)


def unreduced(heads: Heads, partial: PartialRope) -> LowRank:
    """Return a latent that holds all unrotated key components and all values, or the input where that is smaller."""
    rows, hidden = torch.cat((partial.unrotated @ _keys(heads), _values(heads))), heads.k.shape[2]  # (K + G D, E + 1)
    kept = len(partial.unrotated)
    if len(rows) <= hidden:
        restore = torch.eye(len(rows)).to(rows)
        return LowRank(rows, restore[:kept], restore[kept:], torch.zeros_like(rows[kept:, 0]))
    # What is constant in an unrotated key drops out of the softmax.
    down = torch.eye(hidden, hidden + 1).to(rows)
    return LowRank(down, rows[:kept, :-1], rows[kept:, :-1], rows[kept:, -1])


def balanced_latent(heads: Heads, partial: PartialRope, seen: Statistics, rank: int) -> LowRank:
    """Return the latent by PCA of keys, scaled so that their dimensions have the values' mean norm, and values.

    Norms are roots of means over tokens, averaged over dimensions; statistics are second moments, means included.
    """
    keys, values, second = partial.unrotated @ _keys(heads), _values(heads), augmented_second(seen)
    norms = [((rows @ second) * rows).sum(1).clamp(min=0).sqrt() for rows in (keys, values)]
    ratio = norms[0].mean() / norms[1].mean() if len(keys) else torch.ones(()).to(second)
    rows = torch.cat((keys / ratio, values))
    _, vectors = leading_vectors(rows, second, rank)  # (K + G D, R)
    vectors = torch.nn.functional.pad(vectors, (0, rank - vectors.shape[1]))  # beyond what there is to hold
    return LowRank(vectors.T @ rows, ratio * vectors[: len(keys)], vectors[len(keys) :], torch.zeros_like(norms[1]))


# -- MHA2MLA


def plane_norms(model: GQAForCausalLM, batches: Iterable[Batch]) -> list[torch.Tensor]:
    """Return for each layer the planes' mean norm of queries times that of keys, summed over a group's queries: (G, n).

    Means are over the tokens that are not padding.
    """
    sums: dict[tuple[int, str], torch.Tensor] = {}
    kept: torch.Tensor

    def see(index: int, name: str, heads: int, planes: int):
        def add(module: torch.nn.Module, arguments: tuple, output: torch.Tensor) -> None:
            rows = output[kept].float().unflatten(-1, (heads, -1))  # (tokens, heads, D)
            norms = torch.stack((rows[..., :planes], rows[..., planes : 2 * planes])).norm(dim=0)
            sums[index, name] = sums.get((index, name), 0) + norms.sum(0, dtype=torch.float64)

        return add

    handles, tokens = [], 0
    for index, layer in enumerate(model.model.layers):
        heads = plain_heads(model, index)
        for name, number in (("q_proj", len(heads.q)), ("k_proj", len(heads.k))):
            see_output = see(index, name, number, heads.planes)
            handles.append(getattr(layer.self_attn, name).register_forward_hook(see_output))
    with hooks(*handles), evaluating(model):
        for batch in batches:
            inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            tokens += int(kept.sum())
            model.model(**inputs, use_cache=False)
    if not tokens:
        raise UserError("the calibration text is empty")
    pairs = [(sums[i, "q_proj"] / tokens, sums[i, "k_proj"] / tokens) for i in range(len(model.model.layers))]
    return [query.unflatten(0, (len(key), -1)).sum(1) * key for query, key in pairs]


def largest_planes(heads: Heads, norms: torch.Tensor, size: int) -> PartialRope:
    """Return the planes with the largest `norms` (G, n), `size` / G dimensions of each key/value head."""
    n, groups, head_dim = heads.planes, len(heads.k), heads.k.shape[1]
    kept, rest = divmod(size, 2 * groups)
    if rest or not 0 < kept <= n:
        raise UserError(f"qk_rope_head_dim={size} does not give {groups} key/value heads equal numbers of planes")
    plane = norms.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(dim=1).values  # (G, P / 2 G)
    first = (plane + head_dim * torch.arange(groups, device=plane.device)[:, None]).flatten()
    rotated, every = torch.cat((first, first + n)), torch.eye(groups * head_dim).to(heads.k)
    others = torch.ones(groups * head_dim, dtype=torch.bool, device=plane.device)
    others[rotated] = False
    return PartialRope(every[rotated], plane.flatten(), every[others])


def weight_latent(heads: Heads, partial: PartialRope, rank: int) -> LowRank:
    """Return the latent by one truncated SVD of the weights of unrotated keys and of values."""
    keys, values = partial.unrotated @ heads.k.flatten(0, 1), heads.v.flatten(0, 1)
    down, up = truncated_svd(torch.cat((keys, values)), rank)
    down = torch.nn.functional.pad(down, (0, 1))  # biases are kept aside
    return LowRank(down, up[: len(keys)], up[len(keys) :], heads.v_bias.flatten())


def truncated_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `down` (rank, columns) and `up` (rows, rank), whose product up down is nearest to `matrix`."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    missing, pad = max(rank - len(values), 0), torch.nn.functional.pad
    return pad(right[:rank], (0, 0, 0, missing)), pad((left * values)[:, :rank], (0, missing))


# -- both


def write_layer(heads: Heads, partial: PartialRope, low: LowRank) -> tuple[State, Fields]:
    """Return the parameters of a `LatentAttention` and the configuration fields that its layer needs.

    Queries are not reduced: each head's unrotated query is its source's, and its rotary one the components of its key.
    """
    groups, head_dim, shared = len(heads.k), heads.k.shape[1], heads.key_heads
    size, rank = len(partial.rotated), len(low.rows)
    decoder = partial.rotated.unflatten(1, (groups, head_dim))[:, shared]  # (P, H, D)
    queries = augmented(heads.q, heads.q_bias)  # (H, D, E + 1)
    # Rotation would have scaled query and key.
    queries = torch.cat((queries * heads.rotary_scaling**2, torch.einsum("phd,hde->hpe", decoder, queries)), dim=1)
    down = torch.cat((low.rows, partial.rotated @ _keys(heads)))  # (R + P, E + 1)
    restored = torch.stack((partial.unrotated.T @ low.keys, low.values))  # (2, G D, R)
    restored = restored.unflatten(1, (groups, head_dim)).transpose(0, 1).flatten(1, 2)  # (G, 2 D, R)
    query_bias, key_value_bias, output_bias = heads.biases
    output_bias = output_bias or bool(low.offset.any())
    state = {
        "q_proj.weight": queries[..., :-1].flatten(0, 1),
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_b_proj.weight": restored[shared].flatten(0, 1),
        "o_proj.weight": heads.o.transpose(0, 1).flatten(1),
    }
    if query_bias:
        state["q_proj.bias"] = queries[..., -1].flatten()
    if key_value_bias:
        state["kv_a_proj_with_mqa.bias"] = down[:, -1]
    if output_bias:
        offset = low.offset.unflatten(0, (groups, head_dim))[shared]
        state["o_proj.bias"] = heads.o_bias + torch.einsum("hed,hd->e", heads.o, offset)
    return state, {
        "head_dim": size,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": size,
        "qk_head_dim": head_dim + size,
        "v_head_dim": head_dim,
        "latent_norm": False,
        "rope_interleave": False,
        "softmax_scale": heads.scaling,
        "query_bias": query_bias,
        "key_value_bias": key_value_bias,
        "output_bias": output_bias,
        **rotary_fields(heads.frequencies[partial.plane], heads.frequency_dim, size),
    }


def augmented(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return rows (..., E + 1) of `weight` (..., E) and, for an input of constant 1, `bias` (...)."""
    return torch.cat((weight, bias[..., None]), dim=-1)


def augmented_second(seen: Statistics) -> torch.Tensor:
    """Return the mean (E + 1, E + 1) of x x^T for the layer's input with a 1 appended."""
    second = torch.nn.functional.pad(seen.second, (0, 1, 0, 1), value=1.0)
    second[:-1, -1] = second[-1, :-1] = seen.mean
    return second


def _keys(heads: Heads) -> torch.Tensor:
    """Return the rows (G D, E + 1) of all keys."""
    return augmented(heads.k, heads.k_bias).flatten(0, 1)


def _values(heads: Heads) -> torch.Tensor:
    """Return the rows (G D, E + 1) of all values."""
    return augmented(heads.v, heads.v_bias).flatten(0, 1)
