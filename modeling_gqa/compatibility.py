"""What these files use of transformers without its promise, each part of which may be missing in another release.

Everything else that they import when they are loaded is exported by `transformers` itself or documented. What one tool
alone needs (continuous batching, tensor parallelism, PEFT) is in `integrations.py`, imported when used.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

# What transformers calls a cache in arguments of `generate` and in outputs; 5.24 has renamed it.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
# Releases of transformers, by their first two numbers, that the tests are run against.
TESTED = ((5, 17), (5, 24))
# By this name transformers' verbosity holds for it; it says a line once, however many copies of this file are loaded.
logger = logging.get_logger("transformers.modeling_gqa")


def optional(module: str, name: str, without: Any, lost: str) -> Any:
    """Return what `module` calls `name`; where that is missing, warn once and return `without`.

    Args:
        lost: what does not work then.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        logger.warning_once(f"transformers {transformers.__version__} has no {module}.{name}: {lost}")
        return without


def attempt(lost: str, tell: Callable[..., None], *arguments: Any) -> None:
    """Call a function that tells another tool of these models; where it fails, warn once, in words of what is lost."""
    try:
        tell(*arguments)
    except Exception as error:  # of a tool whose insides have changed, which may fail in any way
        why = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning_once(f"with transformers {transformers.__version__}, {lost} ({why})")


def warn_of_other_releases() -> None:
    """Warn once where transformers is a release that these files were not tested with.

    Raises:
        ImportError: it is older than 5, which has no configurations that these files can extend.
    """
    numbers = transformers.__version__.split(".")[:2]
    release = tuple(int(number) if number.isdecimal() else 0 for number in numbers)
    first, last = (".".join(map(str, numbers)) for numbers in TESTED)
    if release < (5, 0):
        raise ImportError(
            f"this model's code needs transformers {first} to {last} and found {transformers.__version__}: "
            f"run `pip install -U 'transformers>={first},<6'`"
        )
    if not TESTED[0] <= release <= TESTED[1]:
        logger.warning_once(
            f"this model's code was tested with transformers {first} to {last} and found {transformers.__version__}: "
            "it may work"
        )


def is_tracing(tensor: Any = None) -> bool:
    """Whether a graph is recorded (torch.compile, torch.export, torch.jit, CUDA graphs, or `tensor` is a stand-in).

    A value of a tensor must not be asked for then, and what is decided holds for later calls as well.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return isinstance(tensor, torch.fx.Proxy) or type(tensor).__name__ == "FakeTensor"


def can_return_tuple(forward: Callable) -> Callable:
    """Let a model's `forward` return a tuple where `return_dict=False` is passed, or in the configuration."""

    @wraps(forward)
    def wrapper(self, *args, return_dict: bool | None = None, **kwargs):
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        output = forward(self, *args, **kwargs)
        return output if return_dict or isinstance(output, tuple) else output.to_tuple()

    return wrapper
