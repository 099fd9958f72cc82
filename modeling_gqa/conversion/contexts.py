"""What holds for the length of a `with` block: models in evaluation mode, and hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def evaluating(*models: PreTrainedModel) -> Iterator[None]:
    """Models in evaluation mode, and afterwards in the mode that they were in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


@contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    """Hooks that are removed afterwards, by the handles that registering them gave."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
