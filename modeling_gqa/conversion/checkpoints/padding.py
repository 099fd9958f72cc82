"""A latent without a norm as one with RMSNorm, for classes that always have it."""

import math
from collections.abc import Mapping
from functools import cache

import torch

from .files import LazyTensor

# The padding channel is this factor larger than any latent; the relative error of the norm is then 1 / (2 factor^2).
PADDING = 2.0**12


def zero_where_missing(tensors: Mapping[str, LazyTensor], name: str, size: int) -> dict[str, LazyTensor]:
    """Return the bias `name` of `size` numbers by name; zeros where the model has none."""
    dtype = tensors[name.replace(".bias", ".weight")].dtype
    return {name: tensors.get(name) or LazyTensor((size,), dtype, lambda: torch.zeros(size, dtype=dtype))}


def padded_latent(
    tensors: Mapping[str, LazyTensor], layer: str, down: str, norm: str, up: str
) -> dict[str, LazyTensor]:
    """Return the tensors around a latent of size R with a norm that divides by a constant and multiplies by it again.

    The latent gets one more channel, which a bias holds at a constant Q, `PADDING` times what the latent can reach.
    The root mean square of all R + 1 channels is then Q / sqrt(R + 1). The norm's weight is that number for the
    latent's own channels, and 0 for the new one.

    Args:
        tensors: the model's.
        layer: prefix of a layer's names.
        down: module of the layer's attention that makes the latent.
        norm: module that norms it.
        up: module that expands it.
    """
    prefix = f"{layer}.self_attn"
    weight, up_weight = tensors[f"{prefix}.{down}.weight"], tensors[f"{prefix}.{up}.weight"]
    bias = zero_where_missing(tensors, f"{prefix}.{down}.bias", weight.shape[0])[f"{prefix}.{down}.bias"]
    gain, rank = tensors[f"{layer}.input_layernorm.weight"], up_weight.shape[1]

    @cache
    def constants() -> tuple[float, float]:
        """Return Q and the norm's weight: two numbers that the dtype holds, with a ratio nearest to sqrt(R + 1)."""
        # The layer's input has been normed, so its length is at most sqrt(hidden) before the norm's gain.
        scaled = weight.load()[:rank].double() * gain.load().double()
        largest = scaled.norm() * weight.shape[1] ** 0.5 + bias.load()[:rank].double().norm()
        power = 2.0 ** math.ceil(math.log2(PADDING * max(largest.item(), 1.0)))
        pads = power * (1 + torch.arange(128, dtype=torch.float64) / 128)
        norms = (pads / (rank + 1) ** 0.5).to(weight.dtype).double()
        best = (norms * (rank + 1) ** 0.5 / pads - 1).abs().argmin()
        return pads[best].item(), norms[best].item()

    def insert(tensor: torch.Tensor, value: float) -> torch.Tensor:
        row = torch.full_like(tensor[:1], value)
        return torch.cat((tensor[:rank], row, tensor[rank:]))

    def normed() -> torch.Tensor:
        return torch.tensor([constants()[1]] * rank + [0.0], dtype=weight.dtype)

    return {
        f"{prefix}.{down}.weight": LazyTensor(
            (weight.shape[0] + 1, weight.shape[1]), weight.dtype, lambda: insert(weight.load(), 0.0)
        ),
        f"{prefix}.{down}.bias": LazyTensor(
            (weight.shape[0] + 1,), weight.dtype, lambda: insert(bias.load(), constants()[0])
        ),
        f"{prefix}.{norm}.weight": LazyTensor((rank + 1,), weight.dtype, normed),
        f"{prefix}.{up}.weight": LazyTensor(
            (up_weight.shape[0], rank + 1),
            up_weight.dtype,
            lambda: torch.nn.functional.pad(up_weight.load(), (0, 1)),
        ),
    }
