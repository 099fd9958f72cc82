"""Sizes of the layers under a budget for the whole model's cache, which is spent first where it lowers the loss most.

Layers lose different amounts at the same size, so equal sizes waste cache: QCQA (2406.10247), DHA (2406.06567).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..accounting import cache_bytes_per_token
from ..common.errors import ConversionError
from ..common.progress import Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM
from .layers.grouping import regrouped
from .layers.heads import read_heads
from .layers.latent import divided, latent_loss
from .layers.merging import Group
from .layers.moments import Statistics, compute_moments
from .layers.normed import latent_source
from .placement import check_placement
from .targets import (
    Fields,
    check_kind,
    chosen_layers,
    configuration,
    grouped_fields,
    latent_fields,
    layer_fields,
    layer_head_dim,
)
from .text.calibration import Batch
from .text.streams import collect

# Cache sizes that are tried for an MLA layer, as shares of its present one.
SHARES = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 5 / 32, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 1 / 2, 5 / 8, 3 / 4)

# Weight of the keys' errors against the values' in a layer's loss.
KEY_WEIGHT = 0.2


class SizeChoice(NamedTuple):
    """A size that a layer may have.

    Args:
        numbers: numbers that its cache takes per token.
        loss: what it loses, relative to the mean squared norm of the residual stream.
        fields: the layer's fields with this size.
    """

    numbers: int
    loss: float
    fields: Fields


def allocate(
    model: GQAForCausalLM,
    attention_kind: str,
    bytes_per_token: int,
    calibration: Sequence[Batch],
    *,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
) -> GQAConfig:
    """Return the target configuration whose cache takes at most `bytes_per_token` bytes in all layers together.

    A layer that would lose most may keep its attention, so the result is often a mixed model.

    Args:
        model: the model to convert.
        attention_kind: "gqa" chooses the number of key/value heads of each layer, "mla" its R and P.
        bytes_per_token: the budget.
        calibration: batches of model inputs; the loss of each layer is estimated on them.
        layers: indices of the layers that may change; `None` for all.
        dtype: of the cache; `None` for the model's.
        progress: wraps the iteration over the layers.

    Raises:
        ConversionError: the budget is too small, the kind has no sizes to choose, or the model is spread over devices.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.accounting import cache_bytes_per_token
        from modeling_gqa.conversion import allocate

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        batches = [{"input_ids": torch.randint(64, (2, 16))}]
        target = allocate(model, "gqa", cache_bytes_per_token(model.config) // 2, batches)
        assert cache_bytes_per_token(target) <= cache_bytes_per_token(model.config) // 2
        ```
    """
    check_placement(model)
    dtype = dtype or model.dtype
    smallest_target(model.config, attention_kind, bytes_per_token, layers=layers, dtype=dtype)  # or it is refused
    fields, chosen = layer_fields(model.config), chosen_layers(model.config, layers)
    seen = collect(model, calibration, chosen, progress=progress)
    choices = {index: layer_choices(model, index, attention_kind, statistics) for index, statistics in seen}
    fixed = sum(numbers_per_token(layer) for i, layer in enumerate(model.config.per_layer_config) if i not in choices)
    for index, choice in spend(choices, bytes_per_token // dtype.itemsize - fixed).items():
        fields[index] |= choice.fields
    return configuration(model.config, fields)


def smallest_target(
    config: GQAConfig,
    attention_kind: str,
    bytes_per_token: int,
    *,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype,
) -> GQAConfig:
    """Return the smallest configuration that `allocate` could choose.

    Raises:
        ConversionError: even this one is beyond the budget, or the kind has no sizes to choose.
    """
    if attention_kind not in ("gqa", "mla"):
        raise ConversionError(f"a budget chooses sizes of gqa or mla, and {attention_kind} has none to choose")
    if config.rope_parameters["rope_type"] == "longrope":
        raise ConversionError("a budget makes layers differ, which a model with rope_type 'longrope' cannot have")
    fields = layer_fields(config)
    for index in chosen_layers(config, layers):
        check_kind(config.per_layer_config[index], index)
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
    """Return how many numbers a layer caches per token."""
    return sum(ATTENTION_CLASSES[layer.attention_kind].cache_sizes(layer))


def layer_sizes(config: GQAConfig, index: int, kind: str) -> dict[int, Fields]:
    """Return the layer's fields by numbers per token, rising, for the sizes below the present one that it may have."""
    layer = config.per_layer_config[index]
    heads, size, sizes = layer.num_key_value_heads, layer_head_dim(layer), {}
    if kind == "mla":
        for numbers in sorted({max(4, round(share * 2 * heads * size)) for share in SHARES}):
            sizes[numbers] = latent_fields(config, index, None, None, numbers)
    else:
        for number in (number for number in range(1, heads) if heads % number == 0):
            sizes[2 * number * size] = grouped_fields(config, index, "mqa" if number == 1 else "gqa", number)
    return {numbers: fields for numbers, fields in sizes.items() if numbers < numbers_per_token(layer)}


def layer_choices(model: GQAForCausalLM, index: int, kind: str, statistics: Statistics) -> list[SizeChoice]:
    """Return the sizes that layer `index` may have, smallest first; the last is the present one, without loss."""
    present = model.config.per_layer_config[index]
    choices = [SizeChoice(numbers_per_token(present), 0.0, layer_fields(model.config)[index])]
    sizes = layer_sizes(model.config, index, kind)
    if not sizes:  # the layer keeps its attention
        return choices
    heads = read_heads(model, index)
    if kind == "mla":
        heads, moments = latent_source(heads, statistics)
    else:
        moments = compute_moments(heads, statistics, centered=heads.biases[2])
    for numbers, fields in reversed(sizes.items()):
        if kind == "mla":
            rank, size = divided(numbers, heads.planes, len(heads.k), heads.k.shape[1])
            loss = latent_loss(heads, moments, rank, size, KEY_WEIGHT)
            fields = latent_fields(model.config, index, rank, size, None)
        else:
            partition = regrouped(moments, fields["num_key_value_heads"])
            loss = sum(Group.of(moments, group).lowrank_loss() for group in partition)
        choices.insert(0, SizeChoice(numbers, loss / statistics.residual, fields))
    return choices


def spend(choices: dict[int, list[SizeChoice]], numbers: int) -> dict[int, SizeChoice]:
    """Choose one size of each layer, at most `numbers` numbers per token in all.

    It starts from the smallest sizes, which must fit, and takes the step that saves most loss for the numbers it adds,
    as long as one fits.
    """
    picked = {index: layer[0] for index, layer in choices.items()}
    room = numbers - sum(choice.numbers for choice in picked.values())
    while True:
        steps = [
            ((now.loss - choice.loss) / (choice.numbers - now.numbers), index, choice)
            for index, now in picked.items()
            for choice in choices[index]
            if now.numbers < choice.numbers <= now.numbers + room and choice.loss < now.loss
        ]
        if not steps:
            return picked
        _, index, choice = max(steps, key=lambda step: step[:2])
        room -= choice.numbers - picked[index].numbers
        picked[index] = choice
