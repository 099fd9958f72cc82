"""Files and folders that are written whole or not at all, whenever the process ends: locked, aside, then renamed.

A file NAME is written as `.NAME.part`. While a target NAME is written, `.NAME.lock` and `.NAME.new-PID` lie beside it,
and for a moment `.NAME.old-PID`. What a killed process leaves of them, the next one to the same target deletes or puts
back.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from modeling_gqa_cli.errors import UserError

# -- One file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which takes the place of `path` at the end; on any failure it is deleted."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        sync_path(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)  # a full disk needs every byte
        raise
    sync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; characters that UTF-8 does not have are written as escapes."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, results: Any) -> None:
    """Write results as JSON, whole or not at all; see `to_json`."""
    write_text(path, to_json(results))


def to_json(results: Any) -> str:
    """Return results as JSON that every program reads.

    Numbers that JSON does not have (nan and infinite ones) become null. Data classes become objects. Paths, dtypes and
    other values become their text.

    Args:
        results: dictionaries, data classes, lists, texts, numbers.
    """
    return json.dumps(plain(results), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, `None` where the file is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def sync(folder: Path) -> None:
    """Make the system write a folder's files, and their names, to the disk."""
    for path in (folder, *folder.rglob("*")):
        sync_path(path)


def sync_path(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":  # where folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- A target that one process writes


@contextmanager
def written_aside(
    target: str | Path, check: Callable[[Path], None], held: ExitStack | None = None, is_file: bool = False
) -> Iterator[Path]:
    """Yield a path beside `target` whose content takes its place at the end; on any failure all is as it was.

    Args:
        target: the folder or file to write.
        check: raises `UserError` where the target must not be written or replaced; called at the start and at the end.
        held: closed when the target is written, or has failed, and before another process may write it.
        is_file: whether the target is a file. The path of a folder is made, that of a file is not.

    Raises:
        UserError: by `check`; the target's folder cannot be written; or another process is writing the target.
    """
    target = Path(target).resolve()
    aside, old = (beside(target, role, os.getpid()) for role in ("new", "old"))
    new = aside / target.name if is_file else aside
    with locked(target), held or nullcontext():
        check(target)
        try:
            aside.mkdir()
            yield new
            check(target)
            if target.exists():
                sync(aside)  # before what it replaces is deleted
                if not is_file:
                    target.replace(old)
            new.replace(target)
        finally:
            insist(lambda: settle(target, old, aside))


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Make the folders above `target`, hold the lock on it, and recover what killed processes left.

    A process that died holds no lock. Folders that were made are removed if the block fails.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    path = target.with_name(f".{target.name}.lock")
    lock, left = FileLock(path), False

    def release():
        with suppress(OSError):
            if not (left and leftovers(target)):  # else the lock's file shows that they are not the user's
                path.unlink()  # while it is locked, so that no other process has taken it
        lock.release()

    try:
        left = acquire(lock, path, target)
        try:
            # Without a lock left beside them, folders of such names are the user's.
            for process in {number for _, number, _ in leftovers(target)} if left else ():
                settle(target, beside(target, "old", process), beside(target, "new", process))
            yield
        finally:
            insist(release)
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


def acquire(lock: FileLock, path: Path, target: Path) -> bool:
    """Take the lock on `target`, whose file is `path`; return whether a process that died has left that file."""
    nearest = next(folder for folder in target.parents if folder.exists())
    if not nearest.is_dir():
        raise UserError(f"{target} cannot be written: {nearest} is a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        left = path.exists()
        if left and path.stat().st_size:
            raise UserError(f"{path} is no lock of ours, which are empty: move it, or choose another target")
        lock.acquire(blocking=False)
    except Timeout:
        if not path.exists():
            raise UserError(f"{target} cannot be written: {target.parent} takes no files") from None
        writers = [number for role, number, _ in leftovers(target) if role == "new"]
        who = f"process {writers[0]}" if len(writers) == 1 else "another process"
        raise UserError(f"{who} is writing {target} now: wait until it is done, or choose another target") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {(error.strerror or str(error)).lower()}") from error
    return left


def insist(clean_up: Callable[[], None]) -> None:
    """Clean up to the end, even if Ctrl-C is pressed meanwhile."""
    try:
        clean_up()
    except (KeyboardInterrupt, SystemExit):
        clean_up()
        raise


def beside(target: Path, role: str, process: int | str) -> Path:
    """Return the folder beside `target` in which a process writes it ("new") or keeps what it replaces ("old")."""
    return target.with_name(f".{target.name}.{role}-{process}")


def leftovers(target: Path) -> list[tuple[str, str, Path]]:
    """Return role ("new" or "old"), process and path of the folders that living and killed writers made."""
    pattern = re.compile(re.escape(f".{target.name}.") + "(new|old)-([0-9a-f]+)")
    found = ((pattern.fullmatch(path.name), path) for path in target.parent.iterdir())
    return [(match[1], match[2], path) for match, path in found if match and path.is_dir() and not path.is_symlink()]


def settle(target: Path, old: Path, aside: Path) -> None:
    """Delete `aside`, and `old` too if `aside` has become `target`; if nothing has, `old` becomes `target` again."""
    if old.exists() and not target.exists():
        old.replace(target)
    elif old.exists() and not aside.exists():
        old.replace(aside)  # whose name says that it may be deleted
    elif old.exists():
        raise UserError(f"{old} is what a killed command had moved away from {target}: move or delete it first")
    shutil.rmtree(aside, ignore_errors=True)
