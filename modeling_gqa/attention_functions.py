"""Attention over given queries, keys and values (the eager reference and torch's fused kernel), and its masks.

Shapes: B batch, T query tokens, S key tokens, H query heads, G key/value heads, D size of a query and a key, V of a
value.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import modeling_utils
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
    flex_attention_mask,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from .configuration_gqa import GQAConfig

# For at most this number of query tokens, packing the heads that share keys is faster than torch's own grouped
# attention (measured on a CPU).
FEW_TOKENS = 8
# Arguments that only transformers' own `sdpa` knows.
STOCK_ONLY = frozenset(("cache", "position_bias", "softcap", "output_attentions"))

MASK_FUNCTIONS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
MASK_BUILDERS: dict[str, Callable] = {"eager": eager_mask, "sdpa": sdpa_mask, "flex_attention": flex_attention_mask}

# Whether the CPU has AMX, which multiplies bfloat16 tiles; torch before 2.13 does not tell, and False is assumed.
CPU_HAS_AMX = bool(dict(getattr(torch.cpu, "get_capabilities", dict)()).get("amx_bf16"))


def masked_softmax(scores: torch.Tensor, attention_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Softmax over the last dimension in at least float32, under an additive or boolean (True: attend) mask."""
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention (Vaswani et al., 1706.03762, eq. 1): the readable reference.

    Args:
        query, key, value: (B, H, T, D), (B, G, S, D) and (B, G, S, V); query head h reads key/value head h // (H / G).
        attention_mask: (B or 1, H or 1, T, S), additive or boolean; `None` attends everywhere.

    Returns:
        Output (B, T, H, V) and weights (B, H, T, S).
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)  # (B, H, S, D)
    value = value.repeat_interleave(groups, dim=1)  # (B, H, S, V)
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, S)
    weights = masked_softmax(scores, attention_mask, query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights  # (B, T, H, V)


def sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa`, but keys and values are not repeated where a fused kernel takes them as they are.

    Arguments and output as in `eager_attention_forward`, without weights. Several tokens without a mask are causal, and
    the stock function's: torch takes these as they are.
    """
    device = query.device.type
    # Without a mask, CUDA's kernels take grouped heads themselves; with a mask and many tokens, none of them does.
    fused = device == "cpu" or (device == "cuda" and attention_mask is not None and _few(query))
    masked = attention_mask is not None or query.shape[2] == 1
    special = not STOCK_ONLY.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in STOCK_ONLY)
    if special or not (masked and fused):
        return stock_sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = fused_attention(query, key, value, attention_mask, scaling, dropout)  # (B, H, T, V)
    return output.transpose(1, 2).contiguous(), None  # (B, T, H, V)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """torch's fused attention over G key/value heads as they are; no mask means that every key is seen.

    Few query tokens are packed: the H / G heads that share a key/value head become rows of one product, so that each
    key is read once. Shapes as in `eager_attention_forward`; returns (B, H, T, V).
    """
    batch, heads, length, size = query.shape
    key_heads = key.shape[1]
    groups = heads // key_heads
    # One bfloat16 row: with AMX a CPU takes it faster than a few rows, without it three times slower than two.
    one_row = length == 1 and query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if not _few(query) or (one_row and groups <= 4 and CPU_HAS_AMX):
        grouped = {"enable_gqa": True} if groups > 1 else {}
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, **grouped
        )
    query = query.reshape(batch, key_heads, groups * length, size)  # (B, G, H / G T, D)
    if attention_mask is not None and (length > 1 or attention_mask.shape[1] > 1):
        shared = attention_mask.shape[1] == 1
        attention_mask = attention_mask.expand(-1, groups if shared else -1, length, -1)
        attention_mask = attention_mask.unflatten(1, (-1, groups)).flatten(2, 3)  # (B, 1 or G, H / G T, S)
    doubled = one_row and groups == 1
    if doubled:
        query = query.repeat(1, 1, 2, 1)  # (B, H, 2, D), copied: kernels are slow on rows without a stride
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return (output[:, :, :1] if doubled else output).reshape(batch, heads, length, -1)  # (B, H, T, V)


def _few(query: torch.Tensor) -> bool:
    # One trace serves all lengths above one, so it must not depend on their number.
    return query.shape[2] == 1 or (not is_tracing(query) and query.shape[2] <= FEW_TOKENS)


class GQAAttentionInterface(modeling_utils.AttentionInterface):
    """transformers' attention functions, with `sdpa_attention_forward` above in place of the stock `sdpa`.

    A name is looked up in transformers' shared instance at every call, because engines register theirs there.
    """

    def __getitem__(self, key):
        if key in self._local_mapping:
            return self._local_mapping[key]
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS[key]
        return sdpa_attention_forward if function is stock_sdpa_attention_forward else function


# This is not `transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS`, but our view of it. It has the same name because
# vLLM looks for `ALL_ATTENTION_FUNCTIONS` in the text of an attention layer's `forward`; see `attention.py`.
ALL_ATTENTION_FUNCTIONS = GQAAttentionInterface()


class AttentionModule(Protocol):
    """The attributes of a layer that `attended_part` reads."""

    layer_idx: int

    @property
    def backend(self) -> str: ...


def attended_part(
    module: AttentionModule,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key_values: Cache | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the mask of a layer, and the keys and values that it attends to.

    A model builds its layers' masks; these pass through. A layer that is used without a model gets its own mask. Places
    that a static cache has not filled yet are cut off, except while tracing, and except where eager attention returns
    weights as wide as the cache.

    Args:
        module: the layer; without an attention implementation in its configuration it uses eager.
        hidden_states: (B, T, hidden), the last T of the tokens seen; in cross-attention, other tokens.
        attention_mask: `None`, a padding mask (B, S) with 1 or True for tokens to attend to, or a finished mask.
        key, value: (B, G, S, D) and (B, G, S, V); with a cache what its `update` has returned.
        past_key_values: cache that holds the keys, the T new ones included.
        is_causal: a token sees no later ones.
        sliding_window: number of tokens within which to attend.

    Returns:
        A mask (B, 1, T, S), or `None` where the attention function masks by itself or nothing is masked; keys; values.

    Raises:
        ValueError: a padding mask has not one column per key, or the cache has dropped keys that are to be seen.
    """
    if past_key_values is not None:
        attention_mask, key, value = _filled_part(module, attention_mask, past_key_values, key, value)
    layer: Any = None if past_key_values is None else past_key_values.layers[module.layer_idx]
    static = layer is not None and layer.is_compileable
    if attention_mask is None and hidden_states.shape[1] == 1 and sliding_window is None and not static:
        return None, key, value
    backend = module.backend
    # A trace cannot ask how far a static cache is filled; without a mask it is a prompt, which `sdpa` masks itself.
    if attention_mask is None and static and backend == "sdpa" and is_tracing(hidden_states):
        return None, key, value
    if _is_finished(attention_mask) or backend not in MASK_BUILDERS:
        return attention_mask, key, value
    if not is_causal and layer is not None and layer.is_sliding:
        raise ValueError(
            "is_causal=False with a cache of a sliding window, which drops keys that a two-sided window sees: "
            "give a cache that keeps all tokens, such as DynamicCache(), or none"
        )
    keys = key.shape[2]
    total = keys if past_key_values is None else int(past_key_values.get_seq_length(module.layer_idx))
    return _lone_layer_mask(backend, hidden_states, attention_mask, keys, total, is_causal, sliding_window), key, value


def _is_finished(attention_mask: Any) -> bool:
    """Whether a model has built the mask: (B, 1, T, S), or an object of the attention function's own."""
    return attention_mask is not None and (not torch.is_tensor(attention_mask) or attention_mask.ndim == 4)


def _filled_part(
    module: AttentionModule, attention_mask: Any, past_key_values: Cache, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Cut what a static cache hands out, and the mask, to the tokens it holds; traced shapes must stay as they are."""
    layer: Any = past_key_values.layers[module.layer_idx]
    finished = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
    if not layer.is_compileable or layer.is_sliding or not (finished or attention_mask is None) or is_tracing(key):
        return attention_mask, key, value
    # Eager returns weights as wide as the cache, so there only a mask that is narrower than the cache cuts it.
    whole = not finished or attention_mask.shape[-1] == key.shape[2]
    if whole and module.backend == "eager":
        return attention_mask, key, value
    filled = int(past_key_values.get_seq_length(module.layer_idx))
    if finished:
        attention_mask = attention_mask[..., :filled]
    return attention_mask, key[:, :, :filled], value[:, :, :filled]


def _lone_layer_mask(
    backend: str,
    hidden_states: torch.Tensor,
    padding_mask: torch.Tensor | None,
    keys: int,
    total: int,
    is_causal: bool,
    sliding_window: int | None,
) -> torch.Tensor | None:
    """The mask of a layer without a model, over `keys` keys of `total` tokens; the rest as in `attended_part`."""
    batch, length = hidden_states.shape[:2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    seen = min(total, keys)  # a window holds the last ones, a static cache has room for more
    if padding_mask is None and window is None:
        unmasked = seen == keys and (length == 1 or not is_causal)
        if unmasked or (backend == "sdpa" and seen == length > 1 and is_causal):
            return None
    if padding_mask is None and seen < keys:
        padding_mask = hidden_states.new_ones(batch, seen)
    elif padding_mask is not None:
        refuse_other_padding(padding_mask, batch, total)
        padding_mask = padding_mask[:, -keys:]  # (B, seen)
    if padding_mask is not None:
        padding_mask = padding_mask.to(hidden_states.device, torch.bool)
    if window is not None:
        pattern = sliding_window_causal_mask_function if is_causal else sliding_window_bidirectional_mask_function
        mask_function = pattern(window)
    else:
        mask_function = causal_mask_function if is_causal else bidirectional_mask_function
    return MASK_BUILDERS[backend](
        batch_size=batch,
        q_length=length,
        kv_length=keys,
        # Cross-attention may have more queries than keys; transformers masks a query whose index is negative.
        q_offset=max(seen - length, 0),
        mask_function=mask_function,
        attention_mask=padding_mask,
        dtype=hidden_states.dtype,
        allow_is_causal_skip=False,
        device=hidden_states.device,
    )


def refuse_other_padding(padding_mask: torch.Tensor, batch: int, tokens: int) -> None:
    """Raise a ValueError for a padding mask of another shape than (`batch`, `tokens`)."""
    if padding_mask.shape != (batch, tokens):
        raise ValueError(
            f"attention_mask has shape {tuple(padding_mask.shape)}: a padding mask is (batch, keys) = "
            f"({batch}, {tokens}), any other mask has four dimensions"
        )


def model_masks(
    config: GQAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor,
    restarts: torch.Tensor | None,
) -> dict[str, Any]:
    """The mask of each layer type in `config.layer_types`, in the form that the attention implementation wants.

    Args:
        inputs_embeds: (B, T, hidden); only its shape, dtype and device are used.
        attention_mask: padding mask (B, S), finished mask, or the dictionary that this function returns.
        restarts: `position_ids` if the caller gave them, else `None`; a packed document begins where they restart.
    """
    if isinstance(attention_mask, dict):  # `generate` has made them, for a compiled decoding step
        return attention_mask
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
        "position_ids": position_ids,
    }
    # transformers looks for packed documents only where no padding mask is given either.
    padding = isinstance(attention_mask, torch.Tensor) and attention_mask.shape == inputs_embeds.shape[:2]
    if padding and restarts is not None and past_key_values is None and not is_tracing(restarts):
        documents = packed_documents(restarts.expand(inputs_embeds.shape[0], -1), attention_mask.bool())
        if documents.any():
            arguments["and_mask_function"] = packed_sequence_mask_function(documents)
    return {kind: MASK_FUNCTIONS[kind](**arguments) for kind in dict.fromkeys(config.layer_types)}


def packed_documents(position_ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row: one begins where a token's position is not beyond that of the token before it.

    Args:
        position_ids: (B, T); those of padding mean nothing.
        padding_mask: (B, T), True for tokens that are not padding.

    Returns:
        (B, T) document indices, counted from 0.
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    index = index.masked_fill(~padding_mask, -1).cummax(dim=-1).values  # (B, T), the last token at or before
    before = nn.functional.pad(index[:, :-1], (1, 0), value=-1)  # (B, T), the last token before
    position_before = position_ids.gather(1, before.clamp(min=0)).masked_fill(before < 0, -1)  # (B, T)
    return (padding_mask & (position_ids <= position_before)).cumsum(dim=-1)
