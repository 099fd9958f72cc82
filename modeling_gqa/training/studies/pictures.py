"""The studies' pictures, in the form of the paper's figures 3 to 6."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.pictures import COLORS, name_lines, new_figure, save, tidy
from .findings import Times, cache, curves_of, in_percent, named, of_samples
from .points import Study
from .recipe import Point, Student

LOSS = "validation loss (nats per token)"
SIZE = (6.5, 3.6)


def color_of(name: str) -> str:
    return COLORS[name.partition("-")[0].lower()]


def plot_conversion(study: Study, path: Path) -> None:
    """Draw a bar for each method, before and after uptraining."""
    figure = new_figure(figsize=SIZE)
    axis = figure.subplots()
    methods = study.recipe.methods
    for offset, field, shade, name in (
        (-0.2, "initial_validation_loss", "0.75", "before uptraining"),
        (0.2, "validation_loss", COLORS["mqa"], f"after {in_percent(study.recipe.share)}"),
    ):
        samples = [study.losses(Point(Student(1, method), study.recipe.share), method, field) for method in methods]
        places = [place + offset for place, sample in enumerate(samples) if sample]
        bars = axis.bar(places, [sample.mean for sample in samples if sample], 0.38, color=shade)
        axis.bar_label(bars, [f"{sample.mean:.2f}" for sample in samples if sample], fontsize=8)
        if places:
            axis.annotate(name, (places[0], 0.1), rotation=90, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(methods)), labels=methods)
    axis.set(ylabel=LOSS, xlabel="how the heads become one (MQA)")
    tidy(axis)
    axis.grid(visible=False, axis="x")
    save(figure, path)


def plot_uptraining(study: Study, path: Path) -> None:
    """Draw the loss against the share of the pretraining tokens, a line for each model."""
    figure = new_figure(figsize=SIZE)
    axis = figure.subplots()
    ends = []
    for name, curve in curves_of(study).items():
        if not curve:
            continue
        shares = sorted(curve)
        means = [curve[share].mean for share in shares]
        axis.plot([100 * share for share in shares], means, "o-", markersize=4, color=color_of(name))
        ends.append((100 * shares[-1], means[-1], name, color_of(name)))
    axis.set(xlabel="share of the pretraining tokens (%)", ylabel=LOSS)
    tidy(axis)
    if ends:
        name_lines(axis, ends)
    save(figure, path)


def plot_groups(study: Study, times: Mapping[int, Times], path: Path) -> None:
    """Draw the time of a token and of a sample against the number of key/value heads."""
    figure = new_figure(figsize=(8.4, 3.2))
    for axis, (field, label) in zip(
        figure.subplots(1, 2),
        (("token", "time of a token (ms)"), ("sample", f"time of {of_samples(study)} (s)")),
        strict=True,
    ):
        values = [getattr(found, field) for found in times.values()]
        axis.plot(list(times), values, color="0.7", zorder=0)
        for heads, value in zip(times, values, strict=True):
            axis.plot(heads, value, "o", color=color_of(named(study, heads)))
            axis.annotate(named(study, heads), (heads, value), (4, 5), textcoords="offset points", fontsize=8)
        axis.set(xscale="log", xlabel="key/value heads", ylabel=label)
        axis.set_xticks(list(times), labels=[str(heads) for heads in times])
        axis.set_ylim(0, 1.15 * max(values))
        tidy(axis)
    save(figure, path)


def plot_trade(study: Study, times: Mapping[int, Times], path: Path) -> None:
    """Draw the loss against the time of a sample, with the size of the points the cache."""
    figure = new_figure(figsize=SIZE)
    axis = figure.subplots()
    largest = cache(study, study.most_heads)
    for heads, found in times.items():
        name = named(study, heads)
        if sample := study.losses(Point(study.student(heads), study.recipe.share), name):
            area: dict[str, Any] = {"s": 400 * cache(study, heads) / largest, "color": color_of(name), "alpha": 0.7}
            axis.scatter([found.sample], [sample.mean], **area)
            axis.annotate(name, (found.sample, sample.mean), (9, 6), textcoords="offset points", fontsize=8)
    axis.set(xlabel=f"time of {of_samples(study)} (s)", ylabel=LOSS)
    axis.set_title("area: bytes of cache per token", fontsize=8)
    axis.margins(0.15)
    tidy(axis)
    save(figure, path)
