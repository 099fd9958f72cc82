"""Texts to tokens, and tokens to packed blocks in files.

Every document ends with the end-of-text token. Documents are laid end to end and cut into blocks of L tokens. Position
ids restart at every document; by them the attention keeps packed documents apart.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..training.recipe import Recipe
from .packing import TextEncoder, pack
from .source import recipe_errors
from .split import SPLIT_RECORD, Split

BATCH = 2**20  # characters tokenized at a time
BATCH_PIECES = 1000


def tokenize(
    pieces: Iterable[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], bool]]:
    """Yield the token ids of every piece, and whether the piece is the last of its document.

    The ids of a last piece end with the end-of-text token. Where a text holds that token's name, it is encoded as any
    other text.
    """
    encode = TextEncoder(tokenizer, add_special_tokens=False, return_attention_mask=False)
    with recipe_errors():
        for batch in batches(pieces):
            for ids, (_, ends) in zip(encode([text for text, _ in batch]), batch, strict=True):
                yield ([*ids, tokenizer.eos_token_id] if ends else ids), ends


def batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH or len(batch) == BATCH_PIECES:
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


def write_blocks(split: Split, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, folder: Path) -> None:
    """Tokenize the text and write `train.npy`, `validation.npy` and the split's record to `folder`.

    Every process maps these files into memory. Raises `UserError` where the text is too short.
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
                raise UserError(
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
