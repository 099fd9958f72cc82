"""What models cost beside each other: the tables and sentences of `modeling-gqa report`, and its JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from ..common.errors import listed
from ..common.tables import Table, cached, in_bytes, share, three_digits, with_prefix
from . import ContextCost, CostReport, LayerCost, Machine, Model, faster_contexts
from .measuring import MeasuredToken

BATCH_SIZES = (1, 8, 64)  # at which two models are compared by bound, besides those that are asked for
EXPANDED = "Expanded: where MLA rebuilds keys and values at every token. This package decodes over the latent instead."


@dataclass(frozen=True)
class Comparison:
    """Where one model decodes faster than another by bound.

    Args:
        model: name of the one.
        other: name of the other.
        batch_size: number of rows.
        faster: first and last context of each range in which `model` has the lower bound.
        longest: context up to which was looked.
    """

    model: str
    other: str
    batch_size: int
    faster: list[tuple[int, int]]
    longest: int


@dataclass(frozen=True)
class Costs:
    """Models beside each other.

    Args:
        models: the configurations.
        reports: what each costs.
        comparisons: of each model after the first with the first, at `BATCH_SIZES`; empty without a machine.
        measured: decoded tokens that were measured here; empty without.
    """

    models: Sequence[Model]
    reports: Sequence[CostReport]
    comparisons: Sequence[Comparison]
    measured: Sequence[MeasuredToken]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in types that JSON has."""
        return {
            "models": [report.to_dict() for report in self.reports],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "measured": [asdict(token) for token in self.measured],
        }

    def sections(self) -> list[Table | str]:
        """Return what people read: tables and sentences, in order."""
        found: list[Table | str] = [sizes_table(self.reports)]
        found += [layers_table(*pair) for pair in zip(self.models, self.reports, strict=True)]
        found.append(operations_table(self.reports))
        if any(cost.decode_flops != cost.decode_flops_expanded for r in self.reports for cost in r.contexts):
            found.append(EXPANDED)
        found.append(decoding_table(self.reports))
        if self.reports[0].memory:
            found.append(memory_table(self.reports))
        if self.reports[0].machine:
            found.append(bounds_table(self.reports))
            found.append(describe_machine(self.reports[0].machine))
        found += [
            describe_comparisons(list(group))
            for _, group in groupby(self.comparisons, key=lambda comparison: comparison.model)
        ]
        if self.measured:
            found.append(measured_table(self.measured))
            found += [describe_measured(self.measured, name) for name in list(self.measured[0].ratio)[1:]]
        return found


def compare(
    models: Sequence[Model],
    machine: Machine | None,
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
) -> list[Comparison]:
    """Return where each model after the first is faster than the first by bound.

    It is looked up to the shorter one's positions, and up to the longest context that is asked for.
    """
    first, *others = models
    numbers = sorted({*BATCH_SIZES, *batch_sizes})
    return [
        Comparison(model.name, first.name, rows, faster_contexts(model, first, machine, rows, dtype, longest), longest)
        for model in others
        if machine
        for longest in [max(*contexts, min(x.config.max_position_embeddings for x in (first, model)))]
        for rows in numbers
    ]


def sizes_table(reports: Sequence[CostReport]) -> Table:
    """Parameters, bytes of weights, and bytes of cache per token, a column for each model."""
    rows = {
        "parameters": "parameters",
        "- attention": "attention_parameters",
        "- MLP": "mlp_parameters",
        "- embedding and head": "embedding_parameters",
        "- norms": "norm_parameters",
    }
    if any(report.parameters_per_token != report.parameters for report in reports):
        rows["parameters that a token uses"] = "parameters_per_token"
    cells = [[title, *(f"{getattr(report, name):,}" for report in reports)] for title, name in rows.items()]
    cells.append([f"weights, {reports[0].dtype}", *(in_bytes(report.weight_bytes) for report in reports)])
    sizes = [report.cache_bytes_per_token for report in reports]
    itemsize = getattr(torch, reports[0].dtype).itemsize
    cells.append(["cached bytes (numbers) per token", *(cached(size, itemsize) for size in sizes)])
    if len(sizes) > 1:
        cells.append(["- of the first's", *(share(size, sizes[0]) for size in sizes)])
    return Table(["", *(report.name for report in reports)], cells)


def layers_table(model: Model, report: CostReport) -> Table:
    """Runs of equal layers of one model."""
    context, itemsize = report.contexts[-1].context, getattr(torch, report.dtype).itemsize

    def describe(cost: LayerCost) -> tuple[str, ...]:
        window = "" if cost.window is None else f", window of {cost.window:,}"
        return (
            model.layers[cost.layer].attention.describe(model.layers[cost.layer].config) + window,
            with_prefix(cost.attention_parameters),
            with_prefix(cost.mlp_parameters),
            cached(cost.cached_numbers * itemsize, itemsize),
            with_prefix(cost.decode_flops[context]),
        )

    cells = []
    for row, group in groupby(report.layers, key=describe):
        first, *rest = (cost.layer for cost in group)
        cells.append([f"{first}-{rest[-1]}" if rest else f"{first}", *row])
    header = ["layers", "attention", "its weights", "MLP's", "cached", "FLOP"]
    title = f"Layers of {report.name} (bytes and numbers cached; FLOP after {context:,})"
    return Table(header, cells, title=title, words=2)


def operations_table(reports: Sequence[CostReport]) -> Table:
    """FLOPs, a row for each number of rows and tokens, and model."""
    expanded = any(cost.decode_flops != cost.decode_flops_expanded for r in reports for cost in r.contexts)
    cells = [
        [
            where,
            name,
            *(with_prefix(flops) for flops in (cost.training_flops, cost.prefill_flops, cost.decode_flops)),
            *([with_prefix(cost.decode_flops_expanded)] if expanded else []),
        ]
        for where, name, cost in each_context(reports)
    ]
    header = ["rows x tokens", "", "training", "prompt", "decoding", *(["expanded"] if expanded else [])]
    return Table(header, cells, title="FLOP of a training step, of prompts, of a decoded token in each row", words=2)


def decoding_table(reports: Sequence[CostReport]) -> Table:
    """Bytes, a row for each number of rows and tokens, and model."""
    cells = [
        [
            where,
            name,
            in_bytes(cost.cache_bytes) + ("" if cost.fits is not False else ", too large"),
            in_bytes(cost.decode_bytes),
            three_digits(cost.intensity),
        ]
        for where, name, cost in each_context(reports)
    ]
    header = ["rows x tokens", "", "cache", "bytes read", "FLOP per byte"]
    return Table(header, cells, title="A decoded token in each row", words=2)


def bounds_table(reports: Sequence[CostReport]) -> Table:
    """Tokens per second at most, a row for each number of rows and tokens, and model."""
    cells = []
    for where, name, cost in each_context(reports):
        tokens = cost.batch_size * cost.context
        times = (tokens, cost.training_seconds), (tokens, cost.prefill_seconds), (cost.batch_size, cost.decode_seconds)
        cells.append([where, name, *(with_prefix(many / seconds) for many, seconds in times if seconds)])
    header = ["rows x tokens", "", "training", "prompts", "decoding"]
    return Table(header, cells, title="Tokens per second of all rows together, at most", words=2)


def each_context(reports: Sequence[CostReport]) -> Iterator[tuple[str, str, ContextCost]]:
    """Yield the costs of each model by number of rows and tokens, and what stands before them in a table."""
    for costs in zip(*(report.contexts for report in reports), strict=True):
        for report, cost in zip(reports, costs, strict=True):
            yield f"{cost.batch_size:,} x {cost.context:,}", report.name, cost


def memory_table(reports: Sequence[CostReport]) -> Table:
    """The longest context by rows, and the largest batch by tokens, a column for each model."""
    cells = []
    for rows in reports[0].longest_context:
        found = (report.longest_context[rows] for report in reports)
        shown = ("any number" if tokens is None else f"{tokens:,}" for tokens in found)
        cells.append([f"tokens of each of {rows:,} row{'s' * (rows > 1)}", *shown])
    for tokens in reports[0].largest_batch:
        cells.append([f"rows of {tokens:,} tokens", *(f"{report.largest_batch[tokens]:,}" for report in reports)])
    title = f"What fits {in_bytes(reports[0].memory)} beside the weights"
    return Table(["", *(report.name for report in reports)], cells, title=title)


def describe_machine(machine: Machine) -> str:
    """One sentence on what the bounds are for, and what they leave out."""
    name = f"{machine.name}: " if machine.name else ""
    rates = f"{with_prefix(machine.bandwidth, 'B/s')} read, {with_prefix(machine.rate, 'FLOP/s')} of matrix products"
    return (
        f"Bounds are for {name}{rates}. They count weights, cache and matrix products alone, of prompts and training "
        "without the scores that the mask hides. Calls of kernels, norms and the softmax come on top, so short "
        "contexts and small models stay further below them."
    )


def describe_comparisons(comparisons: Sequence[Comparison]) -> str:
    """One sentence on where a model is faster than the first, by number of rows, as far as was looked."""
    first = comparisons[0]
    said = []
    for ranges, group in groupby(comparisons, key=lambda comparison: comparison.faster):
        rows = [comparison.batch_size for comparison in group]
        said.append(f"at {listed(rows, 'and')} row{'s' * (rows[-1] > 1)} {describe_ranges(ranges, first.longest)}")
    return (
        f"By bound, and up to {first.longest:,} tokens, {first.model} decodes faster than {first.other}: "
        f"{'; '.join(said)}."
    )


def describe_ranges(ranges: Sequence[tuple[int, int]], longest: int) -> str:
    """Return ranges of contexts in words, such as `from 4,453 tokens on`."""
    if not ranges:
        return "at no context"
    said = []
    for begin, end in ranges:
        if end == longest:
            said.append("at every context" if begin == 1 else f"from {begin:,} tokens on")
        else:
            said.append(f"up to {end:,} tokens" if begin == 1 else f"from {begin:,} to {end:,} tokens")
    return " and ".join(said)


def measured_table(measured: Sequence[MeasuredToken]) -> Table:
    """Milliseconds of a decoded token, a column for each model, and how many times as long as the first it takes.

    Both are medians over rounds, so that the one need not be the quotient of the other.
    """
    first = next(iter(measured[0].ratio))
    cells = [
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
    header = ["rows", "tokens", *measured[0].milliseconds]
    return Table(
        header, cells, title="Measured here: milliseconds of a decoded token in each row (times the first's)", words=0
    )


def describe_measured(measured: Sequence[MeasuredToken], name: str) -> str:
    """One sentence on where a model decoded faster than the first, by number of rows."""
    first, said = next(iter(measured[0].ratio)), []
    for rows, group in groupby(measured, key=lambda token: token.batch_size):
        tokens = sorted(group, key=lambda token: token.context)
        after = [f"{token.context:,}" for token in tokens if token.ratio[name] >= 1]
        faster = [f"{token.context:,}" for token in tokens if token.ratio[name] < 1]
        if not faster:
            where = f"nowhere up to {tokens[-1].context:,} tokens"
        elif not after:
            where = f"at all of {listed(faster, 'and')} tokens"
        else:
            where = f"at {listed(faster, 'and')} tokens and not at {listed(after, 'and')}"
        said.append(f"at {rows:,} row{'s' * (rows > 1)} {where}")
    return f"Measured, {name} decoded faster than {first}: {'; '.join(said)}."
