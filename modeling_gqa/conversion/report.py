"""What a conversion did and cost: printed, saved as JSON, and the model card."""

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import metadata_load
from huggingface_hub.utils import yaml_dump
from yaml import YAMLError

from ..configuration_gqa import GQAConfig
from .files import within, write_text

Item = TypeVar("Item")
REPORT_NAME = "conversion.json"
# What the source's card says that holds for the converted model too.
KEPT_METADATA = ("license", "license_name", "license_link", "language", "datasets")

CARD = """---
{metadata}---

# {title}

{source} with its attention changed by `modeling_gqa`, without training: {change}.

```python
from transformers import AutoModelForCausalLM{tokenizer}
model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
```

The model's code is in this repository, hence `trust_remote_code=True`; pin what you have read with `revision=`.

## What the conversion cost

{cost}

| | before | after |
|---|---|---|
{table}

{layers}

A layer's loss is what its conversion minimises: the squared error that other keys and values bring into its output,
estimated on its own. It compares ways to convert a layer; layers are compared by the error, which is measured.

`{report}` holds all of this, the candidates that were tried, and the command.

## Where it runs

{runs}

The model's code is licensed under Apache-2.0; what the source's licence and card say of its weights holds for these.
"""
TOKENIZER = """, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)"""
RUNS = "transformers 5.17 or newer, below 6, with or without `modeling_gqa` installed."
NO_LATENT_NORM = """
vLLM does not recognise this model's MLA: it tells MLA by an RMSNorm after `kv_a_proj_with_mqa`, which a converted model
does not have (no linear map can match it), so it serves the model as plain attention and caches all keys and values."""


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
    measured = f"Measured in {report['dtype']} on {report['tokens']:,} tokens in blocks of {text['sequence_length']}"
    if report["exact"]:
        return f"Converted {method}. {measured}."
    return (
        f"Converted {method}, calibrated on {text['calibration_tokens']:,} tokens. {measured} that neither calibration "
        "nor the choice of settings saw."
    )


def write_report(folder: Path, report: dict[str, Any]):
    """Save the report as `conversion.json`; raises ValueError for numbers that JSON cannot hold."""
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False)
    write_text(folder / REPORT_NAME, text + "\n")


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
    tokenizer = TOKENIZER.format(title=title) if (folder / "tokenizer_config.json").is_file() else "\n"
    card = CARD.format(
        tokenizer=tokenizer,
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
    write_text(folder / "README.md", card)


def kept_metadata(card: Path | None) -> dict[str, Any]:
    try:
        found = metadata_load(within(card.parent, card)) if card and card.is_file() else None
    except (ValueError, YAMLError, OSError, RecursionError):  # a card that is not well formed costs no conversion
        found = None
    return {name: found[name] for name in KEPT_METADATA if name in found} if found else {}
