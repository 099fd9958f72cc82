"""lm-eval around our models and transformers': which tasks there are, and a model's scores in them."""

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from modeling_gqa_cli.errors import UserError, did_you_mean, listed, one_line

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.files import check_tokenizer_files, is_gguf, local_folder, read_json
from ..common.console import err
from ..common.progress import ShowProgress, no_progress
from ..configuration_gqa import GQAConfig
from ..conversion.divergence import not_finite
from ..data.tokenizer import load_tokenizer
from .code_running import human_eval, write_functions
from .results import Results, Score, TaskResult, perplexity_score, standard_error
from .yardsticks import FILES, local_task, read_documents, read_text, token_windows, window_losses

# lm-eval's names of yardsticks, by which it fetches their data itself.
HUB_NAMES = {"lambada": "lambada_openai", "hellaswag": "hellaswag"}
# Draws of the bootstrap, which estimates standard errors of metrics that are no means; lm-eval's default takes minutes.
BOOTSTRAP_DRAWS = 1000
FEWSHOT_SEED = 1234  # lm-eval's
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
WIKITEXT = {"type": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}


# -- The models


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, whose weights are not read yet; `open_subject` makes it.

    Args:
        name: to show.
        folder: of the checkpoint; of a GGUF file that of its tokenizer.
        config: of the model that `load` returns.
        tokenizer: of the model.
        checkpoint: of this package, or unpacked from a GGUF file; `None` for those that transformers' classes load.
    """

    name: str
    folder: Path
    config: Any
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint | None

    @property
    def longest(self) -> int | None:
        """The number of positions that the model has; `None` where its configuration names none."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def load(self, dtype: torch.dtype | None, device: str) -> PreTrainedModel:
        """Read the weights: this package's checkpoints as its models, others as transformers' own; `UserError`."""
        if self.checkpoint:
            return self.checkpoint.load(dtype, device).eval()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype or "auto", local_files_only=True)
            return model.to(device).eval()
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each class fails in its own way
            raise UserError(f"{self.folder} cannot be loaded: {one_line(error)}") from error


def open_subject(source: str, dtype: torch.dtype | None = None) -> Subject:
    """Open a checkpoint of this package or of any causal language model in transformers.

    Code of the checkpoint is not run.

    Args:
        source: folder, GGUF file, or name on the Hub.
        dtype: that a GGUF file is unpacked to.

    Raises:
        UserError: there is none, its class is not in transformers, or it has no tokenizer that fits.
    """
    checkpoint = None
    if is_gguf(source):
        checkpoint = open_checkpoint(source, dtype=dtype)
        folder, config = checkpoint.folder, checkpoint.config
    else:
        folder = local_folder(source)
        if read_json(folder / "config.json").get("model_type") == GQAConfig.model_type:
            checkpoint = open_checkpoint(folder, quantized_cache=True)
            config = checkpoint.config
        else:
            try:
                config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            except Exception as error:
                raise UserError(f"{folder} has a configuration that is not valid: {one_line(error)}") from error
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{source} has no tokenizer: put the files of its tokenizer into the folder")
    if vocabulary := getattr(config.get_text_config(), "vocab_size", None):
        check_tokenizer_files(folder, vocabulary)
    tokenizer = load_tokenizer(folder)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {source} has no bos_token and no eos_token, and lm-eval begins texts with one"
        )
    name = Path(source).resolve().name if Path(source).exists() else source
    return Subject(name, folder, config, tokenizer, checkpoint)


# -- The tasks


@dataclass
class Tasks:
    """What is evaluated; `find_tasks` makes it.

    Args:
        names: as they were asked for.
        lm_tasks: lm-eval's tasks, groups and their members by name, as `TaskManager.load` returns them.
        text: of WikiText-2, "" where it is not asked for.
        problems: of HumanEval.
        sequence_length: tokens of a window of WikiText-2.
        limit: items of each task at most; `None` for all.
        batch_size: items that are computed at once.
    """

    names: list[str]
    lm_tasks: dict[str, dict[str, Any]]
    text: str
    problems: list[dict[str, Any]]
    sequence_length: int
    limit: int | None
    batch_size: int

    def run(self, model: PreTrainedModel, subject: Subject, show_progress: ShowProgress = no_progress) -> Results:
        """Return a model's results in all tasks, in the order in which they were asked for.

        Args:
            model: loaded from `subject`.
            subject: its tokenizer.
            show_progress: returns, for a description, what wraps an iterable to show progress.

        Raises:
            UserError: a score is not finite.
        """
        found: Results = {}
        lm = wrapped(model, subject.tokenizer, batch_size=self.batch_size)
        for name in self.names:
            if name == "humaneval" and self.problems:
                problems = self.problems[: self.limit]
                with quiet_library():
                    written = write_functions(lm, problems)
                found[name] = human_eval(problems, written, show_progress("running programs"))
                continue
            try:
                if name == "wikitext2":
                    results = self.wikitext2(model, subject, show_progress)
                else:
                    results = run_lm_eval(lm, self.lm_tasks[name], self.limit)
            except OverflowError as error:  # of an exponential
                raise UserError(f"the perplexity of {name} is beyond the largest number") from error
            for task, result in results.items():
                check_finite(task, [score.value for score in result.scores.values()], model.dtype)
            found |= results
        return found

    def wikitext2(self, model: Any, subject: Subject, show_progress: ShowProgress) -> Results:
        """Return the perplexity by the papers' protocol, and lm-eval's."""
        windows = token_windows(subject.tokenizer, self.text, self.sequence_length)[: self.limit]
        losses = window_losses(model, windows, show_progress(f"wikitext2 of {subject.name}"))
        keys = [hashlib.sha256(window.numpy().tobytes()).hexdigest() for window in windows]
        check_finite("wikitext2", losses, model.dtype)
        found = TaskResult({"perplexity": perplexity_score(losses)}, len(windows), keys, WIKITEXT)
        # A page can be longer than what memory holds the logits of.
        lm = wrapped(model, subject.tokenizer, batch_size=1, max_length=self.sequence_length)
        return {"wikitext2": found, "wikitext": run_lm_eval(lm, self.lm_tasks["wikitext2"], self.limit)["wikitext2"]}


def find_tasks(
    names: Sequence[str] | None,
    data: Path | None,
    *,
    run_code: bool = False,
    limit: int | None = None,
    batch_size: int = 1,
    sequence_length: int = 2048,
) -> Tasks:
    """Find the tasks, read or fetch their data, and check all that can be checked before a model is loaded.

    Args:
        names: of yardsticks (`FILES`) or of lm-eval's tasks, groups and tags; `None` for the yardsticks that `data`
            has, without humaneval.
        data: folder with the files of yardsticks; `None` to have lm-eval fetch those that it can.
        run_code: whether code that the model writes may be run.
        limit: items of each task at most; `None` for all.
        batch_size: items that are computed at once.
        sequence_length: tokens of a window of WikiText-2.

    Raises:
        UserError: lm-eval is not installed, a task is unknown, its data cannot be had, or it would run code.
    """
    require_lm_eval()
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data} is no folder: give one with {listed(FILES.values())}")
    if names is None:
        here = [name for name, file in FILES.items() if data and (data / file).is_file()]
        names = [name for name in here if name != "humaneval"]
        if not names:
            said = f"{data} has none of {listed(FILES.values())}" if data else "there is nothing to evaluate"
            raise UserError(f"{said}: give --tasks by their names in lm-eval, or --data with a folder of these files")
    names = list(dict.fromkeys(part for name in names for part in name.split(",")))  # as lm-eval's command takes them
    found = Tasks(names, {}, "", [], sequence_length, limit, batch_size)
    if "humaneval" in names and not run_code:
        raise UserError("humaneval runs code that the model writes: allow that by --run-code, best in a container")
    for name in names:
        if name not in FILES or (data is None and name in HUB_NAMES):
            continue
        if data is None:
            raise UserError(f"{name} needs the file {FILES[name]}: give its folder by --data")
        documents = read_documents(name, data)
        if name == "humaneval":
            found.problems = documents
        else:
            found.lm_tasks[name] = {"tasks": {name: local_task(name, documents)}, "groups": {}}
        if name == "wikitext2":
            found.text = read_text(name, data)
    fetched = [name for name in names if name not in found.lm_tasks and not (name == "humaneval" and found.problems)]
    if fetched:
        found.lm_tasks |= fetch_tasks(fetched)
    return found


def fetch_tasks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return lm-eval's tasks by name, with their data from the Hub or its cache; raises `UserError`."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    asked = {name: HUB_NAMES.get(name, name) for name in names}
    for name, own in asked.items():
        if own not in manager.task_index:
            near = did_you_mean(name, [*FILES, *manager.all_tasks])
            raise UserError(f"there is no task {name}{near}: the names are {listed(FILES)}, and lm-eval's")
    found = {}
    for name, own in asked.items():
        try:
            with quiet_library():
                found[name] = dict(manager.load([own]))
        except Exception as error:  # of datasets, the network, a package that a task needs, or a metric's code
            raise UserError(f"the task {name} cannot be had: {one_line(error)}") from error
        for task_name, task in found[name]["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"{task_name} runs code without limits: only humaneval from --data is run here")
    return found


def require_lm_eval() -> None:
    """Import lm-eval, and let it log errors alone; the command says which package is missing."""
    import lm_eval  # noqa: F401

    # Else it forks as many processes as there are cores for each bootstrap.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Show lm-eval's progress on a terminal alone; its other lines are not shown."""
    silent = StringIO()
    with redirect_stdout(silent), redirect_stderr(err.file if err.is_terminal else silent):
        yield


def check_finite(task: str, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> None:
    """Raise `UserError` where a score is nan or infinite."""
    if not all(math.isfinite(value) for value in values):
        raise not_finite(f"scores of {task}", dtype)


# -- lm-eval


def wrapped(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    """Return lm-eval's wrapper of a model that is loaded; log-probabilities are computed in float32, or in float64."""
    from lm_eval.models.huggingface import HFLM

    wide: Any = torch.promote_types(model.dtype, torch.float32)
    own: dict[str, Any] = {"pretrained": model, "tokenizer": tokenizer, "backend": "causal", "softmax_dtype": wide}
    return HFLM(**own, **options)


def run_lm_eval(lm: Any, tasks: dict[str, Any], limit: int | None = None) -> Results:
    """Return a model's results in lm-eval's tasks and groups.

    Args:
        lm: lm-eval's wrapper of the model.
        tasks: as `TaskManager.load` returns them.
        limit: items of each task at most.
    """
    from lm_eval.evaluator import evaluate

    for task in tasks["tasks"].values():
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with quiet_library():
        found: Any = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP_DRAWS)
    results: Results = {}
    for name, numbers in found["results"].items():
        task, samples = tasks["tasks"].get(name), found["samples"].get(name, [])
        better = found["higher_is_better"].get(name, {})
        scores = {}
        for metric, value in numbers.items():
            metric_name, _, chosen = metric.partition(",")
            if not chosen or metric_name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            values = [sample.get(metric_name) for sample in samples if sample["filter"] == chosen]
            shares = (
                item_shares(task.aggregation()[metric_name], values, value) if task is not None and values else None
            )
            stderr = numbers.get(f"{metric_name}_stderr,{chosen}")
            if not isinstance(stderr, int | float):
                stderr = None if shares is None else standard_error(shares)
            shown = metric_name if chosen == "none" else metric
            scores[shown] = Score(float(value), stderr, better.get(metric_name), shares)
        if not scores:
            continue
        keys = list(dict.fromkeys(sample["doc_hash"] for sample in samples))
        items = count_items(found, name)
        dataset: dict[str, str | None] = {"type": name}
        if task is not None:
            of = task.config
            split = of.test_split or of.validation_split
            dataset = {"type": of.dataset_path, "config": of.dataset_name, "split": split}
        results[name] = TaskResult(scores, items, keys, dataset, 0 if task is None else task.config.num_fewshot)
    return results


def count_items(found: Any, name: str) -> int:
    """Return how many items a task had, or all tasks of a group, by lm-eval's results."""
    if samples := found["samples"].get(name):
        return len({sample["doc_id"] for sample in samples})
    return sum(count_items(found, member) for member in found["group_subtasks"].get(name, []) if member != name)


def item_shares(aggregate: Callable[..., float], values: Sequence[Any], value: float) -> np.ndarray | None:
    """Return the items' shares in the error of a metric (see `.results`); `None` for metrics that are not known.

    Args:
        aggregate: lm-eval's function that makes the metric of the items' scores.
        values: the items' scores: numbers, or pairs of a log-likelihood and a number of words or bytes.
        value: of the metric.
    """
    from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

    # Of metrics m(s) the derivative by s, the mean score or the sum of log-likelihoods over that of the weights.
    slopes = {mean: 1.0, perplexity: -value, weighted_perplexity: -value, bits_per_byte: -1 / math.log(2)}
    if aggregate not in slopes:
        return None
    scores = np.array(values, dtype=np.float64)  # (items,) or (items, 2)
    if scores.ndim == 2:
        likelihoods, weights = scores.T
        ratio = likelihoods.sum() / weights.sum()
        return slopes[aggregate] * (likelihoods - ratio * weights) / weights.mean()
    return slopes[aggregate] * (scores - scores.mean())
