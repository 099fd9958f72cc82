"""The families of transformers' models that can be imported, and what each field of their configurations is.

Every field is mapped to one of ours, fixed to one value, or ignored for a reason given here; any other is refused by
name.
"""

import copy
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from modeling_gqa_cli.errors import UserError, did_you_mean, one_line

from ..configuration_checks import GEMMA, MULTIPLIERS, QUERY_SCALING
from ..configuration_gqa import GQAConfig
from .export_blockers import TWO_ROPES, reads_truncate

# Fields of the same name and meaning in all families and here.
SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_parameters",
    "dtype",
)
# Fields that some families have beside them.
LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOW_FIELDS = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")
MAPPED_LATENT_FIELDS = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "attention_bias",
)
MAPPED_GROUPED_FIELDS = ("num_key_value_heads", "head_dim")
IGNORED_FIELDS = {
    "model_type": "chooses the family",
    "architectures": "names the class that was saved; other classes' weights are refused as unknown tensors",
    "auto_map": "names the repository's own code; transformers' class of this model type is what is imported",
    "transformers_version": "says who wrote the file",
    "chunk_size_feed_forward": "none of these families reads it",
    "id2label": "belongs to a classification head",
    "label2id": "belongs to a classification head",
    "problem_type": "belongs to a classification head",
    "output_hidden_states": "says what is returned beside the logits",
    "tie_last_hidden_states": "says what is returned beside the logits",
    "is_llama_config": "a label that SmolLM2's training framework leaves",
    "transformers.js_config": "for use in browsers",
    "unsloth_version": "says who wrote the file",
    "unsloth_fixed": "says who wrote the file",
    "ignore_keys_at_rope_validation": "says which rotary parameters transformers does not warn of",
    "base_model_tp_plan": "says how transformers spreads the model over devices",
    "partial_rotary_factor": "stands in rope_parameters too, where it is looked at",
    "_attn_implementation_autoset": "left by earlier versions of transformers",
    "_attn_implementation_internal": "chooses the attention kernel",
    "_experts_implementation_internal": "chooses the kernel of experts",
    "_flash_attn_2_enabled": "left by earlier versions of transformers",
    "_commit_hash": "says where the file came from",
    "_name_or_path": "says where the file came from",
    "_model_name_or_path": "says where the file came from",
    "_output_attentions": "says what is returned beside the logits",
    "_post_init_done": "transformers' own state",
    "unk_token_id": "belongs to the tokenizer",
    "tokenizer_class": "belongs to the tokenizer",
    "model_max_length": "belongs to the tokenizer",
    "max_sequence_length": "says how long the texts of training were; max_position_embeddings is what is read",
    "torchscript": "says how earlier versions of transformers traced the model",
    "use_bfloat16": "chooses a dtype in TensorFlow",
    "neftune_noise_alpha": "adds noise to embeddings in training",
    "gradient_checkpointing": "saves memory in training",
    "logits_to_keep": "says how many logits a call returns",
}
# Rotary parameters that all supported versions of transformers use, and only some of them declare.
YARN_FIELDS = ("mscale", "mscale_all_dim", "truncate")
EXPERT_FIELDS = dict.fromkeys(
    (
        "aux_loss_alpha",
        "ep_size",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "output_router_logits",
        "routed_scaling_factor",
        "scoring_func",
        "seq_aux",
        "topk_group",
        "topk_method",
    ),
    "concerns mixture-of-experts layers, and all layers are dense",
)
PRETRAINING_TP = {"pretraining_tp": "how the pretraining split its matrices; transformers does not read it"}
# The one value of a field with which the families' classes work as the field says.
FIXED = {
    "return_dict": lambda config: True,
    "is_encoder_decoder": lambda config: False,
    "is_decoder": lambda config: False,
    "rope_interleaved": lambda config: False,
    "use_mrope": lambda config: False,
    "pruned_heads": lambda config: {},
}
REFUSED_TYPES = {
    "gpt_oss": "it has attention sinks and mixture-of-experts layers",
    "gemma2": "it soft-caps its attention scores and logits",
    "gqa": "it is a modeling_gqa model already, there is nothing to import",
    "granitemoe": "it has mixture-of-experts layers",
    "mistral3": "it has weights for images: save its language model alone, as Ministral3ForCausalLM",
    "mistral4": "it has mixture-of-experts layers",
    "mixtral": "it has mixture-of-experts layers",
    "qwen2_moe": "it has mixture-of-experts layers",
    "qwen3_moe": "it has mixture-of-experts layers",
    "llama4_text": "it has layers without positions and mixture-of-experts layers",
}
REFUSED_FIELDS = {
    "quantization_config": "quantized weights: give the checkpoint in float32, bfloat16 or float16",
    "_heterogeneity_spec": "per_layer_config makes layers differ, which is not imported",
    "attn_logit_softcapping": "soft-capped attention scores",
    "final_logit_softcapping": "soft-capped logits",
    "no_rope_layers": "layers without positions",
}


class Family(NamedTuple):
    """How a family's configuration is read.

    Args:
        translate: returns the fields of our configuration beside the shared ones.
        mapped: names of the fields that it reads, beside `SHARED`.
        fixed: by name, a function of the configuration that returns the one value that the field may have.
        ignored: by name, the reason why the model's function does not depend on the field.
        rotates_part: whether its class reads `partial_rotary_factor`.
        rotary: names of entries of `rope_parameters` that no other family has.
    """

    translate: Callable[[PreTrainedConfig], dict[str, Any]]
    mapped: tuple[str, ...]
    fixed: dict[str, Callable[[PreTrainedConfig], Any]]
    ignored: dict[str, str]
    rotates_part: bool = False
    rotary: tuple[str, ...] = ()


def _grouped(config: PreTrainedConfig, **own: Any) -> dict[str, Any]:
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    # The families round down where hidden_size is not a multiple of the number of heads.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "attention_kind": "mha" if key_value_heads == heads else "mqa" if key_value_heads == 1 else "gqa",
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        **own,
    }


def _llama(config: PreTrainedConfig) -> dict[str, Any]:
    return _grouped(config, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias)


def _mistral(config: PreTrainedConfig) -> dict[str, Any]:  # and Ministral 3
    return _grouped(config, sliding_window=config.sliding_window)


def _phi3(config: PreTrainedConfig) -> dict[str, Any]:
    rope = copy.deepcopy(config.rope_parameters)
    if rope["rope_type"] == "longrope":  # where the class takes this field over the parameters'
        rope["original_max_position_embeddings"] = config.original_max_position_embeddings
    return _mistral(config) | {"rope_parameters": rope}


def _qwen2(config: PreTrainedConfig) -> dict[str, Any]:
    # `sliding_window` and `layer_types` hold what `use_sliding_window` and `max_window_layers` have decided.
    window = {"sliding_window": config.sliding_window, "layer_types": config.layer_types}
    return _grouped(config, query_bias=True, key_value_bias=True, output_bias=False, **window)


def _qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    window = {"sliding_window": config.sliding_window, "layer_types": config.layer_types}
    return _grouped(config, qk_norm=True, attention_bias=config.attention_bias, **window)


def _multipliers(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MULTIPLIERS} | {"softmax_scale": float(config.attention_multiplier)}


def _granite(config: PreTrainedConfig) -> dict[str, Any]:
    return _llama(config) | _multipliers(config)


def _granite4(config: PreTrainedConfig) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "intermediate_size": config.shared_intermediate_size}
    fields = _grouped(config, **own, **_multipliers(config))
    theta = (config.rope_parameters or {}).get("rope_theta", 10000.0)  # the rest is not read
    unrotated = {"rope_frequency_indices": [], "rope_frequency_dim": fields["head_dim"]}
    unrotated["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return fields | ({} if config.position_embedding_type == "rope" else unrotated)


def _smollm3(config: PreTrainedConfig) -> dict[str, Any]:
    # `layer_types` and `no_rope_layers` hold what `use_sliding_window` and `no_rope_layer_interval` have decided.
    fields = _llama(config) | {"sliding_window": config.sliding_window, "layer_types": config.layer_types}
    unrotated = {"rope_frequency_indices": [], "rope_frequency_dim": fields["head_dim"]}
    layers = [index for index in range(config.num_hidden_layers) if not config.no_rope_layers[index]]
    return fields | {"per_layer_config": {index: dict(unrotated) for index in layers} or None}


def _olmo2(config: PreTrainedConfig) -> dict[str, Any]:
    norms = {"norm_position": "after", "qk_norm": True, "qk_norm_span": "all_heads"}
    return _grouped(config, attention_bias=config.attention_bias, **norms)


def _two_ropes(config: PreTrainedConfig) -> dict[str, Any]:
    full, sliding = (config.rope_parameters[kind] for kind in LAYER_TYPES)
    if "full_attention" not in config.layer_types:
        full = sliding
    own = sliding if sliding != full and "sliding_attention" in config.layer_types else None
    window = {"sliding_window": config.sliding_window, "layer_types": config.layer_types}
    return window | copy.deepcopy({"rope_parameters": full, "sliding_rope_parameters": own})


def _olmo3(config: PreTrainedConfig) -> dict[str, Any]:
    return _olmo2(config) | _two_ropes(config)


def _gemma3(config: PreTrainedConfig) -> dict[str, Any]:
    norms = {"norm_position": "both", "qk_norm": True, **dict.fromkeys(GEMMA, True)}
    scale, act = float(config.query_pre_attn_scalar**-0.5), config.hidden_activation
    own = norms | {"attention_bias": config.attention_bias, "softmax_scale": scale, "hidden_act": act}
    return _grouped(config, **own) | _two_ropes(config)


def _latent(config: PreTrainedConfig) -> dict[str, Any]:
    if config.v_head_dim is None:  # ours would derive it
        raise UserError("v_head_dim=None is not supported: it must be given")
    dense = getattr(config, "first_k_dense_replace", config.num_hidden_layers)  # of Youtu's layers all are
    if (dense or 0) < config.num_hidden_layers:
        raise UserError(
            f"first_k_dense_replace={dense} leaves mixture-of-experts layers among the {config.num_hidden_layers} "
            "layers, which are not supported: all layers must be dense"
        )
    return {
        "attention_kind": "mla",
        **{name: getattr(config, name) for name in MAPPED_LATENT_FIELDS},
        # A plain q_proj never has a bias in these families.
        "query_bias": config.attention_bias and config.q_lora_rank is not None,
        # DeepSeek-V2's class has no such field and pairs neighbours; None is half-split as False is.
        "rope_interleave": bool(getattr(config, "rope_interleave", True)),
        "mlp_bias": getattr(config, "mlp_bias", False),
    }


def _attention_alone(config: PreTrainedConfig) -> list[str]:
    kind = "attention" if "attention" in config.layer_types else "full_attention"  # by versions of transformers
    return [kind] * config.num_hidden_layers


def _uniform_types(config: PreTrainedConfig) -> list[str]:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


PHI3_FIXED = {
    "resid_pdrop": lambda config: 0.0,
    "attention_bias": lambda config: False,
    "lm_head_bias": lambda config: False,
    "full_attn_mod": lambda config: 1,
    "interpolate_factor": lambda config: 1,
}
PHI3_IGNORED = {
    "embd_pdrop": "transformers' class does not read it",
    "original_max_position_embeddings": "matters in longrope alone, where it is taken",
}
GRANITE4_FIXED = {
    "num_local_experts": lambda config: 0,
    "layer_types": _attention_alone,
    "normalization_function": lambda config: "rmsnorm",
    "output_router_logits": lambda config: config.output_router_logits and False,
}
GRANITE4_IGNORED = {
    "init_method": "how training began",
    **dict.fromkeys(("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"), "there are no experts"),
    **dict.fromkeys(
        (
            *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
            *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
        ),
        "there are no state-space layers",
    ),
}
NO_MLP_BIAS = {"mlp_bias": lambda config: False}
MISTRAL_FIXED = NO_MLP_BIAS | {"attention_bias": lambda config: False, "layer_types": _uniform_types}
GEMMA3_FIXED = {"use_bidirectional_attention": lambda config: config.use_bidirectional_attention and False}
GEMMA3_IGNORED = {
    **dict.fromkeys(("_sliding_window_pattern", "sliding_window_pattern"), "layer_types says what follows from it"),
    "cache_implementation": "says which cache generate uses",
}
LATENT_FIXED = {
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.qk_rope_head_dim,
    "qk_head_dim": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
}
FURTHER_TOKENS = {
    "num_nextn_predict_layers": "counts modules for speculative decoding, which are not part of the model's forward"
}
YOUTU_INITIALIZER = {"embedding_initializer_range": "how training began"}
FAMILIES = {
    "llama": Family(_llama, (*MAPPED_GROUPED_FIELDS, "attention_bias", "mlp_bias"), {}, PRETRAINING_TP),
    "mistral": Family(_mistral, (*MAPPED_GROUPED_FIELDS, "sliding_window"), MISTRAL_FIXED, {}),
    "ministral3": Family(
        _mistral,
        (*MAPPED_GROUPED_FIELDS, "sliding_window"),
        MISTRAL_FIXED,
        {},
        rotary=(QUERY_SCALING, "max_position_embeddings"),  # the class does not read the second
    ),
    "qwen2": Family(_qwen2, (*MAPPED_GROUPED_FIELDS, *WINDOW_FIELDS), NO_MLP_BIAS, {}),
    "qwen3": Family(_qwen3, (*MAPPED_GROUPED_FIELDS, *WINDOW_FIELDS, "attention_bias"), NO_MLP_BIAS, {}),
    "phi3": Family(
        _phi3,
        (*MAPPED_GROUPED_FIELDS, "sliding_window"),
        NO_MLP_BIAS | PHI3_FIXED,
        PHI3_IGNORED,
        rotates_part=True,
    ),
    "granite": Family(
        _granite,
        (*MAPPED_GROUPED_FIELDS, "attention_bias", "mlp_bias", "attention_multiplier", *MULTIPLIERS),
        {},
        {},
    ),
    "granitemoehybrid": Family(
        _granite4,
        (
            *(*MAPPED_GROUPED_FIELDS, "attention_bias", "attention_multiplier", *MULTIPLIERS),
            *("shared_intermediate_size", "position_embedding_type"),
        ),
        NO_MLP_BIAS | GRANITE4_FIXED,
        GRANITE4_IGNORED,
    ),
    "smollm3": Family(
        _smollm3,
        (
            *(*MAPPED_GROUPED_FIELDS, "attention_bias", "mlp_bias"),
            *("sliding_window", "layer_types", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        ),
        {},
        {},
    ),
    "olmo2": Family(_olmo2, (*MAPPED_GROUPED_FIELDS, "attention_bias"), NO_MLP_BIAS, {}),
    "olmo3": Family(
        _olmo3, (*MAPPED_GROUPED_FIELDS, "attention_bias", "sliding_window", "layer_types"), NO_MLP_BIAS, {}
    ),
    "gemma3_text": Family(
        _gemma3,
        (
            *(*MAPPED_GROUPED_FIELDS, "attention_bias", "sliding_window", "layer_types"),
            *("hidden_activation", "query_pre_attn_scalar"),
        ),
        NO_MLP_BIAS | GEMMA3_FIXED,
        GEMMA3_IGNORED,
    ),
    "deepseek_v2": Family(
        _latent,
        (*MAPPED_LATENT_FIELDS, "mlp_bias", "first_k_dense_replace"),
        LATENT_FIXED,
        EXPERT_FIELDS | PRETRAINING_TP,
    ),
    "deepseek_v3": Family(
        _latent,
        (*MAPPED_LATENT_FIELDS, "rope_interleave", "first_k_dense_replace"),
        LATENT_FIXED | NO_MLP_BIAS,
        EXPERT_FIELDS | PRETRAINING_TP | FURTHER_TOKENS,
    ),
    "youtu": Family(
        _latent,
        (*MAPPED_LATENT_FIELDS, "rope_interleave"),
        LATENT_FIXED | NO_MLP_BIAS,
        YOUTU_INITIALIZER,
    ),
}


def find_family(model_type: str) -> Family:
    """Return how a family is read; raises `UserError` for others, with the reason where one is known."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reason = REFUSED_TYPES.get(model_type) if isinstance(model_type, str) else None
        raise UserError(
            f"model_type={model_type!r} is not supported{f', because {reason}' if reason else ''}: "
            f"these can be imported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def stock_class(model_type: str) -> type[PreTrainedConfig]:
    """Return the configuration class of a family, or of a Gemma 3 that reads images; see `find_family`."""
    find_family("gemma3_text" if model_type == "gemma3" else model_type)
    return CONFIG_MAPPING[model_type]


def text_part(config: Any) -> PreTrainedConfig:
    """Return the configuration of what reads text: images have no place in a checkpoint here."""
    return config.text_config if config.model_type == "gemma3" else config


def refuse_fields(config: PreTrainedConfig, family: Family, ignored: Collection[str] = ()) -> None:
    """Raise `UserError` for a field that the family does not have, or that has an unsupported value.

    Args:
        ignored: names of fields that may be there although nobody knows what they ask for.
    """
    mapped = {*SHARED, *family.mapped}
    for name in ignored:
        if name in {*mapped, *FIXED, *family.fixed, *REFUSED_FIELDS}:
            raise UserError(f"{name} cannot be ignored: what the model computes depends on it")
        if name not in vars(config):
            raise UserError(f"the configuration has no field {name} to ignore{did_you_mean(name, vars(config))}")
    fixed = FIXED | family.fixed
    for name, value in vars(config).items():
        if name in mapped or name in IGNORED_FIELDS or name in family.ignored or name in ignored:
            continue
        if name in family.fixed or (name in FIXED and value is not None):
            if value != fixed[name](config):
                raise UserError(
                    f"{name}={value!r} is not supported in a {config.model_type} model: only {fixed[name](config)!r} is"
                )
        elif name in REFUSED_FIELDS and value is not None:
            raise UserError(f"{name.lstrip('_')} is not supported: {REFUSED_FIELDS[name]}")
        elif value is not None:  # an empty field asks for nothing
            raise UserError(
                f"{name}={value!r} is not a field that transformers' {config.model_type} models use, and what it asks "
                "for is not known: if it does not change what the model computes, ignore it with --ignore-field "
                f"{name} (in Python ignore_fields=[{name!r}])"
            )
    _refuse_rope(config, family)


def _refuse_rope(config: PreTrainedConfig, family: Family) -> None:
    rope = config.rope_parameters or {}
    if config.model_type in TWO_ROPES:
        for kind in LAYER_TYPES:
            _refuse_entries(config, family, rope[kind] or {})
            if rope[kind] and not reads_truncate(config.model_type, rope[kind]):
                raise UserError(
                    f"rope_parameters[{kind!r}]['truncate']={rope[kind]['truncate']!r} is not supported: transformers' "
                    f"{config.model_type} models round the range of frequencies all the same"
                )
        rope = {name: value for name, value in rope.items() if name not in LAYER_TYPES}
        unread = next((name for name, value in rope.items() if value is not None), None)
        if unread:
            raise UserError(f"rope_parameters[{unread!r}]={rope[unread]!r} is not in the set of a type of layers")
    else:
        _refuse_entries(config, family, rope)


def _refuse_entries(config: PreTrainedConfig, family: Family, rope: dict[str, Any]) -> None:
    known = {*RopeParameters.__annotations__, *YARN_FIELDS, "type", *family.rotary} - {"mrope_section"}
    unknown = next((name for name, value in rope.items() if name not in known and value is not None), None)
    if unknown:
        raise UserError(f"rope_parameters[{unknown!r}]={rope[unknown]!r} is not supported")
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1.0) and rope.get("rope_type") != "proportional" and not family.rotates_part:
        raise UserError(
            f"partial_rotary_factor={partial} is not supported: {config.model_type} models rotate whole heads"
        )


def import_config(config: PreTrainedConfig, *, ignore_fields: Collection[str] = ()) -> GQAConfig:
    """Return the `GQAConfig` of the model that computes what transformers' model of `config` computes.

    Args:
        config: of one of the `FAMILIES`.
        ignore_fields: names of fields that no family has, and that do not change what the model computes.

    Raises:
        UserError: the family is not supported, or a field has a value that is not; the message names it.

    Example:
        ```python
        from transformers import Qwen2Config

        from modeling_gqa.conversion import import_config

        config = import_config(Qwen2Config(num_attention_heads=8, num_key_value_heads=2, hidden_size=64))
        assert config.attention_kind == "gqa" and config.query_bias
        ```
    """
    refuse_fields(config, find_family(config.model_type), ignore_fields)
    return translate(config)


def translate(config: PreTrainedConfig) -> GQAConfig:
    """Return the `GQAConfig` that the fields known here lead to, whatever others there are; see `import_config`."""
    family = find_family(config.model_type)
    try:
        shared = {name: copy.deepcopy(getattr(config, name)) for name in SHARED if hasattr(config, name)}
        fields = shared | family.translate(config)
        fields["attention_dropout"] = fields["attention_dropout"] or 0.0
        if fields.get("pad_token_id") == -1:  # early Llama checkpoints mean that there is none
            fields["pad_token_id"] = None
        return GQAConfig(**fields)
    except Exception as error:  # a wrong value can make any of these steps fail
        raise UserError(f"this {config.model_type} model cannot be imported: {one_line(error)}") from error
