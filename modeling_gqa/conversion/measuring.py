"""How far a converted model is from its source, measured on text that the conversion did not see.

Shapes: B batch, T tokens, n predicted tokens of a batch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from .contexts import evaluating, hooks
from .errors import ConversionError
from .layerwise import MODEL_INPUTS
from .types import Progress

TOKENS_AT_ONCE = 256  # whose logits exist; more of them leave the processor's caches and take twice as long


@torch.no_grad()
def measure(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    progress: Progress = iter,
    known: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Compare the two models' predictions of the next token of the same document.

    Args:
        source, converted: causal language models with one vocabulary.
        batches: `input_ids` (B, T), optionally `attention_mask` (B, T), 0 for padding, and `position_ids` (B, T), 0 at
            the first token of a document, which is not predicted.
        progress: wraps the batches.
        known: the source's `predicted_states` by number of the batch, where it is compared more than once.

    Returns:
        `perplexity_before` and `perplexity_after`; `kl`, the mean over tokens of KL(source || converted) in nats;
        `top1_agreement`, the share of tokens for which both find the same one most likely; `tokens`, predicted.

    Raises:
        ConversionError: nothing to predict, or logits that are not finite.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    with evaluating(source, converted):
        for index, batch in enumerate(progress(batches)):
            targets = batch["input_ids"][:, 1:][predicted_positions(batch)]  # (n,)
            hidden = (known[index] if known else predicted_states(source, batch), predicted_states(converted, batch))
            heads = [model.get_output_embeddings() for model in (source, converted)]
            for target, *states in zip(*(x.split(TOKENS_AT_ONCE) for x in (targets, *hidden)), strict=True):
                before, after = (log_softmax(head(x)) for head, x in zip(heads, states, strict=True))
                totals += compare(before, after.to(before.device), target.to(before.device)).cpu()
            tokens += len(targets)
    if not tokens:
        raise ConversionError("no token to measure on: every one is padding or the first of its document")
    loss_before, loss_after, kl, agreement = (totals / tokens).tolist()
    if not torch.isfinite(totals).all():
        raise ConversionError("the logits are not finite on the held-out text: choose --dtype float32 or bfloat16")
    perplexities = torch.tensor([loss_before, loss_after], dtype=torch.float64).exp()
    if not torch.isfinite(perplexities).all():
        raise ConversionError(
            f"the losses on the held-out text are {loss_before:.4g} before and {loss_after:.4g} after, whose "
            "perplexity no number holds: the source is damaged, or the method not for it"
        )
    return {
        "perplexity_before": perplexities[0].item(),
        "perplexity_after": perplexities[1].item(),
        "kl": kl,
        "top1_agreement": agreement,
        "tokens": tokens,
    }


def compare(before: torch.Tensor, after: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sums over tokens of both losses, of KL(before || after) and of agreements, from log-probabilities (n, vocab)."""
    losses = [-x.gather(1, target[:, None]).sum(dtype=torch.float64) for x in (before, after)]
    # A token that the source rules out adds nothing; 0 * inf would.
    kl = torch.where(before > -torch.inf, before.exp() * (before - after), 0.0).sum(dtype=torch.float64)
    agreements = (before.argmax(-1) == after.argmax(-1)).sum(dtype=torch.float64)
    return torch.stack([*losses, kl, agreements])


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def predicted_positions(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where (B, T - 1) the next token is of the same document and neither is padding."""
    predicted = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    if (positions := batch.get("position_ids")) is not None:
        predicted = predicted & (positions[:, 1:] != 0)
    if (mask := batch.get("attention_mask")) is not None:
        predicted = predicted & mask[:, 1:].bool() & mask[:, :-1].bool()
    return predicted


@torch.no_grad()
def predicted_states(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Last hidden states (n, hidden) from which the next tokens of a batch are predicted."""
    return last_hidden_state(model, batch)[:, :-1][predicted_positions(batch).to(model.device)]


def last_hidden_state(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # A cache would hide from transformers that documents are packed.
    inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
    return model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, T, hidden)


@torch.no_grad()
def layer_errors(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    progress: Progress = iter,
) -> list[float]:
    """Relative error of each layer's attention output, where both models' layers read what the source's layer reads.

    The root of the summed squared differences over the summed squares of the source's output, over all tokens that
    are not padding. Arguments as for `measure`; both must be GQA models with the same attention implementation.
    """
    if source.config._attn_implementation != converted.config._attn_implementation:
        raise ValueError("layer_errors needs one attention implementation: call set_attn_implementation on one model")
    sums = torch.zeros(len(source.model.layers), 2, dtype=torch.float64)
    real: torch.Tensor

    def hook(index: int, other: torch.nn.Module):
        def compare_layers(layer, args, kwargs):
            hidden = args[0]  # (B, T, hidden)
            expected = attend(source.model, index, layer, hidden, kwargs)
            found = attend(converted.model, index, other, hidden, kwargs).to(expected.device)
            kept = real.to(expected.device)
            sums[index, 0] += (found.double() - expected.double())[kept].square().sum().cpu()
            sums[index, 1] += expected.double()[kept].square().sum().cpu()

        return compare_layers

    pairs = enumerate(zip(source.model.layers, converted.model.layers, strict=True))
    handles = [layer.register_forward_pre_hook(hook(i, other), with_kwargs=True) for i, (layer, other) in pairs]
    with hooks(*handles), evaluating(source, converted):
        for batch in progress(batches):
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()  # (B, T)
            last_hidden_state(source, batch)
    # An output of zeros that stays zeros has no error.
    return (sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(torch.float64).tiny)).sqrt().tolist()


def attend(model, index: int, layer, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Attention output (B, T, hidden) of one of `model`'s layers for a layer input and what came with it."""
    device = next(layer.parameters()).device
    kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    hidden = hidden.to(device, next(layer.parameters()).dtype)
    # Kinds rotate heads of different sizes.
    rotary = model.rotary_emb[model.rotary_sizes[index]]
    kwargs["position_embeddings"] = rotary(hidden, kwargs["position_ids"])
    return layer.self_attn(layer.input_layernorm(hidden), **kwargs)[0]
