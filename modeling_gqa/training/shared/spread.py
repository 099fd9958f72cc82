"""Means over seeds, and when two of them differ."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from ...common.errors import listed

# Student's t by degrees of freedom, from 1: 95 % of its distribution lie within plus and minus these.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


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


@dataclass(frozen=True)
class Spread:
    """How far runs that differ in the seed alone part.

    Args:
        deviation: standard deviation of a run; nan where no model has two.
        freedom: degrees of freedom of the deviation: runs less models.
    """

    deviation: float
    freedom: int

    @property
    def quantile(self) -> float:
        """Standard errors that 95 % of means lie within, by Student's t; beyond 30 degrees of freedom that of 30."""
        return STUDENT[min(self.freedom, len(STUDENT)) - 1] if self.freedom else math.nan

    def margin(self, errors: float) -> float:
        """Return half of the 95 % interval of a number whose standard error is `errors` times the deviation."""
        return self.quantile * self.deviation * errors

    def differ(self, one: Sample, other: Sample) -> bool:
        """Return whether two means are further apart than the margin of their difference; without a spread none are."""
        return abs(one.mean - other.mean) > self.margin(math.sqrt(1 / len(one.values) + 1 / len(other.values)))


def pooled(samples: Iterable[Sequence[float]]) -> Spread:
    """Return the spread over seeds, pooled over models.

    Example:
        ```python
        from modeling_gqa.training.shared.spread import pooled

        found = pooled([[1.0, 3.0], [5.0, 7.0], [4.0]])
        assert (found.deviation, found.freedom, found.quantile) == (2**0.5, 2, 4.303)
        ```
    """
    groups = [found for found in samples if len(found) > 1]
    freedom = sum(len(found) - 1 for found in groups)
    squares = sum(statistics.variance(found) * (len(found) - 1) for found in groups)
    return Spread(math.sqrt(squares / freedom) if freedom else math.nan, freedom)


def agreement(order: Sequence[Sample], spread: Spread) -> str:
    """Return whether means rise in a published order, as far as the spread of seeds lets one tell."""
    if not spread.freedom:
        return "with one seed each no order can be told"
    told = [pair for pair in combinations(order, 2) if spread.differ(*pair)]
    against = [
        f"{later.name} has a lower loss than {earlier.name}" for earlier, later in told if later.mean < earlier.mean
    ]
    if against:
        return f"the order does not agree: {listed(against, 'and')}"
    if not told:
        return "the spread of the seeds lets no order be told"
    apart = all(spread.differ(*pair) for pair in pairwise(order))
    return "the order agrees" if apart else "the order agrees as far as the spread of the seeds lets one tell"
