"""Attention over given queries, keys and values: the eager reference and torch's fused kernel.

Shapes: B batch, T query tokens, S key tokens, H query heads, G key/value heads, D size of a query and a key, V of a
value.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, modeling_utils

from .compatibility import is_tracing, optional

# For at most this number of query tokens, packing the heads that share keys is faster than torch's own grouped
# attention (measured on a CPU).
FEW_TOKENS = 8
# Arguments that only transformers' own `sdpa` knows.
STOCK_ONLY = frozenset(("cache", "position_bias", "softcap", "output_attentions"))

stock_sdpa_attention_forward = optional(
    "transformers.integrations.sdpa_attention",
    "sdpa_attention_forward",
    AttentionInterface()["sdpa"],
    "the function that is `sdpa` now is taken for it",
)
# Whether the CPU has AMX, which multiplies bfloat16 tiles; torch before 2.13 does not tell, and False is assumed.
CPU_HAS_AMX = bool(dict(getattr(torch.cpu, "get_capabilities", dict)()).get("amx_bf16"))


def masked_softmax(scores: torch.Tensor, attention_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Softmax over the last dimension in at least float32, under an additive or boolean (True: attend) mask."""
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def with_scores(attention_mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """An additive mask (B, H, T, S) of `scores` that are added to what is attended to, and of the mask."""
    if attention_mask is None:
        return scores
    if attention_mask.dtype == torch.bool:
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    return scores + attention_mask


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
    the stock function's: torch takes these as they are. `documents`: (B, T), as `masks.causal_documents` gives them.
    """
    documents = kwargs.pop("documents", None)
    device = query.device.type
    # Without a mask, CUDA's kernels take grouped heads themselves; with a mask and many tokens, none of them does.
    fused = device == "cpu" or (device == "cuda" and attention_mask is not None and _few(query))
    masked = attention_mask is not None or query.shape[2] == 1
    special = not STOCK_ONLY.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in STOCK_ONLY)
    if documents is not None and not special:
        output = attention_by_document(query, key, value, documents, scaling, dropout)  # (B, H, T, V)
        return output.transpose(1, 2).contiguous(), None  # (B, T, H, V)
    if special or not (masked and fused):
        return stock_sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = fused_attention(query, key, value, attention_mask, scaling, dropout)  # (B, H, T, V)
    return output.transpose(1, 2).contiguous(), None  # (B, T, H, V)


def attention_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor,
    scaling: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention within each document, without the scores between documents that a mask hides.

    Shapes as in `eager_attention_forward` with S = T; returns (B, H, T, V). `documents`: (B, T), the number of each
    token's document.
    """
    options: dict[str, Any] = {"dropout_p": dropout, "is_causal": True, "scale": scaling}
    options |= {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    rows = []
    for *row, numbers in zip(query, key, value, documents, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(x[None].split(lengths, dim=2) for x in row), strict=True)
        rows.append(torch.cat([nn.functional.scaled_dot_product_attention(*part, **options) for part in parts], dim=2))
    return torch.cat(rows)


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


class GQAAttentionInterface(AttentionInterface):
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
