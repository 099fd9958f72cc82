"""Sizes for vLLM's fast kernels, what a configuration costs, and which engines run it on which devices."""

import warnings
from copy import copy
from math import inf

import torch

from ...checkpoints.exporting import export_config
from ...checkpoints.gguf_writing import refuse_for_llama_cpp
from ...common.errors import UserError, listed
from ...configuration_gqa import GQAConfig
from ...costs import cache_bytes_per_token
from ...costs.kernels import (
    CPU_HEADS,
    FAST_SIZES,
    FAST_SUMS,
    FLASH_MOST,
    FLASH_MULTIPLE,
    PROMPT_SIZES,
    STOCK_CPU_SUM,
    grouped_kernel,
    is_mistaken,
    latent_kernels,
    reads_prompts,
)
from ...costs.layers import as_model
from ..allocation import numbers_per_token
from ..targets import chosen_layers, is_exact, latent_input, lossy_layers, target_config
from .options import Options, spelled
from .report import runs

# A cache that is asked for may become larger by this share of it where a fast kernel takes that.
MORE = 1 / 8
GIVEN = ("cache_size", "cache_bytes", "kv_lora_rank", "qk_rope_head_dim")
FAST = " or ".join(f"{rank} + {rope}" for rank, rope in FAST_SIZES)
NEEDED = (
    "vLLM needs: this package beside it. Without it vLLM caches expanded keys and values, and refuses MLA whose layers "
    "differ."
)
NOT_NEEDED = "vLLM needs: nothing; without this package, --trust-remote-code."
# Of MLA, whose rotary frequencies are chosen while converting.
UNKNOWN = "Elsewhere: transformers alone, as most MLA that is converted; modeling-gqa inspect says it of the result."
NOT_EXPORTED = "Elsewhere: transformers alone; modeling-gqa export says why."
CHUNKS = "; no cached prefixes and no prompts in chunks, for which R + P is {}"


def served_sizes(options: Options, config: GQAConfig, dtype: torch.dtype) -> tuple[Options, str]:
    """Return the options with sizes for the engine in them, and what became of the sizes that were given.

    A cache size becomes the largest of `FAST_SIZES` that this model can have and that is at most an eighth more. R that
    is given alone gets P from there, and without any size it is the largest. Other sizes are kept, and exact ones too.

    Args:
        options: of a conversion to MLA.
        config: the source's.
        dtype: of the result.
    """
    if options.budget is not None:
        return options, "--budget chooses R and P by layer."
    given = {name: value for name in GIVEN if (value := getattr(options, name)) is not None}
    shown = " and ".join(f"{spelled(name)}={value}" for name, value in given.items())
    if "qk_rope_head_dim" in given:
        return options, f"{shown} {'is' if len(given) == 1 else 'are'} kept."
    asked = options.cache_size
    if options.cache_bytes is not None:
        asked = options.cache_bytes // dtype.itemsize
    present = [numbers_per_token(config.per_layer_config[index]) for index in chosen_layers(config, options.layers)]
    if asked is not None and asked > max(present, default=0):
        return options, ""  # which is refused, or exact
    if is_exact_as_given(options, config, asked):
        return options, f"{shown or 'The least size'} is kept, since the conversion is exact with it."
    fitting = [size for size in FAST_SIZES if is_possible(options, config, *size)]
    most = inf if asked is None else asked * (1 + MORE)
    taken = [size for size in fitting if options.kv_lora_rank in (None, size[0]) and sum(size) <= most]
    if not taken:
        why = "" if fitting else ", more than this model can use"
        return options, f"{shown} is kept; vLLM's fast kernels take R + P = {FAST}{why}."
    sized = copy(options)
    sized.kv_lora_rank, sized.qk_rope_head_dim = taken[0]
    sized.cache_size = sized.cache_bytes = None
    why = f"for {shown}" if given else "as none were given"
    return sized, f"R = {taken[0][0]} and P = {taken[0][1]} {why}; vLLM's fast kernels take R + P = {FAST}."


def is_exact_as_given(options: Options, config: GQAConfig, cache_size: int | None) -> bool:
    """Return whether the conversion with the sizes that were given, or with none, keeps the function."""
    target = tried_target(options, config, kv_lora_rank=options.kv_lora_rank, cache_size=cache_size)
    try:
        return target is not None and not lossy_layers(config, target)
    except UserError:
        return False


def is_possible(options: Options, config: GQAConfig, rank: int, rope: int) -> bool:
    """Return whether the chosen layers can have these sizes, can fill such a latent, and cache less with them."""
    layers = (config.per_layer_config[index] for index in chosen_layers(config, options.layers))
    if not all(rank <= latent_input(layer) and rank + rope < numbers_per_token(layer) for layer in layers):
        return False
    return tried_target(options, config, kv_lora_rank=rank, qk_rope_head_dim=rope) is not None


def tried_target(options: Options, config: GQAConfig, **sizes: int | None) -> GQAConfig | None:
    """Return the configuration with these sizes, `None` where it cannot be; what it warns of is not of the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return target_config(config, "mla", layers=options.layers, **sizes)
        except UserError:
            return None


def describe_serving(
    source: GQAConfig, result: GQAConfig, dtype: torch.dtype, options: Options, chosen: str, later: bool, final: bool
) -> list[str]:
    """Return lines on the sizes, the cache, where vLLM runs it, what it needs, and what else runs it.

    Args:
        source: configuration before.
        result: after; where sizes are chosen later, one about as large.
        dtype: of the result.
        options: of the conversion.
        chosen: what became of the sizes that were given, as `served_sizes` says it.
        later: sizes are chosen while converting.
        final: `result` is what was converted, with the frequencies that were chosen.
    """
    indices = chosen_layers(source, options.layers)
    known = not (later and options.budget)
    present = cache_bytes_per_token(source, dtype)
    whole = cache_bytes_per_token(result, dtype) if known else options.budget or 0
    cache = f"{whole:,} bytes per token of the whole model, {whole / present:.2f} of the source's {present:,}"
    numbers = sorted({numbers_per_token(result.per_layer_config[index]) for index in indices})
    if known and numbers:
        least, most = numbers[0], numbers[-1]
        each, size = (f"{least * n:,}" + (f" to {most * n:,}" if most > least else "") for n in (1, dtype.itemsize))
        cache = f"{size} bytes in {str(dtype).removeprefix('torch.')} ({each} numbers) per token and layer; {cache}"
    unknown = {index for index in indices if later and not is_exact(source, result, index)}
    sizes = [f"Sizes: {chosen}"] if chosen else []
    new = [index for index in indices if source.per_layer_config[index].attention_kind != "mla"]
    open_ends = not final and any(result.per_layer_config[index].attention_kind == "mla" for index in new)
    elsewhere = UNKNOWN if open_ends else describe_elsewhere(result)
    return [*sizes, f"Cache: {'' if known else 'at most '}{cache}.", *describe_runs(result, unknown), elsewhere]


def describe_elsewhere(config: GQAConfig) -> str:
    """Return a line on the engines beside vLLM with this package."""
    try:
        stock = export_config(config)
    except UserError:
        return NOT_EXPORTED
    engines = ["vLLM's own class", "SGLang's (untried)"]
    if config.attention_kind == "mla":  # what the plugin adds is not there
        heads = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        devices = ["a CPU"] if config.kv_lora_rank + config.qk_rope_head_dim == STOCK_CPU_SUM else []
        devices += ["NVIDIA GPUs"] if heads in PROMPT_SIZES else []
        engines[:1] = [f"vLLM's own class on {listed(devices, 'and')}"] if devices else []
    try:
        refuse_for_llama_cpp(config, stock)
        engines.append("llama.cpp")
    except UserError:
        pass
    return f"Elsewhere: transformers; after modeling-gqa export, as {stock.model_type}, {listed(engines, 'and')}."


def describe_runs(config: GQAConfig, unknown: frozenset[int] | set[int] = frozenset()) -> list[str]:
    """Return lines on where vLLM runs a model, and what it needs.

    Args:
        config: of the model.
        unknown: indices of MLA layers whose R and P are chosen later.
    """
    layers = as_model(config).layers
    where = runs(
        describe_layer_runs(layer.config, layer.window, index in unknown) for index, layer in enumerate(layers)
    )
    lines = [f"vLLM runs {f'layers {range_}' if len(where) > 1 else 'it'} on: {what}." for range_, what in where]
    return [*lines, NEEDED if any(layer.config.attention_kind == "mla" for layer in layers) else NOT_NEEDED]


def describe_layer_runs(layer: GQAConfig, window: int | None = None, unknown: bool = False) -> str:
    """Return the devices that vLLM runs a layer on, by which kernels, and why not on others.

    Args:
        layer: one of `config.per_layer_config`.
        window: its sliding window.
        unknown: its R and P, if it is MLA, are chosen later.
    """
    if layer.attention_kind == "mla":
        return f"a CPU (this package's attention); {latent_on_gpus(layer, window, unknown)}"
    here = "a CPU"
    if layer.head_dim not in CPU_HEADS:
        here = f"no CPU, where vLLM takes heads of {listed(CPU_HEADS)}, and these have {layer.head_dim}"
    return f"GPUs ({grouped_kernel(layer)}); {here}"


def latent_on_gpus(layer: GQAConfig, window: int | None, unknown: bool) -> str:
    """Return which kernels attend over an MLA layer's latent on GPUs, or why none; arguments as above."""
    if window is not None:
        return "no GPU, where vLLM has no window over the latent"
    nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
    sizes = f"a multiple of {FLASH_MULTIPLE} from V to {FLASH_MOST}"
    if unknown and nope > 0 and value <= FLASH_MOST:
        return f"NVIDIA GPUs (Triton) where N + P = {nope} + P becomes {sizes}, and V is {value}"
    if not reads_prompts(nope, rope, value):
        return (
            f"no NVIDIA GPU, where prompts are read with heads (N + P and V) that have an N, and N + P {sizes}; these "
            f"have {nope} + {'P' if unknown else rope} and {value}"
        )
    names = "; ".join(
        f"{kernel.name} on {' and '.join(kernel.devices)}" if kernel.devices else kernel.name
        for kernel in latent_kernels(layer)
    )
    if is_mistaken(layer):
        names += ", with --attention-backend TRITON_MLA"
    chunks = "" if unknown or layer.kv_lora_rank + rope in FAST_SUMS else CHUNKS.format(listed(FAST_SUMS))
    return f"NVIDIA GPUs ({names}{chunks})"
