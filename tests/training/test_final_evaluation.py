"""What a run evaluates when it has ended: the same scores as `evaluate` gives, and refusals before it trains."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from command import run
from huggingface_hub import metadata_load
from training_texts import MODEL

from modeling_gqa.training import publish, run_setup
from modeling_gqa_cli.errors import UserError
from training.pretrain import pretrain


@pytest.fixture
def train(corpus, tmp_path, monkeypatch):
    """Pretrains a tiny model in the folder `run`; returns that folder."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")
    recipe = {
        "preset": "tiny-mla", "model_overrides": {**MODEL, "num_hidden_layers": 1}, "data_files": [str(corpus)],
        "sequence_length": 48, "max_steps": 2, "max_eval_blocks": 4, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip

    def train(*options: object, **values) -> Path:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**recipe, **values}))
        pretrain([str(tmp_path / "mine.yaml"), *map(str, options)])
        return tmp_path / "run"

    return train


def test_the_scores_are_those_of_evaluate(train, yardsticks, tmp_path):
    """In results.json, in its copy in the repository, and in the card, which has them under the model's name."""
    limit = ("--eval-limit", 3, "--hub-model-id", "me/mine")
    folder = train("--eval-tasks", "lambada,wikitext2", "--eval-data", yardsticks, *limit)
    results = json.loads((folder / "results.json").read_text())
    assert results == json.loads((folder / "final" / "results.json").read_text()) and results["steps"] == 2
    scores = tmp_path / "scores.json"
    asked = ("--tasks", "lambada,wikitext2", "--data", yardsticks, "--limit", 3, "--sequence-length", 48)
    run("evaluate", folder / "final", *asked, "--device", "cpu", "--json", scores)
    assert results["evaluation"] == json.loads(scores.read_text())["checkpoint"]["tasks"]
    assert {name: task["items"] for name, task in results["evaluation"].items()} == {
        "lambada": 3, "wikitext2": 3, "wikitext": 1,
    }  # fmt: skip
    metadata = metadata_load(folder / "final" / "README.md")
    (index,) = metadata["model-index"]
    written = {(x["dataset"]["name"], y["type"]): y["value"] for x in index["results"] for y in x["metrics"]}
    measured = {(x, y): z["value"] for x, task in results["evaluation"].items() for y, z in task["scores"].items()}
    assert index["name"] == "mine" and metadata["library_name"] == "transformers"
    assert written == pytest.approx(measured, abs=1e-5)


def test_a_resumption_evaluates_what_it_is_told_to(train, yardsticks, capsys):
    """All that the folder has, also after a run that evaluated nothing, and anew where a run is finished."""
    folder = train()
    assert "evaluation" not in json.loads((folder / "results.json").read_text())
    for number in (2, 3):
        train("--resume", eval_data=str(yardsticks), eval_limit=number)
        found = json.loads((folder / "results.json").read_text())["evaluation"]
        assert {name: task["items"] for name, task in found.items()} == {
            "lambada": number, "wikitext2": number, "wikitext": 1,
        }  # fmt: skip
    assert "word_perplexity" in capsys.readouterr().out


def test_a_resumption_without_tasks_keeps_the_scores(train, yardsticks):
    folder = train("--eval-tasks", "lambada", "--eval-data", yardsticks, "--eval-limit", 3)
    before, card = json.loads((folder / "results.json").read_text()), metadata_load(folder / "final" / "README.md")
    train("--resume")
    for place in (folder, folder / "final"):
        assert json.loads((place / "results.json").read_text())["evaluation"] == before["evaluation"]
    assert metadata_load(folder / "final" / "README.md")["model-index"] == card["model-index"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--eval-tasks", "lambda"), r"there is no task lambda \(did you mean lambada\?\)"),
        (("--eval-tasks", "wikitext2"), "wikitext2 needs the file wikitext2-raw-test.txt: give its folder by --eval-d"),
        (("--eval-tasks", "hellaswag", "--eval-data", "DATA"), "hellaswag needs the file .* by --eval-data"),
        (("--eval-tasks", "lambada", "--eval-data", "nowhere"), "--eval-data nowhere is no folder"),
        (("--eval-data", "EMPTY"), "has none of .*give --eval-tasks by their names"),
        (("--eval-tasks", "lambada,humaneval", "--eval-data", "DATA"), "humaneval, which runs code"),
        (("--eval-tasks", "lambada", "--no-publish"), "publish false does not write"),
        (("--eval-tasks", "lambada", "--eval-limit", "0"), "eval_limit is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_text_is_read(
    options, said, train, yardsticks, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_setup, "split_source", lambda *_: pytest.fail("text was read"))
    (tmp_path / "empty").mkdir()
    places = {"DATA": yardsticks, "EMPTY": tmp_path / "empty"}
    with pytest.raises(UserError, match=said):
        train(*(places.get(option, option) for option in options))
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_known_before_text_is_read(train, yardsticks, tmp_path, monkeypatch):
    monkeypatch.setattr(run_setup, "split_source", lambda *_: pytest.fail("text was read"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError) as error:
        train("--eval-data", yardsticks)
    assert error.value.name == "lm_eval" and not (tmp_path / "run").exists()
