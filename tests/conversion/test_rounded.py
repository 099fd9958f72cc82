"""Which size a conversion with a rounded cache has, of those that it may have."""

import pytest

from modeling_gqa.conversion.rounded import best_neighbour

LOSSES = {
    "first": ([0.2, 0.3, 0.4], 0, 0, {0, 1}),
    "last": ([0.4, 0.3, 0.2], 0, 2, {0, 1, 2}),
    "down": ([0.1, 0.2, 0.3, 0.4, 0.5], 2, 0, {0, 1, 2, 3}),
    "up, and not on": ([0.5, 0.4, 0.1, 0.2, 0.0], 1, 2, {1, 2, 3}),
    "stays": ([0.0, 0.5, 0.4, 0.5, 0.0], 2, 2, {1, 2, 3}),
    "alone": ([0.5], 0, 0, set()),
    "not a number": ([0.5, float("nan"), 0.1], 0, 0, {0, 1}),
}


@pytest.mark.parametrize("case", LOSSES)
def test_neighbours_are_tried_while_they_lose_less(case):
    losses, start, best, expected = LOSSES[case]
    tried: list[int] = []

    def loss(number: int) -> float:
        tried.append(number)
        return losses[number]

    assert best_neighbour(start, len(losses), loss) == best
    assert set(tried) == expected and len(tried) == len(expected)
