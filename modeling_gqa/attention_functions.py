"""Attention over given queries, keys and values: the eager reference, MLA over the latent, and masks of lone layers.

Shapes: B batch, T query tokens, S key tokens, H query heads, G key/value heads, D head size, R latent size, P rotary
size, N and V sizes of the unrotated key and of the value.
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

MASK_BUILDERS: dict[str, Callable] = {"eager": eager_mask, "sdpa": sdpa_mask, "flex_attention": flex_attention_mask}


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
    """Scaled dot-product attention (Vaswani et al., 1706.03762, eq. 1), written to be read.

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


def absorbed_attention_forward(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA over the cached latent, `kv_b_proj` folded into query and output (DeepSeek-V2, 2405.04434, section 2.1.2).

    All heads share the latent, so heads and tokens of the query form the rows of one matrix product per batch entry.

    Args:
        query, query_rope: unrotated (B, H, T, N) and rotated (B, H, T, P) part of the queries.
        latent, key_rope: (B, 1, S, R) and (B, 1, S, P), as cached.
        kv_b_weight: (H (N + V), R), the weight of `kv_b_proj`.
        attention_mask: (B or 1, H or 1, T, S), additive or boolean; `None` attends everywhere.

    Returns:
        Output (B, T, H, V) and weights (B, H, T, S).
    """
    heads, length, nope = query.shape[1:]
    kv_b = kv_b_weight.view(heads, -1, latent.shape[-1])  # (H, N + V, R)
    key_up, value_up = kv_b[:, :nope], kv_b[:, nope:]  # (H, N, R), (H, V, R)
    query = (query @ key_up).flatten(1, 2)  # (B, H, T, N) @ (H, N, R) -> (B, H T, R)
    latent, key_rope = latent.squeeze(1), key_rope.squeeze(1)  # (B, S, R), (B, S, P)
    scores = query @ latent.mT + query_rope.flatten(1, 2) @ key_rope.mT  # (B, H T, S)
    scores = scores.unflatten(1, (heads, length)) * scaling  # (B, H, T, S)
    weights = masked_softmax(scores, attention_mask, query.dtype)
    output = (weights.flatten(1, 2) @ latent).unflatten(1, (heads, length))  # (B, H, T, R)
    return (output @ value_up.mT).transpose(1, 2).contiguous(), weights  # (B, T, H, V)


def pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zero-pad the last dimensions to the largest, because fused kernels want one head size; no score changes."""
    size = max(tensor.shape[-1] for tensor in tensors)
    return [nn.functional.pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]


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
        hidden_states: (B, T, hidden), the last T of the tokens seen.
        attention_mask: `None`, a padding mask (B, S) with 1 or True for tokens to attend to, or a finished mask.
        kv_length: number of keys, of which a static cache may not have filled all.
        past_key_values: cache that holds the keys, the T new ones included.
        is_causal: `None` stands for True.
        sliding_window: number of tokens within which to attend.

    Returns:
        A mask (B, 1, T, S), or `None` where the attention function masks by itself or nothing is masked.
    """
    config: Any = module.config
    backend = config._attn_implementation or "eager"
    finished = attention_mask is not None and (not torch.is_tensor(attention_mask) or attention_mask.ndim == 4)
    if finished or backend not in MASK_BUILDERS:
        return attention_mask
    causal = is_causal is not False
    batch, length = hidden_states.shape[:2]
    window = sliding_window if sliding_window is not None and sliding_window < kv_length else None
    total = kv_length if past_key_values is None else int(past_key_values.get_seq_length(module.layer_idx))
    seen = min(total, kv_length)  # a window holds the last ones, a static cache has room for more
    if attention_mask is None and window is None:
        unmasked = seen == kv_length and (length == 1 or not causal)
        if unmasked or (backend == "sdpa" and seen == length and causal):
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
        q_offset=seen - length,
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
