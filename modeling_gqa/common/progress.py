"""How long loops show their progress: functions take a wrapper for what they loop over."""

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial

# Wraps an iterable and yields its items; `iter` shows nothing.
Progress = Callable[[Iterable], Iterable]
# Returns the wrapper of a loop, given the loop's description.
ShowProgress = Callable[[str], Progress]


def no_progress(description: str) -> Progress:
    """The `ShowProgress` that shows nothing."""
    return iter


def progress_lines(write: Callable[[str], None], seconds: float = 30.0) -> ShowProgress:
    """Return the `ShowProgress` that writes a line such as `converting layers: 12 of 30, 61 s` now and then.

    Args:
        write: is given each line.
        seconds: between two lines, of whatever loops; loops that end sooner write none.
    """
    begin = last = time.monotonic()

    def lines(description: str, items: Iterable) -> Iterator:
        nonlocal last
        total = f" of {len(items)}" if isinstance(items, Sized) else ""
        for number, item in enumerate(items):
            now = time.monotonic()
            if now - last >= seconds:
                last = now
                write(f"{description}: {number}{total}, {now - begin:.0f} s")
            yield item

    return lambda description: partial(lines, description)
