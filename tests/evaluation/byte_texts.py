"""A tokenizer of bytes, and sentences."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
SENTENCE = "the cat sat on a mat and saw two birds fly over an old house near our river"
WORDS = SENTENCE.split()


def tokenizer_of_bytes(**options: Any) -> PreTrainedTokenizerFast:
    """A token for every byte, and one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate([*alphabet, END])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, **options)


def sentence(number: int, length: int) -> str:
    """Words in any order."""
    generator = torch.Generator().manual_seed(number)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def in_order(first: int, length: int) -> str:
    """Words in their order in `WORDS`, from `first` on, again and again."""
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(length))
