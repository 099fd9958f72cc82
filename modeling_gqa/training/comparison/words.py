"""The report of a comparison in Markdown: conclusion, confounds, results, and the price of each step."""

import math
from collections.abc import Sequence

from ...common.errors import listed
from ...common.tables import Table, three_digits, with_prefix
from ..recipe.pretraining import Recipe
from .anchors import anchors
from .outcome import Entry, Outcome
from .recipe import CompareRecipe

MATCHED = {
    "parameters": "All models have the parameters of the first, by the width of the MLP",
    "flops": "All models take the training FLOPs of the first, by the width of the MLP",
    "cache": "All models cache as many bytes as the first, by the size of their heads or of their latent",
    "nothing": "Nothing but the preset is matched: models differ in parameters, FLOPs and cache",
}


def planned(recipe: CompareRecipe, pretraining: Recipe, models: int) -> str:
    """Return how many runs a comparison has, and of how many tokens where the recipe says so."""
    rates, seeds = len(recipe.learning_rates), recipe.seeds
    said = (
        f"{models * (rates + seeds)} runs: {models} models, each at {rates} learning rates and with {seeds} seeds at "
        "the best; more where the best is the first or the last"
    )
    if pretraining.max_steps <= 0 or recipe.launcher:  # which may start several processes
        return f"{said}."
    blocks = pretraining.per_device_train_batch_size * pretraining.gradient_accumulation_steps * pretraining.max_steps
    return f"{said}. A run trains on {blocks * pretraining.sequence_length:,} tokens."


def conclusion(outcome: Outcome) -> list[str]:
    """Return sentences that say which model has the lowest loss, and which cannot be told from it."""
    ranked = outcome.finished
    if not ranked:
        return ["No run has ended: there is nothing to conclude."]
    best, *others = ranked
    said = [f"The lowest mean validation loss is {best.loss:.4f} nats per token, of {best.name}."]
    if lost := [entry.name for entry in outcome.entries if entry not in ranked]:
        said.append(f"Of {listed(lost, 'and')} no run at the best rate has ended: there is no loss to compare.")
    if not outcome.spread.freedom:
        return [*said, "No model has two seeds, so there is no spread, and none is declared better than another."]
    alike = [entry for entry in others if not outcome.differ(best, entry)]
    apart = [entry for entry in others if outcome.differ(best, entry)]
    if alike:
        shown = listed((f"{entry.name} (+{entry.loss - best.loss:.4f})" for entry in alike), "and")
        said.append(f"Within the spread of seeds, {shown} cannot be told from it.")
    if apart:
        shown = listed((f"{entry.name} (+{entry.loss - best.loss:.4f})" for entry in apart), "and")
        said.append(f"Beyond the spread, {shown} {'have a' if len(apart) > 1 else 'has a'} higher loss.")
    return said


def steps(outcome: Outcome) -> list[str]:
    """Return a sentence for each step on the pareto front, from its largest cache to its smallest."""
    said = []
    for larger, smaller in zip(outcome.front, outcome.front[1:], strict=False):
        times = larger.cache_bytes_per_token / smaller.cache_bytes_per_token
        cost = smaller.loss - larger.loss
        sure = "" if outcome.differ(larger, smaller) else ", which is within the spread of seeds"
        said.append(
            f"From {larger.name} to {smaller.name} the cache shrinks {three_digits(times)} times and the loss rises by "
            f"{cost:.4f} nats per token (perplexity by {math.expm1(cost):.1%}){sure}{slower(larger, smaller)}."
        )
    if len(outcome.front) == 1:
        said.append("No other model has a smaller cache: there is no step to pay for.")
    return said


def slower(larger: Entry, smaller: Entry) -> str:
    """Return what a decoded token takes before and after a step, at the longest context that was measured."""
    context = max(smaller.speed.decode_milliseconds, default=0)
    if not context:
        return ""
    times = [entry.speed.decode_milliseconds[context] for entry in (larger, smaller)]
    return f"; a decoded token after {context:,} takes {times[1]:.2f} ms where it took {times[0]:.2f}"


def confounds(recipe: CompareRecipe, outcome: Outcome, same_text: str) -> list[str]:
    """Return what else may explain the differences."""
    first = outcome.entries[0]
    parameters = [entry.parameters / first.parameters - 1 for entry in outcome.entries]
    flops = [entry.training_flops_per_token / first.training_flops_per_token - 1 for entry in outcome.entries]
    said = [
        f"{MATCHED[recipe.match]}. Beside the first model's, parameters are {in_percent(parameters)}, training FLOPs "
        f"{in_percent(flops)}.",
        same_text,
        f"The learning rate was swept with one seed ({recipe.seed}), which is also among those at the best rate: a "
        "lucky run of the sweep counts twice.",
        "A small model that is trained briefly does not say what a large one would do. Only the learning rate was "
        "tuned, not schedule, batch or initialisation.",
    ]
    if lacking := [entry.name for entry in outcome.entries if len(entry.sample.values) < recipe.seeds]:
        said.append(
            f"Runs of {listed(lacking, 'and')} failed or diverged at the best rate, and are left out of the means, "
            "which may be too low for that."
        )
    if gaps := [entry.name for entry in outcome.entries if any(map(math.isnan, entry.sweep.values()))]:
        said.append(f"Runs of the sweep of {listed(gaps, 'and')} failed: the best rate may be another.")
    edges = [
        entry.name for entry in outcome.entries if entry.rate and entry.rate in (min(entry.sweep), max(entry.sweep))
    ]
    if edges:
        said.append(
            f"The best rate of {listed(edges, 'and')} lies at the edge of what was tried; a better one may lie beyond."
        )
    return said


def in_percent(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    if max(abs(low), abs(high)) < 0.0005:
        return "the same"
    return f"{low:+.1%} to {high:+.1%}"


def results_table(outcome: Outcome) -> Table:
    """Losses, costs and speeds, a row for each model."""
    contexts = sorted({context for entry in outcome.entries for context in entry.speed.decode_milliseconds})
    header = [
        "model",
        "loss",
        "bits per byte",
        "deviation",
        "seeds",
        "best rate",
        "parameters",
        "FLOP per token",
        "cache, bytes per token (bfloat16)",
    ]
    header += [f"ms a token after {context:,}" for context in contexts]
    header += ["prompt, tokens/s", "training, tokens/s"]
    return Table(header, [[entry.name, *row(outcome, entry, contexts)] for entry in outcome.entries])


def row(outcome: Outcome, entry: Entry, contexts: Sequence[int]) -> list[str]:
    speed = entry.speed
    return [
        shown(entry.loss),
        shown(outcome.bits_per_byte(entry.loss)),
        "-" if math.isnan(entry.deviation) else f"{entry.deviation:.4f}",
        f"{sum(math.isfinite(loss) for loss in entry.losses.values())}",
        "-" if entry.rate is None else f"{entry.rate:.2e}",
        f"{entry.parameters:,}",
        with_prefix(entry.training_flops_per_token),
        f"{entry.cache_bytes_per_token:,}",
        *(f"{speed.decode_milliseconds[context]:.2f}" for context in contexts),
        rate(speed.prompt_tokens_per_second),
        rate(speed.training_tokens_per_second),
    ]


def sweep_table(outcome: Outcome) -> Table:
    """Validation loss of the first seed by learning rate, a row for each model; the best is in bold."""
    rates = sorted({rate for entry in outcome.entries for rate in entry.sweep})
    rows = []
    for entry in outcome.entries:
        best = min((loss for loss in entry.sweep.values() if math.isfinite(loss)), default=None)
        cells = [entry.sweep.get(rate) for rate in rates]
        rows.append(
            [
                entry.name,
                *("" if loss is None else f"**{loss:.4f}**" if loss == best else shown(loss) for loss in cells),
                "-" if entry.rate is None else f"{entry.rate:.2e}",
            ]
        )
    return Table(["model", *(f"{rate:.2e}" for rate in rates), "best"], rows)


def shown(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "failed" if math.isnan(loss) else "diverged"


def rate(tokens_per_second: float) -> str:
    return "-" if math.isnan(tokens_per_second) else f"{tokens_per_second:,.0f}"


def write_report(
    recipe: CompareRecipe, outcome: Outcome, measured: str, same_text: str, failures: dict[str, str]
) -> str:
    """Return the whole report in Markdown.

    Args:
        recipe: of the comparison.
        outcome: what was found.
        measured: a sentence that says where speeds were measured.
        same_text: a sentence that says what all models were trained on.
        failures: last words of runs that failed, by name.
    """
    lines = [
        f"# Attention compared: {listed([entry.name for entry in outcome.entries], 'and')}",
        "",
        *conclusion(outcome),
        "",
    ]
    if (spread := outcome.spread).freedom:
        lines += [
            f"Losses are means over seeds; one run deviates by {spread.deviation:.4f} (pooled over the models, "
            f"{spread.freedom} degrees of freedom). Two means differ here where they are further apart than "
            f"{spread.quantile:.2f} standard errors of their difference (95 % by Student's t, one pair at a time).",
            "",
        ]
    lines += ["## What else may explain it", ""]
    lines += [f"- {sentence}" for sentence in confounds(recipe, outcome, same_text)]
    lines += ["", "## Results", "", results_table(outcome).to_markdown(), ""]
    lines += [measured, ""]
    lines += ["![validation loss against bytes of cache](loss_by_cache.png)", ""]
    lines += ["![milliseconds of a decoded token against the context](decoding.png)", ""]
    lines += ["## Learning rates", "", sweep_table(outcome).to_markdown(), ""]
    lines += ["![validation loss against the learning rate](loss_by_rate.png)", ""]
    lines += ["![training loss against tokens](curves.png)", ""]
    if failures:
        lines += ["## Runs that failed", "", *(f"- {name}: {said}" for name, said in failures.items()), ""]
    if found := anchors(outcome):
        lines += ["## Beside published figures", "", *(f"- {sentence}" for sentence in found), ""]
    front = [f"{x.name} ({x.cache_bytes_per_token:,} bytes per token, loss {x.loss:.4f})" for x in outcome.front]
    if front:
        lines += ["## The pareto front", "", f"Largest cache first: {'; '.join(front)}.", "", *steps(outcome), ""]
    return "\n".join(lines)
