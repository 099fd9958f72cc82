"""The model that a recipe names: its configuration, and whether it can be trained as the recipe says."""

import json
from dataclasses import fields

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Trainer
from transformers.optimization import get_scheduler

from modeling_gqa_cli.recipes import preset_folder, preset_names

from ...common.errors import UserError, did_you_mean
from ..console import warn
from .pretraining import Recipe

# Files that hold weights.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.gguf")


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """Build the model's configuration from the recipe's preset and overrides.

    Raises:
        UserError: no such preset, an unknown field in the overrides, a value that the model refuses, or blocks that
            are longer than the model's positions.
    """
    path = preset_folder(recipe.preset) / "config.json"
    if not recipe.preset or not path.is_file():
        names = preset_names()
        hint = did_you_mean(recipe.preset, names) or f"; there are {', '.join(names)}"
        raise UserError(f"no model preset named {recipe.preset!r}{hint}")
    values = json.loads(path.read_text(encoding="utf-8"))
    overrides = recipe.model_overrides or {}
    if not isinstance(overrides, dict):
        raise UserError(f"model_overrides must be a JSON object, not {overrides!r}")
    config_class = type(AutoConfig.for_model(values["model_type"]))
    known = {item.name for item in fields(config_class)}
    for key in overrides:
        if key not in known | {"per_layer_config"}:
            raise UserError(f"model_overrides: unknown field {key}{did_you_mean(key, known)}")
    try:
        # Not from_pretrained, which would write this machine's path into the run and refuse to resume it elsewhere.
        config = config_class.from_dict(values, **overrides)
    except Exception as error:  # strict configurations wrap what was wrong in classes of their own
        raise UserError(f"model preset {recipe.preset}: {error.__cause__ or error}") from error
    check_length(recipe, config)
    return config


def warn_of_weights(recipe: Recipe) -> None:
    """Print a warning where the preset is the folder of a trained model, whose weights are not read."""
    folder = preset_folder(recipe.preset)
    if any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        warn(
            f"preset {recipe.preset} holds weights, which are not read: it gives the configuration alone, and training "
            f"starts from random weights. To train these further: uptrain uptrain-tiny --student {recipe.preset} "
            "--teacher none --trainable all --max-steps N"
        )


def check_length(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise `UserError` where a block has more tokens than the model has positions."""
    if recipe.sequence_length > config.max_position_embeddings:
        raise UserError(
            f"sequence_length is {recipe.sequence_length}, and the model's max_position_embeddings is "
            f"{config.max_position_embeddings}; make the one smaller or the other larger"
        )


def shorten_warmup(recipe: Recipe, steps: int) -> None:
    """Set `warmup_steps` to a tenth of a run of `steps` steps, with a warning, where it is a half of them or more.

    A recipe's number of steps suits the recipe's own length. A share of the run, a number below 1, is left as it is.
    """
    if recipe.warmup_steps < 1 or 2 * recipe.warmup_steps < steps:
        return
    shorter = steps // 10
    warn(
        f"warmup_steps is {recipe.warmup_steps:g}, and this run has {steps:,} steps: it takes {shorter:,}; set "
        "warmup_steps to choose, such as 0.1 for a tenth"
    )
    recipe.warmup_steps = shorter


def check_training(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise `UserError` where the model, the optimizer or the learning rate's schedule cannot be made.

    A warm-up that is too long for the run is shortened.
    """
    if recipe.max_steps > 0:
        shorten_warmup(recipe, recipe.max_steps)
    kwargs = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    steps = max(recipe.max_steps, 1)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kwargs)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class([torch.zeros(1, 1, requires_grad=True)], **options)
        get_scheduler(
            recipe.lr_scheduler_type,
            optimizer,
            num_warmup_steps=recipe.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=recipe.lr_scheduler_kwargs or None,  # type: ignore[arg-type]
        )
    except Exception as error:  # each optimizer, schedule and attention implementation has its own classes
        raise UserError(f"this model cannot be trained as the recipe says: {error.__cause__ or error}") from error
