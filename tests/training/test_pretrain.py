"""The script, as users run it: results, interruption and resumption, divergence, refusals."""

import json
import math
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_texts import MODEL
from transformers import AutoTokenizer

from modeling_gqa.costs.measuring import machine_name
from modeling_gqa.data.blocks import load_blocks
from modeling_gqa.data.source import Split, open_source, split_source
from modeling_gqa.training import publish
from modeling_gqa.training.recipe import Recipe
from modeling_gqa.training.recipe_model import load_config, warn_of_weights
from modeling_gqa_cli.errors import UserError
from training.pretrain import pretrain

LAST = 24  # steps of the tiny recipe; it saves every 7


def assert_same_weights(left: Path, right: Path) -> None:
    """Every bit of every tensor."""
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (left, right))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_one_line(process: subprocess.CompletedProcess, message: str) -> None:
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert len(errors) == 1 and message in errors[0], process.stderr


def test_finished_run(finished, losses):
    output, printed = finished
    results = json.loads((output / "results.json").read_text())
    assert results["steps"] == LAST and results["tokens_seen"] == LAST * 4 * 64
    assert results["tokens_per_second"] > 0 and 0 < results["mfu"] < 1
    for name in ("validation_loss", "validation_bits_per_byte", "bigram_loss"):
        assert f"  {results[name]:.4f}\n" in printed
    assert len(losses(output)) == LAST and losses(output)[-1] < losses(output)[0] - 0.5
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-21", "checkpoint-24"}


def test_bits_per_byte(finished):
    """Each character of a token of bytes is a byte, and the end of a text is none; at every evaluation."""
    folder = finished[0]
    results = json.loads((folder / "results.json").read_text())
    tokenizer, ids = AutoTokenizer.from_pretrained(folder / "tokenizer"), load_blocks(folder / "data", "validation")
    special = set(tokenizer.all_special_tokens)
    tokens = tokenizer.convert_ids_to_tokens(ids.blocks[:, 0].flatten().tolist())
    assert special & set(tokens)
    per_token = sum(len(token) for token in tokens if token not in special) / len(tokens)
    assert results["bytes_per_token"] == pytest.approx(per_token) and per_token > 1
    bits = results["validation_loss"] / math.log(2) / per_token
    assert results["validation_bits_per_byte"] == pytest.approx(bits)
    state = json.loads((folder / "checkpoint-24" / "trainer_state.json").read_text())
    logs = [log for log in state["log_history"] if "eval_loss" in log]
    measured = [log["eval_bits_per_byte"] * results["validation_loss"] / log["eval_loss"] for log in logs]
    assert measured == pytest.approx([bits] * 3)


def test_final_folder_is_a_hub_repository(finished):
    output, printed = finished
    final = output / "final"
    assert "loads it and writes:\n\nthe " in printed
    assert json.loads((final / "config.json").read_text()).get("use_cache", True) is True
    config = json.loads((final / "config.json").read_text())
    assert "AutoModelForCausalLM" in config["auto_map"] and config["eos_token_id"] == 0
    assert (final / "generation_config.json").is_file() and (final / "tokenizer.json").is_file()
    card = (final / "README.md").read_text()
    results = json.loads((output / "results.json").read_text())
    for text in (
        f"{results['validation_loss']:.4f}",
        f"bits per byte | {results['validation_bits_per_byte']:.4f}",
        f"{results['bigram_loss']:.4f}",
        "Licence of the text: not stated",
        f"tokens on {machine_name('cpu')}, fp32",
    ):
        assert text in card
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"


def test_licence_of_the_default_text(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path), preset="tiny-mixed")
    results = {"parameters": 1, "steps": 1, "tokens_per_step": 1, "validation_blocks": 1}
    publish.write_run_card(tmp_path, recipe, load_config(recipe), Split(open_source(recipe), 1), results)
    written = (tmp_path / "README.md").read_text()
    assert "Licence of the text: PSF-2.0" in written and "Its attention: layers 0: mha, " in written
    assert all(f"; layers {layer}: {kind}, " in written for layer, kind in ((1, "gqa"), (2, "mqa"), (3, "mla")))
    tags = yaml.safe_load(written.split("---")[1])["tags"]
    assert tags == ["modeling_gqa", "kv-cache", "gqa", "mha", "mla", "mqa"]


@pytest.mark.parametrize(
    ("texts", "said"), [(["one long text " * 99], publish.CUT), (["a first text", "a second text"], publish.HELD_OUT)]
)
def test_the_card_says_what_was_held_out(tmp_path, texts, said):
    """A single document is cut: its beginning was trained on."""
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    recipe = Recipe(output_dir=str(tmp_path), preset="tiny-mla", data_files=[str(tmp_path / "corpus")])
    results = {"parameters": 1, "steps": 1, "tokens_per_step": 1, "validation_blocks": 1}
    publish.write_run_card(tmp_path, recipe, load_config(recipe), split_source(open_source(recipe), recipe), results)
    assert said in (tmp_path / "README.md").read_text()


def test_a_prompt_may_begin_as_an_option_does(finished):
    assert publish.load_in_clean_process(finished[0] / "final", "---").startswith("---")


def test_broken_repository_is_noticed(finished, tmp_path):
    shutil.copytree(finished[0] / "final", tmp_path / "final")
    (tmp_path / "final" / "layers.py").unlink()
    with pytest.raises(UserError, match="does not load in a process without the package"):
        publish.load_in_clean_process(tmp_path / "final", "the ")


def test_sigterm_saves_and_resume_gives_the_same_bits(script, finished, tmp_path):
    code, printed = script.stop(tmp_path, 9, signal.SIGTERM)
    assert code == 128 + 15 and "Stopped by SIGTERM" in printed, printed
    steps = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    assert steps[0] == 7 and 9 <= steps[1] < 14  # between two saves
    assert not (tmp_path / "final").exists()
    process = script.run(tmp_path, "--resume")
    assert process.returncode == 0 and f"Resuming from {tmp_path}/checkpoint-{steps[1]}" in process.stdout
    assert_same_weights(tmp_path, finished[0])
    # Once more, as if the script had been stopped between training and saving the result.
    shutil.rmtree(tmp_path / "final")
    results = json.loads((tmp_path / "results.json").read_text())
    assert script.run(tmp_path, "--resume").returncode == 0
    assert json.loads((tmp_path / "results.json").read_text()) == results and results["training_seconds"] > 0
    assert_same_weights(tmp_path, finished[0])


def test_resume_and_overwrite_refusals(script, finished):
    output, _ = finished
    run = [str(script.recipe), "--output_dir", str(output)]
    with pytest.raises(UserError, match="--resume continues it, --overwrite replaces it"):
        pretrain(run)
    model = json.dumps(MODEL | {"vocab_size": 301})
    with pytest.raises(UserError, match="another recipe: ") as error:
        pretrain([*run, "--resume", "--learning_rate", "0.5", "--model_overrides", model])
    for key in ("learning_rate (0.003 then, 0.5 now)", "model vocab_size (300 then, 301 now)"):
        assert key in str(error.value)
    assert (output / "final" / "model.safetensors").is_file() and (output / "checkpoint-21").is_dir()


def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(script, tmp_path):
    # The first step has a learning rate of zero; the second throws the weights far away.
    process = script.run(tmp_path, "--learning_rate", "1e30", "--save_steps", "1", "--save_total_limit", "1")
    assert_one_line(process, "at step 3")
    for text in ("non-finite", "checkpoint-2 is kept", "Try a lower --learning-rate"):
        assert text in process.stderr
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / "complete.json").is_file()
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())


@pytest.fixture
def train(script, tmp_path, monkeypatch):
    """Runs the script here, for a few steps of a tiny model without dropout; returns its results and log."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")

    def train(name: str, **values) -> tuple[dict, list[dict]]:
        recipe = yaml.safe_load(script.recipe.read_text())
        recipe |= {"preset": "tiny-mla", "max_steps": 4, "warmup_steps": 0, "eval_steps": 4}
        recipe["output_dir"] = str(tmp_path / name)
        recipe["model_overrides"] = {**MODEL, "attention_dropout": 0.0, "num_hidden_layers": 1}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe | values))
        pretrain([str(tmp_path / f"{name}.yaml")])
        state = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        return json.loads((tmp_path / name / "results.json").read_text()), state["log_history"]

    return train


def training_losses(log: list[dict]) -> list[float]:
    return [entry["loss"] for entry in log if "loss" in entry]


def test_precision_checkpointing_and_accumulation(train):
    _, log = train("plain")
    for name, values, tolerance in (
        ("checkpointing", {"gradient_checkpointing": True}, 1e-6),
        ("accumulation", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, 1e-5),
        ("bf16", {"bf16": True}, 2e-2),
    ):
        results, other = train(name, **values)
        assert training_losses(other) == pytest.approx(training_losses(log), abs=tolerance), name
        assert results["tokens_seen"] == 4 * 4 * 64
        # Accumulation shows in the tokens, rounding in the losses.
        assert name != "bf16" or training_losses(other) != training_losses(log)


def test_warmup_stable_decay(train):
    kwargs = {"num_decay_steps": 2}
    _, log = train("wsd", lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs, warmup_steps=1)
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    assert rates[0] == 0 and rates[1] == rates[2] == 3e-3 and 0 < rates[3] < 3e-3


@pytest.mark.parametrize(
    ("schedule", "warmup", "kwargs", "expected"),
    [
        ("constant_with_warmup", 0.5, {}, [0, 1.5e-3, 3e-3, 3e-3]),
        ("warmup_stable_decay", 0, {"num_decay_steps": 0.5}, [3e-3, 3e-3, 3e-3, 1.5e-3]),
        ("warmup_stable_decay", 0.25, {"num_decay_steps": 2}, [0, 3e-3, 3e-3, 1.5e-3]),
        ("warmup_stable_decay", 1, {}, [0, 3e-3, 3e-3, 3e-3]),  # a fifth by itself, which begins at the rate before it
    ],
)
def test_schedules_by_shares_of_a_run(schedule, warmup, kwargs, expected, train):
    """Warm-up and decay as shares below 1 of a run whose length is given in tokens."""
    options = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup}
    results, log = train("s", max_steps=-1, tokens=f"{len(expected) * 0.256:g}K", eval_strategy="no", **options)
    assert [entry["learning_rate"] for entry in log if "learning_rate" in entry] == pytest.approx(expected)
    assert results["steps"] == len(expected)


@pytest.mark.parametrize(
    "weights", ["", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "a.gguf"]
)
def test_a_preset_with_weights_is_warned_of(weights, finished, tmp_path, capsys):
    """Its configuration alone is read, and nothing is said of one without weights."""
    shutil.copy(finished[0] / "final" / "config.json", tmp_path)
    (tmp_path / (weights or "notes.txt")).write_text("weights")
    recipe = Recipe(output_dir=str(tmp_path / "run"), preset=str(tmp_path), sequence_length=32)
    assert load_config(recipe).hidden_size == MODEL["hidden_size"]
    warn_of_weights(recipe)
    warning = capsys.readouterr().err
    assert (f"--init-from {tmp_path}" in warning) if weights else warning == ""


def test_streaming_and_trackers(train, tmp_path, monkeypatch):
    """Trackers write below the output folder, also where nothing is left to train and the last step is evaluated."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    values = {"streaming": True, "validation_fraction": 0.3, "report_to": ["tensorboard"], "eval_strategy": "no"}
    results, log = train("tracked", **values)
    assert len(training_losses(log)) == 4 and "bigram_loss" not in results
    shutil.rmtree(tmp_path / "tracked" / "final")
    pretrain([str(tmp_path / "tracked.yaml"), "--resume"])
    assert not list((tmp_path / "here").iterdir())
    assert list((tmp_path / "tracked" / "runs").rglob("events.out.tfevents*"))


def test_upload(train, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def __init__(self, token):
            assert token == "secret"

        def create_repo(self, name, **options):
            calls.append(name)
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, repo_id, folder_path, **options):
            calls.extend([repo_id, sorted(path.suffix for path in Path(folder_path).iterdir())])
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(publish, "HfApi", Hub)
    train("uploaded", push_to_hub=True, hub_token="secret")
    assert calls[:2] == ["uploaded", "me/uploaded"] and {".safetensors", ".md", ".py"} <= set(calls[2])
    assert "secret" not in (tmp_path / "uploaded" / "recipe.yaml").read_text()


def test_missing_file_ends_in_one_line(script, tmp_path):
    assert_one_line(script.run(tmp_path / "run", "--data_files", str(tmp_path / "absent.txt")), "nothing to read at")
    assert not (tmp_path / "run").exists()
