"""What conversions need to know of the text: second moments of each layer's input, and how far its heads look back.

Sums only, of one layer at a time, so memory does not grow with the text. Shapes: B rows, T tokens, E hidden size,
H query heads, S lags.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from .contexts import hooks
from .errors import ConversionError
from .layerwise import LayerwiseText, layerwise
from .types import Batch, Progress

# Attention weights are looked at in one row of a batch, up to so many tokens.
LAGS_SEEN = 512
# How much of a mean rotation is where attention looks; the rest is all lags alike, for texts that look elsewhere.
LOOKED_SHARE = 0.9


@dataclass
class Statistics:
    """Of one layer: `second` (E, E) and `mean` (E,) of its input, float64; `lags` (H, S) attention's mass by lag, each
    head's summing to 1; `residual` mean square norm of the stream, the output added; `length` tokens a row; `window`
    tokens that a token sees, `None`: all before it; `root` (E, E) the covariance's square root, where it was asked
    for, since it takes the longest."""

    second: torch.Tensor
    mean: torch.Tensor
    lags: torch.Tensor
    residual: float
    length: int
    window: int | None = None
    root: torch.Tensor | None = None

    def metric(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariance (E, E) and mean (E,) of the input: as seen ("full"), their square root ("root"), or of inputs of
        which nothing is known ("identity"): the later the name, the more counts what is rare in the text."""
        if name == "identity":
            return torch.eye(len(self.mean), dtype=torch.float64, device=self.mean.device), torch.zeros_like(self.mean)
        if name == "full":
            return self.covariance, self.mean
        if self.root is None:
            raise ValueError("these statistics were collected without the root")
        return self.root, self.mean / self.mean.norm().sqrt().clamp(min=1e-12)

    @property
    def covariance(self) -> torch.Tensor:
        return self.second - torch.outer(self.mean, self.mean)


def square_root(matrix: torch.Tensor, damping: float = 0.0) -> torch.Tensor:
    """Square root of symmetric positive matrices (..., m, m), `damping` times the mean diagonal added to them first."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0) + damping * values.mean(-1, keepdim=True)
    return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT


class Sums:
    """Running sums of one layer's `Statistics`, filled by hooks."""

    def __init__(self, heads: int, hidden: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.second = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        self.total = torch.zeros(hidden, dtype=torch.float64, device=device)
        self.lags = torch.zeros(heads, 0, dtype=torch.float64, device=device)
        self.residual, self.tokens, self.length = 0.0, 0, 0

    def add(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        """Add inputs `x` (B, T, E) where `kept` (B, T)."""
        rows = x[kept].float()
        # Products in float32, sums in float64.
        self.second += (rows.mT @ rows).double()
        self.total += rows.sum(0, dtype=torch.float64)
        self.tokens += len(rows)
        self.length = max(self.length, x.shape[1])

    def add_lags(self, weights: torch.Tensor) -> None:
        """Add attention weights (H, T, T), which are summed along their diagonals."""
        length = weights.shape[-1]
        if length > self.lags.shape[1]:
            self.lags = torch.nn.functional.pad(self.lags, (0, length - self.lags.shape[1]))
        positions = torch.arange(length, device=weights.device)
        lag = (positions[:, None] - positions).clamp(min=0).flatten()  # (T T,), what lies ahead has no weight
        self.lags.index_add_(1, lag, weights.flatten(1).double())

    def statistics(self, root: bool) -> Statistics:
        """The means; raises `ConversionError` where there are none, or they are not finite."""
        if not self.tokens:
            raise ConversionError("the calibration text is empty")
        if not (torch.isfinite(self.second).all() and torch.isfinite(self.lags).all()):
            raise ConversionError(
                "the model's activations are not finite on the calibration text: its weights are damaged, or its dtype "
                "is too narrow; choose float32 or bfloat16"
            )
        lags, tokens = self.lags / self.lags.sum(-1, keepdim=True), self.tokens
        seen = Statistics(
            self.second / tokens, self.total / tokens, lags, self.residual / tokens, self.length, self.window
        )
        return replace(seen, root=square_root(seen.covariance)) if root else seen


@torch.no_grad()
def collect(
    model,
    batches: Sequence[Batch],
    layers: Iterable[int] | None = None,
    *,
    root: bool = False,
    progress: Progress = iter,
) -> Iterator[tuple[int, Statistics]]:
    """Send `batches` through `model` a layer at a time and give each layer's index and statistics.

    Args:
        batches: model inputs: "input_ids" (B, T), and "attention_mask" or "position_ids" where they are needed.
        layers: indices of those looked at, all where it is `None`.
        root: whether the metric "root" will be asked for.

    Raises:
        ConversionError: no text, or activations that are not finite.
    """
    if layers is None:
        layers = range(model.config.num_hidden_layers)
    seen_by_layer = windows(model.config)
    with layerwise(model, batches) as text:
        for index in progress(sorted(layers)):
            layer = model.model.layers[index]
            attention, norm = layer.self_attn, layer.post_attention_layernorm
            sums = Sums(
                attention.config.num_attention_heads, model.config.hidden_size, seen_by_layer[index], model.device
            )
            with hooks(
                attention.register_forward_pre_hook(partial(_see_input, sums, text), with_kwargs=True),
                norm.register_forward_pre_hook(partial(_see_residual, sums, text)),
            ):
                text.advance(index)
            yield index, sums.statistics(root)


def _see_residual(sums: Sums, text: LayerwiseText, norm, arguments) -> None:
    sums.residual += arguments[0][text.kept].double().pow(2).sum().item()


def _see_input(sums: Sums, text: LayerwiseText, attention, arguments, keywords) -> None:
    x, kept = arguments[0], text.kept
    sums.add(x, kept)
    row = kept.sum(-1).argmax()  # the row with the least padding
    start = kept[row].int().argmax()
    seen = slice(start, min(start + LAGS_SEEN, x.shape[1]))
    cosine_sine = tuple(part[row if len(part) > 1 else 0, seen][None] for part in keywords["position_embeddings"])
    mask = keywords["attention_mask"]
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        mask = mask[row if len(mask) > 1 else 0, :, seen, seen][None]
    else:  # causal: flash attention's masks, and those of flex attention, say no more of a row without padding
        mask = None
    # Only the eager function gives weights; `forward` itself, so that this hook is not called again.
    backend, attention.config._attn_implementation = attention.config._attn_implementation, "eager"
    try:
        _, weights = attention.forward(x[row, seen][None], position_embeddings=cosine_sine, attention_mask=mask)
    finally:
        attention.config._attn_implementation = backend
    real = kept[row, seen]
    sums.add_lags(weights[0] * real[:, None])


def windows(config) -> list[int | None]:
    """How many tokens each layer's attention sees, `None`: all before it."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def without_data(hidden: int, heads: int, length: int, device: torch.device, window: int | None = None) -> Statistics:
    """The statistics of inputs of which nothing is known: uncorrelated, of mean zero, all lags alike."""
    second = torch.eye(hidden, dtype=torch.float64, device=device)
    lags = causal_lags(length, window).to(device).expand(heads, -1)
    return Statistics(second, second.new_zeros(hidden), lags, 1.0, length, window, root=second)


def causal_lags(length: int, window: int | None) -> torch.Tensor:
    """The share of each lag (S,) among all pairs of a token and one that it sees."""
    counts = torch.arange(length, 0, -1, dtype=torch.float64)[:window]
    return counts / counts.sum()


def mean_rotation(statistics: Statistics, inv_freq: torch.Tensor) -> torch.Tensor:
    """Each head's mean of e^{j omega lag} (H, n), where it looks (LOOKED_SHARE), and over all pairs that it sees."""
    lags = statistics.lags
    uniform = causal_lags(statistics.length, statistics.window).to(lags.device)
    size, pad = max(len(uniform), lags.shape[1]), torch.nn.functional.pad
    uniform, lags = pad(uniform, (0, size - len(uniform))), pad(lags, (0, size - lags.shape[1]))
    share = (1 - LOOKED_SHARE) * uniform + LOOKED_SHARE * lags  # (H, S)
    angles = torch.outer(torch.arange(size, dtype=torch.float64, device=lags.device), inv_freq)  # (S, n)
    return share.to(torch.complex128) @ torch.polar(torch.ones_like(angles), angles)
