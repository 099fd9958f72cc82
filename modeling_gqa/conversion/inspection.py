"""What a checkpoint is, and what its attention can become with how large a cache, from its configuration alone."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from modeling_gqa_cli.errors import UserError

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.exporting import export_config, inexactness
from ..checkpoints.files import is_gguf
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token, count_parameters
from .report import vllm_kernels
from .targets import (
    SHAPE_FIELDS,
    cached_numbers,
    changed_layers,
    describe,
    exact_latent_sizes,
    lossy_layers,
    mean_bytes,
    target_config,
)

LAYER_FIELDS = ("attention_kind", "num_attention_heads", *SHAPE_FIELDS, "qk_norm", "qk_norm_span", "latent_norm")


def conversions(config: GQAConfig, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return what all layers together can become, with a cache in `dtype`.

    They are `exact` and `lossy` conversions with the bytes of cache per token that result, and `impossible` ones with
    the reason.
    """
    found: dict[str, dict[str, Any]] = {"exact": {}, "lossy": {}, "impossible": {}}

    def enter(name: str, kind: str, **sizes: Any) -> None:
        try:
            target = target_config(config, kind, **sizes)
            if changed_layers(config, target):
                outcome = "lossy" if lossy_layers(config, target) else "exact"
                found[outcome][name] = cache_bytes_per_token(target, dtype)
        except UserError as error:
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
    elif all(layer.attention_kind != "mla" for layer in layers):
        sizes = {exact_latent_sizes(layer) for layer in layers}
        if len(sizes) == 1:  # of layers that differ, no one pair of sizes is right
            rank, rope = sizes.pop()
            enter(f"mla with R = {rank} and P = {rope}", "mla", kv_lora_rank=rank, qk_rope_head_dim=rope)
    half = max(3, min(cached_numbers(layer) for layer in layers) // 2)
    chosen = f"for instance {half * dtype.itemsize:,} bytes ({half:,} numbers) a layer"
    enter(f"mla of a chosen cache size, {chosen}", "mla", cache_size=half)
    return found


def inspect_checkpoint(source: str | Path, ignore_fields: Collection[str] = ()) -> dict[str, Any]:
    """Return what `modeling-gqa inspect` shows of a checkpoint, in types that JSON has.

    Args:
        source: folder of a checkpoint, a GGUF file, or the name of a model on the Hub, of which only `config.json` is
            fetched.
        ignore_fields: see `load_source`.

    Raises:
        UserError: there is no such checkpoint, it is not supported, or a folder's weights do not fit.
    """
    # The tokenizer of a GGUF file would have to be made first, which takes most of the time.
    companions = not is_gguf(source)
    checkpoint = open_checkpoint(source, download=False, companions=companions, ignore_fields=ignore_fields)
    config, dtype = checkpoint.config, checkpoint.dtype
    family_out: str | None
    reason: str | None
    try:
        family_out = export_config(config).model_type
        reason = inexactness(config, family_out)
    except UserError as error:
        family_out, reason = None, str(error)
    return {
        # The output may be passed on, so it holds no path of this machine.
        "source": Path(source).resolve().name if Path(source).exists() else str(source),
        "family": checkpoint.family,
        "parameters": count_parameters(config),
        "dtype": str(dtype).removeprefix("torch."),
        "cache_bytes_per_token": cache_bytes_per_token(config, dtype),
        "mean_cache_bytes_per_token": mean_bytes(config, dtype),
        "max_position_embeddings": config.max_position_embeddings,
        "cache_quantization": getattr(checkpoint.stock_config, "cache_quantization", None),
        "norm_position": config.norm_position,
        "layers": [
            {
                "layer": index,
                "attention": describe(layer),
                **{name: getattr(layer, name) for name in LAYER_FIELDS},
                "sliding_window": config.sliding_window if kind == "sliding_attention" else None,
                "cache_bytes_per_token": cached_numbers(layer) * dtype.itemsize,
            }
            for index, (layer, kind) in enumerate(zip(config.per_layer_config, config.layer_types, strict=True))
        ],
        "conversions": conversions(config, dtype),
        "export": {"family": family_out, "reason": reason},
        "vllm": vllm_kernels(config),
    }
