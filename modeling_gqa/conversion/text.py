"""Local text files to packed batches: for calibration, for the choice of settings, and for the reported measurement.

No passage is in two of the three parts. Documents are read until the parts are full, so memory grows with the tokens
used and not with the corpus.
"""

import hashlib
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .errors import ConversionError
from .finding import Files, find_files
from .reading import read_documents

SHUFFLE_WINDOW = 1000  # rows of one file
CHARACTERS_PER_TOKEN = 4  # roughly; it only sets how long a section is


@dataclass
class Part:
    """One part's packed blocks; `wanted` is in tokens."""

    name: str
    wanted: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def filled(self) -> float:
        return len(self.ids) / self.wanted

    def batches(self, length: int, batch_size: int) -> list[dict[str, torch.Tensor]]:
        """Cut into blocks of `length` tokens, an incomplete last one dropped; position ids restart in each."""
        blocks = min(len(self.ids), self.wanted) // length
        if not blocks:
            raise ConversionError(
                f"the text is too short: {len(self.ids)} tokens for {self.name}, and a block has {length}; "
                "give more text, or a smaller --sequence-length"
            )
        ids, positions = (torch.tensor(x[: blocks * length]).view(blocks, length) for x in (self.ids, self.positions))
        positions = positions - positions[:, :1] * (positions - torch.arange(length) == positions[:, :1])
        pairs = zip(ids.split(batch_size), positions.split(batch_size), strict=True)
        return [{"input_ids": x, "position_ids": y} for x, y in pairs]


def read_batches(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    tokens: dict[str, int],
    *,
    sequence_length: int,
    batch_size: int,
    evaluation_paths: Sequence[Path] = (),
    text_column: str = "text",
    seed: int = 0,
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Read, tokenize and pack text into disjoint parts.

    Documents are tokenized as the tokenizer does by default, but special tokens written in them are text. The next one
    goes to the part that is furthest from what it wants, so a short text is shared out in proportion; one that occurs
    again is left out. A long document is cut into sections that count as documents, so that a single file will do.

    Args:
        paths: files or folders of them: JSONL, JSON and Parquet (a document a row), or plain text (a document a file).
        tokens: how many tokens each part wants, for instance `{"calibration": 131072, "evaluation": 65536}`.
        sequence_length: tokens of a block.
        batch_size: blocks of a batch.
        evaluation_paths: text of its own for the part `"evaluation"`.
        text_column: column of the rows that holds the text.
        seed: order of the files, and of the rows within a window.

    Returns:
        For each part, batches of `input_ids` and `position_ids` (blocks, `sequence_length`); positions restart at
        every document and block.

    Raises:
        ConversionError: nothing to read, a file that is not what its suffix says, or too little text.
    """
    parts = {name: Part(name, max(wanted, sequence_length)) for name, wanted in tokens.items()}
    sources = {name: find_files(named, text_column) for name, named in (("", paths), ("evaluation", evaluation_paths))}
    for files in sources.values():
        for note in files.notes:
            warnings.warn(note, stacklevel=2)
    section = section_length(sources.values(), sum(part.wanted for part in parts.values()), sequence_length)
    seen: set[bytes] = set()
    # The evaluation's own text first, so that calibration leaves out what is evaluated on.
    for name in ("evaluation", "") if evaluation_paths else ("",):
        wanting = [part for part in parts.values() if not evaluation_paths or (part.name == "evaluation") == bool(name)]
        documents = distinct(read_sections(sources[name].paths, text_column, section, seed), seen)
        fill(wanting, documents, tokenizer)
    return {name: part.batches(sequence_length, batch_size) for name, part in parts.items()}


def section_length(sources: Iterable[Files], wanted: int, sequence_length: int) -> int:
    """Characters after which a document is cut: such that the parts get several sections each of the text there is."""
    available = sum(path.stat().st_size for path in {path for files in sources for path in files.paths})
    return max(CHARACTERS_PER_TOKEN * sequence_length, min(CHARACTERS_PER_TOKEN * wanted, available) // 32)


def fill(parts: Sequence[Part], documents: Iterable[str], tokenizer: PreTrainedTokenizerBase):
    encoder = TextEncoder(tokenizer)
    for text in documents:
        part = min(parts, key=lambda part: part.filled)
        if part.filled >= 1:
            return
        (ids,) = encoder([text])
        part.ids += ids
        part.positions += range(len(ids))


class TextEncoder:
    """Turns texts into token ids such that what is written in them is text: "</s>" never ends a document.

    A tokenizer that has its special tokens among its words (Unigram, WordLevel) finds them all the same; of these a
    text that holds one is refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **options: bool) -> None:
        self.tokenizer, self.options, self.found_anyway = tokenizer, {"verbose": False, **options}, []
        if type(tokenizer).__name__ == "MistralCommonBackend":  # does so itself, and refuses to be told
            return
        self.options["split_special_tokens"] = True
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special and str(token) != tokenizer.unk_token:
                probe = tokenizer(f"{token} {token}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
                self.found_anyway += [str(token)] * (number in probe)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        for token in self.found_anyway:
            if any(token in text for text in texts):
                raise ConversionError(
                    f"the text holds {token!r}, which this tokenizer takes for its special token: take it out of there"
                )
        return self.tokenizer(texts, **self.options)["input_ids"]


def distinct(documents: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    for text in documents:
        digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def read_sections(files: Sequence[Path], column: str, section: int, seed: int) -> Iterator[str]:
    """Yield every document, cut into pieces of at most `section` characters."""
    files = list(files)
    # A corpus is sorted by topic or date; the first files would be alike.
    random.Random(seed).shuffle(files)
    for path in files:
        documents = read_documents(path, column, newlines=True)
        # One document where the file is one, else a window of rows.
        while window := list(islice(documents, SHUFFLE_WINDOW)):
            random.Random(seed).shuffle(window)
            for document in window:
                yield from sections(document.pieces(), section)


def sections(pieces: Iterable[str], length: int) -> Iterator[str]:
    """Cut a text that comes in pieces after every `length` characters."""
    rest = ""
    for piece in pieces:
        rest += piece
        whole = len(rest) - len(rest) % length
        yield from (rest[start : start + length] for start in range(0, whole, length))
        rest = rest[whole:]
    if rest:
        yield rest
