"""The configuration that the options of a conversion lead to, and what they ask in vain."""

from typing import NamedTuple

import torch

from ...common.errors import UserError
from ...configuration_gqa import GQAConfig
from ...costs import cache_bytes_per_token
from ..allocation import numbers_per_token, smallest_target
from ..convert import describe
from ..layers.latent import divided
from ..targets import (
    chosen_layers,
    configuration,
    exact_latent_sizes,
    is_exact,
    latent_fields,
    latent_input,
    layer_fields,
    lossy_layers,
    rotary_planes,
    target_config,
)
from .options import SIZES, Options
from .serving import served_sizes


class Goal(NamedTuple):
    """What the options of a conversion lead to from a source.

    Args:
        options: the options, with the sizes in them that were chosen for `--for`.
        chosen: a sentence on what became of the sizes that were given; "" where nothing was chosen.
        target: the result's configuration; `None`: a budget is to be shared out.
        exact: whether it computes the source's function.
    """

    options: Options
    chosen: str
    target: GQAConfig | None
    exact: bool

    @property
    def later(self) -> bool:
        """Whether sizes are chosen while converting, by what the layers would lose."""
        return self.target is None or (self.options.shares_cache and not self.exact)


def find_goal(options: Options, config: GQAConfig, dtype: torch.dtype) -> Goal:
    """Return what the options lead to.

    Args:
        options: of the conversion.
        config: the source's.
        dtype: of the result.

    Raises:
        UserError: it cannot be had from this source, or caches more than the source.
    """
    chosen, target, exact = "", None, False
    if options.engine is not None and options.attention_kind == "mla":
        options, chosen = served_sizes(options, config, dtype)
    if options.budget is not None:
        least = smallest_target(config, options.attention_kind, options.budget, layers=options.layers, dtype=dtype)
        lossy_layers(config, least)  # raises where it cannot be had
        present = cache_bytes_per_token(config, dtype)
        if options.budget >= present:
            raise UserError(f"a budget of {options.budget} bytes per token changes nothing: the source takes {present}")
    else:
        target = sized_target(options, config, dtype)
        exact = not lossy_layers(config, target)
    if options.attention_kind == "mla" and not exact and options.method not in ("auto", "lowrank"):
        raise UserError(f"--method={options.method} merges heads, which MLA does not: choose auto or lowrank")
    return Goal(options, chosen, target, exact)


def sized_target(options: Options, config: GQAConfig, dtype: torch.dtype) -> GQAConfig:
    """Return the result's configuration by the sizes that were given."""
    sizes = {name: getattr(options, name) for name in SIZES if name != "cache_bytes"}
    if options.cache_bytes is None:
        target = target_config(config, options.attention_kind, layers=options.layers, **sizes)
        refuse_larger(options, config, options.cache_size, f"--cache-size={options.cache_size}")
        return target
    sizes["cache_size"] = options.cache_bytes // dtype.itemsize
    try:
        target = target_config(config, options.attention_kind, layers=options.layers, **sizes)
    except UserError as error:
        # The user gave bytes, so the message names them.
        said = str(error).replace(f"cache_size={sizes['cache_size']}", f"--cache-bytes={options.cache_bytes}")
        raise UserError(f"{said} (a number takes {dtype.itemsize} bytes)") from error
    refuse_larger(options, config, sizes["cache_size"], f"--cache-bytes={options.cache_bytes}", dtype.itemsize)
    return target


def refuse_larger(options: Options, config: GQAConfig, size: int | None, given: str, unit: int = 1) -> None:
    """Raise `UserError` for a cache that is larger than the source's and than exact MLA's."""
    layers = {index: config.per_layer_config[index] for index in chosen_layers(config, options.layers)}
    most = {i: max(numbers_per_token(layer), sum(exact_latent_sizes(layer))) for i, layer in layers.items()}
    if size is not None and size > max(most.values()):
        index = max(most, key=lambda index: most[index])
        now = numbers_per_token(layers[index]) * unit
        raise UserError(
            f"{given} is more than layer {index} caches now, which is {now}, and saves nothing: choose at most "
            f"{most[index] * unit}, where MLA can be exact, or less"
        )


def layers_after(source: GQAConfig, goal: Goal) -> list[str]:
    """Return what each layer of the configuration `source` will be."""
    options, target = goal.options, goal.target
    after = [describe(layer) for layer in layer_fields(target or source)]
    for index in chosen_layers(source, options.layers) if goal.later else ():
        layer = target.per_layer_config[index] if target else None
        size = f"R + P = {layer.kv_lora_rank + layer.qk_rope_head_dim}" if layer else "chosen by loss"
        after[index] = f"{options.attention_kind}, {size}"
    return after


def expected_target(options: Options, config: GQAConfig, target: GQAConfig | None, dtype: torch.dtype) -> GQAConfig:
    """Return the configuration that the result will have or, where its sizes are chosen later, one about as large.

    Args:
        options: of the conversion.
        config: the source's.
        target: as `find_goal` has it.
        dtype: of the result.
    """
    fields = layer_fields(target or config)
    if target is None and options.attention_kind == "gqa":  # whose layers are no larger than the source's
        return smallest_target(config, "gqa", options.budget or 0, layers=options.layers, dtype=dtype)
    later = options.shares_cache or target is None
    for index in chosen_layers(config, options.layers) if later else ():
        layer = config.per_layer_config[index]
        if layer.attention_kind == "mla" or (target and is_exact(config, target, index)):
            continue
        after = target.per_layer_config[index] if target else None
        share = (options.budget or 0) / cache_bytes_per_token(config, dtype)
        total = after.kv_lora_rank + after.qk_rope_head_dim if after else round(share * numbers_per_token(layer))
        shape = rotary_planes(layer), layer.num_key_value_heads, layer.head_dim, latent_input(layer)
        sizes = divided(max(total, 4), *shape)
        fields[index] |= latent_fields(config, index, *sizes, None)
    return configuration(target or config, fields)
