"""The configuration that a conversion leads to, and which layers it changes, exactly or with loss.

Shapes: D head size, G key/value heads, R and P the sizes of MLA's latent and rotary key.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from modeling_gqa_cli.errors import UserError, did_you_mean, one_line

from ..attention import GroupedAttention
from ..attention_latent import LatentAttention
from ..checkpoints.families import import_config
from ..common.tables import runs
from ..configuration_checks import NORMED_FIELDS
from ..configuration_gqa import GQAConfig
from ..configuration_overrides import PER_LAYER_FIELDS
from ..costs import cache_bytes
from ..layers import key_mean_size
from ..modeling_gqa import ATTENTION_CLASSES

Fields = dict[str, Any]
# The kinds that conversions read and write; a layer of any other kind is refused.
KNOWN_KINDS = (*GroupedAttention.kinds, *LatentAttention.kinds)
# Fields that give a layer's weights their shapes; those of other kinds are None.
SHAPE_FIELDS = (
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *NORMED_FIELDS,
    "key_mean",
)
# Fields in which two configurations may differ and describe the same function.
BOOKKEEPING_FIELDS = {
    "per_layer_config", "transformers_version", "_name_or_path", "architectures", "auto_map",
    "dtype", "use_cache", "format_version", "initializer_range",
}  # fmt: skip


def layer_fields(config: GQAConfig) -> list[Fields]:
    """Return the fields of each layer that may differ by layer."""
    return [{name: getattr(layer, name) for name in PER_LAYER_FIELDS} for layer in config.per_layer_config]


def configuration(config: GQAConfig, layers: list[Fields]) -> GQAConfig:
    """Return `config` with other `layers`.

    The values that most layers share become global fields; layers that differ stand in `per_layer_config`.

    Raises:
        UserError: these layers cannot be one model.
    """
    rope = dict(config.rope_parameters)
    if any(layer["attention_kind"] == "mla" for layer in layers) and rope.pop("partial_rotary_factor", 1.0) != 1.0:
        # MLA cannot follow the global share of rotated dimensions; without it every other layer names its own.
        for fields, layer in zip(layers, config.per_layer_config, strict=True):
            if fields["attention_kind"] != "mla" and fields["rope_frequency_indices"] is None:
                indices, size = layer_frequencies(layer)
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
        raise UserError(one_line(error)) from error


def target_config(
    config: PreTrainedConfig,
    attention_kind: str,
    *,
    layers: Sequence[int] | None = None,
    num_key_value_heads: int | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    cache_size: int | None = None,
) -> GQAConfig:
    """Return the configuration of `config`'s model with another attention kind.

    MLA of an MQA layer needs no size: R and P are then those for which the conversion is exact.

    Args:
        config: of the model to convert, of this package or of a family that `import_config` reads.
        attention_kind: "mha", "mqa", "gqa" or "mla".
        layers: indices of the layers to change; `None` for all.
        num_key_value_heads: number G of key/value heads, for "gqa".
        kv_lora_rank: size R of the latent, for "mla".
        qk_rope_head_dim: size P of the rotary key, for "mla"; as large as R where only R is given; with 0 nothing is
            rotated.
        cache_size: R + P in place of the two, in numbers cached per token and layer. R and P are about halves of it;
            `convert_model(divide_cache=True)` can find better shares.

    Raises:
        UserError: a size is missing, superfluous or impossible.

    Example:
        ```python
        from modeling_gqa import GQAConfig
        from modeling_gqa.conversion import target_config

        config = GQAConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=2)
        target = target_config(config, "gqa", num_key_value_heads=2)
        assert target.num_key_value_heads == 2 and target.hidden_size == 64
        ```
    """
    config = as_ours(config)
    if attention_kind not in KNOWN_KINDS:
        near, known = did_you_mean(str(attention_kind), KNOWN_KINDS), ", ".join(KNOWN_KINDS)
        raise UserError(f"attention_kind={attention_kind!r} is unknown{near}: choose one of {known}")
    fields = layer_fields(config)
    chosen = chosen_layers(config, layers)
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim, "cache_size": cache_size}
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, size in {**sizes, "num_key_value_heads": num_key_value_heads}.items():
        least = 0 if name == "qk_rope_head_dim" else 1
        if size is not None and size < least:
            raise UserError(f"{name}={size} must be at least {least}")
    if attention_kind != "mla" and given:
        name, value = next(iter(given.items()))
        raise UserError(f"{name}={value} belongs to MLA, and the target is {attention_kind}")
    if attention_kind == "mla" and num_key_value_heads is not None:
        raise UserError(f"num_key_value_heads={num_key_value_heads} belongs to GQA, and the target is mla")
    for index in chosen:
        check_kind(config.per_layer_config[index], index)
        if attention_kind == "mla":
            fields[index] |= latent_fields(config, index, **sizes)
        else:
            fields[index] |= grouped_fields(config, index, attention_kind, num_key_value_heads)
    return configuration(config, fields)


def as_ours(config: PreTrainedConfig) -> GQAConfig:
    """Return a configuration as this package's; raises `UserError` for a family that cannot be imported."""
    return config if config.model_type == GQAConfig.model_type else import_config(config)  # type: ignore[return-value]


def chosen_layers(config: GQAConfig, layers: Sequence[int] | None) -> list[int]:
    """Return the indices in `layers` sorted and each once, or all for `None`; raises `UserError` out of range."""
    number = config.num_hidden_layers
    for index in layers or ():
        if not 0 <= index < number:
            raise UserError(f"layers has {index}, but the model's {number} layers are 0 to {number - 1}")
    return list(range(number)) if layers is None else sorted(set(layers))


def grouped_fields(config: GQAConfig, index: int, kind: str, key_value_heads: int | None) -> Fields:
    """Return the fields of layer `index` as grouped attention; MLA's head is padded to the larger of key and value."""
    layer = config.per_layer_config[index]
    heads = layer.num_attention_heads
    fixed = {"mha": heads, "mqa": 1}.get(kind, key_value_heads)
    if fixed is None:
        raise UserError("num_key_value_heads must be given for gqa")
    if key_value_heads not in (None, fixed):
        raise UserError(f"num_key_value_heads={key_value_heads} contradicts {kind}, which has {fixed}: leave it out")
    if heads % fixed:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(
            f"num_key_value_heads={fixed} does not divide the {heads} query heads: choose one of {divisors}"
        )
    fields: Fields = {"attention_kind": kind, "num_key_value_heads": fixed}
    if layer.attention_kind != "mla" and fixed > (now := layer.num_key_value_heads) and fixed % now:
        raise UserError(
            f"num_key_value_heads={fixed} loses something in layer {index} and caches more than its {now}: choose a "
            f"multiple of {now}, or fewer"
        )
    if layer.attention_kind == "mla":
        check_before_norms(layer, index)
        fields |= dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
        )
        fields |= {"rope_interleave": None, "latent_norm": None}
        fields |= {"head_dim": layer_head_dim(layer)}
        # Until the conversion has found its own; a factor for each frequency (longrope) needs the source's.
        indices, size = layer_frequencies(layer) if layer.rope_parameters["rope_type"] == "longrope" else (None, None)
        fields |= {"rope_frequency_indices": indices and list(indices), "rope_frequency_dim": size}
        fields |= {"softmax_scale": None, "key_mean": False}
    return fields


def latent_fields(
    config: GQAConfig, index: int, kv_lora_rank: int | None, qk_rope_head_dim: int | None, cache_size: int | None
) -> Fields:
    """Return the fields of layer `index` as MLA; sizes as for `target_config`.

    The conversion itself finds the frequencies of the rotary key.
    """
    layer = config.per_layer_config[index]
    if layer.rope_parameters["rope_type"] == "proportional":
        raise UserError("rope_type 'proportional' spreads its frequencies by the head's size, which MLA changes")
    present = (layer.kv_lora_rank, layer.qk_rope_head_dim)
    if layer.attention_kind == "mla" and (kv_lora_rank, qk_rope_head_dim) == present:
        return {}
    check_before_norms(layer, index)
    rank, rope = latent_sizes(layer, index, kv_lora_rank, qk_rope_head_dim, cache_size)
    planes, head_dim, key_heads = rotary_planes(layer), layer_head_dim(layer), layer.num_key_value_heads
    nope = head_dim - 2 * planes if rope == 2 * planes * key_heads else head_dim
    indices, size = None, None
    if layer.rope_parameters["rope_type"] in ("dynamic", "longrope") or rope == 0:
        # These are of a head of the source's size, whose frequencies are named until the conversion has found its own.
        of_a_head, size = layer_frequencies(layer)
        indices = list(of_a_head * key_heads)[: rope // 2]
    return {
        "attention_kind": "mla",
        "num_key_value_heads": layer.num_attention_heads,
        "head_dim": rope,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "qk_head_dim": nope + rope,
        "v_head_dim": head_dim,
        "rope_interleave": False,
        "latent_norm": False,
        "qk_norm": layer.qk_norm,
        "qk_norm_head_dim": head_dim if layer.qk_norm else None,
        "qk_norm_key_value_heads": key_heads if layer.qk_norm else None,
        "softmax_scale": None,
        "rope_frequency_indices": indices,
        "rope_frequency_dim": size,
        "key_mean": False,
    }


def latent_sizes(
    layer: GQAConfig, index: int, kv_lora_rank: int | None, qk_rope_head_dim: int | None, cache_size: int | None
) -> tuple[int, int]:
    """Return the sizes R and P of layer `index` as MLA; those that are `None` follow from the others."""
    planes, head_dim, key_heads = rotary_planes(layer), layer_head_dim(layer), layer.num_key_value_heads
    # In a layer without rotation a P that is given, as a kernel may need it, is zeros.
    most = 2 * planes * key_heads or qk_rope_head_dim or 0
    rank, rope = kv_lora_rank, qk_rope_head_dim
    if cache_size is not None:
        if rank is not None or rope is not None:
            raise UserError(f"cache_size={cache_size} and the sizes it is made of are both given: leave one out")
        if cache_size < 3:
            raise UserError(f"cache_size={cache_size} leaves no room for a latent and a rotary key: 3 is the least")
        rope = min(max(cache_size // 4 * 2 or 2, -(-(cache_size - latent_input(layer)) // 2) * 2), most)
        rank = cache_size - rope
        if rope == most:  # then the exact size is enough, and P does not grow
            rank = min(rank, exact_latent_sizes(layer)[0])
    elif rank is None and key_heads == 1 and layer.attention_kind != "mla":
        rope = 2 * planes if rope is None else rope
        rank = 2 * (head_dim - planes)
    if rank is None:
        raise UserError("mla needs kv_lora_rank (and qk_rope_head_dim), or cache_size")
    rope = min(max(rank // 2 * 2, 2), most) if rope is None else rope
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim, "cache_size": cache_size}
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    largest = max(layer.hidden_size, 2 * key_heads * head_dim)
    if given and rank > largest:
        raise UserError(
            f"{' and '.join(given)}: a latent of {rank} is larger than layer {index}'s input, and than all its "
            f"keys and values: choose at most {largest}"
        )
    if rope % 2 or rope > most:
        raise UserError(
            f"qk_rope_head_dim={rope} must be even and at most {most}, the rotary dimensions of layer "
            f"{index}'s {key_heads} key/value heads"
        )
    return rank, rope


def describe(layer: GQAConfig) -> str:
    """Return `Attention.describe` of the kind of `layer`, one of `config.per_layer_config`."""
    return ATTENTION_CLASSES[layer.attention_kind].describe(layer)


def describe_layers(config: GQAConfig) -> str:
    """Return `describe` of each run of equal layers with its indices, or of more than four runs the kinds alone."""
    found = runs(map(describe, config.per_layer_config))
    if len(found) == 1:
        return found[0][1]
    if len(found) <= 4:
        return "; ".join(f"layers {where}: {what}" for where, what in found)
    kinds = Counter(layer.attention_kind for layer in config.per_layer_config)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) + ", sizes differ by layer"


def cached_numbers(layer: GQAConfig) -> int:
    """Return how many numbers a layer caches per token."""
    return sum(ATTENTION_CLASSES[layer.attention_kind].cache_sizes(layer))


def mean_bytes(config: GQAConfig, dtype: torch.dtype) -> int:
    """Bytes per token of the whole cache after `max_position_embeddings` tokens, of which a window keeps its last."""
    return -(-cache_bytes(config, 1, config.max_position_embeddings, dtype) // config.max_position_embeddings)


def divided(total: int, layer: GQAConfig, factor: float = 1.0) -> tuple[int, int]:
    """Return the sizes R and P, of sum `total`, with which the source's `layer` as MLA was found to lose least.

    P is a fifth of the total, and a twentieth more for each halving of the source's cache: a smaller cache takes more
    from the latent than from the rotary key. The rule is from SmolLM2-135M. P is taken times `factor`.
    """
    key_heads = layer.num_key_value_heads
    share = factor * (0.2 + 0.05 * math.log2(max(2 * key_heads * layer_head_dim(layer) / total, 1)))
    most = min(2 * rotary_planes(layer) * key_heads, (total - 1) // 2 * 2)
    size = min(max(2 * round(share * total / 2), 2, -(-(total - latent_input(layer)) // 2) * 2), most)
    return total - size, size


def layer_head_dim(layer: GQAConfig) -> int:
    """Return a layer's head size D as grouped attention; MLA's is the larger of key and value, rounded up to even.

    A key that all tokens share becomes a part of MLA's key.
    """
    if layer.attention_kind != "mla":
        return layer.head_dim
    return -(-max(layer.qk_head_dim + key_mean_size(layer), layer.v_head_dim) // 2) * 2


def layer_frequencies(layer: GQAConfig) -> tuple[tuple[int, ...], int]:
    """Return the indices of the frequencies of a head's rotary planes, and the size of the head that they count in."""
    if layer.rope_frequency_indices is not None:
        indices, size = tuple(layer.rope_frequency_indices), layer.rope_frequency_dim
    else:
        size = int(layer.head_dim * layer.rope_parameters.get("partial_rotary_factor", 1.0))  # MLA's head_dim is P
        indices = tuple(range(size // 2))
    return indices + tuple(range(key_mean_size(layer) // 2)), size


def rotary_planes(layer: GQAConfig) -> int:
    """Return the number of rotary planes (pairs of dimensions) of a head."""
    return len(layer_frequencies(layer)[0])


def changed_layers(source: GQAConfig, target: GQAConfig) -> list[int]:
    """Return the indices of the layers that a conversion changes: those whose weights get other shapes."""

    def shape(layer: GQAConfig) -> tuple[Any, ...]:
        return ATTENTION_CLASSES[layer.attention_kind], *(getattr(layer, name) for name in SHAPE_FIELDS)

    pairs = zip(source.per_layer_config, target.per_layer_config, strict=True)
    return [index for index, (before, after) in enumerate(pairs) if shape(before) != shape(after)]


def lossy_layers(source: GQAConfig, target: GQAConfig) -> list[int]:
    """Return the indices of the changed layers that cannot keep their function.

    Raises:
        UserError: nothing changes, or a layer cannot be converted at all.
    """
    changed = changed_layers(source, target)
    if not changed:
        raise UserError(
            "the target's attention is the source's: there is nothing to convert (quantize-cache rounds its cache)"
        )
    for index in changed:
        check_linear(source.per_layer_config[index], index)
    return [index for index in changed if not is_exact(source, target, index)]


def is_exact(source: GQAConfig, target: GQAConfig, index: int) -> bool:
    """Return whether layer `index` keeps its function.

    It does with a multiple of its key/value heads, and as MLA that has room for all its keys and values.
    """
    before, after = source.per_layer_config[index], target.per_layer_config[index]
    if after.attention_kind != "mla":
        return after.num_key_value_heads % before.num_key_value_heads == 0
    rank, rope = exact_latent_sizes(before)
    return (after.qk_rope_head_dim == rope or not rotary_planes(before)) and after.kv_lora_rank >= rank


def exact_latent_sizes(layer: GQAConfig) -> tuple[int, int]:
    """Return the least sizes R and P with which a layer is MLA of the same function.

    The rotary key holds the rotated dimensions of all G key/value heads, P = G D where whole heads are rotated; the
    latent holds their values and unrotated keys, R = G D there, or the layer's input where that is smaller. A layer
    without rotation has P = 0 and R = 2 G D.
    """
    planes, size, key_heads = rotary_planes(layer), layer_head_dim(layer), layer.num_key_value_heads
    return min(2 * (size - planes) * key_heads, latent_input(layer)), 2 * planes * key_heads


def latent_input(layer: GQAConfig) -> int:
    """Return the size of what the layer's latent is made of as MLA: its input, or keys and values behind norms."""
    return 2 * layer.num_key_value_heads * layer_head_dim(layer) if layer.qk_norm else layer.hidden_size


def check_kind(layer: GQAConfig, index: int) -> None:
    """Raise `UserError` for a layer of a kind that is not in `KNOWN_KINDS`."""
    if layer.attention_kind not in KNOWN_KINDS:
        raise UserError(
            f"layer {index} has attention_kind={layer.attention_kind!r}, which conversions do not know: they know "
            f"{', '.join(KNOWN_KINDS)}"
        )


def check_before_norms(layer: GQAConfig, index: int) -> None:
    """Raise `UserError` for MLA with qk_norm, which is a result of conversions and not a source."""
    if layer.attention_kind == "mla" and layer.qk_norm:
        raise UserError(
            f"layer {index} is MLA with an RMSNorm on each head (qk_norm=True), with which no conversion begins: "
            "convert the model that it was made from"
        )


def check_linear(layer: GQAConfig, index: int) -> None:
    """Raise `UserError` for an unknown kind, and where keys and values are no linear function of the input."""
    check_kind(layer, index)
    check_before_norms(layer, index)
    if layer.attention_kind == "mla" and layer.latent_norm:
        raise UserError(
            f"layer {index} is MLA with an RMSNorm on its latent (latent_norm=True): keys and values are no linear "
            "function of the layer's input, so no other kind of attention equals it"
        )
