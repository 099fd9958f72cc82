"""Small models of every attention kind, and batches for them."""

from typing import Any

import torch

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM

# Sizes whose products differ, so that a mistaken transpose or reshape cannot fit.
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 66,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 14,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KIND_SIZES: dict[str, Any] = {
    "gqa": {"num_key_value_heads": 2},
    "mla": {"kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 13},
}
OLMO_NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_span": "all_heads"}
# Every kind in every layer, and models whose layers differ.
MODELS: dict[str, dict[str, Any]] = {
    **{kind: {"attention_kind": kind, **KIND_SIZES.get(kind, {})} for kind in ATTENTION_CLASSES},
    "mla-q-lora": {"attention_kind": "mla", **KIND_SIZES["mla"], "q_lora_rank": 17},
    "mla-qk-norm": {
        "attention_kind": "mla",
        **KIND_SIZES["mla"],
        "qk_norm": True,
        "qk_norm_head_dim": 15,
        "qk_norm_key_value_heads": 2,
    },
    "mixed": {
        **KIND_SIZES["gqa"],
        "per_layer_config": {0: {"attention_kind": "mla", **KIND_SIZES["mla"]}, 2: {"attention_kind": "mha"}},
    },
    "mixed-window": {
        **KIND_SIZES["gqa"],
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "per_layer_config": {2: {"attention_kind": "mla", **KIND_SIZES["mla"]}},
    },
}

# As SmolLM3 converted in part: a layer without a rotary key, and one that rotates nothing.
UNROTATED: dict[str, Any] = {"rope_frequency_indices": [], "rope_frequency_dim": 14}
MODELS["mla-unrotated"] = {
    **MODELS["mla"],
    "per_layer_config": {
        1: {**UNROTATED, "qk_rope_head_dim": 0},
        2: {**UNROTATED, "attention_kind": "gqa", "head_dim": 14, "num_key_value_heads": 2},
    },
}

# OLMo 3's norms and two sets of rotary parameters, and MLA with Gemma 3's norms.
OLMO_MODELS: dict[str, dict[str, Any]] = {
    "olmo": {
        **KIND_SIZES["gqa"],
        **OLMO_NORMS,
        "norm_position": "after",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
    },
    "mla-olmo": {
        "attention_kind": "mla",
        **KIND_SIZES["mla"],
        **OLMO_NORMS,
        "norm_position": "both",
        "qk_norm_head_dim": 15,
        "qk_norm_key_value_heads": 2,
    },
}

# Gemma 3's norms and embeddings.
GEMMA: dict[str, Any] = {"norm_position": "both", "zero_centered_norms": True, "scale_embeddings": True}
MODELS["gemma"] = {
    **KIND_SIZES["gqa"],
    **GEMMA,
    "qk_norm": True,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "tie_word_embeddings": True,
}
MODELS["mla-gemma"] = {**MODELS["mla-qk-norm"], **GEMMA}

# The options of OLMo, Granite and Ministral 3 together, and a key that all tokens share.
MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0}
# Queries that are scaled by their position, from the fifth on.
SCALING: dict[str, Any] = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default"}
MODELS["options"] = {
    **OLMO_MODELS["olmo"],
    **MULTIPLIERS,
    "rope_parameters": {**DEFAULT_ROPE, **SCALING},
    "sliding_rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0, **SCALING},
}
KEY_MEAN: dict[str, Any] = {"key_mean": True, "rope_frequency_dim": 8, "rope_frequency_indices": [0, 2, 3]}
MODELS["mla-options"] = {
    **OLMO_MODELS["mla-olmo"],
    **MULTIPLIERS,
    "key_mean": True,
    "rope_parameters": {**DEFAULT_ROPE, **SCALING},
}

# What each rope type needs beside its theta, for heads of 14.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20.0, "beta_slow": 0.5},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2],
    },
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    "proportional": {"factor": 2.0},
}


def make_config(model: str, **overrides) -> GQAConfig:
    """Configuration of a small model, by its name in MODELS or OLMO_MODELS."""
    return GQAConfig(**{**SIZES, **(MODELS | OLMO_MODELS)[model], **overrides})


def make_model(model: str, seed: int = 0, **overrides) -> GQAForCausalLM:
    """Small causal language model with seeded weights, in evaluation mode."""
    torch.manual_seed(seed)
    result = GQAForCausalLM(make_config(model, **overrides)).eval()
    for name, parameter in result.named_parameters():
        if name.endswith("key_mean.bias"):  # zeros, as it begins
            torch.nn.init.normal_(parameter)
    return result


def make_batch(batch: int = 3, length: int = 11, padding: str = "none", seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids, padding mask (none, left, right) and the positions of the tokens that are not padding."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)
    mask = torch.ones_like(input_ids)
    if padding != "none":
        for row in range(1, batch):
            mask[row, slice(0, row + 1) if padding == "left" else slice(length - row - 1, length)] = 0
    input_ids[mask == 0] = SIZES["pad_token_id"]
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
