"""Texts to token ids, token ids to packed blocks, and local text files to the batches of a conversion.

Documents are laid end to end in blocks of L tokens. Position ids restart at every document, which keeps packed
documents from attending to each other.
"""

import hashlib
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from modeling_gqa_cli.errors import UserError

from .reading import find_files, read_documents

SHUFFLE_WINDOW = 1000  # rows of one file that are shuffled at a time
PACKED_AT_ONCE = 2**16  # tokens
CHARACTERS_PER_TOKEN = 4  # roughly; it only sets the length of a section


class TextEncoder:
    """Turns texts into token ids; a special token written in a text, such as "</s>", is read as plain text.

    Some tokenizers (Unigram, WordLevel) read it as the special token nonetheless. With these, a text that holds one
    raises `UserError`. `options` are further arguments of each call to the tokenizer.
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
                raise UserError(
                    f"the text holds {token!r}, which this tokenizer takes for its special token: take it out of there"
                )
        return self.tokenizer(texts, **self.options)["input_ids"]


def pack(documents: Iterable[tuple[list[int], bool]], length: int) -> Iterator[np.ndarray]:
    """Lay documents end to end and cut them into blocks; an incomplete last block is dropped.

    Args:
        documents: token ids, and whether a document ends with them.
        length: tokens L of a block.

    Yields:
        (2, L) arrays: token ids, and position ids, which restart at every document and every block.
    """
    ids: list[int] = []
    starts = [0]
    for document, ends in documents:
        ids += document
        if ends:
            starts.append(len(ids))
        if len(ids) >= max(length, PACKED_AT_ONCE):
            yield from _blocks(ids, starts, length)
            done = len(ids) - len(ids) % length
            ids, starts = ids[done:], [start - done for start in starts if start >= done]
    yield from _blocks(ids, starts, length)


def _blocks(ids: list[int], starts: list[int], length: int) -> Iterator[np.ndarray]:
    done = len(ids) - len(ids) % length
    index = np.arange(length, dtype=np.int32)
    begins = np.zeros(len(ids) + 1, bool)
    begins[starts] = True
    first = begins[:done].reshape(-1, length)  # (blocks, L)
    positions = index - np.maximum.accumulate(np.where(first, index, 0), axis=1)
    tokens = np.array(ids[:done], np.int32).reshape(-1, length)  # (blocks, L)
    yield from np.stack([tokens, positions], axis=1)  # (blocks, 2, L)


# -- Batches of a conversion


@dataclass
class Part:
    """The token ids of the documents of one part of the text, and how many tokens the part wants.

    A part of the `rest` gets documents when the others are full, and may stay empty.
    """

    name: str
    wanted: int
    rest: bool = False
    documents: list[list[int]] = field(default_factory=list)
    tokens: int = 0

    def batches(self, length: int, batch_size: int) -> list[dict[str, torch.Tensor]]:
        """Pack the documents into batches of at most `batch_size` blocks of `length` tokens."""
        count = min(self.tokens, self.wanted) // length
        if self.rest and not count:
            return []
        if not count:
            raise UserError(
                f"the text is too short: {self.tokens} tokens for {self.name}, and a sequence has {length}; "
                "give more text, or a smaller --sequence-length"
            )
        blocks = np.stack(list(islice(pack(((ids, True) for ids in self.documents), length), count)))
        ids, positions = (x.contiguous() for x in torch.from_numpy(blocks.astype(np.int64)).unbind(1))
        pairs = zip(ids.split(batch_size), positions.split(batch_size), strict=True)
        return [{"input_ids": x, "position_ids": y} for x, y in pairs]


def read_batches(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    tokens: dict[str, int],
    *,
    sequence_length: int,
    batch_size: int,
    rest: tuple[str, int] = ("", 0),
    evaluation_paths: Sequence[Path] = (),
    text_column: str = "text",
    seed: int = 0,
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Read, tokenize and pack text into parts of which no two share a passage.

    Each document goes to the part that has the smallest share of its wanted tokens, so a short text is divided in
    proportion. Repeated documents are left out. Long documents are cut into sections that count as documents, so that
    one file is enough. Documents are read until the parts are full, so memory grows with the tokens used.

    Args:
        paths: files or folders of them; see `find_files`.
        tokenizer: of the model.
        tokens: how many tokens each part wants, for instance `{"calibration": 131072, "evaluation": 65536}`.
        sequence_length: tokens of a block.
        batch_size: blocks of a batch.
        rest: name of one more part, and how many tokens it wants. It gets what is left when the others are full, which
            may be nothing.
        evaluation_paths: text of its own for the part `"evaluation"`.
        text_column: field of the rows that holds the text.
        seed: order of the files, and of the rows within a window.

    Returns:
        For each part, batches of `input_ids` and `position_ids` (blocks, `sequence_length`); positions restart at
        every document and block.

    Raises:
        UserError: there is nothing to read, a file is not what its suffix says, or there is too little text.
    """
    parts = {name: Part(name, max(wanted, sequence_length)) for name, wanted in tokens.items()}
    if rest[1]:
        parts[rest[0]] = Part(rest[0], max(rest[1], sequence_length), rest=True)
    # The evaluation's own text first, so that calibration leaves out what is evaluated on.
    own = {"evaluation"} if evaluation_paths else set()
    sources = [
        (find_files(named, text_column), names) for named, names in ((evaluation_paths, own), (paths, {*parts} - own))
    ]
    for note in (note for files, _ in sources for note in files.notes):
        warnings.warn(note, stacklevel=2)
    # Few enough characters that each part gets several sections; the rest has no say in what the others get.
    available = sum(path.stat().st_size for path in {path for files, _ in sources for path in files.paths})
    wanted = CHARACTERS_PER_TOKEN * sum(part.wanted for part in parts.values() if not part.rest)
    section = max(CHARACTERS_PER_TOKEN * sequence_length, min(wanted, available) // 32)
    encoder, seen = TextEncoder(tokenizer), set[bytes]()
    for files, names in sources:
        for text in distinct(read_sections(files.paths, text_column, section, seed), seen):
            wanting = [part for name, part in parts.items() if name in names and part.tokens < part.wanted]
            if not wanting:
                break
            part = min(wanting, key=lambda part: (part.rest, part.tokens / part.wanted))
            (ids,) = encoder([text])
            part.documents.append(ids)
            part.tokens += len(ids)
    return {name: part.batches(sequence_length, batch_size) for name, part in parts.items()}


def distinct(documents: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    """Yield the documents that are not empty and whose digest is not in `seen`, and add it there."""
    for text in documents:
        digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def read_sections(files: Sequence[Path], column: str, section: int, seed: int) -> Iterator[str]:
    """Yield the documents of files in random order, cut into pieces of at most `section` characters."""
    files = list(files)
    # A corpus is often sorted by topic or date, and its first files are alike.
    random.Random(seed).shuffle(files)
    for path in files:
        documents = read_documents(path, column, newlines=True)
        # A window holds the one document of a text file, or many rows.
        while window := list(islice(documents, SHUFFLE_WINDOW)):
            random.Random(seed).shuffle(window)
            for document in window:
                yield from sections(document(), section)


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
