"""A folder written aside and then renamed: its target is as it was or whole, whenever the process ends.

Beside a target NAME lie, while it is written, `.NAME.lock` and `.NAME.new-PID`, and for a moment `.NAME.old-PID`. What
a killed process leaves of them the next one clears away, or puts back.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import ConversionError
from .files import COMPANIONS, TEMPLATES

# And not what somebody keeps beside them, as model-backup.safetensors.
WEIGHTS_KINDS = tuple(
    f"{stem}{shard}{suffix}"
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"))
    for shard in ("", "-[0-9]*-of-[0-9]*")
)
# All that a checkpoint consists of, beside its Python code.
CHECKPOINT_KINDS = (
    "config.json",
    *WEIGHTS_KINDS,
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    *COMPANIONS,
    "README.md",
    "conversion.json",
    ".gitattributes",
)
# Modules that transformers loads by name; others are part of a checkpoint where these import them.
CODE_KINDS = ("modeling_*.py", "configuration_*.py", "tokenization_*.py")
RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


@contextmanager
def written_aside(target: str | Path, force: bool = False) -> Iterator[Path]:
    """Give a new folder beside `target`, which takes its place at the end; on any failure all is as it was.

    Raises:
        ConversionError: `target` cannot be written or replaced (see `check_target`), at the start or at the end; or
            another process is writing it.
    """
    target = Path(target).resolve()
    made = [folder for folder in target.parents if not folder.exists()]
    aside, old = (beside(target, role, os.getpid()) for role in ("new", "old"))
    try:
        with writing(target) as left:
            if left:  # a folder that no lock is left beside is the user's, whatever its name
                recover(target)
            check_target(target, force)
            try:
                aside.mkdir()
                yield aside
                check_target(target, force)
                if target.exists():
                    sync(aside)  # before what it replaces is deleted
                    target.rename(old)
                aside.rename(target)
            finally:
                insist(lambda: settle(target, old, aside))
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def writing(target: Path) -> Iterator[bool]:
    """Hold the lock on `target`, which a dead process does not hold; its folder is made where it is missing. Gives
    whether a process that died has left its lock."""
    path = target.with_name(f".{target.name}.lock")
    lock = FileLock(path)

    def release():
        with suppress(OSError):
            if not (left and leftovers(target)):  # else it still says whose they are
                path.unlink()  # still locked, so that it is nobody else's
        lock.release()

    nearest = next(folder for folder in target.parents if folder.exists())
    if not nearest.is_dir():
        raise ConversionError(f"{target} cannot be written: {nearest} is a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        left = path.exists()
        if left and path.stat().st_size:
            raise ConversionError(f"{path} is no lock of ours, which are empty: move it, or choose another target")
        lock.acquire(blocking=False)
    except Timeout:
        if not path.exists():
            raise ConversionError(f"{target} cannot be written: {target.parent} takes no files") from None
        writers = [number for role, number, _ in leftovers(target) if role == "new"]
        who = f"process {writers[0]}" if len(writers) == 1 else "another process"
        raise ConversionError(
            f"{who} is writing {target} now: wait until it is done, or choose another target"
        ) from None
    except OSError as error:
        raise ConversionError(f"{target} cannot be written: {(error.strerror or str(error)).lower()}") from error
    try:
        yield left
    finally:
        insist(release)


def insist(clean_up: Callable[[], None]) -> None:
    """Clean up to the end, also where Ctrl-C comes meanwhile."""
    try:
        clean_up()
    except (KeyboardInterrupt, SystemExit):
        clean_up()
        raise


def recover(target: Path) -> None:
    """Clear away what killed processes left of writing `target`, and put back what one of them had moved."""
    for process in {process for _, process, _ in leftovers(target)}:
        settle(target, beside(target, "old", process), beside(target, "new", process))


def beside(target: Path, role: str, process: int | str) -> Path:
    return target.with_name(f".{target.name}.{role}-{process}")


def leftovers(target: Path) -> list[tuple[str, str, Path]]:
    """Role, process and path of the folders in which `target` is or was written."""
    pattern = re.compile(re.escape(f".{target.name}.") + "(new|old)-([0-9a-f]+)")
    found = ((pattern.fullmatch(path.name), path) for path in target.parent.iterdir())
    return [(match[1], match[2], path) for match, path in found if match and path.is_dir() and not path.is_symlink()]


def settle(target: Path, old: Path, aside: Path) -> None:
    """Delete `aside`, and `old` where `aside` has taken its place; where nothing has, `old` becomes `target` again."""
    if old.exists() and not target.exists():
        old.rename(target)
    elif old.exists() and not aside.exists():
        old.rename(aside)  # whose name says that it may be deleted
    elif old.exists():
        raise ConversionError(f"{old} is what a killed command had moved away from {target}: move or delete it first")
    shutil.rmtree(aside, ignore_errors=True)


def sync(folder: Path) -> None:
    """Have the system write a folder's files, and their names, to its disk."""
    for path in (folder, *folder.rglob("*")):
        sync_path(path)


def sync_path(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to its disk."""
    if path.is_dir() and os.name != "posix":  # where folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(target: Path, force: bool) -> None:
    """Refuse what cannot be written to, or what `force` does not replace: only a checkpoint, or an empty folder."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConversionError(f"{target} is a file: give a folder to write to")
    if not force:
        raise ConversionError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    if os.path.ismount(target):
        raise ConversionError(f"{target} is a mount point, which cannot be replaced: give a folder in it")
    if Path.cwd().resolve().is_relative_to(target):
        raise ConversionError(f"{target} is the folder you are in, or holds it: go elsewhere, or give another target")
    if reason := why_kept(target):
        raise ConversionError(f"{target} {reason}, which force (--force) does not replace: choose another target")


def why_kept(folder: Path) -> str | None:
    """Why a folder is not to be deleted: it is not empty, and no checkpoint or more than one."""
    paths, code = sorted(folder.iterdir()), code_names(folder)
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name == TEMPLATES and path.is_dir() and not path.is_symlink():
            paths += sorted(path.iterdir())
        elif not path.is_file() or not (name in code or matches(name, CHECKPOINT_KINDS)):
            return f"holds other things than a checkpoint ({name})"
    if paths and not (has_model_type(folder) and any(matches(path.name, WEIGHTS_KINDS) for path in paths)):
        return "is no checkpoint (of weights, and a config.json with a model_type)"
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path in a folder is of one of the kinds, in the same folder as the pattern."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def has_model_type(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / "config.json").read_bytes())["model_type"], str)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def code_names(folder: Path) -> set[str]:
    """Names of the Python files that a checkpoint's code consists of, by its relative imports."""
    waiting = [path.name for kind in CODE_KINDS for path in folder.glob(kind)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            waiting += [f"{module}.py" for module in RELATIVE_IMPORT.findall(text)]
    return found


def refuse_overlap(source: Path, target: str | Path, what: str = "source") -> None:
    """Refuse a target that is, holds or lies in what is read: writing it would lose or mix the two."""
    source, target = source.resolve(), Path(target).resolve()
    if is_in(source, target):
        raise ConversionError(f"the target {target} is the {what}, or holds it: choose another target")
    if is_in(target, source):
        raise ConversionError(f"the target {target} lies in the {what} {source}: choose another target")


def is_in(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or lies in it, also where the system has several names for a folder."""
    return any(
        above == folder or (os.path.exists(above) and os.path.exists(folder) and above.samefile(folder))
        for above in (path, *path.parents)
    )
