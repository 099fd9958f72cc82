"""Which checkpoint a run resumes from: the newest that is whole, to the last byte."""

import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import RecipeError
from .listing import first_difference, is_listing, read_object
from .manifest import checkpoints
from .run_folder import COMPLETE

# What a checkpoint must hold for its run to go on exactly; each by the names that it can have.
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
    """Look for the checkpoint to resume from; `listed` are the files that runs wrote.

    Returns:
        The newest whole checkpoint, its mark, and what is wrong with each newer one; `None` where none was ever
        finished.

    Raises:
        RecipeError: all that were finished are damaged, or the newest whole one is another number of processes'.
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
            raise RecipeError(f"{path} was written by {mark['processes']} processes; resume it with as many")
        return path, mark, damaged
    if damaged:
        raise RecipeError(f"no whole checkpoint is left in {folder}: {'; '.join(damaged)}")
    return None, {}, []


def what_is_wrong(path: Path, mark: dict[str, Any] | None) -> str | None:
    """Say why a checkpoint cannot be resumed from exactly; `None` where it can."""
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
    # Of a run of before checkpoints listed their files: what can be seen without their hashes.
    return next((problem for file in sorted(path.iterdir()) if (problem := what_is_wrong_inside(file))), None)


def is_mark(mark: dict[str, Any]) -> bool:
    stream = mark.get("stream", {"blocks": 0, "sha256": ""})
    return (
        mark.keys() <= {"processes", "files", "stream"}
        and isinstance(mark.get("processes"), int)
        and is_listing(mark.get("files", {}))
        and isinstance(stream, dict)
        and isinstance(stream.get("blocks"), int)
        and isinstance(stream.get("sha256"), str)
    )


def what_is_wrong_inside(file: Path) -> str | None:
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
    """Say, for a message on why training stopped, from where it can go on."""
    whole = [path for path in checkpoints(Path(folder)) if (path / COMPLETE).is_file()]
    return f"{whole[-1]} is kept, and --resume goes on from it" if whole else "no checkpoint had been saved"
