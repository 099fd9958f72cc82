"""Pictures of a comparison: loss against cache, rate and tokens, and decoding against context."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ...common.pictures import COLORS, line_styles, name_lines, new_figure, save, tidy
from .outcome import Entry, Outcome

Points = Sequence[tuple[float, float]]


def styles(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Return how each model is drawn, by name: the colour of its kind, and a stroke of its own among that kind."""
    return dict(zip((entry.name for entry in entries), line_styles([entry.kind for entry in entries]), strict=True))


def plot_comparison(outcome: Outcome, curves: Mapping[str, Points], folder: Path) -> None:
    """Write the four pictures of a comparison.

    Args:
        outcome: what was found.
        curves: tokens trained on and training loss of a run at the best rate, by name of the model.
        folder: where the pictures go.
    """
    entries = outcome.entries
    save(plot_losses(outcome), folder / "loss_by_cache.png")
    rates = {entry.name: [(x, y) for x, y in entry.sweep.items() if isfinite(y)] for entry in entries}
    save(
        plot_lines(entries, rates, "learning rate", "validation loss (nats per token)", "log"),
        folder / "loss_by_rate.png",
    )
    decoding = {entry.name: list(entry.speed.decode_milliseconds.items()) for entry in entries}
    save(plot_lines(entries, decoding, "context (tokens)", "decoded token, 1 row (ms)", "log"), folder / "decoding.png")
    save(
        plot_lines(entries, curves, "tokens trained on", "training loss (nats per token)", "linear"),
        folder / "curves.png",
    )


def plot_losses(outcome: Outcome) -> Any:
    """Draw mean losses with the deviation over seeds against the bytes of cache per token, and the pareto front."""
    figure = new_figure(figsize=(6.5, 4))
    axis = figure.subplots()
    front = outcome.front
    axis.plot([x.cache_bytes_per_token for x in front], [x.loss for x in front], color="0.7", linewidth=1, zorder=0)
    for entry in outcome.finished:
        bars = entry.deviation if isfinite(entry.deviation) else None
        color = COLORS[entry.kind]
        axis.errorbar(entry.cache_bytes_per_token, entry.loss, yerr=bars, fmt="o", color=color, capsize=3)
        axis.annotate(
            entry.name,
            (entry.cache_bytes_per_token, entry.loss),
            (6, 5),
            textcoords="offset points",
            color=color,
            fontsize=8,
        )
    ticks = sorted({entry.cache_bytes_per_token for entry in outcome.finished})
    axis.set(xscale="log", xlabel="cache (bytes per token, bfloat16)", ylabel="validation loss (nats per token)")
    axis.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    tidy(axis)
    grey = "; grey: the pareto front" if len(front) > 1 else ""
    axis.set_title(f"bars: one standard deviation over seeds{grey}", fontsize=8)
    return figure


def plot_lines(entries: Sequence[Entry], lines: Mapping[str, Points], xlabel: str, ylabel: str, xscale: str) -> Any:
    """Draw a line for each model, named at its end."""
    figure = new_figure(figsize=(6.5, 4))
    axis = figure.subplots()
    drawn = [entry for entry in entries if lines.get(entry.name)]
    style = styles(entries)
    marker = "o" if max((len(lines[entry.name]) for entry in drawn), default=0) < 20 else None
    for entry in drawn:
        xs, ys = zip(*lines[entry.name], strict=True)
        axis.plot(xs, ys, marker=marker, markersize=4, **style[entry.name])
    axis.set(xscale=xscale, xlabel=xlabel, ylabel=ylabel)
    if xscale == "log":
        ticks = sorted({x for entry in drawn for x, _ in lines[entry.name]})
        show: Callable[[float], str] = (
            (lambda x: f"{x:,}") if all(x == int(x) for x in ticks) else (lambda x: f"{x:.1e}")
        )
        axis.set_xticks(ticks, labels=[show(tick) for tick in ticks], rotation=30)
    else:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    tidy(axis)
    ends = [(*lines[entry.name][-1], entry.name, style[entry.name]["color"]) for entry in drawn]
    name_lines(axis, ends, least=0.06)
    return figure
