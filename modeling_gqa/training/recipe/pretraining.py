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

from ..results import Results
from .catalogue import preset_folder
from .fields import NUMBERS, UNUSED, WHAT_A_RUN_WRITES
from .trackers import check_trackers


@dataclass
class Recipe(TrainingArguments):
    """Every option of a pretraining run: those of transformers' `TrainingArguments`, then those of this package."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_overrides"]
    script, unused, writes = "pretrain", UNUSED, WHAT_A_RUN_WRITES
    budgets: ClassVar[tuple[str, ...]] = ()  # fields that each set the length of training

    preset: str = field(
        default="",
        metadata={
            "help": "Model: the name of a packaged preset, or a folder with a config.json. Its weights start at random."
        },
    )
    model_overrides: dict | str | None = field(
        default=None, metadata={"help": "JSON object: fields that replace the preset's."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention: eager, sdpa, flash_attention_2, ..."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Hub name or path; a byte-level BPE tokenizer is trained if left out."}
    )
    data_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Text, JSONL, JSON or Parquet files (.gz, .bz2, .xz and .zst too), folders or globs."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub data set; without it and data_files, Python's standard library is read."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the Hub data set."})
    streaming: bool = field(default=False, metadata={"help": "Tokenize the text while training, and not before."})
    text_column: str = field(
        default="text", metadata={"help": "Field that holds the text (JSONL, JSON, Parquet, Hub)."}
    )
    license: str | None = field(default=None, metadata={"help": "Licence of the text, for the model card."})
    sequence_length: int = field(default=256, metadata={"help": "Number of tokens in a packed block."})
    validation_fraction: float = field(default=0.05, metadata={"help": "Fraction of the documents that is held out."})
    max_eval_blocks: int = field(default=256, metadata={"help": "Largest number of blocks to validate on."})
    bigram_baseline: bool = field(default=True, metadata={"help": "Report the loss of a bigram model as well."})
    sample_prompt: str = field(default="", metadata={"help": "Prompt of the sample printed at the end."})
    publish: bool = field(
        default=True,
        metadata={"help": "Save final/, a complete repository, load it in a fresh process, and print a sample."},
    )
    resume: bool = field(default=False, metadata={"help": "Continue the run in output_dir."})
    overwrite: bool = field(
        default=False, metadata={"help": "Delete the run in output_dir, which is the files in its manifest.json."}
    )

    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={"help": "Trackers, such as `tensorboard wandb`; their files lie in output_dir."},
    )

    # Fields of TrainingArguments with other defaults.
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Decay of AdamW's second moment."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay; not applied to norms and biases."})
    logging_steps: float = field(default=20, metadata={"help": "Number of steps between log lines."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints that are kept."})
    # The filter would show an average in place of a NaN; here training stops at the first NaN.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses in the log."})
    enable_jit_checkpoint: bool = field(default=True, metadata={"help": "Save and exit on SIGTERM."})

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
