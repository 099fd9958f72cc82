"""The GQA paper's studies: what is trained, what is concluded, and all three of a small model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training_texts import MODEL, make_texts
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAConfig
from modeling_gqa.common.errors import UserError
from modeling_gqa.data.tokenizer import train_tokenizer
from modeling_gqa.training.shared.spread import Sample, Spread, agreement, pooled
from modeling_gqa.training.studies.findings import Times, conversion, groups, uptraining
from modeling_gqa.training.studies.points import Study, check_source
from modeling_gqa.training.studies.recipe import Point, Student, StudyRecipe
from training.study import study

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 300}
CONFIG = GQAConfig(attention_kind="mha", **SIZES)
GROUPED = GQAConfig(attention_kind="gqa", num_key_value_heads=4, **SIZES)


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


@pytest.mark.parametrize("argv", [[], ["study-quick"], ["quality", "study-quick"]])
def test_a_study_is_named(argv):
    with pytest.raises(UserError, match=r"name a study first: .*\{conversion,uptraining,groups\} RECIPE"):
        study(argv)


def test_a_source_without_its_tokens(pretrained, tmp_path):
    (pretrained / "results.json").rename(tmp_path / "results.json")
    try:
        with pytest.raises(UserError, match="give --pretraining-tokens"):
            study(["groups", "study-quick", "--source", str(pretrained), "--output-dir", str(tmp_path / "out"), *SHORT])
    finally:
        (tmp_path / "results.json").rename(pretrained / "results.json")
    assert not (tmp_path / "out").exists()


# -- what is concluded


def put(found: Study, losses: dict[Point, tuple[float, float]], noise: float = 0.001) -> None:
    """Write the results of runs: losses before and after, which part by `noise` from seed to seed."""
    for point, (before, after) in losses.items():
        for number, seed in enumerate(found.seeds()):
            folder = found.folder / "runs" / point.run_name(seed)
            folder.mkdir(parents=True)
            results = {"initial_validation_loss": before, "validation_loss": after + noise * number}
            (folder / "results.json").write_text(json.dumps(results))


def test_the_spread_of_samples():
    one, other = Sample("one", [1.0, 3.0]), Sample("other", [7.0, 7.0])
    spread = pooled([one.values, other.values])
    assert (spread.deviation, spread.freedom) == (1.0, 2)
    assert spread.differ(one, other)  # 5 apart, and t is 4.303
    assert not Spread(1.2, 2).differ(one, other)
    assert agreement([one, other], spread) == "the order agrees"
    assert agreement([other, one], spread) == "the order does not agree: one has a lower loss than other"
    middle = Sample("middle", [6.0, 6.0])
    assert agreement([one, other, middle], spread) == "the order agrees as far as the spread of the seeds lets one tell"
    assert agreement([other, middle], spread) == "the spread of the seeds lets no order be told"
    assert agreement([other, one], pooled([[1.0], [2.0]])) == "with one seed each no order can be told"


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 14, 30])
def test_quantiles_of_student(freedom):
    """Within plus and minus each lie 95 % of the distribution: its density, integrated."""
    half = torch.linspace(0, Spread(1.0, freedom).quantile, 200_001, dtype=torch.float64)
    density = torch.distributions.StudentT(torch.tensor(float(freedom), dtype=torch.float64)).log_prob(half).exp()
    assert 2 * torch.trapezoid(density, half).item() == pytest.approx(0.95, abs=5e-5)


@pytest.mark.parametrize(("first", "verdict"), [(4.2, "the order agrees"), (4.05, "first has a lower loss than mean")])
def test_methods_of_conversion(first, verdict, tmp_path):
    found = asked("conversion", tmp_path, seeds=2)
    losses = {"mean": (5.0, 4.1), "first": (5.5, first), "random": (7.0, 4.6), "lowrank": (4.5, 4.0)}
    put(found, {Point(Student(1, method), 0.05): pair for method, pair in losses.items()})
    findings = conversion(found)
    assert "Before uptraining: lowrank 4.5000, mean 5.0000, first 5.5000, random 7.0000." in findings.said[1]
    assert "the order agrees" in findings.said[1]
    assert verdict in findings.said[2]
    assert findings.table.rows[3] == ["lowrank", "4.5000", "4.0005 ± 0.0007"]


@pytest.mark.parametrize(("tenth", "verdict"), [(4.1, "diminish, as in the paper"), (2.0, "do not diminish, unlike")])
def test_shares_of_the_tokens(tenth, verdict, tmp_path):
    found = asked("uptraining", tmp_path, shares=[0.05, 0.1], seeds=2)
    many, grouped, one = (found.student(heads) for heads in (8, 2, 1))
    put(found, {Point(many, 0.05): (4.0, 3.9), Point(many, 0.1): (4.0, 3.8)})
    put(found, {Point(grouped, 0.05): (5.0, 4.2), Point(grouped, 0.1): (5.0, tenth)})
    put(found, {Point(one, 0.05): (6.0, 4.3), Point(one, 0.1): (6.0, 4.2)})
    findings = uptraining(found)
    assert findings.table.header == ["", "MHA", "GQA-2", "MQA"]
    assert findings.table.rows[0] == ["0%", "4.0000", "5.0000", "6.0000"]
    assert "GQA-2 5.0000, MQA 6.0000 nats per token; the order agrees" in findings.said[1]
    assert verdict in findings.said[2]
    assert "The source itself goes from 4.0000 to 3.8005 by 10%" in findings.said[4]


def test_numbers_of_heads(tmp_path):
    found = asked("groups", tmp_path, seeds=2)
    losses = {1: 4.3, 2: 4.2, 4: 4.1, 8: 4.0}
    put(found, {Point(found.student(heads), 0.05): (5.0, loss) for heads, loss in losses.items()})
    times = {1: Times(1.0, 1.0), 2: Times(1.1, 1.1), 4: Times(1.5, 1.5), 8: Times(2.2, 2.2)}
    findings = groups(found, times)
    assert [row[:3] for row in findings.table.rows] == [
        ["MQA", "1", "64"], ["GQA-2", "2", "128"], ["GQA-4", "4", "256"], ["MHA", "8", "512"],
    ]  # fmt: skip
    assert "GQA-2 takes 1.10 times MQA's time and MHA 2.20 times: as in the paper" in findings.said[1]
    assert "Here GQA-2 has 67% of MQA's rise in loss (+0.2000 of +0.3000 nats per token), at 2.00" in findings.said[2]


@pytest.mark.parametrize(("heads", "grouped"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 2), (12, 3), (16, 4)])
def test_heads_of_gqa(heads, grouped, tmp_path):
    config = GQAConfig(attention_kind="mha", hidden_size=96, num_attention_heads=heads, head_dim=4, num_hidden_layers=1)
    found = Study("groups", StudyRecipe(output_dir=str(tmp_path)), config, 1_000_000)
    assert found.heads == grouped


def test_a_source_of_two_heads_has_no_gqa(tmp_path):
    config = GQAConfig(attention_kind="mha", hidden_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=300)
    for name in ("uptraining", "groups"):
        found = Study(
            name, StudyRecipe(output_dir=str(tmp_path / name), seeds=2, shares=[0.05, 0.1]), config, 1_000_000
        )
        put(found, dict.fromkeys(found.points(), (5.0, 4.0)))
        findings = uptraining(found) if name == "uptraining" else groups(found, {1: Times(1, 1), 2: Times(2, 2)})
        assert len(findings.table.rows) == (3 if name == "uptraining" else 2)
        assert "GQA-1" not in " ".join(findings.said)


def test_times_that_say_nothing(tmp_path):
    found = asked("groups", tmp_path, seeds=1)
    findings = groups(found, {heads: Times(1.0, 1.0 + heads / 100) for heads in (1, 2, 4, 8)})
    assert "MHA 1.07 times: too little to tell" in findings.said[1]


def test_the_first_share_has_failed(tmp_path):
    """What each was before training is known of the runs that are left."""
    found = asked("uptraining", tmp_path, shares=[0.001, 0.1], seeds=2)
    put(found, {Point(found.student(heads), 0.1): (10.0 - heads, 4.0) for heads in (8, 2, 1)})
    findings = uptraining(found)
    assert findings.table.rows[0] == ["0%", "2.0000", "8.0000", "9.0000"]
    assert findings.table.rows[1] == ["0.1%", "failed", "failed", "failed"]


@pytest.mark.parametrize(("half", "most"), [(5.1, 5.3), (4.9999, 5.3)])
def test_no_gain_is_no_return(half, most, tmp_path):
    found = asked("uptraining", tmp_path, shares=[0.05, 0.1], seeds=2)
    for heads in (8, 2, 1):
        put(found, {Point(found.student(heads), 0.05): (5.0, half), Point(found.student(heads), 0.1): (5.0, most)})
    assert "unlike in the paper, the first gain is none, or within the spread" in uptraining(found).said[2]


def test_a_source_of_grouped_heads_is_named(tmp_path):
    found = Study("groups", StudyRecipe(output_dir=str(tmp_path), seeds=2), GROUPED, 1_000_000)
    put(found, {Point(found.student(heads), 0.05): (5.0, 4.0 + heads / 1e6) for heads in (1, 2, 4)})
    said = " ".join(groups(found, {heads: Times(1.0, 1.0 + heads) for heads in (1, 2, 4)}).said[1:])
    assert "times GQA-4's speed" in said
    assert "The losses of GQA-4 and MQA cannot be told apart" in said


def test_failed_runs_are_named_as_such(tmp_path):
    found = asked("conversion", tmp_path, methods=["mean", "first"], seeds=1)
    put(found, {Point(Student(1, "mean"), 0.05): (5.0, 4.1)})
    assert conversion(found).table.rows[1] == ["first", "failed", "failed"]


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
        study([name, str(recipe), *SHORT])
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
        study(["groups", str(recipe), *SHORT, "--calibration-tokens", "256"])
    AutoModelForCausalLM.from_config(GQAConfig.from_pretrained(pretrained)).save_pretrained(pretrained)
    with pytest.raises(UserError, match=r"holds a study with another recipe: runs\.source"):
        study(["groups", str(recipe), *SHORT])
