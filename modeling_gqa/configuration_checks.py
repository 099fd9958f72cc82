"""What the fields of a configuration must satisfy, alone and together; a message names field, value and remedy.

The first half looks at one value at a time, when it is written; the second at a layer whose sizes are derived.
"""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .cache_formats import CacheQuantization
from .compatibility import optional

if TYPE_CHECKING:
    from .configuration_gqa import GQAConfig

ROPE_INIT_FUNCTIONS: dict[str, Any] = optional(
    "transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS", {}, "models of a rope_type but 'default' cannot be used"
)

ATTENTION_KINDS = ("mha", "mqa", "gqa", "mla")
# Fields of MLA layers. They are `None` in other kinds, because serving engines take a layer that has them for MLA.
MLA_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_head_dim",
    "rope_interleave",
    "latent_norm",
)
# Fields of MLA layers with qk_norm: size and number of the heads that are normed before the latent is taken.
NORMED_FIELDS = ("qk_norm_head_dim", "qk_norm_key_value_heads")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
# What Gemma 3 does otherwise than the other families, and has no field for.
GEMMA = ("zero_centered_norms", "scale_embeddings")
# What a field that names one of a few ways may be; the first is the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "norm_position": ("before", "after", "both"),
    "qk_norm_span": ("head", "all_heads"),
}

# Largest number of layers, heads or labels; published models have fewer than 300 layers and heads.
MOST = 2**16
# Largest number of rows of a matrix: hundreds of times that of any published model, and torch can still count the
# matrix's bytes.
LARGEST = 2**24
# Largest number of tokens: the cache of a longer text fits no memory.
LONGEST = 2**31 - 1
# Smallest and largest value of each field. nan is outside of every range, because no comparison holds for it.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_labels"), (1, MOST)),
    "qk_norm_key_value_heads": (1, MOST),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "rope_frequency_dim"), (1, LARGEST)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_head_dim", "qk_norm_head_dim"), (1, LARGEST)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "head_dim"), (0, LARGEST)),  # 0 in MLA alone
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), (1, LONGEST)),
    "attention_dropout": (0, 1),
    "initializer_range": (0, 10),
    "rms_norm_eps": (1e-12, 1),
    **dict.fromkeys(("softmax_scale", *MULTIPLIERS), (1e-6, 1e4)),
    "format_version": (1, LONGEST),
}
# Types whose frequencies change with the length of the text.
CHANGING = ("dynamic", "longrope")
# What makes queries longer with their position; it needs original_max_position_embeddings.
QUERY_SCALING = "llama_4_scaling_beta"
ROPE_RANGES: dict[str, tuple[float, float]] = {
    "rope_theta": (1.001, 1e38),
    "partial_rotary_factor": (0, 1),
    "original_max_position_embeddings": (2, LONGEST),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (1e-3, 1e6)),
    **dict.fromkeys(("attention_factor", "short_factor", "long_factor"), (1e-3, 1e6)),
    **dict.fromkeys(("mscale", "mscale_all_dim", QUERY_SCALING), (0, 1e3)),
}
ROPE_EXAMPLE = "{'rope_type': 'default', 'rope_theta': 10000.0}"
ROPE_LISTS = ("short_factor", "long_factor")
# transformers takes `None` as "left out" for these.
ROPE_MAY_BE_NONE = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", QUERY_SCALING)
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": (*ROPE_LISTS, "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Fields of transformers', whose types `@strict` does not see in every release.
TYPES: dict[str, type] = {
    **dict.fromkeys(("is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"), bool),
    **dict.fromkeys(("id2label", "label2id"), dict),
    **dict.fromkeys(("problem_type", "transformers_version"), str),
    "architectures": list,
    **dict.fromkeys(("chunk_size_feed_forward", "num_labels"), int),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_value(name: str, value: Any):
    """Check the value of one field by itself; `@strict` checks its type."""
    if value is None and name != "num_labels":
        return
    if name in TYPES and not isinstance(value, TYPES[name]):
        raise ValueError(f"{name}={shown(value)} must be of type {TYPES[name].__name__}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name}={shown(value)} is unknown: choose one of {', '.join(map(repr, CHOICES[name]))}")
    if name in RANGES:
        check_range(name, value, RANGES[name])
    elif name in ("rope_parameters", "rope_scaling", "sliding_rope_parameters"):
        if not isinstance(value, dict):
            raise ValueError(f"{name}={shown(value)} must be a dict, such as {ROPE_EXAMPLE}")
        check_rope_values(value, "rope_parameters" if name == "rope_scaling" else name)
    elif name == "cache_quantization":
        CacheQuantization.of(value)
    elif (
        name in ("dtype", "torch_dtype")
        and (getattr(torch, value, None) if isinstance(value, str) else value) not in DTYPES
    ):
        raise ValueError(f"{name}={shown(value)} is no dtype of weights: choose one of {', '.join(map(str, DTYPES))}")
    elif name == "is_encoder_decoder" and value:
        raise ValueError("is_encoder_decoder=True does not go with a decoder: leave it out")
    elif name == "label2id" and not all(isinstance(label, str) for label in value):
        raise ValueError(f"label2id={shown(value)} must have the names of labels as keys")
    elif name == "id2label" and not all(str(label).isdecimal() for label in value):
        raise ValueError(f"id2label={shown(value)} must have label numbers, counted from 0, as keys")


def check_range(name: str, value: Any, limits: tuple[float, float]):
    """Check that a value is a number from the first to the second of `limits`."""
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={shown(value)} must be a number from {low} to {high}")
    if low > 0 >= value:
        raise ValueError(f"{name}={shown(value)} must be positive")
    if not low <= value <= high:
        raise ValueError(f"{name}={shown(value)} must lie between {low} and {high}")


def check_rope_values(rope: dict, field: str = "rope_parameters"):
    """Check each rotary parameter that is given in `field`."""
    for key, value in rope.items():
        name = f"{field}[{key!r}]"
        if not isinstance(key, str):
            raise ValueError(f"{field} has the key {shown(key)}: keys must be text, as in {ROPE_EXAMPLE}")
        if isinstance(value, dict):
            raise ValueError(
                f"{name}={shown(value)} is a set of its own: give one set for all layers, or sliding_rope_parameters "
                "for those with a window"
            )
        kinds = ["default", *sorted(ROPE_INIT_FUNCTIONS)]
        if key == "rope_type" and value not in kinds:
            raise ValueError(f"{name}={shown(value)} is unknown: choose one of {', '.join(kinds)}")
        if key in ROPE_LISTS:
            if not isinstance(value, list):
                raise ValueError(f"{name}={shown(value)} must be a list of numbers, one per rotary plane")
            for index, factor in enumerate(value):
                check_range(f"{name}[{index}]", factor, ROPE_RANGES[key])
        elif key in ROPE_RANGES and not (value is None and key in ROPE_MAY_BE_NONE):
            check_range(name, value, ROPE_RANGES[key])
        elif key == "truncate" and not isinstance(value, bool | None):
            raise ValueError(f"{name}={shown(value)} must be True or False")
        known = ("rope_type", "truncate", *ROPE_RANGES)
        if key not in known and suggestion(str(key), known):
            raise ValueError(f"{field} has no key {shown(key)}{suggestion(str(key), known)}")


def check_rope(rope: dict | None, field: str = "rope_parameters"):
    """Check that the rotary parameters are complete and go together; `check_rotary` checks them for a layer."""
    if rope is None:
        raise ValueError(f"{field}=None cannot be used: set it to {ROPE_EXAMPLE}")
    check_rope_values(rope, field)
    kind = rope.get("rope_type", "default")
    for key in ("rope_type", "rope_theta", *ROPE_NEEDS.get(kind, ())):
        if key not in rope:
            raise ValueError(f"{field}={shown(rope)} lacks {key!r}, which rope_type={kind!r} needs: add it")
    if rope.get(QUERY_SCALING) is not None and "original_max_position_embeddings" not in rope:
        raise ValueError(
            f"{field}[{QUERY_SCALING!r}]={rope[QUERY_SCALING]} needs 'original_max_position_embeddings': add it"
        )
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError(
            f"{field}['high_freq_factor']={rope['high_freq_factor']} must be larger than "
            f"{field}['low_freq_factor']={rope['low_freq_factor']}"
        )


def check_sliding_rope(config: "GQAConfig"):
    """Check the rotary parameters of the layers with a window, where they have others than the rest."""
    rope, field = config.sliding_rope_parameters, "sliding_rope_parameters"
    if rope is None:
        return
    if rope.get("rope_type") in ("longrope", "proportional"):
        raise ValueError(f"{field}['rope_type']={rope['rope_type']!r} is not supported: choose another")
    check_rope(rope, field)
    if "sliding_attention" not in config.layer_types:
        raise ValueError(
            f"{field}={shown(rope)} belongs to layers with a window, and layer_types has none: leave it out"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{field}['partial_rotary_factor']={rope['partial_rotary_factor']} is not supported: these layers rotate "
            "whole heads"
        )


def check_token_ids(config: "GQAConfig"):
    """Check that the special tokens are in the vocabulary."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name)
        if value == []:
            raise ValueError(f"{name}=[] names no token: give at least one id, or None")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"{name}={shown(value)} is not in the vocabulary: choose from 0 to {config.vocab_size - 1} "
                    f"(vocab_size={config.vocab_size}), or None"
                )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `", did you mean ...?"` for a name one edit (insert, delete, replace, swap) away from a known one."""
    for other in sorted(known):
        start = 0
        while start < min(len(name), len(other)) and name[start] == other[start]:
            start += 1
        rest, other_rest = name[start:], other[start:]
        if rest != other_rest and (
            rest[1:] == other_rest
            or rest == other_rest[1:]
            or rest[1:] == other_rest[1:]
            or (rest[1::-1] == other_rest[:2] and rest[2:] == other_rest[2:])
        ):
            return f", did you mean {other!r}?"
    return ""


def shown(value: Any) -> str:
    """Return a wrong value as text for one line of a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


# -- a layer whose sizes are derived


def check_layer_sizes(layer: "GQAConfig"):
    """Check that the kind is known, that every size it needs is there, and that no matrix is too large."""
    if layer.attention_kind not in ATTENTION_KINDS:
        kinds = " or ".join((", ".join(map(repr, ATTENTION_KINDS[:-1])), repr(ATTENTION_KINDS[-1])))
        raise ValueError(f"attention_kind={shown(layer.attention_kind)} is unknown: choose {kinds}")
    heads = layer.num_attention_heads
    needed = (*MLA_FIELDS[1:], "head_dim") if layer.attention_kind == "mla" else ("head_dim",)
    missing = next((name for name in needed if getattr(layer, name) is None), None)
    if missing and layer.hidden_size % heads:
        sizes = " or ".join(dict.fromkeys(("head_dim", missing)))
        raise ValueError(
            f"hidden_size={layer.hidden_size} is not divisible by num_attention_heads={heads}: set {sizes}, which "
            f"attention_kind={layer.attention_kind!r} needs"
        )
    if missing is None and layer.num_key_value_heads is None:
        if heads % 4:
            raise ValueError(
                f"num_key_value_heads must be given: num_attention_heads={heads} is not divisible by 4, by which "
                f"attention_kind={layer.attention_kind!r} derives it"
            )
        missing = "num_key_value_heads"
    if missing:
        raise ValueError(
            f"{missing}=None does not go with attention_kind={layer.attention_kind!r}: set it, or build the "
            "configuration with this kind, which derives it"
        )
    widest = max(layer.head_dim, layer.qk_head_dim or 0, (layer.qk_nope_head_dim or 0) + (layer.v_head_dim or 0))
    widest = max(widest, layer.qk_norm_head_dim or 0)
    if heads * widest > LARGEST:
        raise ValueError(
            f"num_attention_heads={heads} heads of {widest} dimensions make a matrix of {heads * widest} rows: "
            f"{LARGEST} are the most"
        )


def check_rotary(layer: "GQAConfig"):
    """Check how much of a head is rotated, and that the rope type can serve it."""
    rope, size = layer.rope_parameters, layer.rotary_dim
    name = "head_dim" if layer.rope_frequency_dim is None else "rope_frequency_dim"
    partial, kind = rope.get("partial_rotary_factor", 1.0), rope["rope_type"]
    rotated = size if kind == "proportional" else int(size * partial)
    if rotated % 2 or not 0 < rotated <= size:
        raise ValueError(
            f"head_dim={size} with partial_rotary_factor={partial} rotates {rotated} dimensions of a head: "
            "their number must be even, positive and at most head_dim"
        )
    if kind == "dynamic" and rotated == 2:
        raise ValueError(
            "rope_parameters['rope_type']='dynamic' needs more than 2 rotary dimensions, and a head of "
            f"{name}={size} rotates 2: choose a larger head, or another rope_type"
        )
    for key in ROPE_LISTS if kind == "longrope" else ():
        if len(rope[key]) != rotated // 2:
            raise ValueError(
                f"rope_parameters[{key!r}] has {len(rope[key])} entries, and a head of {name}={size} has "
                f"{rotated // 2} rotary planes: give a factor for each"
            )


def check_frequencies(layer: "GQAConfig"):
    """Check that the chosen rotary frequencies exist and that their number fits the head."""
    indices, size = layer.rope_frequency_indices, layer.rope_frequency_dim
    if (indices is None) != (size is None):
        raise ValueError(
            f"rope_frequency_indices={indices} and rope_frequency_dim={size} go together: give both, or neither"
        )
    if indices is None:
        return
    if size % 2 or not all(0 <= index < size // 2 for index in indices):
        raise ValueError(
            f"rope_frequency_indices={indices} must lie in 0 to rope_frequency_dim / 2 - 1, and "
            f"rope_frequency_dim={size} must be even"
        )
    partial = layer.rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial} does not go with rope_frequency_indices={shown(indices)}, which say what "
            "is rotated"
        )
    if layer.attention_kind == "mla" and 2 * len(indices) != layer.qk_rope_head_dim:
        raise ValueError(
            f"rope_frequency_indices={shown(indices)} has {len(indices)} entries: MLA needs qk_rope_head_dim / 2 = "
            f"{layer.qk_rope_head_dim // 2}"
        )
    if 2 * len(indices) > layer.head_dim:
        raise ValueError(
            f"rope_frequency_indices={shown(indices)} has {len(indices)} entries: a head of {layer.head_dim} "
            f"dimensions has at most {layer.head_dim // 2} rotary planes"
        )


def check_grouped(layer: "GQAConfig"):
    """Check an MHA, MQA or GQA layer: no fields of MLA, and a number of key/value heads that fits its kind."""
    kind, heads, key_value_heads = layer.attention_kind, layer.num_attention_heads, layer.num_key_value_heads
    for name in (*MLA_FIELDS, *NORMED_FIELDS):
        if getattr(layer, name) is not None:
            raise ValueError(
                f"{name}={getattr(layer, name)} belongs to attention_kind='mla', but attention_kind={kind!r}: "
                "leave it out, or choose 'mla'"
            )
    if layer.head_dim == 0:
        raise ValueError(f"head_dim=0 must be positive in a layer of attention_kind={kind!r}")
    if layer.key_mean:
        raise ValueError(f"key_mean=True belongs to attention_kind='mla', but attention_kind={kind!r}: leave it out")
    expected = {"mha": heads, "mqa": 1}.get(kind, key_value_heads)
    if key_value_heads != expected:
        raise ValueError(
            f"num_key_value_heads={key_value_heads} contradicts attention_kind={kind!r}, which has {expected}: "
            "leave it out, or choose 'gqa'"
        )
    if heads % key_value_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not divisible by num_key_value_heads={key_value_heads}: "
            f"choose one of {', '.join(str(g) for g in range(1, heads + 1) if heads % g == 0)}"
        )


def check_latent(layer: "GQAConfig"):
    """Check an MLA layer: its sizes agree with each other, and no field of the other kinds is set."""
    heads, rope, nope = layer.num_attention_heads, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    if layer.num_key_value_heads != heads:
        raise ValueError(
            f"num_key_value_heads={layer.num_key_value_heads} contradicts attention_kind='mla', which has one per "
            f"query head ({heads}) and caches a latent instead: leave it out"
        )
    if rope == 0 and layer.rope_frequency_indices is None:
        raise ValueError(
            "qk_rope_head_dim=0 rotates nothing: give rope_frequency_indices=[] and rope_frequency_dim as well"
        )
    if rope % 2:
        raise ValueError(f"qk_rope_head_dim={rope} must be even: rotary dimensions come in pairs")
    if layer.qk_head_dim != nope + rope:
        raise ValueError(
            f"qk_head_dim={layer.qk_head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {nope + rope}: leave it out"
        )
    if layer.head_dim != rope:
        raise ValueError(
            f"head_dim={layer.head_dim} must be qk_rope_head_dim={rope} in a layer of attention_kind='mla': write "
            "that, or build the configuration anew with this head_dim"
        )
    if layer.key_mean and nope < layer.rotary_dim:
        raise ValueError(
            f"key_mean=True with qk_nope_head_dim={nope}: the key that all tokens share has {layer.rotary_dim} rotated "
            "dimensions, and the query needs as many that are not rotated"
        )
    if layer.key_mean and (changing := changing_rope(layer)):
        raise ValueError(
            f"key_mean=True does not go with rope_type={changing!r} in any layer, because its frequencies change with "
            "the length"
        )
    check_normed(layer)
    partial = layer.rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial} does not go with attention_kind='mla': qk_rope_head_dim says what is "
            "rotated"
        )
    compressed = layer.hidden_size
    if layer.qk_norm:
        compressed = 2 * layer.qk_norm_key_value_heads * layer.qk_norm_head_dim
    for name, produced in (("kv_lora_rank", nope + layer.v_head_dim), ("q_lora_rank", layer.qk_head_dim)):
        rank, largest = getattr(layer, name), min(compressed, heads * produced)
        if rank is not None and rank > largest:
            warnings.warn(f"{name}={rank} is larger than the {largest} dimensions that it compresses", stacklevel=2)


def changing_rope(config: "GQAConfig") -> str | None:
    """Return the rope type of `config` whose frequencies change with the length of the text, `None` without one."""
    ropes = (config.rope_parameters, config.sliding_rope_parameters)
    return next((rope["rope_type"] for rope in ropes if rope and rope["rope_type"] in CHANGING), None)


def check_normed(layer: "GQAConfig"):
    """Check that an MLA layer with an RMSNorm on each head has its sizes, and nothing that such a layer cannot have."""
    missing = next((name for name in NORMED_FIELDS if getattr(layer, name) is None), None)
    given = next((name for name in NORMED_FIELDS if getattr(layer, name) is not None), None)
    if layer.qk_norm and missing:
        raise ValueError(
            f"qk_norm=True without {missing} does not go with attention_kind='mla': use latent_norm, or give "
            f"{' and '.join(NORMED_FIELDS)}, the heads that are normed before the latent is taken"
        )
    if given and not layer.qk_norm:
        raise ValueError(f"{given}={getattr(layer, given)} belongs to qk_norm=True, and qk_norm=False: leave it out")
    if not layer.qk_norm:
        return
    if layer.latent_norm:
        raise ValueError("latent_norm=True does not go with qk_norm=True, which norms each head before the latent")
    if layer.q_lora_rank is not None:
        raise ValueError(
            f"q_lora_rank={layer.q_lora_rank} does not go with qk_norm=True, which has a plain q_proj: leave it out"
        )
    size = layer.qk_norm_key_value_heads * layer.qk_norm_head_dim
    if 2 * size > LARGEST:
        raise ValueError(
            f"qk_norm_key_value_heads={layer.qk_norm_key_value_heads} heads of qk_norm_head_dim="
            f"{layer.qk_norm_head_dim} make keys and values of {2 * size} numbers: {LARGEST} are the most"
        )
