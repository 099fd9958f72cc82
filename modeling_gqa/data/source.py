"""The text of a training: files and folders, a Hub data set, or Python's standard library; and what is held out of it.

A *document* is one file, or one row of a JSONL, JSON or Parquet file or a Hub data set. It is read in pieces, so that a
long file is never in memory as a whole. A hash of its text assigns it to training or validation, so that the same text
is always held out.
"""

import hashlib
import json
import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import TextOptions, public_name

from .reading import Document, find_files, one_line_errors, read_documents, row_text

# Tests repeat themselves, installed packages have other licences, and lib2to3's test data is broken on purpose.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHUFFLE_BUFFER = 10_000  # rows, of a streamed Hub data set
SPLIT_RECORD = "split.json"
PIECE = 2**18  # characters; a document of more than twice this number is tokenized in pieces
# Places where every tokenizer begins a new word: a space after another character, and a letter or digit at the start of
# a line.
BOUNDARY = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\W_])")


# -- Sources


@dataclass(frozen=True)
class Source:
    """Where the text comes from.

    Attributes:
        name: of the data set, or of the files and folders without their paths.
        license: of the text; `None` where the options do not say.
        read: yields the documents; it raises `UserError` where it cannot.
        notes: returns a line for each reason why files are left out.
        state: returns what is another where the text has changed, as JSON has it; `None` where that is not known.
    """

    name: str
    license: str | None
    read: Callable[[], Iterator[Document]]
    notes: Callable[[], list[str]] = list
    state: Callable[[], Any] = lambda: None

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not blank."""
        return (text for text in self.read() if any(piece.strip() for piece in text()))


def open_source(options: TextOptions, seed: int = 0) -> Source:
    """Return the source of text that the options name; no file is opened before `documents` is called.

    `seed` sets the order of the rows of a streamed Hub data set.
    """
    column = options.text_column
    if options.dataset_name:
        rows = cache(lambda: hub_rows(options, seed))
        name, state = public_name(options.dataset_name), lambda: getattr(rows(), "_fingerprint", None)
        return Source(name, options.license, lambda: hub_documents(options, rows), state=state)
    if options.data_files:
        name = ", ".join(os.path.basename(os.path.abspath(path)) for path in options.data_files)
        found = cache(lambda: find_files(options.data_files, column))

        def read() -> Iterator[Document]:
            return chain.from_iterable(read_documents(path, column) for path in found().paths)

        return Source(name, options.license, read, lambda: found().notes, lambda: states(found().paths))
    name = "the Python standard library's source code"
    return Source(name, options.license or "PSF-2.0", stdlib_documents, state=lambda: states(stdlib_files()))


def states(paths: Iterable[Path]) -> list[list[Any]]:
    """Return what tells files from others, and from what they were: their paths, inodes, sizes and times."""
    found = ((os.path.abspath(path), path.stat()) for path in paths)
    return [[path, x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns] for path, x in found]


def stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path for path in sorted(root.rglob("*.py")) if not STDLIB_SKIPPED.intersection(path.relative_to(root).parts)
    ]


def stdlib_documents() -> Iterator[Document]:
    for path in stdlib_files():
        yield partial(iter, (path.read_bytes().decode("utf-8", errors="replace"),))


def hub_rows(options: TextOptions, seed: int) -> Any:
    import datasets

    name, split = options.dataset_name, options.dataset_split
    with one_line_errors(lambda: f"the Hub data set {options.dataset_name}"):
        rows = datasets.load_dataset(name, options.dataset_config_name, split=split, streaming=options.streaming)
        return rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if options.streaming else rows


def hub_documents(options: TextOptions, rows: Callable[[], Any]) -> Iterator[Document]:
    with one_line_errors(lambda: f"the Hub data set {options.dataset_name}"):
        for number, row in enumerate(rows(), 1):
            where = f"{options.dataset_name}, row {number}"
            yield partial(iter, (row_text(row, options.text_column, where),))


# -- Training and validation


@dataclass(frozen=True)
class Split:
    """Which documents are held out for validation.

    Args:
        threshold: documents whose hash is smaller are held out.
        cut: of a single document, the character from which on its text is held out.
        characters: in each part; empty where they have not been counted.
    """

    source: Source
    threshold: int
    cut: int | None = None
    characters: dict[str, int] = field(default_factory=dict, compare=False)

    def documents(self, part: str) -> Iterator[str]:
        """Yield the texts of `train` or `validation`; a long text comes in pieces."""
        return (text for text, _ in self.pieces(part))

    def pieces(self, part: str) -> Iterator[tuple[str, bool]]:
        """Yield the texts of `train` or `validation` in pieces, each with whether its document ends with it."""
        for document in self.source.documents():
            if self.cut is not None:
                first, stop = (0, self.cut) if part == "train" else (self.cut, None)
                yield from cut_text(characters(document(), first, stop))
            elif (hash_text(document())[0] < self.threshold) == (part == "validation"):
                yield from cut_text(document())


def hash_text(pieces: Iterable[str]) -> tuple[int, int]:
    """Return a 64-bit hash of a text, and the number of its characters."""
    digest, length = hashlib.blake2b(digest_size=8), 0
    for piece in pieces:
        digest.update(piece.encode())
        length += len(piece)
    return int.from_bytes(digest.digest(), "big"), length


def characters(pieces: Iterable[str], first: int, stop: int | None) -> Iterator[str]:
    """Yield `text[first:stop]` of a text that comes in pieces."""
    at = 0
    for piece in pieces:
        yield piece[max(first - at, 0) : None if stop is None else max(stop - at, 0)]
        at += len(piece)


def cut_text(pieces: Iterable[str], length: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Cut a text that comes in pieces into others of `length` to twice `length` characters; say which is the last.

    Cuts are at boundaries of words where there are any. They depend on the text, and not on the pieces that it came in.
    """
    text, start = "", 0
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while len(text) - start > 2 * length:
            found = BOUNDARY.search(text, start + length, start + 2 * length)
            end = found.start() if found else start + length
            yield text[start:end], False
            start = end
    yield text[start:], True


def split_source(source: Source, options: TextOptions) -> Split:
    """Hold out `validation_fraction` of the documents; raises `UserError` where there are none."""
    fraction = options.validation_fraction
    streamed = Split(source, round(fraction * 2**64))
    if options.streaming and options.dataset_name:
        return streamed
    hashes, lengths = array("Q"), array("Q")
    for document in source.documents():
        number, length = hash_text(document())
        hashes.append(number)
        lengths.append(length)
        if number != hashes[0] and options.streaming:
            return streamed
    numbers, characters = np.array(hashes, np.uint64), np.array(lengths, np.uint64)
    distinct = np.unique(numbers)
    if not len(distinct):
        raise UserError(f"{source.name} holds no text")
    if len(distinct) == 1:
        threshold, cut = 0, round(lengths[0] * (1 - fraction))
        held_out = (lengths[0] - cut) * len(lengths)
    else:
        count = min(max(1, round(len(distinct) * fraction)), len(distinct) - 1)
        threshold, cut = int(distinct[count]), None
        held_out = int(characters[numbers < threshold].sum())
    return Split(source, threshold, cut, {"train": sum(lengths) - held_out, "validation": held_out})


def load_split(source: Source, folder: Path) -> Split:
    """Return the split that `write_blocks` recorded beside the tokens in `folder`; raises `UserError`.

    It holds out the same documents also when further ones have been added.
    """
    path = folder / SPLIT_RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Split(source, int(record["threshold"]), None if record["cut"] is None else int(record["cut"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not say which documents are held out ({error!r}): start again") from error
