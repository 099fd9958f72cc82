"""What the attention fields of a layer must satisfy together; every message names field, value and remedy."""

import warnings

from .configuration_values import LARGEST, ROPE_LISTS, shown

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


def check_sizes(layer):
    if layer.attention_kind not in ATTENTION_KINDS:
        raise ValueError(
            f"attention_kind={shown(layer.attention_kind)} is unknown: choose 'mha', 'mqa', 'gqa' or 'mla'"
        )
    heads = layer.num_attention_heads
    needed = (*LATENT_FIELDS[1:], "head_dim") if layer.attention_kind == "mla" else ("head_dim",)
    missing = next((name for name in needed if getattr(layer, name) is None), None)
    if missing and layer.hidden_size % heads:
        raise ValueError(
            f"hidden_size={layer.hidden_size} is not divisible by num_attention_heads={heads}: set head_dim"
        )
    if missing is None and layer.num_key_value_heads is None:
        if heads % 4:
            raise ValueError(f"num_key_value_heads must be given: num_attention_heads={heads} is not divisible by 4")
        missing = "num_key_value_heads"
    if missing:
        raise ValueError(
            f"{missing}=None does not go with attention_kind={layer.attention_kind!r}: set it, or build the "
            "configuration with this kind, which derives it"
        )
    widest = max(layer.head_dim, layer.qk_head_dim or 0, (layer.qk_nope_head_dim or 0) + (layer.v_head_dim or 0))
    if heads * widest > LARGEST:
        raise ValueError(
            f"num_attention_heads={heads} heads of {widest} dimensions make a matrix of {heads * widest} rows: "
            f"{LARGEST} are the most"
        )


def check_rotary(layer):
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
    partial = layer.rope_parameters.get("partial_rotary_factor", 1.0)
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


def check_latent(layer):
    heads, rope, nope = layer.num_attention_heads, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    if layer.num_key_value_heads != heads:
        raise ValueError(
            f"num_key_value_heads={layer.num_key_value_heads} contradicts attention_kind='mla', which has one per "
            f"query head ({heads}) and caches a latent instead: leave it out"
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
    if layer.qk_norm:
        raise ValueError("qk_norm=True does not go with attention_kind='mla': use latent_norm, or another kind")
    partial = layer.rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial} does not go with attention_kind='mla': qk_rope_head_dim says what is "
            "rotated"
        )
    for name, produced in (("kv_lora_rank", nope + layer.v_head_dim), ("q_lora_rank", layer.qk_head_dim)):
        rank, largest = getattr(layer, name), min(layer.hidden_size, heads * produced)
        if rank is not None and rank > largest:
            warnings.warn(f"{name}={rank} is larger than the {largest} dimensions that it compresses", stacklevel=2)
