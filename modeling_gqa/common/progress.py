"""How long loops show their progress: functions take a wrapper for what they loop over.

Nothing but what shows the progress, `progress_bars`, imports rich.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial

# Wraps an iterable and yields its items; `iter` shows nothing.
Progress = Callable[[Iterable], Iterable]
# Returns the wrapper of a loop, given the loop's description.
ShowProgress = Callable[[str], Progress]

FIRST = 3  # steps after which it is said how long a loop still takes
BETWEEN_LINES = 30.0  # seconds


class BySize(list):
    """The items of a loop whose steps take time by the sizes of what they do.

    Args:
        items: for instance names of tensors.
        sizes: for each a number, for instance of bytes.
    """

    def __init__(self, items: Iterable, sizes: Iterable[float]) -> None:
        super().__init__(items)
        self.sizes = list(sizes)


def no_progress(description: str) -> Progress:
    """The `ShowProgress` that shows nothing."""
    return iter


@contextmanager
def progress_bars() -> Iterator[ShowProgress]:
    """Show progress on stderr: in bars where it is a terminal, else in lines such as `measuring: 4 of 8, 61 s`.

    A line is written every half minute, of whatever loops then, and its seconds are those since this call. What is left
    is the loop's, at the pace of the steps behind the first, in which files are opened, unpacked or compiled.

    Yields:
        A function from a description to what wraps an iterable.
    """
    from rich import progress as bars

    from .console import err

    texts = [bars.TextColumn(f"{{task.fields[{name}]}}") for name in ("steps", "left")]
    columns = bars.TextColumn("{task.description}"), bars.BarColumn(), texts[0], bars.TimeElapsedColumn(), texts[1]
    # Times are measured from the end of the first step on, however long ago that was.
    shown = bars.Progress(*columns, console=err, get_time=time.monotonic, speed_estimate_period=math.inf)
    begin = last = time.monotonic()

    def loop(description: str, items: Iterable) -> Iterator:
        nonlocal last
        total = len(items) if isinstance(items, Sized) else None
        sizes = items.sizes if isinstance(items, BySize) else [1.0] * (total or 0)
        if err.is_terminal:
            shown.start()
        shown.add_task(description, total=sum(sizes) or None, steps="", left="")
        task, of, number = shown.tasks[-1], f" of {total}" if total else "", 0
        for number, item in enumerate(items, 1):
            seconds = task.time_remaining if number > FIRST else None
            left = f"about {duration(seconds)} left" if seconds else ""
            shown.update(task.id, steps=f"{number - 1}{of}", left=left, refresh=True)
            now = time.monotonic()
            if not err.is_terminal and now - last >= BETWEEN_LINES:
                last = now
                line = f"{description}: {number - 1}{of}, {now - begin:.0f} s{left and ', '}{left}"
                err.print(line, soft_wrap=True)
            yield item
            shown.advance(task.id, sizes[number - 1] if total else 0)
        shown.update(task.id, total=1, completed=1, steps=f"{number} of {number}", left="")

    try:
        yield lambda description: partial(loop, description)
    finally:
        if shown.live.is_started:
            shown.stop()


def duration(seconds: float) -> str:
    """Return a time in two digits or three, such as `50 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
