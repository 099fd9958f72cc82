"""How each format of text files is read: unpacked, decoded, in pieces or in rows.

A file that cannot be read raises a `UserError` of one line that names the file and the line or the row.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..common.errors import UserError, install_extra

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
        said = said or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot read {where()}: {said}") from error


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


# Whole numbers are read as floats, because Python refuses to read an int of more than 4300 digits.
DECODER = json.JSONDecoder(parse_int=float)


@contextmanager
def json_errors(where: Callable[[], str]) -> Iterator[None]:
    """Raise errors of JSON as a `UserError` that says `where`."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise UserError(f"{where()} is not JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{where()} is nested too deeply to be read") from None


def jsonl_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of one JSON value a line, each after its place.

    A file that ends in a broken line is refused before its first row, since whoever has read enough stops earlier. Of
    packed files the end is not known before they are unpacked.
    """
    if path.suffix.lower() not in PACKED:
        try:
            DECODER.decode(last_line(path).decode())
        except (ValueError, RecursionError):
            deque(json_lines(path), maxlen=0)  # raises for the first broken line, whose number it counts
    yield from json_lines(path)


def last_line(path: Path) -> bytes:
    """Return the last line of a file that is not blank, and read no more than twice its length, and 1 MiB."""
    found = b""
    with opened(path) as file:
        start = file.seek(0, os.SEEK_END)
        while start and b"\n" not in found.rstrip():
            end, start = start, max(0, start - len(found) - CHUNK)
            file.seek(start)
            found = file.read(end - start) + found
    return found.rstrip().rpartition(b"\n")[2]


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file's lines, each after its place; blank lines are left out."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 text: {error.reason}") from None
            if text.strip():
                with json_errors(partial(str, where)):
                    row = DECODER.decode(text)
                yield where, row


class JSONValues:
    """Reads one JSON value after the other from a file that is read in pieces."""

    def __init__(self, path: Path) -> None:
        self.path, self.pieces, self.text, self.at, self.line = path, text_pieces(path), "", 0, 1

    def where(self) -> str:
        """Return the file and the line that is being read."""
        return f"{self.path}, line {self.line}"

    def more(self) -> bool:
        """Read at least as much again as is left, so that long values need few attempts; return False at the end."""
        parts = [self.text[self.at :]]
        length = 0
        while length <= len(parts[0]) and (piece := next(self.pieces, "")):
            parts.append(piece)
            length += len(piece)
        self.text, self.at = "".join(parts), 0
        return bool(length)

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def peek(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        while True:
            end = self.at
            while self.text[end : end + 1] in (" ", "\t", "\n", "\r"):
                end += 1
            self.advance(end)
            if end < len(self.text) or not self.more():
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
                    self.advance(error.pos)
                    raise
            else:
                self.advance(end)
                return value

    def skip(self, character: str) -> None:
        """Read past a character; raises JSONDecodeError where another one comes."""
        if self.peek() != character and character:
            raise json.JSONDecodeError(f"{character!r} is missing", self.text, self.at)
        self.at += len(character)


def json_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a JSON array, or the values of a file without one, each after its place."""
    values = JSONValues(path)
    with json_errors(values.where):
        closing = "]" if values.peek() == "[" else ""
        values.skip(closing and "[")
        while values.peek() not in ("", closing):
            where, row = values.where(), values.value()
            yield where, row
            if closing and values.peek() != closing:
                values.skip(",")
        values.skip(closing)
        if values.peek():
            raise json.JSONDecodeError("text behind the array", values.text, values.at)


def parquet_rows(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file, each after its number; of `column` alone where the file has it."""
    number = 0
    with one_line_errors(lambda: f"{path}" + (f" behind row {number}" if number else "")):
        from pyarrow import ArrowInvalid  # slow to import, and only this needs it
        from pyarrow.parquet import ParquetFile

        try:
            file = ParquetFile(path, buffer_size=CHUNK)
        except ArrowInvalid as error:
            raise UserError(f"{path} is not a Parquet file: {' '.join(str(error).split())}") from error
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
