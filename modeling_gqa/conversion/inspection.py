"""What a checkpoint is, what its attention can become and at what price, from its configuration alone."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from ..accounting import cache_bytes_per_token, count_parameters
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .allocation import numbers_per_token
from .changes import changed_layers, lossy_layers
from .errors import ConversionError
from .exporting import export_config, inexactness
from .files import check_companions, local_folder, open_tensors
from .importing import further_layers, import_config, meta_model, own_tensors, read_config
from .matrices import read_heads
from .report import describe_layer
from .targets import target_config

LAYER_FIELDS = (
    "attention_kind",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_norm",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "latent_norm",
)


class Found(NamedTuple):
    """A checkpoint's configuration as a GQA model, its weights' dtype, and its family."""

    config: GQAConfig
    dtype: torch.dtype
    family: str


def find_checkpoint(source: str | Path) -> Found:
    """Read what `source` is: a GQA checkpoint, or one that can be imported.

    Of a model on the Hub only `config.json` is fetched; of a folder the weights' headers are checked too.

    Raises:
        ConversionError: there is no such checkpoint, it is not supported, or a folder's weights do not fit.
    """
    folder = Path(source)
    if not folder.is_dir():
        try:
            folder = Path(hf_hub_download(str(source), "config.json")).parent
        except (HfHubHTTPError, ValueError, OSError):
            folder = local_folder(source)  # which says what is wrong
    source_config = read_config(folder)
    family = source_config.model_type
    config = source_config if family == GQAConfig.model_type else import_config(source_config)
    assert isinstance(config, GQAConfig)
    dtype = config.dtype
    if Path(source).is_dir():
        check_companions(folder, config.vocab_size)
        model = meta_model(GQAForCausalLM, config)
        tensors = own_tensors(model, open_tensors(folder), further_layers(source_config))
        dtype = dtype or next(iter(tensors.values())).dtype
    return Found(config, dtype if isinstance(dtype, torch.dtype) else torch.float32, family)


def check_convertible(config: GQAConfig, target: GQAConfig) -> bool:
    """Whether a conversion would be exact; raises ConversionError where it is impossible or changes nothing."""
    changed = changed_layers(config, target)
    if not changed:
        raise ConversionError("the target's attention is the source's: there is nothing to convert")
    model: Any = meta_model(GQAForCausalLM, config)
    for index in changed:
        read_heads(model, index)
    return not lossy_layers(model, target)


def conversions(config: GQAConfig, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """What all layers together can become: `exact` and `lossy` conversions with the cache bytes per token that result,
    `impossible` ones with the reason."""
    found: dict[str, dict[str, Any]] = {"exact": {}, "lossy": {}, "impossible": {}}

    def enter(name: str, kind: str, **sizes: Any):
        try:
            target = target_config(config, kind, **sizes)
            if changed_layers(config, target):
                outcome = "exact" if check_convertible(config, target) else "lossy"
                found[outcome][name] = cache_bytes_per_token(target, dtype)
        except ConversionError as error:
            found["impossible"][name] = str(error)

    layers = list(config.per_layer_config)
    heads = layers[0].num_attention_heads
    for number in (number for number in range(heads, 0, -1) if heads % number == 0):
        if number in (1, heads):
            enter("mha" if number == heads else "mqa", "mha" if number == heads else "mqa")
        else:
            enter(f"gqa with {number} key/value heads", "gqa", num_key_value_heads=number)
    if all(layer.attention_kind != "mla" and layer.num_key_value_heads == 1 for layer in layers):
        enter("mla of the same cache size", "mla")
    half = max(3, min(numbers_per_token(layer) for layer in layers) // 2)
    enter(f"mla of a chosen cache size, for instance {half}", "mla", cache_size=half)
    return found


def inspect_checkpoint(source: str | Path) -> dict[str, Any]:
    """What `modeling-gqa inspect` shows; raises ConversionError."""
    config, dtype, family = find_checkpoint(source)
    family_out: str | None
    reason: str | None
    try:
        family_out, reason = export_config(config).model_type, inexactness(config)
    except ConversionError as error:
        family_out, reason = None, str(error)
    return {
        # What is passed on tells no path of this machine.
        "source": Path(source).resolve().name if Path(source).exists() else str(source),
        "family": family,
        "parameters": count_parameters(config),
        "dtype": str(dtype).removeprefix("torch."),
        "cache_bytes_per_token": cache_bytes_per_token(config, dtype),
        "layers": [
            {
                "layer": index,
                "attention": describe_layer(layer),
                **{name: getattr(layer, name) for name in LAYER_FIELDS},
                "sliding_window": config.sliding_window if kind == "sliding_attention" else None,
                "cache_bytes_per_token": numbers_per_token(layer) * dtype.itemsize,
            }
            for index, (layer, kind) in enumerate(zip(config.per_layer_config, config.layer_types, strict=True))
        ],
        "conversions": conversions(config, dtype),
        "export": {"family": family_out, "reason": reason},
    }
