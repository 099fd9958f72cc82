"""Tensors written so that every engine computes the model that transformers' DeepSeek-V3 computes.

vLLM's and SGLang's classes of DeepSeek-V3 have no biases and never tie the output layer to the embeddings. They use
`rms_norm_eps` in the norms of latents too, where transformers' class has an epsilon of its own. vLLM's pairs
neighbours in the rotary parts.

Letters: R size of a latent, P of a rotary part, N of the part before it, H heads.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from ..attention_latent import LATENT_NORM_EPS
from .files import LazyTensor

# The largest relative change of a latent by a norm that is to be a constant.
NEGLIGIBLE = 1e-7


def computed(tensor: LazyTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """Return a tensor of the same shape and dtype that `function` makes when it is loaded."""
    return tensor._replace(load=lambda: function(tensor.load()))


def scaled(tensor: LazyTensor, factor: float) -> LazyTensor:
    """Return a tensor times `factor`, rounded once."""
    return computed(tensor, lambda loaded: (loaded.double() * factor).to(loaded.dtype))


def constant_norm(
    tensors: Mapping[str, LazyTensor], layer: str, down: str, norm: str, rank: int
) -> dict[str, LazyTensor]:
    """Return the tensors around a latent without a norm with an RMSNorm that returns the latent as it was.

    The rows that make the latent are multiplied by a power of two s, so small that the mean square of s c is next to
    nothing beside the norm's epsilon. The norm then divides by the root of the epsilon, and its weight is that root
    divided by s.

    Args:
        tensors: the model's.
        layer: prefix of a layer's names.
        down: module of the layer's attention that makes the latent in its first rows.
        norm: module that norms it.
        rank: R.
    """
    prefix = f"{layer}.self_attn"
    parts = {name: tensors[name] for part in ("weight", "bias") if (name := f"{prefix}.{down}.{part}") in tensors}
    weight, gain = tensors[f"{prefix}.{down}.weight"], tensors[f"{layer}.input_layernorm.weight"]

    @cache
    def factor() -> float:
        """Return s."""
        # The layer's input has been normed, so its length is at most sqrt(hidden) before the norm's gain.
        longest = (weight.load()[:rank].double() * gain.load().double()).norm().item() * weight.shape[1] ** 0.5
        longest += sum(x.load()[:rank].double().norm().item() for name, x in parts.items() if name.endswith("bias"))
        most = math.sqrt(2 * NEGLIGIBLE * LATENT_NORM_EPS * rank)  # length of s c
        return 2.0 ** min(0, math.floor(math.log2(most / longest))) if longest else 1.0

    def shrink(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:rank] * factor(), tensor[rank:]))

    def constant() -> torch.Tensor:
        return torch.full((rank,), LATENT_NORM_EPS**0.5 / factor(), dtype=weight.dtype)

    norms = {f"{prefix}.{norm}.weight": LazyTensor((rank,), weight.dtype, constant)}
    return norms | {name: computed(tensor, shrink) for name, tensor in parts.items()}


def paired_neighbours(
    tensors: Mapping[str, LazyTensor], layer: str, query: str, heads: int, rope: int
) -> dict[str, LazyTensor]:
    """Return the projections to queries and rotary key with two neighbours, not two halves, as a rotary plane.

    Args:
        tensors: the model's.
        layer: prefix of a layer's names.
        query: module of the layer's attention whose rows are the queries of all heads.
        heads: H.
        rope: P; a head's rotary part comes last.
    """

    def pair(tensor: torch.Tensor, parts: int) -> torch.Tensor:
        rows = tensor.unflatten(0, (parts, -1))  # (H, N + P, ...), or of the rotary key (1, R + P, ...)
        halves = rows[:, -rope:].unflatten(1, (2, -1)).transpose(1, 2)  # (H, P / 2, 2, ...)
        return torch.cat((rows[:, :-rope], halves.flatten(1, 2)), dim=1).flatten(0, 1)

    found = {}
    for module, parts in ((query, heads), ("kv_a_proj_with_mqa", 1)):
        for part in ("weight", "bias"):
            name = f"{layer}.self_attn.{module}.{part}"
            if name in tensors:
                found[name] = computed(tensors[name], partial(pair, parts=parts))
    return found


def zero_where_missing(tensors: Mapping[str, LazyTensor], module: str) -> dict[str, LazyTensor]:
    """Return the bias of a module by name; zeros where the model has none."""
    name, weight = f"{module}.bias", tensors[f"{module}.weight"]
    size, dtype = weight.shape[0], weight.dtype
    return {name: tensors.get(name) or LazyTensor((size,), dtype, lambda: torch.zeros(size, dtype=dtype))}


def evened_epsilon(tensors: Mapping[str, LazyTensor], epsilon: float) -> dict[str, LazyTensor]:
    """Return the tensors of a model whose `rms_norm_eps` is that of the latents' norms in place of `epsilon`.

    All that is added to the states is multiplied by a = sqrt(new / old), and the mean square of the states by a^2. So a
    norm of the new epsilon gives what one of the old gave.

    Args:
        tensors: the model's, with an output layer of its own, which stays as it is.
        epsilon: the model's `rms_norm_eps`.
    """
    factor = (LATENT_NORM_EPS / epsilon) ** 0.5
    written = ("embed_tokens.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
    return {name: scaled(tensor, factor) for name, tensor in tensors.items() if name.endswith(written)}
