"""Memory that a conversion takes, by accounting: counted from sizes, before anything is loaded.

The factors below count the tensors that are there at once in a step. They were found by following every tensor of
conversions of small models. Shapes: E hidden size, n tokens of a batch, M = heads times value size.
"""

from typing import NamedTuple

import torch

from ...configuration_gqa import GQAConfig
from ...costs import count_parameters
from ...costs.layers import as_model
from ..calibration import IN_MEMORY
from ..fitting import STEP_TOKENS
from ..measuring import TOKENS_AT_ONCE
from ..targets import changed_layers

GIB = 2**30
# What Python, torch and freed memory that the allocator keeps take beside all tensors.
PROGRAM = GIB // 2


class Memory(NamedTuple):
    """Bytes that a conversion takes.

    Args:
        source: of the source's weights.
        attention: of the new layers' weights; the result shares all others with the source.
        peak: at most, with the work of a layer or of a measurement.
    """

    source: int
    attention: int
    peak: int

    def __str__(self) -> str:
        return (
            f"about {self.peak / GIB:.1f} GiB by accounting, of which the source takes {self.source / GIB:.1f} and the "
            f"new attention {self.attention / GIB:.1f}"
        )


def count_memory(source: GQAConfig, target: GQAConfig, dtype: torch.dtype, rows: int = 0, length: int = 0) -> Memory:
    """Count the memory of a conversion by the command, whose new layers lie in files until all are finished.

    Args:
        source: configuration of the source.
        target: of the result.
        dtype: of both.
        rows: rows of a batch of text; 0 without text.
        length: tokens of a row.
    """
    old, new = ([layer.attention_parameters for layer in as_model(c).layers] for c in (source, target))
    changed = changed_layers(source, target)
    work = [
        layer_work(target.per_layer_config[i], old[i], new[i], dtype.itemsize, rows * length, length) for i in changed
    ]
    measuring = 0
    if rows:
        forward = max(forward_work(layer, dtype.itemsize, rows * length) for layer in source.per_layer_config)
        # Log-probabilities of two models and what compares them, in float32.
        measuring = max(forward, 23 * TOKENS_AT_ONCE * source.vocab_size)
    weights, attention = count_parameters(source) * dtype.itemsize, sum(new[i] for i in changed) * dtype.itemsize
    return Memory(weights, attention, PROGRAM + weights + max(*work, 0, attention + measuring))


def layer_work(layer: GQAConfig, old: int, new: int, itemsize: int, tokens: int, length: int) -> int:
    """Return the bytes at work while one layer is converted.

    Args:
        layer: the new one.
        old, new: parameters of its attention, before and after.
        itemsize: bytes of a parameter.
        tokens: n of a batch; 0 without text.
        length: tokens of a row.
    """
    hidden = layer.hidden_size
    heads = layer.num_attention_heads * (layer.v_head_dim or layer.head_dim)  # M
    # In float64: the old weights as they are and as complex planes, the new ones, and the input's covariance.
    converting = 8 * (3 * old + 1.5 * new + 3.5 * hidden**2)
    if not tokens:
        return int(converting)
    # In float32: parameters, gradients, Adam's moments and steps; then a step's activations.
    refining = 24 * new + 28 * max(STEP_TOKENS, length) * heads
    # In float64 the sums over (M, M) and (M, E) with their solution, in float32 the tokens that are added.
    fitting = 8 * (5 * heads**2 + 4 * heads * hidden) + 16 * tokens * heads + 18 * tokens * hidden + itemsize * new
    if layer.attention_kind == "mla":  # of which several sizes are fitted, made of the same old weights and moments
        fitting += 8 * (2 * old + 2 * hidden**2)
    states = IN_MEMORY + 2 * tokens * (2 * hidden + heads) * itemsize
    return int(states + max(converting, refining, fitting, forward_work(layer, itemsize, tokens)))


def forward_work(layer: GQAConfig, itemsize: int, tokens: int) -> int:
    """Return the bytes of the activations of a batch within a layer."""
    return tokens * itemsize * (3 * layer.intermediate_size + 10 * layer.hidden_size)
