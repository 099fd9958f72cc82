"""Lists of files with sizes and SHA-256, by which a run recognizes the files of earlier runs and damage to them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypedDict

from ...common.files import sync_path

CHUNK = 2**22  # bytes read at a time


class Entry(TypedDict):
    """The size of a file in bytes, and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


def describe(path: Path) -> Entry:
    """Read a file and return its size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def list_folder(folder: Path) -> dict[str, Entry]:
    """Describe every file below `folder`, by its path relative to it."""
    return {name: describe(folder / name) for name in file_names(folder)}


def file_names(folder: Path) -> list[str]:
    """Return every file and link below `folder`, as paths relative to it; links are not followed."""
    found = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        found += [Path(root, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def first_difference(folder: Path, listed: dict[str, Entry]) -> str | None:
    """Return which listed file is missing or has changed, in words; `None` where all are as they were."""
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != entry["size"]:
            return f"{path} has {size:,} bytes in place of {entry['size']:,}"
    # All sizes first: comparing them takes no time.
    for name, entry in listed.items():
        try:
            same = describe(folder / name) == entry
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if not same:
            return f"{folder / name} has changed since it was written: its SHA-256 is another"
    return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, `None` where the file is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_listing(value: Any, unknown: bool = False) -> bool:
    """Return whether `value`, read from a JSON file, is a list of files.

    Args:
        unknown: accept `None` in the place of a file's size and hash.
    """
    return isinstance(value, dict) and all(
        (entry is None and unknown)
        or (isinstance(entry, dict) and {key: type(item) for key, item in entry.items()} == Entry.__annotations__)
        for entry in value.values()
    )


def write_text(path: Path, text: str) -> None:
    """Write a file so that a killed process leaves either the old or the new content on disk."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)  # a full disk needs every byte
        raise
    sync_path(path.parent)
