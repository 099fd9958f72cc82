"""This package's models as transformers' own classes (`EXPORT_FAMILIES`); MLA becomes DeepSeek-V3.

Some can be written as a GGUF file too, for llama.cpp.

An exported model computes the same function, also in engines with classes of their own (see `stock_tensors.py`); a
model that they would read otherwise is refused unless it is exported for transformers alone. `inexactness` names what
is rounded.
"""

import copy
import math
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from modeling_gqa_cli.errors import UserError, did_you_mean, one_line

from ..attention_latent import LatentAttention
from ..common import cards
from ..common.progress import Progress
from ..configuration_checks import MULTIPLIERS
from ..configuration_gqa import GQAConfig
from .checkpoint import meta_model, open_checkpoint, own_tensors
from .export_blockers import (
    EXPORT_FAMILIES,
    FOR_TRANSFORMERS,
    export_blockers,
    misreadings,
    query_scalar,
    scale_ratio,
    softmax_scale,
)
from .families import SHARED
from .files import is_gguf
from .stock_tensors import own_names, stock_tensors
from .writing import MAX_SHARD_SIZE, new_checkpoint, refuse_overlap, write_checkpoint

# The way out where MLA was converted: also exact MLA repeats each frequency for each key/value head of its source.
CHOSEN_FREQUENCIES = (
    ". MLA made by a conversion has rotary frequencies that no stock class has: export the source, or convert it to "
    "fewer key/value heads (gqa or mqa) and export that. transformers runs this model itself, by its own code"
)
CARD = """# {title}

`{source}` as transformers' {name}.
"""
MISREAD = """
**Do not serve this with an engine's own class of {name}**: {reasons}. The engine does not say so, and
other text comes out. transformers computes it as it is, and so does vLLM with `--model-impl transformers`.
"""


def export_config(config: GQAConfig, family: str | None = None, engine: str | None = None) -> PreTrainedConfig:
    """Return the configuration of transformers' own model that computes what the model of `config` computes.

    Args:
        config: of a model whose layers are all alike, but for rotation and windows.
        family: "llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "granite", "smollm3", "granitemoehybrid",
            "olmo2", "olmo3", "gemma3_text" or "deepseek_v3"; `None` for the first that fits.
        engine: "transformers" for a model that other engines may compute wrongly by classes of their own; `None` for
            one that vLLM and SGLang compute rightly, too.

    Raises:
        UserError: no class of transformers, or not the one of `family`, can express the model, and why.

    Example:
        ```python
        from modeling_gqa import GQAConfig
        from modeling_gqa.conversion import export_config

        stock = export_config(GQAConfig(num_attention_heads=8, num_key_value_heads=2, attention_kind="gqa"))
        assert stock.model_type == "llama" and stock.num_key_value_heads == 2
        ```
    """
    if engine not in (None, "transformers"):
        raise UserError(f"engine={engine!r} is unknown: give 'transformers', or none for every engine")
    if family is not None and family not in EXPORT_FAMILIES:
        hint, known = did_you_mean(family, EXPORT_FAMILIES), ", ".join(EXPORT_FAMILIES)
        raise UserError(f"family={family!r} is unknown{hint}: choose one of {known}")
    layers = list(config.per_layer_config)
    latent = {layer.attention_kind for layer in layers} <= set(LatentAttention.kinds)
    reasons: dict[str, list[str]] = {}
    for name in [family] if family else [x for x, stock in EXPORT_FAMILIES.items() if stock.is_latent == latent]:
        reason = next(export_blockers(config, name, engine), None)
        if reason is None:
            return _stock_config(config, name)
        reasons.setdefault(reason, []).append(name)
    listed = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
    how = "is not exported for every engine" if FOR_TRANSFORMERS in listed else "cannot be exported"
    if latent and any(layer.rope_frequency_indices is not None for layer in layers):
        listed += CHOSEN_FREQUENCIES
    raise UserError(f"this model {how} to transformers' own classes. {listed}")


def inexactness(config: GQAConfig, family: str) -> str | None:
    """Return in one sentence what the export of a model rounds; `None` where it is exact.

    Args:
        config: one that `export_config` accepts.
        family: that it is exported as.
    """
    if not math.log2(scale_ratio(config, family)).is_integer():
        return "The softmax scale is folded into the query weights, which rounds them once more."
    return None


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    family: str | None = None,
    engine: str | None = None,
    force: bool = False,
    progress: Progress = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> PreTrainedConfig:
    """Rewrite a checkpoint of this package as one of transformers' own class, or as a GGUF file, with its tokenizer.

    Args:
        source: folder of a checkpoint of this package in safetensors, or the name of one on the Hub.
        target: folder to write, or a file whose name ends in ".gguf"; it appears complete at the end, or not at all.
        family: see `export_config`.
        engine: see `export_config`; a GGUF file is for llama.cpp, whatever it says.
        force: whether a checkpoint at `target` is replaced.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a weights file, and of the tensors held in memory at a time; of a GGUF file, a single
            one, a tensor at a time is held.

    Returns:
        The configuration that was written, or that a GGUF file stands for.

    Raises:
        UserError: the source is not complete or not of this package, no class of transformers can express it,
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
        raise UserError(f"{source} is a {checkpoint.family} model: only modeling_gqa models are exported")
    config = checkpoint.config
    stock = export_config(config, family, "transformers" if is_gguf(target) else engine)
    model = meta_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(stock)], stock)  # type: ignore[arg-type]
    tensors = own_tensors(model, stock_tensors(config, stock, checkpoint.tensors))
    if is_gguf(target):
        from .gguf_vocabulary import read_vocabulary
        from .gguf_writing import new_gguf, refuse_for_llama_cpp, write_gguf

        refuse_for_llama_cpp(config, stock)
        if stock.model_type == "granitemoehybrid":  # whose architecture of dense layers is Granite's
            tensors = own_names(config, stock.model_type, tensors)
        vocabulary = read_vocabulary(checkpoint.folder, stock.vocab_size)
        with new_gguf(target, force) as path:
            write_gguf(path, stock, tensors, vocabulary, progress)
        return stock
    with new_checkpoint(target, force) as aside:
        write_checkpoint(aside, model, tensors, checkpoint.folder, progress, max_shard_size)
        _write_card(aside, Path(target).resolve().name, config, stock, checkpoint.folder)
    return stock


def _write_card(folder: Path, title: str, config: GQAConfig, stock: PreTrainedConfig, source: Path) -> None:
    """Save a model card where the folder `source` that it was made from has a licence, or engines misread the model."""
    reasons, kept = "; ".join(misreadings(config, stock.model_type)), cards.kept_metadata(source / "README.md")
    if reasons or kept:
        name = type(stock).__name__.removesuffix("Config")
        metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", **kept}
        text = CARD.format(title=title, source=source.resolve().name, name=name)
        cards.write_card(folder, metadata, text + MISREAD.format(name=name, reasons=reasons) * bool(reasons))


def _stock_config(config: GQAConfig, family: str) -> PreTrainedConfig:
    fields = {name: copy.deepcopy(getattr(config, name)) for name in SHARED}
    stock, types = EXPORT_FAMILIES[family], list(config.layer_types)
    sliding = "sliding_attention" in types
    if stock.is_latent:
        fields |= _latent_fields(config)
    else:
        fields |= {"num_key_value_heads": config.num_key_value_heads}
        if stock.own_head_dim or config.head_dim * config.num_attention_heads != config.hidden_size:
            fields["head_dim"] = config.head_dim
        if stock.biases is None:
            fields["attention_bias"] = config.projection_biases[0]
    if stock.mlp_bias:
        fields["mlp_bias"] = config.mlp_bias
    if stock.multipliers:
        scale = softmax_scale(config)
        fields |= {"attention_multiplier": scale, **{name: getattr(config, name) for name in MULTIPLIERS}}
    if stock.windows == 1:
        fields["sliding_window"] = config.sliding_window if sliding else None
    if stock.windows == 2:
        fields |= {"sliding_window": config.sliding_window, "layer_types": types}
    if stock.two_ropes:
        own = config.sliding_rope_parameters
        ropes = {"full_attention": config.rope_parameters, "sliding_attention": own or config.rope_parameters}
        # The classes make a mask of the window even where no layer has one.
        window = config.sliding_window or config.max_position_embeddings
        fields |= {"rope_parameters": copy.deepcopy(ropes), "sliding_window": window}
    elif stock.windows == 2:
        fields["use_sliding_window"] = config.sliding_window is not None
    if stock.gemma:
        fields |= {"hidden_activation": fields.pop("hidden_act"), "query_pre_attn_scalar": query_scalar(config)}
    if family == "granitemoehybrid":
        fields |= {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size, "mamba_n_heads": 1}
        rotated = config.rope_frequency_indices != []
        fields |= {"layer_types": types, "position_embedding_type": "rope" if rotated else None}
    if family == "phi3" and (original := config.rope_parameters.get("original_max_position_embeddings")):
        fields["original_max_position_embeddings"] = original  # the class takes this field's over the parameters'
    if family == "smollm3":
        fields["no_rope_layers"] = [int(layer.rope_frequency_indices != []) for layer in config.per_layer_config]
    if family in ("qwen2", "qwen3"):
        # The first layer with a window, for readers of this family that do not know layer_types.
        fields["max_window_layers"] = types.index("sliding_attention") if sliding else len(types)
    try:
        return CONFIG_MAPPING[family](**fields)
    except Exception as error:  # each class checks its own way
        raise UserError(f"transformers' {family} class refuses this model: {one_line(error)}") from error


def _latent_fields(config: GQAConfig) -> dict[str, Any]:
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        **{name: getattr(config, name) for name in sizes},
        "num_key_value_heads": config.num_attention_heads,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "attention_bias": any(config.projection_biases),
        "first_k_dense_replace": config.num_hidden_layers,
        "num_nextn_predict_layers": 0,
    }
