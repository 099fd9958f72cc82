"""Text through a model, one layer at a time, and the statistics of each layer's input that conversions need.

Memory holds one batch at a time: hidden states between two layers are on disk, and statistics are running sums. GPTQ
(2210.17323, section 3.3) also goes layer by layer, but keeps the activations of all the text in memory.
Shapes: B rows, T tokens, E hidden size, H query heads, S lags.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any

import torch
from transformers import PreTrainedModel

from ...attention import GroupedAttention
from ...common.errors import ConversionError
from ...common.progress import Progress
from ...modeling_gqa import GQAForCausalLM
from ..layers.moments import Statistics, square_root, windows
from ..layers.normed import NormedSums

# Model inputs by name; "input_ids" (B, T) is always there.
Batch = dict[str, torch.Tensor]
# The entries of a batch that a model's layers use; labels, for instance, are not among them.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
# Attention by lag is taken from one row of a batch, from at most this number of tokens.
LAGS_SEEN = 512


# -- context managers for models


@contextmanager
def evaluating(*models: PreTrainedModel) -> Iterator[None]:
    """Put models in evaluation mode, and afterwards back in the mode that they were in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


@contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    """Remove hooks afterwards, given the handles that registering them returned."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- layer by layer


class Scratch(MutableMapping[int, Any]):
    """A mapping from numbers to values whose values lie in a file, because memory should not hold all of them.

    Args:
        file: a temporary file without a name, which the system removes however the process ends.
        device: where tensors are read to.
    """

    def __init__(self, file: IO[bytes], device: torch.device) -> None:
        self.file, self.device = file, device
        self.places: dict[int, tuple[int, int]] = {}  # start and length in bytes
        self.end = 0

    def __setitem__(self, number: int, value: Any) -> None:
        content = BytesIO()
        torch.save(value, content)
        start, room = self.places.get(number, (0, 0))
        if content.tell() > room:
            start, self.end = self.end, self.end + content.tell()
        try:
            self.file.seek(start)
            self.file.write(content.getbuffer())
            self.file.flush()
        except OSError as error:
            raise ConversionError(
                f"temporary files cannot be written to {gettempdir()} ({error.strerror}): set TMPDIR to a folder with "
                "more room"
            ) from error
        self.places[number] = (start, content.tell())

    def __getitem__(self, number: int) -> Any:
        start, length = self.places[number]
        self.file.seek(start)
        content = BytesIO(self.file.read(length))
        # Only what this process wrote is read, so pickled objects are safe.
        return torch.load(content, map_location=self.device, weights_only=False)

    def __delitem__(self, number: int) -> None:
        del self.places[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def scratch(device: torch.device) -> Iterator[Scratch]:
    """Open a `Scratch`, whose file lies in the folder that the environment variable TMPDIR names."""
    file = TemporaryFile(prefix="modeling-gqa-")  # noqa: SIM115 (closing what a full disk refused fails again)
    try:
        yield Scratch(file, device)
    finally:
        with suppress(OSError):
            file.close()


class LayerwiseText:
    """Batches of text on their way through the layers of a model in evaluation mode.

    Args:
        model: whose layers the text goes through.
        batches: model inputs.
        states: holds each batch's hidden states (B, T, E) between two layers.

    Attributes:
        kept: (B, T), which tokens of the batch in a layer are not padding; hooks on the layers read it.
    """

    def __init__(self, model: GQAForCausalLM, batches: Sequence[Batch], states: Scratch) -> None:
        self.model, self.batches, self.states = model, batches, states
        self.layer = 0
        self.kept: torch.Tensor

    @torch.no_grad()
    def advance(self, last: int) -> None:
        """Send all batches through the layers up to and including `last`."""
        for number, batch in enumerate(self.batches):
            inputs = {name: x.to(self.model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            ids = inputs.pop("input_ids")
            hidden = self.states[number] if self.layer else self.model.model.embed_tokens(ids)  # (B, T, E)
            mask = inputs.get("attention_mask")
            self.kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            arguments = self.model.model.layer_arguments(hidden, **inputs)
            for index in range(self.layer, last + 1):
                hidden = self.model.model.layers[index](hidden, **arguments[index])
            self.states[number] = hidden
        self.layer = last + 1


@contextmanager
def layerwise(model: GQAForCausalLM, batches: Sequence[Batch]) -> Iterator[LayerwiseText]:
    """Open a `LayerwiseText` for `model`, which is in evaluation mode meanwhile."""
    with evaluating(model), scratch(model.device) as states:
        yield LayerwiseText(model, batches, states)


# -- statistics


class Sums:
    """Running sums of one layer's `Statistics`, filled by hooks."""

    def __init__(self, heads: int, hidden: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.second = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        self.total = torch.zeros(hidden, dtype=torch.float64, device=device)
        self.lags = torch.zeros(heads, 0, dtype=torch.float64, device=device)
        self.residual, self.tokens, self.length = 0.0, 0, 0
        self.normed: NormedSums | None = None

    def add(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        """Add inputs `x` (B, T, E) where `kept` (B, T)."""
        rows = x[kept].float()
        # Products in float32, sums in float64.
        self.second += (rows.mT @ rows).double()
        self.total += rows.sum(0, dtype=torch.float64)
        self.tokens += len(rows)
        self.length = max(self.length, x.shape[1])

    def add_lags(self, weights: torch.Tensor) -> None:
        """Add attention weights (H, T, T), summed along their diagonals."""
        length = weights.shape[-1]
        if length > self.lags.shape[1]:
            self.lags = torch.nn.functional.pad(self.lags, (0, length - self.lags.shape[1]))
        positions = torch.arange(length, device=weights.device)
        lag = (positions[:, None] - positions).clamp(min=0).flatten()  # (T T,), what lies ahead has no weight
        self.lags.index_add_(1, lag, weights.flatten(1).double())

    def statistics(self, root: bool) -> Statistics:
        """Return the means; raises `ConversionError` where there are none, or one is not finite."""
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
        normed = None if self.normed is None else self.normed.statistics(seen, tokens, root)
        return replace(seen, root=square_root(seen.covariance) if root else None, normed=normed)


@torch.no_grad()
def collect(
    model: GQAForCausalLM,
    batches: Sequence[Batch],
    layers: Iterable[int] | None = None,
    *,
    root: bool = False,
    progress: Progress = iter,
) -> Iterator[tuple[int, Statistics]]:
    """Send `batches` through `model` a layer at a time and yield each layer's index and statistics.

    Args:
        model: the model to convert.
        batches: model inputs: "input_ids" (B, T), and "attention_mask" or "position_ids" where they are needed.
        layers: indices of the layers whose statistics are wanted; `None` for all.
        root: whether the statistics get the square root of the covariance, for the metric "root".
        progress: wraps the iteration over the layers.

    Raises:
        ConversionError: there is no text, or activations are not finite.
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
            if isinstance(attention, GroupedAttention) and attention.k_norm is not None:
                sums.normed = NormedSums(attention)
            with hooks(
                attention.register_forward_pre_hook(partial(_see_input, sums, text), with_kwargs=True),
                norm.register_forward_pre_hook(partial(_see_residual, sums, text)),
            ):
                text.advance(index)
            yield index, sums.statistics(root)


def _see_residual(sums: Sums, text: LayerwiseText, norm: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    sums.residual += arguments[0][text.kept].double().pow(2).sum().item()


def _see_input(
    sums: Sums,
    text: LayerwiseText,
    attention: Any,
    arguments: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
) -> None:
    x, kept = arguments[0], text.kept
    sums.add(x, kept)
    if sums.normed is not None:
        sums.normed.add(x[kept])
    row = kept.sum(-1).argmax()  # the row with the least padding
    start = kept[row].int().argmax()
    seen = slice(start, min(start + LAGS_SEEN, x.shape[1]))
    cosine_sine = tuple(part[row if len(part) > 1 else 0, seen][None] for part in keywords["position_embeddings"])
    mask = keywords["attention_mask"]
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        mask = mask[row if len(mask) > 1 else 0, :, seen, seen][None]
    else:  # causal: flash attention's masks, and those of flex attention, say no more of a row without padding
        mask = None
    # Only the eager function returns weights; `forward` itself is called, so that this hook is not called again.
    backend, attention.config._attn_implementation = attention.config._attn_implementation, "eager"
    try:
        _, weights = attention.forward(x[row, seen][None], position_embeddings=cosine_sine, attention_mask=mask)
    finally:
        attention.config._attn_implementation = backend
    real = kept[row, seen]
    sums.add_lags(weights[0] * real[:, None])
