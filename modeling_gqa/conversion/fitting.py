"""What a converted layer is trained and fitted on: the text's states in the conversion, and those of the source.

Shapes: B rows, T tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..attention import Attention
from ..common.progress import Progress
from ..modeling_gqa import GQAForCausalLM
from .calibration import Batch, evaluating
from .layers.refine import Example
from .layers.refit import RIDGES, Regression
from .streams import Passage, Streams, held_out, streams
from .targets import changed_layers

STEP_TOKENS = 1024  # of a gradient step
LEAST_POWER = 0.01  # of a token's states that an error is compared with, as a share of the median


class Fit(NamedTuple):
    """What `fit` found.

    Args:
        error: what is left of the stream's error, the weighted mean of its squared norm over tokens that are held out;
            over all tokens where none are.
        ridge: of the fit; `None` where the output projection was not changed.
    """

    error: float
    ridge: float | None


def fit(text: Streams, index: int, attention: Attention, refit: bool = True, trial: float | None = None) -> Fit:
    """Fit the output projection of `attention`, the new one of layer `index`, to bring the stream back.

    Residual r and inputs are those of the converted stream: r = (source after attention) - (converted before it) - out.
    The fit is made without the documents that are held out, with each of `RIDGES`. The ridge of which their error is
    least is taken, and the fit made again with all documents; where none lowers their error, there is no fit. Text with
    nothing held out is not fitted to.

    Args:
        text: the streams before layer `index`.
        index: of the layer.
        attention: its new attention.
        refit: whether to fit; if not, the error is measured alone.
        trial: as for `Streams.attend`: the fit is made on these tokens alone, and with those held out in them.
    """
    fitted, held = Regression(attention.o_proj), Regression(attention.o_proj)
    # Not for `finish`: what is tried here need not be what is kept.
    for passage, heads in text.attend(index, attention, math.inf if trial is None else trial):
        hidden, after = passage.states
        residual, weights = after - hidden - attention.o_proj(heads), token_weights(passage)
        for sums, chosen in ((fitted, passage.kept & ~passage.held), (held, passage.kept & passage.held)):
            if chosen.any():
                sums.add(heads[chosen], residual[chosen], weights[chosen])
    judge = held if held.weight else fitted
    before = judge.error()
    if not refit or not (text.holds_out or trial):
        return Fit(before, None)
    errors = {ridge: judge.error(fitted.solution(ridge)) for ridge in (RIDGES if held.weight else RIDGES[:1])}
    best = min(errors, key=errors.__getitem__)
    if not errors[best] < before:
        return Fit(before, None)
    fitted.include(held)
    fitted.apply(fitted.solution(best))
    return Fit(errors[best], best)


def examples(text: Streams, index: int) -> Iterator[Example]:
    """Yield what `refine` trains layer `index` on, some rows of a batch at a time, over and over.

    Tokens that are held out count nothing.
    """
    norm = text.model.model.layers[index].input_layernorm
    while True:
        for passage in text.passages():
            hidden, after = passage.states
            weight, mask = token_weights(passage) * ~passage.held, passage.arguments[index]["attention_mask"]
            whole = not (mask is None or isinstance(mask, torch.Tensor))  # masks of flex attention are not cut
            for own in [slice(None)] if whole else pieces(passage.kept):
                if weight[own].any():
                    arguments = {name: row_of(x, own, len(hidden)) for name, x in passage.arguments[index].items()}
                    yield norm(hidden[own]), arguments, (after - hidden)[own], weight[own]


def steps(text: Streams) -> int:
    """Return the number of examples in one pass over the text that is not held out."""
    return sum(not held[own].all() for held in held_out(text.batches) for own in pieces(held))


def pieces(tokens: torch.Tensor) -> list[slice]:
    """Divide the rows of a batch (B, T) into pieces of about `STEP_TOKENS` tokens."""
    rows, length = tokens.shape
    number = max(round(STEP_TOKENS / length), 1)
    return [slice(start, start + number) for start in range(0, rows, number)]


def row_of(value: Any, row: slice, rows: int) -> Any:
    """Return what belongs to one of `rows` rows in tensors, alone or in tuples, that may hold one row for all."""
    if isinstance(value, tuple):
        return tuple(row_of(x, row, rows) for x in value)
    return value[row] if isinstance(value, torch.Tensor) and len(value) == rows else value


def token_weights(passage: Passage) -> torch.Tensor:
    """Return what each token's squared error counts, (B, T), relative to its stream's power.

    Layers read the stream through an RMSNorm, so that relative errors matter.
    """
    power = passage.states[1].float().square().mean(-1)  # (B, T)
    # The states of a token whose embedding is zeros, as padding's is, must not count infinitely.
    least = LEAST_POWER * power[passage.kept].median() if passage.kept.any() else power.new_ones(())
    return passage.weight / power.clamp(min=max(least.item(), torch.finfo(torch.float32).tiny))


@torch.no_grad()
def refit_outputs(
    source: GQAForCausalLM, converted: GQAForCausalLM, batches: Sequence[Batch], progress: Progress = iter
) -> None:
    """Fit the output projections of a converted model, in place, as `convert_model` fits them.

    Whoever has another way to convert layers can add the fit to it.

    Args:
        source: the model that was converted.
        converted: its conversion, in which only attention has changed.
        batches: model inputs.
        progress: wraps the iteration over the layers.
    """
    changed = changed_layers(source.config, converted.config)
    with streams(source, batches) as text, evaluating(converted):
        for index in progress(range(len(source.model.layers))):
            if index in changed:
                text.see(index)
                attention = converted.model.layers[index].self_attn
                fit(text, index, attention)
                text.send(index, attention)
                text.finish(index, attention)
            else:
                text.pass_on(index)
