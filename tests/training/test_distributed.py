"""Two gloo processes on the CPU: DDP and FSDP2 through the script. tests/ranks has tensor parallelism."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def options() -> list[str]:
    from training_texts import MODEL

    model = json.dumps({**MODEL, "attention_dropout": 0.0})
    return ["--model_overrides", model, "--max_steps", "8", "--eval_steps", "8", "--save_steps", "4"]


def test_ddp_equals_one_process(script, losses, tmp_path, options, yardsticks, monkeypatch):
    # Otherwise another test may have trained this tokenizer before.
    monkeypatch.setitem(script.env, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # The same eight rows a step: two by two processes, twice; or two by one process, four times.
    batch = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps"]
    lambada = ["--eval_tasks", "lambada", "--eval_data", str(yardsticks)]
    two = script.run(tmp_path / "two", *options, *lambada, *batch, "2", processes=2)
    one = script.run(tmp_path / "one", *options, *batch, "4")
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    assert f"{tmp_path}/two, on 2 x cpu" in two.stdout
    # Said, trained, saved and evaluated once.
    for said in ("byte-level BPE tokenizer", "A clean process", "Evaluating ", "acc "):
        assert two.stdout.count(said) == 1, said
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("two", "one")]
    assert [result["processes"] for result in results] == [2, 1]
    assert results[0]["evaluation"]["lambada"]["items"] == 5
    assert results[0]["tokens_seen"] == results[1]["tokens_seen"] == 8 * 8 * 64
    assert {path.name for path in (tmp_path / "two" / "checkpoint-8").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert results[0]["validation_loss"] == pytest.approx(results[1]["validation_loss"], abs=1e-5)
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-4, rtol=1e-3)
    # The checkpoint of two processes loads on one.
    AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-8")
    refused = script.run(tmp_path / "two", *options, *batch, "2", "--resume")
    assert refused.returncode == 1 and "was written by 2 processes" in refused.stderr


def test_fsdp_equals_ddp(script, losses, tmp_path, options):
    """A layer of each kind is sharded; a run that goes on ends with the same weights, and saves our code alone."""
    options = [*options, "--learning_rate", "1e-3", "--muon"]  # AdamW's parameters too: embeddings and norms
    sharded = {"processes": 2, "module": "tests.training.fsdp_on_cpu"}
    for name, more, how in (
        ("ddp", [], {"processes": 2}),
        ("fsdp", ["--fsdp"], sharded),
        ("stopped", ["--fsdp"], sharded),
    ):
        done = script.run(tmp_path / name, *options, *more, **how)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), abs=2e-4)
    for leftover in ("final", "checkpoint-8"):
        shutil.rmtree(tmp_path / "stopped" / leftover)
    (tmp_path / "stopped" / "results.json").unlink()
    again = script.run(tmp_path / "stopped", *options, "--fsdp", "--resume", **sharded)
    assert again.returncode == 0 and "Resuming from" in again.stdout, again.stderr
    folders = [tmp_path / name / "final" for name in ("fsdp", "stopped", "ddp")]
    assert (
        folders[0].joinpath("model.safetensors").read_bytes() == folders[1].joinpath("model.safetensors").read_bytes()
    )
    assert {path.name for path in folders[0].iterdir()} == {path.name for path in folders[2].iterdir()}


def test_fsdp_is_refused_where_nothing_would_be_sharded(script, tmp_path, options):
    done = script.run(tmp_path / "fsdp", *options, "--fsdp", processes=2)
    assert done.returncode == 1 and "fsdp has no effect on CPUs" in done.stderr and not (tmp_path / "fsdp").exists()
