"""Which configuration a conversion leads to: the same model with other attention in all or in some layers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..configuration_checks import ATTENTION_KINDS
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS
from .errors import ConversionError

Fields = dict[str, Any]
# Where models differ without computing otherwise.
IRRELEVANT = {
    "per_layer_config", "transformers_version", "_name_or_path", "architectures", "auto_map",
    "dtype", "use_cache", "format_version", "initializer_range",
}  # fmt: skip


def layer_fields(config: GQAConfig) -> list[Fields]:
    """Each layer's own fields, all of those that may differ by layer."""
    return [{name: getattr(layer, name) for name in PER_LAYER_FIELDS} for layer in config.per_layer_config]


def configuration(config: GQAConfig, layers: list[Fields]) -> GQAConfig:
    """`config` with other `layers`: what most layers share stands globally, and the rest in `per_layer_config`.

    Raises:
        ConversionError: these layers cannot be one model.
    """
    rope = dict(config.rope_parameters)
    if any(layer["attention_kind"] == "mla" for layer in layers) and rope.pop("partial_rotary_factor", 1.0) != 1.0:
        # MLA says itself what it rotates, so every other layer must, too.
        for fields, layer in zip(layers, config.per_layer_config, strict=True):
            if fields["attention_kind"] != "mla" and fields["rope_frequency_indices"] is None:
                indices, size = frequencies(layer)
                fields |= {"rope_frequency_indices": list(indices), "rope_frequency_dim": size}
    common = {name: Counter(repr(layer[name]) for layer in layers).most_common(1)[0][0] for name in PER_LAYER_FIELDS}
    score = [sum(repr(layer[name]) == common[name] for name in PER_LAYER_FIELDS) for layer in layers]
    shared = layers[score.index(max(score))]
    values = config.to_dict()
    for name in ("per_layer_config", "format_version"):  # the new fields may need the present version
        values.pop(name, None)
    values |= {**shared, "rope_parameters": rope}
    differing = {index: layer for index, layer in enumerate(layers) if layer != shared}
    try:
        return GQAConfig.from_dict({**values, **({"per_layer_config": differing} if differing else {})})
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(" ".join(str(error.__cause__ or error).split())) from error


def target_config(
    config: GQAConfig,
    attention_kind: str,
    *,
    layers: Sequence[int] | None = None,
    num_key_value_heads: int | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    cache_size: int | None = None,
) -> GQAConfig:
    """The configuration of `config`'s model with another attention kind.

    Args:
        layers: indices of the layers to change; all where it is `None`.
        num_key_value_heads: key/value heads G of GQA.
        kv_lora_rank, qk_rope_head_dim: sizes R and P of MLA; P is as large as R where only R is given.
        cache_size: R + P in place of them, in numbers per token and layer, shared equally (`convert` can share them
            better). MLA of an MQA layer is exact where no size is given.

    Raises:
        ConversionError: a size is missing, superfluous or impossible.
    """
    check_ours(config)
    if attention_kind not in ATTENTION_KINDS:
        raise ConversionError(
            f"attention_kind={attention_kind!r} is unknown: choose one of {', '.join(ATTENTION_KINDS)}"
        )
    fields = layer_fields(config)
    chosen = chosen_layers(config, layers)
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim, "cache_size": cache_size}
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, value in {**given, "num_key_value_heads": num_key_value_heads or None}.items():
        if value is not None and value <= 0:
            raise ConversionError(f"{name}={value} must be positive")
    if num_key_value_heads == 0:
        raise ConversionError("num_key_value_heads=0 must be positive")
    if attention_kind != "mla" and given:
        name, value = next(iter(given.items()))
        raise ConversionError(f"{name}={value} belongs to MLA, and the target is {attention_kind}")
    if attention_kind == "mla" and num_key_value_heads is not None:
        raise ConversionError(f"num_key_value_heads={num_key_value_heads} belongs to GQA, and the target is mla")
    for index in chosen:
        if attention_kind == "mla":
            fields[index] |= latent_fields(config, index, **sizes)
        else:
            fields[index] |= grouped_fields(config, index, attention_kind, num_key_value_heads)
    return configuration(config, fields)


def check_ours(config) -> None:
    if config.model_type != GQAConfig.model_type:
        raise ConversionError(
            f"this is a {config.model_type} model: import it first, with `load_source` or `modeling-gqa import`"
        )


def chosen_layers(config: GQAConfig, layers: Sequence[int] | None) -> list[int]:
    """The indices in `layers`, each once, or all where it is `None`; raises `ConversionError` out of range."""
    number = config.num_hidden_layers
    for index in layers or ():
        if not 0 <= index < number:
            raise ConversionError(f"layers has {index}, but the model's {number} layers are 0 to {number - 1}")
    return list(range(number)) if layers is None else sorted(set(layers))


def grouped_fields(config: GQAConfig, index: int, kind: str, key_value_heads: int | None) -> Fields:
    """Fields of layer `index` as grouped attention; MLA's head is padded to the larger of key and value."""
    layer = config.per_layer_config[index]
    heads = layer.num_attention_heads
    fixed = {"mha": heads, "mqa": 1}.get(kind, key_value_heads)
    if fixed is None:
        raise ConversionError("num_key_value_heads must be given for gqa")
    if key_value_heads not in (None, fixed):
        raise ConversionError(
            f"num_key_value_heads={key_value_heads} contradicts {kind}, which has {fixed}: leave it out"
        )
    if heads % fixed:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConversionError(
            f"num_key_value_heads={fixed} does not divide the {heads} query heads: choose one of {divisors}"
        )
    fields: Fields = {"attention_kind": kind, "num_key_value_heads": fixed}
    if layer.attention_kind == "mla":
        fields |= dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
        )
        fields |= {"rope_interleave": None, "latent_norm": None}
        fields |= {"head_dim": layer_head_dim(layer)}
        fields |= {"softmax_scale": None, "rope_frequency_indices": None, "rope_frequency_dim": None}
    return fields


def latent_fields(
    config: GQAConfig, index: int, kv_lora_rank: int | None, qk_rope_head_dim: int | None, cache_size: int | None
) -> Fields:
    """Fields of layer `index` as MLA; which frequencies its rotary key has is for the conversion to find."""
    layer = config.per_layer_config[index]
    if layer.qk_norm:
        raise ConversionError(
            "qk_norm=True: an RMSNorm on each head is no linear function, so its keys cannot be rebuilt from a shared "
            "latent; convert this model to fewer key/value heads instead"
        )
    if layer.rope_parameters["rope_type"] == "proportional":
        raise ConversionError("rope_type 'proportional' spreads its frequencies by the head's size, which MLA changes")
    if layer.attention_kind == "mla" and (kv_lora_rank, qk_rope_head_dim) == (
        layer.kv_lora_rank,
        layer.qk_rope_head_dim,
    ):
        return {}
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim, "cache_size": cache_size}
    planes, head_dim, key_heads = rotary_planes(layer), layer_head_dim(layer), layer.num_key_value_heads
    most = 2 * planes * key_heads
    if cache_size is not None:
        if kv_lora_rank is not None or qk_rope_head_dim is not None:
            raise ConversionError(f"cache_size={cache_size} and the sizes it is made of are both given: leave one out")
        if cache_size < 3:
            raise ConversionError(
                f"cache_size={cache_size} leaves no room for a latent and a rotary key: 3 is the least"
            )
        qk_rope_head_dim = min(cache_size // 4 * 2 or 2, most)
        kv_lora_rank = cache_size - qk_rope_head_dim
    elif kv_lora_rank is None and key_heads == 1 and layer.attention_kind != "mla":
        qk_rope_head_dim = 2 * planes if qk_rope_head_dim is None else qk_rope_head_dim
        kv_lora_rank = 2 * (head_dim - planes)
    if kv_lora_rank is None:
        raise ConversionError("mla needs kv_lora_rank (and qk_rope_head_dim), or cache_size")
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    largest = max(layer.hidden_size, 2 * key_heads * head_dim)
    if given and kv_lora_rank > largest:
        raise ConversionError(
            f"{' and '.join(given)}: a latent of {kv_lora_rank} is larger than layer {index}'s input, and than all its "
            f"keys and values: choose at most {largest}"
        )
    if qk_rope_head_dim is None:
        qk_rope_head_dim = min(max(kv_lora_rank // 2 * 2, 2), most)
    if qk_rope_head_dim % 2 or qk_rope_head_dim > most:
        raise ConversionError(
            f"qk_rope_head_dim={qk_rope_head_dim} must be even and at most {most}, the rotary dimensions of layer "
            f"{index}'s {key_heads} key/value heads"
        )
    nope = head_dim - 2 * planes if qk_rope_head_dim == most else head_dim
    indices: list[int] | None = None
    size: int | None = None
    if layer.rope_parameters["rope_type"] == "longrope":
        # Its factors are those of the source's frequencies, so these are named until the conversion has found its own.
        of_a_head, size = frequencies(layer)
        indices = list(of_a_head * key_heads)[: qk_rope_head_dim // 2]
    return {
        "attention_kind": "mla",
        "num_key_value_heads": layer.num_attention_heads,
        "head_dim": qk_rope_head_dim,
        "q_lora_rank": None,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": qk_rope_head_dim,
        "qk_head_dim": nope + qk_rope_head_dim,
        "v_head_dim": head_dim,
        "rope_interleave": False,
        "latent_norm": False,
        "qk_norm": False,
        "softmax_scale": None,
        "rope_frequency_indices": indices,
        "rope_frequency_dim": size,
    }


def layer_head_dim(layer) -> int:
    """Head size D of a layer as grouped attention: MLA's is the larger of key and value, padded to an even size."""
    if layer.attention_kind != "mla":
        return layer.head_dim
    return -(-max(layer.qk_head_dim, layer.v_head_dim) // 2) * 2


def frequencies(layer) -> tuple[tuple[int, ...], int]:
    """The frequencies of a head's rotary planes, as indices into those of a head of so many dimensions."""
    if layer.rope_frequency_indices is not None:
        return tuple(layer.rope_frequency_indices), layer.rope_frequency_dim
    if layer.attention_kind == "mla":
        size = layer.qk_rope_head_dim
    else:
        size = int(layer.head_dim * layer.rope_parameters.get("partial_rotary_factor", 1.0))
    return tuple(range(size // 2)), size


def rotary_planes(layer) -> int:
    """Number of rotary planes of a head."""
    return len(frequencies(layer)[0])


def check_same_model(source: GQAConfig, target: GQAConfig) -> None:
    """Raise `ConversionError` where the two differ in more than their attention."""
    skipped = IRRELEVANT | set(PER_LAYER_FIELDS)
    ours, theirs = (
        {name: value for name, value in c.to_dict().items() if name not in skipped} for c in (source, target)
    )
    for values in (ours, theirs):
        values["rope_parameters"] = {k: v for k, v in values["rope_parameters"].items() if k != "partial_rotary_factor"}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConversionError(
                f"the target's {name}={theirs.get(name)!r} differs from the source's {ours.get(name)!r}: a conversion "
                "changes the attention alone; build the target with `target_config`"
            )
    for index, (before, after) in enumerate(zip(source.per_layer_config, target.per_layer_config, strict=True)):
        names = ["num_attention_heads", "intermediate_size", "mlp_bias", "attention_dropout"]
        if "mla" not in (before.attention_kind, after.attention_kind):
            names += ["qk_norm", "head_dim"]
        for name in names:
            if getattr(before, name) != getattr(after, name):
                raise ConversionError(
                    f"layer {index}: the target's {name}={getattr(after, name)!r} differs from the source's "
                    f"{getattr(before, name)!r}: build the target with `target_config`"
                )
        if "head_dim" in names and frequencies(before) != frequencies(after):
            raise ConversionError(f"layer {index}: the target rotates with other frequencies than the source")
