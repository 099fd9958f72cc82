"""What a comparison has found: losses with their spread, sizes, speeds and the pareto front."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ...common.atomic import read_object
from ...costs import CostedModel, cache_bytes_per_token, count_parameters, training_flops
from ...costs.speeds import Speed
from ...data.blocks import load_blocks
from ..results import RESULTS
from .plan import Comparison

# -- Means over seeds

# Student's t by degrees of freedom, from 1: 95 % of its distribution lie within plus and minus these.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """The losses of one model over seeds.

    Args:
        name: of the model.
        values: losses of the runs that did not fail, at least one.
    """

    name: str
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class Spread:
    """How far runs that differ in the seed alone part.

    Args:
        deviation: standard deviation of a run; nan where no model has two.
        freedom: degrees of freedom of the deviation: runs less models.
    """

    deviation: float
    freedom: int

    @property
    def quantile(self) -> float:
        """Standard errors that 95 % of means lie within, by Student's t; beyond 30 degrees of freedom that of 30."""
        return STUDENT[min(self.freedom, len(STUDENT)) - 1] if self.freedom else math.nan

    def margin(self, errors: float) -> float:
        """Return half of the 95 % interval of a number whose standard error is `errors` times the deviation."""
        return self.quantile * self.deviation * errors


def pooled(samples: Iterable[Sequence[float]]) -> Spread:
    """Return the spread over seeds, pooled over models.

    Example:
        ```python
        from modeling_gqa.training.comparison.outcome import pooled

        found = pooled([[1.0, 3.0], [5.0, 7.0], [4.0]])
        assert (found.deviation, found.freedom, found.quantile) == (2**0.5, 2, 4.303)
        ```
    """
    groups = [found for found in samples if len(found) > 1]
    freedom = sum(len(found) - 1 for found in groups)
    squares = sum(statistics.variance(found) * (len(found) - 1) for found in groups)
    return Spread(math.sqrt(squares / freedom) if freedom else math.nan, freedom)


# -- The outcome


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
    def sample(self) -> Sample:
        """The losses of the runs that did not fail."""
        return Sample(self.name, usable(self.losses))

    @property
    def loss(self) -> float:
        """The mean over the seeds that did not fail; nan where there are none."""
        return self.sample.mean if self.sample.values else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; nan below two seeds."""
        return statistics.stdev(self.sample.values) if len(self.sample.values) > 1 else math.nan

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
    bytes_per_token: float = math.nan
    tokens_seen: Sequence[int] = ()

    @property
    def finished(self) -> list[Entry]:
        """Models of which at least one run at the best rate has ended, lowest loss first."""
        return sorted((entry for entry in self.entries if math.isfinite(entry.loss)), key=lambda entry: entry.loss)

    @property
    def spread(self) -> Spread:
        """How far runs of different seeds part, pooled over the models."""
        return pooled(usable(entry.losses) for entry in self.finished)

    def bits_per_byte(self, loss: float) -> float:
        """Return a loss in bits per byte of the validation text."""
        return loss / math.log(2) / self.bytes_per_token

    def margin(self, one: Entry, other: Entry) -> float:
        """Return half of the 95 % interval of the difference of two means; nan without a spread."""
        return self.spread.margin(math.sqrt(sum(1 / len(entry.sample.values) for entry in (one, other))))

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
            "pooled_deviation": self.spread.deviation,
            "degrees_of_freedom": self.spread.freedom,
            "pareto_front": [entry.name for entry in self.front],
        }


def outcome_of(comparison: Comparison, ended: Mapping[str, float], speeds: Mapping[str, Speed]) -> Outcome:
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
            speed=speeds.get(candidate.name, Speed()),
        )
        for candidate, found in zip(comparison.candidates, comparison.plans(ended), strict=True)
    ]
    runs = sorted(path.parent for path in comparison.folder.glob(f"runs/*/{RESULTS}"))
    seen = {(read_object(run / RESULTS) or {}).get("tokens_seen", 0) for run in runs}
    return Outcome(entries, bytes_per_token(runs[0]) if runs else math.nan, sorted(seen))


def bytes_per_token(run: Path) -> float:
    """Return how many bytes of text a token of a run's validation text stands for."""
    ids = load_blocks(run / "data", "validation").blocks[:, 0]
    texts = AutoTokenizer.from_pretrained(run / "tokenizer").batch_decode(ids, skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts) / ids.size


def usable(losses: Mapping[int, float]) -> list[float]:
    """Return the losses of runs that neither failed nor diverged."""
    return [loss for loss in losses.values() if math.isfinite(loss)]
