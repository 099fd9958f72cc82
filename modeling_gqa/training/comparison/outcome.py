"""What a comparison has found: losses with their spread, speeds, the pareto front and what each step on it costs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...costs import CostedModel
from ...costs.speeds import Speed
from ..shared.spread import Sample, Spread, pooled
from .candidates import Candidate
from .plan import Plan, usable


@dataclass(frozen=True)
class Entry:
    """A model of a comparison, and what was found of it.

    Args:
        name: of the model.
        kind: "mha", "mqa", "gqa", "mla" or "mixed".
        overrides: fields in which it differs from the preset.
        parameters: of the model.
        training_flops_per_token: forward and backward, at the length of a block.
        cache_bytes_per_token: in bfloat16.
        sweep: validation loss of the first seed, by learning rate; nan where the run failed, inf where it diverged.
        rate: the best one; `None` where all runs failed.
        losses: validation losses at the best rate, in nats per token, by seed; nan and inf as in `sweep`.
        speed: on the machine of the report.
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
    speed: Speed = field(default_factory=Speed)

    @property
    def loss(self) -> float:
        """The mean over the seeds that did not fail; nan where there are none."""
        found = usable(self.losses)
        return statistics.fmean(found) if found else math.nan

    @property
    def sample(self) -> Sample:
        """The losses of the runs that did not fail."""
        return Sample(self.name, usable(self.losses))

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; nan below two seeds."""
        found = usable(self.losses)
        return statistics.stdev(found) if len(found) > 1 else math.nan


@dataclass(frozen=True)
class Outcome:
    """What a comparison has found.

    Args:
        entries: the models, in the order of the recipe.
        bytes_per_token: of the validation text; nan where it is not known.
    """

    entries: Sequence[Entry]
    bytes_per_token: float = math.nan

    @property
    def finished(self) -> list[Entry]:
        """Models of which at least one run at the best rate has ended, lowest loss first."""
        return sorted((entry for entry in self.entries if math.isfinite(entry.loss)), key=lambda entry: entry.loss)

    @property
    def spread(self) -> Spread:
        """How far runs of different seeds part, pooled over the models."""
        return pooled(usable(entry.losses) for entry in self.finished)

    def bits_per_byte(self, loss: float) -> float:
        """Return a loss, or a difference of losses, in bits per byte of the validation text."""
        return loss / math.log(2) / self.bytes_per_token

    def differ(self, one: Entry, other: Entry) -> bool:
        """Return whether the means of two models are further apart than the margin of their difference."""
        return self.spread.differ(one.sample, other.sample)

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
            "pooled_deviation": self.spread.deviation,
            "pareto_front": [entry.name for entry in self.front],
        }


def describe(
    candidate: Candidate, found: Plan, flops_per_token: float, parameters: int, cache: int, speed: Speed
) -> Entry:
    """Return what was found of a candidate."""
    return Entry(
        name=candidate.name,
        kind=CostedModel(candidate.config).kind,
        overrides=candidate.overrides,
        parameters=parameters,
        training_flops_per_token=flops_per_token,
        cache_bytes_per_token=cache,
        sweep=found.sweep,
        rate=found.rate,
        losses=found.seeds,
        speed=speed,
    )
