"""Checkpoints from one kind of attention to another, and to and from transformers' own classes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modeling_gqa_cli.errors import UserError

    from ..checkpoints.checkpoint import load_source
    from ..checkpoints.exporting import export_checkpoint, export_config
    from ..checkpoints.families import import_config
    from ..checkpoints.writing import import_checkpoint
    from .allocation import allocate
    from .convert import METHODS, convert_model
    from .measuring import compare_predictions, layer_errors
    from .targets import target_config

# Each public name and the module that has it, which is loaded when the name is first asked for.
_HOMES = {
    "METHODS": ".convert",
    "UserError": "modeling_gqa_cli.errors",
    "allocate": ".allocation",
    "compare_predictions": ".measuring",
    "convert_model": ".convert",
    "export_checkpoint": "..checkpoints.exporting",
    "export_config": "..checkpoints.exporting",
    "import_checkpoint": "..checkpoints.writing",
    "import_config": "..checkpoints.families",
    "layer_errors": ".measuring",
    "load_source": "..checkpoints.checkpoint",
    "target_config": ".targets",
}
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
