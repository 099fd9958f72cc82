"""One conversion from checkpoint to checkpoint: what the command `modeling-gqa convert` does."""

import platform
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .. import __version__
from ..accounting import cache_bytes_per_token, count_parameters
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .allocation import allocate, smallest_target
from .aside import check_target, refuse_overlap, written_aside
from .convert import SELECTION_TOKENS, convert, describe
from .errors import ConversionError
from .files import LazyTensor, local_folder, one_line, write_checkpoint
from .importing import load_source
from .inspection import Found, check_convertible, find_checkpoint
from .measuring import layer_errors, measure
from .options import SIZES, Options
from .report import write_card, write_report
from .targets import chosen_layers, layer_fields, target_config
from .text import read_batches
from .types import Progress, Stage

# "auto" compares settings on a quarter of what calibrates them.
SELECTION_SHARE = 4
LONGEST_BLOCK = 2048  # tokens, where --sequence-length is left out

Batches = dict[str, list[dict[str, torch.Tensor]]]


@dataclass
class Job(Options):
    """A conversion that is planned, or run."""

    seconds: dict[str, float] = field(default_factory=dict, init=False)

    def plan(self, force: bool) -> dict[str, Any]:
        """The report as far as it is known before anything is converted, from the configuration and headers; raises
        what `run` would. Of a model on the Hub the tokenizer, and with it the text, is not looked at."""
        check_target(self.target.resolve(), force)
        found, target, exact = self.prepare(self.source)
        if self.is_local:
            self.read_text(Path(self.source), found.config, exact)
        report = self.describe(found, target or found.config)
        later = target is None or (self.splits and not exact)
        pairs = zip(layer_fields(found.config), self.layers_after(found.config, target, later), strict=True)
        report["layers"] = [{"layer": i, "from": describe(old), "to": new} for i, (old, new) in enumerate(pairs)]
        if later:
            report["parameters_after"] = None
        if target is None:
            report["cache_bytes_per_token_after"] = self.budget
        return report | {"exact": exact, "method": self.method}

    def layers_after(self, source: GQAConfig, target: GQAConfig | None, later: bool) -> list[str]:
        """Each layer after the conversion; `later`: sizes of those that change are chosen by what they would lose."""
        after = [describe(layer) for layer in layer_fields(target or source)]
        for index in chosen_layers(source, self.layers) if later else ():
            layer = target.per_layer_config[index] if target else None
            size = f"R + P = {layer.kv_lora_rank + layer.qk_rope_head_dim}" if layer else "chosen by loss"
            after[index] = f"{self.attention_kind}, {size}"
        return after

    def run(self, force: bool, stage: Stage) -> dict[str, Any]:
        """Convert, measure and save; the target appears complete at the end, or not at all.

        Args:
            force: replace the target where it exists.
            stage: gives, for a description, what wraps an iterable to show progress.

        Returns:
            The report that is saved as `conversion.json`.

        Raises:
            ConversionError, OSError: what the user can put right.
        """
        found, target, exact = self.prepare(self.source)
        with written_aside(self.target, force) as aside:
            folder = local_folder(self.source)
            if not self.is_local:  # its weights and tokenizer are here only now
                refuse_overlap(folder, self.target)
                found, target, exact = self.prepare(folder)
            with self.timed("reading text"):
                batches = self.read_text(folder, found.config, exact)
            with self.timed("loading"):
                model = load_source(folder, found.dtype, self.device).eval()
            with self.timed("converting"):
                converted, done = self.convert(model, target, found.dtype, batches, stage)
            report = self.describe(found, converted.config) | done
            if batches:
                with self.timed("measuring"):
                    report |= measure(model, converted, batches["evaluation"], stage("measuring"))
                    errors = layer_errors(model, converted, batches["evaluation"], stage("measuring layers"))
                report["text"] |= {f"{name}_tokens": count_tokens(part) for name, part in batches.items()}
                report["layers"] = [
                    {**row, "error": error} for row, error in zip(report["layers"], errors, strict=True)
                ]
            with self.timed("saving"):
                save(aside, converted, folder, stage("saving"))
            report["seconds"] = self.seconds
            write_report(aside, report)
            card_report = report | {"source": self.source}  # by which a local source is told from one on the Hub
            write_card(aside, self.target.resolve().name, card_report, converted.config, folder / "README.md")
        return report

    def convert(self, model, target: GQAConfig | None, dtype: torch.dtype, batches: Batches, stage: Stage):
        """What `convert` returns; without a target, for the one that the budget buys."""
        calibration = batches.get("calibration")
        if target is None:
            progress = stage("choosing sizes")
            target = allocate(
                model, self.attention_kind, self.budget, calibration, layers=self.layers, dtype=dtype, progress=progress
            )
        return convert(
            model,
            target,
            calibration,
            selection=batches.get("selection"),
            method=self.method,
            regroup=self.regroup,
            refit=self.refit,
            split=self.splits,
            seed=self.seed,
            stage=stage,
        )

    def prepare(self, source: str | Path) -> tuple[Found, GQAConfig | None, bool]:
        """The source, in the dtype of the result; the result's configuration (`None`: a budget is to be shared out);
        and whether the conversion is exact."""
        found = find_checkpoint(source)
        if self.dtype != "auto":
            found = found._replace(dtype=getattr(torch, self.dtype))
        target, exact = None, False
        if self.budget is not None:
            least = smallest_target(
                found.config, self.attention_kind, self.budget, layers=self.layers, dtype=found.dtype
            )
            check_convertible(found.config, least)
            present = cache_bytes_per_token(found.config, found.dtype)
            if self.budget >= present:
                raise ConversionError(
                    f"a budget of {self.budget} bytes per token changes nothing: the source takes {present}"
                )
        else:
            target = self.find_target(found)
            exact = check_convertible(found.config, target)
        if self.attention_kind == "mla" and not exact and self.method not in ("auto", "lowrank"):
            raise ConversionError(f"--method={self.method} merges heads, which MLA does not: choose auto or lowrank")
        return found, target, exact

    def find_target(self, found: Found) -> GQAConfig:
        sizes = {name: getattr(self, name) for name in SIZES if name != "cache_bytes"}
        if self.cache_bytes is None:
            return target_config(found.config, self.attention_kind, layers=self.layers, **sizes)
        sizes["cache_size"] = self.cache_bytes // found.dtype.itemsize
        try:
            return target_config(found.config, self.attention_kind, layers=self.layers, **sizes)
        except ConversionError as error:
            # In the words that it was asked for in.
            said = str(error).replace(f"cache_size={sizes['cache_size']}", f"--cache-bytes={self.cache_bytes}")
            raise ConversionError(f"{said} (a number takes {found.dtype.itemsize} bytes)") from error

    def read_text(self, folder: Path, config: GQAConfig, exact: bool) -> Batches:
        if not self.text:
            return {}
        longest = config.max_position_embeddings
        length = self.sequence_length or min(LONGEST_BLOCK, longest)
        if length > longest:
            raise ConversionError(f"--sequence-length={length} is more than max_position_embeddings={longest}")
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
            load_tokenizer(folder),
            tokens,
            sequence_length=length,
            batch_size=self.batch_size,
            evaluation_paths=self.evaluation_text or (),
            text_column=self.text_column,
            seed=self.seed,
        )

    def describe(self, found: Found, target: GQAConfig) -> dict[str, Any]:
        """What the report says of source and target, whatever is measured."""
        both = {"before": found.config, "after": target}
        command = self.as_json()
        text = {
            "files": command["text"],
            "evaluation_files": command["evaluation_text"] or [],
            "sequence_length": self.sequence_length,
        }
        unmeasured = dict.fromkeys(("perplexity_before", "perplexity_after", "kl", "top1_agreement"))
        return {
            "source": command["source"],
            "source_family": found.family,
            "dtype": str(found.dtype).removeprefix("torch."),
            "device": self.device,
            **{f"cache_bytes_per_token_{when}": cache_bytes_per_token(c, found.dtype) for when, c in both.items()},
            **{f"parameters_{when}": count_parameters(c) for when, c in both.items()},
            **unmeasured,
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
    def timed(self, name: str):
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def save(folder: Path, model: GQAForCausalLM, source: Path, progress: Progress) -> None:
    """Write `model` with its code, and the tokenizer and generation configuration in the folder `source`."""
    tied = model.all_tied_weights_keys
    tensors = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.cpu)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    write_checkpoint(folder, model, tensors, source, progress)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a missing file, a missing package, a damaged file: each has its own class
        raise ConversionError(
            f"--text needs the tokenizer of {folder}, which cannot be loaded: {one_line(error)[:200]}"
        ) from error


def count_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)
