"""The recipe of a run: every option with its type and default, the checks of their values, and where they come from."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import DistributedType, DynamoBackend
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, SchedulerType, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import (
    ModelOptions,
    PretrainOptions,
    RunningOptions,
    RunOptions,
    TextOptions,
    TrainOptions,
    is_set,
    preset_folder,
    public_name,
    read_values,
)

from ..common.cards import base_metadata, kept_metadata

if TYPE_CHECKING:
    from .results import Results

# Fields of TrainingArguments that the scripts do not read: refused rather than silently ignored.
LAST, COUNTED = "the last weights are the result of a pretraining run", "the validation loss counts every token itself"
UNUSED = {
    "resume_from_checkpoint": "use --resume",
    "do_train": "this script always trains",
    "do_eval": "use --eval-strategy",
    "do_predict": "this script does not predict",
    "hub_strategy": "the script uploads the finished repository once, at the end",
    "include_num_input_tokens_seen": "tokens are always counted",
    "dataloader_drop_last": "it would drop validation text as well",
    "auto_find_batch_size": "it would change the run's arithmetic",
    "save_only_model": "--resume needs all of a checkpoint",
    "ignore_data_skip": "a resumed run would train on the same text again",
    "remove_unused_columns": "the script makes the columns, and needs all of them",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), LAST),
    **dict.fromkeys(("prediction_loss_only", "batch_eval_metrics", "include_for_metrics"), COUNTED),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "label_names"), COUNTED),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "it would round the weights that are saved at the end"),
    **dict.fromkeys(("length_column_name", "train_sampling_strategy"), "all sequences have one length"),
}
# What may differ between a run and its resumption: none of it changes the weights.
FREE_ON_RESUME = {
    "resume", "overwrite", "output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level",
    "log_level_replica", "logging_steps", "logging_first_step", "save_steps", "save_strategy", "save_total_limit",
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "ddp_timeout", "ddp_backend",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "sample_prompt", "license", "bigram_baseline", "local_rank", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "per_device_eval_batch_size", "eval_accumulation_steps", "logging_strategy", "skip_memory_metrics",
    "log_on_each_node", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_always_push",
    "torch_empty_cache_steps", "enable_jit_checkpoint", "keep_best", "eval_tasks", "eval_data", "eval_limit",
    "log_attention_logits",
    "init_from", "student", "teacher", "model_overrides",  # the models' weights and fields are compared themselves
}  # fmt: skip
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # of tokens
# What sets the length of a run. A resumption may change it where the schedule does not depend on it until near the end.
LENGTHS = {"max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"}
EXTENDABLE = ("constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay")
# Bounds: TrainingArguments accepts more, and training then fails when it has begun, or at its end.
NUMBERS: list[tuple[tuple[str, ...], Callable[[float], bool], str]] = [
    (("sequence_length",), lambda number: number >= 2, "at least 2"),
    (("max_steps",), lambda number: number >= 1 or number == -1, "at least 1"),
    (
        (
            "max_eval_blocks", "per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit",
            "gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps", "ddp_timeout",
            "dataloader_prefetch_factor", "eval_limit",
        ),
        lambda number: number >= 1,
        "at least 1",
    ),
    (
        (
            "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers", "eval_delay",
            "eval_steps", "neftune_noise_alpha",
        ),
        lambda number: number >= 0,
        "at least 0",
    ),
    (
        ("adam_epsilon", "logging_steps", "save_steps", "tokens_per_parameter", "num_train_epochs"),
        lambda number: number > 0,
        "positive",
    ),
    (("adam_beta1", "adam_beta2", "label_smoothing_factor"), lambda number: 0 <= number < 1, "at least 0 and below 1"),
    (("seed", "data_seed"), lambda number: 0 <= number < 2**32, f"from 0 to {2**32 - 1}"),
]  # fmt: skip


@dataclass
class Recipe(ModelOptions, PretrainOptions, RunningOptions, TextOptions, TrainOptions, RunOptions, TrainingArguments):  # type: ignore[misc]
    """Every option of a pretraining run: those of this package, and those of transformers' `TrainingArguments`."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_overrides"]
    _argument_group_name = "Options"
    script, unused = "pretrain", UNUSED
    budgets: ClassVar[tuple[str, ...]] = ("max_steps", "tokens", "tokens_per_parameter")
    # Fields of which one at most is given: each sets the length of training, or the model.
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ((*budgets, "num_train_epochs"), ("preset", "init_from"))

    num_train_epochs: float | None = field(default=None, metadata={"help": "Passes over the text, in place of steps."})  # type: ignore[assignment]
    # The filter would show an average in place of a NaN; here training stops at the first NaN.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses in the log."})
    enable_jit_checkpoint: bool = field(default=True, metadata={"help": "Do not save and exit on SIGTERM."})

    def __post_init__(self) -> None:
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        for option in ("report_to", "eval_tasks"):
            given = getattr(self, option)
            names = [given] if isinstance(given, str) else given
            setattr(self, option, [name for several in names for name in several.split(",")])
        # TrainingArguments declares a string, and wants none.
        self.fsdp = {"true": True, "false": None}.get(str(self.fsdp).lower(), self.fsdp)  # type: ignore[assignment]
        # Unless told, accelerate does not join CPU processes into a group.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.check_numbers()
        for group in self.alternatives:
            if len(given := [name for name in group if is_set(getattr(self, name))]) > 1:
                raise ValueError(f"{' and '.join(given)} are both given; choose one")
        if models := self.models():
            from ..checkpoints.files import is_gguf  # a new model needs none of it

            for role, name in models.items():
                if is_gguf(name):
                    raise ValueError(
                        f"the {role} {name} is a GGUF file: write it as a folder first, with modeling-gqa import"
                    )
        if self.num_train_epochs is None:
            self.num_train_epochs = TrainingArguments.num_train_epochs
        super().__post_init__()
        if self.tokens:
            self.set_steps(parse_tokens(self.tokens))
        self.check_options()

    def check_options(self) -> None:
        """Raise `ValueError` for options that exclude each other or need what this machine lacks."""
        name = self.output_dir or ""
        if not name.isprintable() or any(len(part.encode()) > 255 for part in Path(name).parts):
            raise ValueError(f"output_dir is {ascii(name)[:100]}; a name must be printable and of at most 255 bytes")
        if self.save_strategy == "best":
            raise ValueError("save_strategy best has no effect here: the last weights are the result of a run")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; it must lie between 0 and 1")
        if self.data_files and self.dataset_name:
            raise ValueError("data_files and dataset_name are both given; name one source of text")
        if self.streaming and not any(is_set(getattr(self, name)) for name in self.budgets):
            raise ValueError("streaming has no end, so tokens or max_steps must say how long to train")
        if self.streaming and self.dataloader_num_workers:
            raise ValueError(
                f"dataloader_num_workers is {self.dataloader_num_workers}, and each would stream all of the text; "
                "streaming needs 0"
            )
        if self.fsdp and self.muon and self.fsdp_plugin_args["fsdp_version"] == 1:
            raise ValueError("muon needs whole matrices, which version 1 of FSDP flattens: use 2, or set muon false")
        if self.fsdp and self.world_size == 1:
            raise ValueError(
                "fsdp shards a model over processes, and there is one: start it with torchrun, or give --fsdp false"
            )
        if self.fsdp and self.distributed_state.distributed_type == DistributedType.MULTI_CPU:
            raise ValueError("fsdp has no effect on CPUs, where accelerate shards nothing: leave it out")
        if self.use_liger_kernel:
            raise ValueError("use_liger_kernel has no effect: Liger Kernel does not know these models, leave it out")
        if self.torch_compile and str(self.torch_compile_backend).upper() not in DynamoBackend.__members__:
            backends = ", ".join(sorted(DynamoBackend.__members__)).lower()
            raise ValueError(f"torch_compile_backend is {self.torch_compile_backend}; there are {backends}")
        if self.torch_compile and self.torch_compile_mode:
            from torch._inductor import list_mode_options  # slow to import, and only this needs it

            if self.torch_compile_mode not in (modes := list_mode_options()):
                raise ValueError(f"torch_compile_mode is {self.torch_compile_mode}; there are {', '.join(modes)}")
        if self.muon and self.optim not in ("adamw_torch", "adamw_torch_fused"):
            raise ValueError(f"muon is true, and optim is {self.optim}: set muon false, or leave optim out")
        for name in ("optim_args", "optim_target_modules"):
            if self.muon and getattr(self, name):
                raise ValueError(f"{name} has no effect with muon: set muon false, or leave {name} out")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("fp16 has no effect on CPUs: leave it out, or give bf16")
        if not self.dataset_name:
            for name in ("dataset_config_name", "dataset_split"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name} has no effect without dataset_name: leave it out")
        if self.push_to_hub and not self.publish:
            raise ValueError("push_to_hub uploads final/, which publish false does not write: leave one of them out")
        if self.evaluates and not self.publish:
            raise ValueError("eval_tasks is about final/, which publish false does not write: leave one of them out")
        if self.eval_limit is not None and not self.evaluates:
            raise ValueError("eval_limit has no effect without eval_tasks or eval_data: leave it out")
        if "humaneval" in self.eval_tasks:
            raise ValueError(
                "eval_tasks has humaneval, which runs code that the model writes: after training modeling-gqa evaluate "
                "does so, with --run-code"
            )
        if self.push_to_hub and self.hub_model_id:
            validate_repo_id(self.hub_model_id)
        for name in ("resume", "gradient_checkpointing"):
            if self.dry_run and getattr(self, name):
                raise ValueError(f"dry_run does not measure what {name} changes: leave one of them out")
        check_trackers(self.report_to, self.output_dir)

    @property
    def n_gpu(self) -> int:
        """The number of GPUs that a process drives: one at most, where transformers would copy the model to all."""
        return min(super().n_gpu, 1)

    @property
    def evaluates(self) -> bool:
        """Whether the saved model is evaluated at the end."""
        return bool(self.eval_tasks or self.eval_data)

    @property
    def order_seed(self) -> int:
        """The seed of the order of the text."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def tokens_per_step(self) -> int:
        batches = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
        return batches * self.sequence_length

    def set_steps(self, tokens: float) -> None:
        """Set `max_steps` to train on so many tokens; raises `ValueError` where they are less than half a step's."""
        self.max_steps = round(tokens / self.tokens_per_step)
        if self.max_steps < 1:
            self.check_models()
            given = next(name for name in self.budgets[1:] if is_set(getattr(self, name)))
            raise ValueError(f"{given} leaves {tokens:,.0f} tokens, and a step takes {self.tokens_per_step:,}")

    def set_epochs(self, sequences: int) -> None:
        """Set `max_steps` where the length is given in passes over so many sequences."""
        if self.max_steps <= 0:
            self.max_steps = math.ceil(self.num_train_epochs * self.updates(sequences))

    def updates(self, sequences: int) -> int:
        """Return the number of steps of one pass over so many sequences; the last may be smaller."""
        batches = math.ceil(sequences / (self.train_batch_size * self.world_size))
        return math.ceil(batches / self.gradient_accumulation_steps)

    def check_numbers(self) -> None:
        """Raise `ValueError` for a number that is not finite or outside its bounds."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{item.name} is {value}; it must be a finite number")
        for names, permitted, words in NUMBERS:
            for name in names:
                value = getattr(self, name, None)
                if isinstance(value, int | float) and not permitted(value):
                    raise ValueError(f"{name} is {value}; it must be {words}")

    def inputs(self) -> list[tuple[str, str]]:
        """Return what the run reads: pairs of a word for it, such as `text`, and its path or Hub name."""
        preset = str(preset_folder(self.preset)) if self.preset else None
        texts = [("text", name) for name in (*self.data_files, self.dataset_name)]
        others = (("preset", preset), ("tokenizer", self.tokenizer), ("eval_data", self.eval_data))
        return [(what, name) for what, name in (*texts, *self.models().items(), *others) if name]

    # -- What depends on the kind of recipe; `UptrainRecipe` has its own.

    @property
    def start(self) -> str | None:
        """The trained model that training begins with: a folder or Hub name."""
        return self.init_from

    @property
    def model_name(self) -> str:
        """The model's name as it is printed."""
        return public_name(self.start) if self.start else self.preset

    def models(self) -> dict[str, str]:
        """Return the models that the run reads, by their roles: each a folder or Hub name."""
        return {"model": self.init_from} if self.init_from else {}

    def check_models(self) -> None:
        """Raise `UserError` where one of them cannot be opened."""
        from ..checkpoints.checkpoint import open_checkpoint  # a new model needs none of it

        for role, name in self.models().items():
            try:
                open_checkpoint(name, companions=False)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot load the {role} {name}: {error}") from error

    def bound_to_length(self) -> str | None:
        """Return why a run that has begun cannot get another length; `None` where it can."""
        schedule = SchedulerType(self.lr_scheduler_type).value
        if schedule in EXTENDABLE:
            return None
        return f"its schedule, {schedule}, ends with it. Runs of {', '.join(EXTENDABLE)} can go on"

    def origin(self, results: "Results") -> str:
        """Return the words of the card's first sentence on how the model was made."""
        if self.start:
            return f"`{self.model_name}` trained further with `modeling_gqa` on {results['tokens_seen']:,} tokens"
        return "pretrained from scratch with `modeling_gqa`"

    def method(self) -> str:
        """Return the card's lines on how the model was trained, beyond text, steps and schedule."""
        return ""

    def card_metadata(self) -> dict[str, Any]:
        """Return entries of the card's metadata that replace those of the text and the model's kind."""
        if not self.start:
            return {}
        from ..checkpoints.files import local_folder

        card = local_folder(self.start) / "README.md"
        on_hub = [name for name in self.models().values() if not Path(name).exists()]
        base = on_hub[0] if on_hub else kept_metadata(card, ["base_model"]).get("base_model")
        return kept_metadata(card) | base_metadata(base)

    def saved_dtype(self, model: PreTrainedModel) -> torch.dtype:
        """Return the dtype of the saved weights: of those that training began with."""
        if not self.start:
            return model.dtype
        from ..checkpoints.checkpoint import open_checkpoint

        return open_checkpoint(self.start, download=False, companions=False).dtype

    def copy_documents(self, folder: Path) -> None:
        """Copy into the saved repository the licences and reports of the model that training began with."""
        if self.start:
            from ..checkpoints.files import LICENCES, copy_files, local_folder

            copy_files(local_folder(self.start), folder, (*LICENCES, "conversion.json"))


# -- Where the values come from


def recipe_class(script: str) -> type[Any]:
    """Return the dataclass of the options of `pretrain` or `uptrain`."""
    if script == "pretrain":
        return Recipe
    from .uptraining import UptrainRecipe  # it loads what reads checkpoints

    return UptrainRecipe


def load_recipe(
    argv: list[str], recipe_class: type[Any] = Recipe, prog: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Read a recipe, and the options that replace its values.

    Args:
        argv: a recipe's name or path, and options.
        recipe_class: `Recipe`, `UptrainRecipe` or `CompareRecipe`.
        prog: how the script was started, for errors.

    Returns:
        The recipe, and its values by field, which `save_recipe` writes and `compare_recipes` reads.

    Raises:
        UserError: an unknown recipe, field or option, a value of the wrong type, or values that do not go together.
    """
    values = read_values(argv, recipe_class, prog or f"modeling-gqa {recipe_class.script}")
    try:
        return recipe_class(**values), values
    except json.JSONDecodeError as error:  # of TrainingArguments, which reads fields that are dictionaries
        raise UserError(f"{error.doc!r} is no JSON object: {error}") from error
    except Exception as error:  # TrainingArguments reads files, asks packages and devices: each has its own classes
        raise UserError(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error


def as_object(name: str, value: dict | str | None) -> dict[str, Any]:
    """Return a JSON object that is given as such or as text; raises `ValueError`."""
    try:
        found = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError as error:
        raise ValueError(f"{name} is no JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be a JSON object, not {found!r}")
    return found


def parse_tokens(text: str) -> float:
    """Return a number of tokens such as 500000, 500M, 2.5B or 1e9; raises `ValueError`."""
    number, factor = text.strip().replace("_", ""), 1.0
    if re.fullmatch(r"\d{1,3}(,\d{3})+", number):  # no decimal comma
        number = number.replace(",", "")
    if number and number[-1].upper() in UNITS:
        number, factor = number[:-1], UNITS[number[-1].upper()]
    try:
        tokens = float(number) * factor
    except ValueError:
        tokens = math.nan
    if not 0 < tokens < math.inf:
        raise ValueError(f"tokens is {text}; it must be a positive number, such as 500000, 500M or 2B")
    return tokens


# -- Trackers, such as TensorBoard


def check_trackers(names: Sequence[str], folder: str | None) -> None:
    """Raise `ValueError` for a tracker that there is not, or whose package is not installed.

    Args:
        folder: where they are going to write; trackio wants to know when it is imported, which is here.
    """
    try:
        with trackers_in(Path(folder or "")):
            for tracker in get_reporting_integration_callbacks(names):
                tracker()
    except Exception as error:  # each tracker has a class of its own
        raise ValueError(f"report_to {', '.join(names)}: {error}") from error


@contextmanager
def trackers_in(folder: Path) -> Iterator[None]:
    """While it is entered, trackers begin to write below `folder`, unless an environment variable says where.

    Their own defaults are the folder that the command was started in, and one of the user's.
    """
    places = {
        "TENSORBOARD_LOGGING_DIR": folder / "runs" / time.strftime("%Y-%m-%d-%H-%M-%S"),
        "WANDB_DIR": folder,
        "TRACKIO_DIR": folder / "trackio",
    }
    ours = {name: str(place.absolute()) for name, place in places.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
