"""The checkpoint that a run resumes from: the newest one of which every byte is as it was written."""

import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...common.errors import UserError
from .listing import first_difference, is_listing, read_object
from .manifest import checkpoints
from .run_folder import COMPLETE

# What a checkpoint must hold for its run to go on exactly, and the file names that each part can have.
NEEDED = (
    ("the weights", ("model*.safetensors", "pytorch_model*")),
    ("the optimizer's state", ("optimizer*",)),
    ("the learning rate's schedule", ("scheduler.pt",)),
    ("the random numbers' state", ("rng_state*.pth",)),
    ("the Trainer's state", ("trainer_state.json",)),
)


def find_resumable(
    folder: Path, processes: int, listed: Container[str] = ()
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Find the checkpoint to resume from.

    Args:
        folder: the run's folder.
        processes: number of processes that would resume.
        listed: paths of the files that runs wrote, relative to `folder`.

    Returns:
        The newest whole checkpoint, its mark, and a line on the damage of each newer one; `None`, an empty mark and no
        lines where no checkpoint was finished.

    Raises:
        UserError: every finished checkpoint is damaged, or the newest whole one was written by another number of
            processes.
    """
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        if not (path / COMPLETE).is_file():  # cut short while it was written
            if f"{path.name}/{COMPLETE}" in listed:
                damaged.append(f"{path.name} is damaged: {path / COMPLETE} is missing")
            continue
        mark = read_object(path / COMPLETE)
        problem = what_is_wrong(path, mark)
        if mark is None or problem is not None:
            damaged.append(f"{path.name} is damaged: {problem}")
            continue
        if mark["processes"] != processes:
            raise UserError(f"{path} was written by {mark['processes']} processes; resume it with as many")
        return path, mark, damaged
    if damaged:
        raise UserError(f"no whole checkpoint is left in {folder}: {'; '.join(damaged)}")
    return None, {}, []


def is_whole(path: Path) -> bool:
    """Return whether every byte of the checkpoint `path` is as it was written."""
    return what_is_wrong(path, read_object(path / COMPLETE)) is None


def what_is_wrong(path: Path, mark: dict[str, Any] | None) -> str | None:
    """Return why a run cannot go on exactly from the checkpoint `path`; `None` where it can.

    Args:
        mark: the content of its `complete.json`.
    """
    if mark is None or not is_mark(mark):
        return f"{path / COMPLETE} cannot be read"
    listed = "files" in mark
    if listed and (difference := first_difference(path, mark["files"])):
        return difference
    for what, patterns in NEEDED:
        if not any(True for pattern in patterns for _ in path.glob(pattern)):
            return f"{what} ({patterns[0]}) is missing"
    if listed:
        return None
    # Earlier versions listed no files: without hashes, only broken archives can be seen.
    return next((problem for file in sorted(path.iterdir()) if (problem := what_is_wrong_inside(file))), None)


def is_mark(mark: dict[str, Any]) -> bool:
    """Return whether `mark` has the fields of a `complete.json`, with their types."""
    stream = mark.get("stream", {"blocks": 0, "sha256": ""})
    return (
        mark.keys() <= {"processes", "files", "stream", "training_seconds"}
        and isinstance(mark.get("processes"), int)
        and isinstance(mark.get("training_seconds", 0.0), int | float)
        and is_listing(mark.get("files", {}))
        and isinstance(stream, dict)
        and isinstance(stream.get("blocks"), int)
        and isinstance(stream.get("sha256"), str)
    )


def what_is_wrong_inside(file: Path) -> str | None:
    """Return that a file of tensors or JSON cannot be read; `None` where it can, and for other files."""
    try:
        if file.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(file) as archive:
                wrong: Any = archive.testzip()
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                wrong = not tensors.keys()
        else:
            wrong = file.suffix == ".json" and read_object(file) is None
    except (OSError, zipfile.BadZipFile, SafetensorError):
        wrong = True
    return f"{file} cannot be read" if wrong else None


def what_is_kept(folder: str | Path) -> str:
    """Return the last words of a message on why training stopped: which checkpoint `--resume` continues from."""
    whole = [path for path in checkpoints(Path(folder)) if (path / COMPLETE).is_file()]
    return f"{whole[-1]} is kept, and --resume goes on from it" if whole else "no checkpoint had been saved"
