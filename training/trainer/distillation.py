"""Losses that compare a converted model, the student, with the model that it was converted from, the teacher.

Stage 1 compares the attention outputs of every layer, stage 2 the predictions.
Shapes: B batch, T tokens, E hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, pad
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from modeling_gqa.conversion.text.calibration import hooks

# Number of the teacher's logits, and of float32 copies of the student's, that are in memory at a time.
LOGITS_AT_ONCE = 2**25


def is_trained(name: str, trainable: str) -> bool:
    """Return whether a parameter is trained: those of the attention (`trainable="attention"`) or all (`"all"`)."""
    return trainable == "all" or ".self_attn." in name


def choose_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Let gradients change the parameters that are trained; see `is_trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trainable))


@torch.no_grad()
def run_teacher(teacher: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the input and output of every layer's attention, each (B, T, E)."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(attention: nn.Module, arguments: tuple, output: tuple) -> None:
        seen.append((arguments[0], output[0]))

    with hooks(*[layer.self_attn.register_forward_hook(see) for layer in teacher.model.layers]):
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

    handles = [student.register_forward_hook(answer), *compare_layers(student, seen, losses)]
    with hooks(*handles), no_checkpointing(student):
        return model(**model_inputs(inputs), logits_to_keep=1)["loss"]


def compare_layers(
    student: PreTrainedModel, seen: list[tuple[torch.Tensor, torch.Tensor]], losses: list[torch.Tensor]
) -> Iterator[RemovableHandle]:
    """Register the hooks by which a forward of the student appends the error of each layer to `losses`.

    Yields:
        The handles that remove the hooks.
    """

    def feed(source: torch.Tensor, attention: nn.Module, arguments: tuple) -> tuple:
        return (source, *arguments[1:])

    def compare(target: torch.Tensor, attention: nn.Module, arguments: tuple, output: tuple) -> tuple:
        losses.append(relative_error(output[0], target))
        # This loss does not train what follows, which therefore needs no graph.
        return (target, *output[1:])

    def take_no_tokens(mlp: nn.Module, arguments: tuple) -> tuple:
        return (arguments[0][:, :0], *arguments[1:])

    def add_nothing(target: torch.Tensor, mlp: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        return target.new_zeros(()).expand_as(target)

    for layer, (source, target) in zip(student.model.layers, seen, strict=True):
        yield layer.self_attn.register_forward_pre_hook(partial(feed, source))
        yield layer.self_attn.register_forward_hook(partial(compare, target))
        # The next layer is given the teacher's input, and not the result of this MLP.
        yield layer.mlp.register_forward_pre_hook(take_no_tokens)
        yield layer.mlp.register_forward_hook(partial(add_nothing, target))


@contextmanager
def no_checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Switch activation checkpointing off: it would compute a layer again without its hooks, and get another graph."""
    before = [layer.gradient_checkpointing for layer in model.model.layers]
    try:
        for layer in model.model.layers:
            layer.gradient_checkpointing = False
        yield
    finally:
        for layer, value in zip(model.model.layers, before, strict=True):
            layer.gradient_checkpointing = value


def prediction_losses(
    logits: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_head: nn.Module,
    labels: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return three sums over the predicted tokens: next-token loss, KL(teacher || student), and the teacher's loss.

    Args:
        logits: the student's (B, T, V).
        teacher_states: (B, T, E), of which `teacher_head` makes logits, a part of the tokens at a time.
        labels: (B, T), shifted here; -100 at the start of a document, which the text before does not predict.
        temperature: both logits are divided by it for the KL, which is multiplied by its square (1503.02531).
    """
    targets = pad(labels[:, 1:], (0, 1), value=-100).flatten()  # (B T,)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    sums = partial(token_sums, teacher_head, temperature)
    total = torch.zeros(3, device=logits.device)
    parts = (x.split(rows) for x in (logits.flatten(0, 1), teacher_states.flatten(0, 1), targets))
    for part in zip(*parts, strict=True):
        # Each part's softmaxes are computed again in the backward pass and never exist together.
        total = total + checkpoint(sums, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def token_sums(
    head: nn.Module, temperature: float, logits: torch.Tensor, teacher_states: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the three sums of `prediction_losses` for n tokens: logits (n, V), states (n, E), targets (n,)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.no_grad():
        teacher_logits = head(teacher_states).to(dtype)  # (n, V)
    logits = logits.to(dtype)  # (n, V)
    loss, teacher_loss = (
        cross_entropy(x, targets, ignore_index=-100, reduction="sum") for x in (logits, teacher_logits)
    )
    student, teacher = (log_softmax(x / temperature, dim=-1) for x in (logits, teacher_logits))
    kl = kl_div(student, teacher, log_target=True, reduction="none").sum(-1)[targets != -100].sum()
    return torch.stack([loss, kl * temperature**2, teacher_loss])
