"""What models cost beside each other: the tables and the picture of `modeling-gqa report`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..common.pictures import line_styles, name_lines, new_figure, tidy
from ..common.tables import Table, cached, in_bytes, runs, share, three_digits, with_prefix
from . import CostedModel, CostReport, LayerCost, Machine, cache_bytes, decode_seconds
from .measuring import MeasuredToken
from .summary import ContextCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPANDED = "Expanded: MLA rebuilds keys and values at every token. This package decodes over the latent instead."
BOUNDS = (
    "The bounds count weights, cache and matrix products alone, and of prompts and training no scores that the mask "
    "hides. Calls of kernels, norms and the softmax come on top: short contexts and small models stay further below."
)
MIB = 2**20


def sections(
    models: Sequence[CostedModel], reports: Sequence[CostReport], measured: Sequence[MeasuredToken]
) -> list[Table | str]:
    """Return what people read of models, what each costs and what was measured: tables, and lines on two of them."""
    machine = reports[0].machine
    found: list[Table | str] = [parameters_table(reports)]
    found += [layer_costs_table(*pair) for pair in zip(models, reports, strict=True)]
    found.append(operations_table(reports))
    if any(cost.decode_flops != cost.decode_flops_expanded for report in reports for cost in report.contexts):
        found.append(EXPANDED)
    found.append(decoding_table(reports))
    if reports[0].memory:
        found.append(memory_table(reports))
    if machine:
        found += [bounds_table(reports, machine), BOUNDS]
    return [*found, measured_table(measured)] if measured else found


def parameters_table(reports: Sequence[CostReport]) -> Table:
    """Parameters, bytes of weights, and bytes of cache per token, a column for each model."""
    rows = {
        "parameters": "parameters",
        "- attention": "attention_parameters",
        "- MLP": "mlp_parameters",
        "- embedding and head": "embedding_parameters",
        "- norms": "norm_parameters",
    }
    cells = [[title, *(f"{getattr(report, name):,}" for report in reports)] for title, name in rows.items()]
    cells.append([f"weights, {reports[0].dtype}", *(in_bytes(report.weight_bytes) for report in reports)])
    sizes = [report.cache_bytes_per_token for report in reports]
    itemsize = getattr(torch, reports[0].dtype).itemsize
    cells.append(["cached bytes (numbers) per token", *(cached(size, itemsize) for size in sizes)])
    if len(sizes) > 1:
        cells.append(["- of the first's", *(share(size, sizes[0]) for size in sizes)])
    return Table(["", *(report.name for report in reports)], cells)


def layer_costs_table(model: CostedModel, report: CostReport) -> Table:
    """Runs of equal layers of one model."""
    context, dtype = report.contexts[-1].context, getattr(torch, report.dtype)

    def row(cost: LayerCost) -> tuple[str, ...]:
        layer = model.layers[cost.layer]
        return (
            layer.attention.describe(layer.config) + ("" if cost.window is None else f", window of {cost.window:,}"),
            with_prefix(cost.attention_parameters),
            with_prefix(cost.mlp_parameters),
            cached(layer.token_bytes(dtype), dtype.itemsize),
            with_prefix(cost.decode_flops[context]),
        )

    header = ["layers", "attention", "its weights", "MLP's", "cached", "FLOP"]
    title = f"Layers of {report.name} (bytes and numbers cached; FLOP after {context:,})"
    return Table(header, [[where, *cells] for where, cells in runs(map(row, report.layers))], title=title, words=2)


def by_context(
    reports: Sequence[CostReport], title: str, header: Sequence[str], cells: Callable[[ContextCost], Sequence[str]]
) -> Table:
    """A row of cells for each number of sequences and tokens, and model."""
    rows = [
        [f"{cost.batch_size:,} x {cost.context:,}", report.name, *cells(cost)]
        for costs in zip(*(report.contexts for report in reports), strict=True)
        for report, cost in zip(reports, costs, strict=True)
    ]
    return Table(["sequences x tokens", "", *header], rows, title=title, words=2)


def operations_table(reports: Sequence[CostReport]) -> Table:
    names = ("training_flops", "prefill_flops", "decode_flops", "decode_flops_expanded")
    title = "FLOP of a training step, of prompts, of a decoded token in each sequence"
    header = ["training", "prompt", "decoding", "expanded"]
    return by_context(reports, title, header, lambda cost: [with_prefix(getattr(cost, name)) for name in names])


def decoding_table(reports: Sequence[CostReport]) -> Table:
    def cells(cost: ContextCost) -> list[str]:
        cache = in_bytes(cost.cache_bytes) + ("" if cost.fits is not False else ", too large")
        return [cache, in_bytes(cost.decode_bytes), three_digits(cost.intensity)]

    return by_context(reports, "A decoded token in each sequence", ["cache", "bytes read", "FLOP per byte"], cells)


def bounds_table(reports: Sequence[CostReport], machine: Machine) -> Table:
    def cells(cost: ContextCost) -> list[str]:
        tokens = cost.batch_size * cost.context
        times = (tokens, cost.training_seconds), (tokens, cost.prefill_seconds), (cost.batch_size, cost.decode_seconds)
        return [with_prefix(many / seconds) for many, seconds in times if seconds]

    name = f"{machine.name}, " if machine.name else ""
    rates = f"{with_prefix(machine.bandwidth, 'B/s')} read, {with_prefix(machine.rate, 'FLOP/s')} of matrix products"
    title = f"Tokens per second of all sequences together, at most ({name}{rates})"
    return by_context(reports, title, ["training", "prompts", "decoding"], cells)


def memory_table(reports: Sequence[CostReport]) -> Table:
    """The longest context by sequences, and the largest batch by tokens, a column for each model."""
    cells = []
    for rows in reports[0].longest_context:
        found = (report.longest_context[rows] for report in reports)
        shown = ("any number" if tokens is None else f"{tokens:,}" for tokens in found)
        cells.append([f"tokens, batch size {rows:,}", *shown])
    for tokens in reports[0].largest_batch:
        cells.append([f"batch size, {tokens:,} tokens", *(f"{report.largest_batch[tokens]:,}" for report in reports)])
    title = f"What fits {in_bytes(reports[0].memory)} beside the weights"
    return Table(["", *(report.name for report in reports)], cells, title=title)


def measured_table(measured: Sequence[MeasuredToken]) -> Table:
    """Milliseconds of a decoded token, a column for each model, and how many times as long as the first it takes.

    Both are medians over rounds, so that the one need not be the quotient of the other.
    """
    first = next(iter(measured[0].ratio))
    rows = [
        [
            f"{token.batch_size:,}",
            f"{token.context:,}",
            *(
                f"{milliseconds:.1f}" + ("" if name == first else f" ({token.ratio[name]:.2f}x)")
                for name, milliseconds in token.milliseconds.items()
            ),
        ]
        for token in measured
    ]
    title = "Measured here: milliseconds of a decoded token in each sequence (times the first's)"
    return Table(["batch size", "tokens", *measured[0].milliseconds], rows, title=title, words=0)


def plot_costs(
    models: Sequence[CostedModel], machine: Machine | None, rows: int, longest: int, dtype: torch.dtype
) -> "Figure":
    """Draw the cache, and with a machine the least time of a decoded token, against the context; a line per model."""
    panels = 2 if machine else 1
    figure = new_figure(figsize=(5.2 * panels, 3.4))
    contexts = sorted({2**power for power in range(min(7, longest.bit_length() - 2), longest.bit_length())} | {longest})
    axes = figure.subplots(1, panels, squeeze=False)[0]
    many = f"{rows:,} sequence{'s' * (rows > 1)}, {str(dtype).removeprefix('torch.')}"
    measures = [(f"cache of {many} (MiB)", lambda model, tokens: cache_bytes(model, rows, tokens, dtype) / MIB)]
    if machine:
        bound = lambda model, tokens: 1000 * decode_seconds(model, machine, rows, tokens, dtype)  # noqa: E731
        measures.append((f"least time of a decoded token, {many} (ms)", bound))
    for axis, (title, measure) in zip(axes, measures, strict=True):
        lines = [[measure(model, tokens) for tokens in contexts] for model in models]
        styles = line_styles([model.kind for model in models])
        for values, style in zip(lines, styles, strict=True):
            axis.plot(contexts, values, **style)
        axis.set(xscale="log", xlabel="context (tokens)", title=title)
        spread = max(map(max, lines)) / min(map(min, lines))
        if spread < 10:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
            axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5) if spread < 300 else (1,))
        axis.title.set_fontsize(9)
        axis.set_xticks(contexts[::2], labels=[f"{tick:,}" for tick in contexts[::2]], minor=False)
        axis.xaxis.set_tick_params(rotation=30)
        axis.yaxis.set_major_formatter(lambda value, _: three_digits(value))
        tidy(axis)
        ends = zip(models, lines, styles, strict=True)
        name_lines(axis, [(contexts[-1], values[-1], model.name, style["color"]) for model, values, style in ends])
    return figure
