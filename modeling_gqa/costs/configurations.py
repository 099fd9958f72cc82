"""Configurations as users name them: presets, folders, files and models on the Hub, of this package and stock ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from modeling_gqa_cli.errors import UserError, did_you_mean, one_line
from modeling_gqa_cli.paths import CONFIGURATION, refuse_missing

from ..checkpoints.families import stock_class, text_part, translate
from ..checkpoints.files import read_json
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import SIZE_FIELDS
from . import CostedModel

PRESETS = {
    path.parent.name: path
    for folder in ("models", "published")
    for path in sorted((CONFIGURATION / folder).glob("*/config.json"))
}


def find_model(source: str) -> tuple[CostedModel, torch.dtype | None]:
    """Return a model's configuration, and the dtype that it names.

    Args:
        source: name of a preset; folder of a checkpoint, or path of its `config.json`; or name of a model on the Hub,
            of which `config.json` alone is fetched. A preset comes first; write `./tiny-mla` for a folder of that name.

    Raises:
        UserError: there is no such configuration, or its layers are not this package's.
    """
    path = PRESETS.get(source) or find_file(source)
    fields = read_json(path)
    name = source if source in PRESETS or not Path(source).exists() else path.resolve().parent.name
    try:
        config = read_fields(fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return CostedModel(config, name), dtype


def find_file(source: str) -> Path:
    """Return the path of a `config.json`; raises `UserError`."""
    path = Path(source)
    if not source:
        raise UserError("a CONFIG is empty: give a preset, folder, file or name on the Hub")
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{source} has no config.json")
        return path / "config.json"
    refuse_missing(source)
    try:
        return Path(hf_hub_download(source, "config.json"))
    except (HfHubHTTPError, ValueError, OSError) as error:
        hint = did_you_mean(source, PRESETS) or f"; presets are {', '.join(PRESETS)}"
        raise UserError(
            f"{source} is no preset, folder or model on the Hub that can be read{hint} ({one_line(error)})"
        ) from None


def read_fields(fields: Mapping[str, Any]) -> GQAConfig:
    """Return the configuration that a `config.json` holds as this package's.

    Fields that change what a model computes and not what it costs may have any value.

    Raises:
        UserError: its layers are not this package's, or a value is not valid.
    """
    model_type: Any = fields.get("model_type")
    try:
        if model_type == GQAConfig.model_type:
            return GQAConfig.from_dict(dict(fields))
        return translate(text_part(stock_class(model_type).from_dict(dict(fields))))
    except UserError:
        raise
    except Exception as error:  # each configuration class checks its own way
        raise UserError(f"the configuration is not valid: {one_line(error)}") from error


def changed(model: CostedModel | None, fields: Mapping[str, Any]) -> CostedModel:
    """Return a model, or this package's default, with other values in fields of its configuration.

    Sizes that follow from them are derived anew.

    Raises:
        UserError: the configuration refuses a value.
    """
    try:
        values = model.config.to_dict() if model else {}
        coded = "layers" in (values.get("cache_quantization") or {})
        if model and coded and "cache_quantization" not in fields and not fields.keys().isdisjoint(SIZE_FIELDS):
            raise UserError(
                f"{model.name} has bits for the layers of its cache (cache_quantization), which layers of other sizes "
                "cannot have: give the model that it was made from"
            )
        if "attention_kind" in fields:  # which is that of all layers
            values.pop("per_layer_config", None)
        config = GQAConfig.from_dict(values, **fields) if model else GQAConfig(**fields)
    except Exception as error:  # what is strict wraps what was wrong
        raise UserError(one_line(error)) from error
    said = fields.get("attention_kind") or ", ".join(f"{name}={value}" for name, value in fields.items())
    name = ", ".join(filter(None, (model.name if model else "default", said)))
    return CostedModel(config, name)
