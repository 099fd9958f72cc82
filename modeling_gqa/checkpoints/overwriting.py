"""What a command may write to: nothing that exists without force, and with it only a checkpoint or GGUF file."""

import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatch
from pathlib import Path

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.paths import is_in

from ..common.atomic import read_object, written_aside
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


def new_checkpoint(
    target: str | Path, force: bool = False, held: ExitStack | None = None
) -> AbstractContextManager[Path]:
    """Return `written_aside` of a folder; with `force` a checkpoint at `target` is replaced."""
    return written_aside(target, lambda path: check_target(path, force), held)


def new_gguf(target: str | Path, force: bool = False) -> AbstractContextManager[Path]:
    """Return `written_aside` of a file; with `force` a GGUF file at `target` is replaced."""
    return written_aside(target, lambda path: check_file(path, force), is_file=True)


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
    begins = b""
    if target.is_file():
        with target.open("rb") as file:
            begins = file.read(len(GGUF_MAGIC))
    if begins != GGUF_MAGIC:
        raise UserError(f"{target} is no GGUF file, which force (--force) does not replace: choose another target")


def why_kept(folder: Path) -> str | None:
    """Return why a folder must not be deleted: it is neither empty nor a checkpoint and nothing else."""
    paths, code = sorted(folder.iterdir()), code_names(folder)
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name == TEMPLATES and path.is_dir() and not path.is_symlink():
            paths += sorted(path.iterdir())
        elif not path.is_file() or not (name in code or matches(name, CHECKPOINT_KINDS)):
            return f"holds other things than a checkpoint ({name})"
    model_type = (read_object(folder / "config.json") or {}).get("model_type")
    if paths and not (isinstance(model_type, str) and any(matches(path.name, WEIGHTS_KINDS) for path in paths)):
        return "is no checkpoint (of weights, and a config.json with a model_type)"
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path relative to a folder matches one of the patterns, at the same depth."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


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
