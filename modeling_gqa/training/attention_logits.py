"""The largest attention logit of each layer, which grows before training diverges, by one more forward pass.

Shapes: B batch, T tokens, H query heads, G key/value heads, D size of a query and a key.
"""

from typing import Any

import torch
from torch import nn

from ..attention_functions import ALL_ATTENTION_FUNCTIONS, sdpa_attention_forward
from ..common.batches import evaluating

AT_ONCE = 2**24  # logits that are computed at a time


@torch.no_grad()
def largest_logits(model: nn.Module, config: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute attention logit of each layer, of the pairs of tokens that attend.

    The model runs without dropout and by `sdpa`, whose queries and keys are those of every other implementation.

    Args:
        model: of this package; it may be wrapped for several processes.
        config: of the model.
        batch: its inputs.
    """
    found: dict[int, torch.Tensor] = {}

    def measure(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        found[module.layer_idx] = largest_logit(query, key, mask) * abs(options["scaling"])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    implementation = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS["sdpa"], config._attn_implementation = measure, "sdpa"
    try:
        with evaluating(model):
            model(**batch, use_cache=False, logits_to_keep=1)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        config._attn_implementation = implementation
    return torch.stack([found[index] for index in sorted(found)])


def largest_logit(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the largest absolute score of `query` (B, H, T, D) and `key` (B, G, T, D) under `mask` (B, 1, T, T).

    Without a mask tokens see themselves and those before. Some rows are computed at a time, in float32 or float64.
    """
    wide, tokens = torch.promote_types(query.dtype, torch.float32), query.shape[2]
    query = query.unflatten(1, (key.shape[1], -1))  # (B, G, H/G, T, D)
    rows = max(1, AT_ONCE // (query.shape[:3].numel() * tokens))
    largest = query.new_zeros((), dtype=wide)
    with torch.autocast(query.device.type, enabled=False):
        keys = key.to(wide).mT  # (B, G, D, T)
        for start in range(0, tokens, rows):
            part = query[..., start : start + rows, :].to(wide)  # (B, G, H/G, R, D)
            scores = (part.flatten(2, 3) @ keys).unflatten(2, part.shape[2:4])  # (B, G, H/G, R, T)
            if mask is None:
                seen = torch.ones(part.shape[3], tokens, dtype=torch.bool, device=query.device).tril(start)  # (R, T)
            else:
                seen = mask[:, :, None, start : start + rows]  # (B, 1, 1, R, T)
            largest = torch.maximum(largest, scores.abs().masked_fill(~seen, 0).amax())
    return largest
