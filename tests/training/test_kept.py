"""Tokenizers and tokens are made once, and a run goes on where they cannot be kept."""

import errno
import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import yaml
from training_texts import MODEL, make_texts

from modeling_gqa.common import progress
from modeling_gqa.data.source import open_source
from modeling_gqa.training import kept, run_setup
from modeling_gqa.training.kept import make_once
from modeling_gqa.training.recipe import Recipe
from training.pretrain import pretrain


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modeling_gqa"


class Maker:
    """Makes a file in a folder of a folder, and counts how often."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.count = tmp_path, 0

    def make(self, folder: Path) -> None:
        self.count += 1
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "file").write_bytes(b"x" * 1000)

    def once(self, depends_on, name: str = "folder") -> Path:
        make_once("Tokens", self.path / name, depends_on, self.make)
        assert (self.path / name / "sub" / "file").read_bytes() == b"x" * 1000
        return self.path / name


@pytest.fixture
def maker(tmp_path) -> Maker:
    return Maker(tmp_path)


def entries(store: Path) -> list[Path]:
    return [path for path in store.iterdir() if path.is_dir()]


def refuse(*_, **__):
    raise OSError(errno.EXDEV, "refused")


@pytest.mark.parametrize("links", [True, False])
def test_the_same_is_made_once(maker, store, links, monkeypatch, capsys):
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folders = [maker.once({"text": 1}, name) for name in ("one", "two")]
    assert maker.count == 1
    assert os.path.samefile(*(folder / "sub" / "file" for folder in folders)) == links
    kept, read = (line for line in capsys.readouterr().out.splitlines())
    (entry,) = entries(store)
    assert str(entry) in kept and str(entry) in read and kept != read and "0.0 MB" in read
    maker.once({"text": 2}, "two")
    assert maker.count == 2
    shutil.rmtree(store)
    maker.once({"text": 1})
    assert maker.count == 3


def test_what_is_not_known_is_not_kept(maker, store):
    maker.once(None)
    maker.once(None)
    assert maker.count == 2 and not store.exists()


@pytest.mark.parametrize("name", ["sub/file", kept.LISTING])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"y" * 1000)], ids=["lost", "changed"])
def test_what_is_damaged_is_made_again(maker, store, name, damage):
    maker.once(1, "first")
    shutil.rmtree(maker.path / "first")
    (entry,) = entries(store)
    damage(entry / name)
    maker.once(1, "second")
    maker.once(1, "third")
    assert maker.count == 2


def test_a_stopped_writer_leaves_no_entry(maker, store, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kept, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            maker.once(1)
    maker.once(1)
    maker.once(1)
    assert maker.count == 2


@pytest.mark.parametrize("place", ["file", "disk", "locks"])
def test_a_run_goes_on_without_the_store(maker, store, place, monkeypatch, capsys):
    if place == "file":
        store.parent.write_text("no folder")
    elif place == "disk":
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(shutil, "copyfile", refuse)
    else:
        monkeypatch.setattr(kept.FileLock, "acquire", lambda *_, **__: (_ for _ in ()).throw(NotImplementedError()))
    maker.once(1)
    maker.once(1)
    assert maker.count == 2
    assert place == "file" or not entries(store)
    assert capsys.readouterr().out.count("not kept") == 2


def test_the_oldest_make_room(maker, store, monkeypatch):
    """For three entries of 1,000 bytes and their listings there is room, and for no fourth, nor for a larger one."""
    usage = SimpleNamespace(total=int(4200 / kept.SHARE))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for number in range(3):
        maker.once(number)
        for entry in entries(store):
            os.utime(entry, (entry.stat().st_mtime - 10,) * 2)
    maker.once(0)  # is now the newest
    maker.once(3)
    assert maker.count == 4
    for number, count in ((0, 4), (2, 4), (3, 4), (1, 5)):
        maker.once(number)
        assert maker.count == count
    usage.total = int(999 / kept.SHARE)
    maker.once(4)
    maker.once(4)
    assert maker.count == 7 and len(entries(store)) == 3


def test_a_process_that_makes_the_same_is_waited_for(maker, store):
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        maker.make(folder)

    first = threading.Thread(target=make_once, args=("Tokens", maker.path / "first", 1, slowly))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=maker.once, args=(1, "second"))
    second.start()
    second.join(0.3)
    assert second.is_alive() and maker.count == 0
    go_on.set()
    first.join(60)
    second.join(60)
    assert maker.count == 1 and (maker.path / "second" / "sub" / "file").exists()


# -- of a run


@pytest.fixture
def run(tmp_path, store, monkeypatch):
    """Runs pretraining of one step; returns the bytes of its tokens, and what was made for it."""
    (tmp_path / "text").mkdir()
    for number, text in enumerate(make_texts(30)):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    made = []
    for name in ("write_blocks", "train_tokenizer"):
        monkeypatch.setattr(run_setup, name, counted(name, getattr(run_setup, name), made))

    def run(name: str, *options: str) -> tuple[dict[str, bytes], list[str]]:
        recipe = {
            "preset": "tiny-gqa", "model_overrides": {**MODEL, "num_hidden_layers": 1}, "sequence_length": 32,
            "max_steps": 1, "publish": False, "data_files": [str(tmp_path / "text")],
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        made.clear()
        pretrain([str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / name), *options])
        folders = [tmp_path / name / part for part in ("data", "tokenizer")]
        return {path.name: path.read_bytes() for folder in folders for path in folder.iterdir()}, sorted(made)

    return run


def counted(name, function, made):
    def call(*args, **kwargs):
        made.append(name)
        return function(*args, **kwargs)

    return call


def test_runs_have_the_tokens_of_the_first(run, store, tmp_path, monkeypatch):
    """Bit for bit those of a run that neither reads nor keeps any."""
    with monkeypatch.context() as patch:
        patch.setattr(run_setup, "text_of", lambda *_: None)
        alone, made = run("alone")
    assert made == ["train_tokenizer", "write_blocks"] and not store.exists()
    assert run("first") == (alone, made)
    assert run("second") == (alone, [])
    named, made = run("named", "--tokenizer", str(tmp_path / "second" / "tokenizer"))
    assert named["train.npy"] == alone["train.npy"] and made == []
    for path in (tmp_path / "second" / "data").iterdir():
        path.unlink()
    assert run("second", "--resume", "--max-steps", "1") == (alone, [])


def test_tokenizing_shows_its_progress(run, monkeypatch, capsys):
    monkeypatch.setattr(progress, "BETWEEN_LINES", 0.0)
    run("first")
    assert re.search("tokenizing for train: 0 of 1, .*tokenizing for validation: 0 of 1", capsys.readouterr().err, re.S)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        (["--sequence-length", "16"], ["write_blocks"]),
        (["--max-eval-blocks", "1"], ["write_blocks"]),
        (["--validation-fraction", "0.3"], ["train_tokenizer", "write_blocks"]),
        (["--streaming"], ["train_tokenizer", "write_blocks"]),
        (["--learning-rate", "1e-4", "--seed", "3"], []),
    ],
)
def test_other_options_have_their_own_tokens(run, options, made):
    run("first")
    assert run("second", *options)[1] == made


@pytest.mark.parametrize("change", ["content", "more", "order"])
def test_another_text_has_its_own_tokens(run, tmp_path, change):
    first, everything = run("first")
    path = tmp_path / "text" / "0.txt"
    if change == "content":
        path.write_text(path.read_text().replace("a", "b"))
    elif change == "more":
        (path.parent / "more.txt").write_text("more text " * 99)
    else:
        path.rename(path.with_name("zzz.txt"))
    second, made = run("second")
    assert made == everything and second["train.npy"] != first["train.npy"]


def test_another_tokenizer_has_its_own_tokens(run, tmp_path):
    first, _ = run("first")
    config = tmp_path / "first" / "tokenizer" / "tokenizer_config.json"
    shutil.copytree(config.parent, tmp_path / "tokenizer")
    changed = json.loads(config.read_text()) | {"eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer" / config.name).write_text(json.dumps(changed))
    second, made = run("second", "--tokenizer", str(tmp_path / "tokenizer"))
    assert made == ["write_blocks"] and second["train.npy"] != first["train.npy"]


def test_a_kept_text_that_is_too_short_for_a_batch_is_refused(run):
    run("first")
    with pytest.raises(Exception, match="is too short") as error:
        run("second", "--per-device-train-batch-size", "5000")
    assert "at least 5000" in str(error.value)


def test_a_hub_data_set_is_known_by_its_fingerprint(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    for streaming in (False, True):
        found = rows.to_iterable_dataset() if streaming else rows
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, found=found, **__: found)
        fields = {"streaming": streaming, "max_steps": 1}
        source = open_source(Recipe(output_dir=str(tmp_path), dataset_name="me/rows", **fields))
        assert source.state() == (None if streaming else rows._fingerprint)
        assert {"".join(document()) for document in source.documents()} == {"a", "b"}
        json.dumps(source.state())
