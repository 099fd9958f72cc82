"""One conversion from checkpoint to checkpoint: what the command `modeling-gqa convert` does."""

import platform
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
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
from .convert import METHODS, SELECTION_TOKENS, convert, describe
from .errors import ConversionError
from .files import LazyTensor, local_folder, one_line, refuse_overlap, write_checkpoint, written_aside
from .importing import load_source
from .inspection import Found, check_convertible, find_checkpoint
from .measuring import layer_errors, measure
from .report import write_card, write_report
from .targets import layer_fields, target_config
from .text import list_files, read_batches

SIZES = ("num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "cache_size", "cache_bytes")
# "auto" compares settings on a quarter of what calibrates them.
SELECTION_SHARE = 4
LONGEST_BLOCK = 2048  # tokens, where --sequence-length is left out

Stage = Callable[[str], Callable[[Iterable], Iterable]]
Batches = dict[str, list[dict[str, torch.Tensor]]]


@dataclass
class Job:
    """What to convert, to what, and on which text; the fields are the options of `modeling-gqa convert`.

    Raises:
        ConversionError: options that do not go together, or cannot work here.
    """

    source: str
    target: Path
    attention_kind: str
    num_key_value_heads: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    cache_size: int | None = None
    cache_bytes: int | None = None
    budget: int | None = None
    layers: list[int] | None = None
    method: str = "auto"
    regroup: bool | None = None
    refit: bool | None = None
    seed: int = 0
    text: list[Path] | None = None
    evaluation_text: list[Path] | None = None
    text_column: str = "text"
    calibration_tokens: int = 131072
    evaluation_tokens: int = 65536
    sequence_length: int | None = None
    batch_size: int = 4
    dtype: str = "auto"
    device: str | None = None
    seconds: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self):
        sizes = [option(name) for name in SIZES if getattr(self, name) is not None]
        if self.budget is not None and sizes:
            raise ConversionError(f"--budget chooses the sizes itself: leave {' and '.join(sizes)} out")
        if self.budget is not None and self.attention_kind not in ("gqa", "mla"):
            raise ConversionError(f"--budget has nothing to choose for {self.attention_kind}: give gqa or mla")
        if self.budget is not None and not self.text:
            raise ConversionError("--budget needs --text: without it no layer's loss is known")
        if self.refit and not self.text:
            raise ConversionError("--refit needs --text: the outputs are fitted on it")
        for name in ("budget", "cache_bytes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConversionError(f"{option(name)}={getattr(self, name)} must be positive")
        if self.cache_size is not None and self.cache_bytes is not None:
            raise ConversionError("--cache-size and --cache-bytes say the same: leave one out")
        if self.method not in METHODS:
            raise ConversionError(f"--method={self.method} is unknown: choose one of {', '.join(METHODS)}")
        if self.evaluation_text and not self.text:
            raise ConversionError("--evaluation-text needs --text to calibrate on")
        if self.is_local:
            refuse_overlap(Path(self.source), self.target)
        for path in (texts := [*(self.text or []), *(self.evaluation_text or [])]):
            refuse_overlap(path, self.target, "text")
        list_files(texts)
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConversionError(f"--device={self.device} cannot be used: {one_line(error)}") from error

    def plan(self) -> dict[str, Any]:
        """The report as far as it is known before anything is converted; reads the configuration and headers."""
        found, target, exact = self.prepare(self.source)
        report = self.describe(found, target or found.config)
        after = [describe(layer) for layer in layer_fields(target)] if target else self.chosen_later(found.config)
        pairs = zip(layer_fields(found.config), after, strict=True)
        report["layers"] = [{"layer": i, "from": describe(old), "to": new} for i, (old, new) in enumerate(pairs)]
        if target is None:
            report |= {"cache_bytes_per_token_after": self.budget, "parameters_after": None}
        return report | {"exact": exact, "method": self.method}

    def chosen_later(self, config: GQAConfig) -> list[str]:
        """Each layer after a conversion to a budget, before it is known what the layers lose."""
        chosen = range(config.num_hidden_layers) if self.layers is None else self.layers
        layers = enumerate(layer_fields(config))
        return [f"{self.attention_kind}, chosen by loss" if i in chosen else describe(layer) for i, layer in layers]

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
                found, target, exact = self.prepare(folder)
            with self.timed("reading text"):
                batches = self.read_text(folder, found.config, exact)
            with self.timed("loading"):
                model = load_source(folder, found.dtype, self.device).eval()
            with self.timed("converting"):
                calibration = batches.get("calibration")
                if target is None:
                    target = allocate(
                        model,
                        self.attention_kind,
                        self.budget,
                        calibration,
                        layers=self.layers,
                        dtype=found.dtype,
                        progress=stage("choosing sizes"),
                    )
                converted, done = convert(
                    model,
                    target,
                    calibration,
                    selection=batches.get("selection"),
                    method=self.method,
                    regroup=self.regroup,
                    refit=self.refit,
                    seed=self.seed,
                    progress=stage("converting"),
                )
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

    @property
    def is_local(self) -> bool:
        return Path(self.source).exists()

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
            sizes = {name: getattr(self, name) for name in SIZES if name != "cache_bytes"}
            if self.cache_bytes is not None:
                sizes["cache_size"] = self.cache_bytes // found.dtype.itemsize
            target = target_config(found.config, self.attention_kind, layers=self.layers, **sizes)
            exact = check_convertible(found.config, target)
        if self.attention_kind == "mla" and not exact and self.method not in ("auto", "lowrank"):
            raise ConversionError(f"--method={self.method} merges heads, which MLA does not: choose auto or lowrank")
        return found, target, exact

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
        command = self.options()
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

    def options(self) -> dict[str, Any]:
        """The options in types that JSON has; files and folders by their names, without this machine's paths."""
        options = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        for name in ("text", "evaluation_text"):
            if options[name]:
                options[name] = [Path(path).absolute().name for path in options[name]]
        source = Path(self.source).resolve().name if self.is_local else self.source
        return options | {"source": source, "target": self.target.resolve().name}

    @contextmanager
    def timed(self, name: str):
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def save(folder: Path, model: GQAForCausalLM, source: Path, progress: Callable[[Iterable], Iterable]) -> None:
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


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
