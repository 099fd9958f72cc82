"""Sizes by layer under a budget: cache goes first where it saves most.

Layers differ in what they lose, so equal sizes waste cache: QCQA (2406.10247), DHA (2406.06567).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..accounting import cache_bytes_per_token
from ..attention import ATTENTION_CLASSES
from ..configuration_gqa import GQAConfig
from .calibration import Batch, Statistics, collect
from .errors import ConversionError
from .grouping import merging_loss, regrouped
from .latent import to_latent
from .matrices import Heads, read_heads
from .moments import compute_moments
from .targets import Fields, chosen_layers, configuration, grouped_fields, latent_fields, layer_fields

# Cache sizes that are tried for an MLA layer, as shares of its present one.
SHARES = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 5 / 32, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 1 / 2, 5 / 8, 3 / 4)


class Option(NamedTuple):
    """A size that a layer may have: numbers per token in its cache, and its loss relative to the residual stream."""

    numbers: int
    loss: float
    fields: Fields


def allocate(
    model,
    attention_kind: str,
    bytes_per_token: int,
    calibration: Sequence[Batch],
    *,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[Iterable], Iterable] = iter,
) -> GQAConfig:
    """The target configuration whose cache takes at most `bytes_per_token` in all layers together.

    Args:
        attention_kind: "gqa" chooses the key/value heads of each layer, "mla" the size of each latent and rotary key.
        calibration: model inputs; without text no layer's loss would be known.
        layers: indices of the layers that may change, all where it is `None`; `dtype`: of the cache.

    Raises:
        ConversionError: the budget is too small, or the kind has no sizes to choose.
    """
    if attention_kind not in ("gqa", "mla"):
        raise ConversionError(f"a budget chooses sizes of gqa or mla, and {attention_kind} has none to choose")
    fields, chosen = layer_fields(model.config), chosen_layers(model.config, layers)
    statistics = collect(model, calibration, progress)
    options = {index: layer_options(model, index, attention_kind, statistics[index]) for index in progress(chosen)}
    fixed = sum(numbers_per_token(layer) for i, layer in enumerate(model.config.per_layer_config) if i not in options)
    picked = spend(options, bytes_per_token // dtype.itemsize - fixed)
    if picked is None:
        least = (fixed + sum(min(o.numbers for o in layer) for layer in options.values())) * dtype.itemsize
        raise ConversionError(
            f"a budget of {bytes_per_token} bytes per token is too small: the least with {attention_kind} in these "
            f"layers is {least}, and the source takes {cache_bytes_per_token(model.config, dtype)}"
        )
    for index, option in picked.items():
        fields[index] |= option.fields
    return configuration(model.config, fields)


def numbers_per_token(layer: GQAConfig) -> int:
    return sum(ATTENTION_CLASSES[layer.attention_kind].cache_sizes(layer))


def layer_options(model, index: int, kind: str, statistics: Statistics) -> list[Option]:
    """The sizes that layer `index` may have, and what each loses, by number; the present size loses nothing."""
    heads = read_heads(model, index)
    present = layer_fields(model.config)[index]
    numbers = numbers_per_token(model.config.per_layer_config[index])
    lossy = latent_options if kind == "mla" else head_options
    smaller = [option for option in lossy(model.config, index, heads, statistics) if option.numbers < numbers]
    return [*sorted(smaller, key=lambda option: option.numbers), Option(numbers, 0.0, present)]


def head_options(config: GQAConfig, index: int, heads: Heads, statistics: Statistics) -> Iterable[Option]:
    moments = compute_moments(heads, statistics, centered=heads.biases[2])
    present, size = heads.k.shape[:2]
    for number in range(1, present):
        if present % number == 0:
            loss = sum(merging_loss(moments, group) for group in regrouped(moments, number))
            kind = "mqa" if number == 1 else "gqa"
            fields = grouped_fields(config, index, kind, number)
            yield Option(2 * number * size, loss / statistics.residual, fields)


def latent_options(config: GQAConfig, index: int, heads: Heads, statistics: Statistics) -> Iterable[Option]:
    moments = compute_moments(heads, statistics)
    largest = 2 * heads.k.shape[0] * heads.k.shape[1]
    for size in sorted({max(4, round(share * largest)) for share in SHARES}):
        fields = latent_fields(config, index, None, None, size)
        _, _, loss = to_latent(heads, moments, fields["kv_lora_rank"], fields["qk_rope_head_dim"], "mean")
        yield Option(size, loss / statistics.residual, fields)


def spend(options: dict[int, list[Option]], numbers: int) -> dict[int, Option] | None:
    """One option of each layer with at most `numbers` in all: from the smallest, the step that saves most loss for its
    size, as long as there is room; `None` where even the smallest do not fit."""
    picked = {index: layer[0] for index, layer in options.items()}
    room = numbers - sum(option.numbers for option in picked.values())
    if room < 0:
        return None
    while True:
        steps = [
            ((now.loss - option.loss) / (option.numbers - now.numbers), index, option)
            for index, now in picked.items()
            for option in options[index]
            if now.numbers < option.numbers <= now.numbers + room and option.loss < now.loss
        ]
        if not steps:
            return picked
        _, index, option = max(steps, key=lambda step: step[:2])
        room -= option.numbers - picked[index].numbers
        picked[index] = option
