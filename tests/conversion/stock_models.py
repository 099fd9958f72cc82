"""Small stock models of every family that can be imported, with random weights, norms and biases."""

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.families import import_config

# Sizes whose products differ, so that a mistaken transpose or reshape cannot fit.
SIZES = {
    "vocab_size": 103,
    "hidden_size": 66,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 14}
LATENT = {
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "q_lora_rank": 17,
    "num_key_value_heads": 6,
}
DENSE = {"first_k_dense_replace": 3}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MULTIPLIERS = {
    "embedding_multiplier": 12,
    "residual_multiplier": 0.3,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.15,
}
# Granite 4 without experts and state-space layers.
NO_EXPERTS = {
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": SIZES["intermediate_size"],
    "mamba_n_heads": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 1.0,
    "beta_slow": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.62}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": 11,
}
SCALING = {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 6}  # of queries, by their position
MSCALE = {"mscale": 0.8, "mscale_all_dim": 0.6}
# What a test may change in a model: name -> (model type, fields beside the sizes).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama-mha-tied": ("llama", {"hidden_size": 84, "tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama-mqa-biases": (
        "llama",
        {**GROUPED, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "mistral-window": ("mistral", {**GROUPED, "hidden_size": 65, "sliding_window": 5, "rope_parameters": YARN}),
    "mistral-full": (
        "mistral",
        {**GROUPED, "sliding_window": None, "max_position_embeddings": 11, "rope_parameters": DYNAMIC},
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 3, "hidden_size": 84, "tie_word_embeddings": True}),
    "qwen2-window-head-dim": ("qwen2", {**GROUPED, **WINDOW, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {**GROUPED, "max_position_embeddings": 11, "rope_parameters": DYNAMIC}),
    "qwen3-window-biases": (
        "qwen3",
        {**GROUPED, **WINDOW, "hidden_size": 65, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 2, "hidden_size": 84, "rope_parameters": PARTIAL, "sliding_window": 5}),
    "phi3-long-tied": (
        "phi3",
        {"num_key_value_heads": 3, "hidden_size": 84, "tie_word_embeddings": True, "rope_parameters": LONGROPE},
    ),
    "granite": ("granite", {**GROUPED, **MULTIPLIERS}),
    "granite-biases-tied": (
        "granite",
        {
            "num_key_value_heads": 1,
            "hidden_size": 84,
            **MULTIPLIERS,
            "embedding_multiplier": 0.2,
            "residual_multiplier": 1.5,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "granite4-unrotated": ("granitemoehybrid", {**GROUPED, **MULTIPLIERS, **NO_EXPERTS}),
    "granite4-biases-tied": (
        "granitemoehybrid",
        {
            "num_key_value_heads": 1,
            "hidden_size": 84,
            **MULTIPLIERS,
            **NO_EXPERTS,
            "embedding_multiplier": 0.2,
            "residual_multiplier": 1.5,
            "logits_scaling": 8.0,
            "layer_types": ["attention"] * 3,  # as in Granite's own files
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "smollm3": (
        "smollm3",
        {**GROUPED, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False, "rope_parameters": YARN},
    ),
    "smollm3-window-biases-tied": (
        "smollm3",
        {
            "hidden_size": 84,
            "num_key_value_heads": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("olmo2", {"hidden_size": 84, "num_key_value_heads": 3}),
    "olmo2-biases-head-dim": (
        "olmo2",
        {**GROUPED, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    "olmo3-two-ropes": (
        "olmo3",
        {
            "hidden_size": 84,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR},
        },
    ),
    "olmo3-full": (
        "olmo3",
        {
            **GROUPED,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": YARN},
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GROUPED,
            "hidden_size": 24,  # small, because tied embeddings times its root predict their own token
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 23,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": YARN},
        },
    ),
    "gemma3-biases-untied": (
        "gemma3_text",
        {
            "hidden_size": 84,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "hidden_activation": "silu",
            "attention_bias": True,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": DYNAMIC | {"rope_theta": 50.0}},
        },
    ),
    "ministral3": (
        "ministral3",
        {**GROUPED, "rope_parameters": YARN | SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ministral3-window-tied": (
        "ministral3",
        {
            "num_key_value_heads": 1,
            "head_dim": 10,
            "hidden_size": 84,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR | SCALING | {"max_position_embeddings": 32},
        },
    ),
    "deepseek-v2": ("deepseek_v2", {**LATENT, **DENSE, "rope_parameters": YARN | MSCALE}),
    "deepseek-v2-biases": (
        "deepseek_v2",
        {**LATENT, **DENSE, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
    ),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **DENSE, "rope_parameters": YARN | MSCALE}),
    "deepseek-v3-half-split": (
        "deepseek_v3",
        {**LATENT, **DENSE, "rope_interleave": False, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "deepseek-v3-biases": (
        "deepseek_v3",
        {
            **LATENT,
            **DENSE,
            "q_lora_rank": None,
            "attention_bias": True,
            "max_position_embeddings": 11,
            "rope_parameters": DYNAMIC,
        },
    ),
    "deepseek-v3-q-lora-biases": ("deepseek_v3", {**LATENT, **DENSE, "attention_bias": True}),
    # transformers zeroes the embedding of Youtu's padding token when it loads the model.
    "youtu": ("youtu", {**LATENT, "pad_token_id": None, "rope_parameters": LINEAR | {"mscale_all_dim": 0.6}}),
    "youtu-half-split": (
        "youtu",
        {**LATENT, "rope_interleave": None, "tie_word_embeddings": False, "q_lora_rank": None},
    ),
}


def stock_config(name: str, **fields):
    """Configuration of a stock model, by its name in MODELS."""
    model_type, own = MODELS[name]
    given = {**SIZES, **own, **fields}
    if given.get("rope_parameters") is not None:
        given["rope_parameters"] = copy.deepcopy(given["rope_parameters"])  # transformers completes it in place
    return CONFIG_MAPPING[model_type](**given)


def stock_model(config, seed: int = 0):
    """Stock model of a configuration; biases are not zero and norms not one, as they are where training begins."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.tie_weights()
    randomise(model, seed)
    return model


def randomise(model, seed: int = 0):
    """Draw each parameter from a generator of its name, so that equal shapes have equal weights in another model.

    Norms multiply by about one.
    """
    one = 0.0 if "gemma" in model.config.model_type or getattr(model.config, "zero_centered_norms", False) else 1.0
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        parameter.data.normal_(mean=one if "norm" in name else 0.0, std=0.2, generator=generator)


def batch(rows: int = 2, length: int = 17, vocabulary: int = 103) -> dict[str, torch.Tensor]:
    """Token ids and a mask whose first row is padded on the left."""
    input_ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


@torch.no_grad()
def logits(model, **arguments) -> torch.Tensor:
    """Logits of the tokens that are not padding."""
    inputs = batch(**arguments)
    output = model(**inputs)
    output = output[0] if isinstance(output, tuple) else output.logits
    return output[inputs["attention_mask"].bool()]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether logits agree to `tolerance` of their largest value."""
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def own_model(stock, config=None) -> GQAForCausalLM:
    """This package's model of a stock model's configuration, with the stock model's weights."""
    model = GQAForCausalLM(config or import_config(stock.config)).eval()
    state = stock.state_dict()
    if stock.config.model_type == "phi3":
        for layer in [name.removesuffix("self_attn.qkv_proj.weight") for name in state if "qkv_proj" in name]:
            head = model.config.head_dim
            sizes = [head * stock.config.num_attention_heads, *[head * stock.config.num_key_value_heads] * 2]
            parts = state.pop(f"{layer}self_attn.qkv_proj.weight").split(sizes)
            state |= {f"{layer}self_attn.{name}_proj.weight": x for name, x in zip("qkv", parts, strict=True)}
            parts = state.pop(f"{layer}mlp.gate_up_proj.weight").chunk(2)
            state |= {f"{layer}mlp.{name}_proj.weight": x for name, x in zip(("gate", "up"), parts, strict=True)}
    for name in [name for name in state if "shared_mlp" in name]:
        layer = name.partition("shared_mlp")[0]
        parts = state.pop(name).chunk(2 if "input_linear" in name else 1)
        names = ("gate", "up") if len(parts) == 2 else ("down",)
        state |= {f"{layer}mlp.{part}_proj.weight": x for part, x in zip(names, parts, strict=True)}
    model.load_state_dict(state, strict=True)
    return model


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in llama.cpp's order: the two rows of a rotary plane are neighbours."""
    half = len(rows) // heads // 2
    order = [2 * half * head + plane + half * part for head in range(heads) for plane in range(half) for part in (0, 1)]
    return rows[order]
