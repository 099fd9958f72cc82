"""How fast a machine can decode at best, and what fits its memory."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from ..configuration_gqa import GQAConfig
from .counts import CostedModel, as_costed, cache_bytes, count_parameters, decode_flops, decode_weights

ALL_TOKENS = range(2**62)  # more than any memory holds


@dataclass(frozen=True)
class Machine:
    """What a machine can do at best.

    Args:
        bandwidth: bytes that it reads per second.
        rate: floating-point operations per second of matrix products in the dtype of the model.
        name: of the machine.

    Example:
        ```python
        from modeling_gqa import costs

        h100 = costs.Machine(bandwidth=3.35e12, rate=989e12, name="H100 SXM, by its data sheet, bfloat16")
        print(h100.seconds(nbytes=6.7e12, flops=1e12))  # 2.0
        ```
    """

    bandwidth: float
    rate: float
    name: str = ""

    def seconds(self, nbytes: float, flops: float) -> float:
        """Return the least time to read `nbytes` and compute `flops`, which may be done at once.

        This is the roofline model (Williams et al., 2009, doi:10.1145/1498765.1498785).
        """
        return max(nbytes / self.bandwidth, flops / self.rate)


def decode_bytes(
    model: GQAConfig | CostedModel, batch_size: int, cache_length: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes that one decoded token in each sequence reads: the cache of all sequences, and the weights once.

    Args:
        model: a configuration, or a `CostedModel`.
        batch_size: number of sequences.
        cache_length: tokens of each before.
        dtype: of weights and cache.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.decode_bytes(GQAConfig(), batch_size=8, cache_length=4096) / 2**20, "MiB")
        ```
    """
    model = as_costed(model)
    return decode_weights(model, batch_size) * dtype.itemsize + cache_bytes(model, batch_size, cache_length, dtype)


def decode_seconds(
    model: GQAConfig | CostedModel,
    machine: Machine,
    batch_size: int,
    cache_length: int,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Least time on `machine` of one decoded token in each sequence; other arguments as for `decode_bytes`.

    MLA attends over its latent.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        machine = costs.Machine(bandwidth=3.35e12, rate=989e12)
        print(costs.decode_seconds(GQAConfig(), machine, batch_size=8, cache_length=4096) * 1e6, "microseconds")
        ```
    """
    model = as_costed(model)
    nbytes = decode_bytes(model, batch_size, cache_length, dtype)
    return machine.seconds(nbytes, decode_flops(model, batch_size, cache_length))


def longest_context(
    model: GQAConfig | CostedModel, memory: float, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int | None:
    """Return the most tokens of each of `batch_size` sequences whose cache fits `memory` bytes beside the weights.

    Returns:
        0 where no token fits; `None` where windows bound the cache, and all of it fits.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.longest_context(GQAConfig(attention_kind="mla"), memory=2**30))
        ```
    """
    model = as_costed(model)
    room = memory - count_parameters(model) * dtype.itemsize
    fitting = bisect_right(ALL_TOKENS, room, key=lambda tokens: cache_bytes(model, batch_size, tokens, dtype))
    return None if fitting == len(ALL_TOKENS) else max(0, fitting - 1)


def largest_batch(
    model: GQAConfig | CostedModel, memory: float, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Return the most sequences of `tokens` tokens whose cache fits `memory` bytes beside the weights.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.largest_batch(GQAConfig(attention_kind="mla"), memory=2**30, tokens=4096))
        ```
    """
    model = as_costed(model)
    room = memory - count_parameters(model) * dtype.itemsize
    return max(0, int(room // cache_bytes(model, 1, tokens, dtype)))
