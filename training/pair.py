"""The two models of an uptraining run: the student, and the teacher that it was converted from."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_gqa.common.errors import ConversionError
from modeling_gqa.conversion.checkpoints.checkpoint import load_source
from modeling_gqa.conversion.checkpoints.files import local_folder

from .errors import RecipeError
from .recipe.uptraining import UptrainRecipe
from .text.tokenizer import load_tokenizer

MUST_MATCH = ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "sliding_window")


def load_pair(recipe: UptrainRecipe) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load student and teacher; the teacher is `None` where the recipe names none.

    Raises:
        RecipeError: a model cannot be loaded, or the student is not a conversion of the teacher.
    """
    if recipe.teacher is None:
        return load_model("student", recipe.student, recipe), None
    if recipe.n_gpu > 1:
        raise RecipeError("one process drives one GPU: start it with torchrun, or set CUDA_VISIBLE_DEVICES")
    if Path(recipe.student).resolve() == Path(recipe.teacher).resolve():
        raise RecipeError(
            f"student and teacher are the same model, {recipe.student}; set teacher none to train it alone"
        )
    student = load_model("student", recipe.student, recipe)
    teacher = load_model("teacher", recipe.teacher, recipe)
    check_pair(student.config, teacher.config)
    return student, teacher


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
    """Raise `RecipeError` where the student cannot be a conversion of the teacher: a field in `MUST_MATCH` differs."""
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
