"""Student and teacher of an uptraining run: how both are loaded, and the losses that compare them.

The student is a converted model, the teacher the model that it was converted from. Stage 1 compares the attention
outputs of every layer, stage 2 the predictions. Shapes: B batch, T tokens, E hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import local_folder
from ..data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .uptraining import UptrainRecipe

MUST_MATCH = ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "sliding_window")
# Number of the teacher's logits, and of float32 copies of the student's, that are in memory at a time.
LOGITS_AT_ONCE = 2**25


def is_trained(name: str, trainable: str) -> bool:
    """Return whether a parameter is trained: those of the attention (`trainable="attention"`) or all (`"all"`)."""
    return trainable == "all" or ".self_attn." in name


def choose_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Let gradients change the parameters that are trained; see `is_trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trainable))


# -- Loading


def load_pair(recipe: "UptrainRecipe") -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load student and teacher, which is `None` where the recipe names none; raises `UserError`."""
    if recipe.teacher is None:
        return load_model("student", recipe.student, recipe, recipe.trainable), None
    if recipe.n_gpu > 1:
        raise UserError("one process drives one GPU: start it with torchrun, or set CUDA_VISIBLE_DEVICES")
    if Path(recipe.student).resolve() == Path(recipe.teacher).resolve():
        raise UserError(f"student and teacher are the same model, {recipe.student}; set teacher none to train it alone")
    student = load_model("student", recipe.student, recipe, recipe.trainable)
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
    if recipe.teacher and any(local_folder(recipe.teacher).glob("tokenizer*")):
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


# -- Stage 2


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
    # On a CPU, parts that stay in its caches take half the time.
    tokens = max(1, LOGITS_AT_ONCE // (4 if logits.device.type == "cpu" else 1) // logits.shape[-1])
    return PredictionSums.apply(
        logits.flatten(0, 1), teacher_states.flatten(0, 1), targets, teacher_head, temperature, tokens
    )


class PredictionSums(torch.autograd.Function):
    """The three sums of `prediction_losses`, and the gradient of the first two by the logits.

    With s and t the logits of student and teacher, and y the next token, the sums are of log sum exp s - s_y, of
    KL(p || q) for p = softmax(t / temperature) and q = softmax(s / temperature), and of log sum exp t - t_y. The
    gradient by s of the first is softmax(s) - onehot(y), that of the second, times temperature^2, is
    temperature * (q - p). The softmaxes of a part of the tokens are computed in the forward pass and again in the
    backward pass, from their normalizers, and never exist together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        states: torch.Tensor,
        targets: torch.Tensor,
        head: nn.Module,
        temperature: float,
        part: int,
    ) -> torch.Tensor:
        """Return the sums of n tokens: logits (n, V), states (n, E) of the teacher, targets (n,), `part` at a time."""
        ctx.save_for_backward(logits, states, targets)
        kind = logits.device.type
        autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        ctx.autocast = autocast | {"enabled": torch.is_autocast_enabled(kind)}
        ctx.head, ctx.temperature, ctx.part = head, temperature, part
        ctx.normalizers = []
        total = torch.zeros(3, device=logits.device)
        for student, teacher, target in parts((logits, states, targets), head, part):
            predicted = target >= 0
            chosen = target.clamp(min=0)[:, None]
            losses = [x.logsumexp(-1) - x.gather(1, chosen)[:, 0] for x in (student, teacher)]
            if temperature != 1:
                student, teacher = student / temperature, teacher / temperature
            ours, theirs = (x.logsumexp(-1, keepdim=True) for x in (student, teacher))
            weights = torch.sub(teacher, theirs).exp_()
            # The logits' difference first: its weighted sum is small where the models agree.
            kl = weights.mul_(teacher.sub_(student)).sum(-1) + (ours - theirs)[:, 0]
            sums = (losses[0], kl * temperature**2, losses[1])
            total = total + torch.stack([x[predicted].sum() for x in sums])
            ctx.normalizers.append((ours, theirs))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradient by the logits; `gradient` (3,) is that by the sums."""
        of_loss, of_kl, _ = gradient.tolist()
        of_kl *= ctx.temperature
        result = torch.empty_like(ctx.saved_tensors[0])
        with torch.autocast(**ctx.autocast), torch.no_grad():
            read = parts(ctx.saved_tensors, ctx.head, ctx.part)
            found = zip(result.split(ctx.part), read, ctx.normalizers, strict=True)
            for place, (student, teacher, target), (ours, theirs) in found:
                chosen = target.clamp(min=0)[:, None]
                if ctx.temperature == 1:
                    change = torch.sub(student, ours).exp_().mul_(of_loss + of_kl)
                else:
                    change = student.softmax(-1).mul_(of_loss)
                    change.add_(torch.sub(student / ctx.temperature, ours).exp_(), alpha=of_kl)
                change.sub_((teacher / ctx.temperature).sub_(theirs).exp_(), alpha=of_kl)
                change.scatter_add_(1, chosen, torch.full_like(ours, -of_loss))
                place.copy_(change.mul_((target >= 0)[:, None]))
        return result, None, None, None, None, None


def parts(
    tensors: tuple[torch.Tensor, ...], head: nn.Module, part: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield both models' logits (n, V), in at least float32, and the targets (n,), of n = `part` tokens at a time.

    `tensors` are the student's logits, the teacher's states, of which `head` makes its logits, and the targets.
    """
    for logits, states, targets in zip(*(x.split(part) for x in tensors), strict=True):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        yield logits.to(dtype), head(states).to(dtype), targets
