"""Steps of gradient descent that are as large as what a linear layer computes allows.

The weights of models differ in scale, those of one model by layer, and a bias may be many times what tokens add to it.
So a learning rate is here a share of the layer's outputs, as they vary over tokens (compare 2310.17813, which scales
steps by the spectral norm of weights). All singular values of a step of Muon's (`common/muon.py`) are the same.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..common.batches import hooks
from ..common.muon import MuonAdamW
from ..layers import GQAHeadLinear, GQARMSNorm

MOMENTUM = 0.8  # of Muon: with the 0.95 of pretraining the first gradients count until the end
# Larger matrices are taken apart by head: whole, Muon's products would take longer than the rest of a step.
WIDE = 1024


class Seen:
    """What the inputs x and the outputs y of a linear layer have been; called as its forward hook.

    Attributes:
        tokens: their number.
        sums: over tokens, of x (in_features), y (out_features), |x|^2 and |y|^2.
    """

    def __init__(self) -> None:
        self.tokens, self.sums = 0, [torch.zeros(())] * 4

    def __call__(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Count one forward pass."""
        x, y = (states.detach().flatten(0, -2).float() for states in (inputs[0], output))
        new = x.sum(0), y.sum(0), x.square().sum(), y.square().sum()
        self.tokens, self.sums = self.tokens + len(x), [a.to(b) + b for a, b in zip(self.sums, new, strict=True)]

    def powers(self, centre: bool) -> list[float]:
        """Return the means of |x|^2 and |y|^2; with `centre`, of the squared distances of x and y from their means."""
        *means, x, y = (total / self.tokens for total in self.sums)
        less = [centre * mean.square().sum() for mean in means]
        return [(power - part).clamp(min=0).item() for power, part in zip((x, y), less, strict=True)]


@contextmanager
def observed(module: torch.nn.Module) -> Iterator[dict[torch.nn.Linear, Seen]]:
    """Yield what the linear layers of `module` see meanwhile, those of each head together."""
    seen: dict[Any, Seen] = {
        layer: Seen() for layer in module.modules() if isinstance(layer, torch.nn.Linear | GQAHeadLinear)
    }
    with hooks(*(layer.register_forward_hook(counts) for layer, counts in seen.items())):
        yield seen


@contextmanager
def centred(module: torch.nn.Module, seen: Mapping[torch.nn.Linear, Seen]) -> Iterator[dict[torch.Tensor, float]]:
    """Yield each parameter of `module` with the size of a step at a rate of 1, and centre the biases meanwhile.

    At this size a step changes a linear layer's outputs by about the root mean square that `seen` has of them, or
    less. Where the layer has a bias, that is of their distance from their mean. Its inputs then lose their mean,
    which goes into the bias, so that a step of the matrix leaves the mean output as it is. The layer's function stays
    the same.
    Other parameters have their own root mean square, and norms that of what they multiply by.
    """
    sizes: dict[torch.Tensor, float] = {x: x.detach().square().mean().sqrt().item() for x in module.parameters()}
    norms = (norm for norm in module.modules() if isinstance(norm, GQARMSNorm))
    sizes |= {norm.weight: (norm.weight.detach() + norm.offset).square().mean().sqrt().item() for norm in norms}
    means: dict[torch.nn.Linear, torch.Tensor] = {}
    for layer, counts in seen.items():
        biased = getattr(layer, "bias", None) is not None
        power_in, power_out = counts.powers(centre=biased)
        if biased:
            means[layer] = counts.sums[0] / counts.tokens
            sizes[layer.bias] = (power_out / layer.out_features) ** 0.5
        sizes[layer.weight] = (power_out / power_in) ** 0.5 if power_in else 0.0

    def without_mean(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return inputs[0] - means[layer], *inputs[1:]

    @torch.no_grad()
    def move_bias(sign: int) -> None:
        for layer, mean in means.items():
            layer.bias.add_(layer.weight @ mean.to(layer.weight), alpha=sign)

    move_bias(1)
    try:
        with hooks(*(layer.register_forward_pre_hook(without_mean) for layer in means)):
            yield sizes
    finally:
        move_bias(-1)


def relative_muon(sizes: Mapping[torch.Tensor, float], module: torch.nn.Module, heads: int = 1) -> MuonAdamW:
    """Return Muon for matrices and Adam (1412.6980) for biases and norms: a group for each parameter, with its size.

    `sizes` as `centred` yields them for `module`; the parameters need gradients from now on. Maps of each head are
    matrices of their own. A matrix with more than `WIDE` rows and columns is taken apart into `heads` parts of its
    rows, if these are equal.
    """
    by_head: dict[torch.Tensor, int] = {
        layer.weight: layer.heads for layer in module.modules() if isinstance(layer, GQAHeadLinear)
    }
    groups = []
    for x, size in sizes.items():
        apart = x.ndim == 2 and min(x.shape) > WIDE and len(x) % heads == 0
        parts = by_head.get(x, heads if apart else 1)
        options = {"muon": x.ndim == 2, "momentum": MOMENTUM, "rms": None, "parts": parts}
        groups.append({"params": [x.requires_grad_(True)], "size": size, **options})
    return MuonAdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)


def training_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products while gradients are computed: in float16 these would become zeros."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def step_at(optimizer: MuonAdamW, rate: float) -> None:
    """Make a step by the gradients, of `rate` times the size of each parameter, and drop the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["size"]
    optimizer.step()
    optimizer.zero_grad()
