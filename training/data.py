"""Text in, packed blocks out.

A *document* is one file, or one row of a JSONL file, a Parquet file or a Hub data set. Documents are assigned to
training or validation by a hash, tokenized, ended with the end-of-text token and laid end to end in blocks of L tokens.
Position ids restart at every document, which is what keeps packed documents from attending to each other.
"""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .recipe import Recipe, RecipeError

FILE_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
# Tests are repetitive, packages are other people's text, and lib2to3's test data is broken on purpose.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHUFFLE_BUFFER = 10_000  # rows, of a streamed Hub data set


@dataclass(frozen=True)
class Source:
    """Where the text comes from. `documents` yields `(key, text)`; the key decides the document's part."""

    name: str
    license: str | None
    documents: Callable[[], Iterator[tuple[str, str]]]


def open_source(recipe: Recipe) -> Source:
    """Return the recipe's text, having checked that it is there; raises `RecipeError`."""
    if recipe.dataset_name:
        return Source(recipe.dataset_name, recipe.license, lambda: hub_documents(recipe))
    if recipe.data_files:
        paths = list_files(recipe.data_files)
        name = ", ".join(recipe.data_files)
        return Source(name, recipe.license, lambda: file_documents(paths, recipe.text_column))
    return Source("the Python standard library's source code", recipe.license or "PSF-2.0", stdlib_documents)


def stdlib_documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not STDLIB_SKIPPED.intersection(relative.parts):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                yield relative.as_posix(), text


def list_files(patterns: list[str]) -> list[Path]:
    """Expand files, folders and globs into files, in a fixed order."""
    paths: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = [item for item in path.rglob("*") if item.suffix in FILE_SUFFIXES and item.is_file()]
        else:
            found = [path] if path.is_file() else [Path(item) for item in glob.glob(str(path), recursive=True)]
            found = [item for item in found if item.is_file()]
        if not found:
            raise RecipeError(f"data_files: nothing to read at {pattern}")
        paths.update(found)
    for path in sorted(paths):
        if path.stat().st_size == 0:
            raise RecipeError(f"data_files: {path} is empty")
    return sorted(paths)


def file_documents(paths: list[Path], text_column: str) -> Iterator[tuple[str, str]]:
    for path in paths:
        if path.suffix == ".parquet":
            rows = parquet_rows(path, text_column)
        elif path.suffix == ".jsonl":
            rows = jsonl_rows(path)
        else:
            if (text := decode(path, path.read_bytes())).strip():
                yield path.as_posix(), text
            continue
        for where, row in rows:
            yield from row_document(row, text_column, where)


def decode(path: Path, data: bytes) -> str:
    try:
        if b"\0" not in data:
            return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise RecipeError(f"data_files: {path} is not UTF-8 text")


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", json.loads(decode(path, line))
                except json.JSONDecodeError as error:
                    raise RecipeError(f"data_files: {path}, line {number} is not JSON: {error}") from error


def parquet_rows(path: Path, text_column: str) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise RecipeError(f"data_files: {path} is not a Parquet file: {error}") from error
    column = [text_column] if text_column in file.schema_arrow.names else None
    for batch in file.iter_batches(columns=column):
        for row in batch.to_pylist():
            yield str(path), row


def hub_documents(recipe: Recipe) -> Iterator[tuple[str, str]]:
    import datasets

    try:
        rows = datasets.load_dataset(
            recipe.dataset_name, recipe.dataset_config_name, split=recipe.dataset_split, streaming=recipe.streaming
        )
    except Exception as error:  # the network, the name, access rights: each has its own class
        message = " ".join(str(error).split())
        raise RecipeError(f"cannot load the Hub data set {recipe.dataset_name}: {message}") from error
    if recipe.streaming:
        rows = rows.shuffle(seed=recipe.data_seed or recipe.seed, buffer_size=SHUFFLE_BUFFER)
    for row in rows:
        yield from row_document(row, recipe.text_column, recipe.dataset_name or "")


def row_document(row: Any, text_column: str, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(row, dict) or not isinstance(row.get(text_column), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise RecipeError(f"{where}: no text in column {text_column!r} (found: {found}); set text_column")
    # Keyed by its text, a row that occurs twice falls in one part.
    if row[text_column].strip():
        yield row[text_column], row[text_column]


def hash_key(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Split:
    """Validation documents are those whose hash lies below `threshold`.

    A single document has no other to hold out, so its end is: `tail` is that share of it.
    """

    source: Source
    threshold: int
    tail: float | None = None

    def documents(self, part: str) -> Iterator[str]:
        for key, text in self.source.documents():
            if self.tail is not None:
                cut = round(len(text) * (1 - self.tail))
                yield text[:cut] if part == "train" else text[cut:]
            elif (hash_key(key) < self.threshold) == (part == "validation"):
                yield text


def split_source(source: Source, recipe: Recipe) -> Split:
    """Hold out `validation_fraction` of the documents; raises `RecipeError` where there are none."""
    if recipe.streaming:
        return Split(source, round(recipe.validation_fraction * 2**64))
    hashes = sorted({hash_key(key) for key, _ in source.documents()})
    if not hashes:
        raise RecipeError(f"{source.name} holds no text")
    if len(hashes) == 1:
        return Split(source, 0, tail=recipe.validation_fraction)
    held_out = min(max(1, round(len(hashes) * recipe.validation_fraction)), len(hashes) - 1)
    return Split(source, hashes[held_out])


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield every document's token ids, ended with the end-of-text token."""
    stream = iter(texts)
    while batch := list(islice(stream, 128)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield [*ids, tokenizer.eos_token_id]


def pack(documents: Iterable[list[int]], length: int) -> Iterator[np.ndarray]:
    """Lay documents end to end and cut them into blocks; an incomplete last block is dropped.

    Yields (2, L) arrays: token ids, and position ids, which restart at every document and every block.
    """
    ids: list[int] = []
    starts: list[bool] = []
    for document in documents:
        ids += document
        starts += [True, *[False] * (len(document) - 1)]
        done = len(ids) - len(ids) % length
        for begin in range(0, done, length):
            index = np.arange(length)
            first = np.array(starts[begin : begin + length])
            positions = index - np.maximum.accumulate(np.where(first, index, 0))
            yield np.stack([np.array(ids[begin : begin + length]), positions]).astype(np.int32)  # (2, L)
        ids, starts = ids[done:], starts[done:]


def example(block: np.ndarray) -> dict[str, torch.Tensor]:
    """Turn a packed block into a training example.

    The first token of a document has no label: it is not to be predicted from the document before it.
    """
    input_ids, position_ids = torch.from_numpy(block.astype(np.int64)).unbind()
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
    }


class PackedBlocks(Dataset):
    """Packed blocks of shape (blocks, 2, L), usually mapped from a file."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return example(self.blocks[index])


class StreamedBlocks(IterableDataset):
    """Packed blocks of the training documents, read again from the start in every epoch."""

    def __init__(self, split: Split, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.split, self.tokenizer, self.length = split, tokenizer, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for block in pack(tokenize(self.split.documents("train"), self.tokenizer), self.length):
            yield example(block)


def write_blocks(split: Split, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, folder: Path) -> None:
    """Tokenize once and save `train.npy` and `validation.npy`, which every process maps; raises `RecipeError`."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"train": recipe.train_batch_size * recipe.world_size, "validation": 1}
    for part in ("validation",) if recipe.streaming else ("train", "validation"):
        packed = pack(tokenize(split.documents(part), tokenizer), recipe.sequence_length)
        blocks = list(islice(packed, recipe.max_eval_blocks if recipe.streaming else None))
        if part == "validation" and len(blocks) > recipe.max_eval_blocks:
            # Spread over all documents: the first ones alone would be few, and alike.
            blocks = [blocks[i * len(blocks) // recipe.max_eval_blocks] for i in range(recipe.max_eval_blocks)]
        if len(blocks) < wanted[part]:
            raise RecipeError(
                f"{split.source.name} is too short: {len(blocks)} blocks of {recipe.sequence_length} tokens for {part},"
                f" and at least {wanted[part]} are needed; give more text, or a smaller sequence_length or batch"
            )
        np.save(folder / f"{part}.tmp.npy", np.stack(blocks))  # (blocks, 2, L)
        (folder / f"{part}.tmp.npy").replace(folder / f"{part}.npy")


def load_blocks(folder: Path, part: str) -> PackedBlocks:
    return PackedBlocks(np.load(folder / f"{part}.npy", mmap_mode="r"))
