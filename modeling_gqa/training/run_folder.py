"""The folder of a run: one process writes there, and deletes only files that a run wrote; which checkpoint is whole.

`manifest.json` lists the files that runs wrote, and names the process that writes now. A file that is not listed is the
user's: a run does not begin where such a file has a name that runs use.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from modeling_gqa_cli.errors import UserError

from ..common.atomic import read_object, sync, sync_path, write_text
from .results import RESULTS

MANIFEST, LOCK, STAGING, COMPLETE = "manifest.json", ".run.lock", ".new", "complete.json"
SAVED_RECIPE, SAVED_MODEL = "recipe.yaml", "model.json"
FOLDERS, FILES = ("data", "tokenizer", "final"), (SAVED_RECIPE, SAVED_MODEL, RESULTS)
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class RunFolder:
    """One run's folder, opened by the main process alone.

    Attributes:
        files: SHA-256 of the files that runs wrote, by their paths relative to the folder; `None` for those of
            a checkpoint, which its `complete.json` lists.
        notes: hashes of the models that the run reads, versions of its libraries, and files that are being replaced.
        writing: the folder that is being written file by file, and is incomplete where a process was killed.
        sealing_seconds: in which checkpoints were written to disk and hashed.

    Raises:
        UserError: another process writes there, or a file that no run wrote has a name that runs use.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: dict[str, str | None] = {}
        self.notes: dict[str, Any] = {}
        self.writing: str | None = None
        self.writer: dict[str, Any] | None = None
        self.made: list[Path] = []
        self.sealing_seconds = 0.0
        self.lock = FileLock(self.path / LOCK)

    # -- opening and closing

    def open(self) -> None:
        """Become the only writer, and remove what a killed process had not finished writing."""
        path = self.path.absolute()
        if path.is_file():
            raise UserError(f"{self.path} is a file: give a folder to write to")
        own = (path / MANIFEST, path / LOCK, path, *path.parents)
        self.made = [item for item in own if not os.path.lexists(item)]
        self.path.mkdir(parents=True, exist_ok=True)
        known = (read_object(self.path / MANIFEST) or {}).get("writer")
        writer = known if isinstance(known, dict) else {}
        try:
            # Children of a killed process hold its lock until they notice.
            self.lock.acquire(timeout=15 if has_died(writer) else 0)
        except Timeout:
            who = f"process {writer.get('pid', '?')} on {writer.get('host', '?')}, since {writer.get('since', '?')},"
            raise UserError(
                f"{who} is writing to {self.path}: wait for its end, or choose another output_dir"
            ) from None
        self.read()
        self.writer = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.save()
        if self.writing:
            self.clear(self.writing)

    def read(self) -> None:
        """Read the manifest; raise `UserError` where it is that of something else, or damaged."""
        if not os.path.lexists(self.path / MANIFEST):
            return
        content = read_object(self.path / MANIFEST) or {}
        files, notes = content.get("files"), content.get("notes")
        if not (
            "writing" in content
            and is_listing(files, unknown=True)
            and isinstance(notes, dict)
            and all(isinstance(note, dict) for note in notes.values())
        ):
            raise UserError(f"{self.path / MANIFEST} is not the list of files that runs write: move it away")
        self.files = {name: entry for name, entry in files.items() if is_run_name(name)}
        self.notes, writing = notes, str(content["writing"])
        self.writing = writing if writing == STAGING or CHECKPOINT.fullmatch(writing) else None

    def save(self) -> None:
        """Write the manifest."""
        content = {"writer": self.writer, "writing": self.writing, "notes": self.notes, "files": self.files}
        write_text(self.path / MANIFEST, json.dumps(content, indent=1) + "\n")

    def close(self) -> None:
        """Release the lock. Where this run wrote nothing, delete what `open` has made."""
        if not self.lock.is_locked:
            return
        self.writer = None
        if self.files:
            with suppress(OSError):
                self.save()
        else:
            for path in self.made:
                with suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()
        self.lock.release(force=True)

    def refuse_foreign(self, names: Iterable[str] | None = None) -> None:
        """Raise `UserError` where a file that no run wrote stands under a name that runs use, or under `names`."""
        if names is None:
            names = (*FILES, *FOLDERS, *(path.name for path in checkpoints(self.path)))
        for top in names:
            path = self.path / top
            is_folder = path.is_dir() and not path.is_symlink()
            for name in [f"{top}/{file}" for file in file_names(path)] if is_folder else [top]:
                if name not in self.files and os.path.lexists(self.path / name):
                    raise UserError(
                        f"{self.path / name} is not what a run wrote, and stands where this run would write: move it, "
                        "or choose another output_dir"
                    )

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a recipe, a checkpoint or a finished model."""
        return bool(checkpoints(self.path)) or any((self.path / name).exists() for name in (SAVED_RECIPE, "final"))

    # -- writing

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Give an empty folder to write to; files that `place` has not moved out of it are deleted at the end."""
        self.claim(STAGING)
        folder = self.path / STAGING
        folder.mkdir()
        try:
            yield folder
        finally:
            self.clear(STAGING)

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[dict[str, Any]]:
        """While a checkpoint is written: mark it as whole at the end, or delete it on an error.

        Yields an object whose entries go into the mark `complete.json`. That lists the files with their
        SHA-256, and is written when they are on disk.
        """
        folder = self.path / name
        self.claim(name)
        mark: dict[str, Any] = {}
        try:
            yield mark
            begin = time.perf_counter()
            sync(folder)
            files = {file: sha256_of(folder / file) for file in file_names(folder)}
            write_text(folder / COMPLETE, json.dumps(mark | {"files": files}, indent=1) + "\n")
            self.sealing_seconds += time.perf_counter() - begin
        finally:
            self.clear(name)

    def claim(self, name: str) -> None:
        """Note that this run will write the folder `name`, and delete what an earlier run wrote there."""
        self.remove([file for file in self.files if file.startswith(f"{name}/")])
        if os.path.lexists(self.path / name):
            raise UserError(f"{self.path / name} holds what no run wrote, and this run must write there: move it away")
        self.writing = name
        self.save()

    def clear(self, name: str) -> None:
        """Delete the claimed folder `name` unless it is a whole checkpoint, and end the claim."""
        if (self.path / name / COMPLETE).is_file():
            self.files |= {f"{name}/{file}": None for file in file_names(self.path / name)}
        else:
            shutil.rmtree(self.path / name, ignore_errors=True)
        self.writing = None
        with suppress(OSError):  # of a full disk, which removing may not have helped
            self.save()

    def place(self, *names: str) -> None:
        """Move files and folders from the staging folder to their places, in this order; other files stay there."""
        staged = self.path / STAGING
        sync(staged)
        for name in names:
            whole = not os.path.lexists(self.path / name) or (staged / name).is_file()
            files = [f"{name}/{file}" for file in file_names(staged / name)] or [name]
            earlier = [file for file in self.files if file.startswith(f"{name}/") and file not in files]
            # Where a process is killed here, the old files are left; `edited` must know their hashes as well.
            self.notes["replaced"] = {file: self.files[file] for file in files if self.files.get(file)}
            self.files |= {file: sha256_of(staged / file) for file in files}
            self.save()  # first: a listed file may be missing, but no file of a run may be unlisted
            for file in [name] if whole else files:
                (self.path / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / file, self.path / file)
            self.remove(earlier)
        self.notes.pop("replaced", None)
        self.save()
        sync_path(self.path)

    def edited(self, folder: str) -> Path | None:
        """Return a file below `folder` that the user has edited; `None` where all are as a run wrote them."""
        replaced = self.notes.get("replaced", {})
        for name, entry in self.files.items():
            path = self.path / name
            known = (entry, replaced.get(name))
            if entry and name.startswith(f"{folder}/") and path.is_file() and sha256_of(path) not in known:
                return path
        return None

    def changed(self, *folders: str) -> str | None:
        """Return which file below `folders` is missing or has changed, in words; `None` where all are as they were."""
        listed = {name: entry for name, entry in self.files.items() if entry and name.split("/")[0] in folders}
        return first_difference(self.path, listed)

    # -- deleting

    def remove(self, names: Iterable[str]) -> None:
        """Delete listed files and the folders that this leaves empty.

        The marks of whole checkpoints go first: where a process is killed meanwhile, a checkpoint with missing files is
        not taken for a whole one. The recipe goes last: until then the folder is known to hold a run.
        """
        order = {COMPLETE: 0, SAVED_RECIPE: 2}
        for name in sorted(names, key=lambda name: order.get(Path(name).name, 1)):
            path = self.path / name
            # Not through a link that the user has put in the place of a folder.
            if path.parent.resolve().is_relative_to(self.path.resolve()):
                path.unlink(missing_ok=True)
            del self.files[name]
            for folder in list(Path(name).parents)[:-1]:
                with suppress(OSError):
                    (self.path / folder).rmdir()

    def remove_run(self) -> None:
        """Delete every listed file."""
        self.remove(list(self.files))
        self.save()

    def rotate(self, limit: int | None, newest: str, best: str | None = None) -> None:
        """Delete the oldest checkpoints but `best`, so that `limit` are left of those up to `newest`, or one more."""
        names = [path.name for path in checkpoints(self.path)]
        old = names[: names.index(newest) + 1][: -limit if limit else 0]
        self.remove([file for file in self.files if file.split("/")[0] in {*old} - {best}])
        self.save()


def has_died(writer: dict[str, Any]) -> bool:
    """Return whether the process that a manifest names has ended; of one on another machine that is not known."""
    if writer.get("host") != socket.gethostname() or not isinstance(writer.get("pid"), int):
        return False
    try:
        os.kill(writer["pid"], 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def is_run_name(name: str) -> bool:
    """Return whether runs write and delete files under the path `name`, which is relative to a run's folder."""
    top, *rest = name.split("/")
    known = top in (*FILES, *FOLDERS, STAGING) or CHECKPOINT.fullmatch(top)
    return bool(known) and not {"", ".", ".."}.intersection(rest)


# -- Checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def find_resumable(
    folder: Path, processes: int, listed: Container[str] = ()
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Find the checkpoint to resume from: the newest one of which every byte is as it was written.

    Args:
        folder: the run's folder.
        processes: number of processes that would resume.
        listed: paths of the files that runs wrote, relative to `folder`.

    Returns:
        The checkpoint, its mark, and a line on the damage of each newer one; `None`, {} and [] where none was finished.

    Raises:
        UserError: all are damaged, or the newest whole one was written by another number of processes.
    """
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        # A checkpoint that was cut short while it was written has no mark, and never had one.
        if not (path / COMPLETE).is_file() and f"{path.name}/{COMPLETE}" not in listed:
            continue
        mark, problem = read_mark(path)
        if problem:
            damaged.append(f"{path.name} is damaged: {problem}")
            continue
        if mark["processes"] != processes:
            raise UserError(f"{path} was written by {mark['processes']} processes; resume it with as many")
        return path, mark, damaged
    if damaged:
        raise UserError(f"no whole checkpoint is left in {folder}: {'; '.join(damaged)}")
    return None, {}, []


def read_mark(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content of a checkpoint's `complete.json`, and why it is damaged, or `None` where it is whole."""
    file = path / COMPLETE
    mark = read_object(file) or {}
    stream = mark.get("stream", {"blocks": 0, "sha256": ""})
    if not (
        isinstance(mark.get("processes"), int)
        and isinstance(mark.get("training_seconds", 0.0), int | float)
        and isinstance(mark.get("warmup_steps", 0), int)
        and is_listing(mark.get("files"))
        and isinstance(stream, dict)
        and isinstance(stream.get("blocks"), int)
        and isinstance(stream.get("sha256"), str)
    ):
        return {}, f"{file} cannot be read" if file.is_file() else f"{file} is missing"
    return mark, first_difference(path, mark["files"])


def is_whole(path: Path) -> bool:
    """Return whether every byte of the checkpoint `path` is as it was written."""
    return read_mark(path)[1] is None


def what_is_kept(folder: str | Path) -> str:
    """Return the last words of a message on why training stopped: which checkpoint `--resume` continues from."""
    whole = [path for path in checkpoints(Path(folder)) if (path / COMPLETE).is_file()]
    return f"{whole[-1]} is kept, and --resume goes on from it" if whole else "no checkpoint had been saved"


# -- Lists of files


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def file_names(folder: Path) -> list[str]:
    """Return every file and link below `folder`, as paths relative to it; links are not followed."""
    found = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        found += [Path(root, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def first_difference(folder: Path, listed: dict[str, str]) -> str | None:
    """Return which listed file is missing or has changed, in words; `None` where all are as they were."""
    for name, sha256 in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        try:
            if sha256_of(path) != sha256:
                return f"{path} has changed since it was written: its SHA-256 is another"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return None


def is_listing(value: Any, unknown: bool = False) -> bool:
    """Return whether `value`, read from a JSON file, is a list of files; with `unknown` a hash may be `None`."""
    return isinstance(value, dict) and all(isinstance(x, str) or (unknown and x is None) for x in value.values())
