"""A small run to break: made once in this process, copied for every test."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "training"), str(TESTS / "faults")]

from broken_runs import RECIPE, write_texts

from modeling_gqa.training import publish
from training.pretrain import pretrain


@pytest.fixture(autouse=True)
def no_stranger(monkeypatch):
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path_factory):
    """Each test tokenizes its own text."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def start(tmp_path) -> Callable[..., Path]:
    """Runs pretraining in this process, on text in `tmp_path/text`, into a folder of `tmp_path`; returns the folder."""

    def start(name: str, *options: str, text: Path | None = None, **values) -> Path:
        text = text or tmp_path / "text"
        if not text.exists():
            write_texts(text)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({**RECIPE, "data_files": [str(text)], **values}))
        pretrain([str(recipe), "--output_dir", str(tmp_path / name), *options])
        return tmp_path / name

    return start


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A text and a run on it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_texts(folder / "text")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data_files": [str(folder / "text")]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")
        pretrain([str(folder / "recipe.yaml"), "--output_dir", str(folder / "run")])
    return folder / "text", folder / "run"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of the undisturbed run."""
    shutil.copytree(whole[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def stopped(run) -> Path:
    """The same, as it was when it had written its second checkpoint."""
    for name in ("checkpoint-6", "final"):
        shutil.rmtree(run / name)
    (run / "results.json").unlink()
    return run
