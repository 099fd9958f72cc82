"""Why a class of transformers cannot express a model, or engines compute it wrongly; by what softmax scales differ."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..attention import GroupedAttention
from ..attention_latent import LATENT_NORM_EPS, LatentAttention, yarn_scale
from ..common.errors import listed
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS

GROUPED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LATENT_FAMILIES = ("deepseek_v3",)
# Rotary types with which the frequencies of a smaller head are some of those of a larger one. With the others they
# depend on the head's size by more than the exponent of each plane ("dynamic" changes the base with the length).
STRIDE_TYPES = ("default", "linear", "llama3")
# Rotary types of DeepSeek-V3 in engines, which take every other for the second.
LATENT_ROPE_TYPES = ("default", "yarn")
# The releases whose source was read, and the first of them run.
VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"
BOTH = f"{VLLM} and {SGLANG}"
FOR_TRANSFORMERS = ": --for transformers (in Python engine='transformers') exports it for transformers alone"


def obstacles(config: GQAConfig, family: str, engine: str | None = None) -> Iterator[str]:
    """Yield the reasons why a family cannot express the model, one sentence each; `engine` as in `export_config`."""
    if any(layer.attention_kind == "mla" and layer.qk_norm for layer in config.per_layer_config):
        yield "qk_norm=True: the latent is taken from normed keys and from values, which no class computes"
        return
    if config.is_heterogeneous:
        first, *rest = config.per_layer_config
        differing = [n for n in PER_LAYER_FIELDS if any(getattr(x, n) != getattr(first, n) for x in rest)]
        yield f"its layers differ in {', '.join(differing)} (per_layer_config), and these classes have equal layers"
        return  # what differs by layer cannot be read below
    latent = family in LATENT_FAMILIES
    if config.attention_kind not in (LatentAttention if latent else GroupedAttention).kinds:
        yield f"attention_kind={config.attention_kind!r} is not this class's"
        return
    if not _standard_frequencies(config):
        yield (
            f"rope_frequency_indices of rope_frequency_dim={config.rope_frequency_dim} are not the frequencies of a "
            f"head of {_rotary_size(config)} dimensions"
        )
    rope = config.rope_parameters
    if rope["rope_type"] != "proportional" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']}: the class rotates whole heads"
    half = config.dtype in (torch.float16, torch.bfloat16)
    if half and not math.log2(scale_ratio(config)).is_integer():
        yield (
            f"softmax_scale={config.softmax_scale} would be folded into query weights, for which {config.dtype} is too "
            "coarse: save the model in float32 first"
        )
    yield from _latent_obstacles(config) if latent else _grouped_obstacles(config, family)
    if engine is None:
        # The export evens the epsilon out, which weights of a half dtype are too coarse for.
        epsilon = config.rms_norm_eps if half else LATENT_NORM_EPS
        yield from (reason + FOR_TRANSFORMERS for reason in misreadings(config, family, epsilon))


def misreadings(config: GQAConfig, family: str, epsilon: float) -> Iterator[str]:
    """Yield what engines read otherwise than transformers, without a word, by classes of their own; one phrase each.

    Args:
        config: of a model that `family` expresses.
        family: that it is exported as.
        epsilon: `rms_norm_eps` of the export.
    """
    query_bias, key_value_bias, output_bias = config.projection_biases
    if family in LATENT_FAMILIES:
        biases = {"q_a_proj": query_bias, "kv_a_proj_with_mqa": key_value_bias, "o_proj": output_bias}
        if any(biases.values()):
            yield f"{BOTH} drop the biases of {listed([name for name, given in biases.items() if given], 'and')}"
        rope_type = config.rope_parameters["rope_type"]
        if rope_type not in LATENT_ROPE_TYPES:
            yield f"{BOTH} take frequencies of rope_type={rope_type!r} for those of 'yarn'"
        elif ignored := _ignored_by_yarn(config.rope_parameters):
            yield f"{BOTH} take rope_parameters without {listed(ignored, 'and')}"
        if epsilon != LATENT_NORM_EPS:
            yield (
                f"{BOTH} use rms_norm_eps={epsilon} in the norm of a latent, where transformers uses {LATENT_NORM_EPS} "
                "(an export of float32 weights for every engine evens that out)"
            )
    elif config.rope_parameters["rope_type"] == "longrope":
        yield f"{VLLM} takes the factors of long texts (rope_type='longrope') for short ones too"
    elif family == "qwen3" and output_bias:
        yield f"{VLLM} drops the bias of o_proj"
    elif family == "llama" and config.mlp_bias:
        yield f"{SGLANG} drops the biases of gate_proj, up_proj and down_proj"


def _ignored_by_yarn(rope: dict[str, Any]) -> list[str]:
    """Return the rotary parameters that engines do not take as transformers does."""
    scales = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    ignored = ["truncate"] if rope.get("truncate") is False else []
    ignored += ["attention_factor"] if rope.get("attention_factor") is not None else []
    # transformers scales by the two together, engines by each.
    return ignored + (scales if len(scales) == 1 else [])


def _grouped_obstacles(config: GQAConfig, family: str) -> Iterator[str]:
    if config.qk_norm != (family == "qwen3"):
        yield f"qk_norm={config.qk_norm}"
    biases = config.projection_biases
    fits = {
        "llama": len(set(biases)) == 1,
        "mistral": not any(biases),
        "qwen2": biases == (True, True, False),
        "qwen3": len(set(biases)) == 1,
    }
    if not fits[family]:
        yield _bias_reason(biases)
    if config.mlp_bias and family != "llama":
        yield "mlp_bias=True"
    sliding = set(config.layer_types) != {"full_attention"}
    if sliding and (family == "llama" or (family == "mistral" and len(set(config.layer_types)) > 1)):
        yield f"layer_types={sorted(set(config.layer_types))}"
    if family == "llama" and config.hidden_size % config.num_attention_heads:
        yield (
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}"
        )


def _latent_obstacles(config: GQAConfig) -> Iterator[str]:
    if config.q_lora_rank is None and config.projection_biases[0]:
        yield "q_proj has a bias (query_bias=True)"
    if config.mlp_bias:
        yield "mlp_bias=True"
    if set(config.layer_types) != {"full_attention"}:
        yield f"layer_types={sorted(set(config.layer_types))}"
    if not config.latent_norm and config.dtype == torch.float16:
        yield "float16 cannot hold the weights of a latent without a norm: save the model in float32 first"


def _bias_reason(biases: tuple[bool, bool, bool]) -> str:
    return "the biases are in other places than the class's: query {}, key and value {}, output {}".format(*biases)


def _rotary_size(config: GQAConfig) -> int:
    return config.qk_rope_head_dim if config.attention_kind == "mla" else config.head_dim


def _standard_frequencies(config: GQAConfig) -> bool:
    """Return whether the rotary planes have the frequencies that a head of their size has by default."""
    indices, size = config.rope_frequency_indices, config.rope_frequency_dim
    if indices is None or size is None:
        return True
    rotary = _rotary_size(config)
    if 2 * len(indices) != rotary or size % rotary:
        return False
    stride = size // rotary
    if stride > 1 and config.rope_parameters["rope_type"] not in STRIDE_TYPES:
        return False
    return list(indices) == list(range(0, size // 2, stride))


def scale_ratio(config: GQAConfig) -> float:
    """Return the model's softmax scale divided by that of transformers' own model of the same sizes."""
    if config.softmax_scale is None:
        return 1.0
    if config.attention_kind == "mla":
        stock = config.qk_head_dim**-0.5 * yarn_scale(config.rope_parameters)
    else:
        stock = config.head_dim**-0.5
    ratio = config.softmax_scale / stock
    power = 2.0 ** round(math.log2(ratio))
    return power if math.isclose(ratio, power, rel_tol=1e-9) else ratio
