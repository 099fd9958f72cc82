"""Two gloo processes on the CPU: DDP through the script, FSDP2 on the model's own plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp2_worker import build, make_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def options() -> list[str]:
    from training_texts import MODEL

    model = json.dumps({**MODEL, "attention_dropout": 0.0})
    return ["--model_overrides", model, "--max_steps", "8", "--eval_steps", "8", "--save_steps", "4"]


def test_ddp_equals_one_process(script, losses, tmp_path, options):
    # The same eight rows a step: two by two processes, twice; or two by one process, four times.
    batch = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps"]
    two = script.run(tmp_path / "two", *options, *batch, "2", processes=2)
    one = script.run(tmp_path / "one", *options, *batch, "4")
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    assert f"{tmp_path}/two, on 2 x cpu" in two.stdout
    # Said, trained and saved once.
    assert two.stdout.count("byte-level BPE tokenizer") == two.stdout.count("A clean process") == 1
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("two", "one")]
    assert [result["processes"] for result in results] == [2, 1]
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


def test_fsdp2_on_the_models_plan(tmp_path):
    worker = Path(__file__).with_name("fsdp2_worker.py")
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(worker.parents[2])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["world_size"] == 2
    assert report["dtensors"] == report["parameters"] > 20
    assert report["sharded_modules"] == [
        "lm_head",
        "model.embed_tokens",
        *[f"model.layers.{i}" for i in range(4)],
        "model.norm",
    ]

    # One process, the whole batch: the same losses, before and after a step.
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = make_batch()
    for loss in report["losses"]:
        output = model(**batch)
        assert loss == pytest.approx(output.loss.item(), abs=1e-5)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert report["losses"][1] < report["losses"][0] - 0.01
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=name)
