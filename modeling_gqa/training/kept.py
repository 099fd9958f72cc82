"""Tokenizers and tokens that runs have made, kept for later runs on the same text.

They are in the folder `modeling_gqa` of datasets' cache, each in a folder named by a hash of all that it depends on.
Its files and a run's are the same files (hard links) where both are on one disk, and copies elsewhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock, Timeout

from .. import data
from ..common.atomic import read_object, write_json
from ..common.console import say
from .run_folder import file_names, first_difference, is_listing, sha256_of

LISTING = "files.json"  # of an entry, with the SHA-256 of its files; written last
SHARE = 0.1  # of the disk, at most
REFUSALS = (OSError, NotImplementedError)  # the second is filelock's, of a disk without locks


def make_once(what: str, folder: Path, depends_on: Any, make: Callable[[Path], None]) -> None:
    """Fill `folder` with what an earlier call made of the same, or make it and keep it.

    A process that is making the same is waited for. Where nothing can be kept, the run goes on without.

    Args:
        what: is made, such as "Tokens"; for the line that is printed.
        folder: is replaced.
        depends_on: what the files depend on beside the code, as JSON has it; `None` where that is not known.
        make: makes the folder and its files.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if depends_on is None:
        make(folder)
        return
    entry = Path(datasets.config.HF_DATASETS_CACHE) / "modeling_gqa" / name_of(depends_on)
    lock, problem = FileLock(f"{entry}.lock"), None
    try:
        try:
            claim(lock, what)
        except REFUSALS as error:  # others may have written it
            problem = error
        if take(entry, folder):
            say(f"{what:<7} read from {entry}, {size_of(folder) / 1e6:,.1f} MB")
            return
        make(folder)
        if problem is None:
            problem = keep(folder, entry)
    finally:
        lock.release()
    place = f"kept for later runs in {entry}, {size_of(folder) / 1e6:,.1f} MB"
    say(f"{what:<7} {f'not kept for later runs: {problem}' if problem else place}")


def claim(lock: FileLock, what: str) -> None:
    """Become the only process that makes an entry."""
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{what:<7} waiting for another process, which is making the same ...")
        lock.acquire()


def name_of(depends_on: Any) -> str:
    """Return the name of an entry: a hash of what it depends on, and of the code that makes it."""
    code = [sha256_of(path) for path in sorted(Path(str(data.__file__)).parent.glob("*.py"))]
    versions = [version(name) for name in ("tokenizers", "transformers")]
    return hashlib.sha256(json.dumps([depends_on, code, versions], sort_keys=True).encode()).hexdigest()[:32]


def take(entry: Path, folder: Path) -> bool:
    """Fill `folder` with the files of an entry; return whether it is whole."""
    listed = (read_object(entry / LISTING) or {}).get("files")
    if not is_listing(listed):
        return False
    try:
        link(entry, folder, listed)
        with suppress(OSError):  # it is another user's
            os.utime(entry)
        if first_difference(folder, listed) is None:
            return True
    except OSError:  # it is being deleted, or the disk is full
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return False


def keep(folder: Path, entry: Path) -> OSError | None:
    """Make an entry of the files in `folder`, and delete others, used longest ago, for it; return why it cannot be."""
    shutil.rmtree(entry, ignore_errors=True)
    try:
        entry.unlink(missing_ok=True)
        room = shutil.disk_usage(entry.parent).total * SHARE - size_of(folder)
        if room < 0:
            return OSError(f"they are more than {SHARE:.0%} of the disk")
        others = [path for path in entry.parent.iterdir() if path.is_dir()]
        for other in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            room -= size_of(other)
            if room < 0:
                shutil.rmtree(other, ignore_errors=True)
        files = {name: sha256_of(folder / name) for name in file_names(folder)}
        link(folder, entry, files)
        write_json(entry / LISTING, {"files": files})
    except OSError as error:
        shutil.rmtree(entry, ignore_errors=True)
        return error
    return None


def link(source: Path, target: Path, names: Any) -> None:
    """Make the files of `source` files of `target`: the same where they can be, else copies."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
            os.chmod(target / name, 0o444)  # it is the file of other runs, too
        except OSError:
            shutil.copyfile(source / name, target / name)


def size_of(folder: Path) -> int:
    """Return the bytes in the files below a folder."""
    return sum((folder / name).stat().st_size for name in file_names(folder))
