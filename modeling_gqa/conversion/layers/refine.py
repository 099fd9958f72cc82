"""Gradient steps on one layer's new attention, towards the output that brings the residual stream back to the source's.

Shapes: B rows, T tokens, E hidden size.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice

import torch

from ...attention import Attention

# Learning rates of Adam that are tried: at the first step, from which it falls to 0 on a line. Some models' weights are
# ruined by the first.
LEARNING_RATES = (1e-3, 1e-4)

# One example: the layer's input (B, T, E), the keyword arguments of its forward, the wanted output (B, T, E), and what
# each token's squared error counts (B, T).
Example = tuple[torch.Tensor, dict, torch.Tensor, torch.Tensor]


def refine(attention: Attention, examples: Iterable[Example], steps: int, learning_rate: float) -> None:
    """Train the parameters of `attention` but its output projection, in place, with one example a step.

    The projection is left out because least squares find its best values afterwards.

    Args:
        attention: the module, in the dtype of the model. It computes in this dtype, and its parameters are kept in
            at least float32 meanwhile.
        examples: at least `steps` of them.
        steps: number of steps of Adam (1412.6980).
        learning_rate: one of `LEARNING_RATES`.
    """
    dtype = attention.o_proj.weight.dtype
    computed = torch.promote_types(dtype, torch.float32)
    attention.to(computed)
    trained = [x for name, x in attention.named_parameters() if not name.startswith("o_proj")]
    # On a CPU the step that PyTorch chooses by itself takes six times as long.
    optimizer = torch.optim.Adam(trained, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / max(steps, 1), total_iters=steps)
    for parameter in trained:
        parameter.requires_grad_(True)
    for x, arguments, target, weight in islice(examples, steps):
        with torch.enable_grad():
            with torch.autocast(x.device.type, dtype) if dtype != computed else nullcontext():
                output, _ = attention(x, **arguments)
            error = (output.to(computed) - target.to(computed)).square().sum(-1)  # (B, T)
            loss = (weight * error).sum() / (weight * target.to(computed).square().sum(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    attention.requires_grad_(False)
    attention.to(dtype)
