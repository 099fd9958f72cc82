"""Which runs a comparison still needs: for each model a sweep, then seeds at its best rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe.objects import as_object
from ..recipe.pretraining import Recipe
from ..shared.runs import Run
from .candidates import Candidate
from .recipe import CompareRecipe
from .sweep import best_rate, further_rate


@dataclass(frozen=True)
class Trial:
    """A pretraining run of a comparison.

    Args:
        candidate: name of the model.
        learning_rate: its peak.
        seed: of weights and of the order of the text.
    """

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
        candidate: name of the model.
        sweep: validation losses of the first seed by rate, of the runs that have ended; nan for those that failed, inf
            for those that diverged.
        rate: the best one; `None` while the sweep goes on, and where all of its runs failed.
        seeds: the same at the best rate, by seed.
        needed: runs that have not ended.
    """

    candidate: str
    sweep: dict[float, float]
    rate: float | None
    seeds: dict[int, float]
    needed: list[Trial]


def plan(candidate: str, recipe: CompareRecipe, ended: Mapping[str, float]) -> Plan:
    """Return what is known of a model, and the runs that it still needs.

    Args:
        candidate: name of the model.
        recipe: of the comparison.
        ended: validation loss by name of the run, of all that have ended; nan for those that failed, inf for those
            that diverged.
    """
    rates: Sequence[float] = recipe.learning_rates
    tried = list(rates)
    while True:
        trials = {rate: Trial(candidate, rate, recipe.seed) for rate in tried}
        sweep = {rate: ended[trial.name] for rate, trial in trials.items() if trial.name in ended}
        needed = [trial for trial in trials.values() if trial.name not in ended]
        further = None if needed else further_rate(sweep, rates)
        if further is None:
            break
        tried.append(further)
    sweep = dict(sorted(sweep.items()))
    best = None if needed else best_rate(sweep)
    if best is None:
        return Plan(candidate, sweep, None, {}, needed)
    finals = [Trial(candidate, best, recipe.seed + number) for number in range(recipe.seeds)]
    seeds = {trial.seed: ended[trial.name] for trial in finals if trial.name in ended}
    return Plan(candidate, sweep, best, seeds, [trial for trial in finals if trial.name not in ended])


@dataclass(frozen=True)
class Comparison:
    """A comparison as its recipe says.

    Args:
        recipe: of the comparison.
        pretraining: the recipe of its runs, with the options that all of them have.
        candidates: the models.
    """

    recipe: CompareRecipe
    pretraining: Recipe
    candidates: Sequence[Candidate]

    @property
    def folder(self) -> Path:
        return Path(str(self.recipe.output_dir)).resolve()  # runs compare what they are told when they go on

    def plans(self, ended: Mapping[str, float]) -> list[Plan]:
        """Return what is known of each model."""
        return [plan(candidate.name, self.recipe, ended) for candidate in self.candidates]

    def needed(self, ended: Mapping[str, float]) -> list[Run]:
        """Return the runs that have not ended."""
        overrides = {candidate.name: candidate.overrides for candidate in self.candidates}
        return [self.run(trial, overrides[trial.candidate]) for found in self.plans(ended) for trial in found.needed]

    def later(self, ended: Mapping[str, float]) -> int:
        """Return how many runs the models will need whose best rate is not known yet, if it is none of those tried."""
        return sum(self.recipe.seeds for found in self.plans(ended) if found.rate is None and found.needed)

    def run(self, trial: Trial, overrides: dict[str, Any]) -> Run:
        options: dict[str, Any] = {
            "publish": False,
            "tokenizer": self.pretraining.tokenizer or str(self.folder / "tokenizer"),
            **as_object("options", self.recipe.options),
            "preset": self.recipe.preset,
            "model_overrides": overrides,
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "data_seed": trial.seed,
        }
        return Run(trial.name, "pretrain", self.recipe.pretraining, options)


def usable(losses: Mapping[int, float]) -> list[float]:
    """Return the losses of runs that did not fail."""
    return [loss for loss in losses.values() if math.isfinite(loss)]
