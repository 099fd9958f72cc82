"""Files to documents: every format, packed and not, what is left out of folders, and what is refused by name."""

import bz2
import gzip
import json
import lzma
import os
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from modeling_gqa.conversion import UserError
from modeling_gqa.data import reading
from modeling_gqa.data.reading import find_files, read_documents

TEXTS = ["one\r\ntwo — 漢字 🙂\n", "three", '"four" \\ {[,]}\t', "  "]


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
KINDS = {
    "lines.jsonl": "\n".join(f'{{"n": 9, "text": {json.dumps(text)}}}' for text in TEXTS),
    "strings.jsonl": "\n\n".join(json.dumps(text, ensure_ascii=False) for text in TEXTS),
    "array.json": json.dumps([{"text": text, "n": None} for text in TEXTS], indent=2),
    "strings.json": " \n" + json.dumps(TEXTS),
    "lines.json": "\n".join(json.dumps({"text": text}) for text in TEXTS),
}


def read(path: Path, column: str = "text") -> list[str]:
    return ["".join(document()) for document in read_documents(path, column)]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_kind(name, packing, tmp_path):
    """Each format and packing of the same three texts gives these texts."""
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACKERS[packing](KINDS[name].encode()))
    assert read(path) == TEXTS
    assert find_files([tmp_path], "text").paths == [path]


@pytest.mark.parametrize("name", KINDS)
def test_upper_case_and_a_byte_order_mark(name, tmp_path):
    path = tmp_path / f"{name}.gz".upper()
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + KINDS[name].encode()))
    assert read(path) == TEXTS
    assert find_files([tmp_path], "text").paths == [path]


@pytest.mark.parametrize("packing", PACKERS)
def test_text_of_every_packing(packing, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 1000)
    text = "\n".join(f"line {number} — 漢" for number in range(1000))
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](b"\xef\xbb\xbf" + text.encode()))
    (document,) = read_documents(path, "text")
    for _ in range(2):
        pieces = list(document())
        assert "".join(pieces) == text and len(pieces) > 2
    path.write_bytes(PACKERS[packing](b"a\r\nb\rc\n"))
    assert read(path) == ["a\r\nb\rc\n"]
    assert ["".join(document()) for document in read_documents(path, "text", newlines=True)] == ["a\nb\nc\n"]


def test_rows_of_parquet(tmp_path):
    rows = [{"n": number, "text": text} for number, text in enumerate(TEXTS * 200)]
    for name, kind in (("a.parquet", pyarrow.string()), ("b.PARQUET", pyarrow.large_string())):
        table = pyarrow.Table.from_pylist(rows).cast(pyarrow.schema({"n": pyarrow.int64(), "text": kind}.items()))
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=300)
        assert read(tmp_path / name) == TEXTS * 200


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_json_is_read_in_chunks_of_any_size(chunk, tmp_path, monkeypatch):
    """Values that are cut anywhere by the end of a chunk are read whole."""
    monkeypatch.setattr(reading, "CHUNK", chunk)
    values = [{"text": "a" * 100, "n": -1.5e300, "b": [True, False, None, "\\"]}, "\U0001f642", {"text": "\n"}]
    for name, content in (("a.json", json.dumps(values)), ("b.json", "\n".join(map(json.dumps, values)))):
        (tmp_path / name).write_text(content)
        assert read(tmp_path / name) == ["a" * 100, "\U0001f642", "\n"]


NESTED = "[" * 100_000
REFUSED = {
    "surrogate": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\\ud800 b"}',
        r"a.jsonl, line 2: the text holds \ud800, half of a",
    ),
    "surrogate in JSON": ("a.json", b'["a",\n\n"\\udfff"]', r"a.json, row 2: the text holds \udfff"),
    "nested": ("a.jsonl", b'{"text": "a"}\n' + NESTED.encode(), "a.jsonl, line 2 is not JSON: "),
    "nested in JSON": ("a.json", b'{"text":\n' + NESTED.encode(), "a.json, line 1 is not JSON: "),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text', "a.jsonl, line 2 is not JSON: "),
    "no comma": ("a.json", b'["a"\n"b"]', "a.json, line 2 is not JSON: Expecting ',' delimiter"),
    "no end": ("a.json", b'["a",\n"b"\n', "a.json, line 3 is not JSON: Expecting ',' delimiter"),
    "cut string": ("a.json", b'["a",\n"b', "a.json, line 2 is not JSON: Unterminated string"),
    "two arrays": ("a.json", b'["a"]\n["b"]', "a.json, line 2 is not JSON: Extra data"),
    "number": ("a.jsonl", b'{"text": 12}', "a.jsonl, line 1: column 'text' holds int in place of text"),
    "null": ("a.jsonl", b'{"text": null}', "a.jsonl, line 1: column 'text' holds NoneType in place of text"),
    "other column": ("a.json", b'{"a\\nb": 1, "c": 2}', "a.json, line 1: no text in column 'text' (found: a b, c)"),
    "Latin": ("a.txt", b"a\nb\n\xe9 c", "a.txt is not UTF-8 text: invalid continuation byte in line 3"),
    "Latin row": ("a.jsonl", b'"a"\n"\xe9"', "a.jsonl is not UTF-8 text: invalid continuation byte in line 2"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "a.txt is not UTF-8 text: invalid start byte in line 1"),
    "NUL": ("a.txt", b"a\nb\0", "a.txt is not UTF-8 text: a NUL character in line 2"),
    "cut character": ("a.txt", "a\nb漢".encode()[:-1], "a.txt is not UTF-8 text: unexpected end of data in line 2"),
    "no gzip": ("a.txt.gz", b"text", "cannot read "),
    "no bzip2": ("a.txt.bz2", b"text", "cannot read "),
    "no xz": ("a.jsonl.xz", b"text", "cannot read "),
    "no zstd": ("a.json.zst", b"text", "cannot read "),
    "cut gzip": ("a.txt.gz", gzip.compress(b"text" * 100)[:-9], "a.txt.gz: Compressed file ended"),
    "cut zstd": ("a.txt.zst", zstd(os.urandom(1000))[:-9], "a.txt.zst: Truncated compressed stream"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


ENDS = {
    "string": (b'{"text": "a', ", line 1001 is not JSON: Unterminated string"),
    "no bracket": (b'{"text": "a"\n\n', ", line 1001 is not JSON: "),
    "zeros": (b"\0" * 5000, " is not UTF-8 text: a NUL character in line 1001"),
    "half a character": ('{"text": "漢'.encode()[:-1], " is not UTF-8 text: unexpected end of data in line 1001"),
    "longer than a piece": (b'{"text": "' + b"x" * 5000, ", line 1001 is not JSON: Unterminated string"),
}


@pytest.mark.parametrize(("end", "message"), ENDS.values(), ids=ENDS)
def test_a_cut_file_is_refused_before_its_first_row(end, message, tmp_path, monkeypatch):
    """Whoever stops reading when there is enough text would not see it."""
    monkeypatch.setattr(reading, "CHUNK", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 1000 + end)
    with pytest.raises(UserError, match="a.jsonl" + message):
        next(read_documents(path, "text"))


@pytest.mark.parametrize("end", [b"", b"\n\n", b"\r\n \n", b'\n{"text": "' + b"x" * 5000 + b'"}'])
def test_a_whole_file_is_not_read_to_learn_so(end, tmp_path, monkeypatch):
    """Its last character closes a row, and that alone is looked at."""
    monkeypatch.setattr(reading, "CHUNK", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "a"}'] * 3000) + end)
    monkeypatch.setattr(reading, "deque", lambda *_, **__: pytest.fail("it was read"))
    assert len(list(read_documents(path, "text"))) == 3000 + (end[-1:] == b"}")


def test_parquet_refusals(tmp_path):
    for kind in (pyarrow.int64(), pyarrow.binary(), pyarrow.list_(pyarrow.string())):
        column = pyarrow.nulls(3, kind)
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "type.parquet")
        with pytest.raises(UserError, match=r"type.parquet, row 1: column 'text' holds NoneType in"):
            read(tmp_path / "type.parquet")
    path = tmp_path / "page.parquet"
    text = [f"{number} {os.urandom(50).hex()}" for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path, row_group_size=500, use_dictionary=False)
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 64)
    with pytest.raises(UserError, match=r"^cannot read .*page.parquet behind row \d+: ") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_and_folder_are_named(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.txt").write_text("text")

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(reading, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"^cannot read .*a.txt: Permission denied$"):
        read(tmp_path / "a.txt")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (refuse if "shut" in os.fspath(path) else scandir)(path))
    with pytest.raises(UserError, match=r"^cannot read the folder .*shut: Permission denied$"):
        find_files([tmp_path])


def test_what_is_left_out_of_folders_is_named(tmp_path):
    wanted = ["a.txt", "B.TXT", "deep/c.md", "rows.json", "x.jsonl.gz", "notes.PY"]
    left_out = {
        "hidden": [".git/a.txt", ".hidden.txt"],
        "empty": ["deep/none.txt"],
        "folders of programs and models": ["node_modules/a.md", "env/pyvenv.cfg", "model/model.safetensors"],
        "training runs": ["runs/x/recipe.yaml"],
        "JSON without text in 'text'": ["package.json"],
        "not files": ["gone.txt"],
    }
    others = ["env/a.py", "model/README.md", "runs/x/model.json", "other.bin"]
    for name in [*wanted, *chain.from_iterable(left_out.values()), *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    (tmp_path / "runs/x/README.md").write_text("a card")
    (tmp_path / "package.json").write_text('{"name": "a"}')
    (tmp_path / "deep/none.txt").write_text("")
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "again.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    found = find_files([tmp_path, tmp_path / "a.txt"], "text")
    assert found.paths == sorted(tmp_path / name for name in wanted)
    assert set(found.skipped) == {*left_out, "folders behind links"}
    for reason, names in left_out.items():
        assert all(any(str(tmp_path / name).startswith(path) for path in found.skipped[reason]) for name in names)
    assert f"not read (empty), 1: {tmp_path / 'deep/none.txt'}" in found.notes
    # Named, they are read.
    assert [path.name for path in find_files([tmp_path / ".git", tmp_path / "package.json"]).paths] == [
        "a.txt",
        "package.json",
    ]
    assert find_files([tmp_path / "runs/x"]).paths == [tmp_path / "runs/x/README.md", tmp_path / "runs/x/model.json"]


def test_nothing_to_read_says_what_was_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"nothing to read at .* \(not read \(empty\), 1: .*a.txt\): give files"):
        find_files([tmp_path])
    with pytest.raises(UserError, match=r"a.txt is empty$"):
        find_files([tmp_path / "a.txt"])
    with pytest.raises(UserError, match=r"nothing to read at .*missing: give files"):
        find_files([tmp_path / "missing"])
