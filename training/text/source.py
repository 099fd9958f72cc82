"""From text to packed blocks of tokens, for training and for validation.

A *document* is one file, or one row of a JSONL, JSON or Parquet file or a Hub data set. A hash of its text assigns it
to training or validation; its tokens are packed into blocks (`packing.py`). Memory holds pieces of texts, and never
all tokens.
"""

import glob
import hashlib
import json
import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from modeling_gqa.common.errors import ConversionError
from modeling_gqa.conversion.text.packing import pack
from modeling_gqa.conversion.text.reading import Document, Files, find_files, read_documents, row_text

from .catalogue import public_name
from .errors import RecipeError
from .packing import PackedBlocks, example, recipe_errors, save_blocks, tokenize
from .recipe import Recipe

# Tests repeat themselves, installed packages have other licences, and lib2to3's test data is broken on purpose.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHUFFLE_BUFFER = 10_000  # rows, of a streamed Hub data set
SPLIT_RECORD = "split.json"
PIECE = 2**18  # characters; a document of more than twice this number is tokenized in pieces
# Places where every tokenizer begins a new word: a space after another character, and a letter or digit at the start of
# a line.
BOUNDARY = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\W_])")


@dataclass(frozen=True)
class Source:
    """Where the text comes from.

    Attributes:
        name: of the data set, or of the files and folders without their paths.
        license: of the text; `None` where the recipe does not say.
        documents: reads the text; it raises `RecipeError` or `ConversionError` where it cannot.
        notes: returns a line for each file that is left out.
    """

    name: str
    license: str | None
    documents: Callable[[], Iterator[Document]]
    notes: Callable[[], list[str]] = list


def open_source(recipe: Recipe) -> Source:
    """Return the recipe's source of text; no file is opened before `documents` is called."""
    if recipe.dataset_name:
        return Source(public_name(recipe.dataset_name), recipe.license, lambda: hub_documents(recipe))
    if recipe.data_files:
        name = ", ".join(os.path.basename(os.path.abspath(path)) for path in recipe.data_files)
        found = cache(lambda: list_files(recipe.data_files, recipe.text_column))
        documents = lambda: file_documents(found().paths, recipe.text_column)  # noqa: E731
        return Source(name, recipe.license, documents, lambda: found().notes)
    return Source("the Python standard library's source code", recipe.license or "PSF-2.0", stdlib_documents)


def stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not STDLIB_SKIPPED.intersection(relative.parts):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                yield Document(partial(iter, (text,)), relative.as_posix())


def list_files(patterns: list[str], text_column: str) -> Files:
    """Return the files that paths, folders and globs stand for, in a fixed order; raises `RecipeError` for none."""
    named, matched = [], []
    for pattern in patterns:
        try:
            path = Path(pattern).expanduser()
            files = [] if path.exists() else [Path(item) for item in glob.glob(str(path), recursive=True)]
        except (OSError, RuntimeError) as error:  # a name too long, a folder that is shut, an unknown ~user
            raise RecipeError(f"data_files: nothing to read at {pattern[:200]}: {error}") from error
        files = [item for item in files if item.is_file()]
        matched += files
        named += [] if files else [path]
    with recipe_errors():
        found = find_files(named, text_column, matched)
    if not found.paths:
        raise RecipeError(f"data_files: nothing to read at {', '.join(patterns)} ({'; '.join(found.notes)})")
    return found


def file_documents(paths: list[Path], text_column: str) -> Iterator[Document]:
    for path in paths:
        for document in read_documents(path, text_column):
            if any(piece.strip() for piece in document.pieces()):
                yield document


def hub_documents(recipe: Recipe) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(
            recipe.dataset_name, recipe.dataset_config_name, split=recipe.dataset_split, streaming=recipe.streaming
        )
        if recipe.streaming:
            rows = rows.shuffle(seed=recipe.data_seed or recipe.seed, buffer_size=SHUFFLE_BUFFER)
        for number, row in enumerate(rows, 1):
            text = row_text(row, recipe.text_column, f"{recipe.dataset_name}, row {number}")
            if text.strip():
                yield Document(partial(iter, (text,)))
    except ConversionError:
        raise
    except Exception as error:  # the network, the name, access rights: each has its own class
        message = " ".join(str(error).split())
        raise RecipeError(f"cannot load the Hub data set {recipe.dataset_name}: {message}") from error


def hash_document(document: Document, rule: str) -> int:
    """Return 64 bits of a hash of a document's text, or, by the rule "path", of a file's path as it was written."""
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
        from modeling_gqa.training.data import cut_text

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
    """Hold out `validation_fraction` of the documents; raises `RecipeError` where there are none.

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
        raise RecipeError(f"{source.name} holds no text")
    if len(distinct) == 1:
        return Split(source, 0, round(length * (1 - recipe.validation_fraction)), rule)
    held_out = min(max(1, round(len(distinct) * recipe.validation_fraction)), len(distinct) - 1)
    return Split(source, int(distinct[held_out]), rule=rule)


def load_split(source: Source, recipe: Recipe, folder: Path) -> Split:
    """Return the split that `write_blocks` recorded beside the tokens in `folder`; raises `RecipeError`.

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
        raise RecipeError(f"{path} does not say which documents are held out ({error!r}): start again") from error


class StreamedBlocks(IterableDataset):
    """Packed blocks of the training documents, read again from the start in every epoch."""

    def __init__(self, split: Split, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.split, self.tokenizer, self.length = split, tokenizer, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for block in pack(tokenize(self.split.pieces("train"), self.tokenizer), self.length):
            yield example(block)


def write_blocks(split: Split, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, folder: Path) -> None:
    """Tokenize the text and write `train.npy`, `validation.npy` and the split's record to `folder`.

    Every process maps these files into memory. Raises `RecipeError` where the text is too short.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPLIT_RECORD).write_text(json.dumps(split.record) + "\n", encoding="utf-8")
    wanted = {"train": recipe.train_batch_size * recipe.world_size, "validation": 1}
    length, most = recipe.sequence_length, recipe.max_eval_blocks
    for part in ("validation",) if recipe.streaming else ("train", "validation"):
        path, every = folder / f"{part}.tmp.npy", folder / f"{part}.every.npy"
        try:
            packed = pack(tokenize(split.pieces(part), tokenizer), length)
            count = save_blocks(path, islice(packed, most if recipe.streaming else None), length)
            if count < wanted[part]:
                raise RecipeError(
                    f"{split.source.name} is too short: {count} blocks of {length} tokens for {part}, and at least"
                    f" {wanted[part]} are needed; give more text, or a smaller sequence_length or batch"
                )
            if part == "validation" and count > most:
                # From all documents: the first blocks would come from few documents, which are alike.
                path.replace(every)
                blocks = np.load(every, mmap_mode="r")
                save_blocks(path, (blocks[i * count // most] for i in range(most)), length)
            path.replace(folder / f"{part}.npy")
        finally:
            path.unlink(missing_ok=True)
            every.unlink(missing_ok=True)


def load_blocks(folder: Path, part: str) -> PackedBlocks:
    return PackedBlocks(np.load(folder / f"{part}.npy", mmap_mode="r"))
