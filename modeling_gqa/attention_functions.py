"""Attention over given queries, keys and values: the eager reference, torch's fused kernel, and MLA over its latent.

Shapes: B batch, T query tokens, S key tokens, H query heads, G key/value heads, D head size, R latent size, P rotary
size, N and V sizes of the unrotated key and of the value.
"""

import torch
from torch import nn
from transformers import modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward
from transformers.utils.import_utils import is_tracing

# Up to so many query tokens, packing the heads that share keys beats torch's own grouped attention (CPU, measured).
FEW_TOKENS = 8
# Arguments that only transformers' own `sdpa` knows.
STOCK_ONLY = frozenset(("cache", "position_bias", "softcap", "output_attentions"))

# Whether the CPU multiplies bfloat16 tiles; torch before 2.13 does not tell.
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
    """transformers' `sdpa`, but keys and values are not repeated where a fused kernel can do without.

    Arguments and output as in `eager_attention_forward`, without weights. Several tokens without a mask are causal, and
    the stock function's: torch takes these as they are.
    """
    device = query.device.type
    # Without a mask, CUDA's kernels take grouped heads themselves; with one and many tokens no kernel there does.
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
    """transformers' attention functions as they are registered there, our own `sdpa` in place of the stock one."""

    def __getitem__(self, key):
        if key in self._local_mapping:
            return self._local_mapping[key]
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS[key]
        return sdpa_attention_forward if function is stock_sdpa_attention_forward else function


ALL_ATTENTION_FUNCTIONS = GQAAttentionInterface()


def absorbed_attention_forward(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """MLA over the cached latent, `kv_b_proj` folded into query and output (DeepSeek-V2, 2405.04434, section 2.1.2).

    All heads share the latent, so heads and tokens of the query form the rows of one matrix product per batch entry.

    Args:
        query, query_rope: unrotated (B, H, T, N) and rotated (B, H, T, P) part of the queries.
        latent, key_rope: (B, 1, S, R) and (B, 1, S, P), as cached.
        kv_b_weight: (H (N + V), R), the weight of `kv_b_proj`.
        attention_mask: (B or 1, H or 1, T, S), additive or boolean; `None` attends everywhere.
        fused: no weights are asked for, so a fused kernel may be used where it is faster.

    Returns:
        Output (B, T, H, V), and weights (B, H, T, S) unless `fused`.
    """
    heads, length, nope = query.shape[1:]
    rank = latent.shape[-1]
    kv_b = kv_b_weight.view(heads, -1, rank)  # (H, N + V, R)
    query = _by_head(query, kv_b[:, :nope])  # (B, H, T, R)
    joint = _joint_keys(latent, key_rope) if fused else None
    weights = None
    if joint is not None:
        # The values are the latent; the kernel wants them as long as the keys, so the rotary part comes along.
        query = torch.cat((query, query_rope), dim=-1)  # (B, H, T, R + P)
        output = fused_attention(query, joint, joint, attention_mask, scaling)[..., :rank]  # (B, H, T, R)
    else:
        latent, key_rope = latent.squeeze(1), key_rope.squeeze(1)  # (B, S, R), (B, S, P)
        scores = query.flatten(1, 2) @ latent.mT + query_rope.flatten(1, 2) @ key_rope.mT  # (B, H T, S)
        scores = scores.unflatten(1, (heads, length)) * scaling  # (B, H, T, S)
        weights = masked_softmax(scores, attention_mask, query.dtype)
        output = (weights.flatten(1, 2) @ latent).unflatten(1, (heads, length))  # (B, H, T, R)
    output = _by_head(output, kv_b[:, nope:].mT)  # (B, H, T, V)
    return output.transpose(1, 2).contiguous(), None if fused else weights  # (B, T, H, V)


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply each head of `x` (B, H, T, n) with its matrix in `weight` (H, n, m), which is not copied per row."""
    batch, _, length, _ = x.shape
    x = x.transpose(0, 1).flatten(1, 2) @ weight  # (H, B T, m)
    return x.unflatten(1, (batch, length)).transpose(0, 1)  # (B, H, T, m)


def _joint_keys(latent: torch.Tensor, key_rope: torch.Tensor) -> torch.Tensor | None:
    """[latent; rotary key] (B, 1, S, R + P) where the fused kernel over it is the fastest way, else `None`.

    `GrowingLayer` keeps both side by side, which makes it a view. A copy pays only where a CPU has no fast matrix
    products in the dtype: there, they are up to a hundred times slower than the fused kernel.
    """
    if latent.device.type != "cpu" or latent.requires_grad or key_rope.requires_grad or is_tracing(latent):
        return None
    size = latent.shape[-1] + key_rope.shape[-1]
    same_storage = latent.untyped_storage().data_ptr() == key_rope.untyped_storage().data_ptr()
    next_to = latent.storage_offset() + latent.shape[-1] == key_rope.storage_offset()
    if (
        same_storage
        and next_to
        and latent.stride() == key_rope.stride()
        and latent.stride(2) >= size
        and latent.stride(3) == 1
    ):
        return latent.as_strided((*latent.shape[:-1], size), latent.stride())
    reduced = latent.dtype in (torch.bfloat16, torch.float16)
    return torch.cat((latent, key_rope), dim=-1) if reduced and not CPU_HAS_AMX else None


def pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zero-pad the last dimensions to the largest, because fused kernels want one head size; no score changes."""
    size = max(tensor.shape[-1] for tensor in tensors)
    missing = [size - tensor.shape[-1] for tensor in tensors]
    # Padding by nothing would copy.
    return [nn.functional.pad(tensor, (0, n)) if n else tensor for tensor, n in zip(tensors, missing, strict=True)]
