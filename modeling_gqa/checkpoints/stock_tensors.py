"""The tensors of a model as transformers' own class stores them, and back where that is another way.

Of DeepSeek-V3 they are written so that every engine computes the same model. vLLM's and SGLang's classes of it have no
biases and never tie the output layer to the embeddings. vLLM's pairs neighbours in the rotary parts.

Letters: R size of a latent, P of a rotary part, N of the part before it, H heads.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from transformers import PreTrainedConfig

from modeling_gqa_cli.errors import UserError

from ..configuration_gqa import GQAConfig
from .export_blockers import scale_ratio
from .files import LazyTensor

# Of families that store several matrices as one: its name in a layer, and the parts from the first row on.
FUSED = {
    "phi3": {
        "self_attn.qkv_proj.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    },
    "granitemoehybrid": {
        "shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "shared_mlp.output_linear.weight": ("mlp.down_proj.weight",),
    },
}


# Families whose checkpoints may have other names than this package's.
RENAMED = (*FUSED, "gemma3_text")
# How the names of what Gemma 3 sees images with begin, behind an optional "model.".
IMAGES = ("vision_tower.", "multi_modal_projector.")


def own_names(config: GQAConfig, family: str, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint of `family` by the names of this package, whose matrices are apart.

    `config` is the checkpoint's as this package's. A matrix of another size is left as it is, for who checks names.
    Raises `UserError` for a checkpoint that sees images.
    """
    found = dict(tensors)
    if family == "gemma3_text":
        images = next((name for name in tensors if name.removeprefix("model.").startswith(IMAGES)), None)
        if images:
            raise UserError(
                f"the checkpoint has weights for images ({images}), which this package's models do not see: save its "
                "language model alone, as Gemma3ForCausalLM"
            )
        # Of a Gemma 3 for text and images, in the order of its class or of earlier versions.
        names = {name: name.replace("model.language_model.", "model.", 1) for name in tensors}
        found = {names[name].removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    for index in range(config.num_hidden_layers if family in FUSED else 0):
        key_values = config.num_key_value_heads * config.head_dim
        rows = {
            "self_attn.qkv_proj.weight": (config.num_attention_heads * config.head_dim, key_values, key_values),
            "mlp.gate_up_proj.weight": (config.intermediate_size,) * 2,
            "shared_mlp.input_linear.weight": (config.intermediate_size,) * 2,
            "shared_mlp.output_linear.weight": (config.hidden_size,),
        }
        for fused, parts in FUSED[family].items():
            whole = tensors.get(f"model.layers.{index}.{fused}")
            if whole is None or whole.shape[0] != sum(rows[fused]):
                continue
            del found[f"model.layers.{index}.{fused}"]
            start = 0
            for part, count in zip(parts, rows[fused], strict=True):
                load = partial(_rows, whole, start, start + count)
                found[f"model.layers.{index}.{part}"] = LazyTensor((count, *whole.shape[1:]), whole.dtype, load)
                start += count
    return found


def _rows(tensor: LazyTensor, start: int, stop: int) -> torch.Tensor:
    return tensor.load()[start:stop].clone()


def _fused(parts: list[LazyTensor]) -> LazyTensor:
    """Return tensors as one, below each other."""
    rows = sum(part.shape[0] for part in parts)
    return LazyTensor((rows, *parts[0].shape[1:]), parts[0].dtype, lambda: torch.cat([part.load() for part in parts]))


def stock_tensors(
    config: GQAConfig, stock: PreTrainedConfig, tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the tensors that transformers' own model stores; those that differ are computed when they are loaded."""
    tensors = dict(tensors)
    ratio = scale_ratio(config, stock.model_type)
    query = "q_norm" if config.qk_norm else "q_proj" if config.q_lora_rank is None else "q_b_proj"
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        if stock.model_type == "deepseek_v3":
            tensors |= _latent_tensors(config, stock, tensors, layer, query)
        if ratio != 1.0:
            for part in ("weight", "bias"):
                name = f"{layer}.self_attn.{query}.{part}"
                if name in tensors:
                    tensors[name] = scaled(tensors[name], ratio)
        for fused, parts in FUSED.get(stock.model_type, {}).items():
            tensors[f"{layer}.{fused}"] = _fused([tensors.pop(f"{layer}.{part}") for part in parts])
    if stock.tie_word_embeddings != config.tie_word_embeddings:
        tensors["lm_head.weight"] = computed(tensors["model.embed_tokens.weight"], torch.clone)
    return tensors


def _latent_tensors(
    config: GQAConfig, stock: PreTrainedConfig, tensors: dict[str, LazyTensor], layer: str, query: str
) -> dict[str, LazyTensor]:
    """Return those of a layer's tensors that DeepSeek-V3 stores otherwise."""
    if stock.attention_bias:
        of_queries = [] if config.q_lora_rank is None else ["q_a_proj"]
        for module in ["kv_a_proj_with_mqa", *of_queries, "o_proj"]:
            weight = tensors[f"{layer}.self_attn.{module}.weight"]
            zeros = partial(torch.zeros, weight.shape[0], dtype=weight.dtype)
            bias = LazyTensor((weight.shape[0],), weight.dtype, zeros)
            tensors = {f"{layer}.self_attn.{module}.bias": bias} | tensors
    if not config.rope_interleave:
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim
        tensors = tensors | paired_neighbours(tensors, layer, query, heads, rope)
    return tensors


def computed(tensor: LazyTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """Return a tensor of the same shape and dtype that `function` makes when it is loaded."""
    return tensor._replace(load=lambda: function(tensor.load()))


def scaled(tensor: LazyTensor, factor: float) -> LazyTensor:
    """Return a tensor times `factor`, rounded once."""
    return computed(tensor, lambda loaded: (loaded.double() * factor).to(loaded.dtype))


def paired_neighbours(
    tensors: Mapping[str, LazyTensor], layer: str, query: str, heads: int, rope: int
) -> dict[str, LazyTensor]:
    """Return the projections to queries and rotary key with two neighbours, not two halves, as a rotary plane.

    The rows of the module `query` are the queries of all H `heads`; a head's rotary part of P = `rope` comes last.
    """

    def pair(tensor: torch.Tensor, parts: int) -> torch.Tensor:
        rows = tensor.unflatten(0, (parts, -1))  # (H, N + P, ...), or of the rotary key (1, R + P, ...)
        halves = rows[:, -rope:].unflatten(1, (2, -1)).transpose(1, 2)  # (H, P / 2, 2, ...)
        return torch.cat((rows[:, :-rope], halves.flatten(1, 2)), dim=1).flatten(0, 1)

    found = {}
    for module, parts in ((query, heads), ("kv_a_proj_with_mqa", 1)):
        for part in ("weight", "bias"):
            name = f"{layer}.self_attn.{module}.{part}"
            if name in tensors:
                found[name] = computed(tensors[name], partial(pair, parts=parts))
    return found
