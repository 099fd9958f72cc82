"""What functions of this package are called with."""

from collections.abc import Callable, Iterable

import torch

# Model inputs by name, of which "input_ids" (B, T) must be there.
Batch = dict[str, torch.Tensor]
# Wraps what a loop goes through, to show how far it is: `iter` where nothing is to be shown.
Progress = Callable[[Iterable], Iterable]
# Gives that for the description of a loop.
Stage = Callable[[str], Progress]


def silent(description: str) -> Progress:
    """The `Stage` that shows nothing."""
    return iter
