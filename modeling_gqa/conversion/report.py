"""The report of a conversion: `conversion.json`, tables and the model card; and which kernels of vLLM run a model."""

import json
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
from .targets import describe_layers

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
    "for memory alone, quantize the source's cache (modeling-gqa quantize-cache --cache-share 0.2): on two real models "
    "that lost far less than a conversion to a quarter. No engine but generate reads it; --kv-cache-dtype fp8 in vLLM "
    "keeps half. A conversion is for faster decoding, to train on from and, its own cache rounded too (--cache-bits "
    "auto), for a seventh of the bytes or less"
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

{cost}

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


def before_and_after(
    report: Report, text: str, name: str, form: Callable[[Any], str], size: bool = False
) -> tuple[str, ...]:
    """Return a row of `summary`: what was measured under `name`, of a size also the share of the source's."""
    before: Any = report.get(f"{name}_before")
    after: Any = report.get(f"{name}_after", report.get(name))
    # The KL of an exact conversion may be rounded to less than zero.
    cells = ("" if value is None else form(max(value, 0)) for value in (before, after))
    return text, *cells, share(after, before) if size and after is not None else ""


def losses(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of what `compare_predictions` measures."""
    return [
        before_and_after(report, "perplexity", "perplexity", "{:.4f}".format),
        before_and_after(report, "KL of the predictions from the source's, nats per token", "kl", "{:.3g}".format),
        before_and_after(report, "same most likely token as the source", "top1_agreement", "{:.2%}".format),
    ]


def summary(report: Report) -> Table:
    """Return what was measured before and after."""
    itemsize = getattr(torch, report["dtype"]).itemsize

    def size(text: str, name: str) -> tuple[str, ...]:
        return before_and_after(report, text, name, lambda size: cached(size, itemsize), size=True)

    rows = [size(f"cache of the whole model per token, bytes (numbers), {report['dtype']}", "cache_bytes_per_token")]
    if "mean_cache_bytes_per_token_before" in report:
        rows.append(
            size("the same at full length, of which a window keeps its last tokens", "mean_cache_bytes_per_token")
        )
    rows.append(before_and_after(report, "parameters", "parameters", "{:,}".format, size=True))
    return Table(["", "before", "after", "of the source's"], rows + (losses(report) if report["tokens"] else []))


def layers_table(report: Report) -> Table:
    """Return a row for each layer: its change, the relative error of its output ("" where not measured), its loss."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    rows = [
        (str(row["layer"]), f"{row['from']} → {row['to']}", number(row.get("error")), number(row.get("loss")))
        for row in report["layers"]
    ]
    return Table(["layer", "attention", "relative error of its output", "loss"], rows, words=2)


def cost_table(report: Report) -> Table:
    """Return how the model was converted: the method, the layers that keep what was tried, and the tokens used."""
    lossy = [row for row in report["layers"] if row["from"] != row["to"] and row.get("loss") != 0]
    setting, text, polished = report["setting"] or {}, report["text"] or {}, report["polish"] or {}
    rest = "the same function" if report["exact"] else "then its cache rounded"
    method = f"exact, {rest}" if report["method"] == "exact" else report["method"]

    def layers(name: str, tried: bool) -> str | None:
        kept = sum(row[name] is not None and row[name] is not False for row in lossy)
        return f"{kept} of {len(lossy)}" if tried else None

    rows = {
        "method": method,
        "sizes and settings tried": len(report["candidates"]) or None,
        "layers with gradient steps": layers("learning_rate", setting.get("refine")),
        "layers with an output fit": layers("ridge", setting.get("refit")),
        "layers with a mean key": layers("key_mean", any(row["key_mean"] for row in lossy)),
        "KL of the source with its cache rounded to as many bytes, without training": report.get("kl_source_quantized"),
        "tokens trained on at the end": polished.get("tokens"),
        "KL before that": polished.get("kl_before"),
        "KL after that": polished.get("kl_after"),
        "tokens of calibration": text.get("calibration_tokens"),
        "tokens of measuring": report["tokens"] or "none: nothing was measured",
        "tokens of each sequence": text.get("sequence_length"),
    }

    def shown(value: Any) -> str:
        return value if isinstance(value, str) else format(value, "," if isinstance(value, int) else ".3g")

    cells = [(name, shown(value)) for name, value in rows.items() if value is not None]
    return Table(["how it was converted", ""], cells)


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
    source, metadata = cards.made_from(report["source"], source_card, config)
    serving = [*report["serving"], *([NOT_SERVED] if "kl_source_quantized" in report else [])]
    tokenizer = TOKENIZER.format(title=title) if (folder / "tokenizer_config.json").is_file() else "\n"
    text = CARD.format(
        tokenizer=tokenizer,
        title=title,
        source=source,
        change=describe_layers(config),
        cost=cost_table(report).to_markdown(),
        table=summary(report).to_markdown(),
        layers=layers_table(report).to_markdown(),
        report=REPORT_NAME,
        runs=RUNS + cards.serving_note(config) + "\n\n" + "\n".join(f"- {line}" for line in serving),
    )
    cards.write_card(folder, metadata, text)
