"""What an evaluation found: scores with standard errors, their differences, as table, JSON and model card.

A metric's standard error comes from its items: each has a share in the metric's error, and the mean of the shares is 0.
Of the mean of scores x an item's share is x_i - mean(x); of a function of sums it is the first term of the function's
series (the delta method). The standard error of a difference between two models is then that of the differences of
their shares, item by item: what makes an item hard for both does not count.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, metadata_load, metadata_save
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from yaml import YAMLError

from modeling_gqa_cli.errors import UserError, one_line, printable

from ..common.atomic import replacing
from ..common.tables import Table

FORMAT_VERSION = 1
CARD = "README.md"


@dataclass(frozen=True)
class Score:
    """A metric of a task.

    Args:
        value: of the metric.
        stderr: its standard error, `None` where none is known.
        higher_is_better: `None` where the task does not say.
        shares: of the items in the metric's error, in the items' order; `None` where they are not known.
    """

    value: float
    stderr: float | None
    higher_is_better: bool | None = None
    shares: np.ndarray | None = None


@dataclass(frozen=True)
class TaskResult:
    """What a model reached in a task.

    Args:
        scores: by metric.
        items: how many the task had.
        keys: what identifies each item: two models are compared item by item where these are equal.
        dataset: `type`, `config` and `split` of the data set on the Hub.
        shots: solved examples before each item.
    """

    scores: dict[str, Score]
    items: int
    keys: Sequence[str] = ()
    dataset: dict[str, str | None] = field(default_factory=dict)
    shots: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, without what concerns single items."""
        scores = {
            name: {"value": score.value, "stderr": score.stderr, "higher_is_better": score.higher_is_better}
            for name, score in self.scores.items()
        }
        return {"items": self.items, "num_fewshot": self.shots, "dataset": self.dataset, "scores": scores}


Results = dict[str, TaskResult]


def standard_error(shares: np.ndarray) -> float | None:
    """Return the standard error of a metric with these shares of its items; `None` of fewer than two."""
    return float(shares.std(ddof=1) / math.sqrt(len(shares))) if len(shares) > 1 else None


def mean_score(values: Sequence[float] | np.ndarray) -> Score:
    """Return the mean of the items' scores."""
    found = np.array(values, dtype=np.float64)
    shares = found - found.mean()
    return Score(float(found.mean()), standard_error(shares), True, shares)


def perplexity_score(losses: Sequence[float] | np.ndarray) -> Score:
    """Return the perplexity exp(mean(losses)) of losses in nats.

    Example:
        ```python
        import math

        from modeling_gqa.evaluation.results import perplexity_score

        score = perplexity_score([1.0, 2.0, 3.0])
        assert math.isclose(score.value, math.exp(2))
        assert math.isclose(score.stderr, math.exp(2) / math.sqrt(3))
        ```
    """
    loss = mean_score(losses)
    value = math.exp(loss.value)
    shares = value * loss.shares  # d exp(m) = exp(m) dm
    return Score(value, standard_error(shares), False, shares)


def compare(ours: Results, theirs: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by task and metric, `difference`, its standard error `stderr`, and whether it is `paired`.

    Args:
        ours: of the model that the difference is positive for where its value is larger.
        theirs: of the other one.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for task, mine in ours.items():
        other = theirs.get(task)
        for name, score in mine.scores.items() if other else ():
            reference = other.scores.get(name)
            if reference is None:
                continue
            known = score.shares is not None and reference.shares is not None
            paired = bool(known and mine.keys and list(mine.keys) == list(other.keys))
            if paired:
                stderr = standard_error(score.shares - reference.shares)
            elif score.stderr is None or reference.stderr is None:
                stderr = None
            else:
                stderr = math.hypot(score.stderr, reference.stderr)
            row = {"difference": score.value - reference.value, "stderr": stderr, "paired": paired}
            found.setdefault(task, {})[name] = row
    return found


# -- The table


def number(value: float, form: str = "") -> str:
    """Return a number with four digits behind the point, with two from 10 on, and as `1.23e+06` from a million on."""
    size = abs(value)
    return f"{value:{form}.2e}" if size >= 1e6 else f"{value:{form},.{2 if size >= 10 else 4}f}"


def with_error(value: float, stderr: float | None, form: str = "") -> str:
    return number(value, form) + ("" if stderr is None else f" ± {number(stderr)}")


def results_table(name: str, ours: Results, against: str | None = None, theirs: Results | None = None) -> Table:
    """Return a row for each metric; with `against` also that model's, and the difference.

    "±" stands before one standard error. A difference whose error does not come from single items is marked.
    """
    differences = compare(ours, theirs or {})
    rows = []
    for task, result in ours.items():
        for metric, score in result.scores.items():
            row = [printable(task), printable(metric), f"{result.items:,}", with_error(score.value, score.stderr)]
            if against is not None:
                other = theirs[task].scores.get(metric) if task in theirs else None
                row.append(with_error(other.value, other.stderr) if other else "")
                found = differences.get(task, {}).get(metric)
                mark = "" if not found or found["paired"] else " (not paired)"
                row.append(with_error(found["difference"], found["stderr"], "+") + mark if found else "")
            rows.append(row)
    header = ["task", "metric", "items", printable(name)]
    return Table(header if against is None else [*header, printable(against), "difference"], rows, words=2)


# -- The model card


def card_entries(results: Results, limit: int | None) -> list[EvalResult]:
    """Return the entries of a model card, with the metric's standard error in its name.

    Args:
        results: of the model.
        limit: how many items a task was limited to, which stands in the entry.
    """
    found = []
    for task, result in results.items():
        asked: dict[str, Any] = {"num_few_shot": result.shots} | ({} if limit is None else {"limit": limit})
        for metric, score in result.scores.items():
            error = "" if score.stderr is None else f" (standard error {number(score.stderr)})"
            entry = EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=result.dataset.get("type") or task,
                dataset_name=task,
                dataset_config=result.dataset.get("config"),
                dataset_split=result.dataset.get("split"),
                dataset_args=asked,
                metric_type=metric,
                metric_name=f"{metric}{error}",
                metric_value=round(score.value, 6),
            )
            found.append(entry)
    return found


def read_card(folder: Path) -> tuple[dict[str, Any], list[EvalResult]]:
    """Return the metadata of the card in `folder`, and the results in it; raises `UserError` for a malformed one."""
    path = folder / CARD
    try:
        metadata = (metadata_load(path) if path.is_file() else None) or {}
        index = metadata.get("model-index")
        return metadata, model_index_to_eval_results(index)[1] if index else []
    except (ValueError, YAMLError, OSError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has metadata that cannot be read: {one_line(error)}") from error


def write_entries(folder: Path, title: str, entries: Sequence[EvalResult]) -> None:
    """Write results into the `model-index` of the card in `folder`, whole or not at all.

    All else in the card stays as it is. A result of the same metric on the same data is replaced.

    Args:
        folder: of a checkpoint; a card is made where it has none.
        title: of the model in its index.
        entries: see `card_entries`.

    Raises:
        UserError: the card cannot be read.
        OSError: it cannot be written.
    """
    metadata, before = read_card(folder)

    def what(entry: EvalResult) -> tuple[Any, ...]:
        return entry.dataset_type, entry.dataset_config, entry.dataset_split, entry.dataset_name, entry.metric_type

    new = {what(entry) for entry in entries}
    kept = [entry for entry in before if what(entry) not in new]
    metadata["model-index"] = eval_results_to_model_index(title, [*kept, *entries])
    path = folder / CARD
    with replacing(path) as part:
        if path.is_file():
            shutil.copyfile(path, part)
        metadata_save(part, metadata)


def to_json_dict(
    checkpoint: Mapping[str, Any], against: Mapping[str, Any] | None, ours: Results, theirs: Results
) -> dict[str, Any]:
    """Return what `--json` writes of two models, of which the second may be `None`."""

    def side(about: Mapping[str, Any], results: Results) -> dict[str, Any]:
        return {**about, "tasks": {task: result.to_dict() for task, result in results.items()}}

    return {
        "format_version": FORMAT_VERSION,
        "checkpoint": side(checkpoint, ours),
        "against": side(against, theirs) if against is not None else None,
        "comparison": compare(ours, theirs) if against is not None else None,
    }
