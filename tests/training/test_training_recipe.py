"""Recipes: precedence, refusals, presets, and what a resumed run may change."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, TrainingArguments

from modeling_gqa.training import recipe as recipes
from modeling_gqa.training.recipe import load_recipe, trackers_in
from modeling_gqa.training.recipe_model import check_training, load_config
from modeling_gqa.training.run_setup import compare_recipes, save_recipe
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import CONFIGURATION, preset_names


@pytest.fixture
def write(tmp_path):
    def write(**values) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"preset": "tiny-gqa", "output_dir": str(tmp_path / "run"), **values}))
        return str(path)

    return write


def test_command_line_beats_yaml_beats_default(write):
    path = write(max_steps=7, learning_rate="2e-3")
    recipe, values = load_recipe([path, "--max_steps", "9"])
    assert (recipe.max_steps, recipe.learning_rate, recipe.adam_beta2) == (9, 2e-3, 0.95)
    assert values["max_steps"] == 9 and values["learning_rate"] == 2e-3


def test_kinds_of_yaml_values(write):
    kwargs = {"num_decay_steps": 3}
    path = write(
        bf16=False, overwrite=True, eval_steps=None, data_files=["a b.txt", "c"], lr_scheduler_kwargs=kwargs,
        lr_scheduler_type="warmup_stable_decay", model_overrides={"hidden_size": 64}, report_to=["tensorboard"],
    )  # fmt: skip
    recipe, _ = load_recipe([path])
    assert recipe.overwrite is True and recipe.bf16 is False and recipe.eval_steps is None
    assert recipe.data_files == ["a b.txt", "c"] and recipe.report_to == ["tensorboard"]
    assert recipe.lr_scheduler_kwargs == kwargs and load_config(recipe).hidden_size == 64


@pytest.mark.parametrize(
    ("yaml_values", "options", "message"),
    [
        ({"max_step": 7}, [], "unknown field max_step (did you mean max_steps?)"),
        ({}, ["--learning_rat", "1"], "unknown option --learning_rat (did you mean --learning-rate?)"),
        ({}, ["--max_steps", "soon"], "--max-steps: invalid int value: 'soon'"),
        ({"learning_rate": "fast"}, [], "invalid float value: 'fast'"),
        ({"resume_from_checkpoint": "x"}, [], "resume_from_checkpoint has no effect here: use --resume"),
        ({"sequence_length": 1}, [], "sequence_length is 1"),
        ({"validation_fraction": 1.5}, [], "validation_fraction is 1.5"),
        ({"streaming": True}, [], "max_steps"),
        ({"max_steps": 7, "num_train_epochs": 2}, [], "max_steps and num_train_epochs are both given; choose one"),
        ({"preset": "", "init_from": "a.gguf"}, [], "the model a.gguf is a GGUF file: write it as a folder first"),
        ({"muon": True, "optim_args": "a=1"}, [], "optim_args has no effect with muon"),
        ({"muon": True, "optim_target_modules": "all"}, [], "optim_target_modules has no effect with muon"),
        ({"muon": True, "fsdp": "full_shard", "fsdp_config": {"version": 1}}, [], "muon needs whole matrices"),
        ({"resume": True, "dry_run": True}, [], "dry_run does not measure what resume changes"),
        ({"gradient_checkpointing": True, "dry_run": True}, [], "dry_run does not measure what gradient_checkpointing"),
        ({"dataset_name": "a/b", "data_files": ["x"]}, [], "data_files and dataset_name are both given"),
        ({"use_liger_kernel": True}, [], "use_liger_kernel has no effect"),
        ({"max_steps": 0}, [], "max_steps is 0; it must be at least 1"),
        ({"fp16": True}, [], "fp16 has no effect on CPUs"),
        ({"dataset_split": "test"}, [], "dataset_split has no effect without dataset_name"),
        ({"tokens": "1,5K"}, [], "tokens is 1,5K"),
    ],
)
def test_refused(write, yaml_values, options, message):
    with pytest.raises(UserError) as error:
        load_recipe([write(**yaml_values), *options])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "options", "length"),
    [
        ({"max_steps": 7}, ["--num-train-epochs", "2"], (-1, 2)),
        ({"num_train_epochs": 2}, ["--max-steps", "7"], (7, 3)),
        ({"tokens": "8K"}, ["--num-train-epochs", "2"], (-1, 2)),
        ({}, ["--tokens-per-parameter", "3", "--num-train-epochs", "0"], (-1, 3)),
        ({}, [], (-1, 3)),
    ],
)
def test_one_length(write, values, options, length):
    """That of the command line; transformers' three epochs where none is given."""
    recipe, _ = load_recipe([write(**values), *options])
    assert (recipe.max_steps, recipe.num_train_epochs) == length


def test_a_text_of_the_command_line_replaces_all_that_the_recipe_says_of_its_own(write):
    theirs = {"dataset_name": "a/b", "dataset_config_name": "c", "dataset_split": "d", "license": "odc-by"}
    names = (*theirs, "data_files")
    _, values = load_recipe([write(**theirs, max_steps=1), "--data-files", "mine.txt", "--license", "mit"])
    assert [values[name] for name in names] == [None, None, "train", "mit", ["mine.txt"]]
    _, values = load_recipe([write(**theirs, max_steps=1), "--dataset-name", "e/f"])
    assert [values[name] for name in names] == ["e/f", None, "train", None, []]


def test_a_process_drives_one_gpu(write, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    recipe, _ = load_recipe([write(tokens="16K", per_device_train_batch_size=4)])
    assert (recipe.train_batch_size, recipe.max_steps) == (4, 16)


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
def test_a_constant_rate_has_no_options(write, schedule):
    recipe, _ = load_recipe([write(max_steps=1, lr_scheduler_type=schedule, lr_scheduler_kwargs={"nonsense": 3})])
    with pytest.raises(UserError, match="lr_scheduler_kwargs has no effect on a constant rate"):
        check_training(recipe, load_config(recipe))


@pytest.mark.parametrize(("seeds", "order"), [({}, 42), ({"data_seed": 0}, 0), ({"data_seed": 7, "seed": 3}, 7)])
def test_the_seed_of_the_text_may_be_0(write, seeds, order):
    assert load_recipe([write(max_steps=1, **seeds)])[0].order_seed == order


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_constant_rate_leaves_warmup_out(write, warmup, capsys):
    recipe, _ = load_recipe([write(max_steps=9, lr_scheduler_type="constant", warmup_steps=warmup)])
    check_training(recipe, load_config(recipe))
    assert ("constant_with_warmup takes them" in capsys.readouterr().err) == bool(warmup)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"num_decay_steps": -1}, "num_decay_steps is -1; it must be"),
        ({"num_decay_steps": 10}, "warmup_steps and num_decay_steps are 0 and 10, and the run has 9 steps"),
        ({"num_decay_steps": "a"}, "num_decay_steps is 'a'; it must be"),
        ({"num_stable_steps": 3}, "num_stable_steps has no effect here"),
    ],
)
def test_wrong_decays(write, schedule, message):
    options = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": schedule, "max_steps": 9}
    recipe, _ = load_recipe([write(**options)])
    with pytest.raises(UserError, match=message):
        check_training(recipe, load_config(recipe))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "tiny-gqb"}, r"no model preset named 'tiny-gqb' \(did you mean tiny-gqa\?\)"),
        ({"preset": ""}, "no model preset named ''; there are base-124m-gqa"),
        ({"model_overrides": {"hidden_sizes": 3}}, r"unknown field hidden_sizes \(did you mean hidden_size\?\)"),
        ({"model_overrides": {"num_attention_heads": 7}}, "model tiny-gqa: .*num_attention_heads"),
    ],
)
def test_wrong_model(write, values, message):
    recipe, _ = load_recipe([write(**values)])
    with pytest.raises(UserError, match=message):
        load_config(recipe)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_both_names_of_checkpointing(write, name):
    for values, options in (({name: True}, []), ({}, [f"--{name}=true"]), ({}, [f"--{name}"])):
        recipe, _ = load_recipe([write(**values), *options])
        assert recipe.gradient_checkpointing is True


@pytest.mark.parametrize("name", preset_names())
def test_preset(name, write):
    config = load_config(load_recipe([write(preset=name)])[0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    low, high = {"base-124m": (120e6, 128e6), "base-1b": (1.15e9, 1.2e9)}.get(name.rpartition("-")[0], (1.1e6, 1.5e6))
    assert low < model.num_parameters() < high
    kinds = {config.per_layer_config[i].attention_kind for i in range(config.num_hidden_layers)}
    assert kinds == ({"mha", "mqa", "gqa", "mla"} if "mixed" in name else {name.rpartition("-")[2]})


def test_saved_recipe_loads_again_and_compares(write, tmp_path):
    recipe, values = load_recipe([write(model_overrides={"hidden_size": 64}, warmup_steps=0.1, data_files=["x y"])])
    config = load_config(recipe)
    (tmp_path / "run").mkdir()
    save_recipe(tmp_path / "run", values, config)
    again, again_values = load_recipe([str(tmp_path / "run" / "recipe.yaml")])
    assert {**again_values, "hub_token": None} == {**values, "hub_token": None}
    compare_recipes(again_values, load_config(again))

    _, free = load_recipe(
        [write(model_overrides={"hidden_size": 64}, warmup_steps=0.1, data_files=["x y"]), "--resume"]
    )
    compare_recipes({**free, "save_steps": 3.0, "report_to": "wandb", "model_overrides": '{"hidden_size":64}'}, config)
    with pytest.raises(UserError, match=r"another recipe: learning_rate \(0.003 then, 0.1 now\); resume with the"):
        compare_recipes({**values, "learning_rate": 0.1}, config)
    config.hidden_act = "gelu"
    with pytest.raises(UserError, match=r"model hidden_act \('silu' then, 'gelu' now\)"):
        compare_recipes(values, config)


def test_a_run_does_not_depend_on_where_the_checkout_is(write):
    recipe, _ = load_recipe([write()])
    assert str(CONFIGURATION) not in load_config(recipe).to_json_string(use_diff=False)


@pytest.mark.parametrize("way", ["words", "commas", "list", "text"])
def test_several_trackers(way, write, monkeypatch):
    monkeypatch.setattr(recipes, "get_reporting_integration_callbacks", lambda names: [])
    given = {"list": ["tensorboard", "wandb"], "text": "tensorboard,wandb"}.get(way)
    options = {"words": ["--report-to", "tensorboard", "wandb"], "commas": ["--report-to=tensorboard,wandb"]}.get(way)
    recipe, _ = load_recipe([write(**({"report_to": given} if given else {})), *(options or [])])
    assert recipe.report_to == ["tensorboard", "wandb"]


def test_trackers_write_into_the_folder(tmp_path, monkeypatch):
    """Where the user has said otherwise, there; and what is set for one run is not left to the next."""
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "mine")
    with trackers_in(tmp_path):
        assert Path(os.environ["TENSORBOARD_LOGGING_DIR"]).parent == tmp_path / "runs"
        assert os.environ["WANDB_DIR"] == str(tmp_path) and os.environ["TRACKIO_DIR"] == "mine"
    assert "WANDB_DIR" not in os.environ and os.environ["TRACKIO_DIR"] == "mine"


def test_an_override_that_is_no_field(write):
    """What the configuration takes as a keyword: the share of each head that is rotated."""
    config = load_config(load_recipe([write(model_overrides={"partial_rotary_factor": 0.5})])[0])
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


def test_nothing_to_resume(write):
    recipe, values = load_recipe([write(), "--resume"])
    with pytest.raises(UserError, match="nothing to resume"):
        compare_recipes(values, load_config(recipe))
