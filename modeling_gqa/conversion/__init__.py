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
    from .divergence import compare_predictions, layer_errors
    from .targets import target_config

# The public names by the module that has them, which is loaded when one of them is first asked for.
_HOMES = {
    "modeling_gqa_cli.errors": ("UserError",),
    "..checkpoints.checkpoint": ("load_source",),
    "..checkpoints.exporting": ("export_checkpoint", "export_config"),
    "..checkpoints.families": ("import_config",),
    "..checkpoints.writing": ("import_checkpoint",),
    ".allocation": ("allocate",),
    ".convert": ("METHODS", "convert_model"),
    ".divergence": ("compare_predictions", "layer_errors"),
    ".targets": ("target_config",),
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
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
