"""Tables, once for terminals and for Markdown; and numbers with units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

Item = TypeVar("Item")
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Table:
    """Cells under a header; the columns of numbers are aligned to the right.

    Args:
        header: of each column.
        rows: cells, as text.
        title: above the table.
        words: how many columns from the left hold words.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    words: int = 1

    def to_rich(self) -> RichTable:
        """Return it for `rich.console.Console.print`."""
        table = RichTable(title=self.title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(self.header):
            table.add_column(name, justify="left" if index < self.words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Return it as a Markdown table without its title."""
        rule = ["---" if index < self.words else "---:" for index in range(len(self.header))]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.header, rule, *self.rows))


def with_prefix(value: float, unit: str = "") -> str:
    """Return a number in three digits with a decimal prefix, such as `8.03 G`."""
    size, prefix = next((known for known in PREFIXES if value >= 0.9995 * known[0]), (1, ""))
    return f"{three_digits(value / size)} {prefix}{unit}".rstrip()


def in_bytes(value: float) -> str:
    """Return bytes in three digits with a binary prefix, such as `1.5 GiB`."""
    size, unit = next((known for known in BINARY if value >= 0.9995 * known[0]), (1, "B"))
    return f"{three_digits(value / size)} {unit}"


def cached(size: int, itemsize: int) -> str:
    """Return the size of a cache in bytes and in numbers of `itemsize` bytes, such as `1,152 (576)`."""
    return f"{size:,} ({size // itemsize:,})"


def share(part: float, whole: float) -> str:
    """Return a part of a whole in percent, such as `28 %`; three digits where it is small."""
    return f"{three_digits(100 * part / whole)} %"


def three_digits(value: float) -> str:
    """Return a number from 1 to 1000 in three digits without zeros after the point; larger ones whole."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{2 if value < 10 else 1}f}".rstrip("0").rstrip(".")


def runs(items: Iterable[Item]) -> list[tuple[str, Item]]:
    """Return equal neighbours as one, each after the range of their indices, such as `0-3`."""
    found = []
    for item, run in groupby(enumerate(items), key=lambda pair: pair[1]):
        first, *rest = (index for index, _ in run)
        found.append((f"{first}-{rest[-1]}" if rest else f"{first}", item))
    return found
