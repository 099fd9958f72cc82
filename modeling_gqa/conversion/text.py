"""Local text files to packed batches: for calibration, for the choice of settings, and for the reported measurement.

No passage is in two of the three parts. Documents are read until the parts are full, so memory grows with the tokens
used and not with the corpus.
"""

import glob
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .errors import ConversionError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Suffix to the builder of the `datasets` library that reads its rows.
ROW_SUFFIXES = {".jsonl": "json", ".parquet": "parquet"}
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

    Documents are tokenized as the tokenizer does by default. The next one goes to the part that is furthest from what
    it wants, so a short text is shared out in proportion; one that occurs again is left out. A long document is cut
    into sections that count as documents, so that a single file will do.

    Args:
        paths: files or folders of them: JSONL and Parquet (a document a row), or plain text (a document a file).
        tokens: how many tokens each part wants, for instance `{"calibration": 131072, "evaluation": 65536}`.
        sequence_length: tokens of a block.
        batch_size: blocks of a batch.
        evaluation_paths: text of its own for the part `"evaluation"`.
        text_column: JSONL and Parquet column that holds the text.
        seed: order of the files, and of the rows within a window.

    Returns:
        For each part, batches of `input_ids` and `position_ids` (blocks, `sequence_length`); positions restart at
        every document and block.

    Raises:
        ConversionError: nothing to read, a file that is not what its suffix says, or too little text.
    """
    parts = {name: Part(name, max(wanted, sequence_length)) for name, wanted in tokens.items()}
    section = section_length([*paths, *evaluation_paths], sum(part.wanted for part in parts.values()), sequence_length)
    seen: set[bytes] = set()
    plan = [(paths, [part for part in parts.values() if not evaluation_paths or part.name != "evaluation"])]
    if evaluation_paths:
        # First, so that calibration leaves out what is evaluated on.
        plan.insert(0, (evaluation_paths, [parts["evaluation"]]))
    for sources, wanting in plan:
        documents = distinct(read_documents(list_files(sources), text_column, section, seed), seen)
        fill(wanting, documents, tokenizer)
    return {name: part.batches(sequence_length, batch_size) for name, part in parts.items()}


def section_length(paths: Sequence[Path], wanted: int, sequence_length: int) -> int:
    """Characters after which a document is cut: such that the parts get several sections each of the text there is."""
    available = sum(path.stat().st_size for path in list_files(paths))
    return max(CHARACTERS_PER_TOKEN * sequence_length, min(CHARACTERS_PER_TOKEN * wanted, available) // 32)


def fill(parts: Sequence[Part], documents: Iterable[str], tokenizer: PreTrainedTokenizerBase):
    for text in documents:
        part = min(parts, key=lambda part: part.filled)
        if part.filled >= 1:
            return
        ids = tokenizer(text, verbose=False)["input_ids"]
        part.ids += ids
        part.positions += range(len(ids))


def distinct(documents: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    for text in documents:
        digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Files at `paths`, folders searched for the suffixes that can be read; raises ConversionError."""
    files: set[Path] = set()
    suffixes = (*TEXT_SUFFIXES, *ROW_SUFFIXES)
    for path in paths:
        found = [item for item in path.rglob("*") if item.suffix.lower() in suffixes and item.is_file()]
        if path.is_file():  # whatever its suffix, as it was named
            found = [path]
        if not found:
            raise ConversionError(f"nothing to read at {path}: give files, or folders of {', '.join(suffixes)} files")
        files.update(found)
    return sorted(files)


def read_documents(files: Sequence[Path], column: str, section: int, seed: int) -> Iterator[str]:
    """Yield every document, cut into pieces of at most `section` characters."""
    files = list(files)
    # A corpus is sorted by topic or date; the first files would be alike.
    random.Random(seed).shuffle(files)
    for path in files:
        with one_line_errors(path):
            if path.suffix.lower() not in ROW_SUFFIXES:
                with path.open(encoding="utf-8-sig") as file:
                    while piece := file.read(section):
                        if "\0" in piece:
                            raise ValueError("not text: it holds a NUL character")
                        yield piece
            else:
                pieces = (sections(text, section) for text in read_rows(path, column, seed))
                yield from chain.from_iterable(pieces)


def sections(text: str, length: int) -> Iterator[str]:
    return (text[start : start + length] for start in range(0, len(text), length))


def read_rows(path: Path, column: str, seed: int) -> Iterator[str]:
    import datasets  # slow to import, and only these need it

    if not path.stat().st_size:
        return
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    rows = datasets.load_dataset(
        ROW_SUFFIXES[path.suffix.lower()], data_files=[glob.escape(str(path))], split="train", streaming=True
    )
    stream = iter(rows)
    while window := list(islice(stream, SHUFFLE_WINDOW)):
        random.Random(seed).shuffle(window)
        for row in window:
            if not isinstance(row.get(column), str):
                found = ", ".join(row)
                raise ConversionError(f"{path}: no text in column {column!r} (it has: {found}); set --text-column")
            yield row[column]


@contextmanager
def one_line_errors(path: Path):
    try:
        yield
    except (ConversionError, OSError):
        raise
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except Exception as error:  # each format's reader has its own classes
        raise ConversionError(f"cannot read {path}: {' '.join(str(error).split()) or type(error).__name__}") from error
