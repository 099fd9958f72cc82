"""The command `modeling-gqa evaluate`, called as its users call it, and what it refuses."""

import errno
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command import call, run
from huggingface_hub import metadata_load

from modeling_gqa import GQAForCausalLM
from modeling_gqa.common import atomic
from modeling_gqa.evaluation import harness
from modeling_gqa.evaluation.results import number
from modeling_gqa_cli.errors import install_extra

SMALL = ("--sequence-length", 64, "--limit", 3, "--dtype", "float32", "--device", "cpu")


@pytest.fixture
def ours(models_folder, tmp_path) -> Path:
    return shutil.copytree(models_folder / "ours", tmp_path / "ours")


@pytest.mark.parametrize(("instructions", "dtype"), [("AVX2", "float32"), ("AVX512", "bfloat16")])
def test_the_dtype_of_computing(instructions, dtype, ours, data, tmp_path, monkeypatch):
    """A checkpoint in bfloat16 is computed in float32 where the CPU is slow in it."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    GQAForCausalLM.from_pretrained(ours, dtype=torch.bfloat16).save_pretrained(ours)
    path = tmp_path / "scores.json"
    run("evaluate", ours, "--data", data, "--tasks", "lambada", "--limit", 2, "--device", "cpu", "--json", path)
    assert json.loads(path.read_text())["checkpoint"]["dtype"] == dtype


def test_two_models_side_by_side(ours, models_folder, data, tmp_path):
    """The table, the file and the card hold the same numbers; of the other model nothing is written into the card."""
    path = tmp_path / "new" / "scores.json"
    shown = run(
        "evaluate", ours, "--against", models_folder / "llama", "--data", data, *SMALL, "--json", path, "--card"
    )
    found = json.loads(path.read_text())
    mine, other = found["checkpoint"], found["against"]
    assert (mine["name"], mine["class"], other["name"], other["class"]) == (
        "ours", "GQAForCausalLM", "llama", "LlamaForCausalLM",
    )  # fmt: skip
    assert mine["dtype"] == "float32" and found["command"]["limit"] == 3 and "lm_eval" in found["versions"]
    assert {task: result["items"] for task, result in mine["tasks"].items()} == {
        "wikitext2": 3, "wikitext": 3, "lambada": 3, "hellaswag": 3,
    }  # fmt: skip
    scores = {(task, name): x for task, y in mine["tasks"].items() for name, x in y["scores"].items()}
    assert set(scores) >= {("wikitext2", "perplexity"), ("wikitext", "word_perplexity"), ("hellaswag", "acc_norm")}
    for (task, name), score in scores.items():
        difference = found["comparison"][task][name]
        assert difference["paired"] and math.isclose(
            difference["difference"], score["value"] - other["tasks"][task]["scores"][name]["value"]
        )
        assert number(score["value"]) in shown
    metadata = metadata_load(ours / "README.md")
    (index,) = metadata["model-index"]
    assert metadata["license"] == "mit" and metadata["tags"] == ["gqa"] and index["name"] == "ours"
    written = {
        (result["dataset"]["name"], metric["type"]): metric["value"]
        for result in index["results"]
        for metric in result["metrics"]
    }
    assert written == pytest.approx({key: score["value"] for key, score in scores.items()}, abs=1e-5)
    types = {result["dataset"]["name"]: result["dataset"]["type"] for result in index["results"]}
    assert types["hellaswag"] == "Rowan/hellaswag" and types["wikitext2"] == "Salesforce/wikitext"


def test_humaneval_is_run_when_it_is_allowed(ours, data, tmp_path, monkeypatch):
    command = ("evaluate", ours, "--data", data, "--tasks", "humaneval", "--json", tmp_path / "scores.json", *SMALL)
    monkeypatch.setattr(harness, "human_eval", lambda *_: pytest.fail("it was run"))
    refused = call(*command)
    assert refused.exit_code == 1 and "--run-code" in refused.stderr and not (tmp_path / "scores.json").exists()
    monkeypatch.undo()
    run(*command, "--run-code")
    found = json.loads((tmp_path / "scores.json").read_text())["checkpoint"]["tasks"]
    assert found["humaneval"]["scores"]["pass@1"]["value"] == 0 and found["humaneval"]["items"] == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--limit", 0), "--limit"),
        (("--batch-size", -1), "--batch-size"),
        (("--sequence-length", 1), "--sequence-length"),
        (("--sequence-length", 513), "512 positions"),
        (("--device", "tpu9"), "--device"),
        (("--against", "nowhere/at/all"), "nowhere/at/all"),
        (("--json", "."), "folder"),
        (("--tasks", "humaneval"), "--run-code"),
    ],
)
def test_what_cannot_be_done_is_said_before_weights_are_read(options, said, ours, data, monkeypatch, tmp_path):
    monkeypatch.setattr(harness.Subject, "load", lambda *_: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    result = call("evaluate", ours, "--data", data, *options)
    assert result.exit_code == 1 and result.exception is None, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and said in result.stderr


@pytest.mark.parametrize("name", ["tokenizer", "end", "config", "card", "gguf card"])
def test_a_checkpoint_that_lacks_something(name, ours, data):
    arguments = [ours, "--data", data, "--card"]
    if name == "tokenizer":
        for path in ours.glob("tokenizer*"):
            path.unlink()
    elif name == "end":
        for path in ours.glob("tokenizer*.json"):
            content = json.loads(path.read_text())
            content.pop("eos_token", None)
            path.write_text(json.dumps(content))
    elif name == "config":
        (ours / "config.json").unlink()
    elif name == "card":
        (ours / "README.md").write_text("---\n[\n---\n")
    else:
        arguments[0] = ours / "model.gguf"
        arguments[0].write_bytes(b"GGUF")
    result = call("evaluate", *arguments)
    assert result.exit_code == 1 and result.exception is None and result.stderr.count("\n") == 1, result.output
    assert {"tokenizer": "tokenizer", "end": "eos_token", "config": "config.json", "card": "README.md"}.get(
        name, "--card"
    ) in result.stderr


def test_without_lm_eval_the_extra_is_named(ours, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = call("evaluate", ours, "--data", data)
    assert result.exit_code == 1 and install_extra("evaluation") in result.stderr


def test_a_full_disk_damages_no_file(ours, data, tmp_path, monkeypatch):
    path, card = tmp_path / "scores.json", (ours / "README.md").read_bytes()
    path.write_text("before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "sync_path", full)
    result = call("evaluate", ours, "--data", data, *SMALL, "--tasks", "lambada", "--json", path, "--card")
    assert result.exit_code == 1 and result.exception is None and "error: " in result.stderr
    assert path.read_text() == "before" and (ours / "README.md").read_bytes() == card
    assert sorted(x.name for x in tmp_path.iterdir()) == ["ours", "scores.json"]
