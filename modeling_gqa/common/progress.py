"""How long loops show their progress: functions take a wrapper for what they loop over."""

from collections.abc import Callable, Iterable

# Wraps an iterable and yields its items; `iter` shows nothing.
Progress = Callable[[Iterable], Iterable]
# Returns the wrapper of a loop, given the loop's description.
ShowProgress = Callable[[str], Progress]


def no_progress(description: str) -> Progress:
    """The `ShowProgress` that shows nothing."""
    return iter
