"""A folder or file written beside its target, then renamed: whenever the process ends, that is as it was or complete.

While a target NAME is written, `.NAME.lock` and `.NAME.new-PID` lie beside it, and for a moment `.NAME.old-PID`. What a
killed process leaves of them, the next one to the same target deletes or puts back.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from ..common.errors import UserError
from ..common.files import is_in, sync
from .files import COMPANIONS, TEMPLATES

# Names of weights; model-backup.safetensors, for instance, is somebody's own file.
WEIGHTS_KINDS = tuple(
    f"{stem}{shard}{suffix}"
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"))
    for shard in ("", "-[0-9]*-of-[0-9]*")
)
# Names of all files of a checkpoint but its Python code.
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
GGUF_MAGIC = b"GGUF"  # with which such a file begins
# Modules that transformers loads by name; others belong to a checkpoint where these import them.
CODE_KINDS = ("modeling_*.py", "configuration_*.py", "tokenization_*.py")
RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


@contextmanager
def written_aside(target: str | Path, force: bool = False, held: ExitStack | None = None) -> Iterator[Path]:
    """Yield a new folder beside `target` that takes its place at the end; on any failure all is as it was.

    Args:
        target: the folder to write.
        force: whether a checkpoint at `target` is replaced.
        held: closed when the new folder has taken its place, or has failed to, and before another process may write it.

    Raises:
        UserError: `target` cannot be written or replaced (see `check_target`), at the start or at the end; or
            another process is writing it.
    """
    target = Path(target).resolve()
    aside, old = (beside(target, role, os.getpid()) for role in ("new", "old"))
    with _parents_made(target), writing(target) as left, held or nullcontext():
        if left:  # without a lock left beside them, folders of such names are the user's
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


@contextmanager
def file_written_aside(target: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `target` at the end; on any failure all is as it was.

    Args:
        target: the GGUF file to write.
        force: whether a GGUF file at `target` is replaced.

    Raises:
        UserError: `target` cannot be written or replaced, at the start or at the end; or another process is
            writing it.
    """
    target = Path(target).resolve()
    aside = beside(target, "new", os.getpid())
    with _parents_made(target), writing(target) as left:
        if left:
            recover(target)
        check_file(target, force)
        try:
            aside.mkdir()
            yield aside / target.name
            check_file(target, force)
            if target.exists():
                sync(aside)
            (aside / target.name).replace(target)
        finally:
            insist(lambda: shutil.rmtree(aside, ignore_errors=True))


@contextmanager
def _parents_made(target: Path) -> Iterator[None]:
    """Remove the folders above `target` that were made meanwhile, and are empty, if the block fails."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def writing(target: Path) -> Iterator[bool]:
    """Hold the lock on `target`, and make its parent folders; a process that died holds no lock.

    Yields whether a process that died has left its lock's file.
    """
    path = target.with_name(f".{target.name}.lock")
    lock = FileLock(path)

    def release():
        with suppress(OSError):
            if not (left and leftovers(target)):  # else the lock's file shows that they are not the user's
                path.unlink()  # while it is locked, so that no other process has taken it
        lock.release()

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
    try:
        yield left
    finally:
        insist(release)


def insist(clean_up: Callable[[], None]) -> None:
    """Clean up to the end, even if Ctrl-C is pressed meanwhile."""
    try:
        clean_up()
    except (KeyboardInterrupt, SystemExit):
        clean_up()
        raise


def recover(target: Path) -> None:
    """Delete what killed processes left of writing `target`, and put back what one of them had moved."""
    for process in {process for _, process, _ in leftovers(target)}:
        settle(target, beside(target, "old", process), beside(target, "new", process))


def beside(target: Path, role: str, process: int | str) -> Path:
    """Return the folder beside `target` in which a process writes it ("new") or keeps what it replaces ("old")."""
    return target.with_name(f".{target.name}.{role}-{process}")


def leftovers(target: Path) -> list[tuple[str, str, Path]]:
    """Return role ("new" or "old"), process id and path of the folders in which `target` is or was written."""
    pattern = re.compile(re.escape(f".{target.name}.") + "(new|old)-([0-9a-f]+)")
    found = ((pattern.fullmatch(path.name), path) for path in target.parent.iterdir())
    return [(match[1], match[2], path) for match, path in found if match and path.is_dir() and not path.is_symlink()]


def settle(target: Path, old: Path, aside: Path) -> None:
    """Delete `aside`, and `old` too if `aside` has become `target`; if nothing has, `old` becomes `target` again."""
    if old.exists() and not target.exists():
        old.rename(target)
    elif old.exists() and not aside.exists():
        old.rename(aside)  # whose name says that it may be deleted
    elif old.exists():
        raise UserError(f"{old} is what a killed command had moved away from {target}: move or delete it first")
    shutil.rmtree(aside, ignore_errors=True)


def check_target(target: Path, force: bool) -> None:
    """Raise `UserError` for a target that cannot be written to.

    An existing one can if `force` is true and it is an empty folder or a checkpoint.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file: give a folder to write to")
    if not force:
        raise UserError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    if os.path.ismount(target):
        raise UserError(f"{target} is a mount point, which cannot be replaced: give a folder in it")
    if Path.cwd().resolve().is_relative_to(target):
        raise UserError(f"{target} is the folder you are in, or holds it: go elsewhere, or give another target")
    if reason := why_kept(target):
        raise UserError(f"{target} {reason}, which force (--force) does not replace: choose another target")


def check_file(target: Path, force: bool) -> None:
    """Raise `UserError` for a target that no file can be written to; GGUF files are replaced if `force` is."""
    if not target.exists():
        return
    if target.is_dir():
        raise UserError(f"{target} is a folder: give a file to write to")
    if not force:
        raise UserError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    if not target.is_file() or not _is_gguf_inside(target):
        raise UserError(f"{target} is no GGUF file, which force (--force) does not replace: choose another target")


def _is_gguf_inside(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def why_kept(folder: Path) -> str | None:
    """Return why a folder must not be deleted: it is neither empty nor a checkpoint and nothing else."""
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
    """Return whether a path relative to a folder matches one of the patterns, at the same depth."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def has_model_type(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / "config.json").read_bytes())["model_type"], str)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def code_names(folder: Path) -> set[str]:
    """Return the names of the Python files that a checkpoint's code consists of, by its relative imports."""
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
    """Raise `UserError` for a target that is, holds or lies in the `source`, which is read; `what` names it."""
    source, target = source.resolve(), Path(target).resolve()
    if is_in(source, target):
        raise UserError(f"the target {target} is the {what}, or holds it: choose another target")
    if is_in(target, source):
        raise UserError(f"the target {target} lies in the {what} {source}: choose another target")
