"""Least squares after a conversion: the output projection that brings a layer nearest to the source's.

Its right-hand side is linear, so two running sums suffice, as in layer-wise pruning and quantization (Optimal Brain
Compression, 2208.11580, section 3). Shapes: B rows, T tokens, E hidden size, M = heads times value size.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from .calibration import Batch
from .measuring import evaluating

# Share of the mean power of what is projected that is added to all of it.
RIDGE = 1e-3


class Regression:
    """Running sums of M inputs and E residuals, from which `solve` takes the correction of a linear layer."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        size, device = linear.in_features + 1, linear.weight.device
        self.linear = linear
        self.second = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, linear.out_features, dtype=torch.float64, device=device)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> None:
        """Add `inputs` (tokens, M) and `residual` (tokens, E), what their projection misses."""
        inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0 if self.linear.bias is not None else 0.0).float()
        self.second += (inputs.mT @ inputs).double()
        self.cross += (inputs.mT @ residual.float()).double()

    def solve(self) -> None:
        """Correct the layer in place."""
        ridge = RIDGE * self.second.diagonal()[:-1].mean() * torch.ones_like(self.second.diagonal())
        change = torch.linalg.solve(self.second + torch.diag(ridge), self.cross).mT  # (E, M + 1)
        self.linear.weight.add_(change[:, :-1].to(self.linear.weight.dtype))
        if self.linear.bias is not None:
            self.linear.bias.add_(change[:, -1].to(self.linear.bias.dtype))


@torch.no_grad()
def refit_outputs(
    source, converted, layers: Sequence[int], batches: Sequence[Batch], progress: Callable[[Iterable], Iterable] = iter
) -> None:
    """Fit the output projections of `layers` of `converted`, in place, to the attention outputs of `source`; both see
    the source's layer inputs."""
    regressions = {index: Regression(converted.model.layers[index].self_attn.o_proj) for index in layers}
    kept: list[torch.Tensor] = []
    projected: list[torch.Tensor] = []

    def compare(index: int) -> Callable:
        attention = converted.model.layers[index].self_attn

        def hook(module, arguments, keywords, output):
            size = converted.model.rotary_sizes[index]
            rotation = converted.model.rotary_emb[size](arguments[0], keywords["position_ids"])
            found, _ = attention(arguments[0], **{**keywords, "position_embeddings": rotation})
            regressions[index].add(projected.pop()[kept[0]], (output[0] - found)[kept[0]])

        return hook

    hooks = []
    for index in layers:
        layer, ours = source.model.layers[index].self_attn, converted.model.layers[index].self_attn
        hooks.append(layer.register_forward_hook(compare(index), with_kwargs=True))
        hooks.append(ours.o_proj.register_forward_pre_hook(lambda _, arguments: projected.append(arguments[0])))
    try:
        with evaluating(source, converted):
            for batch in progress(batches):
                inputs = {name: tensor.to(source.device) for name, tensor in batch.items() if name != "labels"}
                mask = inputs.get("attention_mask")
                kept[:] = [torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()]
                source.model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for regression in regressions.values():
        regression.solve()
