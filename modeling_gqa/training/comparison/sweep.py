"""Which learning rate is best: a parabola through the best three of a sweep, which is extended at its edges."""

import math
from collections.abc import Mapping, Sequence

EXTENSIONS = 4  # rates beyond either edge of those that are asked for, at most


def further_rate(losses: Mapping[float, float], rates: Sequence[float]) -> float | None:
    """Return the rate that a sweep still needs where its best is an edge; `None` where it needs none.

    Args:
        losses: by rate; nan or inf where a run diverged.
        rates: those that were asked for, rising; the new rate continues their last, or first, step.

    Example:
        ```python
        from modeling_gqa.training.comparison.sweep import further_rate

        assert further_rate({1e-3: 3.0, 2e-3: 2.0, 4e-3: 1.0}, [1e-3, 2e-3, 4e-3]) == 8e-3
        assert further_rate({1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5}, [1e-3, 2e-3, 4e-3]) is None
        ```
    """
    best, tried = best_tried(losses), sorted(losses)
    if best is None:
        return None
    if best == tried[-1] and len([rate for rate in tried if rate > rates[-1]]) < EXTENSIONS:
        return rounded(best * rates[-1] / rates[-2])
    if best == tried[0] and len([rate for rate in tried if rate < rates[0]]) < EXTENSIONS:
        return rounded(best * rates[0] / rates[1])
    return None


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Return the vertex of the parabola through the best rate and its neighbours, in the logarithm of the rate.

    Where a neighbour is missing or diverged, it is the best rate itself; `None` where all diverged. The vertex lies
    between the two neighbours, because the middle one is best.

    Example:
        ```python
        from modeling_gqa.training.comparison.sweep import best_rate

        assert best_rate({1e-3: 2.0, 2e-3: 1.0, 4e-3: 2.0}) == 2e-3
        assert best_rate({1e-3: 2.0, 2e-3: 1.0, 4e-3: float("nan")}) == 2e-3
        ```
    """
    best, tried = best_tried(losses), sorted(losses)
    if best is None:
        return None
    place = tried.index(best)
    near = tried[max(0, place - 1) : place + 2]
    if len(near) < 3 or not all(math.isfinite(losses[rate]) for rate in near):
        return best
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(rate / best), losses[rate]) for rate in near)
    curvature = (x1 - x0) * (y1 - y2) - (x1 - x2) * (y1 - y0)
    if curvature == 0:  # all three are alike
        return best
    shift = ((x1 - x0) ** 2 * (y1 - y2) - (x1 - x2) ** 2 * (y1 - y0)) / curvature / 2
    return rounded(math.exp(x1 - shift) * best)


def best_tried(losses: Mapping[float, float]) -> float | None:
    finite = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda rate: losses[rate], default=None)


def rounded(rate: float) -> float:
    """Return a rate in three digits, by which runs are named."""
    return float(f"{rate:.2e}")
