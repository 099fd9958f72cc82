"""How each format of text files is read: unpacked, decoded, in pieces or in rows.

A file that cannot be read raises a `UserError` of one line that names the file and the line or the row.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from modeling_gqa_cli.errors import UserError, install_extra

CHUNK = 2**20  # bytes read at a time
PARQUET_ROWS = 256  # read at a time
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()


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


class JSONValues:
    """Reads one JSON value after the other from a file that is read in pieces."""

    def __init__(self, path: Path) -> None:
        self.path, self.pieces, self.text, self.at, self.line = path, text_pieces(path), "", 0, 1

    def where(self) -> str:
        """Return the file and the line that is being read."""
        return f"{self.path}, line {self.line}"

    def more(self) -> bool:
        """Read at least as much again as is left, so that long values need few attempts; return False at the end."""
        rest, read = self.text[self.at :], ""
        while len(read) <= len(rest) and (piece := next(self.pieces, "")):
            read += piece
        self.text, self.at = rest + read, 0
        return bool(read)

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def peek(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        while True:
            self.advance(WHITE_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        """Read and return the next value."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # A value that is cut at the end of what has been read may be whole in what follows.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 16
                if not cut or not self.more():
                    raise
            else:
                self.advance(end)
                return value

    def skip(self, character: str) -> None:
        """Read past a character; raises `ValueError` where another one comes."""
        if self.peek() != character:
            raise ValueError(f"{character!r} is missing")
        self.at += 1


def json_rows(path: Path, column: str | None = None, arrays: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file, or the elements where it is an array, each after its place."""
    values = JSONValues(path)
    try:
        array = arrays and values.peek() == "["
        if array:
            values.skip("[")
        while values.peek() not in ("", "]" if array else ""):
            where, row = values.where(), values.value()
            yield where, row
            if array and values.peek() != "]":
                values.skip(",")
        if array:
            values.skip("]")
        if values.peek():
            raise ValueError("text behind the array")
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{values.where()} is not JSON: {getattr(error, 'msg', error)}") from None


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
            deque(json_rows(path, arrays=False), maxlen=0)  # raises for the first broken row
    yield from json_rows(path, arrays=False)


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
