"""The last step of a conversion: its new attention, trained in all layers at once on the source's predictions.

Layers are converted one by one, each by the error that it leaves in its own stream. Here the loss is the divergence of
the predictions, KL(source || converted), as in knowledge distillation (1503.02531). Text that nothing was fitted to
chooses the learning rate and when to stop, and weights with which its divergence is no less are not kept.
Shapes: B rows, T tokens, E hidden size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..common.batches import Batch, computing_dtype, evaluating, first_batches
from ..common.progress import Progress, ShowProgress, no_progress
from ..modeling_gqa import GQAForCausalLM
from .divergence import last_hidden_state, predicted_positions
from .fitting import pieces
from .losses import prediction_losses
from .streams import scratch

# Learning rates, of which the first is taken that has helped after the first part of a run. Trials of a few steps chose
# a rate that was too small for a whole run, in SmolLM2-135M.
LEARNING_RATES = (1e-3, 3e-4, 1e-4, 3e-5)
JUDGED = 4  # times at most that the text that judges is looked at in a run
JUDGING_TOKENS = 4096  # of it that are looked at, or one batch
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the coefficients of Muon's author
NOT_PREDICTED = -100  # as a label, PyTorch's mark of what no loss counts


class Piece(NamedTuple):
    """Rows of text that a step trains on, or that judge.

    Args:
        inputs: of a model.
        labels: (B, T), the tokens that are predicted; `NOT_PREDICTED` elsewhere.
    """

    inputs: Batch
    labels: torch.Tensor


def polish(
    source: GQAForCausalLM,
    converted: GQAForCausalLM,
    text: Sequence[Batch],
    judges: Sequence[Batch],
    layers: Sequence[int],
    tokens: int,
    show_progress: ShowProgress = no_progress,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Train the attention of `converted`, in place, on the predictions of `source`.

    Args:
        source: the model that was converted; it is not changed.
        converted: the conversion; its other parameters may be those of `source`, and stay.
        text: batches to train on.
        judges: batches of other text, best of what nothing was fitted to; the first `JUDGING_TOKENS` tokens are used.
        layers: indices of the layers whose attention is trained.
        tokens: to train on at most, in passes over `text`.
        show_progress: returns, for a description, what wraps an iterable to show progress.
        seed: of the text's order.

    Returns:
        `learning_rate` that was taken, `None` where no weights were better than before; `tokens` trained on up to the
        weights that were kept; `kl_before` and `kl_after`, in nats per token of `judges`. `None` where nothing is
        predicted in `text` or in `judges`: then nothing is done.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import convert_model, target_config
        from modeling_gqa.conversion.polish import polish

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        text, judges = ([{"input_ids": torch.randint(64, (4, 16))}] for _ in range(2))
        converted, _ = convert_model(model, target_config(model.config, "mqa"), text)
        done = polish(model, converted, text, judges, layers=[0, 1], tokens=1000)
        assert done["kl_after"] <= done["kl_before"]
        ```
    """
    cut_text, cut_judges = (list(cut(x)) for x in (text, first_batches(judges, JUDGING_TOKENS)))
    if not cut_text or not cut_judges:
        return None
    size = sum(count_predicted(piece) for piece in cut_text) / len(cut_text)
    steps = max(int(tokens / size), 1)
    with evaluating(source, converted), scratch(source.device) as states, trained(converted, layers) as parameters:
        with torch.no_grad():
            for number, piece in enumerate([*cut_text, *cut_judges]):
                states[number] = last_hidden_state(source, piece.inputs)
        run = Run(source, converted, cut_text, cut_judges, states, parameters)
        before = best = run.divergence()
        every, kept, weights = math.ceil(steps / JUDGED), 0, run.copy()
        for rate in LEARNING_RATES:
            since = 0
            for step in run.steps(steps, rate, seed, show_progress(f"polishing at a rate of {rate:g}")):
                if (step % every == 0 or step == steps) and (found := run.divergence()) < best:  # which nan is not
                    best, kept, since, weights = found, step, 0, run.copy()
                elif step % every == 0 and (not kept or (since := since + 1) == 2):
                    break
            run.put(weights)
            if kept:
                break
    done = {"tokens": round(kept * size), "kl_before": before, "kl_after": best}
    return {"learning_rate": rate if kept else None, **done}


class Run:
    """A model that is trained on another's predictions.

    Args:
        source, model: the teacher and what is trained.
        text, judges: pieces to train on, and to judge by.
        states: the teacher's last hidden states (B, T, E) by number of the piece, those of `judges` last.
        parameters: that are trained.
    """

    def __init__(
        self,
        source: GQAForCausalLM,
        model: GQAForCausalLM,
        text: Sequence[Piece],
        judges: Sequence[Piece],
        states: Mapping[int, torch.Tensor],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        self.source, self.model, self.parameters = source, model, parameters
        self.fitted, self.pieces, self.states = len(text), [*text, *judges], states

    def loss(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the sum over the predicted tokens of a piece of KL(source || model), and their number."""
        device = self.source.device
        half = self.source.dtype != torch.promote_types(self.source.dtype, torch.float32)
        with torch.autocast(device.type, self.source.dtype) if half else nullcontext():
            piece = self.pieces[number]
            inputs = {name: x.to(device) for name, x in piece.inputs.items()}
            logits = self.model(**inputs, use_cache=False).logits
            sums = prediction_losses(logits, self.states[number], self.source.lm_head, piece.labels.to(device))
        return sums[1], count_predicted(piece)

    @torch.no_grad()
    def divergence(self) -> float:
        """Return the mean KL(source || model) over the tokens that judge."""
        sums = [self.loss(number) for number in range(self.fitted, len(self.pieces))]
        return sum(kl.item() for kl, _ in sums) / sum(count for _, count in sums)

    def steps(self, number: int, rate: float, seed: int, progress: Progress = iter) -> Iterator[int]:
        """Make `number` steps, one piece each, at a rate that falls from `rate` to 0 on a line; yields 1, 2, ...

        They are of Muon for matrices and of Adam (1412.6980) for biases and norms.
        """
        order = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        matrices, others = ([x for x in self.parameters if (x.ndim == 2) is wanted] for wanted in (True, False))
        optimizers: list[torch.optim.Optimizer] = [Muon(matrices, rate)]
        if others:
            optimizers.append(torch.optim.Adam(others, rate, betas=(0.9, 0.95)))
        schedules = [torch.optim.lr_scheduler.LinearLR(x, 1.0, 1 / number, number) for x in optimizers]
        for step in progress(range(1, number + 1)):
            if not waiting:
                waiting = torch.randperm(self.fitted, generator=order).tolist()
            with torch.enable_grad():
                kl, count = self.loss(waiting.pop())
                (kl / count).backward()
            for stepped in (*optimizers, *schedules):
                stepped.step()  # type: ignore[attr-defined]
            for parameter in self.parameters:
                parameter.grad = None
            yield step

    def copy(self) -> list[torch.Tensor]:
        """Return copies of the parameters that are trained."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def put(self, weights: list[torch.Tensor]) -> None:
        """Set the parameters that are trained to `weights`."""
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)


class Muon(torch.optim.Optimizer):
    """Momentum of Nesterov, of which each step takes the nearest orthogonal matrix, as large as a step of Adam's.

    It is Muon (https://kellerjordan.github.io/posts/muon, 2502.16982), as torch.optim.Muon with "match_rms_adamw". That
    one multiplies in bfloat16 always, so on a CPU without AVX-512 a step takes minutes.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make a step by the gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                change = orthogonal(matrix.grad.lerp(momentum, MOMENTUM)).to(matrix.dtype)
                matrix.add_(change, alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix whose singular values are equal, by five steps of a Newton-Schulz iteration."""
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.mT).mT
    x = matrix.to(computing_dtype(torch.bfloat16, matrix.device.type))
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def cut(batches: Sequence[Batch]) -> Iterator[Piece]:
    """Yield the text in pieces of about `fitting.STEP_TOKENS` tokens, without those in which nothing is predicted."""
    for batch in batches:
        tokens, predicted = batch["input_ids"], torch.nn.functional.pad(predicted_positions(batch), (1, 0))
        labels = torch.where(predicted, tokens, NOT_PREDICTED)
        for rows in pieces(tokens):
            inputs = {name: x[rows] if len(x) == len(tokens) else x for name, x in batch.items()}
            if predicted[rows].any():
                yield Piece(inputs, labels[rows])


def count_predicted(piece: Piece) -> int:
    """Return the number of tokens of `piece` that are predicted."""
    return int((piece.labels != NOT_PREDICTED).sum())


@contextmanager
def trained(model: GQAForCausalLM, layers: Sequence[int]) -> Iterator[list[torch.nn.Parameter]]:
    """Let gradients reach the attention of `layers` alone, in at least float32, and yield its parameters."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    attentions = [model.model.layers[index].self_attn for index in layers]
    dtype = model.dtype
    model.requires_grad_(False)
    for attention in attentions:
        attention.to(torch.promote_types(dtype, torch.float32)).requires_grad_(True)
    try:
        yield [parameter for attention in attentions for parameter in attention.parameters()]
    finally:
        for attention in attentions:
            attention.to(dtype)
        for parameter, required in before.items():
            parameter.requires_grad_(required)
            parameter.grad = None
