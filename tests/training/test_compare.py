"""Comparisons: which runs are needed, how models are matched, what is concluded, and the whole in processes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from modeling_gqa.common.progress import duration
from modeling_gqa.costs import cache_bytes_per_token, count_parameters, training_flops
from modeling_gqa.training.comparison import estimate
from modeling_gqa.training.comparison import report as reporting
from modeling_gqa.training.comparison.models import CompareRecipe, candidates_of, usual_kinds
from modeling_gqa.training.comparison.plan import EXTENSIONS, Comparison, Trial, best_rate, further_rate, plan
from modeling_gqa.training.comparison.report import (
    Entry,
    Outcome,
    comparison_report,
    losses_table,
    plot_comparison,
    verdict,
    write_outcome,
)
from modeling_gqa.training.comparison.runs import Runs, gpu_of
from modeling_gqa_cli.errors import UserError
from training.compare import compare

ROOT = Path(__file__).resolve().parents[2]
NAN = math.nan
RATES = [1e-3, 2e-3, 4e-3]


# -- the sweep


@pytest.mark.parametrize("vertex", [1.1e-3, 2e-3, 3.3e-3])
def test_the_parabola_finds_its_vertex(vertex):
    losses = {rate: 2 + 0.7 * math.log(rate / vertex) ** 2 for rate in RATES}
    if min(losses, key=losses.__getitem__) == 2e-3:
        assert best_rate(losses) == pytest.approx(vertex, rel=0.005)
    wide = {rate: 2 + 0.7 * math.log(rate / vertex) ** 2 for rate in (1e-4, 3e-4, *RATES, 3e-2)}
    assert best_rate(wide) == pytest.approx(vertex, rel=0.005)


def test_a_sweep_goes_on_while_its_best_is_an_edge():
    rising = {rate: -rate for rate in RATES}
    added = []
    while (rate := further_rate(rising, RATES)) is not None:
        added.append(rate)
        rising[rate] = -rate
    assert added == [8e-3, 1.6e-2, 3.2e-2, 6.4e-2][:EXTENSIONS]
    falling = {rate: rate for rate in RATES}
    assert further_rate(falling, RATES) == 5e-4
    assert further_rate({1e-3: 1.0, 2e-3: 0.5, 4e-3: NAN}, RATES) is None
    assert further_rate({1e-3: 1.0, 2e-3: 1.5, 4e-3: NAN}, RATES) == 5e-4


def test_rates_that_diverge():
    assert best_rate({1e-3: NAN, 2e-3: math.inf, 4e-3: NAN}) is None
    assert further_rate(dict.fromkeys(RATES, NAN), RATES) is None
    assert best_rate({1e-3: 1.0, 2e-3: NAN, 4e-3: NAN}) == 1e-3
    assert best_rate(dict.fromkeys(RATES, 1.0)) == 1e-3


def test_the_plan_of_a_model():
    """All rates with the first seed, then a further one, then every seed at the best; each run once."""
    recipe = CompareRecipe(learning_rates=RATES, seeds=2, seed=5)
    loss = lambda trial: 2 + math.log(trial.learning_rate / 5e-3) ** 2 + trial.seed / 1000  # noqa: E731
    ended: dict[str, float] = {}
    rounds = []
    while (found := plan("mla", recipe, ended)).needed:
        rounds.append(found.needed)
        assert not {trial.name for trial in found.needed} & set(ended)
        ended |= {trial.name: loss(trial) for trial in found.needed}
    assert rounds[0] == [Trial("mla", rate, 5) for rate in RATES]
    assert rounds[1] == [Trial("mla", 8e-3, 5)]
    best = best_rate(found.sweep)
    assert rounds[2:] == [[Trial("mla", best, 5), Trial("mla", best, 6)]]
    assert found.rate == best == pytest.approx(5e-3, rel=0.005)
    assert list(found.seeds) == [5, 6]
    assert plan("gqa", recipe, ended).needed == [Trial("gqa", rate, 5) for rate in RATES]


@pytest.mark.parametrize("vertex", [2.0, NAN, math.inf])
def test_a_vertex_that_is_worse_than_the_sweep_is_not_taken(vertex):
    recipe, losses = CompareRecipe(learning_rates=RATES, seeds=2), dict(zip(RATES, (1.5, 1.0, 1.4), strict=True))
    ended = {Trial("mla", rate, 42).name: loss for rate, loss in losses.items()}
    (first, _) = plan("mla", recipe, ended).needed
    assert first.learning_rate not in RATES
    found = plan("mla", recipe, ended | {first.name: vertex})
    assert (found.rate, found.seeds) == (RATES[1], {42: 1.0})
    assert found.needed == [Trial("mla", RATES[1], 43)]
    assert plan("mla", recipe, ended | {first.name: 1.0}).rate == first.learning_rate


def test_the_plan_where_all_fail():
    recipe = CompareRecipe(learning_rates=RATES)
    found = plan("mla", recipe, {Trial("mla", rate, 42).name: NAN for rate in RATES})
    assert (found.rate, found.needed, found.seeds) == (None, [], {})


# -- the models


def recipe_of(corpus: Path, **fields) -> CompareRecipe:
    return CompareRecipe(options={"data_files": [str(corpus)], "max_steps": 2}, **fields)


def test_usual_kinds_and_their_caches(corpus):
    candidates, *_ = candidates_of(recipe_of(corpus, match="nothing"))
    shares = {x.name: cache_bytes_per_token(x.config) / cache_bytes_per_token(candidates[0].config) for x in candidates}
    assert shares == {
        "mha": 1, "gqa-half": 1 / 2, "gqa-quarter": 1 / 4, "mqa": 1 / 8, "mla-quarter": 1 / 4, "mla-eighth": 1 / 8,
        "mixed": 1 / 4,
    }  # fmt: skip
    kinds = [layer.attention_kind for layer in candidates[-1].config.per_layer_config]
    assert kinds == ["gqa", "mla", "gqa", "mla"]


@pytest.mark.parametrize("match", ["parameters", "flops"])
def test_models_are_matched_by_width(corpus, match):
    """No other width of the MLP is nearer."""
    candidates, pretraining, _ = candidates_of(recipe_of(corpus, match=match))
    length = pretraining.sequence_length
    count = count_parameters if match == "parameters" else lambda config: training_flops(config, 1, length)
    first = candidates[0].config
    unit = 3 * first.hidden_size * first.num_hidden_layers * (1 if match == "parameters" else 6 * length)
    for candidate in candidates:
        assert abs(count(candidate.config) - count(first)) <= unit / 2
        assert candidate.config.intermediate_size == candidate.overrides.get("intermediate_size", 344)


def test_tokens_for_each_parameter_are_those_of_the_first_model(corpus):
    """All models train on the same tokens, whatever their size; also where the recipe of the runs says it."""
    kinds = {"mha": {"attention_kind": "mha"}, "mqa": {"attention_kind": "mqa"}}
    options = {"data_files": [str(corpus)], "tokens_per_parameter": 3}
    recipe = CompareRecipe(options=options, kinds=kinds, match="nothing", output_dir="runs/x")
    candidates, pretraining, values = candidates_of(recipe)
    tokens = 3 * count_parameters(candidates[0].config)
    assert count_parameters(candidates[1].config) < count_parameters(candidates[0].config)
    assert pretraining.max_steps == round(tokens / pretraining.tokens_per_step) and values["tokens"] == str(tokens)
    comparison = Comparison(recipe, pretraining, candidates)
    for trial in comparison.needed({}):
        options = comparison.options(trial)
        assert options["tokens"] == str(tokens) and "tokens_per_parameter" not in options


WRONG = {
    "heads": ({"options": {"num": 1}}, "unknown option --num"),
    "rates": ({"learning_rates": [1e-3, 2e-3]}, "a sweep needs at least 3"),
    "rate": ({"learning_rates": [0, 1e-3, 2e-3]}, "must be positive"),
    "digits": ({"learning_rates": [1e-3, 1.001e-3, 2e-3]}, "two that are equal in three digits"),
    "seeds": ({"seeds": 0}, "seeds is 0; it must be at least 1"),
    "seed": ({"seed": 2**32}, "seed is 4294967296"),
    "one kind": ({"kinds": {"a": {}}}, "a comparison needs two"),
    "swept": ({"options": {"seed": 3}}, "options has seed, which the comparison sets"),
    "no object": ({"options": "[1]"}, "options must be a JSON object"),
    "no JSON": ({"kinds": "{"}, "kinds is no JSON object"),
    "contexts": ({"contexts": [0]}, "contexts must be at least 1"),
    "field": ({"kinds": {"a": {}, "b": {"head_dimm": 4}}}, "unknown field head_dimm"),
    "value": ({"kinds": {"a": {}, "b": {"attention_kind": "gqa", "num_key_value_heads": 3}}}, "is not divisible"),
    "parameters": (
        {"kinds": {"a": {}, "b": {"head_dim": 2048}}},
        "b: cannot be matched: its attention alone is larger than the first model",
    ),
    "no fields": ({"kinds": {"mha": None, "mqa": {}}}, "kinds has None for mha; give an object"),
    "path": ({"kinds": {"gqa-1/4": {}, "mqa": {}}}, "kinds has the name 'gqa-1/4'; names have up to 100"),
    "evaluation": ({"options": {"eval_tasks": ["lambada"]}}, "options has eval_tasks, which the comparison sets"),
    "tracker": ({"options": {"report_to": ["tensorbord"]}}, "report_to tensorbord: "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_recipes(wrong):
    fields, said = WRONG[wrong]
    with pytest.raises((UserError, ValueError), match=said):
        candidates_of(CompareRecipe(**fields))


def test_usual_kinds_need_heads_to_share(corpus):
    config = candidates_of(recipe_of(corpus, match="nothing"))[0][0].config
    config.num_attention_heads = config.num_key_value_heads = 6
    with pytest.raises(UserError, match="which 4 does not divide"):
        usual_kinds(config)


# -- what is concluded


def entry(name: str, kind: str, cache: int, *losses: float, sweep: dict | None = None) -> Entry:
    sweep = sweep or {1e-3: 3.0, 2e-3: losses[0] if losses else NAN, 4e-3: 3.1}
    seeds, speeds = dict(enumerate(losses)), {128: 1.0, 1024: 2.0}
    return Entry(name, kind, {}, 1000, 6000.0, cache, sweep, 2e-3 if losses else None, seeds, speeds)


@pytest.fixture
def outcome() -> Outcome:
    return Outcome(
        [
            entry("mha", "mha", 400, 2.000, 2.010),
            entry("gqa", "gqa", 100, 2.010, 2.022),
            entry("mla", "mla", 100, 2.100, 2.108),
            entry("mqa", "mqa", 50, 2.200, NAN),
            entry("broken", "gqa", 25),
        ]
    )


def test_the_spread_is_pooled(outcome):
    variances = (0.01**2 / 2, 0.012**2 / 2, 0.008**2 / 2)
    assert outcome.deviation == pytest.approx(math.sqrt(sum(variances) / 3))
    assert outcome.freedom == 3
    mha, gqa, mla, _, _ = outcome.entries
    assert not outcome.differ(mha, gqa)
    assert outcome.differ(mha, mla)


def test_no_winner_within_the_spread(outcome):
    assert verdict(outcome).endswith("these seeds: gqa.") and "mha, 2.0050" in verdict(outcome)
    single = Outcome([entry("mha", "mha", 4, 2.0), entry("gqa", "gqa", 2, 1.0)])
    assert verdict(single).endswith("these seeds: mha.") and not single.differ(*single.entries)
    assert verdict(Outcome([entry("mha", "mha", 4)])) == "No run at a best rate has ended."
    assert "64 to 512 tokens" in verdict(Outcome(outcome.entries, tokens_seen=[64, 128, 512]))


def test_the_table_of_results(outcome):
    """mla is on no front: gqa has a lower loss with the same cache. What failed, and a best rate at an edge, show."""
    rows = {
        row[0]: dict(zip(losses_table(outcome, 2).header, row, strict=True)) for row in losses_table(outcome, 2).rows
    }
    assert (
        [name for name, row in rows.items() if row["front"]] == ["mha", "gqa", "mqa"] == [x.name for x in outcome.front]
    )
    margin = outcome.margin(outcome.entries[1], outcome.entries[0])
    assert rows["gqa"]["above the lowest"] == f"0.0110 ± {margin:.4f}"
    assert rows["mqa"]["seeds"] == "1 of 2" and rows["broken"]["seeds"] == "0 of 2"
    assert rows["broken"]["loss"] == "failed" and rows["broken"]["best rate"] == "-"
    edge = Outcome([entry("mha", "mha", 4, 2.0, sweep={1e-3: 3.0, 2e-3: 2.0})])
    assert "2.00e-03 (edge)" in losses_table(edge, 1).rows[0]


@pytest.mark.parametrize("tokenizer", [None, "gpt2"])
def test_a_tokenizer_that_the_recipe_names_is_kept(corpus, tokenizer, tmp_path):
    recipe = recipe_of(corpus, output_dir=str(tmp_path))
    candidates, pretraining, _ = candidates_of(recipe)
    pretraining.tokenizer = tokenizer
    comparison = Comparison(recipe, pretraining, candidates)
    for trial in comparison.needed({}):
        assert comparison.options(trial)["tokenizer"] == (tokenizer or str(tmp_path / "tokenizer"))


def no_runs(folder: Path) -> Runs:
    """Those of a comparison that needs none, in this folder."""
    nothing: Any = SimpleNamespace(folder=folder, recipe=CompareRecipe(), needed=lambda _: [])
    return Runs(nothing)


def test_failures_are_those_of_this_launch(tmp_path):
    """Those of an earlier one are tried again where they are needed, and are no concern of others."""
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "earlier.json").write_text(json.dumps({"time": time.time() - 60, "said": "no"}))
    runs = no_runs(tmp_path)
    (tmp_path / "failed" / "now.json").write_text(json.dumps({"time": time.time() + 1, "said": "no memory"}))
    assert runs.failures() == {"now": "no memory"}
    assert list(runs.ended()) == ["now"]
    (tmp_path / "runs" / "now").mkdir(parents=True)
    (tmp_path / "runs" / "now" / "results.json").write_text(json.dumps({"validation_loss": 2.0}))
    assert (runs.failures(), runs.ended()) == ({}, {"now": 2.0})


def test_a_run_that_diverges_is_a_result(tmp_path):
    """It is not tried again, by this launch or a later one, and is no failure; as one that ends with a loss of nan."""
    (tmp_path / "failed").mkdir()
    note = {"time": time.time() - 60, "said": "error: non-finite loss at step 7, before the weights were changed"}
    (tmp_path / "failed" / "diverged.json").write_text(json.dumps(note))
    (tmp_path / "runs" / "ended").mkdir(parents=True)
    (tmp_path / "runs" / "ended" / "results.json").write_text('{"validation_loss": null}')
    runs = no_runs(tmp_path)
    assert (runs.failures(), runs.ended()) == ({}, {"diverged": math.inf, "ended": math.inf})


def test_the_number_of_runs_is_told_before_they_start(corpus, tmp_path):
    """The sweep's and, while the best rate is not known, as many as there are seeds; what has ended is left out."""
    recipe = recipe_of(corpus, output_dir=str(tmp_path), learning_rates=[1e-3, 2e-3, 4e-3], seeds=2, jobs=2)
    candidates, pretraining, _ = candidates_of(recipe)
    comparison = Comparison(recipe, pretraining, candidates)
    runs = Runs(comparison)
    models = len(candidates)
    tokens = pretraining.max_steps * pretraining.per_device_train_batch_size * pretraining.sequence_length
    said = comparison.planned()
    assert said.startswith(f"{models * (3 + 2)} runs: {models} models") and f"{tokens:,} tokens" in said
    assert f"{tokens:,} tokens" not in replace(comparison, recipe=replace(recipe, launcher="torchrun -m")).planned()
    assert runs.left() == models * (3 + 2)
    for rate, loss in ((1e-3, 3.0), (2e-3, 2.0), (4e-3, 3.0)):
        folder = tmp_path / "runs" / Trial(candidates[0].name, rate, recipe.seed).name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"validation_loss": loss}))
    assert runs.left() == models * (3 + 2) - 3 - 1  # the vertex is a rate of the sweep
    runs.seconds = [50.0, 70.0]
    assert runs.time_left() == f"{models * 5 - 4} left, about {duration(60 * (models * 5 - 4) / 2)}"
    assert no_runs(tmp_path).time_left() == "the last"


@pytest.mark.parametrize(("jobs", "gpus", "at_once"), [(1, 0, 1), (2, 0, 1), (3, 2, 2)])
def test_a_dry_run_adds_up_the_runs(jobs, gpus, at_once, tmp_path, capsys, monkeypatch):
    """All have the first model's length; runs at once that have a GPU each divide the time, others share the cores."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    took = {"mha": 2.0, "mla": 3.0}
    kind = lambda model: model.config.per_layer_config[0].attention_kind  # noqa: E731
    monkeypatch.setattr(
        estimate, "measure", lambda _, model: (took[kind(model)], {"weights": 2**20, "gradients": 2**20})
    )
    options = {"data_files": ["/nowhere"], "tokens_per_parameter": 0.5, "sequence_length": 32}
    fields = {"options": options, "kinds": KINDS, "match": "nothing", "seeds": 2, "learning_rates": RATES}
    (tmp_path / "small.yaml").write_text(json.dumps(fields | {"output_dir": str(tmp_path / "out"), "jobs": jobs}))
    compare([str(tmp_path / "small.yaml"), "--dry-run"])
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "10 runs: 2 models" in said
    candidates, pretraining, _ = candidates_of(CompareRecipe(**fields))
    seconds, steps = 0.0, round(0.5 * count_parameters(candidates[0].config) / pretraining.tokens_per_step)
    for name, candidate in zip(took, candidates, strict=True):
        tokens = f"{steps * pretraining.per_device_train_batch_size * 32:,}"
        assert f"| {name} | {steps:,} | {tokens} | {took[name]:.2g} | 2 MiB | {duration(steps * took[name])} |" in said
        assert f"| {name} | {count_parameters(candidate.config):,} |" in said  # among the sizes
        seconds += 5 * steps * took[name]
    assert f"about {duration(seconds / at_once)} of training for 10 runs, {at_once} at a time" in said


def test_a_dry_run_times_steps_and_says_where_the_text_sets_the_length(tmp_path, capsys):
    fields = {"options": {"num_train_epochs": 1, "max_steps": -1}, "kinds": KINDS, "match": "nothing"}
    (tmp_path / "small.yaml").write_text(json.dumps(fields | {"output_dir": str(tmp_path / "out")}))
    compare([str(tmp_path / "small.yaml"), "--dry-run"])
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "the text says how many steps" in said
    for name in KINDS:
        (row,) = re.findall(rf"^\| {name} \| - \| - \| (\S+) \| \S+ MiB \| - \|$", said, re.MULTILINE)
        assert 0 < float(row) < 60


def test_runs_at_once_have_a_gpu_each(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_of(0) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [gpu_of(worker) for worker in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [gpu_of(worker) for worker in range(3)] == ["5", "7", "5"]


def test_report_and_pictures(outcome, tmp_path):
    text = comparison_report(CompareRecipe(seeds=2), outcome, "this machine", {"broken-rate1": "error: no"})
    assert verdict(outcome) in text and "this machine" in text
    assert "- broken-rate1: error: no" in text and "| **2.0000** |" in text
    plot_comparison(outcome, {"mha": [(1, 3.0), (2, 2.0)]}, tmp_path)
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.split("(")[1].rstrip(")")).stat().st_size > 5000


def test_the_report_where_all_runs_have_failed(tmp_path):
    """Their failures are what it is for; there is nothing to draw."""
    lost = Outcome([Entry(name, name, {}, 1, 1.0, 4, dict.fromkeys(RATES, NAN), None, {}) for name in ("mha", "mqa")])
    text = comparison_report(CompareRecipe(), lost, "No speeds.", {"mha-rate1": "error: no memory"})
    assert verdict(lost) in text and "error: no memory" in text
    plot_comparison(lost, {}, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_a_comparison_without_speeds(corpus, monkeypatch, tmp_path, capsys):
    """Where the models do not fit the memory together, the losses are reported without them."""

    def refuse(*_, **__):
        raise UserError("speeds could not be measured: out of memory")

    monkeypatch.setattr(reporting, "decoding_speeds", refuse)
    recipe = recipe_of(corpus, output_dir=str(tmp_path), kinds={"mha": {}, "mqa": {"attention_kind": "mqa"}})
    candidates, pretraining, _ = candidates_of(recipe)
    comparison = Comparison(recipe, pretraining, candidates)
    write_outcome(comparison, Runs(comparison))
    assert "There are no speeds: speeds could not be measured: out of memory." in (tmp_path / "report.md").read_text()
    assert "There are no speeds" in capsys.readouterr().out


def test_folders_of_others(tmp_path):
    """A recipe.json that is none of ours, and a tokenizer beside nothing else, are refused as they are."""
    for name, content in (("recipe.json", "[]"), ("tokenizer", None)):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).mkdir() if content is None else (folder / name).write_text(content)
        with pytest.raises(UserError, match="choose another --output-dir"):
            no_runs(folder).begin({}, {})
    assert (tmp_path / "recipe" / "recipe.json").read_text() == "[]"


# -- the whole

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, "num_hidden_layers": 2, "head_dim": 8}
KINDS = {
    "mha": {"attention_kind": "mha", **SIZES},
    "mla": {"attention_kind": "mla", **SIZES, "kv_lora_rank": 12, "qk_rope_head_dim": 4},
}


class Launches:
    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.recipe = folder / "out", folder / "small.yaml"
        options = {
            "data_files": [str(corpus)], "max_steps": 6, "warmup_steps": 1, "sequence_length": 32, "save_steps": 3,
            "max_eval_blocks": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "bigram_baseline": False,
        }  # fmt: skip
        fields = {"options": options, "kinds": KINDS, "seeds": 2, "contexts": [16, 32]}
        self.recipe.write_text(json.dumps(fields | {"learning_rates": [1e-2, 3e-2, 9e-2]}))  # the best is no edge

    def start(self, *options: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "training.compare", str(self.recipe), "--output-dir", str(self.folder)]
        return subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        printed, _ = process.communicate(timeout=400)
        return process.returncode, printed

    def results(self) -> dict[str, float]:
        """Time at which each run has ended, by name."""
        return {path.parent.name: path.stat().st_mtime for path in self.folder.glob("runs/*/results.json")}


def test_a_comparison_from_end_to_end(corpus, tmp_path):
    """Killed, continued by two launches at once, finished, refused with another recipe, failing, and by a launcher.

    One test: what a part needs, those before it have trained.
    """
    comparison = Launches(tmp_path, corpus)
    kill_after_a_run(comparison)
    before = comparison.results()
    launches = [comparison.start(), comparison.start("--jobs", "2")]
    printed = [launch.communicate(timeout=400)[0] for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], printed
    check_every_run_is_done_once(comparison, before, printed)
    check_runs_differ_in_what_is_compared_alone(comparison)
    check_report(comparison)
    check_another_recipe_is_refused(comparison)
    check_a_failed_run_loses_no_other(comparison)


def kill_after_a_run(comparison: Launches) -> None:
    killed = comparison.start()
    deadline = time.time() + 200
    while not comparison.results() and time.time() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)


def check_every_run_is_done_once(comparison: Launches, before: dict[str, float], printed: list[str]) -> None:
    """What had ended when the first launch was killed is kept; the two others divide the rest."""
    after = comparison.results()
    assert before
    assert before.items() <= after.items()
    lines = [line for text in printed for line in text.splitlines() if " validation loss " in line]
    ended = [line.split()[0] for line in lines if line.split()[0] in after]
    assert len(ended) == len(set(ended)) == len(after) - len(before)
    content = json.loads((comparison.folder / "comparison.json").read_text())
    assert 1 < content["bytes_per_token"] < 6 and content["tokens_seen"] == [6 * 2 * 32]
    for text in printed:
        assert re.search(r"^10 runs: 2 models", text, re.MULTILINE)
    assert any(re.search(r"^\d+ runs to go, \d+ have ended", text, re.MULTILINE) for text in printed)
    assert any(re.search(r", \d+ s; \d left, about \d+ s$", line) for line in lines)
    for model in content["models"]:
        assert len(model["losses"]) == 2
        assert len(model["sweep"]) >= 3
        assert model["loss_deviation"] > 0
        assert model["decode_milliseconds"].keys() == {"16", "32"}
    assert not (comparison.folder / "failed").exists()


def check_runs_differ_in_what_is_compared_alone(comparison: Launches) -> None:
    """All are trained on the same tokens, which were made once, and those of one seed in the same order."""
    runs = sorted(comparison.folder.glob("runs/*"))
    assert len({(run / "data" / "train.npy").stat().st_ino for run in runs}) == 1
    recipes = [yaml.safe_load((run / "recipe.yaml").read_text()) for run in runs]
    differing = {name for name in recipes[0] if len({str(recipe[name]) for recipe in recipes}) > 1}
    assert differing <= {"learning_rate", "seed", "data_seed", "model_overrides", "output_dir", "resume"}
    assert all(recipe["seed"] == recipe["data_seed"] for recipe in recipes)


def check_report(comparison: Launches) -> None:
    text = (comparison.folder / "report.md").read_text()
    assert re.search(r"^Lowest loss: (mha|mla), \d", text, re.MULTILINE)
    assert all((comparison.folder / name).is_file() for name in ("loss_by_cache.png", "curves.png", "decoding.png"))


def check_another_recipe_is_refused(comparison: Launches) -> None:
    """By its own fields, and by what the pretraining recipe that it names says meanwhile."""
    argv = [str(comparison.recipe), "--output-dir", os.path.relpath(comparison.folder)]
    with pytest.raises(UserError, match=r"another recipe: match \('parameters' then, 'nothing' now\)"):
        compare([*argv, "--match", "nothing"])
    saved = comparison.folder / "recipe.json"
    before = saved.read_text()
    saved.write_text(json.dumps(json.loads(before) | {"runs.weight_decay": 0.5}))
    with pytest.raises(UserError, match=r"another recipe: runs\.weight_decay \(0\.5 then, 0\.1 now\)"):
        compare(argv)
    saved.write_text(before)


def check_a_failed_run_loses_no_other(comparison: Launches) -> None:
    """It is reported, and the next launch tries it again, here by torchrun."""
    before = comparison.results()
    blocked = comparison.folder / "runs" / Trial("mla", best_of(comparison, "mla"), 44).name
    blocked.write_text("a file where a run would write")
    code, printed = comparison.finish("--seeds", "3")
    assert code == 1
    assert f"{blocked.name}" in printed
    assert "error: 1 runs failed" in printed
    assert before.items() <= comparison.results().items()
    assert len(comparison.results()) == len(before) + 1  # the third seed of mha
    assert blocked.name in (comparison.folder / "report.md").read_text()
    blocked.unlink()
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 1 -m"
    code, printed = comparison.finish("--seeds", "3", "--launcher", launcher)
    assert code == 0, printed
    assert len(comparison.results()) == len(before) + 2
    assert "Runs that failed" not in (comparison.folder / "report.md").read_text()


def best_of(comparison: Launches, name: str) -> float:
    content = json.loads((comparison.folder / "comparison.json").read_text())
    return next(model["rate"] for model in content["models"] if model["name"] == name)


def test_a_folder_of_somebody_else_is_refused(corpus, tmp_path):
    comparison = Launches(tmp_path, corpus)
    comparison.folder.mkdir()
    (comparison.folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt and no comparison"):
        compare([str(comparison.recipe), "--output-dir", str(comparison.folder)])
    assert os.listdir(comparison.folder) == ["notes.txt"]
