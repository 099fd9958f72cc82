"""Sizes of the layers under a budget for the whole model's cache, which is spent first where it saves most loss.

Layers lose different amounts at the same size, so equal sizes waste cache: QCQA (2406.10247), DHA (2406.06567). What a
size costs is measured: one layer at a time is converted and fitted on text, in the source. Its error at several sizes
is weighed by what one such error does to the model's predictions.

Shapes: B rows, T tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..attention import Attention
from ..common.batches import Batch, first_batches
from ..common.progress import Progress
from ..configuration_gqa import GQAConfig
from ..costs import CostedModel
from ..modeling_gqa import GQAForCausalLM
from .divergence import compare_states, predicted_positions, predicted_states, require_one_device
from .fitting import fit
from .sequential import NOT_CHOSEN, Setting, as_own, best_latent, convert_layer, new_attention, read_latent_source
from .streams import Streams, streams
from .targets import (
    Fields,
    cached_numbers,
    check_kind,
    chosen_layers,
    configuration,
    divided,
    exact_latent_sizes,
    grouped_fields,
    latent_fields,
    layer_fields,
    layer_head_dim,
    mean_bytes,
)

# Cache sizes that are considered for an MLA layer, as shares of its present one.
SHARES = tuple(part / 48 for part in range(2, 37))
# A size is tried where it is this number of times the last that was tried; the others are estimated between these.
STEP = 2
# Tokens on which a layer is tried: this number, or this many times the numbers that its output projection takes.
TRIAL_TOKENS, TOKENS_BY_INPUT = 8192, 4
# Tokens on which the change of the predictions is measured.
KL_TOKENS = 4096
# A loss in the last layer counts this number of times one in the first, part of which the layers after it mend when
# they are converted. Measured on SmolLM2-135M: the whole conversion gained 1.3 to 4 times what a layer alone did.
LAST_BY_FIRST = 3.0


class SizeChoice(NamedTuple):
    """A size that a layer may have.

    Args:
        numbers: numbers that its cache takes per token; in `allocate` those of `mean_bytes`.
        loss: the estimated KL(source || converted) in nats per token where this layer alone has this size, less in the
            first layers; see `LAST_BY_FIRST`.
        fields: the layer's fields with this size.
    """

    numbers: float
    loss: float
    fields: Fields


def allocate(
    model: PreTrainedModel,
    attention_kind: str,
    bytes_per_token: int,
    calibration: Sequence[Batch],
    *,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    method: str = "auto",
    regroup: bool | None = None,
    refit: bool | None = None,
    key_mean: bool = True,
    seed: int = 0,
    progress: Progress = iter,
) -> GQAConfig:
    """Return the target configuration whose cache takes at most `bytes_per_token` bytes in all layers together.

    A layer that would lose most may keep its attention, so the result is often a mixed model. A layer with a window
    keeps the window's tokens alone, so it seldom changes: bytes per token are those after `max_position_embeddings`
    tokens, divided by these tokens.

    Args:
        model: the model to convert, as for `convert_model`.
        attention_kind: "gqa" chooses the number of key/value heads of each layer, "mla" its R + P, which
            `convert_model(divide_cache=True)` divides better than the result does.
        bytes_per_token: the budget.
        calibration: batches of model inputs; each layer is tried on the first of them.
        layers: indices of the layers that may change; `None` for all.
        dtype: of the cache; `None` for the model's.
        method, regroup, refit, key_mean, seed: those of the conversion that follows, as for `convert_model`; layers are
            tried by its first setting, without gradient steps.
        progress: wraps the iteration over the layers.

    Raises:
        UserError: the budget is too small, the kind has no sizes to choose, or the model is spread over devices.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.costs import cache_bytes_per_token
        from modeling_gqa.conversion import allocate

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        batches = [{"input_ids": torch.randint(64, (2, 16))}]
        target = allocate(model, "gqa", cache_bytes_per_token(model.config) // 2, batches)
        assert cache_bytes_per_token(target) <= cache_bytes_per_token(model.config) // 2
        ```
    """
    require_one_device(model)
    model, dtype = as_own(model), dtype or model.dtype
    smallest_target(model.config, attention_kind, bytes_per_token, layers=layers, dtype=dtype)  # or it is refused
    fields, chosen = layer_fields(model.config), chosen_layers(model.config, layers)
    setting = Setting.start(method, regroup, refit, key_mean=key_mean, seed=seed)
    choices = measured_choices(model, attention_kind, chosen, calibration, setting, progress)
    length = model.config.max_position_embeddings
    kept = [layer.visible_tokens(length) / length for layer in CostedModel(model.config).layers]
    for index, sizes in choices.items():
        choices[index] = [size._replace(numbers=kept[index] * size.numbers) for size in sizes]
    layers_kept = enumerate(zip(kept, model.config.per_layer_config, strict=True))
    fixed = sum(share * cached_numbers(layer) for i, (share, layer) in layers_kept if i not in choices)
    for index, choice in spend(choices, bytes_per_token / dtype.itemsize - fixed).items():
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
    """Return the smallest configuration that `allocate` could choose; raises `UserError` where it cannot choose any."""
    if attention_kind not in ("gqa", "mla"):
        raise UserError(f"a budget chooses sizes of gqa or mla, and {attention_kind} has none to choose")
    fields = layer_fields(config)
    for index in chosen_layers(config, layers):
        check_kind(config.per_layer_config[index], index)
        fields[index] |= next(iter(layer_sizes(config, index, attention_kind).values()), {})
    target = configuration(config, fields)
    least = mean_bytes(target, dtype)
    if bytes_per_token < least:
        raise UserError(
            f"a budget of {bytes_per_token} bytes per token is too small: the least with {attention_kind} in these "
            f"layers is {least}, and the source takes {mean_bytes(config, dtype)}"
        )
    return target


def layer_sizes(config: GQAConfig, index: int, kind: str, factor: float = 1.0) -> dict[int, Fields]:
    """Return the layer's fields by numbers per token, rising, for the sizes below the present one.

    `factor`: of MLA's P, as for `divided`.
    """
    layer = config.per_layer_config[index]
    heads, size, sizes = layer.num_key_value_heads, layer_head_dim(layer), {}
    if kind == "mla":
        most = sum(exact_latent_sizes(layer))
        for numbers in sorted({min(most, max(4, round(share * 2 * heads * size))) for share in SHARES}):
            sizes[numbers] = latent_fields(config, index, *divided(numbers, layer, factor), None)
    else:
        for number in (number for number in range(1, heads) if heads % number == 0):
            sizes[2 * number * size] = grouped_fields(config, index, "mqa" if number == 1 else "gqa", number)
    return {numbers: fields for numbers, fields in sizes.items() if numbers < cached_numbers(layer)}


@torch.no_grad()
def measured_choices(
    model: GQAForCausalLM,
    kind: str,
    layers: Sequence[int],
    calibration: Sequence[Batch],
    setting: Setting,
    progress: Progress,
) -> dict[int, list[SizeChoice]]:
    """Return the sizes that each layer may have, smallest first; the last is the present one, without loss."""
    config, choices = model.config, {}
    width = max(layer.num_attention_heads * layer_head_dim(layer) for layer in config.per_layer_config)
    batches = first_batches(calibration, max(TRIAL_TOKENS, TOKENS_BY_INPUT * width))
    with streams(model, batches) as text:
        ends = {n: predicted_states(model, batch) for n, batch in enumerate(first_batches(batches, KL_TOKENS))}
        for index in progress(range(max(layers) + 1)):
            smaller: list[SizeChoice] = []
            if index in layers and layer_sizes(config, index, kind):
                weight = LAST_BY_FIRST ** (index / max(config.num_hidden_layers - 1, 1))
                smaller = [x._replace(loss=weight * x.loss) for x in tried_sizes(text, index, kind, setting, ends)]
            else:
                text.advance_both(index)
            if index in layers:
                present = SizeChoice(cached_numbers(config.per_layer_config[index]), 0.0, layer_fields(config)[index])
                choices[index] = [*smaller, present]
    return choices


def tried_sizes(
    text: Streams, index: int, kind: str, setting: Setting, ends: Mapping[int, torch.Tensor]
) -> list[SizeChoice]:
    """Return the smaller sizes of layer `index`, smallest first, and send the source through the layer.

    `ends` are the source's `predicted_states` by number of the batch, for the batches that a loss is measured on.
    """
    model, statistics = text.model, text.collect(index)
    own, sizes = layer_fields(model.config)[index], layer_sizes(model.config, index, kind)
    source = read_latent_source(model, index, statistics) if kind == "mla" else None

    def tried(fields: Fields) -> tuple[float, Attention]:
        new = convert_layer(model, index, own | fields, statistics, setting, True, choice, source)
        attention = new_attention(model, index, new)
        return max(fit(text, index, attention, setting.refit).error, torch.finfo(torch.float32).tiny), attention

    # With this size, which not all layers have, rounding alone is left: no measure for the sizes below it.
    exact = sum(exact_latent_sizes(model.config.per_layer_config[index])) if kind == "mla" else 0
    some, choice = spread([numbers for numbers in sizes if numbers != exact] or list(sizes)), NOT_CHOSEN
    probe = some[:3][-1]  # whose loss is far above the noise of rounding
    if kind == "mla":
        choice, _ = best_latent(text, index, own | sizes[probe], statistics, replace(setting, divide_cache=True))
        sizes = layer_sizes(model.config, index, kind, choice.factor)
    errors = {numbers: tried(sizes[numbers]) for numbers in some}
    error, attention = errors[probe]
    loss_by_error = kl_alone(text, index, attention, ends) / error
    text.advance_source(index)
    known = {numbers: error for numbers, (error, _) in errors.items()}
    losses = {n: 0.0 if n == exact else loss_by_error * between(n, known) for n in sizes}
    return [SizeChoice(n, losses[n], own | sizes[n]) for n in sizes]


def between(number: int, known: Mapping[int, float]) -> float:
    """Return what belongs to `number`: its logarithm is linear in the number's between two known, constant outside."""
    return math.exp(np.interp(math.log(number), np.log(list(known)), np.log(list(known.values()))))


def spread(sizes: Sequence[int]) -> list[int]:
    """Return some of rising sizes: the first, each that is `STEP` times the last of them, and the last."""
    found = [sizes[0]]
    for size in sizes[1:]:
        if size >= STEP * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def kl_alone(text: Streams, index: int, attention: Attention, ends: Mapping[int, torch.Tensor]) -> float:
    """Return KL(source || model) in nats per token for the source in which `attention` replaces layer `index`'s."""
    model, total, tokens = text.model, 0.0, 0
    layer, *rest = model.model.layers[index:]
    for passage in text.passages():
        if passage.number not in ends:  # which are of the first batches
            break
        x = passage.states[0]  # (B, T, E)
        x = x + layer.attention_output(attention(layer.attention_input(x), **passage.arguments[index])[0])
        x = x + layer.mlp_output(x)
        for number, other in enumerate(rest, start=index + 1):
            x = other(x, **passage.arguments[number])
        batch = text.batches[passage.number]
        predicted = predicted_positions(batch).to(x.device)
        x = model.model.logits_scaling(model.model.norm(x))
        states = ends[passage.number], x[:, :-1][predicted]
        targets = batch["input_ids"][:, 1:].to(x.device)[predicted]
        total += compare_states([model.lm_head] * 2, states, targets)[2].item()
        tokens += len(targets)
    return total / max(tokens, 1)


def spend(choices: dict[int, list[SizeChoice]], numbers: float) -> dict[int, SizeChoice]:
    """Choose one size of each layer, at most `numbers` numbers per token in all.

    It starts from the smallest sizes, and takes the step that saves most loss for the numbers it adds, while one fits.
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
