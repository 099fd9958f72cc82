"""The folder of a run. One process writes there, and it deletes only files that a run wrote.

A run does not begin where a file that no run wrote has a name that runs use.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...common.errors import UserError
from ...common.files import sync, sync_path
from .listing import describe, file_names, first_difference, list_folder, write_text
from .manifest import MANIFEST, SAVED_RECIPE, STAGING, Manifest, checkpoints, run_files

LOCK, COMPLETE = ".run.lock", "complete.json"


class RunFolder:
    """One run's folder, opened by the main process alone.

    Raises:
        UserError: another process writes there, or a file that no run wrote has a name that runs use.
        OSError: the folder cannot be written.

    Example:
        ```python
        import tempfile

        from modeling_gqa.training.folder.run_folder import RunFolder

        with tempfile.TemporaryDirectory() as path:
            folder = RunFolder(path)
            folder.open()
            with folder.staging() as staged:
                (staged / "results.json").write_text("{}")
                folder.place("results.json")
            folder.close()
            assert list(folder.manifest.files) == ["results.json"]
        ```
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = Manifest(self.path)
        self.made: list[Path] = []
        self.sealing_seconds = 0.0  # in which checkpoints were written to disk and hashed
        self.lock = FileLock(self.path / LOCK)

    # -- opening and closing

    def open(self) -> None:
        """Become the only writer, and remove what a killed process had not finished writing."""
        path = self.path.absolute()
        own = (path / MANIFEST, path / LOCK, path, *path.parents)
        self.made = [item for item in own if not os.path.lexists(item)]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # Children of a killed process hold its lock until they notice.
            self.lock.acquire(timeout=0 if self.manifest.writer_lives() else 15)
        except Timeout:
            writer = self.manifest.last_writer()
            who = f"process {writer.get('pid', '?')} on {writer.get('host', '?')}, since {writer.get('since', '?')},"
            raise UserError(
                f"{who} is writing to {self.path}: wait for its end, or choose another output_dir"
            ) from None
        self.manifest.read()
        self.manifest.sign()
        if self.manifest.writing:
            self.sweep(self.manifest.writing)

    def close(self) -> None:
        """Release the lock. Where this run wrote nothing, delete what `open` has made."""
        if not self.lock.is_locked:
            return
        self.manifest.writer = None
        if self.manifest.files:
            with suppress(OSError):
                self.manifest.save()
        else:
            for path in self.made:
                with suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()
        self.lock.release(force=True)

    def refuse_foreign(self, names: Iterable[str] | None = None) -> None:
        """Raise `UserError` where a file that no run wrote stands under a name that runs use, or under `names`."""
        for name in run_files(self.path, names):
            if name not in self.manifest.files:
                raise UserError(
                    f"{self.path / name} is not what a run wrote, and stands where this run would write: move it, or "
                    "choose another output_dir"
                )

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a recipe, a checkpoint or a finished model."""
        names = (SAVED_RECIPE, "final", *(path.name for path in checkpoints(self.path)))
        return any((self.path / name).exists() for name in names)

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
            self.sweep(STAGING)

    def claim(self, name: str) -> None:
        """Note that this run will write the folder `name`, and delete what an earlier run wrote there."""
        self.remove([file for file in self.manifest.files if file.startswith(f"{name}/")])
        if os.path.lexists(self.path / name):
            raise UserError(f"{self.path / name} holds what no run wrote, and this run must write there: move it away")
        self.manifest.writing = name
        self.manifest.save()

    def sweep(self, name: str) -> None:
        """Delete the claimed folder `name` unless it is a whole checkpoint, and end the claim."""
        if (self.path / name / COMPLETE).is_file():
            self.manifest.files |= {f"{name}/{file}": None for file in file_names(self.path / name)}
        else:
            shutil.rmtree(self.path / name, ignore_errors=True)
        self.manifest.writing = None
        with suppress(OSError):  # of a full disk, which removing may not have helped
            self.manifest.save()

    @contextmanager
    def checkpoint(self, name: str) -> Iterator[dict[str, Any]]:
        """While a checkpoint is written: list it and mark it as whole at the end, or delete it on an error.

        Yields:
            An object whose entries go into the mark `complete.json`. The mark lists the files with their sizes and
            hashes, and is written when they are on disk.
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
            earlier = [file for file in self.manifest.files if file.startswith(f"{name}/") and file not in files]
            # Where a process is killed here, the old files are left; `edited` must know their hashes as well.
            self.manifest.notes["replaced"] = {
                file: self.manifest.files[file] for file in files if self.manifest.files.get(file)
            }
            self.manifest.files |= {file: describe(staged / file) for file in files}
            self.manifest.save()  # first: a listed file may be missing, but no file of a run may be unlisted
            for file in [name] if whole else files:
                (self.path / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / file, self.path / file)
            self.remove(earlier)
        self.manifest.notes.pop("replaced", None)
        self.manifest.save()
        sync_path(self.path)

    def edited(self, folder: str) -> Path | None:
        """Return a file below `folder` that the user has edited; `None` where all are as a run wrote them."""
        replaced = self.manifest.notes.get("replaced", {})
        for name, entry in self.manifest.files.items():
            path = self.path / name
            known = (entry, replaced.get(name))
            if entry and name.startswith(f"{folder}/") and path.is_file() and describe(path) not in known:
                return path
        return None

    def changed(self, *folders: str) -> str | None:
        """Return which file below `folders` is missing or has changed, in words; `None` where all are as they were."""
        listed = {name: entry for name, entry in self.manifest.files.items() if name.split("/")[0] in folders}
        missing = next((name for name in listed if not (self.path / name).is_file()), None)
        if missing is not None:
            return f"{self.path / missing} is missing"
        return first_difference(self.path, {name: entry for name, entry in listed.items() if entry})

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
            del self.manifest.files[name]
            for folder in list(Path(name).parents)[:-1]:
                with suppress(OSError):
                    (self.path / folder).rmdir()

    def remove_run(self) -> None:
        """Delete every listed file."""
        self.remove(list(self.manifest.files))
        self.manifest.save()

    def rotate(self, limit: int | None, newest: str, best: str | None = None) -> None:
        """Delete the oldest checkpoints but `best`, so that `limit` are left of those up to `newest`, or one more."""
        names = [path.name for path in checkpoints(self.path)]
        old = names[: names.index(newest) + 1][: -limit if limit else 0]
        self.remove([file for file in self.manifest.files if file.split("/")[0] in {*old} - {best}])
        self.manifest.save()
