"""Student and teacher of an uptraining run: how both are loaded, and the loss of stage 1.

The student is a converted model, the teacher the model that it was converted from. Stage 1 compares the attention
outputs of every layer; stage 2 compares the predictions by `conversion.losses.prediction_losses`.
Shapes: B batch, T tokens, E hidden size.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import local_folder
from ..data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .uptraining import UptrainRecipe

MUST_MATCH = ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "sliding_window")


def is_trained(name: str, trainable: str) -> bool:
    """Return whether a parameter is trained: those of the attention (`trainable="attention"`) or all (`"all"`)."""
    return trainable == "all" or ".self_attn." in name


def choose_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Let gradients change the parameters that are trained; see `is_trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trainable))


# -- Loading


def load_pair(recipe: "UptrainRecipe") -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load student and teacher, which is `None` where the recipe names its logits; raises `UserError`."""
    if recipe.n_gpu > 1:
        raise UserError("one process drives one GPU: start it with torchrun, or set CUDA_VISIBLE_DEVICES")
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
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer {name} has {len(tokenizer)} tokens and the student's vocab_size is {config.vocab_size};"
            " give the one that it was trained with"
        )
    if any(local_folder(recipe.teacher).glob("tokenizer*")):
        vocabulary = load_tokenizer(recipe.teacher).get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise UserError(
                f"the tokenizer {name} is not the teacher's: {len(tokenizer)} and {len(vocabulary)} tokens, or others"
            )


# -- Stage 1


@torch.no_grad()
def run_teacher(teacher: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the input and output of every layer's attention, each (B, T, E)."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def collect(attention: nn.Module, arguments: tuple, output: tuple) -> None:
        seen.append((arguments[0], output[0]))

    with ExitStack() as hooks:
        for layer in teacher.model.layers:
            hooks.enter_context(layer.self_attn.register_forward_hook(collect))
        teacher.model(**model_inputs(inputs))
    return seen


def model_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**{name: tensor for name, tensor in inputs.items() if name != "labels"}, "use_cache": False}


def relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared error over the sum of the squared target, as a scalar.

    Layers with large and with small outputs count the same.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    output, target = output.to(dtype), target.to(dtype)
    return (output - target).square().sum() / target.square().sum().clamp(min=torch.finfo(dtype).tiny)


def layerwise_loss(
    model: nn.Module,
    student: PreTrainedModel,
    seen: list[tuple[torch.Tensor, torch.Tensor]],
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the relative errors of the attention outputs, summed over layers; each layer is given the teacher's input.

    The student's own forward runs, with its rotations, its masks and the wrappers around it. Its MLPs are given no
    tokens, which saves their time.

    Args:
        model: the student as it is trained, for instance wrapped by DDP.
        seen: what `run_teacher` returns for the same `inputs`.
    """
    losses: list[torch.Tensor] = []

    def answer(*_: Any) -> dict[str, torch.Tensor]:
        # DDP looks for the parameters that were used in the result of the forward.
        return {"loss": torch.stack(losses).sum()}

    with ExitStack() as hooks:
        hooks.enter_context(student.register_forward_hook(answer))
        for layer, (source, target) in zip(student.model.layers, seen, strict=True):
            # Checkpointing would compute a layer again without its hooks, and get another graph.
            hooks.callback(setattr, layer, "gradient_checkpointing", layer.gradient_checkpointing)
            layer.gradient_checkpointing = False
            regress_layer(layer, source, target, losses, hooks)
        return model(**model_inputs(inputs), logits_to_keep=1)["loss"]


def regress_layer(
    layer: Any, source: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor], hooks: ExitStack
) -> None:
    """Register hooks: the attention reads `source`, the teacher's input, and appends its error to the teacher's output.

    Both are (B, T, E).
    """

    def feed(attention: nn.Module, arguments: tuple) -> tuple:
        return (source, *arguments[1:])

    def measure(attention: nn.Module, arguments: tuple, output: tuple) -> tuple:
        losses.append(relative_error(output[0], target))
        # This loss does not train what follows, which therefore needs no graph.
        return (target, *output[1:])

    def take_no_tokens(mlp: nn.Module, arguments: tuple) -> tuple:
        return (arguments[0][:, :0], *arguments[1:])

    def add_nothing(mlp: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        return target.new_zeros(()).expand_as(target)

    hooks.enter_context(layer.self_attn.register_forward_pre_hook(feed))
    hooks.enter_context(layer.self_attn.register_forward_hook(measure))
    # The next layer is given the teacher's input, and not the result of this MLP.
    hooks.enter_context(layer.mlp.register_forward_pre_hook(take_no_tokens))
    hooks.enter_context(layer.mlp.register_forward_hook(add_nothing))
