"""Means over seeds, and when two of them differ."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from modeling_gqa.common.errors import listed


@dataclass(frozen=True)
class Sample:
    """The losses of one model over seeds.

    Args:
        name: of the model.
        values: losses of the runs that did not fail, at least one.
    """

    name: str
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def pooled_deviation(samples: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation over seeds, pooled over models; nan where no model has two.

    Example:
        ```python
        from modeling_gqa.training.shared.spread import pooled_deviation

        assert pooled_deviation([[1.0, 3.0], [5.0, 7.0], [4.0]]) == 2**0.5
        ```
    """
    groups = [found for found in samples if len(found) > 1]
    freedom = sum(len(found) - 1 for found in groups)
    return math.sqrt(sum(statistics.variance(x) * (len(x) - 1) for x in groups) / freedom) if freedom else math.nan


def spread(one: Sample, other: Sample, deviation: float) -> float:
    """Return how far two means may part by chance: twice the standard error of their difference."""
    return 2 * deviation * math.sqrt(1 / len(one.values) + 1 / len(other.values))


def differ(one: Sample, other: Sample, deviation: float) -> bool:
    """Return whether two means are further apart than their spread; without a spread nothing is."""
    return abs(one.mean - other.mean) > spread(one, other, deviation)


def agreement(order: Sequence[Sample], deviation: float) -> str:
    """Return whether means rise in a published order, as far as the spread of seeds lets one tell."""
    against = [
        f"{later.name} has a lower loss than {earlier.name}"
        for index, earlier in enumerate(order)
        for later in order[index + 1 :]
        if later.mean < earlier.mean and differ(earlier, later, deviation)
    ]
    if against:
        return f"the order does not agree: {listed(against, 'and')}"
    apart = all(differ(*pair, deviation) for pair in pairwise(order))
    return "the order agrees" if apart else "the order agrees as far as the spread of the seeds lets one tell"
