"""Uptraining: its losses against other computations, the budget, interruption, the result, refusals."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_texts import MODEL, make_texts
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAConfig
from modeling_gqa.conversion import convert_model, losses, target_config
from modeling_gqa.conversion.losses import prediction_losses
from modeling_gqa.data.blocks import load_blocks
from modeling_gqa.data.tokenizer import train_tokenizer
from modeling_gqa.training import publish, uptraining
from modeling_gqa.training.recipe import load_recipe
from modeling_gqa.training.uptraining import UptrainRecipe, UptrainTrainer
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import CONFIGURATION, recipe_names
from training.uptrain import uptrain

ROOT = CONFIGURATION.parent
LAYERS = {
    "gqa": {"attention_kind": "gqa", "num_key_value_heads": 2},
    "mla": {
        "attention_kind": "mla",
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "latent_norm": False,
    },
}
LICENCES = ("LICENSE.txt", "USE_POLICY.md", "NOTICE")
# Recipes and their steps for a teacher that has seen 1,638,400 tokens.
STEPS = {"uptrain-tiny": 80, "uptrain-1b": 1500, "uptrain-smollm2": 1000}


def build(kinds: list[str], seed: int, **fields):
    config = GQAConfig(**{**MODEL, "num_hidden_layers": len(kinds), "attention_kind": "mha", **fields})
    values = config.to_dict() | {"per_layer_config": {str(i): LAYERS[k] for i, k in enumerate(kinds) if k in LAYERS}}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(GQAConfig.from_dict(values))
    with torch.no_grad():  # so that predictions differ and every layer counts
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a teacher, and of a student that differs from it in its attention alone."""
    folder = tmp_path_factory.mktemp("pair")
    teacher, student = build(["mha", "mha"], 0), build(["gqa", "mla"], 1)
    shared = {name: tensor for name, tensor in teacher.state_dict().items() if "self_attn" not in name}
    student.load_state_dict(shared, strict=False)
    tokenizer = train_tokenizer(make_texts(40), MODEL["vocab_size"])
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "student" / "README.md").write_text("---\nlicense: llama3.2\nbase_model: org/source\n---\n")
    (folder / "student" / "conversion.json").write_text('{"method": "by hand"}')
    for name in LICENCES:
        (folder / "student" / name).write_text(f"{name} of the source")
    return folder / "teacher", folder / "student"


@pytest.fixture
def write(pair, corpus, tmp_path):
    def write(**values) -> str:
        recipe = {
            "student": str(pair[1]), "teacher": str(pair[0]), "data_files": [str(corpus)], "sequence_length": 64,
            "per_device_train_batch_size": 4, "max_steps": 8, "warmup_steps": 2,
            "logging_steps": 1, "save_steps": 5, "save_total_limit": 9, "max_eval_blocks": 4,
            "validation_fraction": 0.1,
        }  # fmt: skip
        path = tmp_path / "uptrain.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in (recipe | values).items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def here(write, monkeypatch):
    """Runs the script in this process; what a stranger would load is tested once."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")

    def here(output: Path, *options: str, **values) -> dict:
        uptrain([write(**values), "--output_dir", str(output), *options])
        return json.loads((output / "results.json").read_text())

    return here


@pytest.fixture
def packed() -> dict[str, torch.Tensor]:
    """Two rows of packed documents."""
    torch.manual_seed(2)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 11, 1, 7), (24,))])
    ids = torch.randint(2, MODEL["vocab_size"], positions.shape)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def by_two_processes(recipe: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Uptrain by two processes of this machine, into `output`."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "training.uptrain"]
    process = subprocess.run(
        [sys.executable, *launch, recipe, "--output_dir", str(output)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process


def documents(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each document's token ids, (1, T)."""
    found = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*positions.eq(0).nonzero().flatten().tolist(), len(ids)]
        found += [ids[None, a:b] for a, b in pairwise(starts)]
    return found


@torch.no_grad()
def predictions_document_by_document(student, teacher, batch) -> tuple[float, float, float, int]:
    """Sums of the student's loss, KL(teacher || student) and the teacher's loss, and the tokens predicted."""
    sums, tokens = torch.zeros(3, dtype=torch.float64), 0
    for ids in documents(batch):
        logits = [model(ids).logits[0, :-1].double() for model in (student, teacher)]
        q, p = (x.softmax(-1) for x in logits)
        losses = [-x.softmax(-1)[torch.arange(len(x)), ids[0, 1:]].log().sum() for x in logits]
        kl = (p * (p / q).log()).sum()
        sums += torch.stack([losses[0], kl, losses[1]])
        tokens += ids.shape[1] - 1
    return *sums.tolist(), tokens


def test_prediction_losses(packed, monkeypatch):
    student, teacher = build(["gqa", "mla"], 1).eval(), build(["mha", "mha"], 0).eval()
    expected = predictions_document_by_document(student, teacher, packed)
    inputs = {name: packed[name] for name in ("input_ids", "position_ids")}
    gradients = []
    for rows in (1000, 7):  # at once, and in parts of 7 tokens
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", rows * MODEL["vocab_size"])
        logits = student(**inputs).logits.detach().requires_grad_()
        states = teacher.model(**inputs).last_hidden_state.detach()
        sums = prediction_losses(logits, states, teacher.lm_head, packed["labels"])
        assert sums.tolist() == pytest.approx(expected[:3], rel=1e-5)
        sums[1].backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)
    # Gradient of the KL: q - p where something is predicted, nothing elsewhere.
    q, p = (x.softmax(-1) for x in (logits.detach(), teacher(**inputs).logits.detach()))
    predicted = torch.nn.functional.pad(packed["labels"][:, 1:], (0, 1), value=-100) != -100
    torch.testing.assert_close(gradients[0], (q - p) * predicted[..., None], atol=1e-6, rtol=1e-4)


def test_gradients_of_all_three_sums_are_those_of_differences(monkeypatch):
    """In float64, in parts of one token on a CPU: the teacher's loss has no gradient by the student's logits."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 4 * 7)
    head, labels = torch.nn.Linear(3, 7, dtype=torch.float64), torch.tensor([[1, 6, -100, 2], [-100, 0, 3, 3]])
    states = torch.randn(2, 4, 3, dtype=torch.float64)
    logits = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: prediction_losses(x, states, head, labels), logits)


def test_loss_of_the_trainer(pair, packed, tmp_path):
    """The weighted sum of both losses, over the tokens of all accumulated batches."""
    teacher, student = (AutoModelForCausalLM.from_pretrained(path).eval() for path in pair)
    loss, kl, _, tokens = predictions_document_by_document(student, teacher, packed)
    for model in (student, teacher):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
    recipe = UptrainRecipe(str(tmp_path), student="s", teacher="t", kl_weight=0.75, max_steps=8)
    trainer = UptrainTrainer(student, recipe, teacher, train_dataset=[], eval_dataset=[])
    trainer.current_gradient_accumulation_steps = 2
    computed = trainer.compute_loss(student.train(), packed, num_items_in_batch=2 * tokens)
    assert computed.item() == pytest.approx((0.25 * loss + 0.75 * kl) / (2 * tokens), rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "options", "steps"),
    [
        # A step takes 4 * 64.
        ({"max_steps": None}, "--tokens=2000", 2000 / 256),
        ({"max_steps": None}, "--tokens=2000 --gradient-accumulation-steps=3", 2000 / 768),
        # The command line's budget replaces the recipe's.
        ({"max_steps": 5, "tokens": "2000"}, "--max-steps=7", 7),
        ({"max_steps": 5, "tokens": "2000"}, "--max-steps=-1", 8),
        ({"max_steps": 5, "tokens_per_parameter": 0.1}, "--max-steps=7", 7),
    ],
)
def test_budget(write, recipe, options, steps):
    assert load_recipe([write(**recipe), *options.split()], UptrainRecipe)[0].max_steps == round(steps)


def test_two_budgets_on_the_command_line_are_refused(write):
    with pytest.raises(UserError, match="max_steps and tokens are both given; choose one"):
        load_recipe([write(max_steps=None), "--max-steps=5", "--tokens=2000"], UptrainRecipe)


def test_steps_of_the_recipes_in_the_repository():
    recipes = {
        name: load_recipe([name, "--student", "s", "--teacher", "t", "--bf16=false"], UptrainRecipe)[0]
        for name in recipe_names("uptrain")
    }
    assert {name: recipe.max_steps for name, recipe in recipes.items()} == STEPS


def test_results(here, pair, tmp_path, yardsticks):
    results = here(tmp_path / "run", eval_data=str(yardsticks), eval_limit=2)
    assert results["evaluation"]["lambada"]["items"] == 2
    validation = load_blocks(tmp_path / "run" / "data", "validation")
    batch = {name: torch.stack([row[name] for row in validation]) for name in validation[0]}
    teacher, before, after = (
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (*pair, tmp_path / "run" / "final")
    )
    for name, student in (("initial_", before), ("", after)):
        loss, kl, teacher_loss, tokens = predictions_document_by_document(student, teacher, batch)
        assert results[f"{name}validation_loss"] == pytest.approx(loss / tokens, rel=1e-5)
        assert results[f"{name}kl"] == pytest.approx(kl / tokens, rel=1e-4)
        assert results["teacher_validation_loss"] == pytest.approx(teacher_loss / tokens, rel=1e-5)
    assert results["kl"] < results["initial_kl"] and results["tokens_seen"] == 8 * 4 * 64
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    for text in (
        "`student`, a conversion of `teacher`,", "on 2,048 tokens",
        f"before uptraining | {results['initial_validation_loss']:.4f}", f"per token | {results['kl']:.4f}",
        "Parameters trained: attention", "0.9 times the KL",
    ):  # fmt: skip
        assert text in card
    assert str(pair[0].parent) not in card
    # The licence of the weights that it began with, and the model on the Hub that they are from.
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["license"] == "llama3.2" and metadata["tags"] == ["modeling_gqa", "kv-cache", "gqa", "mla"]
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("org/source", "finetune")
    assert "vLLM 0.32 or 0.33 caches the latent of this model's MLA" in card
    assert (tmp_path / "run" / "final" / "conversion.json").read_text() == '{"method": "by hand"}'
    for name in LICENCES:
        assert (tmp_path / "run" / "final" / name).read_text() == f"{name} of the source"
    # Only the attention was trained.
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "final", pair[1]))
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == {
        name for name in ours if ".self_attn." in name
    }


def test_a_student_with_norms_on_each_head(here, pair, packed, tmp_path):
    """A conversion of Qwen3's attention to MLA is uptrained as any, in every parameter of the attention."""
    teacher = build(["mha", "mha"], 0, qk_norm=True).eval()
    target = target_config(teacher.config, "mla", cache_size=20)
    student, _ = convert_model(teacher, target, [{"input_ids": packed["input_ids"]}], method="lowrank")
    for name, model in (("teacher", teacher), ("student", student)):
        shutil.copytree(pair[0], tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        model.save_pretrained(tmp_path / name)
    results = here(tmp_path / "run", teacher=str(tmp_path / "teacher"), student=str(tmp_path / "student"))
    assert results["kl"] < results["initial_kl"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run/final", "student"))
    assert ours["model.layers.0.self_attn.q_head_proj.weight"].shape[1] == student.config.qk_norm_head_dim
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) == (".self_attn." not in name), name


def test_two_stops_and_resume_give_the_same_bits(here, tmp_path, monkeypatch):
    options = {"trainable": "all", "eval_strategy": "steps", "eval_steps": 4}
    expected = here(tmp_path / "whole", **options)
    step_of_trainer, stops = UptrainTrainer.training_step, [2, 6]

    def stop(self, *args, **kwargs):
        if stops and self.state.global_step == stops[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            stops.pop(0)
        return step_of_trainer(self, *args, **kwargs)

    monkeypatch.setattr(UptrainTrainer, "training_step", stop)
    for resume in ([], ["--resume"]):
        with pytest.raises(SystemExit) as stopped:
            here(tmp_path / "stopped", *resume, **options)
        assert stopped.value.code == 128 + 15
    assert {3, 5, 7} == {int(path.name.rpartition("-")[2]) for path in (tmp_path / "stopped").glob("checkpoint-*")}
    results = here(tmp_path / "stopped", "--resume", **options)
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("stopped", "whole"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    histories = [
        json.loads((tmp_path / name / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
        for name in ("stopped", "whole")
    ]
    kept = ("step", "loss", "learning_rate", "eval_loss", "eval_kl")
    ours, theirs = ([{key: log.get(key) for key in kept} for log in history] for history in histories)
    assert ours == theirs
    timing = {"training_seconds", "sealing_seconds", "tokens_per_second"}
    assert {k: v for k, v in results.items() if k not in timing} == {
        k: v for k, v in expected.items() if k not in timing
    }


RUINOUS = 3.0  # a learning rate


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("kl", "worse", "stopped"),
    [
        ({0: 1.0, 2: 2.0}, [2], False),
        ({0: 1.0, 2: 2.0, 4: 1.5}, [4, 2], True),
        ({0: 1.0, 2: 2.0, 4: 1.5, 6: 1.2}, [6, 4, 2], True),
        ({0: 1.0, 4: 0.5, 5: 2.0, 6: 1.0, 7: 2.0}, [7], False),  # not in a row
        ({0: 1.0, 5: 2.0, 6: math.nan}, [6, 5], True),
        ({0: math.inf, 5: 2.0, 6: 2.0}, [], False),
        ({0: 1.0, 6: 2.0, 8: 2.0}, [8, 6], False),  # the last of 8 steps: nothing is left to stop
    ],
)
def test_two_evaluations_in_a_row_stop(kl, worse, stopped, tmp_path):
    def trainer(**values) -> UptrainTrainer:
        recipe = UptrainRecipe(str(tmp_path), student="s", teacher="t", max_steps=8, **values)
        made = UptrainTrainer(build(["gqa"], 1), recipe, build(["mha"], 0), train_dataset=[], eval_dataset=[])
        made.state.max_steps, made.state.global_step = 8, max(kl)
        made.state.log_history = [{"step": step, "eval_kl": value} for step, value in kl.items()]
        return made

    assert (trainer().worse_steps(), trainer().is_stopped()) == (worse, stopped)
    assert not trainer(keep_best=False).is_stopped()
    assert trainer(kl_weight=0.0).worse_steps() == []  # training on the next token alone is not held to the KL


def test_a_training_whose_kl_stays_above_its_first_stops(here, pair, tmp_path, capsys, monkeypatch):
    """Both lines name the numbers; the student is the result, a resumption trains no more, unless it is asked to."""
    options = {"learning_rate": RUINOUS, "max_steps": 9, "eval_steps": 2, "save_steps": 9}
    results = here(tmp_path / "run", **options)
    log = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    first, *later = [entry["eval_kl"] for entry in log if "eval_kl" in entry]
    said = [f"the KL to the teacher was {first:.4g} before training and is {kl:.4g}, with" for kl in later]
    beginning, stop, end = warnings(capsys.readouterr().err)
    assert (
        len(later) == 2 and beginning == f"warning: step 2: {said[0]} --learning-rate 3; the model is worse than it was"
    )
    assert stop.startswith(f"warning: step 4: {said[1]} --learning-rate 3; training stops")
    assert stop.endswith("try a smaller --learning-rate") and end.endswith("The result is the student as it was")
    assert "lower learning_rate" not in end
    assert (results["stopped_step"], results["steps"], results["result_step"]) == (4, 4, 0)
    assert results["tokens_seen"] == 4 * 4 * 64 and results["kl"] == results["initial_kl"] == first < results["last_kl"]
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "final", pair[1]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "stayed above that before | 4 |" in (tmp_path / "run" / "final" / "README.md").read_text()

    def step(self, *arguments, **more):
        raise AssertionError("a stopped run has nothing left to train")

    with monkeypatch.context() as patch:
        patch.setattr(UptrainTrainer, "training_step", step)
        again = here(tmp_path / "run", "--resume", **options)
    assert again | {"sealing_seconds": 0} == results | {"sealing_seconds": 0}
    whole = here(tmp_path / "run", "--resume", "--no-keep-best", **options)
    assert whole["steps"] == 9 and not {"stopped_step", "result_step"} & whole.keys()


@pytest.mark.parametrize("name", recipe_names("uptrain"))
def test_every_recipe_evaluates_and_saves_ten_times(name):
    recipe, _ = load_recipe([name, "--student=s", "--teacher=t", "--bf16=false"], UptrainRecipe)
    assert recipe.eval_strategy == "steps"
    assert recipe.max_steps / recipe.eval_steps == recipe.max_steps / recipe.save_steps == 10


def test_evaluation_can_be_switched_off(here, tmp_path):
    """What is left is the comparison at the end."""
    results = here(tmp_path / "run", learning_rate=RUINOUS, eval_strategy="no")
    log = json.loads((tmp_path / "run" / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_kl" in entry] == [0]
    assert results["result_step"] == 0 and "stopped_step" not in results


@pytest.mark.parametrize("measure", ["kl", "validation_loss"])
def test_a_training_that_only_harms_leaves_the_student_as_it_was(measure, here, pair, tmp_path, capsys):
    """Bit for bit in its dtype, with a warning, and with results and a card that say so."""
    student = shutil.copytree(pair[1], tmp_path / "student")
    AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16).save_pretrained(student)
    alone = {} if measure == "kl" else {"kl_weight": 0, "trainable": "all"}
    options = {"student": str(student), "learning_rate": RUINOUS, "eval_strategy": "steps", "eval_steps": 5} | alone
    results = here(tmp_path / "run", **options)
    assert "training made the model worse" in warnings(capsys.readouterr().err)[-1]
    assert results["result_step"] == 0 and results["steps"] == 8
    assert results[measure] == results[f"initial_{measure}"] < results[f"last_{measure}"]
    assert results["validation_perplexity"] == results["initial_validation_perplexity"]
    bits = results["validation_loss"] / math.log(2) / results["bytes_per_token"]
    assert results["validation_bits_per_byte"] == pytest.approx(bits)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "final", student))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {ours[name].dtype for name in ours} == {torch.bfloat16}
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "did not improve" in card and f"after the last step | {results[f'last_{measure}']:.4f}" in card
    # The same again from the last checkpoint.
    shutil.rmtree(tmp_path / "run" / "final")
    again = here(tmp_path / "run", "--resume", **options)
    assert {name: again[name] for name in results if name != "sealing_seconds"} == {
        name: results[name] for name in results if name != "sealing_seconds"
    }


def test_a_training_that_ends_badly_goes_back_to_its_best_checkpoint(here, pair, tmp_path, capsys, monkeypatch):
    """The rate rises after step 4, whose checkpoint stays beyond the limit, and is the result of the stop at step 8."""
    rates = {"lr_scheduler_type": "constant", "warmup_steps": 0, "learning_rate": 1e-2}
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 10, "save_total_limit": 1}
    step_of_trainer = UptrainTrainer.training_step

    def step(self, *arguments, **more):
        if self.state.global_step >= 4:
            self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[1]["lr"] = RUINOUS
        return step_of_trainer(self, *arguments, **more)

    monkeypatch.setattr(UptrainTrainer, "training_step", step)
    results = here(tmp_path / "run", **options, **rates)
    assert warnings(capsys.readouterr().err)[-1].endswith("The result has the weights of step 4")
    assert (results["result_step"], results["stopped_step"]) == (4, 8)
    tokens = 4 * results["tokens_per_step"]
    assert f"on {tokens:,} tokens" in (tmp_path / "run" / "final" / "README.md").read_text()
    assert results["kl"] < results["initial_kl"] < results["last_kl"]
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    ours, theirs = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("final", "checkpoint-4"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    shutil.rmtree(tmp_path / "run" / "final")
    # A damaged one is not taken.
    (tmp_path / "run" / "checkpoint-4" / "model.safetensors").write_bytes(b"damage")
    again = here(tmp_path / "run", "--resume", **options, **rates)
    assert (again["result_step"], again["stopped_step"]) == (0, 8) and again["kl"] == again["initial_kl"]


def test_a_student_that_is_gone_in_the_end_is_one_line(here, tmp_path, monkeypatch):
    """The run keeps its checkpoint, and goes on when the student is back."""

    def gone(name):
        raise UserError(f"{name} does not exist")

    with monkeypatch.context() as patch:
        patch.setattr(uptraining, "load_source", gone)
        with pytest.raises(UserError, match=r"the student cannot be loaded again: .* does not exist; bring it back"):
            here(tmp_path / "run", learning_rate=RUINOUS, max_steps=2, warmup_steps=0)
    options = {"learning_rate": RUINOUS, "max_steps": 2, "warmup_steps": 0}
    assert here(tmp_path / "run", "--resume", **options)["result_step"] == 0


def test_the_last_weights_can_be_kept(here, pair, tmp_path, capsys):
    """`keep_best: false` is for measuring what training does: a warning comes all the same."""
    results = here(tmp_path / "run", learning_rate=RUINOUS, keep_best=False)
    assert "training made the model worse" in warnings(capsys.readouterr().err)[-1] and results["steps"] == 8
    assert "result_step" not in results and results["kl"] > results["initial_kl"]
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "final", pair[1]))
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_next_token_loss_alone(here, pair, tmp_path):
    values = {"kl_weight": 0, "max_steps": 2, "trainable": "all"}
    results = here(tmp_path / "run", **values)
    assert results["initial_validation_loss"] > results["validation_loss"]
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "Parameters trained: all" in card and "1 times" in card
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "final", pair[1]))
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)
    # The first logged loss is the next-token loss of the first batch, which a teacher would have changed.
    log = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    first = next(entry["loss"] for entry in log if "loss" in entry)
    assert first == pytest.approx(results["initial_validation_loss"], rel=0.05)


@pytest.mark.parametrize("rate", [1e-3, RUINOUS], ids=["uptrains", "ruins"])
def test_two_processes_equal_one_and_a_stranger_loads_the_result(rate, write, here, tmp_path):
    options = {"trainable": "all", "max_steps": 4, "per_device_train_batch_size": 2, "sample_prompt": "the "}
    options |= {"learning_rate": rate, "warmup_steps": 0}
    student = build(["gqa", "mla"], 3, attention_dropout=0.0)
    student.save_pretrained(tmp_path / "student")
    options["student"] = str(tmp_path / "student")
    options["tokenizer"] = str(Path(yaml.safe_load(Path(write()).read_text())["teacher"]))
    one = here(tmp_path / "one", "--gradient_accumulation_steps", "2", **options)
    process = by_two_processes(write(**options), tmp_path / "two")
    assert "loads it and writes:\n\nthe " in process.stdout
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    for key in ("tokens_seen", "initial_kl", "kl", "validation_loss"):
        assert two[key] == pytest.approx(one[key], rel=1e-4), key
    assert two.get("result_step") == one.get("result_step") == (0 if rate == RUINOUS else None)
    assert two.get("stopped_step") == one.get("stopped_step") == (2 if rate == RUINOUS else None)


REFUSALS = [
    ({"student": None}, "no student given: name the converted model, --student FOLDER"),
    ({"student": "/nowhere/model"}, "cannot load the student /nowhere/model"),
    ({"teacher": "/nowhere/model"}, "cannot load the teacher /nowhere/model"),
    ({"student": "a/model.gguf"}, "the student a/model.gguf is a GGUF file: write it as a folder first"),
    ({"teacher": None}, "no teacher given: name the model that the student was converted from, --teacher FOLDER"),
    ({"kl_weight": -1}, "kl_weight is -1.0; it must lie between 0 and 1"),
    ({"trainable": "mlp"}, "trainable"),
    ({"teacher_top_k": 3}, "teacher_top_k has no effect without teacher_logits"),
    ({"preset": "tiny-mha"}, "preset has no effect here: the student is the model"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor has no effect here: the teacher's predictions"),
    ({"model_overrides": {"hidden_size": 3}}, "model_overrides has no effect here: the student is the model"),
    ({"tokens": "2000"}, "max_steps and tokens are both given"),
    ({"tokens": "20", "max_steps": None}, "tokens leaves 20 tokens, and a step takes 256"),
    # Models come before budgets.
    ({"tokens": "20", "max_steps": None, "teacher": "/nowhere/t"}, "cannot load the teacher /nowhere/t"),
    ({"kl_wieght": 0}, "unknown field kl_wieght (did you mean kl_weight?)"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_refused(write, tmp_path, values, message):
    with pytest.raises(UserError) as error:
        uptrain([write(**values), "--output_dir", str(tmp_path / "run")])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_teachers_that_do_not_fit(write, pair, tmp_path):
    def refused(**values) -> str:
        with pytest.raises(UserError) as error:
            uptrain([write(**values), "--output_dir", str(tmp_path / "run")])
        assert not (tmp_path / "run").exists()
        return str(error.value)

    for fields, message in (
        ({"hidden_size": 36, "head_dim": 8}, "the student's hidden_size is 32 and the teacher's is 36"),
        ({"vocab_size": 301}, "the student's vocab_size is 300 and the teacher's is 301"),
    ):
        build(["mha", "mha"], 0, **fields).save_pretrained(tmp_path / "teacher")
        assert message in refused(teacher=str(tmp_path / "teacher"))
    build(["mha"], 0).save_pretrained(tmp_path / "teacher")
    assert "the student's num_hidden_layers is 2 and the teacher's is 1" in refused(teacher=str(tmp_path / "teacher"))
    shutil.copytree(pair[0], tmp_path / "other")
    train_tokenizer(make_texts(40, seed=1), MODEL["vocab_size"]).save_pretrained(tmp_path / "other")
    assert "is not the teacher's" in refused(teacher=str(tmp_path / "other"))
    train_tokenizer(make_texts(40), 320).save_pretrained(tmp_path / "large")
    assert "has 320 tokens and the student's vocab_size is 300" in refused(tokenizer=str(tmp_path / "large"))
    assert "are the same model" in refused(student=str(pair[0]))


@pytest.mark.parametrize(("role", "place"), [("student", "final"), ("teacher", "data/model")])
def test_a_model_in_the_output_folder_is_kept(here, pair, tmp_path, role, place):
    folder = tmp_path / "run" / place
    shutil.copytree(pair[role == "student"], folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for options in ((), ("--overwrite",)):
        with pytest.raises(UserError, match=f"output_dir {tmp_path}/run overlaps the {role} {folder}"):
            here(tmp_path / "run", *options, **{role: str(folder)})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_teacher_is_refused_on_resume(here, pair, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(pair[0], teacher)
    here(tmp_path / "run", teacher=str(teacher))
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    teacher = teacher.rename(tmp_path / "moved")  # its weights are compared, and not its place
    here(tmp_path / "run", "--resume", teacher=str(teacher))
    other = build(["mha", "mha"], 7)
    other.save_pretrained(teacher)
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match=r"the teacher has other weights than when the run .* began"):
        here(tmp_path / "run", "--resume", teacher=str(teacher))
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_a_run_with_a_constant_rate_goes_on(here, tmp_path):
    here(tmp_path / "run", lr_scheduler_type="constant", max_steps=4)
    assert here(tmp_path / "run", "--resume", lr_scheduler_type="constant")["steps"] == 8
