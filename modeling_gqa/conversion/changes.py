"""Which layers a conversion changes, and which of them keep their function."""

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .errors import ConversionError
from .targets import Fields, layer_fields, layer_head_dim, rotary_planes


def shape(layer: Fields) -> tuple:
    """What makes two attention layers the same but for their weights."""
    names: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    if layer["attention_kind"] == "mla":
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return (layer["attention_kind"] == "mla", *(layer[name] for name in names))


def changed_layers(source: GQAConfig, target: GQAConfig) -> list[int]:
    pairs = zip(layer_fields(source), layer_fields(target), strict=True)
    return [index for index, (before, after) in enumerate(pairs) if shape(before) != shape(after)]


def lossy_layers(model: GQAForCausalLM, target: GQAConfig) -> list[int]:
    """The changed layers that cannot keep their function; raises `ConversionError` where they cannot be had either."""
    lossy = [index for index in changed_layers(model.config, target) if not is_exact(model, target, index)]
    to_mla = [index for index in lossy if target.per_layer_config[index].attention_kind == "mla"]
    if to_mla and model.config.rope_parameters["rope_type"] == "longrope" and model.config.num_hidden_layers > 1:
        raise ConversionError(
            "rope_type 'longrope' lists a factor per rotary dimension, and in MLA each layer keeps other frequencies: "
            "convert this model to fewer key/value heads instead"
        )
    return lossy


def is_exact(model: GQAForCausalLM, target: GQAConfig, index: int) -> bool:
    """Whether layer `index` keeps its function: a multiple of the key/value heads, or MLA with room for all of them."""
    before, after = model.config.per_layer_config[index], target.per_layer_config[index]
    key_heads = before.num_key_value_heads
    if after.attention_kind != "mla":
        return after.num_key_value_heads % key_heads == 0
    planes, size = rotary_planes(before), layer_head_dim(before)
    needed = min(2 * (size - planes) * key_heads, model.config.hidden_size)  # unrotated keys and values
    return after.qk_rope_head_dim == 2 * planes * key_heads and after.kv_lora_rank >= needed
