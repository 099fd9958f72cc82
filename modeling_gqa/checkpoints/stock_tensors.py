"""The tensors of a model as transformers' own class stores them.

Of DeepSeek-V3 they are written so that every engine computes the same model. vLLM's and SGLang's classes of it have no
biases and never tie the output layer to the embeddings. They use `rms_norm_eps` in the norms of latents too, where
transformers' class has an epsilon of its own. vLLM's pairs neighbours in the rotary parts.

Letters: R size of a latent, P of a rotary part, N of the part before it, H heads.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from transformers import PreTrainedConfig

from ..attention_latent import LATENT_NORM_EPS
from ..configuration_gqa import GQAConfig
from .export_blockers import scale_ratio
from .files import LazyTensor

# The largest relative change of a latent by a norm that is to be a constant.
NEGLIGIBLE = 1e-7


def stock_tensors(
    config: GQAConfig, stock: PreTrainedConfig, tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the tensors that transformers' own model stores; those that differ are computed when they are loaded."""
    tensors = dict(tensors)
    ratio = scale_ratio(config)
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
    if stock.tie_word_embeddings != config.tie_word_embeddings:
        tensors["lm_head.weight"] = computed(tensors["model.embed_tokens.weight"], torch.clone)
    if stock.rms_norm_eps != config.rms_norm_eps:
        # All that is added to the states is multiplied by a = sqrt(new / old), and the mean square of the states by
        # a^2, so that a norm of the new epsilon gives what one of the old gave. The output layer stays as it is.
        written = ("embed_tokens.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
        factor = (LATENT_NORM_EPS / config.rms_norm_eps) ** 0.5
        tensors |= {name: scaled(tensor, factor) for name, tensor in tensors.items() if name.endswith(written)}
    return tensors


def _latent_tensors(
    config: GQAConfig, stock: PreTrainedConfig, tensors: dict[str, LazyTensor], layer: str, query: str
) -> dict[str, LazyTensor]:
    """Return those of a layer's tensors that DeepSeek-V3 stores otherwise."""
    down = {"kv_a": config.kv_lora_rank} | ({"q_a": config.q_lora_rank} if config.q_lora_rank is not None else {})
    modules = {"kv_a": "kv_a_proj_with_mqa", "q_a": "q_a_proj"}
    if stock.attention_bias:
        for module in [*(modules[name] for name in down), "o_proj"]:
            weight = tensors[f"{layer}.self_attn.{module}.weight"]
            zeros = partial(torch.zeros, weight.shape[0], dtype=weight.dtype)
            bias = LazyTensor((weight.shape[0],), weight.dtype, zeros)
            tensors = {f"{layer}.self_attn.{module}.bias": bias} | tensors
    if not config.rope_interleave:
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim
        tensors = tensors | paired_neighbours(tensors, layer, query, heads, rope)
    if not config.latent_norm:
        for name, rank in down.items():
            tensors = tensors | constant_norm(tensors, layer, modules[name], f"{name}_layernorm", rank)
    return tensors


def computed(tensor: LazyTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """Return a tensor of the same shape and dtype that `function` makes when it is loaded."""
    return tensor._replace(load=lambda: function(tensor.load()))


def scaled(tensor: LazyTensor, factor: float) -> LazyTensor:
    """Return a tensor times `factor`, rounded once."""
    return computed(tensor, lambda loaded: (loaded.double() * factor).to(loaded.dtype))


def constant_norm(
    tensors: Mapping[str, LazyTensor], layer: str, down: str, norm: str, rank: int
) -> dict[str, LazyTensor]:
    """Return the tensors around a latent without a norm with an RMSNorm that returns the latent as it was.

    The first R = `rank` rows of the module `down` make the latent c, which the module `norm` norms. They are multiplied
    by a power of two s, so small that the mean square of s c is next to nothing beside the norm's epsilon. The norm
    then divides by the root of the epsilon, and its weight is that root divided by s.
    """
    prefix = f"{layer}.self_attn"
    parts = {name: tensors[name] for part in ("weight", "bias") if (name := f"{prefix}.{down}.{part}") in tensors}
    weight, gain = tensors[f"{prefix}.{down}.weight"], tensors[f"{layer}.input_layernorm.weight"]

    @cache
    def factor() -> float:
        """Return s."""
        # The layer's input has been normed, so its length is at most sqrt(hidden) before the norm's gain.
        longest = (weight.load()[:rank].double() * gain.load().double()).norm().item() * weight.shape[1] ** 0.5
        longest += sum(x.load()[:rank].double().norm().item() for name, x in parts.items() if name.endswith("bias"))
        most = math.sqrt(2 * NEGLIGIBLE * LATENT_NORM_EPS * rank)  # length of s c
        return 2.0 ** min(0, math.floor(math.log2(most / longest))) if longest else 1.0

    def shrink(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:rank] * factor(), tensor[rank:]))

    def constant() -> torch.Tensor:
        return torch.full((rank,), LATENT_NORM_EPS**0.5 / factor(), dtype=weight.dtype)

    norms = {f"{prefix}.{norm}.weight": LazyTensor((rank,), weight.dtype, constant)}
    return norms | {name: computed(tensor, shrink) for name, tensor in parts.items()}


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
