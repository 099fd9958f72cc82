"""The recipe of a comparison: what is trained, by which pretraining recipe, and how it is matched."""

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..recipe.objects import as_object
from ..recipe.trackers import check_trackers

Match = Literal["parameters", "flops", "cache", "nothing"]
WRITES = """--learning-rates and --learning_rates are the same option; in a YAML file it is `learning_rates: [0.003]`.
A comparison writes only into --output-dir (default: runs/RECIPE): runs/NAME/, which is a pretraining run each, logs/,
claims/, failed/, tokenizer/, recipe.json, comparison.json, report.md and its pictures, and what the trackers of
--report-to write. The same command goes on where it was stopped: finished runs are kept, begun ones are resumed, failed
ones are tried again. Several launches of it, on one machine or on several that share the folder, divide the runs. Exit
codes: 0 done, 1 an error that the message explains, or a run that failed, 130 or 143 stopped by a signal."""


@dataclass
class CompareRecipe:
    """Every option of a comparison."""

    script: ClassVar[str] = "compare"
    unused: ClassVar[dict[str, str]] = {}
    budgets: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[str] = WRITES

    pretraining: str = field(default="tiny", metadata={"help": "Recipe of each run: its text, steps and schedule."})
    preset: str = field(
        default="tiny-mha", metadata={"help": "The model whose attention is replaced: a preset, or a folder."}
    )
    options: dict | str | None = field(
        default=None, metadata={"help": "JSON object: options of pretraining for all runs, such as max_steps."}
    )
    kinds: dict | str | None = field(
        default=None,
        metadata={
            "help": "JSON object: name of each model, and the fields in which it differs from the preset; the first is "
            "what the others are matched with. Default: mha, gqa-half, gqa-quarter, mqa, mla-quarter, mla-eighth, "
            "mixed; with match cache gqa-quarter, mha, gqa-half, mqa, mla."
        },
    )
    match: Match = field(
        default="parameters",
        metadata={
            "help": "What all models have alike: parameters or training FLOPs (by the width of the MLP), cache bytes "
            "(by the sizes of heads or latent), or nothing."
        },
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [1.5e-3, 3e-3, 6e-3, 1.2e-2],
        metadata={
            "help": "Peak rates that each model is trained with, at least 3; more are added where the best is an edge."
        },
    )
    seeds: int = field(default=3, metadata={"help": "Number of runs of each model at its best rate."})
    seed: int = field(default=42, metadata={"help": "First seed; of weights and of the order of the text."})
    jobs: int = field(
        default=1,
        metadata={"help": "Number of runs at once on this machine; each has a GPU of its own, where there are GPUs."},
    )
    launcher: str = field(
        default="",
        metadata={
            "help": "What starts each run, such as `torchrun --nproc_per_node 8 -m`; default: python -m. It decides "
            "which GPUs a run takes: leave jobs at 1."
        },
    )
    contexts: list[int] = field(
        default_factory=lambda: [128, 512, 1024],
        metadata={"help": "Contexts at which decoding is measured, in tokens."},
    )
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "Trackers of the comparison, such as `tensorboard wandb`."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the comparison. Default: runs/RECIPE."})

    def __post_init__(self) -> None:
        self.options = as_object("options", self.options)
        self.kinds = as_object("kinds", self.kinds)
        self.learning_rates = sorted({float(rate) for rate in self.learning_rates})
        self.contexts = sorted({int(tokens) for tokens in self.contexts})
        if len(self.learning_rates) < 3:
            raise ValueError(f"learning_rates has {len(self.learning_rates)} of them; a sweep needs at least 3")
        if not all(0 < rate < math.inf for rate in self.learning_rates):
            raise ValueError("learning_rates must be positive numbers")
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.seed < 2**32 - self.seeds:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to {2**32 - 1 - self.seeds}")
        if min(self.contexts, default=0) < 1:
            raise ValueError("contexts must be at least 1")
        self.check_kinds()
        swept = {"learning_rate", "seed", "data_seed", "preset", "model_overrides", "output_dir", "resume", "overwrite"}
        if taken := sorted(swept & set(self.options)):
            raise ValueError(f"options has {taken[0]}, which the comparison sets in each run: leave it out")
        self.report_to = [name for name in self.report_to if name != "none"]
        check_trackers(self.report_to, self.output_dir)

    def check_kinds(self) -> None:
        """Raise `ValueError` for kinds that name no models, or names that are no names of folders."""
        if len(self.kinds) == 1:
            raise ValueError("kinds names one model; a comparison needs two")
        for name, fields in as_object("kinds", self.kinds).items():
            if not isinstance(fields, dict):
                raise ValueError(f"kinds has {fields!r} for {name}; give an object, such as {{attention_kind: mha}}")
            if not re.fullmatch(r"[\w+-][\w.+-]{0,99}", name):
                raise ValueError(
                    f"kinds has the name {name!r}; names have up to 100 letters, digits, '-', '_', '+', '.'"
                )
