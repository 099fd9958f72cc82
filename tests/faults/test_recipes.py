"""Recipes drawn at random: refused in one line, or such that training can begin."""

import json
import os
from dataclasses import fields

import pytest
import yaml
from broken_runs import RECIPE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeling_gqa.training.recipe import Recipe, load_recipe
from modeling_gqa.training.recipe_model import check_training, load_config
from modeling_gqa_cli.errors import UserError

# What reads files or would start something outside of this process.
LEFT_OUT = {
    "data_files", "output_dir", "deepspeed", "fsdp", "fsdp_config", "local_rank", "parallelism_config", "ddp_backend",
    "debug", "tokenizer", "dataset_name", "disable_tqdm",
}  # fmt: skip
NAMES = sorted({item.name for item in fields(Recipe) if item.init} - LEFT_OUT)
VALUES = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, 10**30, -(10**30)]),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "no", "steps", "epoch", "best", "cosine", "sdpa", "eager", "none", "absent", "{}", "[", "\n"]),
    st.none(),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(
        st.sampled_from(["hidden_size", "vocab_size", "absent", "num_cycles"]), st.integers(-2, 64), max_size=2
    ),
)


def load(argv: list[str]) -> Recipe:
    recipe, _ = load_recipe(argv)
    check_training(recipe, load_config(recipe))
    return recipe


@settings(
    max_examples=60 * int(os.environ["FAULTS_ROUNDS"]),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3))
def test_recipes(tmp_path, changes):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(tmp_path / "run"), **changes}))
    try:
        recipe = load([str(path)])
    except UserError as error:
        said = str(error)
        assert "\n" not in said and len(said) > 10
        return
    assert recipe.per_device_train_batch_size >= 1 and recipe.sequence_length >= 2
    json.dumps(recipe.to_sanitized_dict(), default=str)


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "--per_device_eval_batch_size 0": "per_device_eval_batch_size is 0; it must be at least 1",
        "--per_device_train_batch_size 0": "per_device_train_batch_size is 0; it must be at least 1",
        "--gradient_accumulation_steps 0": "gradient_accumulation_steps is 0; it must be at least 1",
        "--prediction_loss_only True": "prediction_loss_only has no effect here: ",
        "--batch_eval_metrics True": "batch_eval_metrics has no effect here: ",
        "--save_only_model True": "save_only_model has no effect here: --resume needs all of a checkpoint",
        "--bf16_full_eval True": "bf16_full_eval has no effect here: it would round the weights",
        "--neftune_noise_alpha=-1": "neftune_noise_alpha is -1.0; it must be at least 0",
        "--dataloader_num_workers 1 --dataloader_prefetch_factor=-1": "dataloader_prefetch_factor is -1; it must be",
        "--torch_compile_backend absent": "torch_compile_backend is absent; there are ",
        "--fsdp full_shard": "there is one: start it with torchrun",
        "--learning_rate nan": "learning_rate is nan; it must be a finite number",
        "--learning_rate=-1e-3": "learning_rate is -0.001; it must be at least 0",
        "--seed -1": "seed is -1; it must be from 0 to 4294967295",
        "--report_to absent": "report_to absent: ",
        "--attn_implementation absent": "cannot be trained as the recipe says: .*absent",
        "--sequence_length 65": "sequence_length is 65, and the model's max_position_embeddings is 64",
        "--streaming --dataloader_num_workers 1": "dataloader_num_workers is 1, and each would stream all of the text",
        "--adam_beta1 1.0": "adam_beta1 is 1.0; it must be at least 0 and below 1",
        "--torch_compile_mode absent": "torch_compile_mode is absent; there are default",
        "--save_strategy best": "save_strategy best has no effect here",
        "--num_train_epochs 0 --max_steps -1": "num_train_epochs is 0.0; it must be positive",
    }.items(),
    ids=lambda value: value.split()[0].strip("-") if value.startswith("--") else "refused",
)
def test_values_are_checked_before_the_run(tmp_path, options, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(tmp_path / "run")}))
    with pytest.raises(UserError, match=message):
        load([str(path), *options.split()])
