"""Tables on the terminal, results as JSON, and pictures.

    python -m benchmarks.report

draws the documentation's pictures from `benchmarks/results`, and prints the documentation's tables as Markdown.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from transformers import HfArgumentParser

from modeling_gqa.common.atomic import write_json
from modeling_gqa.common.pictures import COLORS, line_styles, name_lines, new_figure, tidy
from modeling_gqa.common.pictures import save as save_picture
from modeling_gqa.common.tables import Table

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
RESULTS = Path("benchmarks/results")
PICTURE = Path("docs/assets/decode_mla.png")
UPTRAINING_PICTURE = Path("docs/assets/uptraining.png")
# Pictures of what smaller caches lose, by the results of quantized caches and of conversions.
CACHES = {
    ("quantized_cache", "real_conversion"): Path("docs/assets/cache_smollm2.png"),
    ("quantized_qwen", "real_conversion_qwen"): Path("docs/assets/cache_qwen.png"),
}
# The cells of the documentation's table of decoding: dtype, batch, length.
DECODE_CELLS = [
    ("float32", 1, 128), ("float32", 1, 4096), ("float32", 8, 2048), ("float32", 8, 8192),
    ("bfloat16", 1, 4096), ("bfloat16", 8, 2048), ("bfloat16", 8, 8192),
]  # fmt: skip
GPU_CELLS = [("bfloat16", 1, 2048), ("bfloat16", 1, 32768), ("bfloat16", 8, 2048), ("bfloat16", 8, 32768)]


def parse_arguments(*dataclasses: Any) -> tuple:
    """The command line as one instance of each dataclass."""
    return kebab_shown(HfArgumentParser(dataclasses)).parse_args_into_dataclasses()


def kebab_shown(parser: Parser) -> Parser:
    """Make help and errors show `--batch-sizes` alone; `--batch_sizes` is accepted where it was declared."""
    for action in parser._actions:
        action.option_strings = [name for name in action.option_strings if "_" not in name]
    return parser


def print_machine(machine: dict) -> None:
    rates = ", ".join(f"{dtype} {rate:.0f} GFLOP/s" for dtype, rate in machine["matmul_gflop_s"].items())
    print(f"{machine['machine']}; torch {machine['torch']}; load before {machine['load_before']:.1f}")
    print(f"measured: read {machine['read_gb_s']:.1f} GB/s, products {rates}", flush=True)


def print_table(title: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Print `rows`; `columns` gives each shown key its format, as in `{"ratio": ".2f"}`."""
    cells = [
        [format(row[key], form) if row.get(key) is not None else "" for key, form in columns.items()] for row in rows
    ]
    table = Table([column.replace("_", " ") for column in columns], cells, title=title, words=0)
    Console(width=200 if not Console().is_terminal else None).print(table.to_rich())


def save(output: str, name: str, command: str, machine: dict, **results) -> None:
    """Write `OUTPUT/NAME.json`: the command, the machine as measured, and lists of rows."""
    path = Path(output) / f"{name}.json"
    write(path, command, machine, **results)
    print(f"wrote {path}", flush=True)


def write(path: Path, command: str, machine: dict, **results) -> None:
    """Write what `save` does to `path`, and say nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"command": command, "machine": machine, **results})


class ResultRows(list[dict]):
    """The rows of a file of results, of this run and of earlier ones with the same settings; others are refused.

    Args:
        path: of the file.
        key: fields by which rows differ; a row that is put again replaces the old one.
        settings: what all rows have in common, if anything.
        order: by which they are sorted; `None`: as they came.
    """

    def __init__(
        self, path: Path, key: Sequence[str], settings: dict | None = None, order: Callable[[dict], Any] | None = None
    ) -> None:
        self.path, self.key, self.order = path, key, order
        self.content = {"settings": settings} if settings else {}
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else self.content | {"rows": []}
        if stored.get("settings") != settings:
            sys.exit(f"{path} holds rows of {stored.get('settings')}, not of {settings}: name another file")
        super().__init__(stored["rows"])

    def has(self, values: dict) -> bool:
        """Whether a row has all of `values`."""
        return any(values.items() <= row.items() for row in self)

    def put(self, row: dict, command: str, machine: dict) -> None:
        """Add a row and write the file."""
        self[:] = [*(old for old in self if any(old[name] != row[name] for name in self.key)), row]
        if self.order:
            self.sort(key=self.order)
        write(self.path, command, machine, **self.content, rows=self)


def _scale(axis, title: str, label: str, ticks: list) -> None:
    """Logarithmic axes with the measured numbers on the horizontal one, and plain numbers on the vertical one."""
    axis.set(xscale="log", yscale="log", title=title, xlabel=label)
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axis)


# -- the documentation's picture and tables


def plot_mla(rows: list[dict], path: Path) -> None:
    """Milliseconds per token of MLA here and of DeepSeek-V3 in transformers against context length, in bfloat16."""
    figure = new_figure(figsize=(7.2, 2.9))
    for axis, batch in zip(figure.subplots(1, 2), (1, 8), strict=True):
        line = [row for row in rows if (row["kind"], row["dtype"], row["batch"]) == ("mla", "bfloat16", batch)]
        lengths, last = [row["length"] for row in line], line[-1]
        for key, style, color, name, place in (
            ("theirs_ms", "s--", "tab:gray", "DeepSeek-V3, transformers", (-2, 6)),
            ("ours_ms", "o-", COLORS["mla"], "MLA, here", (-2, -12)),
        ):
            axis.plot(lengths, [row[key] for row in line], style, color=color)
            middle = len(line) // 2
            where = {"textcoords": "offset points", "ha": "right" if place[1] > 0 else "left"}
            axis.annotate(name, (lengths[middle], line[middle][key]), place, **where, color=color, fontsize=8)
        x, low, high = last["length"], last["ours_ms"], last["theirs_ms"]
        axis.annotate("", (x, low), (x, high), arrowprops={"arrowstyle": "<->", "shrinkA": 5, "shrinkB": 5})
        axis.text(0.93 * x, 1.4 * low, f"{last['ratio']:.2g} times as fast", ha="right", va="center")
        _scale(axis, f"{batch} row{'s' * (batch > 1)} at a time", "tokens in the context", lengths)
    figure.supylabel("milliseconds per token", fontsize=10)
    save_picture(figure, path)
    print(f"wrote {path}", flush=True)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return Table(header, rows).to_markdown()


def times(value: float) -> str:
    """A ratio with two digits: 0.99, 5.9 or 93."""
    return f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f}x"


def decode_table(rows: list[dict], wanted: list[tuple[str, int, int]]) -> str:
    """Milliseconds per token, ours / theirs (ratio), of the cells that are `wanted`."""
    found = {(row["kind"], row["dtype"], row["batch"], row["length"]): row for row in rows}
    short = {"float32": "fp32", "bfloat16": "bf16"}
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = [found[key] for key in ((kind, *cell) for cell in wanted)]
        heads = f"-{cells[0]['key_value_heads']}" if kind == "gqa" else ""
        shown = (f"{digits(c['ours_ms'])} / {digits(c['theirs_ms'])} ({times(c['ratio'])})" for c in cells)
        lines.append([f"{kind.upper()}{heads}, {cells[0]['baseline']}", *shown])
    return markdown(["against", *(f"{short[d]} B{b} S{s}" for d, b, s in wanted)], lines)


def digits(milliseconds: float) -> str:
    return f"{milliseconds:.{1 if milliseconds < 9.95 else 0}f}"


def serving_table(rows: list[dict]) -> str:
    """Bytes per token, requests that fit, and new tokens per second (ratio) by system and number of requests."""
    found = {(row["system"], row["requests"]): row for row in rows}
    systems, counts = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    least = min(row["gflop"] for row in rows if row["requests"] == counts[-1])
    lines = []
    for system in systems:
        cells = [found[system, count] for count in counts]
        rates = (f"{cell['tokens_per_second']:.1f} ({times(cell['ratio'])})" for cell in cells)
        last = cells[-1]
        lines.append([system, f"{last['bytes_per_token']:,}", str(last["fit"]), times(last["gflop"] / least), *rates])
    header = ["", "bytes per token", "requests that fit", "FLOPs"]
    return markdown([*header, *(f"{count} at once" if count > 1 else "1 request" for count in counts)], lines)


def kl_table(rows: list[dict], text: str = "") -> str:
    """KL in nats and perplexity on text that nothing else saw, by method and target.

    `text`: suffix of the columns; see `real_conversion.EVALUATIONS`.
    """
    found = {(row["method"], row["target"]): row for row in rows}
    from .real_conversion import METHODS  # which imports this file

    methods, targets = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    methods.sort(key=list(METHODS).index)
    lines = []
    for method in methods:
        cells = [found.get((method, target)) for target in targets]
        lines.append([method, *(f"{c[f'kl{text}']:.3f} ({c[f'perplexity{text}']:.1f})" if c else "" for c in cells)])
    return markdown(["", *targets], lines)


def quantized_table(models: list[dict]) -> str:
    """KL of models with quantized caches on pages of the same books, another book and code, by format and method."""
    found = [{(row["cache"], row["method"]): row for row in results["rows"]} for results in models]
    lines = []
    for key in dict.fromkeys(key for rows in found for key in rows):
        shares = [f"{rows[key]['share']:.2f}" for rows in found if key in rows]
        losses = [
            " / ".join(f"{rows[key][f'kl{text}']:.4f}" for text in ("", "_other", "_code")) if key in rows else ""
            for rows in found
        ]
        lines.append([", ".join(key).replace(", coded", ""), ", ".join(dict.fromkeys(shares)), *losses])
    names = [results["settings"]["model"].split("-")[0] for results in models]
    return markdown(["cache", "bytes, of bfloat16's", *names], lines)


def plot_caches(quantized: dict, converted: list[dict], path: Path) -> None:
    """KL on pages of the same books against bytes of the cache: flags, conversions by rank, bits, and both.

    `converted`: rows of `benchmarks.real_conversion`, of the same model.
    """
    names = {"plain": "rounded plainly", "vLLM": "TurboQuant in vLLM", "ours": "--nbits", "coded": "--cache-share"}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in quantized["rows"]:
        conversion = row["cache"].rpartition(", bits by channel")[0]
        name = f"{conversion}, then --cache-share" if conversion else names.get(row["method"])
        if "trained" in row["method"]:
            name = f"{f'{conversion}, then ' * bool(conversion)}--cache-share --polish"
        if name and not row["cache"].endswith("fp8"):
            lines.setdefault(name, []).append((row["share"], row["kl"]))
    full = quantized["rows"][0]["bytes"] / quantized["rows"][0]["share"]
    for methods, name in (
        (("default", "untrained", "no key mean", "sizes by layer"), "MLA by rank"),
        (("transmla",), "TransMLA"),
    ):
        # At each size the best that was measured.
        best: dict[float, float] = {}
        for row in converted:
            if row["method"] in methods and row["target"].startswith("mla-1/"):
                share = row["bytes"] / full
                best[share] = min(best.get(share, row["kl"]), row["kl"])
        lines |= {name: list(best.items())} if best else {}
    figure = new_figure(figsize=(6.4, 4.4))
    axis = figure.add_subplot()
    for number, (name, points) in enumerate(lines.items()):
        style: dict[str, Any] = {
            "color": list(COLORS.values())[number % len(COLORS)],
            "marker": "osD^v"[number // len(COLORS)],
        }
        axis.plot(*zip(*sorted(points), strict=True), label=name, **style)
    least = min(share for points in lines.values() for share, _ in points)
    ticks = [tick for tick in (0.05, 0.07, 0.1, 0.14, 0.2, 0.27, 0.5) if tick > 0.9 * least]
    _scale(axis, quantized["settings"]["model"], "bytes of the cache, of bfloat16's", ticks)
    axis.set_ylabel("KL to the source, nats per token")
    axis.legend(fontsize=8, frameon=False)
    save_picture(figure, path)
    print(f"wrote {path}", flush=True)


def quantized_decode_table(rows: list[dict]) -> str:
    """Milliseconds per token by cell and format, and how many times as long as over a cache of bfloat16."""
    cells = dict.fromkeys((row["kind"], row["batch"], row["length"]) for row in rows)
    names = list(dict.fromkeys(row["cache"] for row in rows))
    found = {(row["kind"], row["batch"], row["length"], row["cache"]): row for row in rows}
    lines = []
    for kind, batch, length in cells:
        each = [found[kind, batch, length, name] for name in names]
        lines.append(
            [f"{kind.upper()}, B{batch} S{length}", *(f"{row['ms']:.1f} ({row['ratio']:.2f}x)" for row in each)]
        )
    shown = {"own": "bfloat16", "fp8": "fp8", "coded": "by channel"}
    return markdown(["", *(shown.get(name, f"{name} bits") for name in names)], lines)


def uptrained_table(rows: list[dict]) -> str:
    """Perplexity (KL, share of equal most likely tokens) by model and tokens of training."""
    curve = by_model(rows)
    points = sorted({row["tokens"] for row in rows})
    cells = {(row["model"], row["tokens"]): row for row in rows}
    header = ["perplexity (KL, top-1) after", *(f"{tokens:,} tokens" for tokens in points)]
    return markdown(header, [[model, *(point(cells.get((model, n))) for n in points)] for model in curve])


def by_model(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows by model, in the order of their tokens."""
    models = dict.fromkeys(row["model"] for row in rows)
    return {
        model: sorted((row for row in rows if row["model"] == model), key=lambda row: row["tokens"]) for model in models
    }


def point(row: dict | None) -> str:
    if row is None or row["kl"] is None:
        return ""
    return f"{row['perplexity']:.2f} ({row['kl']:.3f}, {row['top1']:.1%})"


def plot_uptraining(rows: list[dict], path: Path) -> None:
    """Perplexity and KL on held-out pages against the tokens that a model is trained on."""
    figure = new_figure(figsize=(8.8, 3.2))
    curve = by_model([row for row in rows if row["kl"] is not None])
    ticks = sorted({row["tokens"] for row in rows})
    styles = dict(zip(curve, line_styles([model.partition("-")[0] for model in curve]), strict=True))
    labels = {"perplexity": "perplexity", "kl": "KL to the source, nats per token"}
    for axis, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        ends = []
        for model, line in curve.items():
            places = [ticks.index(row["tokens"]) for row in line]
            title = "the source itself" if model == "control" else model
            axis.plot(places, [row[name] for row in line], marker="o", markersize=4, **styles[model])
            ends.append((places[-1], line[-1][name], title, styles[model]["color"]))
        axis.set(xlabel="tokens of training", ylabel=label)
        axis.set_xticks(range(len(ticks)), labels=[f"{tick:,}" for tick in ticks])
        axis.set_ylim(bottom=0 if name == "kl" else None)
        tidy(axis)
        name_lines(axis, ends)
    save_picture(figure, path)
    print(f"wrote {path}", flush=True)


def optimizers_table(rows: list[dict]) -> str:
    """Validation loss by optimizer, steps and learning rate: of one seed, or mean and deviation over seeds."""
    losses: dict[tuple[str, int, float], list[float]] = {}
    several = len({row["recipe"] for row in rows}) > 1
    for row in rows:
        optimizer = {"adamw": "AdamW", "muon": "Muon", "muon-apart": "Muon, projections apart"}[row["optimizer"]]
        name = optimizer + (row["options"] and f", {row['options']}")
        name = f"{row['recipe']}: {name}" if several else name
        losses.setdefault((name, row["steps"], row["learning_rate"]), []).append(row["loss"])
    rates = sorted({rate for _, _, rate in losses})

    def cell(found: list[float]) -> str:
        spread = f" ± {statistics.stdev(found):.3f} ({len(found)} seeds)" if len(found) > 1 else ""
        return f"{statistics.mean(found):.3f}{spread}" if found else ""

    lines = [
        [name, f"{steps:,}", *(cell(losses.get((name, steps, rate), [])) for rate in rates)]
        for name, steps in sorted({key[:2] for key in losses}, key=lambda key: (key[1], key[0]))
    ]
    return markdown(["", "steps", *(f"{rate:g}" for rate in rates)], lines)


def stored(name: str) -> dict:
    """The results of a benchmark in the repository."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def tables() -> list[str]:
    """The documentation's tables, from the saved results."""
    real = stored("real_conversion"), stored("real_conversion_qwen")
    converted = [
        row | {"target": f"{results['settings']['model'].split('-')[0]}, {row['target']}"}
        for results in real
        for row in results["rows"]
    ]
    return [
        decode_table(stored("decode")["rows"], DECODE_CELLS),
        decode_table(stored("decode_h100")["rows"], GPU_CELLS),
        *(kl_table(converted, text) for text in ("", "_other", "_code")),
        uptrained_table(stored("uptraining")["rows"]),
        quantized_table([stored("quantized_cache"), stored("quantized_qwen")]),
        quantized_decode_table(stored("quantized_decode")["rows"]),
        optimizers_table(stored("optimizers")["rows"]),
        serving_table(stored("serving")["rows"]),
    ]


if __name__ == "__main__":
    plot_mla(stored("decode")["rows"], PICTURE)
    plot_uptraining(stored("uptraining")["rows"], UPTRAINING_PICTURE)
    for (quantized, conversions), picture in CACHES.items():
        plot_caches(stored(quantized), stored(conversions)["rows"], picture)
    print("\n\n".join(tables()))
