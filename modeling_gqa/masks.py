"""Masks that transformers does not build: those of lone layers, and of packed documents under a padding mask.

Shapes: B batch, T query tokens, S key tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    flex_attention_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

MASK_BUILDERS: dict[str, Callable] = {"eager": eager_mask, "sdpa": sdpa_mask, "flex_attention": flex_attention_mask}


def filled_part(
    module: nn.Module, attention_mask, past_key_values, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Cut what a static cache hands out, and the mask, to the tokens it holds; traced shapes must stay as they are.

    Args:
        module: the layer. Under eager it returns weights, as wide as the cache: there, only a narrower mask cuts.
        attention_mask: anything that `lone_layer_mask` takes; only `None` and masks (B, 1, T, S) are cut.
        key, value: what the cache's `update` has returned, (B, G, S, D).
    """
    layer = past_key_values.layers[module.layer_idx]
    config: Any = module.config
    finished = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
    if not layer.is_compileable or layer.is_sliding or not (finished or attention_mask is None) or is_tracing(key):
        return attention_mask, key, value
    whole = not finished or attention_mask.shape[-1] == key.shape[2]
    if whole and (config._attn_implementation or "eager") == "eager":
        return attention_mask, key, value
    filled = int(past_key_values.get_seq_length(module.layer_idx))
    if finished:
        attention_mask = attention_mask[..., :filled]
    return attention_mask, key[:, :, :filled], value[:, :, :filled]


def lone_layer_mask(
    module: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kv_length: int,
    past_key_values=None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor | None:
    """Mask of a layer that is used without a model; masks that a model has built pass through.

    Args:
        module: the layer; a lone layer's configuration names no attention implementation, which means eager.
        hidden_states: (B, T, hidden), the last T of the tokens seen; in cross-attention, other tokens.
        attention_mask: `None`, a padding mask (B, S) with 1 or True for tokens to attend to, or a finished mask.
        kv_length: number of keys, of which a static cache may not have filled all.
        past_key_values: cache that holds the keys, the T new ones included.
        is_causal: `None` stands for True.
        sliding_window: number of tokens within which to attend.

    Returns:
        A mask (B, 1, T, S), or `None` where the attention function masks by itself or nothing is masked.
    """
    static = past_key_values is not None and past_key_values.layers[module.layer_idx].is_compileable
    if attention_mask is None and hidden_states.shape[1] == 1 and sliding_window is None and not static:
        return None
    config: Any = module.config
    backend = config._attn_implementation or "eager"
    # A trace cannot ask how far a static cache is filled; without a mask it is a prompt, which `sdpa` masks itself.
    if attention_mask is None and static and backend == "sdpa" and is_tracing(hidden_states):
        return None
    finished = attention_mask is not None and (not torch.is_tensor(attention_mask) or attention_mask.ndim == 4)
    if finished or backend not in MASK_BUILDERS:
        return attention_mask
    causal = is_causal is not False
    if not causal and past_key_values is not None and past_key_values.layers[module.layer_idx].is_sliding:
        raise ValueError(
            "is_causal=False with a cache of a sliding window, which drops keys that a two-sided window sees: "
            "give a cache that keeps all tokens, such as DynamicCache(), or none"
        )
    batch, length = hidden_states.shape[:2]
    window = sliding_window if sliding_window is not None and sliding_window < kv_length else None
    total = kv_length if past_key_values is None else int(past_key_values.get_seq_length(module.layer_idx))
    seen = min(total, kv_length)  # a window holds the last ones, a static cache has room for more
    if attention_mask is None and window is None:
        unmasked = seen == kv_length and (length == 1 or not causal)
        if unmasked or (backend == "sdpa" and seen == length > 1 and causal):
            return None
    if attention_mask is None and seen < kv_length:
        attention_mask = hidden_states.new_ones(batch, seen)
    elif attention_mask is not None:
        if attention_mask.shape != (batch, total):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: a padding mask is (batch, keys) = "
                f"({batch}, {total}), any other mask has four dimensions"
            )
        attention_mask = attention_mask[:, -kv_length:]  # (B, seen)
    if attention_mask is not None:
        attention_mask = attention_mask.to(hidden_states.device, torch.bool)
    if window is not None:
        pattern = sliding_window_causal_mask_function if causal else sliding_window_bidirectional_mask_function
        mask_function = pattern(window)
    else:
        mask_function = causal_mask_function if causal else bidirectional_mask_function
    return MASK_BUILDERS[backend](
        batch_size=batch,
        q_length=length,
        kv_length=kv_length,
        # Cross-attention may have more queries than keys; transformers masks a query whose index is negative.
        q_offset=max(seen - length, 0),
        mask_function=mask_function,
        attention_mask=attention_mask,
        dtype=hidden_states.dtype,
        allow_is_causal_skip=False,
        device=hidden_states.device,
    )


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
