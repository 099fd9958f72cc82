"""Fewer key/value heads: those of a group become one, and queries and output take up what can be taken up.

Shapes: E hidden size, H query heads, G key/value heads, m heads of a group, D head size, n rotary planes.
"""

from dataclasses import replace
from typing import Any

import torch

from .matrices import Heads
from .merging import MERGES, Merge, merge_with_norm, merging_error
from .moments import Moments, plane_rows


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
