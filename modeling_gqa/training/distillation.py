"""Student and teacher of an uptraining run, and how both are loaded.

The student is a converted model, the teacher the model that it was converted from.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import local_folder
from ..data.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from .uptraining import UptrainRecipe

MUST_MATCH = ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "sliding_window")


def is_trained(name: str, trainable: str) -> bool:
    """Return whether a parameter is trained: those of the attention (`trainable="attention"`) or all (`"all"`)."""
    return trainable == "all" or ".self_attn." in name


def model_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**{name: tensor for name, tensor in inputs.items() if name != "labels"}, "use_cache": False}


def choose_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Let gradients change the parameters that are trained; see `is_trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trainable))


# -- Loading


def load_pair(recipe: "UptrainRecipe") -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load student and teacher, which is `None` where the recipe names its logits; raises `UserError`."""
    if Path(recipe.student).resolve() == Path(recipe.teacher).resolve():
        raise UserError(f"student and teacher are the same model, {recipe.student}: name the one that it was made from")
    student = load_model("student", recipe.student, recipe, recipe.trainable)
    if recipe.teacher_logits:
        recipe.check_models()
        check_pair(student.config, open_checkpoint(recipe.teacher, companions=False).config)
        return student, None
    teacher = load_model("teacher", recipe.teacher, recipe)
    check_pair(student.config, teacher.config)
    if not recipe.fsdp:  # which cuts each model's parameters into pieces of its own
        share_parameters(student, teacher, recipe.trainable)
    return student, teacher


def load_model(role: str, name: str, recipe: "UptrainRecipe", trainable: str | None = None) -> PreTrainedModel:
    """Load a model: parameters that are trained in float32, and the matrices that stay as they are in `frozen_dtype`.

    Raises `UserError` where it cannot be loaded. Without `trainable` (see `is_trained`) nothing of it is trained.
    """
    try:
        checkpoint = open_checkpoint(name, companions=False)
        dtype = frozen_dtype(recipe, checkpoint.dtype)
        model = checkpoint.load(dtype)
    except (UserError, OSError, ValueError) as error:
        raise UserError(f"cannot load the {role} {name}: {error}") from error
    if recipe.attn_implementation:
        try:
            model.set_attn_implementation(recipe.attn_implementation)
        except (ValueError, ImportError) as error:
            raise UserError(f"attn_implementation {recipe.attn_implementation}: {error}") from error
    for parameter_name, parameter in model.named_parameters():
        # Norms and biases are small, and a norm computes in the dtype of its weight.
        if parameter.ndim == 1 or (trainable and is_trained(parameter_name, trainable)):
            parameter.data = parameter.data.float()
    if dtype != torch.float32:
        model.get_input_embeddings().register_forward_hook(in_float32)
    return model


def frozen_dtype(recipe: "UptrainRecipe", stored: torch.dtype) -> torch.dtype:
    """Return the dtype of weights that are not trained, of a checkpoint in the dtype `stored`.

    It is `stored` where autocast computes in it, which rounds no further, and float32 elsewhere.
    """
    computed = torch.bfloat16 if recipe.bf16 else torch.float16 if recipe.fp16 else torch.float32
    return stored if stored == computed and not recipe.fsdp else torch.float32


def in_float32(embedding: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
    """Keep the sum of the layers' outputs in float32, as it is where the embedding's weight is."""
    return output.float()


def share_parameters(student: PreTrainedModel, teacher: PreTrainedModel, trainable: str) -> None:
    """Give the teacher the student's own parameter wherever both are equal and it is not trained."""
    theirs = dict(student.named_parameters(remove_duplicate=False))
    for name, parameter in list(teacher.named_parameters(remove_duplicate=False)):
        ours = theirs.get(name)
        if ours is None or is_trained(name, trainable) or ours.dtype != parameter.dtype:
            continue
        if ours.shape == parameter.shape and torch.equal(ours, parameter):
            module, _, kind = name.rpartition(".")
            # Not its storage alone: a move to a GPU would make two of it.
            setattr(teacher.get_submodule(module), kind, ours)


def check_pair(student: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    """Raise `UserError` where the student cannot be a conversion of the teacher: a field in `MUST_MATCH` differs."""
    for name in MUST_MATCH:
        ours, theirs = getattr(student, name), getattr(teacher, name)
        if ours != theirs:
            raise UserError(f"the student's {name} is {ours} and the teacher's is {theirs}: not a conversion of it")


def check_tokenizers(recipe: "UptrainRecipe", config: PreTrainedConfig) -> None:
    """Raise `UserError` unless the tokenizer is the one that student and teacher were trained with."""
    name = recipe.tokenizer or recipe.student
    tokenizer = load_tokenizer(name)
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UserError(
            f"the tokenizer {name} has {size} tokens and the student's vocab_size is {config.vocab_size}; give the one "
            "that it was trained with"
        )
    if any(local_folder(recipe.teacher).glob("tokenizer*")):
        vocabulary = load_tokenizer(recipe.teacher).get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise UserError(
                f"the tokenizer {name} is not the teacher's: {len(tokenizer)} and {len(vocabulary)} tokens, or others"
            )
