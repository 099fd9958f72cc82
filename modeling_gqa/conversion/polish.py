"""The last step of a conversion: its new attention, trained in all layers at once on the source's predictions.

Layers are converted one by one, each by the error that it leaves in its own stream. Here the loss is the divergence of
the predictions, KL(source || converted), as in knowledge distillation (1503.02531). Text that nothing was fitted to
chooses the learning rate and when to stop, and weights with which its divergence is no less are not kept.
Shapes: B rows, T tokens, E hidden size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..cache_quantized import GQAQuantizedCache, rounds_cache
from ..common.batches import Batch, evaluating, first_batches
from ..common.muon import MuonAdamW
from ..common.progress import ShowProgress, no_progress
from ..modeling_gqa import GQAForCausalLM
from .divergence import last_hidden_state, predicted_positions
from .fitting import pieces
from .losses import prediction_losses
from .steps import centred, observed, relative_muon, step_at, training_dtype
from .streams import scratch

# Learning rates, relative as in `steps.centred`, at a divergence of 1 nat per token. They grow with its root: a step of
# Muon goes as far whatever the gradient, and a divergence grows with the square of the distance. Where one harms, the
# next goes on from the best weights.
LEARNING_RATES = (1e-3, 3e-4, 1e-4)
TOLERANCE = 0.01  # by which a rate may leave the divergence above the best and go on, because it falls in any case
JUDGED = 6  # times that the text that judges is looked at in a run, beside once early with each rate
JUDGING_TOKENS = 4096  # of it that are looked at, or one batch
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
    stored: torch.dtype | None = None,
) -> dict[str, Any] | None:
    """Train the attention of `converted`, in place, on the predictions of `source`.

    Args:
        source: the model that was converted; it is not changed.
        converted: the conversion, or the source with a quantized cache, which rounds while it is trained; its other
            parameters may be those of `source`, and stay.
        text: batches to train on.
        judges: batches of other text, best of what nothing was fitted to; the first `JUDGING_TOKENS` tokens are used.
        layers: indices of the layers whose attention is trained.
        tokens: to train on at most, in passes over `text`.
        show_progress: returns, for a description, what wraps an iterable to show progress.
        seed: of the text's order.
        stored: the dtype that `converted` will be saved in, where it is another: it is judged, and left, rounded to it.

    Returns:
        `learning_rate` of the weights that were kept, `None` where none were better than before; `tokens` trained on
        up to these weights; `kl_before` and `kl_after`, in nats per token of `judges`. `None` where nothing is
        predicted in `text` or in `judges`: then nothing is done.
    """
    cut_text, cut_judges = (list(cut(x)) for x in (text, first_batches(judges, JUDGING_TOKENS)))
    if not cut_text or not cut_judges:
        return None
    size = sum(count_predicted(piece) for piece in cut_text) / len(cut_text)
    steps = max(int(tokens / size), 1)
    with evaluating(source, converted), scratch(source.device) as states, ExitStack() as stack:
        attentions = stack.enter_context(trained(converted, layers))
        if rounds_cache(converted.config):
            stack.enter_context(rounding(converted))
        with torch.no_grad():
            for number, piece in enumerate([*cut_text, *cut_judges]):
                states[number] = last_hidden_state(source, piece.inputs)
        run = Run(source, converted, cut_text, cut_judges, states, stored)
        # With gradients MLA's projections are called, which decoding over a quantized cache multiplies by itself.
        with torch.set_grad_enabled(run.rounds), observed(attentions) as seen:
            run.loss(0)
        run.sizes = stack.enter_context(centred(attentions, seen))
        before = best = run.divergence()
        order, every = run.order(seed), math.ceil(steps / JUDGED)
        done, kept, taken, weights = 0, 0, None, run.copy()
        for rate in (share * max(before, 0.0) ** 0.5 for share in LEARNING_RATES):
            optimizer, early = relative_muon(run.sizes, attentions), done + max(every // 3, 1)
            for step in show_progress(f"polishing at a rate of {rate:.1e}")(range(done + 1, steps + 1)):
                run.step(next(order), optimizer, rate * (1 - (step - 1) / steps))
                if step % every == 0 or step in (early, steps):  # a rate that harms costs few steps
                    done, found = step, run.divergence()
                    if not found <= best * (1 + TOLERANCE):  # which nan is not
                        run.put(weights)
                        break
                    if found < best:
                        best, kept, taken, weights = found, step, rate, run.copy()
            if done == steps:
                break
        run.put(weights)
    return {"learning_rate": taken, "tokens": round(kept * size), "kl_before": before, "kl_after": best}


class Run:
    """A model that is trained on another's predictions.

    Args:
        source, model: the teacher and what is trained.
        text, judges: pieces to train on, and to judge by.
        states: the teacher's last hidden states (B, T, E) by number of the piece, those of `judges` last.
        stored: as for `polish`.

    Attributes:
        sizes: of a step at a rate of 1, by parameter that is trained.
    """

    def __init__(
        self,
        source: GQAForCausalLM,
        model: GQAForCausalLM,
        text: Sequence[Piece],
        judges: Sequence[Piece],
        states: Mapping[int, torch.Tensor],
        stored: torch.dtype | None = None,
    ) -> None:
        self.stored = stored
        self.source, self.model, self.sizes = source, model, dict[torch.Tensor, float]()
        self.rounds = rounds_cache(model.config)  # then a forward with a cache attends to rounded numbers
        self.fitted, self.pieces, self.states = len(text), [*text, *judges], states

    def loss(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the sum over the predicted tokens of a piece of KL(source || model), and their number."""
        device = self.source.device
        half = self.source.dtype != torch.promote_types(self.source.dtype, torch.float32)
        with torch.autocast(device.type, training_dtype(self.source.dtype)) if half else nullcontext():
            piece = self.pieces[number]
            inputs = {name: x.to(device) for name, x in piece.inputs.items()}
            logits = self.model(**inputs, use_cache=self.rounds).logits
            sums = prediction_losses(logits, self.states[number], self.source.lm_head, piece.labels.to(device))
        return sums[1], count_predicted(piece)

    @torch.no_grad()
    def divergence(self) -> float:
        """Return the mean KL(source || model) over the tokens that judge, with the weights as they will be stored."""
        trained = [parameter.detach().clone() for parameter in self.sizes] if self.stored else []
        if self.stored:
            self.put(self.copy())
        sums = [self.loss(number) for number in range(self.fitted, len(self.pieces))]
        if self.stored:
            self.put(trained)
        return sum(kl.item() for kl, _ in sums) / sum(count for _, count in sums)

    def order(self, seed: int) -> Iterator[int]:
        """Yield the numbers of the pieces to train on, all of them in each pass."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.randperm(self.fitted, generator=generator).tolist()

    def step(self, number: int, optimizer: MuonAdamW, rate: float) -> None:
        """Train on one piece; each parameter's step is `rate` times its size."""
        with torch.enable_grad():
            kl, count = self.loss(number)
            (kl / count).backward()
        step_at(optimizer, rate)

    def copy(self) -> list[torch.Tensor]:
        """Return copies of the parameters that are trained, rounded to the dtype that they are stored in."""
        copies = (parameter.detach().clone() for parameter in self.sizes)
        return [x.to(self.stored).to(x.dtype) for x in copies] if self.stored else list(copies)

    @torch.no_grad()
    def put(self, weights: list[torch.Tensor]) -> None:
        """Set the parameters that are trained to `weights`."""
        for parameter, weight in zip(self.sizes, weights, strict=True):
            parameter.copy_(weight)


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
def rounding(model: GQAForCausalLM) -> Iterator[None]:
    """Let a forward with gradients attend to what the quantized cache holds, as one without gradients does."""
    decoder: Any = model.model
    decoder.new_cache = lambda: GQAQuantizedCache(model.config)
    try:
        yield
    finally:
        del decoder.new_cache


@contextmanager
def trained(model: GQAForCausalLM, layers: Sequence[int]) -> Iterator[torch.nn.ModuleList]:
    """Let gradients reach the attention of `layers` alone, in at least float32, and yield these modules."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    attentions = torch.nn.ModuleList(model.model.layers[index].self_attn for index in layers)
    dtype = model.dtype
    model.requires_grad_(False)
    attentions.to(torch.promote_types(dtype, torch.float32)).requires_grad_(True)
    try:
        yield attentions
    finally:
        attentions.to(dtype)
        for parameter, required in before.items():
            parameter.requires_grad_(required)
            parameter.grad = None
