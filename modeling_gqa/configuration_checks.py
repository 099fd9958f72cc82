"""What the attention fields of a layer must satisfy; every message names field, value and remedy."""

import warnings

ATTENTION_KINDS = ("mha", "mqa", "gqa", "mla")
# What an MLA layer needs and another kind must not have; `None` elsewhere, as serving engines read presence as MLA.
LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_head_dim",
    "rope_interleave",
    "latent_norm",
)
POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "sliding_window",
    "rms_norm_eps",
    "softmax_scale",
    "rope_frequency_dim",
    *(name for name in LATENT_FIELDS if name not in ("qk_nope_head_dim", "rope_interleave", "latent_norm")),
    "head_dim",
)


def check_sizes(layer):
    if layer.attention_kind not in ATTENTION_KINDS:
        raise ValueError(f"attention_kind={layer.attention_kind!r} is unknown: choose 'mha', 'mqa', 'gqa' or 'mla'")
    for name in POSITIVE_FIELDS:
        value = getattr(layer, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be positive")
    if not 0 <= layer.attention_dropout <= 1:
        raise ValueError(f"attention_dropout={layer.attention_dropout} must lie between 0 and 1")
    heads = layer.num_attention_heads
    needed = (*LATENT_FIELDS[1:], "head_dim") if layer.attention_kind == "mla" else ("head_dim",)
    missing = next((name for name in needed if getattr(layer, name) is None), None)
    if missing and layer.hidden_size % heads:
        raise ValueError(
            f"hidden_size={layer.hidden_size} is not divisible by num_attention_heads={heads}: set head_dim"
        )
    if missing:
        raise ValueError(
            f"{missing}=None does not go with attention_kind={layer.attention_kind!r}: set it, or build the "
            "configuration with this kind, which derives it"
        )
    if layer.num_key_value_heads is None:
        raise ValueError(f"num_key_value_heads must be given: num_attention_heads={heads} is not divisible by 4")


def check_frequencies(layer):
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
    partial = (layer.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial} does not go with rope_frequency_indices, which say what is rotated"
        )
    if layer.attention_kind == "mla" and 2 * len(indices) != layer.qk_rope_head_dim:
        raise ValueError(
            f"rope_frequency_indices has {len(indices)} entries: MLA needs qk_rope_head_dim / 2 = "
            f"{layer.qk_rope_head_dim // 2}"
        )
    if not 0 < 2 * len(indices) <= layer.head_dim:
        raise ValueError(
            f"rope_frequency_indices has {len(indices)} entries: a head of {layer.head_dim} dimensions has 1 to "
            f"{layer.head_dim // 2} rotary planes"
        )


def check_grouped(layer):
    kind, heads, key_value_heads = layer.attention_kind, layer.num_attention_heads, layer.num_key_value_heads
    for name in LATENT_FIELDS:
        if getattr(layer, name) is not None:
            raise ValueError(
                f"{name}={getattr(layer, name)} belongs to attention_kind='mla', but attention_kind={kind!r}: "
                "leave it out, or choose 'mla'"
            )
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
    partial = (layer.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    proportional = (layer.rope_parameters or {}).get("rope_type") == "proportional"
    rotary = layer.head_dim if proportional else int(layer.head_dim * partial)
    if rotary % 2 or not 0 < rotary <= layer.head_dim:
        raise ValueError(
            f"head_dim={layer.head_dim} with partial_rotary_factor={partial} rotates {rotary} dimensions of a head: "
            "their number must be even, positive and at most head_dim"
        )


def check_latent(layer):
    heads, rope, nope = layer.num_attention_heads, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    if layer.num_key_value_heads != heads:
        raise ValueError(
            f"num_key_value_heads={layer.num_key_value_heads} contradicts attention_kind='mla', which has one per "
            f"query head ({heads}) and caches a latent instead: leave it out"
        )
    if nope < 0:
        raise ValueError(f"qk_nope_head_dim={nope} must not be negative")
    if rope % 2:
        raise ValueError(f"qk_rope_head_dim={rope} must be even: rotary dimensions come in pairs")
    if layer.qk_head_dim != nope + rope:
        raise ValueError(
            f"qk_head_dim={layer.qk_head_dim} must be qk_nope_head_dim + qk_rope_head_dim = {nope + rope}: leave it out"
        )
    if layer.qk_norm:
        raise ValueError("qk_norm=True does not go with attention_kind='mla': use latent_norm, or another kind")
    partial = (layer.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial} does not go with attention_kind='mla': qk_rope_head_dim says what is "
            "rotated"
        )
    for name, produced in (("kv_lora_rank", nope + layer.v_head_dim), ("q_lora_rank", layer.qk_head_dim)):
        rank, largest = getattr(layer, name), min(layer.hidden_size, heads * produced)
        if rank is not None and rank > largest:
            warnings.warn(f"{name}={rank} is larger than the {largest} dimensions that it compresses", stacklevel=2)


def suggestion(name: str, known) -> str:
    """`", did you mean ...?"` for a name one edit (insert, delete, replace, swap neighbours) from a known one."""
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
