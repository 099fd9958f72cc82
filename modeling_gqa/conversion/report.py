"""The report of a conversion: `conversion.json`, tables and the model card; and which kernels of vLLM run a model."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modeling_gqa_vllm.kernels import CPU_HEADS, FAST_SUMS, grouped_kernel, is_mistaken, latent_kernels, stored

from ..common import cards
from ..common.atomic import write_json
from ..common.tables import Table, cached, runs, share
from ..configuration_gqa import GQAConfig
from ..costs import CostedModel
from .targets import describe

REPORT_NAME = "conversion.json"
# Raised when an entry changes its meaning; new entries do not raise it.
FORMAT_VERSION = 1
# Nats per token beyond which a conversion ends in a warning; a KL of 0.1 raises the perplexity by about a tenth.
MUCH_KL = 0.1
MUCH = (
    f"KL is more than {MUCH_KL} nats per token. Less is lost with a larger cache, fewer layers (--layers), sizes by "
    "layer (--budget) and more training at the end (--polish TOKENS); or train the result: modeling-gqa uptrain"
)
UNMEASURED = (
    "the weights alone decided, and nothing was measured. This can lose nearly all that a model knows; with --text "
    "much less is lost, and it is measured. If you have no text, modeling-gqa write-text lets the source write it"
)
QUANTIZED = (
    "for memory alone, quantize the source's cache: modeling-gqa quantize-cache --cache-share 0.2 keeps a fifth of its "
    "bytes at a KL of 0.03 (SmolLM2-135M) and 0.02 (Qwen2.5-Coder-0.5B), where conversions to a quarter have 0.33 and "
    "0.82; --kv-cache-dtype fp8 in vLLM keeps half. No engine but generate reads the fifth. A conversion is for faster "
    "decoding, to train on from and, its own cache rounded too (--cache-bits auto), for a seventh of the bytes or less"
)
ROUNDED_SOURCE = "the source with its cache rounded to as many bytes, without training, has a KL of {:.3g}"
NOT_SERVED = (
    "No engine but generate rounds this cache. Others keep it whole: the bytes and the KL above do not hold there."
)
NEEDED = (
    "vLLM needs this package beside it for MLA. Without it vLLM caches expanded keys and values, and refuses MLA whose "
    "layers differ or that keeps a mean key. With --kv-cache-dtype fp8 it halves MLA's cache: on CPUs, on GPUs by "
    "Triton from Ada on, by FlashMLA, FlashInfer and cutlass. What quantize-cache saves is for generate alone."
)

# What `conversion.json` holds; `docs/converting.md` says what each field means. A number not measured is None.
Report = dict[str, Any]


CARD = """# {title}

{source} with its attention changed by `modeling_gqa`: {change}.

```python
from transformers import AutoModelForCausalLM{tokenizer}
model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
```

The model's code is in this repository, hence `trust_remote_code=True`; pin what you have read with `revision=`.

## What the conversion cost

{cost}.

{table}

{layers}

A layer's loss is what its conversion minimises: an estimate of the squared error in the layer's output. It compares
ways to convert the same layer. To compare layers, use the error, which is measured.

`{report}` holds all of this, the candidates that were tried, and the command.

## Where it runs

{runs}

The model's code is licensed under Apache-2.0; what the source's licence and card say of its weights holds for these.
"""
TOKENIZER = """, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)"""
RUNS = "transformers 5.17 or newer, below 6, with or without `modeling_gqa` installed."


def vllm_kernels(config: GQAConfig) -> list[str]:
    """Return a line for each run of equal layers: which of vLLM's kernels run it on GPUs, and whether a CPU does."""
    layers = CostedModel(config).layers
    lines = [f"vLLM, layers {where}: {how}." for where, how in runs(map(layer_kernels, layers))]
    return [*lines, NEEDED] if any(layer.config.attention_kind == "mla" for layer in layers) else lines


def layer_kernels(layer: Any) -> str:
    """Return what `vllm_kernels` says of one of `CostedModel.layers`; on a CPU MLA is this package's."""
    config, limits = layer.config, []
    if config.attention_kind != "mla":
        return f"GPUs: {grouped_kernel(config)}; CPU: {'yes' if config.head_dim in CPU_HEADS else 'no'}"
    # vLLM has no window over the latent.
    kernels = [] if layer.window is not None else latent_kernels(config)
    names = [" on ".join([kernel.name, *filter(None, [" and ".join(kernel.devices)])]) for kernel in kernels]
    if kernels and is_mistaken(config):
        limits.append("with --attention-backend TRITON_MLA")
    if kernels and config.kv_lora_rank + stored(config).qk_rope_head_dim not in FAST_SUMS:
        limits.append("without cached prefixes and prompts in chunks")
    if more := stored(config).qk_rope_head_dim - config.qk_rope_head_dim:
        limits.append(f"with {more} numbers more in the cache, {'for the mean key' if config.key_mean else 'zeros'}")
    return f"GPUs: {', '.join(names) or 'none'}{''.join(f', {limit}' for limit in limits)}; CPU: yes"


def summary(report: Report) -> Table:
    """Return what was measured before and after."""

    def row(text: str, name: str, form: Callable[[Any], str], size: bool = False) -> tuple[str, ...]:
        before: Any = report.get(f"{name}_before")
        after: Any = report.get(f"{name}_after", report.get(name))
        # The KL of an exact conversion may be rounded to less than zero.
        cells = ("" if value is None else form(max(value, 0)) for value in (before, after))
        return text, *cells, share(after, before) if size and after is not None else ""

    itemsize = getattr(torch, report["dtype"]).itemsize
    whole = f"cache of the whole model per token, bytes (numbers), {report['dtype']}"
    rows = [
        row(whole, "cache_bytes_per_token", lambda size: cached(size, itemsize), size=True),
        row("parameters", "parameters", "{:,}".format, size=True),
    ]
    if "mean_cache_bytes_per_token_before" in report:
        name = "the same at full length, of which a window keeps its last tokens"
        rows.insert(1, row(name, "mean_cache_bytes_per_token", lambda size: cached(size, itemsize), size=True))
    if report["tokens"]:
        rows += [
            row("perplexity", "perplexity", "{:.4f}".format),
            row("KL of the predictions from the source's, nats per token", "kl", "{:.3g}".format),
            row("same most likely token as the source", "top1_agreement", "{:.2%}".format),
        ]
    return Table(["", "before", "after", "of the source's"], rows)


def layers_table(report: Report) -> Table:
    """Return a row for each layer: its change, the relative error of its output ("" where not measured), its loss."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    rows = [
        (str(row["layer"]), f"{row['from']} → {row['to']}", number(row.get("error")), number(row.get("loss")))
        for row in report["layers"]
    ]
    return Table(["layer", "attention", "relative error of its output", "loss"], rows, words=2)


def describe_cost(report: Report) -> str:
    """Return how the model was converted, as names and numbers: the method, what was kept, and the tokens used."""
    parts = [f"Method: {'exact, the same function' if report['exact'] else report['method']}"]
    if report["candidates"]:
        parts.append(f"sizes and settings tried: {len(report['candidates'])}")
    lossy = [row for row in report["layers"] if row["from"] != row["to"] and row.get("loss") != 0]
    setting, text = report["setting"] or {}, report["text"]
    for name, what, number in (("refine", "gradient steps", "learning_rate"), ("refit", "output fits", "ridge")):
        if setting.get(name):
            kept = sum(row[number] is not None for row in lossy)
            parts.append(f"{what} kept in {kept} of {len(lossy)} layers")
    for name in ("gain", "alpha"):
        if counts := Counter(row[name] for row in lossy if row[name] is not None):
            parts.append(f"{name} {', '.join(f'{value:g} in {n}' for value, n in sorted(counts.items()))} layers")
    if kept := sum(bool(row["key_mean"]) for row in lossy):
        parts.append(f"mean key kept in {kept} layers")
    if "kl_source_quantized" in report:
        parts.append("cache rounded, with bits by layer and channel")
        if (kl := report["kl_source_quantized"]) is not None:
            parts.append(ROUNDED_SOURCE.format(kl))
    if polished := report["polish"]:
        found = "{kl_before:.3g} to {kl_after:.3g} on text held out".format(**polished)
        parts.append(f"polished on {polished['tokens']:,} tokens, KL {found}")
    if not text:
        return "; ".join([*parts, "no text, so nothing was measured"])
    if "calibration_tokens" in text:
        parts.append(f"calibrated on {text['calibration_tokens']:,} tokens")
    return "; ".join(
        [*parts, f"measured on {report['tokens']:,} others, in sequences of {text['sequence_length']:,} tokens"]
    )


def warning(report: Report) -> str | None:
    """Return `UNMEASURED` or `MUCH` where a user should read one of them."""
    if report["text"] is None and not report["exact"]:
        return UNMEASURED
    return MUCH if (report["kl"] or 0) > MUCH_KL else None


def advice(report: Report) -> str | None:
    """Return what loses less for memory alone: `QUANTIZED`, or with a rounded cache the source's own, if it does."""
    if report["command"]["cache_bits"]:
        kl = report.get("kl_source_quantized")
        better = kl is not None and kl < report["kl"]
        less = ": quantize-cache gives it, and loses less for memory alone" if better else ""
        return kl if kl is None else ROUNDED_SOURCE.format(kl) + less
    before, after = (report[f"cache_bytes_per_token_{when}"] for when in ("before", "after"))
    smaller = after is None or after < before
    return QUANTIZED if smaller and not report["exact"] else None


def write_report(folder: Path, report: Report) -> None:
    """Save the report as `conversion.json`; raises ValueError for numbers that JSON cannot hold."""
    json.dumps(report, allow_nan=False)  # a conversion that has come to nan is no result
    write_json(folder / REPORT_NAME, report)


def write_conversion_card(
    folder: Path, title: str, report: Report, config: GQAConfig, source_card: Path | None = None
) -> None:
    """Save the model card, with every number that was measured.

    Args:
        folder: of the converted checkpoint.
        title: name of the repository.
        report: of the conversion, with the source as it was given: one on the Hub becomes the card's `base_model`.
        config: of the converted model.
        source_card: the source's card, whose licence, language and datasets are kept.
    """
    source = Path(report["source"])
    base = cards.base_metadata(None if source.exists() else report["source"])
    metadata = cards.card_metadata(config) | cards.kept_metadata(source_card) | base
    serving = [*report["serving"], *([NOT_SERVED] if "kl_source_quantized" in report else [])]
    tokenizer = TOKENIZER.format(title=title) if (folder / "tokenizer_config.json").is_file() else "\n"
    text = CARD.format(
        tokenizer=tokenizer,
        title=title,
        # A card is for others: no path of this machine.
        source=f"`{source.resolve().name if source.exists() else source}`",
        change="; ".join(f"layers {where}: {what}" for where, what in runs(map(describe, config.per_layer_config))),
        cost=describe_cost(report),
        table=summary(report).to_markdown(),
        layers=layers_table(report).to_markdown(),
        report=REPORT_NAME,
        runs=RUNS + cards.serving_note(config) + "\n\n" + "\n".join(f"- {line}" for line in serving),
    )
    cards.write_card(folder, metadata, text)
