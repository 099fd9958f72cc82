"""Which heads to merge: equal groups that lose least.

Finding good groups before merging: QCQA (2406.10247), 2412.20677.
"""

import math
from collections.abc import Callable
from itertools import combinations

import torch

from .merging import merging_loss
from .moments import Moments

RANDOM_STARTS = 6
# So many sets of heads are compared exactly; beyond, a group costs what its pairs cost.
EXACT_SETS = 500


def contiguous(heads: int, groups: int) -> list[list[int]]:
    size = heads // groups
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def regrouped(moments: Moments, groups: int, seed: int = 0) -> list[list[int]]:
    """Equal groups of heads that lose least when merged: swaps that help most, from the contiguous groups and from
    random ones."""
    heads = len(moments.key_mean)
    size = heads // groups
    if size == 1 or groups == 1:
        return contiguous(heads, groups)
    known: dict[tuple[int, ...], float] = {}

    def exact(group: list[int]) -> float:
        key = tuple(sorted(group))
        if key not in known:
            known[key] = merging_loss(moments, list(key))
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
    """Swap heads between groups, the best swap first, until none helps."""
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
