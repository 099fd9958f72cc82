"""Checkpoints from one kind of attention to another, and to and from transformers' own classes."""

import warnings
from typing import Any

from ..checkpoints.checkpoint import load_source
from ..checkpoints.exporting import export_checkpoint, export_config
from ..checkpoints.families import import_config
from ..checkpoints.writing import import_checkpoint
from ..common.errors import UserError
from .allocation import allocate
from .convert import METHODS, convert_model
from .measuring import compare_predictions, layer_errors
from .targets import target_config

__all__ = [
    "METHODS",
    "UserError",
    "allocate",
    "compare_predictions",
    "convert_model",
    "export_checkpoint",
    "export_config",
    "import_checkpoint",
    "import_config",
    "layer_errors",
    "load_source",
    "target_config",
]


def __getattr__(name: str) -> Any:
    """Return `compare_predictions` under the name that it had, for one release."""
    if name != "measure":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "modeling_gqa.conversion.measure is now compare_predictions, with source_states= for known=; the old name goes "
        "in the next release",
        FutureWarning,
        stacklevel=2,
    )

    def measure(*arguments: Any, **options: Any) -> dict[str, Any]:
        renamed = {"known": "source_states"}
        return compare_predictions(*arguments, **{renamed.get(name, name): value for name, value in options.items()})

    return measure
