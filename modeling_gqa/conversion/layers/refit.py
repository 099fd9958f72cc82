"""Least squares after a conversion: the output projection that brings the residual stream nearest to the source's.

The solution needs two sums over the tokens, x x^T and x r^T for the projection's input x and the residual r, as in
layer-wise pruning and quantization (Optimal Brain Compression, 2208.11580, section 3).
Shapes: E hidden size, M = heads times value size.
"""

import torch

from .moments import product

# Ridges that are tried: shares of the mean of the diagonal of x x^T that are added to the diagonal. The less text there
# is for M inputs, the larger is the one that helps on other text.
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)


class Regression:
    """Running sums over M inputs and E residuals, from which a linear layer is corrected.

    Args:
        linear: the layer, of M inputs and E outputs.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        size, device = linear.in_features + 1, linear.weight.device
        self.linear = linear
        self.second = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, linear.out_features, dtype=torch.float64, device=device)
        self.power = self.weight = 0.0

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs (tokens, M), the residuals (tokens, E) of their projection, and what each token counts."""
        inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0 if self.linear.bias is not None else 0.0)
        weighed = inputs * weight[:, None].float()
        self.second += product(weighed, inputs, inputs.dtype)
        self.cross += product(weighed, residual, inputs.dtype)
        self.power += (weight.float() @ residual.float().square().sum(-1)).item()
        self.weight += weight.sum().item()

    def include(self, other: "Regression") -> None:
        """Add the sums of `other`, of the same layer."""
        self.second += other.second
        self.cross += other.cross
        self.power += other.power
        self.weight += other.weight

    def solution(self, ridge: float = RIDGES[0]) -> torch.Tensor:
        """Return the change (M + 1, E) of the layer's weight and, in the last row, bias that leaves least.

        `ridge`: one of `RIDGES`.
        """
        added = ridge * self.second.diagonal()[:-1].mean() * torch.ones_like(self.second.diagonal())
        return torch.linalg.solve(self.second + torch.diag(added), self.cross)

    def error(self, change: torch.Tensor | None = None) -> float:
        """Return the weighted mean of the squared norms of the residuals, under a `change` (M + 1, E) of the layer."""
        left = self.power
        if change is not None:  # |r - W x|^2 = |r|^2 - 2 tr(W x r^T) + tr(W x x^T W^T)
            left += (change * (self.second @ change - 2 * self.cross)).sum().item()
        return max(left, 0.0) / self.weight

    def apply(self, change: torch.Tensor) -> None:
        """Add `change` (M + 1, E) to the layer's weight and bias, in place."""
        self.linear.weight.copy_(self.linear.weight + change[:-1].mT)
        if self.linear.bias is not None:
            self.linear.bias.copy_(self.linear.bias + change[-1])
