"""Why a class of transformers cannot express a model, or engines compute it wrongly; by what softmax scales differ."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..attention import Attention, GroupedAttention
from ..attention_latent import LATENT_NORM_EPS, LatentAttention
from ..configuration_checks import GEMMA, MULTIPLIERS, QUERY_SCALING
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS

# The releases whose source was read, and the first of them run.
VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"
FOR_TRANSFORMERS = ": --for transformers (in Python engine='transformers') exports it for transformers alone"


class StockClass(NamedTuple):
    """What a class of transformers can express; by default a class without biases in its MLP, norms of heads, windows.

    Args:
        attention: that it computes.
        biases: where its attention has them, of queries, of keys and values, and of the output; `None`: everywhere or
            nowhere, as the field `attention_bias` says.
        mlp_bias: whether it has this field.
        own_head_dim: whether `head_dim` is a field of its own where it follows from other sizes.
        windows: 0 without, 1 in all layers or in none, 2 layer by layer.
        qk_norm: `qk_norm_span` of its norms of queries and keys; `None` without.
        norm_position: of the norms of its layers.
        multipliers: whether it has `MULTIPLIERS` and the softmax scale as fields, as Granite.
        unrotated: whether layers may be without rotation.
        two_ropes: whether it reads rotary parameters of each type of layers, and none beside them.
        query_scaling: whether it scales queries by their position, as Ministral 3.
        gemma: whether its norms and embeddings are those of Gemma 3.
    """

    attention: type[Attention] = GroupedAttention
    biases: tuple[bool, bool, bool] | None = None
    mlp_bias: bool = False
    own_head_dim: bool = False
    windows: int = 0
    qk_norm: str | None = None
    norm_position: str = "before"
    multipliers: bool = False
    unrotated: bool = False
    two_ropes: bool = False
    query_scaling: bool = False
    gemma: bool = False

    @property
    def is_latent(self) -> bool:
        return self.attention is LatentAttention


NO_BIASES = (False, False, False)
MISTRAL = StockClass(biases=NO_BIASES, windows=1, own_head_dim=True)
OLMO = StockClass(qk_norm="all_heads", norm_position="after")
# Families of transformers that models are exported as; the first that fits is taken.
EXPORT_FAMILIES = {
    "llama": StockClass(mlp_bias=True, own_head_dim=True),
    "mistral": MISTRAL,
    "ministral3": MISTRAL._replace(query_scaling=True),
    "qwen2": StockClass(biases=(True, True, False), windows=2),
    "qwen3": StockClass(qk_norm="head", windows=2, own_head_dim=True),
    "phi3": StockClass(biases=NO_BIASES, windows=1),
    "granite": StockClass(mlp_bias=True, multipliers=True),
    "smollm3": StockClass(mlp_bias=True, windows=2, unrotated=True),
    "granitemoehybrid": StockClass(multipliers=True, unrotated=True),
    "olmo2": OLMO,
    "olmo3": OLMO._replace(windows=2, two_ropes=True),
    "gemma3_text": StockClass(
        qk_norm="head", norm_position="both", windows=2, two_ropes=True, gemma=True, own_head_dim=True
    ),
    "deepseek_v3": StockClass(LatentAttention),
}
TWO_ROPES = tuple(name for name, stock in EXPORT_FAMILIES.items() if stock.two_ropes)


def export_blockers(config: GQAConfig, family: str, engine: str | None = None) -> Iterator[str]:
    """Yield the reasons why a family cannot express the model, one phrase each; `engine` as in `export_config`."""
    stock, layers = EXPORT_FAMILIES[family], list(config.per_layer_config)
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
    if config.attention_kind not in stock.attention.kinds:
        yield f"attention_kind={config.attention_kind!r} is not this class's"
        return
    rope, types = config.rope_parameters, set(config.layer_types)
    half = config.dtype in (torch.float16, torch.bfloat16)
    if not all(
        _standard_frequencies(layer, stock.attention) or (stock.unrotated and layer.rope_frequency_indices == [])
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
    if multiplied and not stock.multipliers:
        yield f"{multiplied}={getattr(config, multiplied)}, which the class does not have"
    own = next((name for name in GEMMA if getattr(config, name) != stock.gemma), None)
    if own:
        yield f"{own}={getattr(config, own)}"
    if stock.gemma and not math.isclose(query_scalar(config) ** -0.5, softmax_scale(config), rel_tol=1e-9):
        yield f"softmax_scale={softmax_scale(config)} is not the root of 1 / query_pre_attn_scalar, a whole number"
    if config.qk_norm != (stock.qk_norm is not None):
        yield f"qk_norm={config.qk_norm}"
    if config.norms_all_heads != (config.qk_norm and stock.qk_norm == "all_heads"):
        yield f"qk_norm_span={config.qk_norm_span!r}"
    if config.norm_position != stock.norm_position:
        yield f"norm_position={config.norm_position!r}"
    if config.sliding_rope_parameters is not None and not stock.two_ropes:
        yield "sliding_rope_parameters: its layers with a window rotate otherwise"
    if not all(reads_truncate(family, x) for x in (rope, config.sliding_rope_parameters or {})):
        yield "truncate=False in rope_parameters: the class rounds the range of frequencies all the same"
    scaling = next((beta for x in layers if (beta := x.rope_parameters.get(QUERY_SCALING)) is not None), None)
    if (scaling is not None) != stock.query_scaling:
        yield f"{QUERY_SCALING}={scaling} in its rotary parameters"
    query_bias, key_value_bias, output_bias = biases = config.projection_biases
    allowed = (stock.biases,) if stock.biases else (NO_BIASES, (True, True, True))
    if query_bias and config.q_lora_rank is None if stock.is_latent else biases not in allowed:
        yield (
            f"the biases are in other places than the class's: query_bias={query_bias}, "
            f"key_value_bias={key_value_bias}, output_bias={output_bias}"
        )
    if config.mlp_bias and not stock.mlp_bias:
        yield "mlp_bias=True"
    if types != {"full_attention"} and len(types) > stock.windows:
        yield f"layer_types={sorted(types)}"
    if family in ("llama", "gemma3_text") and config.hidden_size % config.num_attention_heads:
        yield (
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}"
        )
    if family == "phi3" and config.head_dim * config.num_attention_heads != config.hidden_size:
        yield f"head_dim={config.head_dim} is not hidden_size / num_attention_heads"
    if family == "phi3" and rope["rope_type"] not in ("default", "longrope"):
        yield f"rope_type={rope['rope_type']!r}"
    if stock.is_latent and not config.latent_norm:
        yield "latent_norm=False, and the class has a norm on its latent"
    if engine is None:
        yield from (reason + FOR_TRANSFORMERS for reason in misreadings(config, family))


def reads_truncate(family: str, rope: dict[str, Any]) -> bool:
    """Return whether a family's class computes what `truncate` in a set of rotary parameters asks for.

    Of the sets of its types of layers transformers reads all but this, which it looks for beside them.
    """
    return family not in TWO_ROPES or rope.get("rope_type") != "yarn" or bool(rope.get("truncate", True))


def misreadings(config: GQAConfig, family: str) -> list[str]:
    """Return what engines read otherwise than transformers, without a word, by classes of their own; one phrase each.

    Args:
        config: of a model that `family` expresses.
        family: that it is exported as.
    """
    rope, rope_type = config.rope_parameters, config.rope_parameters["rope_type"]
    if EXPORT_FAMILIES[family].is_latent:
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
    rotates = family == "granitemoehybrid" and config.rope_frequency_indices != []
    # Of Ministral 3 the engines' development branches were read.
    ministral, original = family == "ministral3", rope.get("original_max_position_embeddings")
    granite_biases = family == "granite" and (config.mlp_bias or any(config.projection_biases))
    phrases = {
        f"{VLLM} takes the factors of long texts (rope_type='longrope') for short ones too": rope_type == "longrope",
        f"{VLLM} has no frequencies beyond max_position_embeddings (rope_type='dynamic')": rope_type == "dynamic",
        f"{VLLM} drops the bias of o_proj": family == "qwen3" and config.projection_biases[2],
        f"{SGLANG} drops the biases of gate_proj, up_proj and down_proj": family == "llama" and config.mlp_bias,
        f"{SGLANG} drops all biases of a Granite": granite_biases,
        f"{VLLM} and {SGLANG} take hidden_size / num_attention_heads for head_dim={config.head_dim}": (
            family == "granitemoehybrid" and config.head_dim * config.num_attention_heads != config.hidden_size
        ),
        f"{SGLANG} takes the frequencies of a Granite 4 for those of rope_theta=10000": rotates
        and (rope_type, rope["rope_theta"]) != ("default", 10000),
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
    stock = EXPORT_FAMILIES[family]
    if config.softmax_scale is None or stock.multipliers or stock.gemma:  # whose configurations have the scale
        return 1.0
    ratio = config.softmax_scale / stock.attention.default_scale(config)
    power = 2.0 ** round(math.log2(ratio))
    return power if math.isclose(ratio, power, rel_tol=1e-9) else ratio
