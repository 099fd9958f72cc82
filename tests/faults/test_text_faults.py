"""Damaged files of every kind: read right, or refused in one line that names the file."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # training/ is run from a checkout, not installed

from modeling_gqa.data.packing import read_sections  # noqa: E402
from modeling_gqa.data.reading import find_files  # noqa: E402
from modeling_gqa.data.source import open_source, split_source  # noqa: E402
from modeling_gqa.training.recipe import Recipe  # noqa: E402
from modeling_gqa_cli.errors import UserError  # noqa: E402

FAULTS = 12  # of each file in a round
TEXTS = [f"document {number}: “naïve” 漢字 🙂\n" * (1 + number % 3) for number in range(40)]


def parquet(**options) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), sink, row_group_size=16, **options)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PLAIN = "".join(TEXTS).encode()
LINES = "\n".join(
    json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(TEXTS)
).encode()
ARRAY = json.dumps([{"text": text} for text in TEXTS]).encode()
FILES = {
    "a.txt": PLAIN,
    "a.txt.gz": gzip.compress(PLAIN),
    "a.md.bz2": bz2.compress(PLAIN),
    "a.py.xz": lzma.compress(PLAIN),
    "a.txt.zst": zstd(PLAIN),
    "a.jsonl": LINES,
    "a.jsonl.zst": zstd(LINES),
    "a.json": ARRAY,
    "a.json.xz": lzma.compress(ARRAY),
    "lines.json.gz": gzip.compress(LINES),
    "a.parquet": parquet(),
    "plain.parquet": parquet(compression="none", use_dictionary=False),
}
# Their checksums find any change of the content.
CHECKED = (".gz", ".bz2", ".xz")


def cut(draw: random.Random, content: bytearray) -> None:
    del content[draw.randrange(len(content)) :]


def flip(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def zero(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 8, 500]))
    content[start:end] = bytes(end - start)


def insert(draw: random.Random, content: bytearray) -> None:
    start = draw.randrange(len(content) + 1)
    # Not from the first byte on: a whole stream twice is right, and so is what it holds.
    some = [
        draw.randbytes(4),
        b'"',
        b"[",
        b"\n",
        b"\0",
        b"\xff",
        b'\\ud800"',
        b"9" * 5000,
        b"[" * 50_000,
        content[1:200],
    ]
    content[start:start] = draw.choice(some)


def outcome(read, error_class, path: Path) -> list[str] | None:
    """What was read, or `None` where it was refused as it must be; any other exception fails the test."""
    refusal = ""
    try:
        return read()
    except error_class as error:
        refusal = str(error)
    assert "\n" not in refusal and path.name in refusal and len(refusal) < 600, refusal
    return None


@pytest.mark.parametrize("fault", [cut, flip, zero, insert])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_right_or_named(name, fault, draw, tmp_path):
    path = tmp_path / name
    recipe = Recipe(output_dir=str(tmp_path / "run"), data_files=[str(path)])
    for _ in range(FAULTS):
        content = bytearray(FILES[name])
        fault(draw, content)
        path.write_bytes(content)

        def in_training():
            split = split_source(open_source(recipe), recipe)
            return [text for part in ("train", "validation") for text in split.documents(part)]

        def in_conversion():
            return list(read_sections(find_files([path]).paths, "text", 10**6, seed=0))

        ours, theirs = outcome(in_training, UserError, path), outcome(in_conversion, UserError, path)
        assert (ours is None) == (theirs is None) or not "".join(theirs).strip()
        if ours is not None:
            assert sorted("".join(ours)) == sorted("".join(theirs))
        if name == "a.txt" and ours is not None:
            assert "".join(ours) == content.decode()
        elif path.suffix in CHECKED and ours is not None:
            assert sorted("".join(ours)) == sorted("".join(TEXTS))


@pytest.mark.parametrize("name", FILES)
def test_an_undamaged_file_is_read(name, tmp_path):
    """Else the test above would prove nothing."""
    (tmp_path / name).write_bytes(FILES[name])
    assert "".join(sorted(read_sections([tmp_path / name], "text", 10**6, seed=0))) in (
        "".join(TEXTS),
        "".join(sorted(TEXTS)),
    )
