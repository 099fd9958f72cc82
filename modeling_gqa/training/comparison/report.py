"""What a comparison has found, and its report: a line of verdict, tables, pictures and JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, isinf, isnan, log, nan, sqrt
from pathlib import Path
from typing import Any

from scipy import stats

from modeling_gqa_cli.errors import UserError

from ...common.atomic import read_object, write_json, write_text
from ...common.console import say
from ...common.pictures import COLORS, line_styles, name_lines, new_figure, save, tidy
from ...common.tables import Table, with_prefix
from ...costs import CostedModel, cache_bytes_per_token, count_parameters, training_flops
from ...costs.speeds import Speeds, decoding_speeds, where_measured
from ..results import RESULTS
from ..run_folder import checkpoints
from .models import MATCHED, CompareRecipe
from .plan import Comparison, Trial
from .runs import Runs

REPORT = "report.md"
LOSS = "validation loss (nats per token)"
Points = Sequence[tuple[float, float]]
TEXT = """# Attention compared

{verdict}

{matched} Each model sees the same text in the same order. The learning rate is swept with the first seed; schedule,
batch size and initialisation are the recipe's for all models.

{results}

Loss: mean over seeds, in nats per token. Above the lowest: ± is the margin of the difference (95 %, Student's t, from
a deviation of {deviation} of one run, pooled over the models with {freedom} degrees of freedom). Front: no other
model has a lower loss with as small a cache. Cache: bfloat16. {measured}

![validation loss against bytes of cache](loss_by_cache.png)

![milliseconds of a decoded token against the context](decoding.png)

## Learning rates

Validation loss of the first seed.

{rates}

![validation loss against the learning rate](loss_by_rate.png)

![training loss against tokens](curves.png)
"""
SPEEDS = "Speeds: {machine}, random weights, the models in turn; decoding of one sequence."


@dataclass(frozen=True)
class Entry:
    """A model of a comparison, and what was found of it.

    Args:
        name: of the model.
        kind: "mha", "mqa", "gqa", "mla" or "mixed".
        overrides: fields in which it differs from the preset.
        parameters: of the model.
        training_flops_per_token: forward and backward, at the length of a sequence.
        cache_bytes_per_token: in bfloat16.
        sweep: validation loss of the first seed, by learning rate; nan where the run failed, inf where it diverged.
        rate: the best one; `None` where all runs failed.
        losses: validation losses at the best rate, in nats per token, by seed; nan and inf as in `sweep`.
        decode_milliseconds: of one token of one sequence by context, on the machine of the report.
    """

    name: str
    kind: str
    overrides: dict[str, Any]
    parameters: int
    training_flops_per_token: float
    cache_bytes_per_token: int
    sweep: dict[float, float]
    rate: float | None
    losses: dict[int, float]
    decode_milliseconds: dict[int, float] = field(default_factory=dict)

    @property
    def usable(self) -> list[float]:
        """The losses of the runs that neither failed nor diverged."""
        return [loss for loss in self.losses.values() if isfinite(loss)]

    @property
    def loss(self) -> float:
        """The mean over the seeds that did not fail; nan where there are none."""
        return statistics.fmean(self.usable) if self.usable else nan

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; nan below two seeds."""
        return statistics.stdev(self.usable) if len(self.usable) > 1 else nan

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the lowest or the highest that was tried: a better one may lie beyond."""
        return self.rate is not None and self.rate in (min(self.sweep), max(self.sweep))


@dataclass(frozen=True)
class Outcome:
    """What a comparison has found.

    Args:
        entries: the models, in the order of the recipe.
        bytes_per_token: of the validation text; nan where it is not known.
        tokens_seen: the numbers of tokens that runs were trained on, each once; more than one cannot be compared.
    """

    entries: Sequence[Entry]
    bytes_per_token: float = nan
    tokens_seen: Sequence[int] = ()

    @property
    def finished(self) -> list[Entry]:
        """Models of which at least one run at the best rate has ended, lowest loss first."""
        return sorted((entry for entry in self.entries if isfinite(entry.loss)), key=lambda entry: entry.loss)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the deviation: runs less models."""
        return sum(len(entry.usable) - 1 for entry in self.finished)

    @property
    def deviation(self) -> float:
        """The standard deviation of a run over seeds, pooled over the models; nan where no model has two runs."""
        squares = sum((loss - entry.loss) ** 2 for entry in self.finished for loss in entry.usable)
        return sqrt(squares / self.freedom) if self.freedom else nan

    def bits_per_byte(self, loss: float) -> float:
        """Return a loss in bits per byte of the validation text."""
        return loss / log(2) / self.bytes_per_token

    def margin(self, one: Entry, other: Entry) -> float:
        """Return half of the 95 % interval, by Student's t, of the difference of two means; nan without a deviation."""
        error = self.deviation * sqrt(sum(1 / len(entry.usable) for entry in (one, other)))
        return float(stats.t.ppf(0.975, self.freedom)) * error if self.freedom else nan

    def differ(self, one: Entry, other: Entry) -> bool:
        """Return whether two means are further apart than the margin of their difference."""
        return abs(one.loss - other.loss) > self.margin(one, other)

    @property
    def front(self) -> list[Entry]:
        """The pareto front, largest cache first: no other model has a lower mean loss with as small a cache."""
        found: list[Entry] = []
        for entry in sorted(self.finished, key=lambda entry: (entry.cache_bytes_per_token, entry.loss)):
            if not found or entry.loss < found[-1].loss:
                found.append(entry)
        return found[::-1]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in types that JSON has."""
        return {
            "models": [
                asdict(entry) | {"mean_loss": entry.loss, "loss_deviation": entry.deviation} for entry in self.entries
            ],
            "bytes_per_token": self.bytes_per_token,
            "tokens_seen": list(self.tokens_seen),
            "pooled_deviation": self.deviation,
            "degrees_of_freedom": self.freedom,
            "pareto_front": [entry.name for entry in self.front],
        }


def outcome_of(comparison: Comparison, ended: Mapping[str, float], speeds: Speeds) -> Outcome:
    """Return what the runs of a comparison have found.

    Args:
        ended: validation loss by name of the run, of all that have ended; nan for those that failed, inf for those
            that diverged.
        speeds: by name of the model, of those that were measured.
    """
    tokens = comparison.pretraining.sequence_length
    entries = [
        Entry(
            name=candidate.name,
            kind=CostedModel(candidate.config).kind,
            overrides=candidate.overrides,
            parameters=count_parameters(candidate.config),
            training_flops_per_token=training_flops(candidate.config, 1, tokens) / tokens,
            cache_bytes_per_token=cache_bytes_per_token(candidate.config),
            sweep=found.sweep,
            rate=found.rate,
            losses=found.seeds,
            decode_milliseconds=speeds.get(candidate.name, {}),
        )
        for candidate, found in zip(comparison.candidates, comparison.plans(ended), strict=True)
    ]
    results = [read_object(path) or {} for path in sorted(comparison.folder.glob(f"runs/*/{RESULTS}"))]
    seen = {found.get("tokens_seen", 0) for found in results}
    return Outcome(entries, results[0].get("bytes_per_token", nan) if results else nan, sorted(seen))


# -- The report


def write_outcome(comparison: Comparison, runs: Runs) -> None:
    """Measure speeds; write `comparison.json`, `report.md` and the pictures."""
    recipe, folder = comparison.recipe, comparison.folder
    machine = where_measured()
    measured = SPEEDS.format(machine=machine)
    say("Measuring speeds ...")
    configs = {candidate.name: candidate.config for candidate in comparison.candidates}
    try:
        speeds = decoding_speeds(configs, recipe.contexts)
    except UserError as error:  # too little memory for all models at once, for one
        speeds, measured = {}, f"There are no speeds: {error}."
        say(measured)
    outcome, failures = outcome_of(comparison, runs.ended(), speeds), runs.failures()
    content = {"recipe": asdict(recipe), "machine": machine, "failures": failures, **outcome.to_dict()}
    write_json(folder / "comparison.json", content)
    plot_comparison(outcome, curves(comparison, outcome), folder)
    write_text(folder / REPORT, comparison_report(recipe, outcome, measured, failures))
    say(verdict(outcome))


def comparison_report(recipe: CompareRecipe, outcome: Outcome, measured: str, failures: Mapping[str, str]) -> str:
    """Return the report in Markdown; `measured` says where speeds were measured, `failures` what failed, by run."""
    text = TEXT.format(
        verdict=verdict(outcome),
        matched=MATCHED[recipe.match],
        results=losses_table(outcome, recipe.seeds).to_markdown(),
        deviation=number(outcome.deviation),
        freedom=outcome.freedom,
        measured=measured,
        rates=rates_table(outcome).to_markdown(),
    )
    lost = "".join(f"- {name}: {said}\n" for name, said in failures.items())
    return text + (f"\n## Runs that failed\n\n{lost}" if lost else "")


def verdict(outcome: Outcome) -> str:
    """Return a line: which model has the lowest loss, and which cannot be told from it."""
    if len(outcome.tokens_seen) > 1:
        low, *_, high = outcome.tokens_seen
        return f"Runs were trained on {low:,} to {high:,} tokens: their losses cannot be compared."
    if not outcome.finished:
        return "No run at a best rate has ended."
    best, *others = outcome.finished
    alike = ", ".join(entry.name for entry in others if not outcome.differ(best, entry)) or "none"
    return f"Lowest loss: {best.name}, {best.loss:.4f} nats per token. Not told from it by these seeds: {alike}."


def losses_table(outcome: Outcome, seeds: int) -> Table:
    """Losses, costs and speeds, one line for each model."""
    contexts = sorted({context for entry in outcome.entries for context in entry.decode_milliseconds})
    header = ["model", "loss", "above the lowest", "bits per byte", "deviation", "seeds", "best rate", "front"]
    header += ["parameters", "FLOP per token", "cache, bytes per token", *(f"ms a token after {x:,}" for x in contexts)]
    front, best = outcome.front, outcome.finished[:1]
    rows = []
    for entry in outcome.entries:
        above = "0" if entry in best else "-"
        if best and entry not in best and isfinite(entry.loss):
            above = f"{entry.loss - best[0].loss:.4f} ± {number(outcome.margin(entry, best[0]))}"
        rate = "-" if entry.rate is None else f"{entry.rate:.2e}{' (edge)' if entry.at_edge else ''}"
        ended = f"{len(entry.usable)} of {seeds}"
        bits = number(outcome.bits_per_byte(entry.loss))
        losses = [loss_in_words(entry.loss), above, bits, number(entry.deviation), ended, rate]
        sizes = [
            f"{entry.parameters:,}",
            with_prefix(entry.training_flops_per_token),
            f"{entry.cache_bytes_per_token:,}",
        ]
        speeds = [number(entry.decode_milliseconds.get(x, nan), ".2f") for x in contexts]
        rows.append([entry.name, *losses, "yes" if entry in front else "", *sizes, *speeds])
    return Table(header, rows)


def rates_table(outcome: Outcome) -> Table:
    """Validation loss of the first seed by learning rate, one line for each model; the lowest is in bold."""
    rates = sorted({rate for entry in outcome.entries for rate in entry.sweep})
    rows = []
    for entry in outcome.entries:
        low = min(entry.sweep.values(), key=lambda loss: (not isfinite(loss), loss), default=None)
        cells = {rate: loss_in_words(loss) for rate, loss in entry.sweep.items()}
        cells |= {rate: f"**{loss:.4f}**" for rate, loss in entry.sweep.items() if loss == low and isfinite(loss)}
        best = "-" if entry.rate is None else f"{entry.rate:.2e}"
        rows.append([entry.name, *(cells.get(rate, "") for rate in rates), best])
    return Table(["model", *(f"{rate:.2e}" for rate in rates), "best"], rows)


def loss_in_words(loss: float) -> str:
    return "failed" if isnan(loss) else "diverged" if isinf(loss) else f"{loss:.4f}"


def number(value: float, form: str = ".4f") -> str:
    return "-" if isnan(value) else format(value, form)


# -- Pictures


def curves(comparison: Comparison, outcome: Outcome) -> dict[str, Points]:
    """Return tokens and training loss of the first run of each model at its best rate."""
    found: dict[str, Points] = {}
    for entry in outcome.entries:
        if entry.rate is not None and entry.losses:
            trial = Trial(entry.name, entry.rate, min(entry.losses))
            last = checkpoints(comparison.folder / "runs" / trial.name)[-1:]
            state = read_object(last[0] / "trainer_state.json") if last else None
            logs = [x for x in (state or {}).get("log_history", []) if {"loss", "tokens_seen"} <= x.keys()]
            found[entry.name] = [(x["tokens_seen"], x["loss"]) for x in logs]
    return found


def plot_comparison(outcome: Outcome, curves: Mapping[str, Points], folder: Path) -> None:
    """Write the four pictures of a comparison; `curves` are those of training, by name of the model."""
    entries = outcome.entries
    rates = {entry.name: [(x, y) for x, y in entry.sweep.items() if isfinite(y)] for entry in entries}
    decoding = {entry.name: list(entry.decode_milliseconds.items()) for entry in entries}
    save(plot_losses(outcome), folder / "loss_by_cache.png")
    save(plot_lines(entries, rates, "learning rate", LOSS, "{:.1e}"), folder / "loss_by_rate.png")
    token = "decoded token, one sequence (ms)"
    save(plot_lines(entries, decoding, "context (tokens)", token, "{:,}"), folder / "decoding.png")
    save(plot_lines(entries, curves, "tokens trained on", "training loss (nats per token)"), folder / "curves.png")


def plot_losses(outcome: Outcome) -> Any:
    """Draw mean losses with the deviation over seeds against the bytes of cache per token, and the pareto front."""
    figure = new_figure(figsize=(6.5, 4))
    axis = figure.subplots()
    front = [(entry.cache_bytes_per_token, entry.loss) for entry in outcome.front]
    axis.plot([x for x, _ in front], [y for _, y in front], color="0.7", linewidth=1, zorder=0)
    for entry in outcome.finished:
        bars = entry.deviation if isfinite(entry.deviation) else None
        place, color = (entry.cache_bytes_per_token, entry.loss), COLORS[entry.kind]
        axis.errorbar(*place, yerr=bars, fmt="o", color=color, capsize=3)
        axis.annotate(entry.name, place, (6, 5), textcoords="offset points", color=color, fontsize=8)
    ticks = sorted({entry.cache_bytes_per_token for entry in outcome.finished})
    axis.set(xscale="log", xlabel="cache (bytes per token, bfloat16)", ylabel=LOSS)
    axis.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    tidy(axis)
    axis.set_title("bars: one standard deviation over seeds; grey: the pareto front", fontsize=8)
    return figure


def plot_lines(entries: Sequence[Entry], lines: Mapping[str, Points], xlabel: str, ylabel: str, ticks: str = "") -> Any:
    """Draw a line for each model, named at its end; `ticks` is the format of a logarithmic axis, marked at each x."""
    figure = new_figure(figsize=(6.5, 4))
    axis = figure.subplots()
    styles = dict(zip((entry.name for entry in entries), line_styles([entry.kind for entry in entries]), strict=True))
    drawn = {name: lines[name] for name in styles if lines.get(name)}
    marker = "o" if max(map(len, drawn.values()), default=0) < 20 else None
    for name, points in drawn.items():
        axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=4, **styles[name])
    axis.set(xlabel=xlabel, ylabel=ylabel)
    if ticks:
        places = sorted({x for points in drawn.values() for x, _ in points})
        axis.set_xscale("log")
        axis.set_xticks(places, labels=[ticks.format(x) for x in places], rotation=30)
    else:
        axis.xaxis.set_major_formatter("{x:,.0f}")
    tidy(axis)
    name_lines(axis, [(*points[-1], name, styles[name]["color"]) for name, points in drawn.items()], least=0.06)
    return figure
