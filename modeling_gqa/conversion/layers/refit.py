"""Least squares after a conversion: the output projection that brings the residual stream nearest to the source's.

The solution needs two sums over the tokens, x x^T and x r^T for the projection's input x and the residual r, as in
layer-wise pruning and quantization (Optimal Brain Compression, 2208.11580, section 3).
Shapes: E hidden size, M = heads times value size.
"""

import torch

from .moments import product

# Ridge: this share of the mean of the diagonal of x x^T is added to the diagonal.
RIDGE = 0.03


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
        self.power = self.weight = 0.0

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs (tokens, M), the residuals (tokens, E) of their projection, and what each token counts."""
        inputs = torch.nn.functional.pad(inputs, (0, 1), value=1.0 if self.linear.bias is not None else 0.0)
        weighed = inputs * weight[:, None].float()
        self.second += product(weighed, inputs, inputs.dtype)
        self.cross += product(weighed, residual, inputs.dtype)
        self.power += (weight.float() @ residual.float().square().sum(-1)).item()
        self.weight += weight.sum().item()

    def solve(self) -> float:
        """Add the least squares solution to the layer's weight and bias, in place.

        Returns:
            The weighted mean of the squared norms of the residuals that are left.
        """
        ridge = RIDGE * self.second.diagonal()[:-1].mean() * torch.ones_like(self.second.diagonal())
        solution = torch.linalg.solve(self.second + torch.diag(ridge), self.cross)  # (M + 1, E)
        change = solution.mT
        self.linear.weight.copy_(self.linear.weight + change[:, :-1])
        if self.linear.bias is not None:
            self.linear.bias.copy_(self.linear.bias + change[:, -1])
        # |r - W x|^2 = |r|^2 - 2 tr(W x r^T) + tr(W x x^T W^T), and x x^T W^T = x r^T - ridge W^T
        saved = (solution * (self.cross + ridge[:, None] * solution)).sum().item()
        return max(self.power - saved, 0.0) / self.weight
