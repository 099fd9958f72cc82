"""The next-token loss from hidden states in chunks of tokens, so that the full logits are never held.

Shapes: B batch, T tokens.
"""

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from .layers import is_plain_linear


def can_chunk_loss(lm_head: nn.Module, hidden_states: torch.Tensor, loss_function) -> bool:
    """Whether the loss of `lm_head(hidden_states)` is that of `chunked_causal_lm_loss`: stock head, stock loss."""
    available = hasattr(nn.functional, "linear_cross_entropy")  # torch 2.13
    plain = is_plain_linear(lm_head) and lm_head.bias is None and lm_head.weight.device == hidden_states.device
    return available and plain and loss_function is ForCausalLMLoss


def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    logits_at_once: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """What transformers' `ForCausalLMLoss` gives for `hidden_states @ weight.T`; gradients are computed on the way.

    Args:
        hidden_states: (B, T, hidden).
        weight: (vocabulary, hidden), of the language modeling head.
        labels: (B, T) token ids, shifted here unless `shift_labels` (B, T) are given.
        logits_at_once: how many logits may exist at a time.
        num_items_in_batch: divides the sum over tokens; the mean is taken where it is `None`.
        ignore_index: label without a loss.

    Raises:
        ValueError: there is not one label for each hidden state.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden_states, shift_labels = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)
    if len(shift_labels) != len(hidden_states):
        raise ValueError(f"{len(shift_labels)} labels for the hidden states of {len(hidden_states)} tokens")
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    # torch returns the loss in the dtype of the logits, too coarse for a sum over many tokens.
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)
    rows = max(1, logits_at_once // weight.shape[0])
    with torch.autocast(device, enabled=False):
        losses = nn.functional.linear_cross_entropy(
            hidden_states,
            weight,
            shift_labels,
            reduction="sum" if accumulate == hidden_states.dtype else "none",
            ignore_index=ignore_index,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None),
        )
    total = losses.to(accumulate).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
