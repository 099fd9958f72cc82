"""Why a class of transformers cannot express a model, or engines compute it wrongly; by what softmax scales differ."""

import math
from collections.abc import Iterator

import torch

from ..attention import Attention, GroupedAttention
from ..attention_latent import LATENT_NORM_EPS, LatentAttention
from ..configuration_checks import GEMMA, MULTIPLIERS, QUERY_SCALING
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS

# Families of transformers that models are exported as, and the attention that each computes.
EXPORT_FAMILIES: dict[str, type[Attention]] = {
    "llama": GroupedAttention,
    "mistral": GroupedAttention,
    "ministral3": GroupedAttention,
    "qwen2": GroupedAttention,
    "qwen3": GroupedAttention,
    "phi3": GroupedAttention,
    "granite": GroupedAttention,
    "smollm3": GroupedAttention,
    "olmo2": GroupedAttention,
    "olmo3": GroupedAttention,
    "gemma3_text": GroupedAttention,
    "deepseek_v3": LatentAttention,
}
# Those with norms after attention and MLP, and over all heads of queries and keys.
OLMO = ("olmo2", "olmo3")
# Those whose class reads rotary parameters of each type of layers, and none beside them.
TWO_ROPES = ("olmo3", "gemma3_text")
# The releases whose source was read, and the first of them run.
VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"
FOR_TRANSFORMERS = ": --for transformers (in Python engine='transformers') exports it for transformers alone"


def export_blockers(config: GQAConfig, family: str, engine: str | None = None) -> Iterator[str]:
    """Yield the reasons why a family cannot express the model, one phrase each; `engine` as in `export_config`."""
    layers = list(config.per_layer_config)
    if any(layer.qk_norm and layer.attention_kind in LatentAttention.kinds for layer in layers):
        yield "qk_norm=True: the latent is taken from normed keys and from values, which no class computes"
        return
    if any(layer.key_mean for layer in layers):
        yield "key_mean=True: no class adds the scores of a key that all tokens share; conversions to mha keep it"
        return
    if config.is_heterogeneous:
        first, *rest = layers
        differing = [n for n in PER_LAYER_FIELDS if any(getattr(x, n) != getattr(first, n) for x in rest)]
        if family != "smollm3" or not set(differing) <= {"rope_frequency_indices", "rope_frequency_dim"}:
            yield f"its layers differ in {', '.join(differing)} (per_layer_config), and these classes have equal layers"
            return
    attention = EXPORT_FAMILIES[family]
    if config.attention_kind not in attention.kinds:
        yield f"attention_kind={config.attention_kind!r} is not this class's"
        return
    rope, types = config.rope_parameters, set(config.layer_types)
    half = config.dtype in (torch.float16, torch.bfloat16)
    unrotated = family == "smollm3"  # layers may be
    if not all(
        _standard_frequencies(layer, attention) or (unrotated and layer.rope_frequency_indices == [])
        for layer in layers
    ):
        yield "rope_frequency_indices are not the frequencies that a head of this size has by default"
    part = rope.get("partial_rotary_factor", 1.0)
    if rope["rope_type"] != "proportional" and part != 1.0 and family != "phi3":
        yield f"partial_rotary_factor={part}: the class rotates whole heads"
    if half and not math.log2(scale_ratio(config, family)).is_integer():
        yield (
            f"softmax_scale={config.softmax_scale} would be folded into query weights, for which {config.dtype} is too "
            "coarse: save the model in float32 first"
        )
    multiplied = next((name for name in MULTIPLIERS if getattr(config, name) != 1), None)
    if multiplied and family != "granite":
        yield f"{multiplied}={getattr(config, multiplied)}, which the class does not have"
    own = next((name for name in GEMMA if getattr(config, name) != (family == "gemma3_text")), None)
    if own:
        yield f"{own}={getattr(config, own)}"
    if family == "gemma3_text" and not math.isclose(query_scalar(config) ** -0.5, softmax_scale(config), rel_tol=1e-9):
        yield f"softmax_scale={softmax_scale(config)} is not the root of 1 / query_pre_attn_scalar, a whole number"
    if config.qk_norm != (family in ("qwen3", "gemma3_text", *OLMO)):
        yield f"qk_norm={config.qk_norm}"
    if config.norms_all_heads != (config.qk_norm and family in OLMO):
        yield f"qk_norm_span={config.qk_norm_span!r}"
    position = {"olmo2": "after", "olmo3": "after", "gemma3_text": "both"}.get(family, "before")
    if config.norm_position != position:
        yield f"norm_position={config.norm_position!r}"
    if config.sliding_rope_parameters is not None and family not in TWO_ROPES:
        yield "sliding_rope_parameters: its layers with a window rotate otherwise"
    scaling = next((beta for x in layers if (beta := x.rope_parameters.get(QUERY_SCALING)) is not None), None)
    if (scaling is not None) != (family == "ministral3"):
        yield f"{QUERY_SCALING}={scaling} in its rotary parameters"
    query_bias, key_value_bias, output_bias = biases = config.projection_biases
    if not {
        "mistral": not any(biases),
        "ministral3": not any(biases),
        "phi3": not any(biases),
        "qwen2": biases == (True, True, False),
        "deepseek_v3": config.q_lora_rank is not None or not query_bias,
    }.get(family, len(set(biases)) == 1):
        yield (
            f"the biases are in other places than the class's: query_bias={query_bias}, "
            f"key_value_bias={key_value_bias}, output_bias={output_bias}"
        )
    if config.mlp_bias and family not in ("llama", "granite", "smollm3"):
        yield "mlp_bias=True"
    mixed = ("qwen2", "qwen3", "smollm3", *TWO_ROPES)
    windows = 2 if family in mixed else 1 if family in ("mistral", "ministral3", "phi3") else 0
    if types != {"full_attention"} and len(types) > windows:
        yield f"layer_types={sorted(types)}"
    if family in ("llama", "gemma3_text") and config.hidden_size % config.num_attention_heads:
        yield (
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}"
        )
    if family == "phi3" and config.head_dim * config.num_attention_heads != config.hidden_size:
        yield f"head_dim={config.head_dim} is not hidden_size / num_attention_heads"
    if family == "phi3" and rope["rope_type"] not in ("default", "longrope"):
        yield f"rope_type={rope['rope_type']!r}"
    if attention is LatentAttention and not config.latent_norm:
        yield "latent_norm=False, and the class has a norm on its latent"
    if engine is None:
        yield from (reason + FOR_TRANSFORMERS for reason in misreadings(config, family))


def misreadings(config: GQAConfig, family: str) -> list[str]:
    """Return what engines read otherwise than transformers, without a word, by classes of their own; one phrase each.

    Args:
        config: of a model that `family` expresses.
        family: that it is exported as.
    """
    rope, rope_type = config.rope_parameters, config.rope_parameters["rope_type"]
    if EXPORT_FAMILIES[family] is LatentAttention:
        yarn = rope_type == "yarn"
        # transformers scales by the two mscales together, engines by each.
        one_mscale = bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim"))
        phrases = {
            "drop the biases of the attention": any(config.projection_biases),
            f"take frequencies of rope_type={rope_type!r} for those of 'yarn'": rope_type not in ("default", "yarn"),
            "ignore truncate in rope_parameters": yarn and rope.get("truncate") is False,
            "ignore attention_factor in rope_parameters": yarn and rope.get("attention_factor") is not None,
            "ignore mscale or mscale_all_dim without the other": yarn and one_mscale,
            f"use rms_norm_eps={config.rms_norm_eps} in the norm of a latent, where transformers uses "
            f"{LATENT_NORM_EPS}": config.rms_norm_eps != LATENT_NORM_EPS,
        }
        return [f"{VLLM} and {SGLANG} {phrase}" for phrase, holds in phrases.items() if holds]
    # Of Ministral 3 the engines' development branches were read.
    ministral, original = family == "ministral3", rope.get("original_max_position_embeddings")
    granite_biases = family == "granite" and (config.mlp_bias or any(config.projection_biases))
    phrases = {
        f"{VLLM} takes the factors of long texts (rope_type='longrope') for short ones too": rope_type == "longrope",
        f"{VLLM} drops the bias of o_proj": family == "qwen3" and config.projection_biases[2],
        f"{SGLANG} drops the biases of gate_proj, up_proj and down_proj": family == "llama" and config.mlp_bias,
        f"{SGLANG} drops all biases of a Granite": granite_biases,
        f"{VLLM} leaves queries of long texts as they are ({QUERY_SCALING})": ministral,
        f"{SGLANG} takes 16384 for original_max_position_embeddings={original}": ministral and original != 16384,
        f"{SGLANG} drops the windows of a Ministral 3": ministral and config.layer_types[0] == "sliding_attention",
    }
    return [phrase for phrase, holds in phrases.items() if holds]


def _standard_frequencies(layer: GQAConfig, attention: type[Attention]) -> bool:
    """Return whether the rotary planes have the frequencies that a head of their size has by default."""
    rotary = layer.qk_rope_head_dim if attention is LatentAttention else layer.head_dim
    indices = layer.rope_frequency_indices
    return indices is None or (layer.rope_frequency_dim == rotary and list(indices) == list(range(rotary // 2)))


def softmax_scale(config: GQAConfig) -> float:
    """Return the softmax scale of a model of equal grouped layers."""
    return config.softmax_scale or GroupedAttention.default_scale(config)


def query_scalar(config: GQAConfig) -> int:
    """Return `query_pre_attn_scalar`, which gives Gemma 3 the softmax scale, or about that."""
    return max(1, round(softmax_scale(config) ** -2))


def scale_ratio(config: GQAConfig, family: str) -> float:
    """Return the softmax scale of a model of equal layers divided by that of the family's class of the same sizes."""
    if config.softmax_scale is None or family in ("granite", "gemma3_text"):  # whose configurations have the scale
        return 1.0
    ratio = config.softmax_scale / EXPORT_FAMILIES[family].default_scale(config)
    power = 2.0 ** round(math.log2(ratio))
    return power if math.isclose(ratio, power, rel_tol=1e-9) else ratio
