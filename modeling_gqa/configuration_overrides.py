"""Which sizes are derived again when fields of a finished configuration are replaced, in all layers or in one."""

from numbers import Integral
from typing import Any

from .configuration_checks import MLA_FIELDS, NORMED_FIELDS, shown, suggestion

# A change of one of these makes a layer derive its sizes anew.
SIZE_FIELDS = (
    *("attention_kind", "num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm"),
    *MLA_FIELDS,
    *NORMED_FIELDS,
)
# Sizes of MLA that are derived from the head size; a finished MLA configuration no longer stores that size.
PROPORTIONAL_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Fields that conversions set. No size is derived from them, and a change of the attention kind drops them.
CONVERSION_FIELDS = ("softmax_scale", "rope_frequency_indices", "rope_frequency_dim", "key_mean")
PER_LAYER_FIELDS = (
    *SIZE_FIELDS,
    *CONVERSION_FIELDS,
    "attention_bias",
    "query_bias",
    "key_value_bias",
    "output_bias",
    "attention_dropout",
    "intermediate_size",
    "mlp_bias",
)
# Keywords that are not fields, but that transformers writes into fields.
ROPE_KEYWORDS = ("rope_theta", "partial_rotary_factor")
FOLDED_KEYWORDS = ("per_layer_config", *ROPE_KEYWORDS, "rope_scaling")


def layer_type(sliding_window: int | None) -> str:
    """The type of all layers where `layer_types` is left out."""
    return "full_attention" if sliding_window is None else "sliding_attention"


def overridden(stored: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Replace fields of a stored configuration, and drop the stored sizes that are to be derived again."""
    overrides, stale = dict(overrides), set()
    rope = overrides.get("rope_parameters", stored.get("rope_parameters"))
    if isinstance(rope, dict):
        rope = {**rope, **{name: overrides.pop(name) for name in ROPE_KEYWORDS if name in overrides}}
        overrides["rope_parameters"] = rope
    by_layer = {} if "per_layer_config" in overrides else stored.get("per_layer_config")
    for layer in by_layer.values() if isinstance(by_layer, dict) else ():
        for name in overrides.keys() & set(layer):
            raise ValueError(
                f"{name}={shown(overrides[name])} would reach no layer, because this configuration's per_layer_config "
                f"sets {name} layer by layer: give per_layer_config as well (None for equal layers)"
            )
    if not overrides.keys().isdisjoint(SIZE_FIELDS):
        stale |= derived_anew(stored.get("attention_kind", "gqa"), overrides)
    types = stored.get("layer_types")
    same_type = isinstance(types, list) and all(kind == types[0] for kind in types)
    if same_type and not overrides.keys().isdisjoint(("sliding_window", "num_hidden_layers")):
        stale.add("layer_types")
    return {**{name: value for name, value in stored.items() if name not in stale}, **overrides}


def merged_rope(rope: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Merge into rotary parameters those older `keywords` that transformers would ignore."""
    for name in keywords.keys() & rope.keys() & set(ROPE_KEYWORDS):
        if keywords[name] != rope[name]:
            raise ValueError(
                f"{name}={shown(keywords[name])} contradicts rope_parameters[{name!r}]={shown(rope[name])}: give one"
            )
    scaling = keywords.pop("rope_scaling", None)  # transformers would drop `rope` in its favour
    return {**{name: rope[name] for name in ROPE_KEYWORDS if name in rope}, **scaling} if scaling else rope


def check_overrides(by_layer: Any, layers: int):
    """Check the form of `per_layer_config`: indices of layers, and fields that may differ by layer."""
    if not isinstance(by_layer, dict) or not all(isinstance(layer, dict) for layer in by_layer.values()):
        raise ValueError(f"per_layer_config={shown(by_layer)} must be {{layer index: {{field: value}}}}")
    numbers = set()
    for index, overrides in by_layer.items():
        number = int(index) if isinstance(index, str) and index.isdecimal() and len(index) < 10 else index
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) < layers:
            raise ValueError(
                f"per_layer_config has the key {shown(index)}: keys are layer indices, counted from 0, "
                f"below num_hidden_layers={layers}"
            )
        if number in numbers:
            raise ValueError(f"per_layer_config names layer {number} twice: give one set of fields")
        numbers.add(number)
        for name in overrides:
            if name not in PER_LAYER_FIELDS:
                raise ValueError(
                    f"per_layer_config[{number}] sets {shown(name)}, which cannot differ by layer"
                    f"{suggestion(str(name), PER_LAYER_FIELDS)}. These can: {', '.join(PER_LAYER_FIELDS)}"
                )


def derived_anew(kind: str, overrides: dict[str, Any]) -> set[str]:
    """The size fields that follow from `overrides` instead of being kept from a configuration of `kind`.

    Raises:
        ValueError: a size would be derived from a head size that the configuration no longer stores.
    """
    new_kind = overrides.get("attention_kind", kind)
    names = {"qk_head_dim"}
    if (new_kind, kind) != ("gqa", "gqa"):
        names.add("num_key_value_heads")
    if new_kind != kind and "mla" in (new_kind, kind):
        names |= {*MLA_FIELDS, *NORMED_FIELDS, *CONVERSION_FIELDS, "qk_norm" if new_kind == "mla" else "head_dim"}
    elif new_kind == "mla" and "head_dim" in overrides:
        names |= set(PROPORTIONAL_FIELDS)
    elif new_kind == "mla":
        for name in PROPORTIONAL_FIELDS:
            if overrides.get(name, 0) is None:
                raise ValueError(
                    f"{name}=None cannot be derived, because a finished MLA configuration no longer has the head size "
                    f"that it followed from: give {name}, or head_dim as well (None for hidden_size / "
                    "num_attention_heads)"
                )
    if new_kind == "mla" and "qk_norm" in overrides:
        names |= {"latent_norm", *(() if overrides["qk_norm"] else NORMED_FIELDS)}
    if "qk_norm" in names - overrides.keys():
        names.add("qk_norm_span")
    return names - overrides.keys()
