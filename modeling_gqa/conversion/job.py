"""One conversion from checkpoint to checkpoint: what the command `modeling-gqa convert` does."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
import transformers

from modeling_gqa_vllm.kernels import FAST_SIZES

from .. import __version__
from ..cache_formats import CacheQuantization
from ..cache_quantized import rounds_cache
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.writing import check_target, new_checkpoint, refuse_overlap, write_model
from ..common.batches import Batch, computing_dtype, free_memory
from ..common.progress import ShowProgress
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token, count_parameters
from ..modeling_gqa import GQAForCausalLM
from .convert import convert_model
from .divergence import compare_predictions, layer_errors
from .layer_store import choose_target, layers_folder, resumable_folder
from .memory import GIB, Memory, count_memory
from .options import Goal, Options, expected_target, find_goal, layers_after
from .report import FORMAT_VERSION, Report, vllm_kernels, write_conversion_card, write_report
from .rounded import choose_size, rounded_conversion
from .sequential import FITTED_METHODS
from .targets import describe, mean_bytes
from .text import read_text, text_length

# By default training at the end takes at most this many times as many tokens as calibrate. It ends before them where
# text that judges it no longer gains.
POLISH_TIMES, POLISH_TIMES_ON_GPU = 2, 8
LEFT_FREE = 0.9  # share of the free memory that training at the end may take by default

Batches = dict[str, list[Batch]]


@dataclass
class Job(Options):
    """A conversion that is planned, or run.

    Attributes:
        seconds: wall time of each step that was done.
    """

    seconds: dict[str, float] = field(default_factory=dict, init=False)

    def plan(self, force: bool, say: Callable[[str], None] = lambda line: None) -> Report:
        """Return the report as far as it is known from the configuration and the weights' headers.

        Of a model on the Hub the tokenizer, and with it the text, is not looked at. `say` is given lines about memory
        and sizes; errors and `force` as for `run`.
        """
        check_target(self.target.resolve(), force)
        checkpoint = self.open(download=False)
        config, goal = checkpoint.config, self.goal(checkpoint)
        self.choose_polish(checkpoint, goal, say)
        if checkpoint.tensors:
            self.read_text(checkpoint, goal.exact)
        self.announce(checkpoint, goal, say)
        report = self.begin_report(checkpoint, goal.target or config)
        pairs = zip(config.per_layer_config, layers_after(config, goal), strict=True)
        report["layers"] = [{"layer": i, "from": describe(old), "to": new} for i, (old, new) in enumerate(pairs)]
        if goal.later:
            report["parameters_after"] = None
        budget = self.rounded_bytes(config, checkpoint.dtype) if self.cache_bits else goal.budget
        if budget is not None:
            report["cache_bytes_per_token_after"] = budget
        if goal.budget is not None and "mean_cache_bytes_per_token_after" in report:
            report |= {"cache_bytes_per_token_after": None, "mean_cache_bytes_per_token_after": budget}
        return report | {"exact": goal.exact and not self.cache_bits, "method": self.method}

    def run(self, force: bool, show_progress: ShowProgress, say: Callable[[str], None] = lambda line: None) -> Report:
        """Convert, measure and save; the target appears complete at the end, or not at all.

        Args:
            force: whether a checkpoint at the target is replaced.
            show_progress: returns, for a description, what wraps an iterable to show progress.
            say: is given lines about memory and sizes, before it takes long.

        Returns:
            The report that is saved as `conversion.json`.

        Raises:
            UserError: the checkpoint, the text or the options cannot be used.
            OSError: a file cannot be read or written.
        """
        checkpoint = self.open(download=False)  # what can be refused early is
        goal = self.goal(checkpoint)
        held = ExitStack()
        with new_checkpoint(self.target, force, held) as aside:
            if not checkpoint.tensors:
                assumed, checkpoint = checkpoint.dtype, self.open()
                refuse_overlap(checkpoint.folder, self.target)
                if checkpoint.dtype != assumed:  # config.json does not name it
                    goal = self.goal(checkpoint)
            self.choose_polish(checkpoint, goal, say)
            with self.timed("reading text"):
                batches = self.read_text(checkpoint, goal.exact)
            with self.timed("loading"):
                model = checkpoint.load(checkpoint.dtype, self.device).eval()
                model.to(dtype=computing_dtype(checkpoint.dtype, self.device))
            self.announce(checkpoint, goal, say)
            with self.timed("converting"):
                converted, done = self.convert(model, goal, checkpoint, batches, held, show_progress)
                if converted.dtype != checkpoint.dtype:  # measured as it will be saved
                    with torch.no_grad():
                        for x in converted.parameters():
                            x.copy_(x.to(checkpoint.dtype))
            if self.cache_bits is not None:
                with self.timed("quantizing"):
                    budget = self.rounded_bytes(model.config, checkpoint.dtype)
                    polish, dtype = self.polish or 0, checkpoint.dtype
                    converted, rounded = rounded_conversion(
                        model, converted, budget, polish, batches, dtype, show_progress
                    )
                    done |= rounded
            report = self.begin_report(checkpoint, converted.config)
            report.update(done)
            report["serving"] = vllm_kernels(converted.config)
            if batches:
                with self.timed("measuring"):
                    text = batches["evaluation"]
                    report |= compare_predictions(model, converted, text, show_progress("measuring"))
                    errors = layer_errors(model, converted, text, show_progress("measuring layers"))
                for row, error in zip(report["layers"], errors, strict=True):
                    row["error"] = error
                for name, part in batches.items():
                    report["text"][f"{name}_tokens"] = sum(batch["input_ids"].numel() for batch in part)
            with self.timed("saving"):
                converted.to(dtype=checkpoint.dtype)  # type: ignore[call-arg]
                write_model(aside, converted, checkpoint.folder, show_progress("saving"))
            report["seconds"] = self.seconds
            write_report(aside, report)
            card_report = report | {"source": self.source}  # by which a local source is told from one on the Hub
            card = checkpoint.folder / "README.md"
            write_conversion_card(aside, self.target.resolve().name, card_report, converted.config, card)
        return report

    def open(self, download: bool = True) -> Checkpoint:
        """Open the source; its `dtype` is then that of the result."""
        dtype = getattr(torch, self.dtype, None)
        ignored = self.ignore_field or ()
        checkpoint = open_checkpoint(self.source, download=download, ignore_fields=ignored, dtype=dtype)
        return replace(checkpoint, dtype=dtype) if dtype else checkpoint

    def goal(self, checkpoint: Checkpoint) -> Goal:
        """Return what the options lead to; raises `UserError` where it cannot be had."""
        config, dtype = checkpoint.config, checkpoint.dtype
        goal = find_goal(self, config, dtype)
        if (budget := self.rounded_bytes(config, dtype)) is not None:
            from .quantizing import check_rounded
            from .transform_coding import require_bytes

            target = expected_target(goal, config, dtype)
            check_rounded(self, target, CacheQuantization.exact_tokens)
            require_bytes(target, budget, dtype)
        return goal

    def memory(self, checkpoint: Checkpoint, goal: Goal, polished: bool) -> Memory:
        """Return the memory that the conversion takes, by accounting."""
        config, rows = checkpoint.config, self.batch_size if self.text else 0
        target, dtype = expected_target(goal, config, checkpoint.dtype), computing_dtype(checkpoint.dtype, self.device)
        length = text_length(self, config) if self.text else 0
        return count_memory(config, target, dtype, rows, length, polished, rounded=self.cache_bits is not None)

    def choose_polish(self, checkpoint: Checkpoint, goal: Goal, say: Callable[[str], None]) -> None:
        """Set `polish` where it was not given: 0 where there is nothing to train, or not enough memory."""
        if self.polish is not None:
            return
        self.polish = 0
        if self.text and (self.cache_bits or not goal.exact) and self.method in FITTED_METHODS:
            needed, free = self.memory(checkpoint, goal, True).peak, free_memory(self.device)
            if needed < LEFT_FREE * free:
                on_gpu = self.device.startswith("cuda")
                self.polish = self.calibration_tokens * (POLISH_TIMES_ON_GPU if on_gpu else POLISH_TIMES)
            else:
                said = f"it needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free (--polish TOKENS forces it)"
                say(f"Training at the end is left out: {said}.")

    def announce(self, checkpoint: Checkpoint, goal: Goal, say: Callable[[str], None]) -> None:
        """Say which memory the conversion takes, by accounting, and with `--for` which sizes were chosen."""
        polished = bool(self.polish) and (bool(self.cache_bits) or not goal.exact)
        without = f"; {self.memory(checkpoint, goal, False).peak / GIB:.1f} with --polish 0" if polished else ""
        say(f"Memory on {self.device}: {self.memory(checkpoint, goal, polished)}{without}.")
        if (dtype := computing_dtype(checkpoint.dtype, self.device)) != checkpoint.dtype:
            names = (str(x).removeprefix("torch.") for x in (dtype, checkpoint.dtype))
            say("Computing in {}, because this CPU is slow in {}.".format(*names))
        if rounds_cache(checkpoint.stock_config) and not self.cache_bits:
            say("The source's cache is quantized. Here it counts unrounded, and the result's will not be quantized.")
        if self.engine and self.attention_kind == "mla":
            rank, rope = goal.options.kv_lora_rank, goal.options.qk_rope_head_dim
            sizes = f"R = {rank} and P = {rope}" if rank is not None and goal.options is not self else "as given"
            sizes = "chosen by layer" if goal.budget else sizes
            fast = " or ".join(f"{rank} + {rope}" for rank, rope in FAST_SIZES)
            say(f"Sizes: {sizes}; vLLM's fast kernels take R + P = {fast}.")

    def read_text(self, checkpoint: Checkpoint, exact: bool) -> Batches:
        """Return the parts of the text; where the conversion is exact, only what is measured on."""
        if not self.text:
            return {}
        self.sequence_length = text_length(self, checkpoint.config)
        if exact and not self.cache_bits:  # nothing to calibrate
            return read_text(self, checkpoint, ("evaluation",), seed=self.seed)
        return read_text(self, checkpoint, ("calibration", "selection", "evaluation"), self.polish or 0, self.seed)

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
        folder = held.enter_context(resumable_folder(layers_folder(self.target), plan))

        def choose() -> GQAConfig:
            from .allocation import allocate

            progress = show_progress("choosing sizes")
            own: dict[str, Any] = {name: how[name] for name in ("refit", "key_mean", "seed")} | merged
            own |= {"layers": self.layers, "dtype": checkpoint.dtype, "progress": progress}
            return allocate(model, self.attention_kind, goal.budget or 0, calibration, **own)

        merged: dict[str, Any] = {"method": self.method, "regroup": self.regroup}
        how: dict[str, Any] = {
            **{"refit": self.refit, "divide_cache": goal.options.divides_cache, "seed": self.seed},
            "key_mean": self.engine is None if self.key_mean is None else self.key_mean,
        }
        tried: list[dict[str, Any]] = []
        if goal.sizes:
            budget = self.rounded_bytes(model.config, checkpoint.dtype)
            target, tried = choose_size(
                model, goal.sizes, goal.target, budget, batches, checkpoint.dtype, folder, show_progress, **how
            )
        else:
            target = goal.target or choose_target(folder, choose)
        converted, done = convert_model(
            model,
            target,
            calibration,
            selection=batches.get("selection"),
            refine=self.refine,
            polish=0 if self.cache_bits else self.polish or 0,
            polish_text=batches.get("polish", ()),
            share_weights=True,
            folder=folder,
            show_progress=show_progress,
            **merged,
            **how,
        )
        return converted, done | {"candidates": tried + done["candidates"]}

    def identity(self, model: GQAForCausalLM, target: GQAConfig | None, batches: Batches) -> list[Any]:
        """Return what decides the new layers: equal conversions may take each other's. The options say a budget."""
        weights, tokens = sha256(), sha256()
        for name, tensor in model.state_dict().items():
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.cpu().flatten().view(torch.uint8).numpy())
        for batch in (batch for part in ("calibration", "selection") for batch in batches.get(part, ())):
            for name in sorted(batch):
                tokens.update(batch[name].numpy().tobytes())
        return [
            __version__,
            self.as_json() | {"polish": 0},  # which comes after the layers
            target and target.to_json_string(use_diff=False),
            model.config.to_json_string(use_diff=False),
            weights.hexdigest(),
            tokens.hexdigest(),
        ]

    def begin_report(self, checkpoint: Checkpoint, target: GQAConfig) -> Report:
        """Return what the report says of source and target before anything is measured."""
        dtype, both = checkpoint.dtype, {"before": checkpoint.config, "after": target}
        windows = "sliding_attention" in checkpoint.config.layer_types
        mean = {f"mean_cache_bytes_per_token_{when}": mean_bytes(c, dtype) for when, c in both.items() if windows}
        command = self.as_json()
        text = {
            "files": command["text"],
            "evaluation_files": command["evaluation_text"],
            "sequence_length": self.sequence_length,
        }
        return {
            "format_version": FORMAT_VERSION,
            "source": command["source"],
            "source_family": checkpoint.family,
            "dtype": str(dtype).removeprefix("torch."),
            "device": self.device,
            **{f"cache_bytes_per_token_{when}": cache_bytes_per_token(c, dtype) for when, c in both.items()},
            **mean,
            **{f"parameters_{when}": count_parameters(c) for when, c in both.items()},
            **dict.fromkeys(("perplexity_before", "perplexity_after", "kl", "top1_agreement")),
            "serving": [],
            "tokens": 0,
            "text": text if self.text else None,
            "command": command,
            "versions": {
                "modeling_gqa": __version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the wall time of a step in `seconds`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
