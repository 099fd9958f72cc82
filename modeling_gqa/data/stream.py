"""Blocks that are tokenized while training, and a proof that a resumed run reads the same ones again."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from .blocks import example, tokenize
from .packing import pack
from .split import Split


class StreamedBlocks(IterableDataset):
    """Packed blocks of the training documents, read again from the start in every epoch."""

    def __init__(self, split: Split, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.split, self.tokenizer, self.length = split, tokenizer, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for block in pack(tokenize(self.split.pieces("train"), self.tokenizer), self.length):
            yield example(block)


class CheckedStream(IterableDataset):
    """Blocks as they come, again and again, with a running SHA-256 of their tokens.

    A checkpoint keeps the hash of the blocks that were trained on. A resumed run reads and skips these blocks, and
    stops where their hash is another. The Trainer sees one endless epoch, because it can skip blocks in one epoch only.

    Args:
        blocks: examples with `input_ids`, of one epoch.
        kept: number of blocks, counted from the last, whose hashes are kept; more than the Trainer fetches ahead.

    Raises:
        UserError: while it is read, where the text holds no block or has changed since the checkpoint.
    """

    def __init__(self, blocks: Iterable[dict[str, Any]], kept: int) -> None:
        self.blocks, self.digest, self.count = blocks, hashlib.sha256(), 0
        self.recent: deque[tuple[int, str]] = deque(maxlen=kept)
        self.expected: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self.endless():
            self.digest.update(block["input_ids"].numpy().tobytes())
            self.count += 1
            self.recent.append((self.count, self.digest.hexdigest()))
            if self.expected and self.count == self.expected["blocks"]:
                self.compare(self.expected["sha256"])
            yield block

    def endless(self) -> Iterator[dict[str, Any]]:
        while True:
            before = self.count
            yield from self.blocks
            if self.count == before:
                raise UserError("the stream holds no block of text: give more text, or a smaller sequence_length")

    def compare(self, sha256: str) -> None:
        if self.digest.hexdigest() != sha256:
            raise UserError(
                f"the stream has changed: its first {self.count:,} blocks are not the ones that the checkpoint was "
                "trained on; bring the text back as it was, or start again with --overwrite"
            )

    def mark(self, blocks: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, after training on `blocks` blocks."""
        return {"blocks": blocks, "sha256": dict(self.recent)[blocks]}
