"""Configurations as users name them: presets, folders, files and models on the Hub, of this package and stock ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from modeling_gqa_cli.errors import UserError, did_you_mean, one_line
from modeling_gqa_cli.paths import CONFIGURATION, refuse_mistyped

from ..checkpoints.families import find_family, translate
from ..checkpoints.files import read_json
from ..configuration_gqa import GQAConfig
from . import CostedModel, Experts

PRESETS = {
    path.parent.name: path
    for folder in ("models", "published")
    for path in sorted((CONFIGURATION / folder).glob("*/config.json"))
}
# Stock types whose attention is that of another, beside which their layers have experts.
ATTENTION_OF = {"qwen3_moe": "qwen3", "mixtral": "mistral"}


def find_model(source: str) -> tuple[CostedModel, torch.dtype | None]:
    """Return a model's configuration, with its experts, and the dtype that it names.

    Args:
        source: name of a preset; folder of a checkpoint, or path of its `config.json`; or name of a model on the Hub,
            of which `config.json` alone is fetched. A preset comes first; write `./tiny-mla` for a folder of that name.

    Raises:
        UserError: there is no such configuration, or its attention is not one of this package's.
    """
    path = PRESETS.get(source) or find_file(source)
    fields = read_json(path)
    name = source if source in PRESETS or not Path(source).exists() else path.resolve().parent.name
    try:
        config, experts = read_fields(fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return CostedModel(config, name, experts), dtype


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
    refuse_mistyped(source, PRESETS)
    try:
        return Path(hf_hub_download(source, "config.json"))
    except (HfHubHTTPError, ValueError, OSError) as error:
        hint = did_you_mean(source, PRESETS) or f"; presets are {', '.join(PRESETS)}"
        raise UserError(
            f"{source} is no preset, folder or model on the Hub that can be read{hint} ({one_line(error)})"
        ) from None


def read_fields(fields: Mapping[str, Any]) -> tuple[GQAConfig, dict[int, Experts]]:
    """Return the configuration that a `config.json` holds as this package's, and the experts of its layers.

    Fields that change what a model computes and not what it costs may have any value.

    Raises:
        UserError: its attention is not one of this package's, or a value is not valid.
    """
    model_type = fields.get("model_type")
    try:
        if model_type == GQAConfig.model_type:
            return GQAConfig.from_dict(dict(fields)), {}
        family = ATTENTION_OF.get(str(model_type), model_type)  # type: ignore[arg-type]
        find_family(family)
        stock = CONFIG_MAPPING[model_type].from_dict(dict(fields))
        experts = read_experts(stock)
        return translate(stock if family == model_type else as_family(stock, str(family))), experts
    except UserError:
        raise
    except Exception as error:  # each configuration class checks its own way
        raise UserError(f"the configuration is not valid: {one_line(error)}") from error


def as_family(config: PreTrainedConfig, family: str) -> PreTrainedConfig:
    """Return a stock configuration as one of the family that it shares its attention with.

    Fields that were left out have the values of its own class, whose defaults are others than the family's.
    """
    values = config.to_dict()
    values["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Qwen3-MoE has windows in all layers or in none, and Qwen3 from the layer `max_window_layers` on.
    values |= {"model_type": family, "max_window_layers": 0}
    values.pop("layer_types", None)
    return CONFIG_MAPPING[family].from_dict(values)


def read_experts(config: PreTrainedConfig) -> dict[int, Experts]:
    """Return the experts of each layer of a stock configuration that has some; raises `UserError`."""
    layers, hidden = range(config.num_hidden_layers), config.hidden_size

    def experts(number: int, chosen: int, width: int, shared: int = 0) -> Experts:
        if not 0 < chosen <= number or min(width - 1, shared) < 0:
            raise UserError(f"experts cannot be: {number} of width {width}, {chosen} a token, {shared} shared")
        if getattr(config, "mlp_bias", False):
            raise UserError("mlp_bias=True with experts is not supported")
        size = 3 * hidden * width
        return Experts(number, chosen, size, shared * size + number * hidden)

    if config.model_type in ("deepseek_v2", "deepseek_v3"):
        first = config.num_hidden_layers if config.first_k_dense_replace is None else config.first_k_dense_replace
        each = (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        return {index: experts(*each, config.n_shared_experts or 0) for index in layers if index >= first}
    if config.model_type == "mixtral":
        each = (config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
        return {index: experts(*each) for index in layers}
    if config.model_type == "qwen3_moe" and config.num_experts:
        each = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        dense = set(config.mlp_only_layers or ())
        sparse = [i for i in layers if i not in dense and (i + 1) % config.decoder_sparse_step == 0]
        return {index: experts(*each) for index in sparse}
    return {}


def changed(model: CostedModel | None, fields: Mapping[str, Any]) -> CostedModel:
    """Return a model, or this package's default, with other values in fields of its configuration.

    Sizes that follow from them are derived anew.

    Raises:
        UserError: the configuration refuses a value.
    """
    if (
        model
        and model.experts
        and (fixed := sorted({"hidden_size", "intermediate_size", "num_hidden_layers"} & set(fields)))
    ):
        raise UserError(f"{fixed[0]} cannot be changed in {model.name}, whose experts have sizes of their own")
    try:
        values = model.config.to_dict() if model else {}
        if "attention_kind" in fields:  # which is that of all layers
            values.pop("per_layer_config", None)
        config = GQAConfig.from_dict(values, **fields) if model else GQAConfig(**fields)
    except Exception as error:  # what is strict wraps what was wrong
        raise UserError(one_line(error)) from error
    said = fields.get("attention_kind") or ", ".join(f"{name}={value}" for name, value in fields.items())
    name = ", ".join(filter(None, (model.name if model else "default", said)))
    return CostedModel(config, name, model.experts if model else {})
