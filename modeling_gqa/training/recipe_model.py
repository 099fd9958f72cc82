"""The model that a recipe names, checked before anything is written: configuration, first weights, and steps."""

import json
import math
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, SchedulerType, Trainer
from transformers.optimization import get_scheduler

from modeling_gqa_cli.errors import UserError, did_you_mean
from modeling_gqa_cli.recipes import preset_folder, preset_names

from ..common.console import warn
from .recipe import Recipe, as_object

# Files that hold weights.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.gguf")
DECAY_SHARE = 0.2  # of a run of warmup_stable_decay


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """Build the model's configuration from the recipe's preset, or its trained model, and overrides.

    Raises:
        UserError: no such preset or model, an unknown field, a value that the model refuses, or too few positions.
    """
    if recipe.init_from:
        from ..checkpoints.checkpoint import open_checkpoint

        recipe.check_models()
        values = open_checkpoint(recipe.init_from, companions=False).config.to_dict()
    else:
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
    # The last two are no fields, but the configuration takes them.
    known = {*(item.name for item in fields(config_class)), "per_layer_config", "partial_rotary_factor"}
    for key in overrides:
        if key not in known:
            raise UserError(f"model_overrides: unknown field {key}{did_you_mean(key, known)}")
    try:
        # Not from_pretrained, which would write this machine's path into the run and refuse to resume it elsewhere.
        config = config_class.from_dict(values, **overrides)
    except Exception as error:  # strict configurations wrap what was wrong in classes of their own
        raise UserError(f"model {recipe.model_name}: {error.__cause__ or error}") from error
    check_length(recipe, config)
    if recipe.init_from and overrides:
        wanted, there = shapes(config), shapes(config_class.from_dict(values))
        if changed := sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)):
            raise UserError(f"with these model_overrides the weights of {recipe.init_from} do not fit: {changed[0]}")
    return config


def shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Return the shapes of a model's weights by their names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied: Any = model.all_tied_weights_keys  # which are another weight
    return {name: x.shape for name, x in model.state_dict().items() if name not in tied}


def new_model(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model that training begins with: random weights, or those of the recipe's trained model."""
    attention = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    # A configuration of trained weights has their dtype, in which small steps would be lost.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
    if recipe.init_from:
        from ..checkpoints.checkpoint import open_checkpoint

        trained: Any = open_checkpoint(recipe.init_from, companions=False).load(torch.float32, "cpu")
        model.load_state_dict(trained.state_dict())
        if recipe.tokenizer in (None, recipe.init_from):  # else they are other tokens
            # Not the rest, which may be such as transformers reads and does not save.
            generation: Any = model.generation_config
            generation.eos_token_id = trained.generation_config.eos_token_id
    return model


def warn_of_weights(recipe: Recipe) -> None:
    """Print a warning where a preset's weights are not read, or the quantization of a trained model's cache is lost."""
    folder = preset_folder(recipe.preset)
    if recipe.preset and any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        warn(
            f"preset {recipe.preset} holds weights, which are not read: it gives the configuration alone, and training "
            f"starts from random weights. To train these further: --init-from {recipe.preset}"
        )
    if recipe.start:
        from ..cache_quantized import rounds_cache
        from ..checkpoints.checkpoint import open_checkpoint

        if rounds_cache(open_checkpoint(recipe.start, companions=False).stock_config):
            warn(
                f"the cache of {recipe.start} is quantized, and that of the result is not, since its weights change: "
                "modeling-gqa quantize-cache quantizes it again"
            )


def check_length(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise `UserError` where a sequence has more tokens than the model has positions."""
    if recipe.sequence_length > config.max_position_embeddings:
        raise UserError(
            f"sequence_length is {recipe.sequence_length}, and the model's max_position_embeddings is "
            f"{config.max_position_embeddings}; make the one smaller or the other larger"
        )


def schedule_options(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return `lr_scheduler_kwargs` for a run of `steps` steps.

    Of warmup_stable_decay `num_decay_steps` may be a share of the run, below 1; it is a fifth where it is not given.
    Raises `ValueError` where it is neither that nor a number of steps.
    """
    options = as_object("lr_scheduler_kwargs", recipe.lr_scheduler_kwargs)
    if options and recipe.lr_scheduler_type in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP):
        raise ValueError("lr_scheduler_kwargs has no effect on a constant rate: leave it out")
    if recipe.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        if "num_stable_steps" in options:
            raise ValueError("num_stable_steps has no effect here: the rate is kept until num_decay_steps from the end")
        decay = options.get("num_decay_steps", DECAY_SHARE)
        if not (isinstance(decay, int | float) and 0 <= decay < math.inf):
            raise ValueError(f"num_decay_steps is {decay!r}; it must be a number of steps, or a share below 1")
        warm = recipe.get_warmup_steps(steps)
        options["num_decay_steps"] = min(math.ceil(decay * steps), max(steps - warm, 0)) if decay < 1 else decay
        if decay >= 1 and recipe.max_steps > 0 and warm + decay > steps:
            raise UserError(
                f"warmup_steps and num_decay_steps are {warm:,} and {decay:,}, and the run has {steps:,} steps: make "
                "one of them smaller, or a share below 1"
            )
    return options


def check_training(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Set the steps of `tokens_per_parameter`, and see that model, optimizer and schedule can be made.

    Raises:
        UserError: one of them cannot be made.
    """
    kwargs = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kwargs)
        if recipe.tokens_per_parameter:
            recipe.set_steps(recipe.tokens_per_parameter * model.num_parameters())
        steps = max(recipe.max_steps, 1)
        if recipe.lr_scheduler_type == SchedulerType.CONSTANT and recipe.get_warmup_steps(steps):
            warn("lr_scheduler_type constant leaves warmup_steps out: constant_with_warmup takes them")
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class([torch.zeros(1, 1, requires_grad=True)], **options)
        get_scheduler(
            recipe.lr_scheduler_type,
            optimizer,
            num_warmup_steps=recipe.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=schedule_options(recipe, steps) or None,  # type: ignore[arg-type]
        )
    except Exception as error:  # each optimizer, schedule and attention implementation has its own classes
        raise UserError(f"this model cannot be trained as the recipe says: {error.__cause__ or error}") from error
