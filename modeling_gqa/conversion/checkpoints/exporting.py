"""This package's models as transformers' own classes: Llama, Mistral, Qwen2, Qwen3 and, for MLA, DeepSeek-V3.

All but the last can be written as a GGUF file too, for llama.cpp.

An exported model computes the same function, and its tensors hold the same bits. Two exports round, and `inexactness`
names them: a softmax scale folded into the query weights, and a latent without a norm (see `padding.py`).
"""

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ...common.errors import ConversionError, did_you_mean, one_line
from ...common.progress import Progress
from ...configuration_gqa import GQAConfig
from .aside import file_written_aside, refuse_overlap, written_aside
from .checkpoint import meta_model, open_checkpoint, own_tensors
from .families import SHARED
from .files import LazyTensor
from .gguf import is_gguf
from .gguf_tokenizer import read_vocabulary
from .gguf_writing import refuse_for_llama_cpp, write_gguf
from .obstacles import GROUPED_FAMILIES, LATENT_FAMILIES, obstacles, scale_ratio
from .padding import padded_latent, zero_where_missing
from .writing import MAX_SHARD_SIZE, write_checkpoint

# The way out where MLA was converted: also exact MLA repeats each frequency for each key/value head of its source.
CHOSEN_FREQUENCIES = (
    ". MLA made by a conversion keeps rotary frequencies of its source, some several times, which no stock class "
    "can say: export the source, or convert the source to fewer key/value heads (gqa or mqa) and export that. This "
    "model itself runs in transformers, by its own code"
)


def export_config(config: GQAConfig, family: str | None = None) -> PreTrainedConfig:
    """Return the configuration of transformers' own model that computes what the model of `config` computes.

    Args:
        config: of a model whose layers are all alike.
        family: "llama", "mistral", "qwen2", "qwen3" or "deepseek_v3"; `None` for the first that fits.

    Raises:
        ConversionError: no class of transformers, or not the one of `family`, can express the model, and why.

    Example:
        ```python
        from modeling_gqa import GQAConfig
        from modeling_gqa.conversion import export_config

        stock = export_config(GQAConfig(num_attention_heads=8, num_key_value_heads=2, attention_kind="gqa"))
        assert stock.model_type == "llama" and stock.num_key_value_heads == 2
        ```
    """
    kinds = {layer.attention_kind for layer in config.per_layer_config}
    choice: tuple[str, ...] = LATENT_FAMILIES if kinds == {"mla"} else GROUPED_FAMILIES
    if family is not None:
        if family not in GROUPED_FAMILIES + LATENT_FAMILIES:
            known = GROUPED_FAMILIES + LATENT_FAMILIES
            raise ConversionError(
                f"family={family!r} is unknown{did_you_mean(family, known)}: choose one of {', '.join(known)}"
            )
        choice = (family,)
    reasons: dict[str, list[str]] = {}
    for name in choice:
        reason = next(obstacles(config, name), None)
        if reason is None:
            return _stock_config(config, name)
        reasons.setdefault(reason, []).append(name)
    listed = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
    layers = config.per_layer_config
    chosen = any(layer.attention_kind == "mla" and layer.rope_frequency_indices is not None for layer in layers)
    raise ConversionError(
        f"this model cannot be exported to transformers' own classes. {listed}{CHOSEN_FREQUENCIES if chosen else ''}"
    )


def inexactness(config: GQAConfig) -> str | None:
    """Return in one sentence what the export of a model rounds; `None` where it is exact.

    Args:
        config: one that `export_config` accepts.
    """
    if config.attention_kind == "mla" and not config.latent_norm:
        return (
            "The latents get a padding channel that makes DeepSeek's norm harmless: in float32 the logits agree to "
            "1e-4 of the largest."
        )
    if not math.log2(scale_ratio(config)).is_integer():
        return "The softmax scale is folded into the query weights, which rounds them once more."
    return None


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    family: str | None = None,
    force: bool = False,
    progress: Progress = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> PreTrainedConfig:
    """Rewrite a checkpoint of this package as one of transformers' own class, or as a GGUF file, with its tokenizer.

    Args:
        source: folder of a checkpoint of this package in safetensors, or the name of one on the Hub.
        target: folder to write, or a file whose name ends in ".gguf"; it appears complete at the end, or not at all.
        family: see `export_config`.
        force: whether a checkpoint at `target` is replaced.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a weights file, and of the tensors held in memory at a time; a GGUF file is one, and
            a tensor at a time is held.

    Returns:
        The configuration that was written, or that a GGUF file stands for.

    Raises:
        ConversionError: the source is not complete or not of this package, no class of transformers can express it,
            llama.cpp cannot compute it or read its tokenizer, or the target exists.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from transformers import LlamaForCausalLM

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import export_checkpoint

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        with tempfile.TemporaryDirectory() as folder:
            ours, stock = Path(folder, "ours"), Path(folder, "stock")
            GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes)).save_pretrained(ours)
            config = export_checkpoint(ours, stock)
            model = LlamaForCausalLM.from_pretrained(stock)
        assert config.model_type == "llama"
        ```
    """
    checkpoint = open_checkpoint(source)
    refuse_overlap(checkpoint.folder, target)
    if checkpoint.family != GQAConfig.model_type:
        raise ConversionError(f"{source} is a {checkpoint.family} model: only modeling_gqa models are exported")
    config = checkpoint.config
    stock = export_config(config, family)
    if is_gguf(target):
        refuse_for_llama_cpp(config, stock)
        vocabulary = read_vocabulary(checkpoint.folder, stock.vocab_size)
    model = meta_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(stock)], stock)  # type: ignore[arg-type]
    tensors = own_tensors(model, _stock_tensors(config, checkpoint.tensors))
    if is_gguf(target):
        with file_written_aside(target, force) as path:
            write_gguf(path, stock, tensors, vocabulary, progress)
        return stock
    with written_aside(target, force) as aside:
        write_checkpoint(aside, model, tensors, checkpoint.folder, progress, max_shard_size)
    return stock


def _stock_config(config: GQAConfig, family: str) -> PreTrainedConfig:
    fields = {name: copy.deepcopy(getattr(config, name)) for name in SHARED}
    if family in LATENT_FAMILIES:
        fields |= _latent_fields(config)
    else:
        fields |= {"num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    query_bias, _, _ = config.projection_biases
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = query_bias
    if family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if family == "mistral":
        sliding = config.layer_types[0] == "sliding_attention"
        fields["sliding_window"] = config.sliding_window if sliding else None
    if family == "qwen2" and config.head_dim * config.num_attention_heads == config.hidden_size:
        del fields["head_dim"]  # no field of its own there
    if family in ("qwen2", "qwen3"):
        fields |= _window_fields(config)
    try:
        return CONFIG_MAPPING[family](**fields)
    except Exception as error:  # each class checks its own way
        raise ConversionError(f"transformers' {family} class refuses this model: {one_line(error)}") from error


def _latent_fields(config: GQAConfig) -> dict[str, Any]:
    _, key_value_bias, _ = config.projection_biases
    padding = 0 if config.latent_norm else 1
    return {
        "num_key_value_heads": config.num_attention_heads,
        "kv_lora_rank": config.kv_lora_rank + padding,
        "q_lora_rank": None if config.q_lora_rank is None else config.q_lora_rank + padding,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_interleave": config.rope_interleave,
        "attention_bias": key_value_bias or padding > 0,
        "first_k_dense_replace": config.num_hidden_layers,
        "num_nextn_predict_layers": 0,
    }


def _window_fields(config: GQAConfig) -> dict[str, Any]:
    types = list(config.layer_types)
    sliding = "sliding_attention" in types
    return {
        "use_sliding_window": sliding or config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": types,
        # The first layer with a window, where earlier readers of this family do not know layer_types.
        "max_window_layers": types.index("sliding_attention") if sliding else len(types),
    }


def _stock_tensors(config: GQAConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors that transformers' own model stores; those that differ are computed when they are loaded."""
    tensors = dict(tensors)
    ratio = scale_ratio(config)
    query = "q_norm" if config.qk_norm else "q_proj" if config.q_lora_rank is None else "q_b_proj"
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        if config.attention_kind == "mla" and not config.latent_norm:
            tensors |= padded_latent(tensors, layer, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
            if config.q_lora_rank is not None:
                tensors |= padded_latent(tensors, layer, "q_a_proj", "q_a_layernorm", "q_b_proj")
            tensors |= zero_where_missing(tensors, f"{layer}.self_attn.o_proj.bias", config.hidden_size)
        if ratio != 1.0:
            for part in ("weight", "bias"):
                name = f"{layer}.self_attn.{query}.{part}"
                if name in tensors:
                    tensors[name] = _computed(tensors[name], lambda tensor: (tensor.double() * ratio).to(tensor.dtype))
    return tensors


def _computed(tensor: LazyTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    return tensor._replace(load=lambda: function(tensor.load()))
