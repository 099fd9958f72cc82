"""Texts to tokens, and tokens to packed blocks.

Documents are ended with the end-of-text token and laid end to end in blocks of L tokens. Position ids restart at every
document, which is what keeps packed documents from attending to each other.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from modeling_gqa.common.errors import ConversionError
from modeling_gqa.conversion.text.packing import TextEncoder

from .errors import RecipeError

BATCH = 2**20  # characters tokenized at a time
BATCH_PIECES = 1000


@contextmanager
def recipe_errors() -> Iterator[None]:
    try:
        yield
    except ConversionError as error:
        # The option's name in a recipe.
        raise RecipeError(str(error).replace("--text-column", "text_column")) from error


def tokenize(
    pieces: Iterable[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], bool]]:
    """Yield the token ids of every piece, and whether its document ends with it; then the end-of-text token is added.

    The name of an end-of-text token in the text itself is text, and ends no document.
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


def save_blocks(path: Path, blocks: Iterable[np.ndarray], length: int) -> int:
    """Write blocks as they come to a .npy file of shape (blocks, 2, L); return how many there were."""

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
