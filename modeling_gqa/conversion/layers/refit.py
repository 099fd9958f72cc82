"""Least squares after a conversion: the output projection that brings a layer's output nearest to the source's.

The solution needs two sums over the tokens, x x^T and x r^T for the projection's input x and the residual r, as in
layer-wise pruning and quantization (Optimal Brain Compression, 2208.11580, section 3).
Shapes: B rows, T tokens, E hidden size, M = heads times value size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...common.progress import Progress
from ...modeling_gqa import GQAForCausalLM
from ..text.calibration import Batch, LayerwiseText, evaluating, hooks, layerwise

# Ridge: this share of the mean of the diagonal of x x^T is added to the diagonal.
RIDGE = 1e-3


class Regression:
    """Running sums over M inputs and E residuals, from which `solve` corrects a linear layer.

    Args:
        linear: the layer, of M inputs and E outputs.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        size, device = linear.in_features + 1, linear.weight.device
        self.linear = linear
        self.second = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, linear.out_features, dtype=torch.float64, device=device)

    def add(self, inputs: torch.Tensor, residual: torch.Tensor) -> None:
        """Add inputs (tokens, M) and the residuals (tokens, E) of their projection."""
        inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0 if self.linear.bias is not None else 0.0).float()
        self.second += (inputs.mT @ inputs).double()
        self.cross += (inputs.mT @ residual.float()).double()

    def solve(self) -> None:
        """Add the least squares solution to the layer's weight and bias, in place."""
        ridge = RIDGE * self.second.diagonal()[:-1].mean() * torch.ones_like(self.second.diagonal())
        change = torch.linalg.solve(self.second + torch.diag(ridge), self.cross).mT  # (E, M + 1)
        self.linear.weight.add_(change[:, :-1].to(self.linear.weight.dtype))
        if self.linear.bias is not None:
            self.linear.bias.add_(change[:, -1].to(self.linear.bias.dtype))


@torch.no_grad()
def refit_outputs(
    source: GQAForCausalLM,
    converted: GQAForCausalLM,
    layers: Sequence[int],
    batches: Sequence[Batch],
    progress: Progress = iter,
) -> None:
    """Fit output projections of a converted model, in place, to the attention outputs of its source.

    Both models' layers get the source's hidden states.

    Args:
        source: the model that was converted.
        converted: its conversion.
        layers: indices of the layers to fit.
        batches: model inputs.
        progress: wraps the iteration over the layers.
    """
    projected: list[torch.Tensor] = []

    def see(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        projected.append(arguments[0])

    def compare(
        regression: Regression, text: LayerwiseText, index: int, module: Any, arguments: Any, keywords: Any, output: Any
    ) -> None:
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
