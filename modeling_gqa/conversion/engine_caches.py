"""What vLLM's flags `--kv-cache-dtype` store of a layer's cache, rounded the same way and not packed.

Formats by vLLM 0.32's source: fp8 with a scale of 1, its default, and TurboQuant (Zandieh et al., 2504.19874), whose
kernels run on GPUs. A model computes under one within `transform_coding.intercepted`.
Shapes: B rows, G heads, T tokens, D size of a head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from ..cache_formats import LARGEST_FP8, orthogonal_matrix
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token
from ..layers import key_mean_size

FLAG = "vllm serve {} --kv-cache-dtype {}"
TURBOQUANT = {"turboquant_4bit_nc": 4, "turboquant_3bit_nc": 3}  # bits of a number of keys and values
WHOLE = 2  # layers at either end that TurboQuant leaves as they are


class EngineCache(NamedTuple):
    """A flag's cache.

    Args:
        dtype: what `--kv-cache-dtype` is.
        bytes: of a token, in all layers.
        change: what `intercepted` takes: an index of a layer and the two tensors that it caches to what it reads back.
    """

    dtype: str
    bytes: int
    change: Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def engine_caches(config: GQAConfig, stored: torch.dtype) -> Iterator[EngineCache]:
    """Yield the flags that take a model of these sizes, whose cache is in `stored` without them, by size.

    TurboQuant takes MHA, MQA and GQA without a window, and only heads whose size is a power of two are yielded.
    """
    layers = config.per_layer_config
    # vLLM caches the angles of a mean key, too. What it costs to round them is not simulated.
    full = cache_bytes_per_token(config, stored) + sum(map(key_mean_size, layers)) * stored.itemsize
    yield EngineCache("fp8", full // stored.itemsize, in_fp8)
    if any(x.attention_kind == "mla" or x.sliding_window or x.head_dim & (x.head_dim - 1) for x in layers):
        return
    whole = min(WHOLE, len(layers) // 2)
    rounded = range(whole, len(layers) - whole)
    if not rounded:
        return
    for dtype, bits in TURBOQUANT.items():
        size = full
        for index in rounded:
            heads, head_dim = layers[index].num_key_value_heads, layers[index].head_dim
            # Codes, and 16 bits for a key's length and for a value's scale and least number.
            size -= heads * (2 * head_dim * stored.itemsize - 2 * math.ceil(head_dim * bits / 8) - 6)
        yield EngineCache(dtype, size, partial(in_turboquant, bits, rounded))


def in_fp8(index: int, pair: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a layer caches in float8_e4m3fn with a scale of 1."""
    return [x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).to(x.dtype) for x in pair]


def in_turboquant(bits: int, layers: range, index: int, pair: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a layer's keys and values (B, G, T, D) become in `bits`, if it is one of `layers`.

    Keys after rotation are divided by their length, mixed by a Hadamard matrix, and rounded to the levels that suit
    normal numbers; what is read back gets the key's length again. Values have levels from a head's least number to its
    largest.
    """
    if index not in layers:
        return pair
    key, value = (x.float() for x in pair)
    length, size = key.norm(dim=-1, keepdim=True), key.shape[-1]
    mixing, levels = orthogonal_matrix(size).to(key), normal_levels(bits).to(key)
    code = torch.bucketize(key / (length + 1e-8) @ mixing * math.sqrt(size), (levels[1:] + levels[:-1]) / 2, right=True)
    direction = torch.nn.functional.normalize(levels[code], dim=-1)
    key = direction @ mixing * length.half().float()
    least, most = value.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / (2**bits - 1)).clamp(min=1e-8)
    code = ((value - least) / step + 0.5).floor().clamp(0, 2**bits - 1)
    value = code * step.half().float() + least.half().float()
    return [x.to(pair[0].dtype) for x in (key, value)]


@lru_cache
def normal_levels(bits: int) -> torch.Tensor:
    """The 2^bits levels with which a normal number of variance 1 loses least, ascending (Lloyd, Max)."""
    levels = torch.linspace(-3, 3, 2**bits, dtype=torch.float64)
    infinite = levels.new_full((1,), math.inf)
    for _ in range(1000):
        edges = torch.cat((-infinite, (levels[1:] + levels[:-1]) / 2, infinite))
        density, below = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(edges)
        levels = -density.diff() / below.diff()
    return levels.float()
