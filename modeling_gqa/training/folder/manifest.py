"""`manifest.json` in a run's folder: the files that runs wrote there, and the process that writes there now.

A file that is not listed belongs to the user.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ..results import RESULTS
from .earlier import is_earlier, is_recipe
from .listing import Entry, file_names, is_listing, read_object, write_text

MANIFEST, STAGING = "manifest.json", ".new"
SAVED_RECIPE, SAVED_MODEL = "recipe.yaml", "model.json"
FOLDERS, FILES = ("data", "tokenizer", "final"), (SAVED_RECIPE, SAVED_MODEL, RESULTS)


class Manifest:
    """What `manifest.json` says; `save` writes it.

    Attributes:
        files: sizes and hashes of the files that runs wrote, by their paths relative to the folder; `None` for a file
            of which only the name is known.
        notes: hashes of the models that the run reads, versions of its libraries, and files that are being replaced.
        writing: the folder that is being written file by file, and is incomplete where a process was killed.
        writer: the process that writes now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / MANIFEST
        self.files: dict[str, Entry | None] = {}
        self.notes: dict[str, Any] = {}
        self.writing: str | None = None
        self.writer: dict[str, Any] | None = None

    def read(self) -> None:
        """Read the file; without it, list what a run of a version without manifests wrote.

        Raises:
            UserError: it is the manifest of something else, or damaged.
        """
        content = read_object(self.path) or {}
        if os.path.lexists(self.path):
            if not is_manifest(content):
                raise UserError(f"{self.path} is not the list of files that runs write: move it away")
            self.files = {name: entry for name, entry in content["files"].items() if is_run_name(name)}
            self.notes = content["notes"]
            self.writing = name if is_claim(name := str(content["writing"])) else None
        elif read_object(self.folder / SAVED_MODEL) and is_recipe(self.folder / SAVED_RECIPE):
            self.files = {name: None for name in run_files(self.folder) if name in FILES or is_earlier(name)}

    def save(self) -> None:
        content = {
            "version": 1,
            "writer": self.writer,
            "writing": self.writing,
            "notes": self.notes,
            "files": self.files,
        }
        write_text(self.path, json.dumps(content, indent=1) + "\n")

    def sign(self) -> None:
        """Name this process as the one that writes."""
        self.writer = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.save()

    def last_writer(self) -> dict[str, Any]:
        """Return what the file on disk says of the process that writes."""
        writer = (read_object(self.path) or {}).get("writer")
        return writer if isinstance(writer, dict) else {}

    def writer_lives(self) -> bool:
        """Return whether the process that wrote last may still run; for a process of another machine, return True."""
        writer = self.last_writer()
        if writer.get("host") != socket.gethostname() or not isinstance(writer.get("pid"), int):
            return True
        try:
            os.kill(writer["pid"], 0)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
        return True


def run_files(folder: Path, names: Iterable[str] | None = None) -> Iterator[str]:
    """Yield the files that exist in `folder` under the names that runs use, or under `names`."""
    if names is None:
        names = (*FILES, *FOLDERS, *(path.name for path in checkpoints(folder)))
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from (f"{name}/{file}" for file in file_names(path))
        elif path.exists() or path.is_symlink():
            yield name


def is_run_name(name: str) -> bool:
    """Return whether runs write and delete files under the path `name`, which is relative to a run's folder."""
    top, *rest = name.split("/")
    known = top in (*FILES, *FOLDERS, STAGING) or re.fullmatch(r"checkpoint-\d+", top)
    return bool(known) and not {"", ".", ".."}.intersection(rest)


def is_claim(name: str) -> bool:
    """Return whether `name` is a folder that a run writes file by file, which a killed process leaves incomplete."""
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
