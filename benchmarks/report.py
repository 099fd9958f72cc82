"""Tables on the terminal, results as JSON, and pictures."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

COLORS = {"mha": "tab:red", "gqa": "tab:orange", "mqa": "tab:green", "mla": "tab:blue"}


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

    cells = sorted({(row["dtype"], row["batch"]) for row in rows})
    figure = Figure(figsize=(4.2 * (len(cells) + bool(by_heads)), 3.8), layout="constrained")
    axes = figure.subplots(1, len(cells) + bool(by_heads), squeeze=False)[0]
    for axis, (dtype, batch) in zip(axes, cells, strict=False):
        for kind, color in COLORS.items():
            line = [row for row in rows if (row["dtype"], row["batch"], row["kind"]) == (dtype, batch, kind)]
            if not line:
                continue
            lengths = [row["length"] for row in line]
            axis.plot(lengths, [row["ours_ms"] for row in line], color=color, marker="o", markersize=3, label=kind)
            axis.plot(lengths, [row["theirs_ms"] for row in line], color=color, linestyle="--", linewidth=1)
        axis.set(xscale="log", yscale="log", title=f"{dtype}, batch {batch}", xlabel="context length (tokens)")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("milliseconds per token (dashed: transformers)")
    if by_heads:
        _plot_heads(axes[-1], by_heads)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}", flush=True)


def _plot_heads(axis, rows: list[dict]) -> None:
    heads = [row["key_value_heads"] for row in rows]
    axis.plot(heads, [row["ours_ms"] for row in rows], marker="o", markersize=3, label="whole step")
    axis.plot(heads, [row["theirs_ms"] for row in rows], linestyle="--", linewidth=1, label="Llama, whole step")
    axis.plot(heads, [row["attention_ms"] for row in rows], marker="s", markersize=3, label="attention of all layers")
    first = rows[0]
    title = f"{first['dtype']}, batch {first['batch']}, {first['length']} tokens"
    axis.set(xscale="log", yscale="log", title=title, xlabel="key/value heads", xticks=heads, xticklabels=heads)
    axis.minorticks_off()
    axis.legend(fontsize=8)
