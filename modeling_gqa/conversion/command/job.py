"""One conversion from checkpoint to checkpoint: what the command `modeling-gqa convert` does."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from ... import __version__
from ...checkpoints.aside import check_target, refuse_overlap, written_aside
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.writing import write_model
from ...common.errors import UserError
from ...common.progress import ShowProgress
from ...configuration_gqa import GQAConfig
from ...costs import cache_bytes_per_token, count_parameters
from ...data.packing import read_batches
from ...data.tokenizer import load_tokenizer
from ...modeling_gqa import GQAForCausalLM
from ..allocation import allocate
from ..calibration import Batch
from ..convert import SELECTION_TOKENS, convert_model, describe
from ..layer_store import keep_target, kept_in, layers_folder
from ..measuring import compare_predictions, layer_errors
from ..targets import layer_fields
from .memory import Memory, count_memory
from .options import Options
from .report import FORMAT_VERSION, Report, versions, write_card, write_report
from .serving import describe_serving
from .sizing import Goal, expected_target, find_goal, layers_after

# "auto" compares settings on a quarter of the tokens that calibrate them.
SELECTION_SHARE = 4
LONGEST_BLOCK = 1024  # tokens, where --sequence-length is left out

Batches = dict[str, list[Batch]]


@dataclass
class Job(Options):
    """A conversion that is planned, or run.

    Attributes:
        seconds: wall time of each step that was done.
        memory: what the conversion takes, once `plan` or `run` has counted it.
    """

    seconds: dict[str, float] = field(default_factory=dict, init=False)
    memory: Memory | None = field(default=None, init=False)

    def plan(self, force: bool) -> Report:
        """Return the report as far as it is known before anything is converted.

        It is known from the configuration and the weights' headers. Of a model on the Hub the tokenizer, and with it
        the text, is not looked at.

        Raises:
            UserError: `run` would raise it before it converts.
        """
        check_target(self.target.resolve(), force)
        checkpoint = self.open(download=False)
        config, goal = checkpoint.config, find_goal(self, checkpoint.config, checkpoint.dtype)
        if checkpoint.tensors:
            self.read_text(checkpoint, goal.exact)
        self.memory = self.count_memory(checkpoint, goal)
        report = self.describe(checkpoint, goal.target or config)
        report["serving"] = self.describe_serving(checkpoint, goal)
        pairs = zip(layer_fields(config), layers_after(config, goal), strict=True)
        report["layers"] = [{"layer": i, "from": describe(old), "to": new} for i, (old, new) in enumerate(pairs)]
        if goal.later:
            report["parameters_after"] = None
        if goal.target is None:
            report["cache_bytes_per_token_after"] = self.budget
        return report | {"exact": goal.exact, "method": self.method}

    def run(self, force: bool, show_progress: ShowProgress, say: Callable[[str], None] = lambda line: None) -> Report:
        """Convert, measure and save; the target appears complete at the end, or not at all.

        Args:
            force: whether a checkpoint at the target is replaced.
            show_progress: returns, for a description, what wraps an iterable to show progress.
            say: is given a line about what follows, before it takes long.

        Returns:
            The report that is saved as `conversion.json`.

        Raises:
            UserError: the checkpoint, the text or the options cannot be used.
            OSError: a file cannot be read or written.
        """
        checkpoint = self.open(download=False)  # what can be refused early is
        goal = find_goal(self, checkpoint.config, checkpoint.dtype)
        held = ExitStack()
        with written_aside(self.target, force, held) as aside:
            if not checkpoint.tensors:
                assumed, checkpoint = checkpoint.dtype, self.open()
                refuse_overlap(checkpoint.folder, self.target)
                if checkpoint.dtype != assumed:  # config.json does not name it
                    goal = find_goal(self, checkpoint.config, checkpoint.dtype)
            with self.timed("reading text"):
                batches = self.read_text(checkpoint, goal.exact)
            with self.timed("loading"):
                model = checkpoint.load(checkpoint.dtype, self.device).eval()
            self.memory = self.count_memory(checkpoint, goal)
            for line in (self.describe_memory(), *self.describe_serving(checkpoint, goal)):
                say(line)
            with self.timed("converting"):
                converted, done = self.convert(model, goal, checkpoint, batches, held, show_progress)
            report = self.describe(checkpoint, converted.config)
            report.update(done)
            report["serving"] = self.describe_serving(checkpoint, goal, converted.config)
            if batches:
                with self.timed("measuring"):
                    self.measure(report, model, converted, batches, show_progress)
            with self.timed("saving"):
                write_model(aside, converted, checkpoint.folder, show_progress("saving"))
            report["seconds"] = self.seconds
            write_report(aside, report)
            card_report = report | {"source": self.source}  # by which a local source is told from one on the Hub
            card = checkpoint.folder / "README.md"
            write_card(aside, self.target.resolve().name, card_report, converted.config, card)
        return report

    def open(self, download: bool = True) -> Checkpoint:
        """Open the source; its `dtype` is then that of the result."""
        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        ignored = self.ignore_field or ()
        checkpoint = open_checkpoint(self.source, download=download, ignore_fields=ignored, dtype=dtype)
        return replace(checkpoint, dtype=dtype) if dtype else checkpoint

    def count_memory(self, checkpoint: Checkpoint, goal: Goal) -> Memory:
        """Return what the conversion takes, by accounting."""
        config, dtype = checkpoint.config, checkpoint.dtype
        after = expected_target(goal.options, config, goal.target, dtype)
        return count_memory(config, after, dtype, self.batch_size if self.text else 0, self.block_length(config))

    def describe_memory(self) -> str:
        return f"Memory on {self.device}: {self.memory}."

    def describe_serving(self, source: Checkpoint, goal: Goal, result: GQAConfig | None = None) -> list[str]:
        """Return what the result costs and which engines run it on what; `result` is known once it is converted."""
        after = result or expected_target(goal.options, source.config, goal.target, source.dtype)
        final = result is not None
        later = goal.later and not final
        return describe_serving(source.config, after, source.dtype, self, goal.chosen, later, final)

    def block_length(self, config: GQAConfig) -> int:
        """Return how many tokens of text a block has."""
        return self.sequence_length or min(LONGEST_BLOCK, config.max_position_embeddings)

    def read_text(self, checkpoint: Checkpoint, exact: bool) -> Batches:
        """Return the parts "calibration", "selection" and "evaluation" of the text; only the last where exact."""
        if not self.text:
            return {}
        longest = checkpoint.config.max_position_embeddings
        length = self.block_length(checkpoint.config)
        if length > longest:
            raise UserError(f"--sequence-length={length} is more than max_position_embeddings={longest}")
        self.sequence_length = length
        tokens = {
            "calibration": self.calibration_tokens,
            "selection": min(self.calibration_tokens // SELECTION_SHARE, SELECTION_TOKENS),
            "evaluation": self.evaluation_tokens,
        }
        if exact:  # nothing to calibrate
            tokens = {"evaluation": self.evaluation_tokens}
        return read_batches(
            self.text,
            load_tokenizer(checkpoint.folder),
            tokens,
            sequence_length=length,
            batch_size=self.batch_size,
            evaluation_paths=self.evaluation_text or (),
            text_column=self.text_column,
            seed=self.seed,
        )

    def convert(
        self,
        model: GQAForCausalLM,
        goal: Goal,
        checkpoint: Checkpoint,
        batches: Batches,
        held: ExitStack,
        show_progress: ShowProgress,
    ) -> tuple[GQAForCausalLM, Any]:
        """Return what `convert_model` returns; where the goal has no target, for the one that the budget allows.

        Until `held` is closed, `.TARGET.layers` beside the target holds the sizes that were chosen and the layers that
        are finished. After an interruption the same command goes on from them.
        """
        calibration = batches.get("calibration")
        plan = self.identity(model, goal.target, batches)
        folder = held.enter_context(kept_in(layers_folder(self.target), plan))

        def choose() -> GQAConfig:
            progress = show_progress("choosing sizes")
            own: dict[str, Any] = {"layers": self.layers, "dtype": checkpoint.dtype, "progress": progress}
            return allocate(model, self.attention_kind, self.budget, calibration, **own)

        return convert_model(
            model,
            goal.target or keep_target(folder, choose),
            calibration,
            selection=batches.get("selection"),
            method=self.method,
            regroup=self.regroup,
            refit=self.refit,
            refine=self.refine,
            share_cache=goal.options.shares_cache,
            share_weights=True,
            seed=self.seed,
            folder=folder,
            show_progress=show_progress,
        )

    def identity(self, model: GQAForCausalLM, target: GQAConfig | None, batches: Batches) -> list[Any]:
        """Return what decides the new layers: two conversions with equal ones may take each other's layers.

        Without a target it is in the options, as a budget.
        """
        weights, tokens = sha256(), sha256()
        for name, tensor in model.state_dict().items():
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.cpu().flatten().view(torch.uint8).numpy())
        for batch in (batch for part in ("calibration", "selection") for batch in batches.get(part, ())):
            for name in sorted(batch):
                tokens.update(batch[name].numpy().tobytes())
        return [
            __version__,
            self.as_json(),
            target and target.to_json_string(use_diff=False),
            model.config.to_json_string(use_diff=False),
            weights.hexdigest(),
            tokens.hexdigest(),
        ]

    def measure(
        self,
        report: Report,
        model: GQAForCausalLM,
        converted: GQAForCausalLM,
        batches: Batches,
        show_progress: ShowProgress,
    ) -> None:
        """Enter into the report what is measured on the evaluation text."""
        text = batches["evaluation"]
        report.update(compare_predictions(model, converted, text, show_progress("measuring")))  # type: ignore[typeddict-item]
        errors = layer_errors(model, converted, text, show_progress("measuring layers"))
        tokens = {f"{name}_tokens": count_tokens(part) for name, part in batches.items()}
        report["text"].update(tokens)  # type: ignore[typeddict-item]
        report["layers"] = [{**row, "error": error} for row, error in zip(report["layers"], errors, strict=True)]

    def describe(self, checkpoint: Checkpoint, target: GQAConfig) -> Report:
        """Return what the report says of source and target before anything is measured."""
        dtype, both = checkpoint.dtype, {"before": checkpoint.config, "after": target}
        command = self.as_json()
        text = {
            "files": command["text"],
            "evaluation_files": command["evaluation_text"],
            "sequence_length": self.sequence_length,
        }
        unmeasured = dict.fromkeys(("perplexity_before", "perplexity_after", "kl", "top1_agreement"))
        report: Any = {
            "format_version": FORMAT_VERSION,
            "source": command["source"],
            "source_family": checkpoint.family,
            "dtype": str(dtype).removeprefix("torch."),
            "device": self.device,
            **{f"cache_bytes_per_token_{when}": cache_bytes_per_token(c, dtype) for when, c in both.items()},
            **{f"parameters_{when}": count_parameters(c) for when, c in both.items()},
            **unmeasured,
            "serving": [],
            "tokens": 0,
            "text": text if self.text else None,
            "command": command,
            "versions": versions(),
        }
        return report

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the wall time of a step in `seconds`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def count_tokens(batches: list[Batch]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)
