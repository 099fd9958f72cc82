"""What student and teacher hold in memory: dtypes, shared parameters, and bytes against the costs."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from training_texts import MODEL, make_texts
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer import logger as trainer_logger

from modeling_gqa import GQAConfig, costs
from modeling_gqa.data.tokenizer import train_tokenizer
from modeling_gqa.training import distillation, publish
from modeling_gqa.training.distillation import load_pair, share_parameters
from modeling_gqa.training.uptraining import UptrainRecipe, UptrainTrainer
from training.uptrain import uptrain

# Sizes at which weights outweigh what a step computes.
SIZES: dict[str, Any] = {**MODEL, "num_hidden_layers": 3, "hidden_size": 96, "head_dim": 24, "intermediate_size": 512}
KINDS: dict[str, dict[str, Any]] = {
    "teacher": {"attention_kind": "mha"},
    "student": {
        "attention_kind": "mla",
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 24,
        "latent_norm": False,
    },
}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folders(request, tmp_path) -> dict[str, Path]:
    """Folders of a teacher and a student in bfloat16 that are equal but for their attention."""
    torch.manual_seed(0)
    built = {
        role: AutoModelForCausalLM.from_config(GQAConfig(**SIZES, **kind, tie_word_embeddings=request.param))
        for role, kind in KINDS.items()
    }
    shared = {name: x for name, x in built["teacher"].state_dict().items() if "self_attn" not in name}
    built["student"].load_state_dict(shared, strict=False)
    tokenizer = train_tokenizer(make_texts(40), MODEL["vocab_size"])
    for role, model in built.items():
        model.bfloat16().save_pretrained(tmp_path / role)
        tokenizer.save_pretrained(tmp_path / role)
    return {role: tmp_path / role for role in KINDS}


def make_recipe(folders, tmp_path, **values) -> UptrainRecipe:
    models = {role: str(folder) for role, folder in folders.items()}
    return UptrainRecipe(str(tmp_path / "run"), **{**models, "max_steps": 4, "use_cpu": True, "bf16": True, **values})


def in_attention(name: str) -> bool:
    return ".self_attn." in name


def test_frozen_matrices_are_in_the_checkpoints_dtype_and_shared(folders, tmp_path):
    student, teacher = load_pair(make_recipe(folders, tmp_path))
    ours, theirs = (dict(model.named_parameters(remove_duplicate=False)) for model in (student, teacher))
    for name, parameter in theirs.items():
        dtype = torch.float32 if parameter.ndim == 1 else torch.bfloat16
        assert parameter.dtype == dtype, name
        assert (ours.get(name) is parameter) != in_attention(name), name
    assert {x.dtype for name, x in ours.items() if in_attention(name)} == {torch.float32}
    # Whatever moves one of the two to another device, or dtype, moves what they share.
    teacher.double()
    assert all((ours[name].dtype == torch.float64) != in_attention(name) for name in theirs if name in ours)


@pytest.mark.parametrize(
    ("values", "dtype", "shared"),
    [({"bf16": False}, torch.float32, True), ({"trainable": "all"}, torch.float32, False)],
    ids=["no-autocast", "all-trained"],
)
def test_where_the_student_is_in_float32(folders, tmp_path, values, dtype, shared):
    student, teacher = load_pair(make_recipe(folders, tmp_path, **values))
    assert {parameter.dtype for parameter in student.parameters()} == {dtype}
    common = {id(x) for x in student.parameters()} & {id(x) for x in teacher.parameters()}
    assert bool(common) == shared


def test_only_equal_parameters_are_shared(folders, tmp_path):
    student, teacher = (AutoModelForCausalLM.from_pretrained(folders[role]) for role in ("student", "teacher"))
    with torch.no_grad():
        teacher.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    before = {name: x.clone() for name, x in teacher.state_dict().items()}
    share_parameters(student, teacher, "attention")
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())
    assert teacher.model.layers[1].mlp.up_proj.weight is not student.model.layers[1].mlp.up_proj.weight
    assert teacher.model.layers[0].mlp.up_proj.weight is student.model.layers[0].mlp.up_proj.weight
    assert (teacher.lm_head.weight is teacher.model.embed_tokens.weight) == teacher.config.tie_word_embeddings


@pytest.fixture
def uptrained(folders, corpus, tmp_path, monkeypatch):
    """Runs the script; returns the losses that were logged and the folder of the run."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")
    path = tmp_path / "uptrain.yaml"
    values = {
        **{role: str(folder) for role, folder in folders.items()}, "data_files": [str(corpus)], "sequence_length": 32,
        "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "save_steps": 2, "max_eval_blocks": 2,
        "validation_fraction": 0.1, "use_cpu": True, "bf16": True, "save_total_limit": 9,
        "keep_best": False,
    }  # fmt: skip
    path.write_text(json.dumps(values))  # which is YAML too

    def run(name: str, *options: str):
        uptrain([str(path), "--output_dir", str(tmp_path / name), *options])
        state = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        kept = ("step", "loss", "grad_norm", "eval_loss", "eval_kl", "eval_teacher_loss")
        return [{key: log[key] for key in kept if key in log} for log in state["log_history"]], tmp_path / name

    return run


def test_a_resumed_run_and_one_of_float32_weights_are_the_same(uptrained, monkeypatch):
    """Losses, gradients and weights: autocast rounds a frozen matrix to the dtype that it is stored in, however held.

    A resumption counts the seconds before, and warns of no missing keys.
    """

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()

    expected, run = uptrained("ours")
    final = weights(run)
    shutil.rmtree(run / "checkpoint-4")
    path = run / "checkpoint-2" / "complete.json"
    mark = json.loads(path.read_text())
    path.write_text(json.dumps(mark | {"training_seconds": mark["training_seconds"] + 1000}))
    warned: list[str] = []
    monkeypatch.setattr(trainer_logger, "warning", lambda message, *_, **__: warned.append(message))
    assert uptrained("ours", "--resume")[0] == expected and len(expected) == 9 and warned == []
    seconds = json.loads((run / "results.json").read_text())["training_seconds"] - mark["training_seconds"]
    assert 1000 < seconds < 1100
    monkeypatch.setattr(distillation, "frozen_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(distillation, "share_parameters", lambda *_: None)
    found, other = uptrained("float32")
    assert found == expected
    for folder in (run, other):
        assert all(torch.equal(x, final[name]) and x.dtype == torch.bfloat16 for name, x in weights(folder).items())


def live_bytes() -> int:
    """Bytes of all storages that tensors hold, each counted once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        fake = issubclass(type(item), FakeTensor)  # left by tests that compile
        if issubclass(type(item), torch.Tensor) and not fake and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def predicted_bytes(student: GQAConfig, teacher: GQAConfig) -> int:
    """The arithmetic of docs/uptraining.md without autocast's copies, which live during a step only."""
    trained = costs.count_attention_parameters(student)
    frozen = costs.count_parameters(student) - trained
    return 2 * (frozen + costs.count_attention_parameters(teacher)) + 16 * trained


def test_bytes_in_memory_are_those_of_the_accounting(folders, tmp_path, objects_set_aside):
    """Weights, gradients and AdamW's state after a step: one copy of what is frozen, in two bytes."""
    before = live_bytes()
    recipe = make_recipe(folders, tmp_path, per_device_train_batch_size=1, report_to=[])
    student, teacher = load_pair(recipe)
    expected = predicted_bytes(student.config, teacher.config)
    block = {"input_ids": torch.arange(8), "labels": torch.arange(8), "position_ids": torch.arange(8)}
    trainer = UptrainTrainer(student, recipe, teacher, train_dataset=[block] * 4, eval_dataset=[block])
    trainer.bytes_per_token = 1.0  # without a tokenizer
    seen = []

    class Count(TrainerCallback):
        def on_optimizer_step(self, *_, **__):
            seen.append(live_bytes() - before)

    trainer.add_callback(Count())
    trainer.args.save_strategy = "no"
    trainer.train()
    assert seen[-1] == pytest.approx(expected, rel=0.03)
    # As it was: two models in float32, and the same gradients and states.
    trained = costs.count_attention_parameters(student.config)
    models = [costs.count_parameters(model.config) for model in (student, teacher)]
    assert seen[-1] < 0.65 * (4 * sum(models) + 12 * trained)
