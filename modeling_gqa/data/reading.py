"""Text files and the documents in them: unpacked, decoded, and read in pieces or in rows.

A file that is given by name is always read. In a folder, hidden and empty files are left out, and so are folders of
programs, models and training runs. A document is a text file, or a row of a JSONL, JSON or Parquet file. A file that
cannot be read raises a `UserError` of one line that names the file and the line or the row.
"""

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from modeling_gqa_cli.errors import UserError, install_extra

# -- Formats

CHUNK = 2**20  # bytes read at a time
PARQUET_ROWS = 256  # read at a time


def open_zstd(path: Path) -> BinaryIO:
    from pyarrow import input_stream  # slow to import, and only this needs it

    return io.BufferedReader(input_stream(str(path), compression="zstd"), CHUNK)


PACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}


@contextmanager
def one_line_errors(where: Callable[[], str]) -> Iterator[None]:
    """Raise any exception as a `UserError` of one line that says `where`, and a missing package by its name."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise UserError(f"{where()} needs {package}, which is not installed: {install_extra('conversion')}") from error
    except Exception as error:  # each format's reader has its own classes
        said = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot read {where()}: {said or str(error) or type(error).__name__}") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, unpacked."""
    with one_line_errors(lambda: str(path)), PACKED.get(path.suffix.lower(), partial(open, mode="rb"))(path) as file:
        yield file


def text_pieces(path: Path, newlines: bool = False) -> Iterator[str]:
    """Yield a text file in pieces, without a byte order mark; `newlines`: every end of a line becomes "\\n"."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True) if newlines else utf8
    line = 1
    with opened(path) as file:
        while True:
            data = file.read(CHUNK)
            try:
                piece = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise UserError(f"{path} is not UTF-8 text: {error.reason} in line {line}") from None
            if "\0" in piece:
                line += piece.count("\n", 0, piece.index("\0"))
                raise UserError(f"{path} is not UTF-8 text: a NUL character in line {line}")
            if piece:
                line += piece.count("\n")
                yield piece
            if not data:
                return


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file."""
    begun: list[str] = []  # pieces of a line whose end has not come yet
    for piece in text_pieces(path):
        end, *others = piece.split("\n")
        begun.append(end)
        for line in others:
            yield "".join(begun)
            begun = [line]
    yield "".join(begun)


def parsed(text: str, path: Path, first: int = 1) -> Any:
    """Return the JSON value in `text`, which begins in the line `first` of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {first + error.lineno - 1} is not JSON: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
        raise UserError(f"{path}, line {first} is not JSON: {error}") from None


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line, after its place; lines of white space are left out."""
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            yield f"{path}, line {number}", parsed(line, path, number)


def json_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the elements of an array, which is read as a whole, or one object, or a value a line; after its place."""
    head = next((piece for piece in text_pieces(path) if piece.strip()), "").lstrip()
    if head[:1] != "[":
        try:
            next(json_lines(path), None)
        except UserError:
            pass  # an object over several lines
        else:
            yield from json_lines(path)
            return
    value = parsed("".join(text_pieces(path)), path)
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{path}, row {number}", row


def jsonl_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of one JSON value a line, each after its place.

    A file whose end is cut off is refused before its first row, because a caller may stop before it reaches the end.
    The end of a packed file is not known before it is unpacked.
    """
    if path.suffix.lower() not in PACKED:
        with opened(path) as file:
            first = file.read(1)
            file.seek(max(0, path.stat().st_size - CHUNK))
            last = file.read().rstrip()[-1:]
        if (first, last) not in ((b"{", b"}"), (b'"', b'"')):
            deque(json_lines(path), maxlen=0)  # raises for the first broken row
    yield from json_lines(path)


def parquet_rows(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file, each after its number; of `column` alone where the file has it."""
    number = 0
    with one_line_errors(lambda: f"{path}" + (f" behind row {number}" if number else "")):
        from pyarrow import ArrowInvalid  # slow to import, and only this needs it
        from pyarrow.parquet import ParquetFile

        try:
            file = ParquetFile(path, buffer_size=CHUNK)
        except ArrowInvalid as error:
            raise UserError(f"{path} is not a Parquet file: {error}") from error
        with file:
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row


ROW_READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": jsonl_rows,
    ".json": json_rows,
    ".parquet": parquet_rows,
}


# -- Files and folders

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


def find_files(paths: Iterable[str | Path], column: str | None = None) -> TextFiles:
    """Return the files at `paths`, each once; folders are searched for the suffixes that can be read.

    Args:
        paths: files, which are read whatever their suffixes, folders, and patterns such as `corpus/**/*.txt`. Files
            that a pattern matches are left out for the same reasons as files in a folder.
        column: JSON in a folder without text in this column is left out, too; `None` keeps it.

    Raises:
        UserError: a path has nothing to read, a file is empty, or a folder cannot be opened.
    """
    found = TextFiles()
    for name in paths:
        before = len(found.paths)
        try:
            path = Path(name).expanduser()
            matched = [] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        except (OSError, RuntimeError) as error:  # a name too long, a folder that is shut, an unknown ~user
            raise UserError(f"nothing to read at {str(name)[:200]}: {error}") from error
        if path.is_dir():
            walk(path, found, column)
        elif path.is_file():
            if not path.stat().st_size:
                raise UserError(f"{path} is empty")
            found.paths.append(path)
        for file in matched:
            if file.is_file():
                keep(file, found, column)
        if len(found.paths) == before:
            left_out = "".join(f" ({note})" for note in found.notes)
            raise UserError(
                f"nothing to read at {path}{left_out}: give files, or folders of {', '.join(SUFFIXES)} files (or these "
                f"packed as {', '.join(PACKED)})"
            )
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
        head = next((piece for piece in text_pieces(path) if piece.strip()), "")
        row, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
    except (UserError, ValueError, RecursionError):  # a first row that is longer than a piece, too
        return True
    return isinstance(row, str) or (isinstance(row, dict) and isinstance(row.get(column), str))


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
