"""Which documents are held out for validation, and the texts of either part in pieces.

A hash of a document's text assigns it to training or validation, so that the same text is always held out.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import UserError
from ..training.recipe import Recipe
from .reading import Document
from .source import Source, recipe_errors

SPLIT_RECORD = "split.json"
PIECE = 2**18  # characters; a document of more than twice this number is tokenized in pieces
# Places where every tokenizer begins a new word: a space after another character, and a letter or digit at the start of
# a line.
BOUNDARY = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\W_])")


def hash_document(document: Document, rule: str) -> int:
    """Return a 64-bit hash of the document's text; by the rule "path", of a file's path as the run was given it."""
    by_path = rule == "path" and document.path is not None
    digest = hashlib.blake2b(digest_size=8)
    for piece in (document.path,) if by_path else document.pieces():
        digest.update(piece.encode("utf-8", "surrogateescape"))
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True)
class Split:
    """Which documents are held out for validation.

    Args:
        threshold: documents whose hash is smaller are held out.
        cut: of a single document, the character from which on its text is held out.
        rule: "content" hashes texts; "path", of earlier versions, hashes the paths of files.
    """

    source: Source
    threshold: int
    cut: int | None = None
    rule: str = "content"

    @property
    def record(self) -> dict[str, Any]:
        """What `load_split` needs to hold out the same documents, when further ones have been added as well."""
        return {"rule": self.rule, "threshold": self.threshold, "cut": self.cut}

    def documents(self, part: str) -> Iterator[str]:
        """Yield the texts of `train` or `validation`; a long text comes in pieces."""
        return (text for text, _ in self.pieces(part))

    def pieces(self, part: str) -> Iterator[tuple[str, bool]]:
        """Yield the texts of `train` or `validation` in pieces, each with whether its document ends with it."""
        with recipe_errors():
            for document in self.source.documents():
                if self.cut is not None:
                    first, stop = (0, self.cut) if part == "train" else (self.cut, None)
                    yield from cut_text(characters(document.pieces(), first, stop))
                elif (hash_document(document, self.rule) < self.threshold) == (part == "validation"):
                    yield from cut_text(document.pieces())


def characters(pieces: Iterable[str], first: int, stop: int | None) -> Iterator[str]:
    """Yield `text[first:stop]` of a text that comes in pieces."""
    at = 0
    for piece in pieces:
        yield piece[max(first - at, 0) : None if stop is None else max(stop - at, 0)]
        at += len(piece)


def cut_text(pieces: Iterable[str], length: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Cut a text that comes in pieces into others of `length` to twice `length` characters.

    Cuts are at boundaries of words where there are any. They depend on the text, and not on the pieces that it came in.

    Yields:
        A piece, and whether it is the last.

    Example:
        ```python
        from modeling_gqa.data.split import cut_text

        pieces = list(cut_text(["one two thr", "ee four"], length=5))
        assert pieces == [("one two", False), (" three", False), (" four", True)]
        ```
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


def split_source(source: Source, recipe: Recipe, rule: str = "content") -> Split:
    """Hold out `validation_fraction` of the documents; raises `UserError` where there are none.

    Args:
        rule: "content"; "path" for a run of an earlier version, which kept no record of its split.
    """
    streamed = Split(source, round(recipe.validation_fraction * 2**64), rule=rule)
    if recipe.streaming and (rule == "path" or recipe.dataset_name):
        return streamed
    hashes, length = array("Q"), 0
    with recipe_errors():
        for document in source.documents():
            hashes.append(hash_document(document, rule))
            if hashes[-1] != hashes[0] and recipe.streaming:
                return streamed
            length = sum(map(len, document.pieces())) if hashes[-1] == hashes[0] else 0
    distinct = np.unique(np.array(hashes, np.uint64))
    if not len(distinct):
        raise UserError(f"{source.name} holds no text")
    if len(distinct) == 1:
        return Split(source, 0, round(length * (1 - recipe.validation_fraction)), rule)
    held_out = min(max(1, round(len(distinct) * recipe.validation_fraction)), len(distinct) - 1)
    return Split(source, int(distinct[held_out]), rule=rule)


def load_split(source: Source, recipe: Recipe, folder: Path) -> Split:
    """Return the split that `write_blocks` recorded beside the tokens in `folder`; raises `UserError`.

    A run of an earlier version, without a record, goes on by the rule "path".
    """
    path = folder / SPLIT_RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        cut = None if record["cut"] is None else int(record["cut"])
        return Split(source, int(record["threshold"]), cut, {"content": "content", "path": "path"}[record["rule"]])
    except FileNotFoundError:
        return split_source(source, recipe, rule="path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not say which documents are held out ({error!r}): start again") from error
