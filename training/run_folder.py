"""The folder of a run: which process may write there, what a run of ours wrote there, and so what may be deleted.

`manifest.json` in the folder lists every file that runs wrote, and names the process that writes now. Whatever is not
listed belongs to the user: it is never deleted, and where it stands under a name that a run uses, no run begins.
"""

import glob
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from modeling_gqa.common.files import is_in, sync, sync_path

from .earlier import is_earlier, is_recipe
from .listing import (
    Entry,
    describe,
    file_names,
    first_difference,
    is_listing,
    list_folder,
    read_object,
    write_text,
)
from .recipe import SAVED_MODEL, SAVED_RECIPE, Recipe, RecipeError

MANIFEST, LOCK, STAGING, COMPLETE = "manifest.json", ".run.lock", ".new", "complete.json"
FOLDERS, FILES = ("data", "tokenizer", "final"), (SAVED_RECIPE, SAVED_MODEL, "results.json")


class RunFolder:
    """One run's folder, opened by the main process alone.

    Raises:
        RecipeError: another process writes there, or the folder holds what no run wrote under a name that runs use.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: dict[str, Entry | None] = {}
        self.notes: dict[str, Any] = {}
        self.writing: str | None = None
        self.writer: dict[str, Any] | None = None
        self.made: list[Path] = []
        self.sealing_seconds = 0.0  # in which checkpoints were brought to disk and hashed
        self.lock = FileLock(self.path / LOCK)

    # -- who writes

    def open(self) -> None:
        """Become the only writer, and remove what a killed process had not finished writing."""
        path = self.path.absolute()
        own = (path / MANIFEST, path / LOCK, path, *path.parents)
        self.made = [item for item in own if not os.path.lexists(item)]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # A process that was killed can have children, which hold its lock until they notice.
            self.lock.acquire(timeout=0 if self.writer_lives() else 15)
        except Timeout:
            writer = self.last_writer()
            who = f"process {writer.get('pid', '?')} on {writer.get('host', '?')}, since {writer.get('since', '?')},"
            raise RecipeError(
                f"{who} is writing to {self.path}: wait for its end, or choose another output_dir"
            ) from None
        self.read()
        self.writer = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.save()
        if self.writing:
            self.sweep(self.writing)

    def last_writer(self) -> dict[str, Any]:
        writer = (read_object(self.path / MANIFEST) or {}).get("writer")
        return writer if isinstance(writer, dict) else {}

    def writer_lives(self) -> bool:
        writer = self.last_writer()
        if writer.get("host") != socket.gethostname() or not isinstance(writer.get("pid"), int):
            return True  # as far as one can know here
        try:
            os.kill(writer["pid"], 0)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
        return True

    def close(self) -> None:
        """Let others write; a folder in which nothing was written disappears."""
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

    # -- what runs wrote

    def read(self) -> None:
        content = read_object(self.path / MANIFEST) or {}
        if os.path.lexists(self.path / MANIFEST):
            if not is_manifest(content):
                raise RecipeError(f"{self.path / MANIFEST} is not the list of files that runs write: move it away")
            self.files = {name: entry for name, entry in content["files"].items() if is_run_name(name)}
            self.notes = content["notes"]
            self.writing = name if is_claim(name := str(content["writing"])) else None
        elif read_object(self.path / SAVED_MODEL) and is_recipe(self.path / SAVED_RECIPE):
            # A run of before there were manifests, or one whose manifest was lost.
            self.files = {name: None for name in self.found() if name in FILES or is_earlier(name)}

    def save(self) -> None:
        content = {
            "version": 1,
            "writer": self.writer,
            "writing": self.writing,
            "notes": self.notes,
            "files": self.files,
        }
        write_text(self.path / MANIFEST, json.dumps(content, indent=1) + "\n")

    def found(self, names: Iterable[str] | None = None) -> Iterator[str]:
        """Yield what stands in the folder under the names that runs use, or under `names`, file by file."""
        if names is None:
            names = (*FILES, *FOLDERS, *(path.name for path in checkpoints(self.path)))
        for name in names:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                yield from (f"{name}/{file}" for file in file_names(path))
            elif path.exists() or path.is_symlink():
                yield name

    def refuse_foreign(self, names: Iterable[str] | None = None) -> None:
        """Raise `RecipeError` where a file that no run wrote stands under a name that runs use, or under `names`."""
        for name in self.found(names):
            if name not in self.files:
                raise RecipeError(
                    f"{self.path / name} is not what a run wrote, and stands where this run would write: move it, or "
                    "choose another output_dir"
                )

    @property
    def holds_run(self) -> bool:
        names = (SAVED_RECIPE, "final", *(path.name for path in checkpoints(self.path)))
        return any((self.path / name).exists() for name in names)

    # -- writing

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Give an empty folder to write to; what `place` has not taken from it disappears at the end."""
        self.claim(STAGING)
        folder = self.path / STAGING
        folder.mkdir()
        try:
            yield folder
        finally:
            self.sweep(STAGING)

    def claim(self, name: str) -> None:
        """Note that what will stand under `name` is a run's, and remove what a run had written there."""
        self.remove([file for file in self.files if file.startswith(f"{name}/")])
        if os.path.lexists(self.path / name):
            raise RecipeError(
                f"{self.path / name} holds what no run wrote, and this run must write there: move it away"
            )
        self.writing = name
        self.save()

    def sweep(self, name: str) -> None:
        """Remove what was claimed and not finished."""
        if (self.path / name / COMPLETE).is_file():
            self.files |= {f"{name}/{file}": None for file in file_names(self.path / name)}
        else:
            shutil.rmtree(self.path / name, ignore_errors=True)
        self.writing = None
        with suppress(OSError):  # of a full disk, which removing may not have helped
            self.save()

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[dict[str, Any]]:
        """Let a checkpoint be written, which is then listed and marked as whole; one that fails disappears.

        Gives an object to put into the mark. Files are on disk before the mark is, and the mark lists them with their
        sizes and hashes.
        """
        folder = self.path / name
        self.claim(name)
        mark: dict[str, Any] = {}
        try:
            yield mark
            begin = time.perf_counter()
            sync(folder)
            write_text(folder / COMPLETE, json.dumps(mark | {"files": list_folder(folder)}, indent=1) + "\n")
            self.sealing_seconds += time.perf_counter() - begin
        finally:
            self.sweep(name)

    def place(self, *names: str) -> None:
        """Move files and folders from the staging folder to their places, in this order; other files stay there."""
        staged = self.path / STAGING
        sync(staged)
        for name in names:
            whole = not os.path.lexists(self.path / name) or (staged / name).is_file()
            files = [f"{name}/{file}" for file in file_names(staged / name)] or [name]
            earlier = [file for file in self.files if file.startswith(f"{name}/") and file not in files]
            # A process that is killed here leaves files as they were, which are a run's nevertheless.
            self.notes["replaced"] = {file: self.files[file] for file in files if self.files.get(file)}
            self.files |= {file: describe(staged / file) for file in files}
            self.save()  # first: a file that is listed may be missing, never the reverse
            for file in [name] if whole else files:
                (self.path / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / file, self.path / file)
            self.remove(earlier)
        self.notes.pop("replaced", None)
        self.save()
        sync_path(self.path)

    def edited(self, folder: str) -> Path | None:
        """Return a file below `folder` that is not as a run wrote it: somebody has put work into it since."""
        replaced = self.notes.get("replaced", {})
        for name, entry in self.files.items():
            path = self.path / name
            known = (entry, replaced.get(name))
            if entry and name.startswith(f"{folder}/") and path.is_file() and describe(path) not in known:
                return path
        return None

    def changed(self, *folders: str) -> str | None:
        """Say which file below `folders` is missing or not as it was written; `None` where all are."""
        listed = {name: entry for name, entry in self.files.items() if name.split("/")[0] in folders}
        missing = next((name for name in listed if not (self.path / name).is_file()), None)
        if missing is not None:
            return f"{self.path / missing} is missing"
        return first_difference(self.path, {name: entry for name, entry in listed.items() if entry})

    # -- deleting

    def remove(self, names: Iterable[str]) -> None:
        """Delete listed files and the folders left empty: marks of whole checkpoints first, the recipe last."""
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
        self.remove(list(self.files))
        self.save()

    def rotate(self, limit: int | None, newest: str) -> None:
        """Delete the oldest checkpoints, so that `limit` are left of those up to `newest`."""
        names = [path.name for path in checkpoints(self.path)]
        old = names[: names.index(newest) + 1][: -limit if limit else 0]
        self.remove([file for file in self.files if file.split("/")[0] in old])
        self.save()


def is_run_name(name: str) -> bool:
    """Whether `name` is a path, relative to a run's folder, of something that a run may write and delete there."""
    top, *rest = name.split("/")
    known = top in (*FILES, *FOLDERS, STAGING) or re.fullmatch(r"checkpoint-\d+", top)
    return bool(known) and not {"", ".", ".."}.intersection(rest)


def is_claim(name: str) -> bool:
    """Whether a run writes to the folder `name` file by file, so that it is incomplete where a process was killed."""
    return name == STAGING or bool(re.fullmatch(r"checkpoint-\d+", name))


def is_manifest(content: dict[str, Any]) -> bool:
    notes = content.get("notes")
    return (
        {"version", "writing", "files"} <= content.keys()
        and is_listing(content["files"], unknown=True)
        and isinstance(notes, dict)
        and all(isinstance(note, dict) for note in notes.values())
    )


def checkpoints(folder: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def refuse_overlap(recipe: Recipe) -> None:
    """Raise `RecipeError` where the output folder and what the run reads lie in one another."""
    output = Path(recipe.output_dir).resolve()
    for what, name in recipe.inputs():
        path = Path(name).expanduser()
        # A Hub name is no path here; of a pattern, the folder that it searches or the files that it matches are meant.
        matched = [] if os.path.exists(path) else glob.glob(str(path), recursive=True)
        paths = [Path(found) for found in matched if os.path.isfile(found)] if matched else [path]
        if "**" in path.parts:
            paths.append(Path(*path.parts[: path.parts.index("**")]))
        for path in (path.resolve() for path in paths):
            if is_in(output, path) or is_in(path, output):
                raise RecipeError(
                    f"output_dir {recipe.output_dir} overlaps the {what} {name}: neither may lie in the other; choose "
                    "another output_dir"
                )
