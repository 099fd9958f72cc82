"""How far a converted model is from its source, in predictions and in the output of each layer.

Shapes: B batch, T tokens, n predicted tokens of a batch, E hidden size, V vocabulary.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..cache_quantized import rounds_cache
from ..common.batches import MODEL_INPUTS, Batch, evaluating, hooks
from ..common.progress import Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQADecoderLayer, GQAForCausalLM, GQAModel
from .targets import as_ours

# Logits are computed for this number of tokens at a time; more no longer fit into the processor's caches, and take
# twice as long.
TOKENS_AT_ONCE = 256


def require_one_device(*models: torch.nn.Module) -> None:
    """Raise `UserError` for a model that `device_map` or offloading has spread.

    A conversion calls parts of layers by themselves, so the hooks that bring an offloaded weight do not run.
    """
    for model in models:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if "meta" in devices:
            raise UserError(
                "the model's weights are not in memory (offloaded, or on the meta device): load the whole model on "
                "one device, without offloading; what does not fit a GPU fits the processor's memory, device='cpu'"
            )
        if len(devices) > 1:
            raise UserError(
                f"the model's weights are on several devices ({', '.join(devices)}), as device_map places them: load "
                f"the whole model on one, such as {devices[-1]} or cpu"
            )


def not_finite(what: str, dtype: torch.dtype) -> UserError:
    """Return the error for numbers that are nan or infinite; dtypes but float16 have the range of float32, or more."""
    remedy = "choose --dtype float32 or bfloat16" if dtype == torch.float16 else "the weights are damaged"
    return UserError(f"{what} are not finite in {str(dtype).removeprefix('torch.')}: {remedy}")


@torch.no_grad()
def compare_predictions(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[Batch],
    progress: Progress = iter,
    source_states: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Compare two models' predictions of the next token of the same document.

    Args:
        source: the causal language model to compare with, of this package or of a family that it imports.
        converted: another one with the same vocabulary.
        batches: `input_ids` (B, T), optionally `attention_mask` (B, T), 0 for padding, and `position_ids` (B, T), 0 at
            the first token of a document, which is not predicted.
        progress: wraps the iteration over the batches.
        source_states: the source's `predicted_states` by number of the batch; computed where it is `None`.

    Returns:
        `perplexity_before` and `perplexity_after`, of source and converted; `kl`, the mean over tokens of
        KL(source || converted) in nats; `top1_agreement`, the share of tokens for which the same next token is the most
        likely in both; `tokens`, the number of tokens predicted.

    Raises:
        UserError: there is nothing to predict, logits are not finite, a model is spread over devices, or of a family
            that is not imported.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import compare_predictions, convert_model, target_config

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        converted, _ = convert_model(model, target_config(model.config, "mqa"))
        measured = compare_predictions(model, converted, [{"input_ids": torch.randint(64, (2, 16))}])
        assert measured["kl"] > 0 and measured["tokens"] == 30
        ```
    """
    require_one_device(source, converted)
    for model in (source, converted):
        as_ours(model.config)  # or its logits may not be those of its output layer
    totals = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    with evaluating(source, converted):
        for index, batch in enumerate(progress(batches)):
            targets = batch["input_ids"][:, 1:][predicted_positions(batch)]  # (n,)
            before = source_states[index] if source_states else predicted_states(source, batch)
            hidden = (before, predicted_states(converted, batch))
            heads = [model.get_output_embeddings() for model in (source, converted)]
            totals += compare_states(heads, hidden, targets)
            tokens += len(targets)
    if not tokens:
        raise UserError("no token to measure on: every one is padding or the first of its document")
    means = totals / tokens
    perplexities = means[:2].exp().tolist()
    for whose, dtype, perplexity in zip(
        ("source", "result"), (source.dtype, converted.dtype), perplexities, strict=True
    ):
        if not math.isfinite(perplexity):
            raise not_finite(f"the {whose}'s logits, or the perplexity, on the held-out text", dtype)
    if not math.isfinite(means[2]):
        raise not_finite("the result's logits on the held-out text", converted.dtype)
    return {
        "perplexity_before": perplexities[0],
        "perplexity_after": perplexities[1],
        "kl": means[2].item(),
        "top1_agreement": means[3].item(),
        "tokens": tokens,
    }


def compare_states(
    heads: Sequence[torch.nn.Module], hidden: Sequence[torch.Tensor], targets: torch.Tensor
) -> torch.Tensor:
    """Return sums over n tokens of both losses, of KL(before || after) and of agreements.

    `hidden` are the last hidden states (n, hidden) of source and conversion, `heads` their output layers, `targets`
    (n,) the tokens that follow.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    for target, *states in zip(*(x.split(TOKENS_AT_ONCE) for x in (targets, *hidden)), strict=True):
        before, after = (log_softmax(head(x)) for head, x in zip(heads, states, strict=True))  # (tokens, vocabulary)
        after, target = after.to(before.device), target.to(before.device)
        losses = [-x.gather(1, target[:, None]).sum(dtype=torch.float64) for x in (before, after)]
        # A token of probability 0 in the source adds 0, where the product would be nan.
        kl = torch.where(before > -torch.inf, before.exp() * (before - after), 0.0).sum(dtype=torch.float64)
        agreements = (before.argmax(-1) == after.argmax(-1)).sum(dtype=torch.float64)
        totals += torch.stack([*losses, kl, agreements]).cpu()
        del before, after  # before there are others
    return totals


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, computed in at least float32."""
    return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def predicted_positions(batch: Batch) -> torch.Tensor:
    """Return where (B, T - 1) the next token is of the same document and neither is padding."""
    predicted = torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)
    if (positions := batch.get("position_ids")) is not None:
        predicted = predicted & (positions[:, 1:] != 0)
    if (mask := batch.get("attention_mask")) is not None:
        predicted = predicted & mask[:, 1:].bool() & mask[:, :-1].bool()
    return predicted


@torch.no_grad()
def predicted_states(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the last hidden states (n, hidden) from which the next tokens of a batch are predicted."""
    return last_hidden_state(model, batch)[:, :-1][predicted_positions(batch).to(model.device)]


def last_hidden_state(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the last hidden states (B, T, hidden) of a batch, of which the output layer makes the logits."""
    # With a cache transformers' own models do not see from the position ids that documents are packed. Ours do, and a
    # model that rounds its cache is measured with it.
    inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
    states = model.base_model(**inputs, use_cache=rounds_cache(model.config)).last_hidden_state
    # Models of this package have divided them; transformers' Granite divides its logits.
    own = model.config.model_type == GQAConfig.model_type
    return states if own else states / getattr(model.config, "logits_scaling", 1)


@torch.no_grad()
def layer_errors(
    source: GQAForCausalLM,
    converted: GQAForCausalLM,
    batches: Iterable[Batch],
    progress: Progress = iter,
) -> list[float]:
    """Measure the relative error of each layer's attention output, where both layers get the source's hidden states.

    It is the root of sum |converted - source|^2 / sum |source|^2 over all tokens that are not padding.
    With a norm behind the attention the output is behind that norm.

    Args:
        source: the model to compare with.
        converted: a conversion of it with the same attention implementation.
        batches: model inputs, as for `compare_predictions`.
        progress: wraps the iteration over the batches.

    Returns:
        One number for each layer.

    Raises:
        ValueError: the attention implementations differ.
        UserError: a model is spread over devices.

    Example:
        ```python
        import torch

        from modeling_gqa import GQAConfig, GQAForCausalLM
        from modeling_gqa.conversion import convert_model, layer_errors, target_config

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = GQAForCausalLM(GQAConfig(vocab_size=64, attention_kind="mha", **sizes))
        converted, _ = convert_model(model, target_config(model.config, "mqa", layers=[1]))
        errors = layer_errors(model, converted, [{"input_ids": torch.randint(64, (2, 16))}])
        assert errors[0] == 0 < errors[1]
        ```
    """
    require_one_device(source, converted)
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


def attend(
    model: GQAModel, index: int, layer: GQADecoderLayer, hidden: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the attention output (B, T, hidden) of layer `index` of `model` for an input and what came with it."""
    device = next(layer.parameters()).device
    kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    hidden = hidden.to(device, next(layer.parameters()).dtype)
    # The two layers may rotate heads of different sizes.
    rotary = model.rotary_emb[model.rotary_sizes[index]]
    kwargs["position_embeddings"] = rotary(hidden, kwargs["position_ids"])
    return layer.attention_output(layer.self_attn(layer.attention_input(hidden), **kwargs)[0])
