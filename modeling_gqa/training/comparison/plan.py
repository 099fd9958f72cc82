"""Which runs a comparison still needs: for each model a sweep of learning rates, then seeds at its best rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.source import open_source, split_source
from ..recipe import Recipe
from ..run_setup import text_of, write_tokenizer
from .models import Candidate, CompareRecipe

# What may differ when a comparison goes on: none of it changes what a finished run has found.
FREE = {"learning_rates", "seeds", "jobs", "launcher", "contexts", "output_dir"}
EXTENSIONS = 4  # rates beyond either edge of those that are asked for, at most


@dataclass(frozen=True)
class Trial:
    """A pretraining run of the model named `candidate`; the seed is that of weights and of the order of the text."""

    candidate: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.candidate}-rate{self.learning_rate:.2e}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is known of one model, and what is not.

    Args:
        sweep: validation losses of the first seed by rate, of the runs that have ended.
        rate: the best one; `None` while the sweep goes on, and where all of its runs failed.
        seeds: validation losses at the best rate, by seed.
        needed: runs that have not ended.
    """

    candidate: str
    sweep: dict[float, float]
    rate: float | None
    seeds: dict[int, float]
    needed: list[Trial]


def plan(candidate: str, recipe: CompareRecipe, ended: Mapping[str, float]) -> Plan:
    """Return what is known of the model named `candidate`, and the runs that it still needs.

    Args:
        ended: validation loss by name of the run, of all that have ended; nan of those that failed, inf of those that
            diverged.
    """

    def left(trials: list[Trial]) -> list[Trial]:
        return [trial for trial in trials if trial.name not in ended]

    trials = [Trial(candidate, rate, recipe.seed) for rate in recipe.learning_rates]
    while True:
        sweep = {trial.learning_rate: ended[trial.name] for trial in trials if trial.name in ended}
        further = None if left(trials) else further_rate(sweep, recipe.learning_rates)
        if further is None:
            break
        trials.append(Trial(candidate, further, recipe.seed))
    sweep = dict(sorted(sweep.items()))
    best = None if left(trials) else best_rate(sweep)
    if best is None:
        return Plan(candidate, sweep, None, {}, left(trials))
    swept = lowest(sweep)
    if not ended.get(Trial(candidate, best, recipe.seed).name, -math.inf) <= sweep[swept]:  # type: ignore[index]
        best = swept  # since the run at the vertex was worse, or failed
    finals = [Trial(candidate, best, recipe.seed + number) for number in range(recipe.seeds)]
    seeds = {trial.seed: ended[trial.name] for trial in finals if trial.name in ended}
    return Plan(candidate, sweep, best, seeds, left(finals))


@dataclass(frozen=True)
class Comparison:
    """A comparison: its recipe, that of its runs with the options that all of them have, and the models."""

    recipe: CompareRecipe
    pretraining: Recipe
    candidates: Sequence[Candidate]

    @property
    def folder(self) -> Path:
        return Path(str(self.recipe.output_dir)).resolve()  # runs compare what they are told when they go on

    def planned(self) -> str:
        """Return how many runs there are, and of how many tokens where the recipe says so."""
        rates, seeds, models = len(self.recipe.learning_rates), self.recipe.seeds, len(self.candidates)
        said = (
            f"{models * (rates + seeds)} runs: {models} models, each at {rates} learning rates and with {seeds} seeds "
            "at the best; more where the best is the first or the last."
        )
        runs = self.pretraining
        if runs.max_steps <= 0 or self.recipe.launcher:  # which may start several processes
            return said
        batch = runs.per_device_train_batch_size * runs.gradient_accumulation_steps
        return f"{said} A run trains on {batch * runs.max_steps * runs.sequence_length:,} tokens."

    def write_tokenizer(self) -> None:
        """Train the tokenizer that all runs share, unless the recipe names one."""
        recipe = self.pretraining
        if not recipe.tokenizer:
            source = open_source(recipe, recipe.order_seed)
            text, split = text_of(source, recipe), lambda: split_source(source, recipe)
            write_tokenizer(self.folder / "tokenizer", text, split, self.candidates[0].config.vocab_size)

    def plans(self, ended: Mapping[str, float]) -> list[Plan]:
        """Return what is known of each model."""
        return [plan(candidate.name, self.recipe, ended) for candidate in self.candidates]

    def needed(self, ended: Mapping[str, float]) -> list[Trial]:
        """Return the runs that have not ended."""
        return [trial for found in self.plans(ended) for trial in found.needed]

    def later(self, ended: Mapping[str, float]) -> int:
        """Return how many runs the models will need whose best rate is not known yet, if it is none of those tried."""
        return sum(self.recipe.seeds for found in self.plans(ended) if found.rate is None and found.needed)

    def options(self, trial: Trial) -> dict[str, Any]:
        """Return the options of a run's recipe, without output_dir and resume."""
        overrides = {candidate.name: candidate.overrides for candidate in self.candidates}
        return {
            "publish": False,
            "tokenizer": self.pretraining.tokenizer or str(self.folder / "tokenizer"),
            **self.recipe.options,  # type: ignore[dict-item]
            "preset": self.recipe.preset,
            "model_overrides": overrides[trial.candidate],
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "data_seed": trial.seed,
        }


# -- The sweep


def further_rate(losses: Mapping[float, float], rates: Sequence[float]) -> float | None:
    """Return the rate that a sweep still needs where its best is an edge, one step beyond; `None` where it needs none.

    Args:
        losses: by rate; nan or inf where a run failed or diverged.
        rates: those that were asked for, rising.
    """
    best, tried = lowest(losses), sorted(losses)
    if best is None:
        return None
    if best == tried[-1] and sum(rate > rates[-1] for rate in tried) < EXTENSIONS:
        return rounded(best * rates[-1] / rates[-2])
    if best == tried[0] and sum(rate < rates[0] for rate in tried) < EXTENSIONS:
        return rounded(best * rates[0] / rates[1])
    return None


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Return the vertex of the parabola through the best rate and its neighbours, over the logarithm of the rate.

    It is the best rate itself where a neighbour is missing or diverged, and `None` where all diverged.
    """
    best, tried = lowest(losses), sorted(losses)
    if best is None:
        return None
    place = tried.index(best)
    near = tried[max(0, place - 1) : place + 2]
    if len(near) < 3 or not all(math.isfinite(losses[rate]) for rate in near):
        return best
    curvature, slope, _ = np.polyfit([math.log(rate / best) for rate in near], [losses[rate] for rate in near], 2)
    return rounded(best * math.exp(-slope / curvature / 2)) if curvature > 1e-12 else best


def lowest(losses: Mapping[float, float]) -> float | None:
    finite = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda rate: losses[rate], default=None)


def rounded(rate: float) -> float:
    """Return a rate in three digits, by which runs are named."""
    return float(f"{rate:.2e}")
