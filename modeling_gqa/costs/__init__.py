"""Parameters, floating-point operations and cache bytes of a model, predicted from its configuration alone.

What differs by attention kind stands in the attention classes; here it is summed over the layers of a configuration.
Give a model as a `GQAConfig`, or as a `CostedModel`, which has a name. `dtype` is that of weights and cache.

FLOPs are those of matrix products, 2 per multiply-add, as `torch.utils.flop_counter` counts them. Norms, rotary
embedding, softmax, activations, additions, the loss and the embedding lookup are not counted. A mask lowers no count:
each query attends to every key that the layer gets, T x T in training (the convention of PaLM, 2204.02311, appendix B),
although kernels may skip what a causal mask or a window hides. Heads that are padded for a kernel count without their
padding.
"""

from .bounds import Machine, decode_bytes, decode_seconds, largest_batch, longest_context
from .counts import (
    CostedModel,
    cache_bytes,
    cache_bytes_per_token,
    count_attention_parameters,
    count_parameters,
    decode_flops,
    decode_weights,
    prefill_flops,
    training_flops,
)
from .summary import ContextCost, CostReport, LayerCost, report

__all__ = [
    "ContextCost",
    "CostReport",
    "CostedModel",
    "LayerCost",
    "Machine",
    "cache_bytes",
    "cache_bytes_per_token",
    "count_attention_parameters",
    "count_parameters",
    "decode_bytes",
    "decode_flops",
    "decode_seconds",
    "decode_weights",
    "largest_batch",
    "longest_context",
    "prefill_flops",
    "report",
    "training_flops",
]
