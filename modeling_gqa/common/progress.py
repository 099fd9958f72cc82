"""How long loops show their progress: functions take a wrapper for what they loop over."""

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, NamedTuple

# Wraps an iterable and yields its items; `iter` shows nothing.
Progress = Callable[[Iterable], Iterable]
# Returns the wrapper of a loop, given the loop's description.
ShowProgress = Callable[[str], Progress]


FIRST = 3  # steps after which it is said how long a loop still takes


class BySize(list):
    """The items of a loop whose steps take time by the sizes of what they do.

    Args:
        items: for instance names of tensors.
        sizes: for each a number, for instance of bytes.
    """

    def __init__(self, items: Iterable, sizes: Iterable[float]) -> None:
        super().__init__(items)
        self.sizes = list(sizes)


class Step(NamedTuple):
    """How far a loop is before one of its steps.

    Args:
        number: of steps that are done.
        total: of all steps; `None` where it is not known.
        share: of the sizes that are done, 0 to 1.
        left: such as `about 2 min left`; "" for the first `FIRST` steps.
    """

    number: int
    total: int | None
    share: float
    left: str


def followed(items: Iterable) -> Iterator[tuple[Any, Step]]:
    """Yield each item, and how far the loop is before it.

    The pace is that of the steps behind the first, in which files are opened, unpacked or compiled.
    """
    total = len(items) if isinstance(items, Sized) else None
    sizes = items.sizes if isinstance(items, BySize) else [1.0] * (total or 0)
    whole, done, began, left = sum(sizes) or 1.0, 0.0, 0.0, ""
    for number, item in enumerate(items):
        now = time.monotonic()
        if number == 1:
            began = now
        if total and number >= FIRST and (measured := done - sizes[0]) > 0:
            left = f"about {duration((now - began) / measured * (whole - done))} left"
        yield item, Step(number, total, done / whole, left)
        done += sizes[number] if total else 0.0


def no_progress(description: str) -> Progress:
    """The `ShowProgress` that shows nothing."""
    return iter


def progress_lines(write: Callable[[str], None], seconds: float = 30.0) -> ShowProgress:
    """Return the `ShowProgress` that writes a line such as `measuring: 4 of 8, 61 s, about 2 min left` now and then.

    The seconds are those since this call; what is left is the loop's.

    Args:
        write: is given each line.
        seconds: between two lines, of whatever loops; loops that end sooner write none.
    """
    begin = last = time.monotonic()

    def lines(description: str, items: Iterable) -> Iterator:
        nonlocal last
        for item, step in followed(items):
            now = time.monotonic()
            if now - last >= seconds:
                last = now
                of = f" of {step.total}" if step.total else ""
                write(f"{description}: {step.number}{of}, {now - begin:.0f} s{step.left and ', '}{step.left}")
            yield item

    return lambda description: partial(lines, description)


def duration(seconds: float) -> str:
    """Return a time in two digits or three, such as `50 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
