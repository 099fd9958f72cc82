"""Muon for matrices and AdamW for the rest, as one optimizer.

Muon (https://kellerjordan.github.io/posts/muon) takes of the momentum the nearest orthogonal matrix, so that all
directions of a step count alike. torch.optim.Muon computes the same, in bfloat16 always: on a CPU without AVX-512 a
step of SmolLM2's size would take minutes.
"""

from typing import Any

import torch

from .batches import computing_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the coefficients of Muon's author


class MuonAdamW(torch.optim.AdamW):
    """AdamW, and Muon in the groups that say `"muon": True`, whose parameters must be matrices.

    A group of Muon has, beside "lr" and "weight_decay", a "momentum" and "rms": at a rate of 1 a step has about this
    root mean square. With 0.2 it is as large as AdamW's are, so both take one rate (2502.16982). `None`: all its
    singular values are about 1. With "parts" each of so many equal parts of its rows is a matrix of its own. State,
    groups and schedules are those of one optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        plain = {"muon": False, "momentum": 0.95, "rms": 0.2, "parts": 1}
        super().__init__([plain | group for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step by the gradients."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self.step_matrices(group)
        # AdamW steps in all groups that the optimizer has.
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def step_matrices(self, group: dict[str, Any]) -> None:
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:  # AdamW asks for "step" when a state is loaded
                state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(matrix)}
            momentum = state["momentum"]
            momentum.lerp_(matrix.grad, 1 - group["momentum"])
            change, parts = matrix.grad.lerp(momentum, group["momentum"]), group["parts"]
            # A matrix that is sharded is never taken apart.
            change = orthogonal(change) if parts == 1 else torch.cat([orthogonal(part) for part in change.chunk(parts)])
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            # An orthogonal matrix has a root mean square of 1 over the root of its longer side.
            size = 1.0 if group["rms"] is None else group["rms"] * max(len(matrix) // parts, matrix.shape[1]) ** 0.5
            matrix.add_(change.to(matrix.dtype), alpha=-group["lr"] * size)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix whose singular values are equal, by five steps of a Newton-Schulz iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.mT).mT
    x = matrix.to(computing_dtype(torch.bfloat16, matrix.device.type))
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
