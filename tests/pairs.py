"""Combinations of arguments in which every pair of values occurs, in place of their whole product."""

from collections.abc import Iterable
from itertools import combinations, product


def pairs_of(row: tuple) -> set[tuple]:
    """Each two values of a combination, with the places where they stand."""
    return set(combinations(enumerate(row), 2))


def all_pairs(*columns: Iterable) -> list[tuple]:
    """Rows of one value from each of `columns`, the same in every run, few and yet with every pair of values."""
    rows = {row: pairs_of(row) for row in product(*columns)}
    missing = set().union(*rows.values())
    chosen = []
    while missing:
        # The first of those with the most new pairs.
        row = max(rows, key=lambda row: len(rows[row] & missing))
        chosen.append(row)
        missing -= rows.pop(row)
    return chosen
