"""A study's report: a table, JSON, and pictures in the form of the paper's figures 3 to 6."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from modeling_gqa.common.atomic import write_json, write_text
from modeling_gqa.common.console import say
from modeling_gqa.common.pictures import COLORS, name_lines, new_figure, save, tidy
from modeling_gqa.common.tables import Table
from modeling_gqa.costs import cache_bytes_per_token
from modeling_gqa.costs.speeds import measure_speeds, where_measured
from modeling_gqa.training.comparison.runs import Runs
from modeling_gqa.training.comparison.spread import Spread, pooled
from modeling_gqa_cli.errors import UserError

from .study import Point, Student, Study

# What may differ when a study goes on: none of it changes what a finished run has found.
FREE = {
    "methods", "shares", "share", "heads", "prompt_tokens", "new_tokens", "batch_size", "seeds", "jobs", "launcher",
    "output_dir",
}  # fmt: skip
LOSS = "validation loss (nats per token)"
REPORT = """# {title}

{table}

{pictures}

Source: {source}, pretrained on {tokens:,} tokens. Runs: the recipe {uptraining}, {seeds} seeds. Losses are means over
seeds, in nats per token of validation text; ± is the standard deviation of a run. The learning rate is not swept.
Machine: {machine}. The options and all numbers are in {name}.json.
"""
TIMES = """
Times: prompts of {prompt_tokens:,} tokens and {new_tokens:,} new tokens each, {batch_size:,} at once, random weights,
the models in turn. A new token's time is that in the middle of the new tokens.
"""


@dataclass(frozen=True)
class Times:
    """Milliseconds of a new token of all prompts, and seconds of all prompts with their new tokens."""

    token: float
    sample: float


@dataclass(frozen=True)
class Findings:
    """What a study has found: its title, table, numbers for JSON, and pictures by file name."""

    title: str
    table: Table
    numbers: dict[str, Any]
    pictures: dict[str, Any]


def write_report(study: Study, runs: Runs) -> None:
    """Write the report of a study, its numbers and its pictures."""
    find = {"conversion": conversion, "uptraining": uptraining, "groups": lambda study: groups(study, measure(study))}
    findings, failures, machine = find[study.name](study), runs.failures(), where_measured()
    content = {"study": study.name, "recipe": asdict(study.recipe), "machine": machine, "failures": failures}
    write_json(study.folder / f"{study.name}.json", content | {"results": findings.numbers})
    for name, figure in findings.pictures.items():
        save(figure, study.folder / name)
    text = REPORT.format(
        title=findings.title,
        table=findings.table.to_markdown(),
        pictures="\n\n".join(f"![{findings.title.lower()}]({name})" for name in findings.pictures),
        tokens=study.pretraining_tokens,
        machine=machine,
        name=study.name,
        **{name: getattr(study.recipe, name) for name in ("source", "uptraining", "seeds")},
    )
    text += TIMES.format(**asdict(study.recipe)) if study.name == "groups" else ""
    write_text(study.folder / f"{study.name}.md", text + "".join(f"\n- {x} failed: {y}" for x, y in failures.items()))
    say(findings.table.to_markdown())


def shown(losses: Sequence[float], spread: Spread | None = None) -> str:
    """Return a mean, with the deviation over seeds where there is one."""
    if not losses:
        return "failed"
    deviates = spread and spread.freedom and len(losses) > 1
    return f"{fmean(losses):.4f}" + (f" ± {spread.deviation:.4f}" if spread and deviates else "")


def in_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def color_of(label: str) -> str:
    return COLORS[label.partition("-")[0].lower()]


# -- The three studies


def conversion(study: Study) -> Findings:
    """Method of conversion against quality, before and after uptraining: the paper's figure 4."""
    points = {method: Point(Student(1, method), study.recipe.share) for method in study.recipe.methods}
    before = {method: study.losses(point, "initial_validation_loss") for method, point in points.items()}
    after = {method: study.losses(point) for method, point in points.items()}
    spread, share = pooled(after.values()), in_percent(study.recipe.share)
    rows = [[method, shown(before[method]), shown(after[method], spread)] for method in points]
    table = Table(["conversion to MQA", "loss before uptraining", f"loss after {share} of the tokens"], rows)
    figure = new_figure(figsize=(6.5, 3.6))
    axis = figure.subplots()
    for offset, samples, shade, label in (
        (-0.2, before, "0.75", "before uptraining"),
        (0.2, after, COLORS["mqa"], f"after {share}"),
    ):
        drawn = {place + offset: fmean(x) for place, x in enumerate(samples.values()) if x}
        bars = axis.bar(list(drawn), list(drawn.values()), 0.38, color=shade, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.set_xticks(range(len(points)), labels=list(points))
    axis.set(ylabel=LOSS, xlabel="how the heads become one (MQA)")
    axis.legend(fontsize=8, frameon=False)
    tidy(axis)
    numbers = {method: {"before": before[method] or None, "after": after[method] or None} for method in points}
    return Findings("Method of conversion against quality", table, numbers, {"conversion.png": figure})


def uptraining(study: Study) -> Findings:
    """Share of the pretraining tokens against quality: the paper's figure 5."""
    curves = {study.label(heads): study.curve(heads) for heads in study.compared_heads()}
    spread = pooled(losses for curve in curves.values() for share, losses in curve.items() if share)
    rows = [
        [in_percent(share), *(shown(curve.get(share, []), spread if share else None) for curve in curves.values())]
        for share in (0.0, *study.recipe.shares)
    ]
    figure = new_figure(figsize=(6.5, 3.6))
    axis = figure.subplots()
    drawn = {label: [(100 * share, fmean(x)) for share, x in sorted(curve.items())] for label, curve in curves.items()}
    for label, line in drawn.items():
        axis.plot([x for x, _ in line], [y for _, y in line], "o-", markersize=4, color=color_of(label))
    axis.set(xlabel="share of the pretraining tokens (%)", ylabel=LOSS)
    tidy(axis)
    name_lines(axis, [(*line[-1], label, color_of(label)) for label, line in drawn.items() if line])
    numbers = {label: {f"{share:g}": x for share, x in curve.items()} for label, curve in curves.items()}
    table = Table(["share of the tokens", *curves], rows)
    return Findings("Share of the pretraining tokens against quality", table, numbers, {"uptraining.png": figure})


def groups(study: Study, times: Mapping[int, Times]) -> Findings:
    """Number of key/value heads against time and quality: the paper's figures 6 and 3."""
    samples = {heads: study.losses(Point(study.student(heads), study.recipe.share)) for heads in times}
    caches = {heads: cache_bytes_per_token(study.config_with(heads)) for heads in times}
    spread, many = pooled(samples.values()), f"{study.recipe.batch_size:,} samples"
    header = ["", "key/value heads", "cache, bytes per token", "ms a token", f"s for {many}", "times MQA's"]
    header += [f"loss after {in_percent(study.recipe.share)}"]
    rows, numbers = [], {}
    for heads, took in times.items():
        costs = [
            f"{caches[heads]:,}",
            f"{took.token:.2f}",
            f"{took.sample:.3f}",
            f"{took.sample / times[1].sample:.2f}",
        ]
        rows.append([study.label(heads), str(heads), *costs, shown(samples[heads], spread)])
        numbers[str(heads)] = {
            "cache_bytes_per_token": caches[heads],
            "token_milliseconds": took.token,
            "sample_seconds": took.sample,
            "losses": samples[heads] or None,
        }
    figure = new_figure(figsize=(8.4, 3.2))
    axes = figure.subplots(1, 2)
    for axis, field, label in zip(axes, ("token", "sample"), ("ms a token", f"s for {many}"), strict=True):
        heights = [getattr(took, field) for took in times.values()]
        axis.plot(list(times), heights, color="0.7", zorder=0)
        for heads, height in zip(times, heights, strict=True):
            axis.plot(heads, height, "o", color=color_of(study.label(heads)))
        axis.set(xscale="log", xlabel="key/value heads", ylabel=label, ylim=(0, 1.15 * max(heights)))
        axis.set_xticks(list(times), labels=[str(heads) for heads in times])
        tidy(axis)
    trade = new_figure(figsize=(6.5, 3.6))
    axis = trade.subplots()
    for heads, losses in samples.items():
        if losses:
            color, label = color_of(study.label(heads)), study.label(heads)
            place = (times[heads].sample, fmean(losses))
            axis.scatter(*place, s=400 * caches[heads] / max(caches.values()), color=color, alpha=0.7)
            axis.annotate(label, place, (9, 6), textcoords="offset points", fontsize=8)
    axis.set(xlabel=f"s for {many}", ylabel=LOSS)
    axis.set_title("area: bytes of cache per token", fontsize=8)
    axis.margins(0.15)
    tidy(axis)
    title, pictures = "Number of key/value heads against time and quality", {"groups.png": figure, "trade.png": trade}
    return Findings(title, Table(header, rows), numbers, pictures)


def measure(study: Study) -> dict[int, Times]:
    """Return times by number of key/value heads, of models with random weights that take turns."""
    recipe = study.recipe
    middle = recipe.prompt_tokens + recipe.new_tokens // 2
    configs = {study.label(heads): study.config_with(heads) for heads in study.all_heads()}
    say("Measuring speeds ...")
    try:
        speeds = measure_speeds(configs, [middle], recipe.prompt_tokens, recipe.batch_size)
    except UserError as error:
        raise UserError(f"{error}; runs are kept, and the same command measures again") from error
    found = {}
    for heads in study.all_heads():
        speed = speeds[study.label(heads)]
        token = speed.decode_milliseconds[middle]
        prompts = recipe.batch_size * recipe.prompt_tokens / speed.prompt_tokens_per_second
        found[heads] = Times(token, prompts + recipe.new_tokens * token / 1000)
    return found
