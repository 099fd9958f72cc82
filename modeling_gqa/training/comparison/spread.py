"""How far runs that differ in the seed alone part."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Spread:
    """How far runs that differ in the seed alone part.

    Args:
        deviation: standard deviation of a run; nan where no model has two.
        freedom: degrees of freedom of the deviation: runs less models.
    """

    deviation: float
    freedom: int

    def margin(self, errors: float) -> float:
        """Return half of the 95 % interval, by Student's t, of a number whose standard error is `errors` deviations."""
        return float(stats.t.ppf(0.975, self.freedom)) * self.deviation * errors if self.freedom else math.nan


def pooled(samples: Iterable[Sequence[float]]) -> Spread:
    """Return the spread over seeds, pooled over models."""
    groups = [found for found in samples if len(found) > 1]
    freedom = sum(len(found) - 1 for found in groups)
    squares = sum(statistics.variance(found) * (len(found) - 1) for found in groups)
    return Spread(math.sqrt(squares / freedom) if freedom else math.nan, freedom)
