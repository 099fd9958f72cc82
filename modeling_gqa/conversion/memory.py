"""The memory that a conversion takes, counted from sizes before anything is loaded.

The factors count the tensors that are there at once in a step; they were found by following every tensor of conversions
of small models. Shapes: E hidden size, n tokens of a batch, M = heads times value size.
"""

from typing import NamedTuple

import torch

from ..configuration_gqa import GQAConfig
from ..costs import CostedModel, count_parameters
from .divergence import TOKENS_AT_ONCE
from .fitting import STEP_TOKENS
from .losses import LOGITS_AT_ONCE
from .streams import IN_MEMORY
from .targets import changed_layers

GIB = 2**30
# What Python, torch and freed memory that the allocator keeps take beside all tensors.
PROGRAM = GIB // 2


class Memory(NamedTuple):
    """Bytes that a conversion takes: of the source's weights, of the new layers' (the rest is shared), and at most."""

    source: int
    attention: int
    peak: int

    def __str__(self) -> str:
        return (
            f"about {self.peak / GIB:.1f} GiB by accounting, of which the source takes {self.source / GIB:.1f} and the "
            f"new attention {self.attention / GIB:.1f}"
        )


def count_memory(
    source: GQAConfig,
    target: GQAConfig,
    dtype: torch.dtype,
    rows: int = 0,
    length: int = 0,
    polished: bool = False,
    rounded: bool = False,
) -> Memory:
    """Count the memory of a conversion, whose new layers lie in files until all are finished.

    `rows` and `length` are those of a batch of text in sequences and tokens; 0 without text. `polished` says whether
    the new layers are trained at the end, `rounded` whether all layers are.
    """
    old, new = ([layer.attention_parameters for layer in CostedModel(c).layers] for c in (source, target))
    changed = changed_layers(source, target)
    work = [
        layer_work(target.per_layer_config[i], old[i], new[i], dtype.itemsize, rows * length, length) for i in changed
    ]
    measuring = 0
    if rows:
        layers = [*source.per_layer_config, *target.per_layer_config]
        forward = max(forward_work(layer, dtype.itemsize, rows * length) for layer in layers)
        # Log-probabilities of two models and what compares them, in float32.
        measuring = max(forward, 23 * TOKENS_AT_ONCE * source.vocab_size)
    trained = sum(new if rounded else (new[i] for i in changed))
    weights, attention = count_parameters(source) * dtype.itemsize, trained * dtype.itemsize
    if polished:
        step = min(max(round(STEP_TOKENS / length), 1), rows) * length
        measuring = max(measuring, polish_work(source, trained, dtype.itemsize, step))
    return Memory(weights, attention, PROGRAM + weights + max(*work, 0, attention + measuring))


def layer_work(layer: GQAConfig, old: int, new: int, itemsize: int, tokens: int, length: int) -> int:
    """Return the bytes at work while one layer is converted to `layer`.

    `old` and `new` are the parameters of its attention before and after, `tokens` n of a batch, `length` of a row.
    """
    hidden = layer.hidden_size
    heads = layer.num_attention_heads * (layer.v_head_dim or layer.head_dim)  # M
    # In float64: the old weights as they are and as complex planes, the new ones, and the input's covariance.
    converting = 8 * (3 * old + 1.5 * new + 3.5 * hidden**2)
    if not tokens:
        return int(converting)
    # In float32: parameters, gradients, Muon's momentum and a matrix's step; then a step's activations.
    refining = 20 * new + 28 * max(STEP_TOKENS, length) * heads
    # In float64 the sums of each fold over (M, M) and (M, E) with a solution, in float32 the tokens that are added.
    fitting = 8 * (8 * heads**2 + 7 * heads * hidden) + 16 * tokens * heads + 18 * tokens * hidden + itemsize * new
    if layer.attention_kind == "mla":  # of which several sizes are fitted, made of the same old weights and moments
        fitting += 8 * (2 * old + 2 * hidden**2)
    states = IN_MEMORY + 2 * tokens * (2 * hidden + heads) * itemsize
    return int(states + max(converting, refining, fitting, forward_work(layer, itemsize, tokens)))


def polish_work(source: GQAConfig, trained: int, itemsize: int, tokens: int) -> int:
    """Return the bytes at work while `trained` parameters are polished, in steps of `tokens` tokens."""
    widths = (
        3 * x.intermediate_size + 8 * (x.hidden_size + x.num_attention_heads * (x.v_head_dim or x.head_dim))
        for x in source.per_layer_config
    )
    logits = tokens * source.vocab_size
    # In float32: parameters, gradients, Muon's momentum; two copies of the weights; what the backward pass needs.
    training = 20 * trained + tokens * itemsize * sum(widths) + 4 * itemsize * logits
    return IN_MEMORY + training + 20 * min(logits, LOGITS_AT_ONCE)


def forward_work(layer: GQAConfig, itemsize: int, tokens: int) -> int:
    """Return the bytes of the activations of a batch within a layer."""
    attention = 10 * layer.hidden_size
    if layer.attention_kind == "mla":  # which rebuilds keys and values, joins them with the rotary key and pads them
        head = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        attention = 4 * layer.hidden_size + 6 * layer.num_attention_heads * head
    return tokens * itemsize * (3 * layer.intermediate_size + attention)
