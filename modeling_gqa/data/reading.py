"""Text files and the documents in them.

A file that is given by name is always read. In a folder, hidden and empty files are left out, and so are folders of
programs, models and training runs. A document is a text file, or a row of a JSONL, JSON or Parquet file.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from modeling_gqa_cli.errors import UserError

from .formats import PACKED, ROW_READERS, json_rows, text_pieces

SUFFIXES = (".txt", ".md", ".rst", ".py", *ROW_READERS)
# A folder with one of these files holds programs, a model or a training run, and no collected text.
MARKERS = (
    "pyvenv.cfg",
    "conda-meta",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "validation.npy",
)
RUN = ("recipe.yaml", "model.json")  # a training run has both
PROGRAMS = ("node_modules", "__pycache__")

# Reads a text from its beginning, in pieces.
Document = Callable[[], Iterator[str]]


@dataclass
class TextFiles:
    """The files to read.

    Args:
        paths: in a fixed order.
        skipped: by reason, what was left out of folders and patterns.
    """

    paths: list[Path] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def notes(self) -> list[str]:
        """One line for each reason, which names the first three that were left out."""
        return [
            f"not read ({reason}), {len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for reason, names in self.skipped.items()
        ]


def find_files(paths: Iterable[Path], column: str | None = None, matched: Iterable[Path] = ()) -> TextFiles:
    """Return the files at `paths`, each once; folders are searched for the suffixes that can be read.

    Args:
        paths: files, which are read whatever their suffixes, and folders.
        column: JSON in a folder without text in this column is left out, too; `None` keeps it.
        matched: files that a pattern matched; they are left out for the same reasons as files in a folder.

    Raises:
        UserError: a path has nothing to read, a file is empty, or a folder cannot be opened.
    """
    found = TextFiles()
    for path in paths:
        before = len(found.paths)
        if path.is_dir():
            walk(path, found, column)
        elif path.is_file():
            if not path.stat().st_size:
                raise UserError(f"{path} is empty")
            found.paths.append(path)
        if len(found.paths) == before:
            left_out = "".join(f" ({note})" for note in found.notes)
            raise UserError(
                f"nothing to read at {path}{left_out}: give files, or folders of {', '.join(SUFFIXES)} files (or these "
                f"packed as {', '.join(PACKED)})"
            )
    for path in matched:
        keep(path, found, column)
    # A file that was named twice, or by a link as well, is one.
    once: dict[str, Path] = {}
    for path in sorted(set(found.paths)):
        once.setdefault(os.path.realpath(path), path)
    found.paths = list(once.values())
    return found


def walk(folder: Path, found: TextFiles, column: str | None) -> None:
    """Add the files in a folder and its folders to `found`."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=refuse):
        for name in sorted(folders):
            if reason := why_skipped(Path(root, name)):
                folders.remove(name)
                found.skipped[reason].append(str(Path(root, name)))
        for name in sorted(names):
            if kind(Path(name)):
                keep(Path(root, name), found, column)


def why_skipped(folder: Path) -> str:
    """Return why a folder is left out; "" where it is searched."""
    if folder.name.startswith("."):
        return "hidden"
    if folder.is_symlink():
        return "folders behind links"
    if folder.name in PROGRAMS or any((folder / name).exists() for name in MARKERS):
        return "folders of programs and models"
    return "training runs" if all((folder / name).exists() for name in RUN) else ""


def keep(path: Path, found: TextFiles, column: str | None) -> None:
    """Add a file to `found`, or its name to what was left out."""
    if path.name.startswith("."):
        found.skipped["hidden"].append(str(path))
    elif not path.is_file():
        found.skipped["not files"].append(str(path))
    elif not path.stat().st_size:
        found.skipped["empty"].append(str(path))
    elif column and kind(path) == ".json" and not holds_text(path, column):
        found.skipped[f"JSON without text in {column!r}"].append(str(path))
    else:
        found.paths.append(path)


def holds_text(path: Path, column: str) -> bool:
    """Return whether the first row of a JSON file has text; settings have none. A file that cannot be read is kept."""
    try:
        for _, row in islice(json_rows(path), 1):
            return isinstance(row, str) or (isinstance(row, dict) and isinstance(row.get(column), str))
    except UserError:
        pass
    return True


def kind(path: Path) -> str:
    """Return the suffix by which a file is read, in lower case and without that of its packing; "" for others."""
    packed = path.suffix.lower() in PACKED
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    # Parquet packs its own pages.
    return suffix if suffix in SUFFIXES and not (packed and suffix == ".parquet") else ""


def read_documents(path: Path, column: str, newlines: bool = False) -> Iterator[Document]:
    """Yield a file's documents.

    Args:
        path: the file.
        column: the field of rows that holds the text.
        newlines: whether every end of a line in a text file becomes "\\n".

    Raises:
        UserError: the file cannot be read, or a row has no text.
    """
    if (suffix := kind(path)) in ROW_READERS:
        for where, row in ROW_READERS[suffix](path, column):
            yield partial(iter, (row_text(row, column, where),))
        return
    head = tuple(islice(text_pieces(path, newlines), 2))
    # A short file is not read again.
    yield partial(iter, head) if len(head) < 2 else partial(text_pieces, path, newlines)


def row_text(row: Any, column: str, where: str) -> str:
    """Return the text of a row, which is an object with the field `column`, or the text itself."""
    text = row.get(column) if isinstance(row, dict) else row
    if isinstance(row, dict) and column in row and not isinstance(text, str):
        raise UserError(f"{where}: column {column!r} holds {type(text).__name__} in place of text")
    if not isinstance(text, str):
        found = (", ".join(row) if isinstance(row, dict) else type(row).__name__)[:200]
        raise UserError(f"{where}: no text in column {column!r} (found: {found}); set text_column (--text-column)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where}: the text holds {code}, half of a character (a surrogate)") from None
    return text
