"""What a conversion is asked for: its options, and the configuration that they lead to from a source."""

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.options import SIZES, spelled
from modeling_gqa_vllm.kernels import FAST_SIZES

from ..checkpoints.writing import refuse_overlap
from ..common.batches import usable_device
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token
from .targets import (
    cached_numbers,
    chosen_layers,
    configuration,
    describe,
    divided,
    exact_latent_sizes,
    is_exact,
    latent_fields,
    latent_input,
    layer_fields,
    layer_head_dim,
    lossy_layers,
    mean_bytes,
    target_config,
)
from .text import check_text
from .transform_coding import least_bytes

# A cache that is asked for may become larger by this share of it where a fast kernel of vLLM takes that.
MORE = 1 / 8
# Where the cache is rounded too and no size is given, MLA gets one of these shares of the source's numbers. The first
# that is tried is the one where a number has about these bits.
ROUNDED_SHARES = (3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
ROUNDED_BITS = 3.25


@dataclass
class Options(declared.Running, declared.Text, declared.HowToConvert, declared.NewAttention, declared.Files):
    """What to convert, to what, and on which text; each field is an option of `modeling-gqa convert` of its name.

    Raises:
        UserError: options do not fit together, or cannot work on this machine.
    """

    layers: list[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._check_sizes_and_method()
        if self.is_local:
            refuse_overlap(Path(self.source), self.target)
        check_text(self, self.target)
        self.device = usable_device(self.device)

    def _check_sizes_and_method(self) -> None:
        sizes = [spelled(name) for name in SIZES if getattr(self, name) is not None]
        if self.budget is not None and sizes:
            raise UserError(f"--budget chooses the sizes itself: leave {' and '.join(sizes)} out")
        if self.budget is not None and self.attention_kind not in ("gqa", "mla"):
            raise UserError(f"--budget has nothing to choose for {self.attention_kind}: give gqa or mla")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(
                f"--budget={self.budget:g} must be positive: bytes per token, or below 1 their share of the source's"
            )
        if self.budget is not None and not self.text:
            raise UserError("--budget needs --text: without it no layer's loss is known")
        for name, kinds in (("regroup", ("gqa", "mqa")), ("key_mean", ("mla",))):
            if (value := getattr(self, name)) is not None and self.attention_kind not in kinds:
                option = spelled(name if value else f"no_{name}")
                raise UserError(f"{option} has no effect on {self.attention_kind}: leave it out")
        for name in ("refit", "refine", "polish"):
            if getattr(self, name) and not self.text:
                raise UserError(f"{spelled(name)} needs --text: the layers are fitted on it")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed={self.seed} must be from 0 to 2**63 - 1")
        if self.cache_bits is not None:
            self._check_bits()
        same = ["cache_size", "cache_bytes", *(["cache_share"] if self.cache_bits is None else ["num_key_value_heads"])]
        if len(given := [spelled(name) for name in same if getattr(self, name) is not None]) > 1:
            raise UserError(f"{' and '.join(given)} say the same: leave one out")

    def _check_bits(self) -> None:
        if not self.text:
            raise UserError("--cache-bits needs --text: without it nobody knows where bits matter")
        if self.cache_share is None:
            raise UserError("--cache-bits needs --cache-share: what the rounded cache takes by the source's")
        for name, why in (
            ("budget", "takes its budget from --cache-share"),
            ("layers", "rounds and trains all layers"),
            ("engine", "makes a cache that generate alone keeps"),
        ):
            if getattr(self, name) is not None:
                option = "--for" if name == "engine" else spelled(name)
                raise UserError(f"--cache-bits {why}: leave {option} out")
        if self.attention_kind == "gqa" and self.num_key_value_heads is None:
            raise UserError("--cache-bits with gqa needs --num-key-value-heads: --cache-share is of bytes")

    @property
    def is_local(self) -> bool:
        """Whether the source is a path on this machine, and no name on the Hub."""
        return Path(self.source).exists()

    @property
    def has_size(self) -> bool:
        """Whether a size is given, beside a share of the source's cache."""
        return any(getattr(self, name) is not None for name in SIZES if name != "cache_share")

    def rounded_bytes(self, config: GQAConfig, dtype: torch.dtype) -> int | None:
        """Return the bytes per token of the rounded cache; `None` where it stays unrounded."""
        return int((self.cache_share or 0) * cache_bytes_per_token(config, dtype)) if self.cache_bits else None

    @property
    def divides_cache(self) -> bool:
        """Whether the conversion divides the cache between R and P, which may be given."""
        given = (self.kv_lora_rank, self.qk_rope_head_dim) != (None, None)
        return self.attention_kind == "mla" and not given and bool(self.text)

    def as_json(self) -> dict[str, Any]:
        """Return the options in types that JSON has; files and folders by their names, without this machine's paths."""
        options = {item.name: getattr(self, item.name) for item in fields(Options)}
        for name in ("text", "evaluation_text"):
            options[name] = [Path(path).absolute().name for path in options[name] or ()]
        source = Path(self.source).resolve().name if self.is_local else self.source
        return options | {"source": source, "target": self.target.resolve().name}


class Goal(NamedTuple):
    """What the options of a conversion lead to from a source.

    Args:
        options: the options, with the sizes in them that were chosen for `--for vllm`.
        target: the result's configuration; `None`: a budget is to be shared out.
        exact: whether it computes the source's function.
        sizes: from small to large, the configurations one of which the result has; `target` is tried first.
        budget: bytes per token that are to be shared out.
    """

    options: Options
    target: GQAConfig | None
    exact: bool
    sizes: Sequence[GQAConfig] = ()
    budget: int | None = None

    @property
    def later(self) -> bool:
        """Whether sizes are chosen while converting, by what the layers would lose."""
        return self.target is None or bool(self.sizes) or (self.options.divides_cache and not self.exact)


def find_goal(options: Options, config: GQAConfig, dtype: torch.dtype) -> Goal:
    """Return what the options lead to from the configuration `config`, with a result in `dtype`.

    Raises:
        UserError: it cannot be had from this source, or caches more than the source.
    """
    options = with_shared_size(options, config, dtype)
    if options.engine is not None and options.attention_kind == "mla":
        options = served_sizes(options, config, dtype)
    target, sizes, budget = None, list[GQAConfig](), None
    if options.budget is not None:
        from .allocation import smallest_target

        exact, present = False, mean_bytes(config, dtype)
        budget = int(options.budget * (present if options.budget < 1 else 1))
        least = smallest_target(config, options.attention_kind, budget, layers=options.layers, dtype=dtype)
        lossy_layers(config, least)  # raises where it cannot be had
        if budget >= present:
            over = f", on average over {config.max_position_embeddings:,} tokens" if config.sliding_window else ""
            message = f"a budget of {budget} bytes per token changes nothing: the source takes {present}{over}"
            raise UserError(message)
    else:
        if options.cache_bits is not None and options.attention_kind == "mla" and not options.has_size:
            target, sizes = sizes_to_round(options, config, dtype)
        else:
            target = sized_target(options, config, dtype)
        exact = all(not lossy_layers(config, each) for each in sizes or [target])
    if options.attention_kind == "mla" and not exact and options.method not in ("auto", "lowrank"):
        raise UserError(f"--method={options.method} merges heads, which MLA does not: choose auto or lowrank")
    return Goal(options, target, exact, sizes, budget)


def with_shared_size(options: Options, config: GQAConfig, dtype: torch.dtype) -> Options:
    """Return the options with the size that `--cache-share` says, if it is a share of the numbers."""
    if (share := options.cache_share) is None:
        return options
    if not 0 < share < 1:
        raise UserError(f"--cache-share={share:g} must be between 0 and 1")
    if options.cache_bits is not None:
        return options
    if clash := [spelled(name) for name in SIZES if name != "cache_share" and getattr(options, name) is not None]:
        raise UserError(f"--cache-share chooses the size: leave {' and '.join(clash)} out")
    layers = [config.per_layer_config[index] for index in chosen_layers(config, options.layers)]
    options = copy(options)
    if options.attention_kind == "mla":
        options.cache_size = max(int(share * max(map(cached_numbers, layers))), 1)
    elif options.attention_kind == "gqa":
        present = [cached_numbers(layer) / (2 * layer_head_dim(layer)) for layer in layers]  # in key/value heads
        heads = share * max(present)
        if heads < 1 or heads != int(heads):
            raise UserError(f"--cache-share={share:g} leaves {heads:g} key/value heads: choose one for a whole number")
        options.num_key_value_heads = int(heads)
        if min(present) <= heads:  # in layers that would not shrink
            chosen = zip(chosen_layers(config, options.layers), present, strict=True)
            options.layers = [index for index, number in chosen if number > heads]
    else:
        raise UserError(f"--cache-share has nothing to choose for {options.attention_kind}: give gqa or mla")
    return options


def sizes_to_round(options: Options, config: GQAConfig, dtype: torch.dtype) -> tuple[GQAConfig, list[GQAConfig]]:
    """Return the MLA that is tried first, and all that may be, from small to large, where the cache is rounded too."""
    present, share = max(map(cached_numbers, config.per_layer_config)), options.cache_share or 0
    budget = options.rounded_bytes(config, dtype) or 0
    targets, sized = dict[int, GQAConfig](), copy(options)
    for part in ROUNDED_SHARES:
        sized.cache_size = max(int(part * present), 1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is warned of may not be of the result
                target = sized_target(sized, config, dtype)
        except UserError as error:
            if part == ROUNDED_SHARES[-1] and not targets:
                raise UserError(f"--cache-bits auto finds no size for MLA: {error}") from error
            continue
        if not targets or least_bytes(target, dtype) <= budget:
            targets[sized.cache_size] = target
    wanted = share * present * 8 * dtype.itemsize / ROUNDED_BITS
    first = min(targets, key=lambda size: abs(math.log(size / wanted)))
    return targets[first], list(targets.values())


def sized_target(options: Options, config: GQAConfig, dtype: torch.dtype) -> GQAConfig:
    """Return the result's configuration by the sizes that were given."""
    sizes = {name: getattr(options, name) for name in SIZES if name not in ("cache_bytes", "cache_share")}
    given, unit = f"--cache-size={options.cache_size}", 1
    if options.cache_share is not None:
        given = f"--cache-share={options.cache_share:g}"
    if options.cache_bytes is not None:
        given, unit = f"--cache-bytes={options.cache_bytes}", dtype.itemsize
        sizes["cache_size"] = options.cache_bytes // unit
    try:
        target = target_config(config, options.attention_kind, layers=options.layers, **sizes)
    except UserError as error:
        if options.cache_bytes is None and options.cache_share is None:
            raise
        # The message names what the user gave.
        said = str(error).replace(f"cache_size={sizes['cache_size']}", given)
        raise UserError(f"{said} (in numbers per token and layer, of {dtype.itemsize} bytes each)") from error
    refuse_larger(options, config, sizes["cache_size"], given, unit)
    return target


def refuse_larger(options: Options, config: GQAConfig, size: int | None, given: str, unit: int) -> None:
    """Raise `UserError` for a cache of `size` numbers that is larger than the source's and than exact MLA's."""
    layers = {index: config.per_layer_config[index] for index in chosen_layers(config, options.layers)}
    most = {i: max(cached_numbers(layer), sum(exact_latent_sizes(layer))) for i, layer in layers.items()}
    if size is not None and size > max(most.values()):
        index = max(most, key=lambda index: most[index])
        now = cached_numbers(layers[index]) * unit
        raise UserError(
            f"{given} is more than layer {index} caches now, which is {now}, and saves nothing: choose at most "
            f"{most[index] * unit}, where MLA can be exact, or less"
        )


def served_sizes(options: Options, config: GQAConfig, dtype: torch.dtype) -> Options:
    """Return the options of a conversion to MLA with R and P that vLLM's fast kernels take, or as they are.

    A cache size becomes the largest of `FAST_SIZES` that this model can have and that is at most an eighth more. R that
    is given alone gets P from there, and without any size it is the largest. P that is given, other sizes, a budget and
    sizes with which the conversion is exact are kept.
    """
    if options.budget is not None or options.qk_rope_head_dim is not None:
        return options
    layers = [config.per_layer_config[index] for index in chosen_layers(config, options.layers)]
    asked = options.cache_bytes // dtype.itemsize if options.cache_bytes is not None else options.cache_size
    if asked is not None and asked > max(map(cached_numbers, layers), default=0):
        return options  # which is refused, or exact
    if tried_loss(options, config, kv_lora_rank=options.kv_lora_rank, cache_size=asked) == []:
        return options
    for rank, rope in FAST_SIZES:
        wanted = options.kv_lora_rank in (None, rank) and (asked is None or rank + rope <= asked * (1 + MORE))
        fits = all(rank <= latent_input(layer) and rank + rope < cached_numbers(layer) for layer in layers)
        if wanted and fits and tried_loss(options, config, kv_lora_rank=rank, qk_rope_head_dim=rope) is not None:
            sized = copy(options)
            sized.kv_lora_rank, sized.qk_rope_head_dim, sized.cache_size, sized.cache_bytes = rank, rope, None, None
            return sized
    return options


def tried_loss(options: Options, config: GQAConfig, **sizes: int | None) -> list[int] | None:
    """Return which layers lose something as MLA of these sizes, `None` where it cannot be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is warned of is not of the result
        try:
            return lossy_layers(config, target_config(config, "mla", layers=options.layers, **sizes))
        except UserError:
            return None


def layers_after(source: GQAConfig, goal: Goal) -> list[str]:
    """Return what each layer of the configuration `source` will be."""
    options, target = goal.options, goal.target
    after = [describe(layer) for layer in (target or source).per_layer_config]
    for index in chosen_layers(source, options.layers) if goal.later else ():
        layer = target.per_layer_config[index] if target else None
        size = f"R + P = {cached_numbers(layer)}" if layer and not goal.sizes else "size chosen by loss"
        after[index] = f"{options.attention_kind}, {size}"
    return after


def expected_target(goal: Goal, config: GQAConfig, dtype: torch.dtype) -> GQAConfig:
    """Return the configuration that the result will have or, where its sizes are chosen later, one about as large."""
    from .allocation import smallest_target

    options, target = goal.options, goal.sizes[-1] if goal.sizes else goal.target
    if target is None and options.attention_kind == "gqa":  # whose layers are no larger than the source's
        return smallest_target(config, "gqa", goal.budget or 0, layers=options.layers, dtype=dtype)
    fields = layer_fields(target or config)
    for index in chosen_layers(config, options.layers) if goal.later else ():
        layer = config.per_layer_config[index]
        if layer.attention_kind == "mla" or (target and is_exact(config, target, index)):
            continue
        if target:
            total = cached_numbers(target.per_layer_config[index])
        else:
            share = (goal.budget or 0) / mean_bytes(config, dtype)
            total = min(max(round(share * cached_numbers(layer)), 4), sum(exact_latent_sizes(layer)))
        fields[index] |= latent_fields(config, index, *divided(total, layer), None)
    return configuration(target or config, fields)
