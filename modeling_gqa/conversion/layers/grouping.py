"""Fewer key/value heads: which heads form a group, and the layer's weights after each group has become one head.

Finding good groups before merging: QCQA (2406.10247), 2412.20677.
Shapes: E hidden size, H query heads, G key/value heads, m heads of a group, D head size, n rotary planes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from .heads import Heads
from .merging import MERGES, Group, Merge, merging_error, with_norm
from .moments import Moments

RANDOM_STARTS = 6
# With at most this number of possible groups, the loss of each is computed; with more, it is estimated as the sum of
# the losses of a group's pairs.
EXACT_SETS = 500


def contiguous(heads: int, groups: int) -> list[list[int]]:
    """Return `groups` groups of neighbouring heads."""
    size = heads // groups
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def regrouped(moments: Moments, groups: int, seed: int = 0) -> list[list[int]]:
    """Return `groups` equal groups of heads that lose least by a `lowrank` merge, found by swapping heads.

    The search starts from the neighbouring heads and from `RANDOM_STARTS` random groupings.
    """
    heads = len(moments.mean_key)
    size = heads // groups
    if groups == 1:
        return contiguous(heads, groups)
    known: dict[tuple[int, ...], float] = {}

    def exact(group: list[int]) -> float:
        key = tuple(sorted(group))
        if key not in known:
            known[key] = Group.of(moments, list(key)).lowrank_loss()
        return known[key]

    def by_pairs(group: list[int]) -> float:
        return sum(exact([a, b]) for a, b in combinations(group, 2))

    cost = exact if math.comb(heads, size) <= EXACT_SETS else by_pairs
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.arange(heads), *(torch.randperm(heads, generator=generator) for _ in range(RANDOM_STARTS))]
    found = [_swapped(start.view(groups, size).tolist(), cost) for start in starts]
    found.append(contiguous(heads, groups))
    best = min(found, key=lambda partition: sum(map(exact, partition)))
    return sorted(sorted(group) for group in best)


def _swapped(partition: list[list[int]], cost: Callable[[list[int]], float]) -> list[list[int]]:
    """Swap heads between groups, the best swap first, until none lowers the cost."""
    while True:
        costs = [cost(group) for group in partition]
        best, choice = -1e-9 * sum(costs), None
        for a, b in combinations(range(len(partition)), 2):
            for i, x in enumerate(partition[a]):
                for j, y in enumerate(partition[b]):
                    left = [*partition[a][:i], y, *partition[a][i + 1 :]]
                    right = [*partition[b][:j], x, *partition[b][j + 1 :]]
                    gain = cost(left) + cost(right) - costs[a] - costs[b]
                    if gain < best:
                        best, choice = gain, {a: left, b: right}
        if choice is None:
            return partition
        partition = [choice.get(index, group) for index, group in enumerate(partition)]


def merge_heads(
    heads: Heads,
    moments: Moments,
    partition: list[list[int]],
    method: str,
    output_bias: bool,
) -> tuple[Heads, float]:
    """Merge the heads of each group of `partition` into one key/value head, whose query heads move with it.

    Args:
        heads: the layer's weights.
        moments: of the layer.
        partition: groups of indices of key/value heads.
        method: a key of `MERGES`.
        output_bias: whether the result may have an output bias, which takes up the mean of what the values lose.

    Returns:
        The heads, and the mean squared error of keys and values in the metric of the output.
    """
    merge_group = MERGES[method]
    if heads.q_norm is not None and method == "lowrank":
        heads, merge_group = balanced_norms(heads, moments.key_scale), with_norm(merge_group)
    groups = [Group.of(moments, members) for members in partition]
    merges = [merge_group(group) for group in groups]
    errors = [merging_error(group, merge) for group, merge in zip(groups, merges, strict=True)]
    planes = heads.complex_planes
    parts = [
        _merged(heads, planes, moments.value_offset, members, merge)
        for members, merge in zip(partition, merges, strict=True)
    ]
    fields: dict[str, Any] = {
        name: torch.cat([part[name] for part in parts]) for name in ("q", "q_bias", "k", "k_bias", "v", "v_bias", "o")
    }
    biases = (*heads.biases[:2], heads.biases[2] or output_bias)
    lost = sum(part["lost"] for part in parts) if output_bias and method == "lowrank" else 0
    return replace(heads, **fields, o_bias=heads.o_bias + lost, biases=biases), sum(errors)


def _merged(
    heads: Heads, planes: dict[str, torch.Tensor], value_offset: torch.Tensor, members: list[int], merge: Merge
) -> dict[str, torch.Tensor]:
    """Return the weights of one merged head and its query heads, and what its values lose of their mean."""
    rotated, groups = 2 * planes["k"].shape[1], len(heads.q) // len(heads.k)
    queries = [query for head in members for query in range(head * groups, (head + 1) * groups)]
    decoder = merge.key_decoder.repeat_interleave(groups, dim=1).T  # (queries, n)
    rest_decoder = merge.rest_decoder.repeat_interleave(groups, dim=0)
    value_decoder = merge.value_decoder.repeat_interleave(groups, dim=0)

    def key(name: str) -> torch.Tensor:  # (G, D, ...) to (1, D, ...)
        merged = torch.einsum("nm,mn...->n...", merge.keys, planes[name][members])
        rest = torch.einsum("imj,mj...->i...", merge.rest, getattr(heads, name)[members][:, rotated:])
        return torch.cat((merged.real, merged.imag, rest))[None]

    def query(name: str) -> torch.Tensor:  # (H, D, ...) to (queries, D, ...)
        turned = torch.einsum("hn,hn...->hn...", decoder.conj(), planes[name][queries])
        rest = torch.einsum("hji,hj...->hi...", rest_decoder, getattr(heads, name)[queries][:, rotated:])
        return torch.cat((turned.real, turned.imag, rest), dim=1)

    def value(x: torch.Tensor) -> torch.Tensor:  # (G, D, ...) to (1, D, ...)
        return torch.einsum("imj,mj...->i...", merge.values, x[members])[None]

    output = heads.o[queries]  # (queries, E, D)
    lost = value_offset[members] - merge.value_decoder @ value(value_offset)[0]  # (m, D)
    return {
        "q": query("q"),
        "q_bias": query("q_bias"),
        "k": key("k"),
        "k_bias": key("k_bias"),
        "v": value(heads.v),
        "v_bias": value(heads.v_bias),
        "o": output @ value_decoder,
        "lost": torch.einsum("hed,hd->e", output, lost.repeat_interleave(groups, dim=0)),
    }


def balanced_norms(heads: Heads, key_scale: torch.Tensor) -> Heads:
    """Prepare heads behind an RMSNorm for merging.

    Each plane's two norm weights become their root mean square, so that the plane may be turned. Keys are scaled by
    `key_scale` (G,) as their norm does, so that no head outweighs another by a size that the norm takes away again.
    """
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
