"""The last step of a conversion: its new attention, trained in all layers at once on the source's predictions.

Layers are converted one by one, each by the error that it leaves in its own stream. Here the loss is the divergence of
the predictions, KL(source || converted), as in knowledge distillation (1503.02531). Documents that are not trained on
choose the learning rate and when to stop, and weights with which their divergence is no less are not kept. The fits of
the layers may have seen these documents.
Shapes: B rows, T tokens, E hidden size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..common.batches import Batch, evaluating
from ..common.progress import Progress, ShowProgress, no_progress
from ..modeling_gqa import GQAForCausalLM
from .divergence import last_hidden_state, predicted_positions, prediction_losses
from .fitting import pieces
from .streams import held_out, scratch

# Learning rates that are tried, from the largest on, as long as a smaller one is better after `TRIAL_STEPS`.
LEARNING_RATES = (1e-3, 3e-4, 1e-4, 3e-5)
TRIAL_STEPS = 6
JUDGE_TOKENS = 16384  # at the text's end, or its last batch, of which documents judge; all before is trained on
JUDGED = 4  # times at most that the documents held out are looked at in a run
NOT_PREDICTED = -100  # as a label, PyTorch's mark of what no loss counts


class Piece(NamedTuple):
    """Rows of text that a step trains on, or that judge.

    Args:
        inputs: of a model.
        fitted, held: (B, T), the tokens that are predicted in documents to train on, and in those that judge;
            `NOT_PREDICTED` elsewhere.
    """

    inputs: Batch
    fitted: torch.Tensor
    held: torch.Tensor


def polish(
    source: GQAForCausalLM,
    converted: GQAForCausalLM,
    batches: Sequence[Batch],
    layers: Sequence[int],
    tokens: int,
    show_progress: ShowProgress = no_progress,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Train the attention of `converted`, in place, on the predictions of `source`.

    Args:
        source: the model that was converted; it is not changed.
        converted: the conversion; its other parameters may be those of `source`, and stay.
        batches: the text. The documents that `streams.held_out` names judge, of its last `JUDGE_TOKENS` tokens.
        layers: indices of the layers whose attention is trained.
        tokens: to train on at most, in passes over the text.
        show_progress: returns, for a description, what wraps an iterable to show progress.
        seed: of the text's order.

    Returns:
        `learning_rate` that was best, `None` where no weights were better than before; `tokens` trained on up to the
        weights that were kept; `kl_before` and `kl_after`, in nats per token of the documents that judge. `None` where
        no document judges, or there is nothing to train on: then nothing is done.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import convert_model, target_config
        from modeling_gqa.conversion.polish import polish

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        batches = [{"input_ids": torch.randint(64, (4, 16))}]
        converted, _ = convert_model(model, target_config(model.config, "mqa"), batches)
        done = polish(model, converted, batches, layers=[0, 1], tokens=1000)
        assert done["kl_after"] <= done["kl_before"]
        ```
    """
    text = list(cut(batches))
    fitted = [number for number, piece in enumerate(text) if (piece.fitted >= 0).any()]
    judges = [number for number, piece in enumerate(text) if (piece.held >= 0).any()]
    if not fitted or not judges or tokens <= 0:
        return None
    size = sum(int((text[number].fitted >= 0).sum()) for number in fitted) / len(fitted)
    steps = max(int(tokens / size), 1)
    with evaluating(source, converted), scratch(source.device) as states, trained(converted, layers) as parameters:
        with torch.no_grad():
            for number, piece in enumerate(text):
                states[number] = last_hidden_state(source, piece.inputs)
        run = Run(source, converted, text, states, judges, parameters)
        before = run.divergence()
        first = run.copy()
        rate = best_rate(run, fitted, min(TRIAL_STEPS, steps), first, seed, show_progress("trying learning rates"))
        every, best, kept, since = math.ceil(steps / JUDGED), before, 0, 0
        weights = first
        for step in run.steps(fitted, steps, rate, seed, show_progress("polishing")):
            if (step % every == 0 or step == steps) and (found := run.divergence()) < best:
                best, kept, since, weights = found, step, 0, run.copy()
            elif step % every == 0 and (since := since + 1) == 2:
                break
        run.put(weights)
    done = {"tokens": round(kept * size), "kl_before": before, "kl_after": best}
    return {"learning_rate": rate if kept else None, **done}


def best_rate(
    run: "Run", fitted: Sequence[int], steps: int, first: list[torch.Tensor], seed: int, progress: Progress
) -> float:
    """Return which of `LEARNING_RATES` leaves least after some steps from the weights `first`, which are put back."""
    found: dict[float, float] = {}
    for rate in progress(LEARNING_RATES):
        for _ in run.steps(fitted, steps, rate, seed):
            pass
        found[rate] = run.divergence()
        run.put(first)
        if found[rate] > min(found.values()):  # which nan is not
            break
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


class Run:
    """A model that is trained on another's predictions.

    Args:
        source, model: the teacher and what is trained.
        text: all pieces.
        states: the teacher's last hidden states (B, T, E) by number of the piece.
        judges: numbers of the pieces by which `divergence` judges.
        parameters: that are trained.
    """

    def __init__(
        self,
        source: GQAForCausalLM,
        model: GQAForCausalLM,
        text: Sequence[Piece],
        states: Mapping[int, torch.Tensor],
        judges: Sequence[int],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        self.source, self.model, self.text, self.states = source, model, text, states
        self.judges, self.parameters = judges, parameters

    def loss(self, number: int, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the sum over the predicted tokens of a piece of KL(source || model), and their number."""
        device = self.source.device
        half = self.source.dtype != torch.promote_types(self.source.dtype, torch.float32)
        with torch.autocast(device.type, self.source.dtype) if half else nullcontext():
            inputs = {name: x.to(device) for name, x in self.text[number].inputs.items()}
            logits = self.model(**inputs, use_cache=False).logits
            sums = prediction_losses(logits, self.states[number], self.source.lm_head, labels.to(device))
        return sums[1], int((labels >= 0).sum())

    @torch.no_grad()
    def divergence(self) -> float:
        """Return the mean KL(source || model) over the tokens that judge."""
        sums = [self.loss(number, self.text[number].held) for number in self.judges]
        return sum(kl.item() for kl, _ in sums) / sum(count for _, count in sums)

    def steps(
        self, fitted: Sequence[int], number: int, rate: float, seed: int, progress: Progress = iter
    ) -> Iterator[int]:
        """Make `number` steps, one piece each, at a rate that falls from `rate` to 0 on a line; yields 1, 2, ...

        They are of Muon for matrices and of Adam (1412.6980) for biases and norms.
        """
        order = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        matrices, others = ([x for x in self.parameters if (x.ndim == 2) is wanted] for wanted in (True, False))
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            optimizers.append(torch.optim.Adam(others, rate, betas=(0.9, 0.95)))
        schedules = [torch.optim.lr_scheduler.LinearLR(x, 1.0, 1 / number, number) for x in optimizers]
        for step in progress(range(1, number + 1)):
            if not waiting:
                waiting = [fitted[i] for i in torch.randperm(len(fitted), generator=order)]
            piece = waiting.pop()
            with torch.enable_grad():
                kl, count = self.loss(piece, self.text[piece].fitted)
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


def cut(batches: Sequence[Batch]) -> Iterator[Piece]:
    """Yield the text in pieces of about `fitting.STEP_TOKENS` tokens."""
    sizes = [batch["input_ids"].numel() for batch in batches]
    left, judging = sum(sizes), max([JUDGE_TOKENS, *sizes[-1:]])
    for batch, held in zip(batches, held_out(batches), strict=True):
        held = held & (left <= judging)
        left -= held.numel()
        tokens, predicted = batch["input_ids"], torch.nn.functional.pad(predicted_positions(batch), (1, 0))
        for rows in pieces(held):
            labels = [
                torch.where(predicted[rows] & chosen[rows], tokens[rows], NOT_PREDICTED) for chosen in (~held, held)
            ]
            yield Piece({name: x[rows] if len(x) == len(tokens) else x for name, x in batch.items()}, *labels)


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
