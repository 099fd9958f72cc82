"""What is refused before a run reads its text or writes a file."""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import get_token
from transformers import AutoModelForCausalLM, PreTrainedConfig, Trainer
from transformers.optimization import get_scheduler

from modeling_gqa.common.files import is_in

from .errors import RecipeError

if TYPE_CHECKING:
    from .recipe import Recipe


def check_length(recipe: "Recipe", config: PreTrainedConfig) -> None:
    """Raise `RecipeError` where a block has more tokens than the model has positions."""
    if recipe.sequence_length > config.max_position_embeddings:
        raise RecipeError(
            f"sequence_length is {recipe.sequence_length}, and the model's max_position_embeddings is "
            f"{config.max_position_embeddings}; make the one smaller or the other larger"
        )


def check_training(recipe: "Recipe", config: PreTrainedConfig) -> None:
    """Raise `RecipeError` where the model, the optimizer or the learning rate's schedule cannot be made."""
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
        raise RecipeError(f"this model cannot be trained as the recipe says: {error.__cause__ or error}") from error


def check_upload(recipe: "Recipe") -> None:
    """Raise `RecipeError` where the recipe uploads the result and there is no Hub token."""
    if recipe.push_to_hub and not (recipe.hub_token or get_token()):
        raise RecipeError("push_to_hub needs a Hub token: run `hf auth login` first, or set HF_TOKEN")


def check_overlap(recipe: "Recipe") -> None:
    """Raise `RecipeError` where output_dir lies in a folder that the run reads, or that folder in output_dir."""
    output = Path(recipe.output_dir).resolve()
    for what, name in recipe.inputs():
        path = Path(name).expanduser()
        # A Hub name is no path here; of a pattern, the folder that it searches or the files that it matches are meant.
        matched = [] if os.path.exists(path) else glob.glob(str(path), recursive=True)
        paths = [Path(found) for found in matched if os.path.isfile(found)] if matched else [path]
        if "**" in path.parts:
            paths.append(Path(*path.parts[: path.parts.index("**")]))
        for path in (path.resolve() for path in paths):
            if is_in(output, path) or is_in(path, output):
                raise RecipeError(
                    f"output_dir {recipe.output_dir} overlaps the {what} {name}: neither may lie in the other; choose "
                    "another output_dir"
                )
