"""What a conversion cost: measured on held-out text, saved as JSON and as the model card.

Shapes: B batch, T tokens, n predicted tokens of a batch.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import metadata_load
from huggingface_hub.utils import yaml_dump
from transformers import PreTrainedModel
from yaml import YAMLError

from ..configuration_gqa import GQAConfig
from .errors import ConversionError

Item = TypeVar("Item")
REPORT_NAME = "conversion.json"
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
LOGITS_AT_ONCE = 2**24  # of one model: 64 MiB in float32
# What the source's card says that holds for the converted model too.
KEPT_METADATA = ("license", "license_name", "license_link", "language", "datasets")

CARD = """---
{metadata}---

# {title}

{source} with its attention changed by `modeling_gqa`, without training: {change}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
```

The model's code is in this repository, hence `trust_remote_code=True`; pin what you have read with `revision=`.

## What the conversion cost

{cost}

| | before | after |
|---|---|---|
{table}

{layers}

`{report}` holds all of this, the candidates that were tried, and the command.

## Where it runs

{runs}

The model's code is licensed under Apache-2.0; what the source's licence and card say of its weights holds for these.
"""
RUNS = "transformers 5.17 or newer, below 6, with or without `modeling_gqa` installed."
NO_LATENT_NORM = """
vLLM does not recognise this model's MLA: it tells MLA by an RMSNorm after `kv_a_proj_with_mqa`, which a converted model
does not have (no linear map can match it), so it serves the model as plain attention and caches all keys and values."""


@torch.no_grad()
def measure(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    progress: Callable[[Iterable], Iterable] = iter,
) -> dict[str, Any]:
    """Compare the two models' predictions of the next token of the same document.

    Args:
        source, converted: causal language models with one vocabulary.
        batches: `input_ids` (B, T), optionally `attention_mask` (B, T), 0 for padding, and `position_ids` (B, T), 0 at
            the first token of a document, which is not predicted.
        progress: wraps the batches.

    Returns:
        `perplexity_before` and `perplexity_after`; `kl`, the mean over tokens of KL(source || converted) in nats;
        `top1_agreement`, the share of tokens for which both find the same one most likely; `tokens`, predicted.

    Raises:
        ConversionError: nothing to predict, or logits that are not finite.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    with evaluating(source, converted):
        for batch in progress(batches):
            predicted = predicted_positions(batch)
            targets = batch["input_ids"][:, 1:][predicted]  # (n,)
            hidden = [
                last_hidden_state(model, batch)[:, :-1][predicted.to(model.device)] for model in (source, converted)
            ]
            heads = [model.get_output_embeddings() for model in (source, converted)]
            chunk = max(1, LOGITS_AT_ONCE // source.config.vocab_size)
            for target, *states in zip(targets.split(chunk), *(x.split(chunk) for x in hidden), strict=True):
                before, after = (log_softmax(head(x)) for head, x in zip(heads, states, strict=True))
                totals += compare(before, after.to(before.device), target.to(before.device)).cpu()
            tokens += len(targets)
    if not tokens:
        raise ConversionError("no token to measure on: every one is padding or the first of its document")
    loss_before, loss_after, kl, agreement = (totals / tokens).tolist()
    if not torch.isfinite(totals).all():
        raise ConversionError("the logits are not finite on the held-out text: choose --dtype float32 or bfloat16")
    return {
        "perplexity_before": float(torch.tensor(loss_before, dtype=torch.float64).exp()),
        "perplexity_after": float(torch.tensor(loss_after, dtype=torch.float64).exp()),
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


def last_hidden_state(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # A cache would hide from transformers that documents are packed.
    inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
    return model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, T, hidden)


@torch.no_grad()
def layer_errors(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    progress: Callable[[Iterable], Iterable] = iter,
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
    try:
        with evaluating(source, converted):
            for batch in progress(batches):
                real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()  # (B, T)
                last_hidden_state(source, batch)
    finally:
        for handle in handles:
            handle.remove()
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


@contextmanager
def evaluating(*models: PreTrainedModel) -> Iterator[None]:
    """Models in evaluation mode, and afterwards in the mode that they were in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def describe_layer(layer: GQAConfig) -> str:
    """One layer's attention in words, from `config.per_layer_config[i]`."""
    heads = f"{layer.num_attention_heads} query heads"
    if layer.attention_kind == "mla":
        norm = "" if layer.latent_norm else ", no latent norm"
        return f"mla, {heads}, a latent of {layer.kv_lora_rank} and a rotary key of {layer.qk_rope_head_dim}{norm}"
    norm = ", qk-norm" if layer.qk_norm else ""
    return f"{layer.attention_kind}, {heads}, {layer.num_key_value_heads} key/value heads of {layer.head_dim}{norm}"


def describe_layers(config: GQAConfig) -> list[tuple[str, str]]:
    """Runs of equal layers and their attention: `[("0-2", "mha, ..."), ("3", "gqa, ...")]`."""
    return runs(map(describe_layer, config.per_layer_config))


def runs(items: Iterable[Item]) -> list[tuple[str, Item]]:
    """Equal neighbours as one, with the range of their indices."""
    found = []
    for item, run in groupby(enumerate(items), key=lambda pair: pair[1]):
        first, *rest = (index for index, _ in run)
        found.append((f"{first}-{rest[-1]}" if rest else f"{first}", item))
    return found


def summary(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of what, before and after, for the printed table and the card."""

    def row(text: str, name: str, form: str) -> tuple[str, str, str]:
        before, after = report.get(f"{name}_before"), report.get(f"{name}_after", report.get(name))
        return text, *("" if value is None else format(value, form) for value in (before, after))  # type: ignore

    rows = [
        row(f"cache, bytes per token of the whole model ({report['dtype']})", "cache_bytes_per_token", ","),
        row("parameters", "parameters", ","),
    ]
    if report["tokens"]:
        rows += [
            row("perplexity", "perplexity", ".4f"),
            row("KL of the predictions from the source's, nats per token", "kl", ".3g"),
            row("same most likely token as the source", "top1_agreement", ".2%"),
        ]
    return rows


def layer_rows(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of layer, change, relative error of the attention output (blank where not measured), loss."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    return [
        (str(row["layer"]), f"{row['from']} → {row['to']}", number(row.get("error")), number(row.get("loss")))
        for row in report["layers"]
    ]


def describe_cost(report: dict[str, Any]) -> str:
    method = "exactly (the model computes the same function)" if report["exact"] else f"by `{report['method']}`"
    if report["candidates"]:
        method += f", of {len(report['candidates'])} settings the one with the least KL"
    text = report["text"]
    if not text:
        return f"Converted {method}, from the weights alone. Nothing was measured: no text was given."
    return (
        f"Converted {method}, calibrated on {text['calibration_tokens']:,} tokens. Measured in {report['dtype']} on "
        f"{report['tokens']:,} tokens in blocks of {text['sequence_length']} that neither calibration nor the choice "
        "of settings saw."
    )


def write_report(folder: Path, report: dict[str, Any]):
    """Save the report as `conversion.json`; raises ValueError for numbers that JSON cannot hold."""
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False)
    (folder / REPORT_NAME).write_text(text + "\n", encoding="utf-8")


def write_card(folder: Path, title: str, report: dict[str, Any], config: GQAConfig, source_card: Path | None = None):
    """Save the model card, with every number that was measured and the source's licence, where its card has one."""
    kinds = {layer.attention_kind for layer in config.per_layer_config}
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": sorted({"gqa", *kinds}),
        **kept_metadata(source_card),
    }
    source = Path(report["source"])
    if not source.exists():
        metadata["base_model"] = report["source"]
    layers = "\n".join(f"| {' | '.join(row)} |" for row in layer_rows(report))
    layers = f"| layer | attention | relative error of its output | loss |\n|---|---|---|---|\n{layers}"
    unnormed = any(layer.latent_norm is False for layer in config.per_layer_config)
    card = CARD.format(
        metadata=yaml_dump(metadata, sort_keys=False),
        title=title,
        # A card is for others: no path of this machine.
        source=f"`{source.resolve().name if source.exists() else source}`",
        change="; ".join(f"layers {where}: {what}" for where, what in describe_layers(config)),
        cost=describe_cost(report),
        table="\n".join(f"| {' | '.join(row)} |" for row in summary(report)),
        layers=layers,
        report=REPORT_NAME,
        runs=RUNS + (f"\n{NO_LATENT_NORM}" if unnormed else ""),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def kept_metadata(card: Path | None) -> dict[str, Any]:
    try:
        found = metadata_load(card) if card and card.is_file() else None
    except (ValueError, YAMLError):  # a card that is not well formed costs no conversion
        found = None
    return {name: found[name] for name in KEPT_METADATA if name in found} if found else {}
