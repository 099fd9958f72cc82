"""The GQA paper's studies: what is trained, what the tables say, and all three of a small model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training_texts import MODEL, make_texts
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAConfig
from modeling_gqa.data.tokenizer import train_tokenizer
from modeling_gqa_cli.errors import UserError
from studies.__main__ import study
from studies.recipe import StudyRecipe
from studies.report import Times, conversion, groups, uptraining
from studies.study import Point, Student, Study, check_source

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 300}
CONFIG = GQAConfig(attention_kind="mha", **SIZES)


def asked(name: str, folder: Path, **fields) -> Study:
    return Study(name, StudyRecipe(output_dir=str(folder), **fields), CONFIG, 1_000_000)


# -- what is trained


def test_points_of_each_study(tmp_path):
    found = asked("conversion", tmp_path, methods=["mean", "random"], seeds=2)
    assert [point.student.name for point in found.points()] == ["1-heads-mean", "1-heads-random"]
    names = [found.student_folder(*pair).name for pair in found.students_by_seed()]
    assert names == ["source", "1-heads-mean", "1-heads-random-seed42", "1-heads-random-seed43"]
    found = asked("uptraining", tmp_path, shares=[0.05, 0.1], seeds=1)
    assert [(point.student.name, point.share) for point in found.points()] == [
        (name, share) for name in ("source", "2-heads-mean", "1-heads-mean") for share in (0.05, 0.1)
    ]
    found = asked("groups", tmp_path)
    assert [point.student.heads for point in found.points()] == [1, 2, 4, 8]
    assert [found.config_with(heads).num_key_value_heads for heads in found.all_heads()] == [1, 2, 4, 8]


def test_what_has_ended_is_not_needed(tmp_path):
    """Studies share runs: at 5 % GQA and MQA are those of the study of groups."""
    first, second = asked("uptraining", tmp_path, shares=[0.05], seeds=2), asked("groups", tmp_path, seeds=2)
    names = {run.name for run in first.needed({})}
    assert len(names) == 6
    assert {run.name for run in second.needed(dict.fromkeys(names, 1.0))} == {
        "4-heads-mean-share0.05-seed42", "4-heads-mean-share0.05-seed43",
    }  # fmt: skip
    run = first.needed({})[0]
    assert (run.script, run.options["pretraining_fraction"], run.options["pretraining_tokens"]) == (
        "uptrain", 0.05, 1_000_000,
    )  # fmt: skip


WRONG = {
    "share": ({"share": 0}, "share must lie above 0"),
    "shares": ({"shares": [0.5, 1.5]}, "shares must lie above 0"),
    "method": ({"methods": ["median"]}, "there is no method median"),
    "seeds": ({"seeds": 0}, "seeds is 0"),
    "options": ({"options": {"student": "x"}}, "options has student, which the study sets"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_recipes(wrong):
    fields, said = WRONG[wrong]
    with pytest.raises(ValueError, match=said):
        StudyRecipe(**fields)


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"attention_kind": "mqa"}, {}, "has no key/value heads to merge"),
        ({"attention_kind": "mla"}, {}, "has no key/value heads to merge"),
        ({"attention_kind": "mha"}, {"heads": 3}, "must divide the source's 8"),
        ({"attention_kind": "mha"}, {"heads": 8}, "must divide the source's 8"),
        ({"attention_kind": "mha", "max_position_embeddings": 600}, {}, "more than the 600 positions"),
    ],
)
def test_wrong_sources(fields, options, said):
    config = GQAConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=2, **fields)
    with pytest.raises(UserError, match=said):
        check_source(config, StudyRecipe(**options))


@pytest.mark.parametrize("argv", [[], ["quality", "study-quick"]])
def test_a_study_is_named(argv):
    done = subprocess.run([sys.executable, "-m", "studies", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "python -m studies conversion" in done.stderr


def test_a_source_without_its_tokens(pretrained, tmp_path):
    (pretrained / "results.json").rename(tmp_path / "results.json")
    try:
        with pytest.raises(UserError, match="give --pretraining-tokens"):
            study("groups", ["study-quick", "--source", str(pretrained), "--output-dir", str(tmp_path / "out"), *SHORT])
    finally:
        (tmp_path / "results.json").rename(pretrained / "results.json")
    assert not (tmp_path / "out").exists()


# -- what the tables say


def put(found: Study, losses: dict[Point, tuple[float, float]], noise: float = 0.001) -> None:
    """Write the results of runs: losses before and after, which part by `noise` from seed to seed."""
    for point, (before, after) in losses.items():
        for number, seed in enumerate(found.seeds()):
            folder = found.folder / "runs" / point.run_name(seed)
            folder.mkdir(parents=True)
            results = {"initial_validation_loss": before, "validation_loss": after + noise * number}
            (folder / "results.json").write_text(json.dumps(results))


def test_methods_of_conversion(tmp_path):
    found = asked("conversion", tmp_path, seeds=2, methods=["mean", "lowrank", "first"])
    losses = {"mean": (5.0, 4.1), "lowrank": (4.5, 4.0)}
    put(found, {Point(Student(1, method), 0.05): pair for method, pair in losses.items()})
    findings = conversion(found)
    assert findings.table.rows == [
        ["mean", "5.0000", "4.1005 ± 0.0007"],
        ["lowrank", "4.5000", "4.0005 ± 0.0007"],
        ["first", "failed", "failed"],
    ]
    assert findings.numbers["mean"] == {"before": [5.0, 5.0], "after": [4.1, 4.101]}
    assert findings.numbers["first"] == {"before": None, "after": None}


def test_shares_of_the_tokens(tmp_path):
    """What each was before training is known of the runs that are left where the first share has failed."""
    found = asked("uptraining", tmp_path, shares=[0.001, 0.1], seeds=2)
    put(found, {Point(found.student(heads), 0.1): (10.0 - heads, 4.0) for heads in (8, 2, 1)})
    findings = uptraining(found)
    assert findings.table.header[1:] == ["MHA", "GQA-2", "MQA"]
    assert findings.table.rows[0] == ["0 %", "2.0000", "8.0000", "9.0000"]
    assert findings.table.rows[1] == ["0.1 %", "failed", "failed", "failed"]
    assert findings.numbers["GQA-2"] == {"0": [8.0, 8.0], "0.1": [4.0, 4.001]}


def test_numbers_of_heads(tmp_path):
    found = asked("groups", tmp_path, seeds=2)
    losses = {1: 4.3, 2: 4.2, 4: 4.1, 8: 4.0}
    put(found, {Point(found.student(heads), 0.05): (5.0, loss) for heads, loss in losses.items()})
    times = {1: Times(1.0, 1.0), 2: Times(1.1, 1.1), 4: Times(1.5, 1.5), 8: Times(2.2, 2.2)}
    findings = groups(found, times)
    assert [row[:3] for row in findings.table.rows] == [
        ["MQA", "1", "64"], ["GQA-2", "2", "128"], ["GQA-4", "4", "256"], ["MHA", "8", "512"],
    ]  # fmt: skip
    assert findings.table.rows[3][3:6] == ["2.20", "2.200", "2.20"]
    assert findings.numbers["8"]["losses"] == [4.0, 4.001]


@pytest.mark.parametrize(("heads", "grouped"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 2), (12, 3), (16, 4)])
def test_heads_of_gqa(heads, grouped, tmp_path):
    """A source of two or three heads has no GQA between itself and MQA."""
    config = GQAConfig(attention_kind="mha", hidden_size=96, num_attention_heads=heads, head_dim=4, num_hidden_layers=1)
    found = Study("groups", StudyRecipe(output_dir=str(tmp_path)), config, 1_000_000)
    assert found.heads == grouped
    assert found.compared_heads() == [heads, grouped, 1][: 3 if grouped > 1 else 2]


# -- the whole

SHORT = ("--prompt-tokens", "32", "--new-tokens", "16")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A model of four heads, with a tokenizer and what says how long it was trained."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = GQAConfig(**{**MODEL, "attention_kind": "mha", "num_hidden_layers": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    train_tokenizer(make_texts(40), MODEL["vocab_size"]).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps({"tokens_seen": 20_000}))
    return folder


def test_the_three_studies_of_a_small_model(pretrained, corpus, tmp_path, capsys):
    """Nothing is trained twice, and each study writes its report, its numbers and its pictures."""
    uptraining_recipe, recipe = tmp_path / "uptrain.yaml", tmp_path / "study.yaml"
    sizes = {"sequence_length": 64, "per_device_train_batch_size": 4, "max_eval_blocks": 4, "validation_fraction": 0.1}
    uptraining_recipe.write_text(yaml.safe_dump({"data_files": [str(corpus)], "warmup_steps": 1, **sizes}))
    fields = {"source": str(pretrained), "uptraining": str(uptraining_recipe), "output_dir": str(tmp_path / "out")}
    fields |= {"methods": ["mean", "lowrank"], "shares": [0.05, 0.1], "heads": 2, "calibration_tokens": 512}
    recipe.write_text(yaml.safe_dump(fields | {"seeds": 1, "jobs": 2}))
    runs = {}
    for name in ("conversion", "uptraining", "groups"):
        study(name, [str(recipe), *SHORT])
        runs[name] = {path.parent.name: path.stat().st_mtime for path in tmp_path.glob("out/runs/*/results.json")}
        content = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert content["failures"] == {}
        text = (tmp_path / "out" / f"{name}.md").read_text()
        assert "failed" not in text
        pictures = [line.partition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
        assert pictures
        assert all((tmp_path / "out" / picture).stat().st_size > 5000 for picture in pictures)
    assert [len(found) for found in runs.values()] == [2, 7, 7]
    assert runs["conversion"].items() <= runs["uptraining"].items() <= runs["groups"].items()
    before = json.loads((tmp_path / "out" / "uptraining.json").read_text())["results"]["MHA"]
    assert before["0.1"][0] < before["0"][0]
    with pytest.raises(UserError, match="holds a study with another recipe: calibration_tokens"):
        study("groups", [str(recipe), *SHORT, "--calibration-tokens", "256"])
    AutoModelForCausalLM.from_config(GQAConfig.from_pretrained(pretrained)).save_pretrained(pretrained)
    with pytest.raises(UserError, match=r"holds a study with another recipe: runs\.source"):
        study("groups", [str(recipe), *SHORT])
