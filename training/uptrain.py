"""Uptrain a converted model, which heals what the conversion broke.

    python -m training.uptrain configuration/recipes/uptrain-tiny.yaml --student runs/converted [--field value ...]

The *student* is the converted model, the *teacher* the model that it was converted from. Stage 1 regresses every
layer's attention output on the teacher's, given the teacher's input; stage 2 trains on the KL divergence from the
teacher's predictions and on the next-token loss. Without a teacher it is the uptraining of the GQA paper (2305.13245).

Every field of `training.uptrain_recipe.UptrainRecipe`, and of the recipes of `training.pretrain`, can be set in the
recipe and on the command line; text, run folder, `--resume` and the result are as in pretraining.
"""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from modeling_gqa.common.errors import ConversionError
from modeling_gqa.conversion.checkpoints.checkpoint import load_source
from modeling_gqa.conversion.checkpoints.files import local_folder

from .console import main
from .distillation import UptrainTrainer
from .recipe import RecipeError, check_length, load_recipe, public_name
from .results import train
from .run import check_training, open_run
from .tokenizer import load_tokenizer
from .uptrain_recipe import UptrainRecipe

MUST_MATCH = ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "sliding_window")


def load_model(role: str, name: str, recipe: UptrainRecipe) -> PreTrainedModel:
    """Load a model with float32 weights, as pretraining has them; raises `RecipeError`."""
    try:
        model = load_source(name, dtype=torch.float32)
    except (ConversionError, OSError, ValueError) as error:
        raise RecipeError(f"cannot load the {role} {name}: {error}") from error
    if recipe.attn_implementation:
        try:
            model.set_attn_implementation(recipe.attn_implementation)
        except (ValueError, ImportError) as error:
            raise RecipeError(f"attn_implementation {recipe.attn_implementation}: {error}") from error
    return model


def check_pair(student: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    """Raise `RecipeError` where one cannot be a conversion of the other."""
    for name in MUST_MATCH:
        ours, theirs = getattr(student, name), getattr(teacher, name)
        if ours != theirs:
            raise RecipeError(f"the student's {name} is {ours} and the teacher's is {theirs}: not a conversion of it")


def check_tokenizers(recipe: UptrainRecipe, config: PreTrainedConfig) -> None:
    """Raise `RecipeError` unless the tokenizer is the one that student and teacher were trained with."""
    name = recipe.tokenizer or recipe.student
    tokenizer = load_tokenizer(name)
    if len(tokenizer) > config.vocab_size:
        raise RecipeError(
            f"the tokenizer {name} has {len(tokenizer)} tokens and the student's vocab_size is {config.vocab_size};"
            " give the one that it was trained with"
        )
    if recipe.teacher and has_tokenizer(recipe.teacher):
        vocabulary = load_tokenizer(recipe.teacher).get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise RecipeError(
                f"the tokenizer {name} is not the teacher's: {len(tokenizer)} and {len(vocabulary)} tokens, or others"
            )


def has_tokenizer(name: str) -> bool:
    return any(local_folder(name).glob("tokenizer*"))


def uptrain(argv: list[str]) -> None:
    recipe, values = load_recipe(argv, UptrainRecipe)
    if recipe.teacher and recipe.n_gpu > 1:
        raise RecipeError("one process drives one GPU: start it with torchrun, or set CUDA_VISIBLE_DEVICES")
    if recipe.teacher and Path(recipe.student).resolve() == Path(recipe.teacher).resolve():
        raise RecipeError(
            f"student and teacher are the same model, {recipe.student}; set teacher none to train it alone"
        )
    student = load_model("student", recipe.student, recipe)
    teacher = load_model("teacher", recipe.teacher, recipe) if recipe.teacher else None
    if teacher is not None:
        check_pair(student.config, teacher.config)
    check_tokenizers(recipe, student.config)
    check_length(recipe, student.config)
    check_training(recipe, student.config)
    recipe.tokenizer = recipe.tokenizer or recipe.student
    models = {"student": recipe.student} | ({"teacher": recipe.teacher} if recipe.teacher else {})
    with open_run(recipe, values, student.config, models) as run:
        set_seed(recipe.seed)
        trainer = UptrainTrainer(student, recipe, teacher, **run.for_trainer)
        train(trainer, run, public_name(recipe.student))


if __name__ == "__main__":
    main(uptrain)
