"""What a converted layer is trained and fitted on, to bring the residual stream back to the source's.

Gradient steps train the new attention; least squares then fit its output projection. Their solution needs two sums over
the tokens, x x^T and x r^T for the projection's input x and the residual r, as in layer-wise pruning and quantization
(Optimal Brain Compression, 2208.11580, section 3).
Shapes: B rows, T tokens, E hidden size, M = heads times value size.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from itertools import chain, islice
from operator import mul
from typing import Any, NamedTuple

import torch

from ..attention import Attention
from ..layers import GQARMSNorm
from .layers.moments import product
from .steps import centred, observed, relative_muon, step_at, training_dtype
from .streams import FOLDS, Passage, Streams, folds

# Ridges that are tried: shares of the mean of the diagonal of x x^T that are added to the diagonal. The less text there
# is for M inputs, the larger is the one that helps on other text.
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)
# Random directions of the residuals in which fits are judged, where there are more than twice as many outputs. Most of
# a fit's time goes into the outputs that judge it.
DIRECTIONS = 512
# Learning rates of the gradient steps that are tried, relative as in `steps.centred`.
LEARNING_RATES = (1e-2, 3e-3)
PASSES = 2  # over the text, of gradient steps, where nothing else is said
TRIAL_STEPS = 8  # with each learning rate, to choose one
STEP_TOKENS = 1024  # of a gradient step
LEAST_POWER = 0.01  # of a token's states that an error is compared with, as a share of the median
# Share of the mean square of a norm's weights that is added to the square of each before it divides.
NORM_DAMPING = 0.03
# One example: the layer's input (B, T, E), the keyword arguments of its forward, the wanted output (B, T, E), and what
# each token's squared error counts (B, T).
Example = tuple[torch.Tensor, dict, torch.Tensor, torch.Tensor]


class Regression:
    """Running sums over M inputs and E residuals, from which a linear layer is corrected.

    Args:
        linear: the layer, of M inputs and E outputs.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        size, device = linear.in_features + 1, linear.weight.device
        self.linear = linear
        self.directions = directions(linear.out_features, device)
        self.second = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, linear.out_features, dtype=torch.float64, device=device)
        self.power = self.weight = 0.0

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs (tokens, M), the residuals (tokens, E) of their projection, and what each token counts."""
        inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0 if self.linear.bias is not None else 0.0)
        weighed = inputs * weight[:, None].float()
        self.second += product(weighed, inputs, inputs.dtype)
        self.cross += product(weighed, residual, inputs.dtype)
        self.power += (weight.float() @ self.judged(residual.float()).square().sum(-1)).item()
        self.weight += weight.sum().item()

    def judged(self, residual: torch.Tensor) -> torch.Tensor:
        """Return residuals (..., E) in the directions K that judge a fit, with the same squared norms on average."""
        return residual if self.directions is None else residual @ self.directions.to(residual.dtype)

    def judging(self) -> "Regression":
        """Return the sums for residuals in the directions that judge a fit; the sum of x x^T is not copied."""
        result = copy.copy(self)
        result.cross = self.judged(self.cross)
        return result

    def include(self, other: "Regression", times: int = 1) -> None:
        """Add the sums of `other`, of the same layer; with `times` -1 take them out again."""
        self.second.add_(other.second, alpha=times)
        self.cross.add_(other.cross, alpha=times)
        self.power += times * other.power
        self.weight += times * other.weight

    def solution(self, ridge: float = RIDGES[0]) -> torch.Tensor:
        """Return the change (M + 1, E) of the layer's weight and, in the last row, bias that leaves least.

        `ridge`: one of `RIDGES`. Of sums that are `judging` it is (M + 1, K), in their directions.
        """
        second = self.second.clone()
        second.diagonal().add_(ridge * second.diagonal()[:-1].mean())
        return torch.cholesky_solve(self.cross, torch.linalg.cholesky(second))

    def error(self, change: torch.Tensor | None = None) -> float:
        """Return the weighted mean of the squared norms of the residuals, under a `change` (M + 1, K) of the layer.

        With `DIRECTIONS` it is an estimate, whose standard deviation is at most sqrt(2 / `DIRECTIONS`) of it.
        """
        left = self.power
        if change is not None:  # |r - W x|^2 = |r|^2 - 2 tr(W x r^T) + tr(W x x^T W^T)
            left += (change * (self.second @ change - 2 * self.cross)).sum().item()
        return max(left, 0.0) / self.weight

    def apply(self, change: torch.Tensor) -> None:
        """Add `change` (M + 1, E) to the layer's weight and bias, in place."""
        self.linear.weight.copy_(self.linear.weight + change[:-1].mT)
        if self.linear.bias is not None:
            self.linear.bias.copy_(self.linear.bias + change[-1])


@cache
def directions(outputs: int, device: torch.device) -> torch.Tensor | None:
    """Return `DIRECTIONS` random directions of so many outputs, (E, K); `None` where all are judged."""
    if outputs <= 2 * DIRECTIONS:
        return None
    drawn = torch.randn(outputs, DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.div_(math.sqrt(DIRECTIONS)).to(device)


class NormedRegression(Regression):
    """The same for a linear layer whose output y an RMSNorm g y / |y| follows; residuals are of what the norm gives.

    A change d of y changes the norm's output by about g d / |y|, where |y|, the root mean square, is taken for fixed.
    Where g is small, a damped share of the residual is wanted of y, because all of it would take the others' power.

    Args:
        linear: the layer.
        norm: the norm behind it.
    """

    def __init__(self, linear: torch.nn.Linear, norm: GQARMSNorm) -> None:
        super().__init__(linear)
        gain = norm.weight.float() + norm.offset
        self.epsilon = norm.variance_epsilon
        self.root = (gain.square() + NORM_DAMPING * gain.square().mean()).sqrt()  # (E,); solutions are times this
        self.share = gain / self.root
        self.lost = self.counted = 0.0  # of the errors behind the norm, and what they count

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs (tokens, M), the residuals (tokens, E) behind the norm, and what each token counts."""
        power = self.linear(inputs).float().square().mean(-1) + self.epsilon
        super().add(inputs, power.sqrt()[:, None] * self.share * residual.float(), weight / power)
        self.lost += (weight.float() @ residual.float().square().sum(-1)).item()
        self.counted += weight.sum().item()

    def include(self, other: Any, times: int = 1) -> None:
        super().include(other, times)
        self.lost += times * other.lost
        self.counted += times * other.counted

    def error(self, change: torch.Tensor | None = None) -> float:
        """Return the error as it is, or under a change before the norm, which only serves to compare changes."""
        return self.lost / self.counted if change is None else super().error(change)

    def apply(self, change: torch.Tensor) -> None:
        super().apply(change / self.root)


class Fit(NamedTuple):
    """What `fit` found.

    Args:
        error: what is left of the stream's error, the weighted mean of its squared norm over tokens, each judging the
            fit to the folds that it is not in.
        held: the same of the first fold alone, which gradient steps do not see.
        ridge: of the fit; `None` where the output projection was not changed.
    """

    error: float
    held: float
    ridge: float | None


def fit(text: Streams, index: int, attention: Attention, refit: bool = True, trial: float | None = None) -> Fit:
    """Fit the output projection of `attention`, the new one of layer `index`, to bring the stream back.

    Residual r and inputs are those of the converted stream: r = (source after attention) - (converted before it) - out,
    all as outputs of the attention, which the stream gets times `residual_multiplier`.
    For each fold and each of `RIDGES` a fit is made to the other folds. The ridge with the least error over all folds
    is taken, and the fit made again to all of them; where none lowers that error, there is no fit. Text of one document
    is not fitted to, nor is an attention whose outputs are not finite. Without `refit` the error is measured alone.
    `trial`, as for `Streams.attend`: the fit is made on these tokens alone, with the middle ridge, and only its error
    is found.

    With a norm behind the projection, out is behind that norm, and `NormedRegression` makes the fit, whose error is
    found by computing the attention once more.
    """
    norm: Any = text.norm_behind(index)
    normed = isinstance(norm, GQARMSNorm)

    def empty() -> Regression:
        return NormedRegression(attention.o_proj, norm) if normed else Regression(attention.o_proj)

    parts = [empty() for _ in range(FOLDS)]
    # Not for `finish`: what is tried here need not be what is kept.
    for passage, heads in text.attend(index, attention, math.inf if trial is None else trial):
        residual, weights = text.wanted(passage) - norm(attention.o_proj(heads)), error_weights(passage)
        for number, sums in enumerate(parts):
            if (chosen := passage.kept & (passage.fold == number)).any():
                sums.add(heads[chosen], residual[chosen], weights[chosen])
    numbers = [number for number, part in enumerate(parts) if part.weight]
    parts, whole = [parts[number] for number in numbers], empty()
    for part in parts:
        whole.include(part)
    before = Fit(whole.error(), parts[0].error(), None)
    if not (refit and len(parts) > 1 and math.isfinite(before.error)):
        return before
    ridges = RIDGES if trial is None else (RIDGES[len(RIDGES) // 2],)
    left: dict[float, list[float]] = {ridge: [] for ridge in ridges}
    judging = whole.judging()
    for part in (part.judging() for part in parts):
        judging.include(part, -1)
        for ridge, errors in left.items():
            errors.append(part.error(judging.solution(ridge)))
        judging.include(part)
    shares = [part.weight / whole.weight for part in parts]
    found = {ridge: sum(map(mul, shares, errors)) for ridge, errors in left.items()}
    ridge = min(found, key=found.__getitem__)
    best = Fit(found[ridge], left[ridge][0], ridge)
    if isinstance(whole, NormedRegression):
        changes = {}
        for number, part in zip(numbers, parts, strict=True):
            whole.include(part, -1)
            changes[number] = (whole.solution(ridge) / whole.root).float()
            whole.include(part)
        best = Fit(*normed_errors(text, index, attention, changes, trial), ridge)
    if not best.error < before.error:
        return before
    if trial is None:
        whole.apply(whole.solution(ridge))
    return best


def normed_errors(
    text: Streams, index: int, attention: Attention, changes: Mapping[int, torch.Tensor], trial: float | None
) -> tuple[float, float]:
    """Return the stream's error behind the norm of layer `index`, of all tokens and of those of the first fold.

    The output projection of `attention` is changed, for the tokens of each fold, by (M + 1, E) in `changes`; `trial` as
    for `fit`.
    """
    norm = text.norm_behind(index)
    lost, counted = dict.fromkeys(changes, 0.0), dict.fromkeys(changes, 0.0)
    for passage, heads in text.attend(index, attention, math.inf if trial is None else trial):
        weights, projection = error_weights(passage), attention.o_proj
        for number, change in changes.items():
            chosen = passage.kept & (passage.fold == number)
            y = projection(heads[chosen]) + heads[chosen].float() @ change[:-1]
            y = y if projection.bias is None else y + change[-1]
            left = text.wanted(passage)[chosen] - norm(y)
            lost[number] += (weights[chosen].float() @ left.float().square().sum(-1)).item()
            counted[number] += weights[chosen].sum().item()
    first = min(changes)
    return sum(lost.values()) / sum(counted.values()), lost[first] / counted[first]


def examples(text: Streams, index: int) -> Iterator[Example]:
    """Yield what `refine` trains layer `index` on, some rows of a batch at a time, over and over.

    Tokens of the first fold count nothing.
    """
    layer: Any = text.model.model.layers[index]
    while True:
        for passage in text.passages():
            hidden, wanted = passage.states[0], text.wanted(passage)
            weight, mask = error_weights(passage) * (passage.fold > 0), passage.arguments[index]["attention_mask"]
            whole = not (mask is None or isinstance(mask, torch.Tensor))  # masks of flex attention are not cut
            for own in [slice(None)] if whole else pieces(passage.kept):
                if weight[own].any():
                    arguments = {name: row_of(x, own, len(hidden)) for name, x in passage.arguments[index].items()}
                    yield layer.attention_input(hidden[own]), arguments, wanted[own], weight[own]


def steps(text: Streams) -> int:
    """Return the number of examples in one pass over the text that gradient steps see."""
    return sum(bool((fold[own] > 0).any()) for fold in folds(text.batches) for own in pieces(fold))


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


def error_weights(passage: Passage) -> torch.Tensor:
    """Return what each token's squared error counts, (B, T), relative to its stream's power.

    Layers read the stream through an RMSNorm, so that relative errors matter.
    """
    power = passage.states[1].float().square().mean(-1)  # (B, T)
    # The states of a token whose embedding is zeros, as padding's is, must not count infinitely.
    least = LEAST_POWER * power[passage.kept].median() if passage.kept.any() else power.new_ones(())
    return passage.weight / power.clamp(min=max(least.item(), torch.finfo(torch.float32).tiny))


def refine(
    attention: Attention,
    examples: Iterable[Example],
    number: int,
    rate: float,
    norm: torch.nn.Module,
) -> None:
    """Train the parameters of `attention` but its output projection, in place, with one example a step.

    Least squares find the projection's best values afterwards. The module computes in its dtype, and its parameters are
    kept in at least float32 meanwhile. There are `number` steps, and at least as many `examples`. `rate` is that of the
    first step, relative as in `steps.centred`; from there it falls to 0 on a line. `norm` is behind the attention.
    """
    dtype = attention.o_proj.weight.dtype
    computed = torch.promote_types(dtype, torch.float32)
    attention.to(computed)
    first = next(rest := iter(examples))

    def output(example: Example) -> torch.Tensor:
        x, arguments, *_ = example
        with torch.autocast(x.device.type, training_dtype(dtype)) if dtype != computed else nullcontext():
            return norm(attention(x, **arguments)[0].to(computed))

    with torch.no_grad(), observed(attention) as seen:
        output(first)
    del seen[attention.o_proj]
    heads = attention.config.per_layer_config[attention.layer_idx].num_attention_heads
    with centred(attention, seen) as sizes:
        trained: dict[torch.Tensor, float] = {
            x: sizes[x] for name, x in attention.named_parameters() if not name.startswith("o_proj.")
        }
        optimizer = relative_muon(trained, attention, heads)
        for step, example in enumerate(islice(chain([first], rest), number)):
            _, _, target, weight = example
            with torch.enable_grad():
                error = (output(example) - target.to(computed)).square().sum(-1)  # (B, T)
                loss = (weight * error).sum() / (weight * target.to(computed).square().sum(-1)).sum()
                loss.backward()
            step_at(optimizer, rate * (1 - step / number))
    attention.requires_grad_(False)
    attention.to(dtype)
