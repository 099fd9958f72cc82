"""The recipe of a pretraining run: every option with its type and default, and the checks of their values."""

import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import DynamoBackend
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import is_liger_kernel_available

from modeling_gqa_cli.recipes import ModelOptions, RunningOptions, RunOptions, TextOptions, TrainOptions, preset_folder

from ..results import Results
from .fields import NUMBERS, UNUSED
from .trackers import check_trackers


@dataclass
class Recipe(ModelOptions, RunningOptions, TextOptions, TrainOptions, RunOptions, TrainingArguments):  # type: ignore[misc]
    """Every option of a pretraining run: those of this package, and those of transformers' `TrainingArguments`."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_overrides"]
    _argument_group_name = "Options"
    script, unused = "pretrain", UNUSED
    budgets: ClassVar[tuple[str, ...]] = ()  # fields that each set the length of training

    # The filter would show an average in place of a NaN; here training stops at the first NaN.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses in the log."})
    enable_jit_checkpoint: bool = field(default=True, metadata={"help": "Do not save and exit on SIGTERM."})

    def __post_init__(self) -> None:
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        given = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        self.report_to = [name for names in given for name in names.split(",")]
        # Unless told, accelerate does not join CPU processes into a group.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.check_numbers()
        super().__post_init__()
        self.check_options()

    def check_options(self) -> None:
        """Raise `ValueError` for options that exclude each other or need what this machine lacks."""
        name = self.output_dir or ""
        if not name.isprintable() or any(len(part.encode()) > 255 for part in Path(name).parts):
            raise ValueError(f"output_dir is {ascii(name)[:100]}; a name must be printable and of at most 255 bytes")
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            raise ValueError(f"num_train_epochs is {self.num_train_epochs} and max_steps is not given; set one of them")
        if self.save_strategy == "best":
            raise ValueError("save_strategy best has no effect here: the last weights are the result of a run")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; it must lie between 0 and 1")
        if self.data_files and self.dataset_name:
            raise ValueError("data_files and dataset_name are both given; name one source of text")
        if self.streaming and self.max_steps <= 0:
            raise ValueError("streaming has no end, so max_steps must say how long to train")
        if self.streaming and self.dataloader_num_workers:
            raise ValueError(
                f"dataloader_num_workers is {self.dataloader_num_workers}, and each would stream all of the text; "
                "streaming needs 0"
            )
        if self.fsdp and self.world_size == 1:
            raise ValueError("fsdp shards a model over several processes, and there is one: start it with torchrun")
        if self.use_liger_kernel and not is_liger_kernel_available():
            raise ValueError("use_liger_kernel needs the package liger-kernel: install it, or leave the option out")
        if self.use_liger_kernel and self.use_cpu:
            raise ValueError("use_liger_kernel needs a GPU, and this run is on the CPU: leave the option out")
        if self.torch_compile and str(self.torch_compile_backend).upper() not in DynamoBackend.__members__:
            backends = ", ".join(sorted(DynamoBackend.__members__)).lower()
            raise ValueError(f"torch_compile_backend is {self.torch_compile_backend}; there are {backends}")
        if self.torch_compile and self.torch_compile_mode:
            from torch._inductor import list_mode_options  # slow to import, and only this needs it

            if self.torch_compile_mode not in (modes := list_mode_options()):
                raise ValueError(f"torch_compile_mode is {self.torch_compile_mode}; there are {', '.join(modes)}")
        if self.push_to_hub and not self.publish:
            raise ValueError("push_to_hub uploads final/, which publish false does not write: leave one of them out")
        if self.push_to_hub and self.hub_model_id:
            validate_repo_id(self.hub_model_id)
        check_trackers(self.report_to, self.output_dir)

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
        return [(what, name) for what, name in (*texts, ("preset", preset), ("tokenizer", self.tokenizer)) if name]

    # -- What depends on the kind of recipe; `UptrainRecipe` has its own.

    @property
    def model_name(self) -> str:
        """The model's name as it is printed."""
        return self.preset

    def models(self) -> dict[str, str]:
        """Return the models that the run reads, by their roles: each a folder or Hub name."""
        return {}

    def origin(self, results: Results) -> str:
        """Return the words of the card's first sentence on how the model was made."""
        return "pretrained from scratch with `modeling_gqa`"

    def method(self) -> str:
        """Return the card's lines on how the model was trained, beyond text, steps and schedule."""
        return ""

    def card_metadata(self) -> dict[str, Any]:
        """Return entries of the card's metadata that replace those of the text and the model's kind."""
        return {}

    def saved_dtype(self, model: PreTrainedModel) -> torch.dtype:
        """Return the dtype of the saved weights."""
        return model.dtype

    def copy_documents(self, folder: Path) -> None:
        """Copy into the saved repository the licences and reports of the model that training began with."""
