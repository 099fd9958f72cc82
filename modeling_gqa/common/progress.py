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
    """Return the `ShowProgress` that writes a line such as `measuring: 4 of 8, 61 s, about 2 min left` now and then.

    The seconds are those since this call; what is left is the loop's, at the pace that it had so far.

    Args:
        write: is given each line.
        seconds: between two lines, of whatever loops; loops that end sooner write none.
    """
    begin = last = time.monotonic()

    def lines(description: str, items: Iterable) -> Iterator:
        nonlocal last
        total = len(items) if isinstance(items, Sized) else None
        start = time.monotonic()
        for number, item in enumerate(items):
            now = time.monotonic()
            if now - last >= seconds:
                last = now
                known = total and number
                left = f", about {duration((now - start) / number * (total - number))} left" if known else ""
                write(f"{description}: {number}{f' of {total}' if total else ''}, {now - begin:.0f} s{left}")
            yield item

    return lambda description: partial(lines, description)


def duration(seconds: float) -> str:
    """Return a time in two digits or three, such as `50 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
