"""Texts to tokens, and tokens to packed blocks, in files or while training.

Every document ends with the end-of-text token. Documents are laid end to end and cut into blocks of L tokens. Position
ids restart at every document; by them the attention keeps packed documents apart.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import TextOptions

from ..common.progress import Progress, ShowProgress, no_progress
from .packing import TextEncoder, pack
from .source import SPLIT_RECORD, Split

T = TypeVar("T")
BATCH = 2**20  # characters tokenized at a time


def tokenize(
    pieces: Iterable[tuple[str, bool]],
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress = iter,
    characters: int = 0,
) -> Iterator[tuple[list[int], bool]]:
    """Yield the token ids of every piece, and whether the piece is the last of its document.

    The ids of a last piece end with the end-of-text token. `progress` is told of batches, and of their number where
    that of the characters is given. The next batch is tokenized while one is used.
    """
    encode = TextEncoder(tokenizer, add_special_tokens=False, return_attention_mask=False)
    read = progress(Batches(pieces, characters))
    for batch, tokens in ahead((batch, encode([text for text, _ in batch])) for batch in read):
        for ids, (_, ends) in zip(tokens, batch, strict=True):
            yield ([*ids, tokenizer.eos_token_id] if ends else ids), ends


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator, which makes the next one in a thread while one is used."""
    pool = ThreadPoolExecutor(1)
    try:
        waiting = pool.submit(next, items, None)
        while (item := waiting.result()) is not None:
            waiting = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a stream may wait for the network


class Batches:
    """Pieces of text in batches of `BATCH` characters or more; its length is at least their number, or 0."""

    def __init__(self, pieces: Iterable[tuple[str, bool]], characters: int) -> None:
        self.pieces, self.characters = pieces, characters

    def __len__(self) -> int:
        return -(-self.characters // BATCH)

    def __iter__(self) -> Iterator[list[tuple[str, bool]]]:
        batch: list[tuple[str, bool]] = []
        size = 0
        for piece in self.pieces:
            batch.append(piece)
            size += len(piece[0])
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def example(block: np.ndarray) -> dict[str, torch.Tensor]:
    """Turn a packed block into a training example.

    The first token of a document has no label, because the model must not learn to predict it from another document.
    """
    input_ids, position_ids = torch.from_numpy(block.astype(np.int64)).unbind()
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
    }


# -- Blocks in files


class PackedBlocks(Dataset):
    """Packed blocks of shape (blocks, 2, L), usually mapped from a file."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return example(self.blocks[index])


def save_blocks(path: Path, blocks: Iterable[np.ndarray], length: int) -> int:
    """Write blocks one by one to a .npy file of shape (blocks, 2, L); return their number."""

    def write_header(count: int) -> int:
        shape = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, {**shape, "shape": (count, 2, length)})
        return file.tell()

    count = 0
    with path.open("wb") as file:
        begin = write_header(0)
        for block in blocks:
            file.write(block.astype(np.int32, order="C", copy=False).data)
            count += 1
        file.seek(0)
        # NumPy leaves room for the first axis to grow.
        assert write_header(count) == begin
    return count


def write_blocks(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    folder: Path,
    progress: ShowProgress = no_progress,
) -> None:
    """Tokenize the text and write `train.npy`, `validation.npy` and the split's record to `folder`.

    Every process maps these files into memory. `train.npy` is left out where the options say `streaming`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPLIT_RECORD).write_text(
        json.dumps({"threshold": split.threshold, "cut": split.cut}) + "\n", encoding="utf-8"
    )
    length, most = options.sequence_length, options.max_eval_blocks
    for part in parts_of(options):
        path, shown = folder / f"{part}.npy", progress(f"tokenizing for {part}")
        packed = pack(tokenize(split.pieces(part), tokenizer, shown, split.characters.get(part, 0)), length)
        count = save_blocks(path, islice(packed, most if options.streaming else None), length)
        if part == "validation" and count > most:
            # From all documents: the first blocks would come from few documents, which are alike.
            np.save(path, np.load(path, mmap_mode="r")[np.arange(most) * count // most])


def parts_of(options: TextOptions) -> tuple[str, ...]:
    """Return the parts of the text that are tokenized before training."""
    return ("validation",) if options.streaming else ("train", "validation")


def check_blocks(folder: Path, options: TextOptions, name: str, batch: int) -> None:
    """Raise `UserError` where the text `name` gave fewer than `batch` blocks for training, or none for validation."""
    for part in parts_of(options):
        count, wanted = len(load_blocks(folder, part)), batch if part == "train" else 1
        if count < wanted:
            other = "batch" if part == "train" else "larger validation_fraction"
            raise UserError(
                f"{name} is too short: {count} sequences of {options.sequence_length} tokens for {part}, and at least "
                f"{wanted} are needed; give more text, or a smaller sequence_length or {other}"
            )


def load_blocks(folder: Path, part: str) -> PackedBlocks:
    return PackedBlocks(np.load(folder / f"{part}.npy", mmap_mode="r"))


# -- Blocks that are tokenized while training


def read_blocks(split: Split, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the examples of the training documents."""
    return map(example, pack(tokenize(split.pieces("train"), tokenizer), length))


class CheckedStream(IterableDataset):
    """Blocks as they come, again and again, with a running SHA-256 of their tokens.

    A checkpoint keeps the hash of the blocks that were trained on. A resumed run reads and skips these blocks, and
    raises `UserError` where their hash is another. The Trainer sees one endless epoch, because it can skip blocks in
    one epoch only.

    Args:
        read: returns the examples of one epoch, with `input_ids`.
        kept: number of blocks, counted from the last, whose hashes are kept; more than the Trainer fetches ahead.
    """

    def __init__(self, read: Callable[[], Iterator[dict[str, Any]]], kept: int) -> None:
        self.read, self.digest, self.count = read, hashlib.sha256(), 0
        self.recent: deque[tuple[int, str]] = deque(maxlen=kept)
        self.expected: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self.endless():
            self.digest.update(block["input_ids"].numpy().tobytes())
            self.count += 1
            self.recent.append((self.count, self.digest.hexdigest()))
            if self.expected and self.count == self.expected["blocks"] and self.mark(self.count) != self.expected:
                raise UserError(
                    f"the stream has changed: its first {self.count:,} sequences are not those that the checkpoint was "
                    "trained on; bring the text back as it was, or start again with --overwrite"
                )
            yield block

    def endless(self) -> Iterator[dict[str, Any]]:
        while True:
            before = self.count
            yield from self.read()
            if self.count == before:
                raise UserError("the stream holds no sequence of text: give more text, or a smaller sequence_length")

    def mark(self, blocks: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, after training on `blocks` blocks."""
        return {"blocks": blocks, "sha256": dict(self.recent)[blocks]}
