"""Checkpoints from one kind of attention to another, and to and from transformers' own classes."""

from .allocation import allocate
from .convert import METHODS, convert
from .errors import ConversionError
from .exporting import export_checkpoint, export_config
from .importing import import_checkpoint, import_config, load_source
from .measuring import layer_errors, measure
from .targets import target_config

__all__ = [
    "METHODS",
    "ConversionError",
    "allocate",
    "convert",
    "export_checkpoint",
    "export_config",
    "import_checkpoint",
    "import_config",
    "layer_errors",
    "load_source",
    "measure",
    "target_config",
]
