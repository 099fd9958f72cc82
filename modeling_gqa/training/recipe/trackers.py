"""Trackers such as TensorBoard: whether they are there, and where they write."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers.integrations import get_reporting_integration_callbacks


def check_trackers(names: Sequence[str], folder: str | None) -> None:
    """Raise `ValueError` for a tracker that there is not, or whose package is not installed.

    Args:
        folder: where they are going to write; trackio wants to know when it is imported, which is here.
    """
    try:
        with trackers_in(Path(folder or "")):
            for tracker in get_reporting_integration_callbacks(names):
                tracker()
    except Exception as error:  # each tracker has a class of its own
        raise ValueError(f"report_to {', '.join(names)}: {error}") from error


@contextmanager
def trackers_in(folder: Path) -> Iterator[None]:
    """While it is entered, trackers begin to write below `folder`, unless an environment variable says where.

    Their own defaults are the folder that the command was started in, and one of the user's.
    """
    places = {
        "TENSORBOARD_LOGGING_DIR": folder / "runs" / time.strftime("%Y-%m-%d-%H-%M-%S"),
        "WANDB_DIR": folder,
        "TRACKIO_DIR": folder / "trackio",
    }
    ours = {name: str(place.absolute()) for name, place in places.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
