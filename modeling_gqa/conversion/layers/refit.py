"""Least squares after a conversion: the output projection that brings a layer nearest to the source's.

Its right-hand side is linear, so two running sums suffice, as in layer-wise pruning and quantization (Optimal Brain
Compression, 2208.11580, section 3). Shapes: B rows, T tokens, E hidden size, M = heads times value size.
"""

from collections.abc import Sequence
from functools import partial

import torch

from ...common.progress import Progress
from ..text.calibration import Batch, LayerwiseText, evaluating, hooks, layerwise

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
    source, converted, layers: Sequence[int], batches: Sequence[Batch], progress: Progress = iter
) -> None:
    """Fit the output projections of `layers` of `converted`, in place, to the attention outputs of `source`; both see
    the source's layer inputs."""
    projected: list[torch.Tensor] = []

    def see(module, arguments) -> None:
        projected.append(arguments[0])

    def compare(regression: Regression, text: LayerwiseText, index: int, module, arguments, keywords, output) -> None:
        size = converted.model.rotary_sizes[index]
        rotation = converted.model.rotary_emb[size](arguments[0], keywords["position_ids"])
        attention = converted.model.layers[index].self_attn
        found, _ = attention(arguments[0], **{**keywords, "position_embeddings": rotation})
        regression.add(projected.pop()[text.kept], (output[0] - found)[text.kept])

    with evaluating(converted), layerwise(source, batches) as text:
        for index in progress(sorted(layers)):
            layer, projection = source.model.layers[index].self_attn, converted.model.layers[index].self_attn.o_proj
            regression = Regression(projection)
            with hooks(
                layer.register_forward_hook(partial(compare, regression, text, index), with_kwargs=True),
                projection.register_forward_pre_hook(see),
            ):
                text.advance(index)
            regression.solve()
