"""Tables on the terminal, results as JSON, and pictures."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

COLORS = {"mha": "tab:red", "gqa": "tab:orange", "mqa": "tab:green", "mla": "tab:blue"}


def parse_arguments(*dataclasses: Any) -> tuple:
    """The command line as one instance of each dataclass."""
    return HfArgumentParser(dataclasses).parse_args_into_dataclasses()


def print_machine(machine: dict) -> None:
    rates = ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in machine["matmul_gflop_s"].items())
    print(f"{machine['machine']}; torch {machine['torch']}; load before {machine['load_before']:.1f}")
    print(f"measured: read {machine['read_gb_s']:.1f} GB/s, products {rates}", flush=True)


def print_table(title: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Print `rows`; `columns` gives each shown key its format, as in `{"ratio": ".2f"}`."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        cells = (format(row[key], form) if row.get(key) is not None else "" for key, form in columns.items())
        table.add_row(*cells)
    Console(width=200 if not Console().is_terminal else None).print(table)


def save(output: str, name: str, command: str, machine: dict, **results) -> None:
    """Write `OUTPUT/NAME.json`: the command, the machine as measured, and lists of rows."""
    path = Path(output) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": machine, **results}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)


def plot_decode(rows: list[dict], by_heads: list[dict], path: Path) -> None:
    """Milliseconds per token against context length by kind, and against the number of key/value heads."""
    from matplotlib.figure import Figure

    cells = sorted({(row["dtype"], row["batch"]) for row in rows}, key=lambda cell: (cell[0] != "float32", cell[1]))
    panels = len(cells) + bool(by_heads)
    figure = Figure(figsize=(12, 4 * -(-panels // 3)), layout="constrained")
    axes = figure.subplots(-(-panels // 3), 3, squeeze=False).flatten()
    for axis, (dtype, batch) in zip(axes, cells, strict=False):
        for kind, color in COLORS.items():
            line = [row for row in rows if (row["dtype"], row["batch"], row["kind"]) == (dtype, batch, kind)]
            lengths = [row["length"] for row in line]
            axis.plot(lengths, [row["ours_ms"] for row in line], color=color, marker="o", markersize=3, label=kind)
            axis.plot(lengths, [row["theirs_ms"] for row in line], color=color, linestyle="--", linewidth=1)
        _scale(axis, f"{dtype}, batch {batch}", "context length (tokens)", sorted({row["length"] for row in rows}))
    if by_heads:
        first, heads = by_heads[0], [row["key_value_heads"] for row in by_heads]
        for key, label, style in (
            ("ours_ms", "whole step", "o-"),
            ("theirs_ms", "whole step, Llama", "--"),
            ("attention_ms", "attention of all layers", "s-"),
        ):
            axes[len(cells)].plot(heads, [row[key] for row in by_heads], style, markersize=3, label=label)
        title = f"{first['dtype']}, batch {first['batch']}, {first['length']} tokens"
        _scale(axes[len(cells)], title, "key/value heads", heads)
    for axis in axes[panels:]:
        axis.remove()
    figure.supylabel("milliseconds per token (dashed: transformers)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"wrote {path}", flush=True)


def _scale(axis, title: str, label: str, ticks: list[int]) -> None:
    """Logarithmic axes with the measured numbers on the horizontal one, and plain numbers on the vertical one."""
    axis.set(xscale="log", yscale="log", title=title, xlabel=label)
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axis.xaxis.set_tick_params(which="minor", bottom=False, labelbottom=False)
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    axis.legend(fontsize=8)
