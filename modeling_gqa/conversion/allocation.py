"""Sizes by layer under a budget: cache goes first where it saves most.

Layers differ in what they lose, so equal sizes waste cache: QCQA (2406.10247), DHA (2406.06567).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..accounting import cache_bytes_per_token
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES
from .calibration import Statistics, collect
from .errors import ConversionError
from .grouping import regrouped
from .latent import SPLITS, best_split
from .matrices import read_heads
from .merging import merging_loss
from .moments import compute_moments
from .targets import (
    Fields,
    chosen_layers,
    configuration,
    grouped_fields,
    latent_fields,
    layer_fields,
    layer_head_dim,
)
from .types import Batch, Progress

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
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
) -> GQAConfig:
    """The target configuration whose cache takes at most `bytes_per_token` in all layers together.

    A layer that loses most may keep its attention, so the result is often a mixed model.

    Args:
        attention_kind: "gqa" chooses the key/value heads of each layer, "mla" the size of each latent and rotary key.
        calibration: model inputs; without text no layer's loss would be known.
        layers: indices of the layers that may change, all where it is `None`; `dtype`: of the cache, the model's
            where it is left out.

    Raises:
        ConversionError: the budget is too small, or the kind has no sizes to choose.
    """
    dtype = dtype or model.dtype
    smallest_target(model.config, attention_kind, bytes_per_token, layers=layers, dtype=dtype)  # or it is refused
    fields, chosen = layer_fields(model.config), chosen_layers(model.config, layers)
    seen = collect(model, calibration, chosen, progress=progress)
    options = {index: layer_options(model, index, attention_kind, statistics) for index, statistics in seen}
    fixed = sum(numbers_per_token(layer) for i, layer in enumerate(model.config.per_layer_config) if i not in options)
    for index, option in spend(options, bytes_per_token // dtype.itemsize - fixed).items():
        fields[index] |= option.fields
    return configuration(model.config, fields)


def smallest_target(
    config: GQAConfig,
    attention_kind: str,
    bytes_per_token: int,
    *,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype,
) -> GQAConfig:
    """The least that `allocate` could choose; raises `ConversionError` where even that is beyond the budget."""
    if attention_kind not in ("gqa", "mla"):
        raise ConversionError(f"a budget chooses sizes of gqa or mla, and {attention_kind} has none to choose")
    if config.rope_parameters["rope_type"] == "longrope":
        raise ConversionError("a budget makes layers differ, which a model with rope_type 'longrope' cannot have")
    fields = layer_fields(config)
    for index in chosen_layers(config, layers):
        fields[index] |= next(iter(layer_sizes(config, index, attention_kind).values()), {})
    target = configuration(config, fields)
    least = cache_bytes_per_token(target, dtype)
    if bytes_per_token < least:
        raise ConversionError(
            f"a budget of {bytes_per_token} bytes per token is too small: the least with {attention_kind} in these "
            f"layers is {least}, and the source takes {cache_bytes_per_token(config, dtype)}"
        )
    return target


def numbers_per_token(layer: GQAConfig) -> int:
    return sum(ATTENTION_CLASSES[layer.attention_kind].cache_sizes(layer))


def layer_sizes(config: GQAConfig, index: int, kind: str) -> dict[int, Fields]:
    """The sizes below its present one that layer `index` may have, rising: by numbers per token, the layer's fields."""
    layer = config.per_layer_config[index]
    heads, size, sizes = layer.num_key_value_heads, layer_head_dim(layer), {}
    if kind == "mla":
        for numbers in sorted({max(4, round(share * 2 * heads * size)) for share in SHARES}):
            sizes[numbers] = latent_fields(config, index, None, None, numbers)
    else:
        for number in (number for number in range(1, heads) if heads % number == 0):
            sizes[2 * number * size] = grouped_fields(config, index, "mqa" if number == 1 else "gqa", number)
    return {numbers: fields for numbers, fields in sizes.items() if numbers < numbers_per_token(layer)}


def layer_options(model, index: int, kind: str, statistics: Statistics) -> list[Option]:
    """The sizes that layer `index` may have, and what each loses, by number; the present size loses nothing."""
    present = model.config.per_layer_config[index]
    options = [Option(numbers_per_token(present), 0.0, layer_fields(model.config)[index])]
    sizes = layer_sizes(model.config, index, kind)
    if not sizes:  # whatever the layer is, it stays
        return options
    heads = read_heads(model, index)
    moments = compute_moments(heads, statistics, centered=kind == "mla" or heads.biases[2])
    for numbers, fields in reversed(sizes.items()):
        if kind == "mla":
            rank, size, loss = best_split(heads, moments, numbers, SPLITS[0])
            fields = latent_fields(model.config, index, rank, size, None)
        else:
            partition = regrouped(moments, fields["num_key_value_heads"])
            loss = sum(merging_loss(moments, group) for group in partition)
        options.insert(0, Option(numbers, loss / statistics.residual, fields))
    return options


def spend(options: dict[int, list[Option]], numbers: int) -> dict[int, Option]:
    """One option of each layer with at most `numbers` in all, for which the smallest have room: from these, the step
    that saves most loss for its size, as long as there is room."""
    picked = {index: layer[0] for index, layer in options.items()}
    room = numbers - sum(option.numbers for option in picked.values())
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
