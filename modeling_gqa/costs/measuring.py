"""What this machine can do at best, and what a decoded token takes on it."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from modeling_gqa_cli.errors import UserError

from ..cache_layers import PositionedCache
from ..cache_quantized import QuantizedLayer
from ..common.batches import free_memory
from ..compatibility import CACHE
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM
from . import CostedModel, Machine, cache_bytes, count_parameters

if TYPE_CHECKING:
    from ..common.progress import ShowProgress

GIB = 2**30
STEPS, MOST_ROUNDS = 4, 31

# Instructions that decide how fast a CPU multiplies matrices, the widest first, by their flags in /proc/cpuinfo.
INSTRUCTIONS = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 and its bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}


@dataclass(frozen=True)
class MeasuredToken:
    """What one decoded token took, of models that decoded in turn.

    Args:
        batch_size: number of sequences, of which each decoded a token.
        context: tokens of each before.
        milliseconds: by name of the model, the median over rounds.
        ratio: by name of the model, how many times as long as the first it took: the median over rounds.
    """

    batch_size: int
    context: int
    milliseconds: dict[str, float]
    ratio: dict[str, float]


def machine_name(device: str) -> str:
    """Return the name of the processor; of a CPU also its widest instructions, and how many threads torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            said = dict(line.strip().split(":", 1) for line in lines if line.startswith(("model name", "flags")))
        found = {name.strip(): value.strip() for name, value in said.items()}
        flags = found.get("flags", "").split()
        widest = next((name for flag, name in INSTRUCTIONS.items() if flag in flags), None)
        cpu = found.get("model name", cpu) + (f" with {widest}" if widest else "")
    threads = torch.get_num_threads()
    return f"{cpu}, {threads} thread{'s' * (threads > 1)}"


def seconds(function: Callable[[], object], device: str) -> float:
    """Time of one call, by events on CUDA."""
    if device.startswith("cuda"):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def read_bandwidth(device: str) -> float:
    """Bytes per second of the fastest of seven sums over 1 GiB."""
    data = torch.ones(GIB // 4, device=device)
    data.sum()
    return GIB / min(seconds(data.sum, device) for _ in range(7))


@cache
def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per second of the fastest product of square matrices: the peak of bounds and of a training's MFU.

    The second matrix is transposed, as a layer's weights are: on some CPUs that is ten times as fast. Sizes are doubled
    from 256 to 8192, and no further once a product takes a tenth of a second: CPUs without instructions for bfloat16
    take minutes for large ones. Each size is timed five times, and a device once in a process. No numbers are drawn
    from torch's generators.
    """
    generator = torch.Generator(device).manual_seed(0)
    best, size = 0.0, 256
    while size <= 8192:
        matrix = torch.randn(size, size, device=device, generator=generator).to(dtype)
        product = partial(torch.nn.functional.linear, matrix, matrix)
        product()
        least = min(seconds(product, device) for _ in range(5))
        best = max(best, 2 * size**3 / least)
        if least > 0.1:
            break
        size *= 2
    return best


def measure_machine(device: str, dtype: torch.dtype) -> Machine:
    """Measure what a device reads and computes per second at best; takes a few seconds."""
    return Machine(read_bandwidth(device), matmul_rate(device, dtype), machine_name(device))


def filled_cache(model: Any, config: GQAConfig, rows: int, tokens: int, dtype: torch.dtype, device: str) -> Any:
    """Return the cache that `generate` makes for `model`, holding random keys and values of `tokens` tokens.

    Their shapes are those of `config`: the model's own, or that of ours whose stock counterpart the model is.
    """
    inputs: dict = {}
    model._prepare_cache_for_generation(model.generation_config, inputs, None, rows, tokens)
    return fill_cache(inputs[CACHE], config, rows, tokens, dtype, device)


def fill_cache(cache: Any, config: GQAConfig, rows: int, tokens: int, dtype: torch.dtype, device: str) -> Any:
    """Put random keys and values of `tokens` tokens into an empty cache, in the shapes of `config`, and return it."""
    for index, layer in enumerate(config.per_layer_config):
        shapes: Sequence[tuple[int, int]] = ATTENTION_CLASSES[layer.attention_kind].cache_shapes(layer)
        if isinstance(cache.layers[index], QuantizedLayer):  # whose own basis holds the channels of all heads as one
            forms = zip(cache.layers[index].formats, shapes, strict=True)
            shapes = [(1, heads * size) if form.own_basis else (heads, size) for form, (heads, size) in forms]
        held = (torch.randn(rows, heads, tokens, size, dtype=dtype, device=device) for heads, size in shapes)
        cache.update(*held, index)
    if isinstance(cache, PositionedCache):
        cache.hold(torch.arange(tokens, device=device)[None], rows)
    return cache


def measure_decoding(
    models: Sequence[CostedModel],
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
    device: str,
    show_progress: "ShowProgress",
    budget: float = 4.0,
) -> list[MeasuredToken]:
    """Build models with random weights and let them decode in turn from caches of random numbers.

    Args:
        models: what is measured.
        contexts: tokens in the cache.
        batch_sizes: numbers of sequences.
        dtype: of weights and cache.
        device: where they run.
        show_progress: as in `common.progress`.
        budget: seconds for each number of sequences and tokens, from which 3 to 31 rounds follow.

    Raises:
        UserError: the models do not fit the memory.
    """
    check_measurable(models, max(contexts), max(batch_sizes), dtype, device)
    built: dict[str, Any] = {}
    for model in models:
        built[model.name] = GQAForCausalLM._from_config(model.config, dtype=dtype).to(device).eval()
    cells = list(product(batch_sizes, contexts))
    return [
        measure_cell(built, rows, tokens, dtype, device, budget) for rows, tokens in show_progress("decoding")(cells)
    ]


def check_measurable(models: Sequence[CostedModel], tokens: int, rows: int, dtype: torch.dtype, device: str) -> None:
    """Raise `UserError` for models that do not fit the memory."""
    # A cache that grows has room for a quarter more, and is copied when it does.
    caches = sum(cache_bytes(model, rows, tokens, dtype) for model in models)
    needed = sum(count_parameters(model) for model in models) * dtype.itemsize + 2.25 * caches
    if needed > (free := free_memory(device)):
        raise UserError(
            f"measuring takes {needed / GIB:.1f} GiB of memory and {free / GIB:.1f} are free: give fewer models, or "
            "smaller --context and --batch-size"
        )


@torch.no_grad()
def measure_cell(
    built: dict[str, Any], rows: int, tokens: int, dtype: torch.dtype, device: str, budget: float
) -> MeasuredToken:
    """Time one decoded token of each model, in turn."""
    caches = {name: filled_cache(model, model.config, rows, tokens, dtype, device) for name, model in built.items()}
    ids = torch.ones(rows, 1, dtype=torch.long, device=device)

    def turn(name: str) -> float:
        model, cache = built[name], caches[name]
        times = [seconds(lambda: model(ids, past_key_values=cache), device) for _ in range(STEPS)]
        if model.config.sliding_window is None:  # full windows cost the same later on, and cannot be cropped
            cache.crop(-STEPS)
        return statistics.median(times)

    medians, ratio = in_turn({name: partial(turn, name) for name in built}, budget / STEPS)
    milliseconds = {name: 1000 * median for name, median in medians.items()}
    return MeasuredToken(batch_size=rows, context=tokens, milliseconds=milliseconds, ratio=ratio)


def in_turn(turns: dict[str, Callable[[], float]], budget: float) -> tuple[dict[str, float], dict[str, float]]:
    """Call functions in turn, once to warm up and then for 3 to 31 rounds, as many as take about `budget` seconds.

    Args:
        turns: functions by name, each of which returns its seconds.
        budget: in seconds.

    Returns:
        The median of the seconds by name, and the median over rounds of how many times as long as the first it took.
    """
    first = sum(turn() for turn in turns.values())
    rounds = min(MOST_ROUNDS, max(3, int(budget / first)))
    times = [{name: turn() for name, turn in turns.items()} for _ in range(rounds)]
    base = next(iter(turns))
    medians = {name: statistics.median(row[name] for row in times) for name in turns}
    return medians, {name: statistics.median(row[name] / row[base] for row in times) for name in turns}
