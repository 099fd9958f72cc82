"""The teacher's logits in a folder: the loss over its most likely tokens, what is written, read and refused."""

import json
import os
import shutil
import signal
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_uptrain
import torch
import yaml
from safetensors.torch import load_file
from test_uptrain import build
from torch.nn.functional import pad
from training_texts import MODEL, make_texts

from modeling_gqa.conversion import losses
from modeling_gqa.conversion.losses import prediction_losses, top_prediction_losses
from modeling_gqa.data.blocks import load_blocks
from modeling_gqa.training import distillation, teacher_logits
from modeling_gqa.training.recipe import load_recipe
from modeling_gqa.training.teacher_logits import COMPLETE, FIELDS, TeacherBlocks, predict, record_of
from modeling_gqa.training.uptraining import UptrainRecipe, UptrainTrainer
from modeling_gqa_cli.errors import UserError
from training.uptrain import uptrain

pair, write, here = test_uptrain.pair, test_uptrain.write, test_uptrain.here
runs = pytest.mark.training  # which `make test` leaves out
LABELS = torch.tensor([[1, 6, -100, 2, 5], [-100, 0, 3, 3, 1]])
VOCABULARY = MODEL["vocab_size"]


def teacher_of(logits: torch.Tensor, labels: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """What a folder holds, unrounded, of a teacher with these logits (B, T, V)."""
    log_probs = logits.log_softmax(-1)
    top, ids = log_probs.topk(k)
    rest = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    following = pad(labels[:, 1:], (0, 1)).clamp(min=0)
    return ids, top, rest, log_probs.gather(-1, following[..., None])[..., 0]


def by_definition(logits, teacher, labels, k) -> torch.Tensor:
    """The sums from full probabilities, which autograd can differentiate."""
    p, q = (x.softmax(-1) for x in (teacher, logits))
    top = teacher.topk(k).indices
    p, q = (torch.cat([x.gather(-1, top), x.scatter(-1, top, 0).sum(-1, keepdim=True)], -1) for x in (p, q))
    kl = torch.where(p > 0, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0).sum(-1)
    predicted, following = labels[:, 1:] >= 0, labels[:, 1:].clamp(min=0)
    losses = [-x[:, :-1].log_softmax(-1).gather(-1, following[..., None])[..., 0] for x in (logits, teacher)]
    return torch.stack([x[predicted].sum() for x in (losses[0], kl[:, :-1], losses[1])])


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (2, 5, 7) of a student and a teacher, in float64."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 7, dtype=torch.float64).mul(2)
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_gradient(k, drawn, monkeypatch):
    """In parts of three tokens, against autograd of the definition and finite differences."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 4 * 7 * 3)
    student, logits = drawn
    known = teacher_of(logits, LABELS, k)
    sums = top_prediction_losses(student, *known, LABELS)
    expected = by_definition(student, logits, LABELS, k)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
    weights = torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(x @ weights, student)[0] for x in (sums, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: top_prediction_losses(x, *known, LABELS), student)


def test_all_tokens_give_the_whole_kl_and_fewer_a_lower_bound(drawn):
    student, logits = drawn
    whole = prediction_losses(student, logits, torch.clone, LABELS)
    found = [top_prediction_losses(student, *teacher_of(logits, LABELS, k), LABELS) for k in range(1, 8)]
    torch.testing.assert_close(found[-1], whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(x[1], student)[0] for x in (found[-1], whole)), rtol=1e-10, atol=1e-14
    )
    kl = torch.stack([x[1] for x in found])
    assert (kl.diff() >= -1e-12).all() and 0 < kl[0] < 0.9 * kl[-1]


@pytest.mark.parametrize("whose", ["teacher", "student", "both"])
def test_a_rest_of_next_to_nothing(whose, drawn):
    """In float32 1 - sum q would be 0 or negative: losses and gradients are those of float64."""
    student, logits = (x.detach().clone() for x in drawn)
    top = logits.topk(2).indices
    for name, x in (("teacher", logits), ("student", student)):
        if whose in (name, "both"):
            x.scatter_add_(-1, top, torch.full_like(x, 40.0))
    results = []
    for dtype in (torch.float32, torch.float64):
        x = student.to(dtype).requires_grad_()
        sums = top_prediction_losses(x, *teacher_of(logits.to(dtype), LABELS, 2), LABELS)
        sums[1].backward()
        results.append((sums.double(), x.grad.double()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def records_of(logits, labels, k, recipe) -> dict[str, torch.Tensor]:
    """An example (1, T, ...) as it comes from a folder."""
    given: Any = SimpleNamespace(
        model=lambda **_: SimpleNamespace(last_hidden_state=logits),
        lm_head=torch.clone,
        config=SimpleNamespace(vocab_size=logits.shape[-1]),
    )
    found = predict(given, {"labels": labels}, record_of(k, logits.shape[-1]), recipe)
    assert found.dtype["ids"].base == (np.uint16 if logits.shape[-1] <= 2**16 else np.int32)
    blocks = TeacherBlocks(np.zeros((1, 2, labels.shape[1]), np.int32), found[None])
    return {name: blocks[0][name][None] for name in FIELDS}


@pytest.mark.parametrize(("vocabulary", "k"), [(5000, 64), (5000, 5000), (2**16 + 1, 64)])
def test_rounding(vocabulary, k, tmp_path):
    """A student near its teacher: float16 changes the KL by less than a thousandth, its gradient by a hundredth."""
    torch.manual_seed(0)
    logits = torch.randn(1, 64, vocabulary).mul(3)
    student = (logits + 0.2 * torch.randn_like(logits)).double()
    labels = torch.randint(vocabulary, (1, 64))
    recipe = UptrainRecipe(str(tmp_path), student="s", teacher="t", teacher_logits="l", max_steps=1, use_cpu=True)
    trainer = UptrainTrainer(build(["gqa"], 1), recipe, train_dataset=[], eval_dataset=[])
    rounded = trainer.teacher_predictions(records_of(logits, labels, k, recipe))
    exact = teacher_of(logits.double(), labels, k)
    results = []
    for loss, known in ((trainer.prediction_sums, [rounded]), (top_prediction_losses, exact)):
        x = student.clone().requires_grad_()
        sums = loss(x, *known, labels)
        sums[1].backward()
        results.append((sums, x.grad))
    (ours, ours_grad), (theirs, theirs_grad) = results
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-3)
    assert (ours_grad - theirs_grad).norm() < 1e-2 * theirs_grad.norm()


def test_bytes_of_a_token():
    assert record_of(64, 2**16).itemsize == 8 + 4 * 64 and record_of(64, 2**16 + 1).itemsize == 8 + 6 * 64


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"streaming": True}, ["teacher_logits", "streaming"]),
        ({"teacher_top_k": 0}, ["teacher_top_k", "0"]),
    ],
)
def test_options_that_do_not_go_together(write, values, named):
    values = {"teacher_logits": "logits"} | values
    with pytest.raises(UserError) as error:
        load_recipe([write(**values)], UptrainRecipe)
    assert all(name in str(error.value) for name in named)
    recipe, _ = load_recipe([write(teacher_logits="logits")], UptrainRecipe)
    assert recipe.teacher_top_k == 64


@pytest.fixture
def train(here, tmp_path):
    """Uptrain by the logits in `tmp_path / "logits"`."""

    def train(name: str, *options: str, **values) -> dict:
        logits = {"teacher_logits": str(tmp_path / "logits"), "teacher_top_k": 8}
        return here(tmp_path / name, *options, **logits | values)

    return train


@pytest.fixture
def no_teacher(monkeypatch):
    """From its call on the teacher cannot be loaded."""

    def forbid() -> None:
        load = distillation.load_model

        def only_students(role, *arguments):
            assert role == "student"
            return load(role, *arguments)

        for module in (distillation, teacher_logits):
            monkeypatch.setattr(module, "load_model", only_students)

    return forbid


def log_of(output: Path, name: str) -> list[float]:
    state = json.loads((output / "checkpoint-8" / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry]


@runs
@pytest.mark.parametrize("values", [{}, {"bf16": True}], ids=["plain", "bf16"])
def test_all_tokens_train_as_the_live_teacher_does(here, train, no_teacher, tmp_path, values):
    """Losses, evaluations and results; and a second run does not load the teacher."""
    live = here(tmp_path / "live", **values)
    first = train("first", teacher_top_k=VOCABULARY, **values)
    no_teacher()
    again = train("again", teacher_top_k=20, gradient_accumulation_steps=1, **values)
    rel = 2e-2 if values.get("bf16") else 1e-3
    for name in ("loss", "eval_loss", "eval_kl", "eval_teacher_loss", "eval_teacher_perplexity"):
        assert log_of(tmp_path / "first", name) == pytest.approx(log_of(tmp_path / "live", name), rel=rel), name
    assert log_of(tmp_path / "again", "loss") == log_of(tmp_path / "first", "loss")
    assert first["kl_top_k"] == again["kl_top_k"] == VOCABULARY and "kl_top_k" not in live
    assert live.keys() == first.keys() - {"kl_top_k"}
    for name in ("kl", "initial_kl", "teacher_validation_loss", "validation_loss"):
        assert first[name] == pytest.approx(live[name], rel=rel), name
    assert first["kl"] < first["initial_kl"]
    assert f"| {VOCABULARY} |" in (tmp_path / "first" / "final" / "README.md").read_text()


@runs
def test_the_folder_covers_every_block(train, pair, tmp_path):
    train("run", max_steps=1, eval_steps=1)
    known, teacher = json.loads((tmp_path / "logits" / COMPLETE).read_text()), test_uptrain.AutoModelForCausalLM
    model = teacher.from_pretrained(pair[0]).eval()
    assert (known["top_k"], known["sequence_length"]) == (8, 64)
    for part in ("train", "validation"):
        blocks = load_blocks(tmp_path / "run" / "data", part)
        found = TeacherBlocks(blocks.blocks, np.load(tmp_path / "logits" / f"{part}.npy", "r"))
        assert found.records.shape == (len(blocks), 64)
        row = found[len(blocks) - 1]
        with torch.no_grad():
            log_probs = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0].log_softmax(-1)
        values, ids = log_probs.topk(8)
        assert torch.equal(row["teacher_ids"], ids)
        torch.testing.assert_close(row["teacher_log_probs"], values, rtol=2**-10, atol=1e-4)
        rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(row["teacher_rest"], rest)
        following = log_probs[:-1].gather(1, row["input_ids"][1:, None])[:, 0]
        kept = row["labels"][1:] >= 0
        torch.testing.assert_close(row["teacher_target_log_probs"][:-1][kept], following[kept])


@runs
def test_a_folder_of_something_else_is_refused(train, no_teacher, pair, tmp_path):
    train("run", max_steps=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "logits").iterdir()}
    no_teacher()
    other = shutil.copytree(pair[0], tmp_path / "teacher")
    build(["mha", "mha"], 7).save_pretrained(other)
    text = tmp_path / "text"
    text.mkdir()
    for number, content in enumerate(make_texts(40, seed=3)):
        (text / f"{number}.txt").write_text(content)
    for values, named in (
        ({"teacher": str(other)}, {"teacher"}),
        ({"sequence_length": 32}, {"sequence_length", "training text", "validation text"}),
        ({"teacher_top_k": 9}, {"top_k"}),
        ({"max_eval_blocks": 2}, {"validation text"}),
        ({"data_files": [str(text)]}, {"training text", "validation text"}),
    ):
        with pytest.raises(UserError) as error:
            train("other", "--overwrite", max_steps=1, **values)
        said = str(error.value).partition(" by its ")[2].partition(":")[0]
        assert {item.partition(" (")[0] for item in said.split(", ")} == named
    assert {path.name: path.read_bytes() for path in (tmp_path / "logits").iterdir()} == before
    (tmp_path / "logits" / "train.npy").write_bytes(before["train.npy"][:-1])
    with pytest.raises(UserError, match="damaged"):
        train("other", "--overwrite", max_steps=1)
    (tmp_path / "logits" / COMPLETE).unlink()
    with pytest.raises(UserError, match="holds no teacher's logits"):
        train("other", "--overwrite", max_steps=1)


@runs
def test_a_killed_computation_leaves_nothing_that_looks_whole(train, tmp_path, monkeypatch):
    calls = []

    def die(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return predict(*arguments)

    if not (child := os.fork()):
        monkeypatch.setattr(teacher_logits, "predict", die)
        try:
            train("run", max_steps=1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "logits").exists() and list(tmp_path.glob(".logits.new-*"))
    assert train("run", "--resume", max_steps=1)["kl_top_k"] == 8
    assert [path.name for path in tmp_path.glob("*logits*")] == ["logits"]


def test_a_full_disk(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000, free=1000))
        with pytest.raises(UserError, match="1,000 B are free"):
            train("run")
    assert not (tmp_path / "logits").exists()

    def full(*arguments):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(teacher_logits, "predict", full)
    with pytest.raises(UserError, match="No space left on device"):
        train("run", "--overwrite")
    assert not list(tmp_path.glob("*logits*"))


@runs
def test_two_writers_do_not_mix(train, tmp_path, monkeypatch):
    """While one computes, the other is told so and writes nothing."""
    said = []

    def meet(*arguments):
        if not said:
            said.append(None)
            with pytest.raises(UserError) as error:
                train("other")
            said[0] = str(error.value)
        return predict(*arguments)

    monkeypatch.setattr(teacher_logits, "predict", meet)
    assert train("run", max_steps=1)["kl_top_k"] == 8
    assert f"process {os.getpid()}" in said[0]


@runs
def test_stopped_and_resumed_gives_the_same_bits(train, no_teacher, tmp_path, monkeypatch):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "dataloader_num_workers": 1}
    expected = train("whole", **options)
    no_teacher()
    step_of_trainer, stops = UptrainTrainer.training_step, [3]

    def step(self, *arguments, **more):
        if stops and self.state.global_step == stops[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            stops.pop()
        return step_of_trainer(self, *arguments, **more)

    monkeypatch.setattr(UptrainTrainer, "training_step", step)
    with pytest.raises(SystemExit):
        train("stopped", **options)
    results = train("stopped", "--resume", **options)
    assert results["kl"] == expected["kl"]
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("stopped", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@runs
def test_two_processes_equal_one(train, write, tmp_path):
    student = build(["gqa", "mla"], 3, attention_dropout=0.0)
    student.save_pretrained(tmp_path / "student")
    tokenizer = yaml.safe_load(Path(write()).read_text())["teacher"]
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "student": str(tmp_path / "student")}
    options |= {"tokenizer": tokenizer, "teacher_top_k": 8}
    logits = tmp_path / "of-two"
    test_uptrain.by_two_processes(write(**options, teacher_logits=str(logits)), tmp_path / "two")
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    one = train("one", "--gradient_accumulation_steps", "2", **options)
    for key in ("tokens_seen", "initial_kl", "kl", "validation_loss", "teacher_validation_loss"):
        assert two[key] == pytest.approx(one[key], rel=1e-4), key
    for name in ("train.npy", "validation.npy"):
        assert (logits / name).read_bytes() == (tmp_path / "logits" / name).read_bytes()


def test_the_run_may_not_lie_in_the_folder(write, tmp_path):
    with pytest.raises(UserError, match="overlaps the teacher_logits"):
        uptrain(
            [
                write(teacher_logits=str(tmp_path / "run" / "logits")),
                "--output_dir",
                str(tmp_path / "run"),
            ]
        )
    assert not (tmp_path / "run").exists()
