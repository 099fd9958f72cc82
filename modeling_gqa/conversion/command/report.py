"""The report of a conversion: its type, its rows as they are printed, the file `conversion.json` and the model card."""

import json
import platform
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
import transformers

from ... import __version__
from ...common import cards
from ...common.results import write_json
from ...common.tables import Table, cached, share
from ...configuration_gqa import GQAConfig

Item = TypeVar("Item")
REPORT_NAME = "conversion.json"
# A conversion that changes the predictions by more, in nats per token, ends in a warning; a KL of 0.1 raises the
# perplexity by about a tenth.
MUCH_KL = 0.1
MANY_PASSES = 4
# Raised when an entry changes its meaning; new entries do not raise it. A file without it is of version 1.
FORMAT_VERSION = 1

# One layer: its index; its attention before and after, such as "gqa, 2 of 8 heads" or "mla, 32 + 16" (R + P); the
# squared error that its conversion minimises, estimated (0 exact, None unknown or unchanged); the learning rate of its
# gradient steps and the ridge of the fit of its output projection (None where they did not lower the error on text that
# they had not seen, or were not tried); and, where there is text, the relative error of its attention output, measured.
LayerReport = TypedDict(
    "LayerReport",
    {
        "layer": int,
        "from": str,
        "to": str,
        "loss": float | None,
        "learning_rate": float | None,
        "ridge": float | None,
        "error": float,
    },
    total=False,
)


class TextReport(TypedDict, total=False):
    """The text that a conversion used."""

    files: list[str]  # names of the files and folders given as --text
    evaluation_files: list[str]  # and as --evaluation-text
    sequence_length: int  # tokens of a block
    calibration_tokens: int  # tokens used; absent where the conversion is exact
    selection_tokens: int
    evaluation_tokens: int


class Candidate(TypedDict):
    """A setting that was tried."""

    name: str  # its fields, as "name=value ..."
    kl: float  # KL(source || candidate) on the selection text, nats per token


class Report(TypedDict, total=False):
    """What `conversion.json` holds. A number that was not measured is None."""

    format_version: int  # FORMAT_VERSION
    source: str  # name of the source's folder, or on the Hub
    source_family: str  # the `model_type` of the source
    dtype: str  # of the result, such as "bfloat16"
    device: str  # that computed it, such as "cuda"
    cache_bytes_per_token_before: int  # of the whole model, in `dtype`
    cache_bytes_per_token_after: int | None
    parameters_before: int
    parameters_after: int | None
    perplexity_before: float | None  # on the evaluation text
    perplexity_after: float | None
    kl: float | None  # KL(source || result) on the evaluation text, nats per token
    top1_agreement: float | None  # share of tokens with the same most likely next token, 0 to 1
    tokens: int  # predicted for these measurements; 0 without text
    serving: list[str]  # lines on what it costs and which engines run it on what
    text: TextReport | None
    command: dict[str, Any]  # the options, as `Options.as_json`
    versions: dict[str, str]  # of modeling_gqa, transformers, torch and python
    exact: bool  # whether the result computes the source's function
    method: str  # "exact", or how heads were merged
    setting: dict[str, Any] | None  # the chosen setting, as `Setting.as_json`; None where exact
    layers: list[LayerReport]
    candidates: list[Candidate]  # settings that "auto" tried
    seconds: dict[str, float]  # wall time by step


CARD = """# {title}

{source} with its attention changed by `modeling_gqa`, without training: {change}.

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


def describe_layer(layer: GQAConfig) -> str:
    """Return a layer's attention in words, such as `gqa, 8 query heads, 2 key/value heads of 64`.

    Args:
        layer: one of `config.per_layer_config`.
    """
    heads = f"{layer.num_attention_heads} query heads"
    if layer.attention_kind == "mla":
        norm = ", qk-norm" if layer.qk_norm else "" if layer.latent_norm else ", no latent norm"
        return f"mla, {heads}, a latent of {layer.kv_lora_rank} and a rotary key of {layer.qk_rope_head_dim}{norm}"
    norm = ", qk-norm" if layer.qk_norm else ""
    return f"{layer.attention_kind}, {heads}, {layer.num_key_value_heads} key/value heads of {layer.head_dim}{norm}"


def describe_layers(config: GQAConfig) -> list[tuple[str, str]]:
    """Return runs of equal layers and their attention, `[("0-2", "mha, ..."), ("3", "gqa, ...")]`."""
    return runs(map(describe_layer, config.per_layer_config))


def runs(items: Iterable[Item]) -> list[tuple[str, Item]]:
    """Return equal neighbours as one, each after the range of their indices."""
    found = []
    for item, run in groupby(enumerate(items), key=lambda pair: pair[1]):
        first, *rest = (index for index, _ in run)
        found.append((f"{first}-{rest[-1]}" if rest else f"{first}", item))
    return found


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
    """Return how the model was converted and measured, in one or two sentences."""
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
        f"Converted {method}, calibrated on {text['calibration_tokens']:,} tokens. {describe_kept(report)}{measured} "
        "that neither calibration nor the choice of settings saw."
    )


def describe_kept(report: Report) -> str:
    """Return in how many layers gradient steps and the fit were kept, if either was tried."""
    lossy = [row for row in report["layers"] if row["from"] != row["to"] and row.get("loss") != 0]
    counts = [
        f"{what} in {sum(row[number] is not None for row in lossy)}"  # type: ignore[literal-required]
        for name, what, number in (
            ("refine", "gradient steps", "learning_rate"),
            ("refit", "the fit of the output projection", "ridge"),
        )
        if (report["setting"] or {}).get(name)
    ]
    if not counts:
        return ""
    return f"Kept, of {len(lossy)} layers, where it lowered the error on held-out text: {', '.join(counts)}. "


def warning(report: Report) -> str | None:
    """Return what a user should know and can do where the predictions changed by more than `MUCH_KL`, or may have."""
    if report["text"] is None and not report["exact"]:
        return (
            "the weights alone decided, and nothing was measured. This can lose nearly all that a model knows; "
            "with --text much less is lost, and it is measured"
        )
    if report["kl"] is None or report["kl"] <= MUCH_KL:
        return None
    command, ways = report["command"], ["a larger cache", "fewer layers (--layers)"]
    if command["budget"] is None and command["attention_kind"] in ("gqa", "mla"):
        ways.append("sizes by layer (--budget)")
    passes = (report["setting"] or {}).get("refine", 0)
    if passes == 0 or (passes < MANY_PASSES and any(row["learning_rate"] for row in report["layers"])):
        ways.append(f"more passes over the text (--refine {MANY_PASSES})")
    if command["refit"] is False:
        ways.append("fitted output projections (without --no-refit)")
    return (
        f"the predictions changed much: KL {report['kl']:.3g} nats per token, more than {MUCH_KL}, and perplexity "
        f"{report['perplexity_before']:.4g} became {report['perplexity_after']:.4g}. Nearer to the source come "
        f"{', '.join(ways)}; or heal the result by training: modeling-gqa uptrain"
    )


def versions() -> dict[str, str]:
    """Return the versions of the software that a report names."""
    return {
        "modeling_gqa": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_report(folder: Path, report: Report) -> None:
    """Save the report as `conversion.json`; raises ValueError for numbers that JSON cannot hold."""
    json.dumps(report, allow_nan=False)  # a conversion that has come to nan is no result
    write_json(folder / REPORT_NAME, report)


def write_card(folder: Path, title: str, report: Report, config: GQAConfig, source_card: Path | None = None) -> None:
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
    tokenizer = TOKENIZER.format(title=title) if (folder / "tokenizer_config.json").is_file() else "\n"
    text = CARD.format(
        tokenizer=tokenizer,
        title=title,
        # A card is for others: no path of this machine.
        source=f"`{source.resolve().name if source.exists() else source}`",
        change="; ".join(f"layers {where}: {what}" for where, what in describe_layers(config)),
        cost=describe_cost(report),
        table=summary(report).to_markdown(),
        layers=layers_table(report).to_markdown(),
        report=REPORT_NAME,
        runs=RUNS + cards.serving_note(config) + "\n\n" + "\n".join(f"- {line}" for line in report["serving"]),
    )
    cards.write_card(folder, metadata, text)
