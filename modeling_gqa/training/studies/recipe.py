"""The recipe of the studies: which model is converted, and how its conversions are trained."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from ...conversion import METHODS
from ..recipe.objects import as_object

StudyName = Literal["conversion", "uptraining", "groups"]
STUDIES: tuple[str, ...] = get_args(StudyName)
SET_IN_RUNS = {"student", "pretraining_fraction", "pretraining_tokens", "max_steps", "seed", "data_seed"}
# Next-token loss on all parameters, as in the paper's section 2.1.
NEXT_TOKEN = {"teacher": "none", "trainable": "all", "layerwise_fraction": 0, "kl_weight": 0}
WRITES = """--new-tokens and --new_tokens are the same option; in a YAML file it is `new_tokens: 64`. The studies write
only into --output-dir (default: runs/RECIPE), and share what they train: students/NAME/, the conversions; runs/NAME/,
an uptraining run each; logs/, claims/, failed/, recipe.json; and of each study STUDY.md, STUDY.json and its pictures.
The same command goes on where it was stopped; several launches of it divide the runs. Exit codes: 0 done, 1 an error
that the message explains, or a run that failed, 130 or 143 stopped by a signal."""


@dataclass
class StudyRecipe:
    """The GQA paper's studies (2305.13245) on a model of yours.

    STUDY is one of: conversion, which compares ways to make one key/value head of many, before and after uptraining
    (figure 4); uptraining, which trains GQA and MQA on shares of the pretraining tokens (figure 5); groups, which
    measures time and quality by the number of key/value heads (figures 6 and 3). Each has a report of its own; they
    share their folder and what they train.
    """

    script: ClassVar[str] = "study"
    unused: ClassVar[dict[str, str]] = {}
    budgets: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[str] = WRITES

    source: str = field(
        default="runs/tiny-mha/final",
        metadata={"help": "The model that is converted: a folder or Hub name of this package's or a stock model."},
    )
    uptraining: str = field(default="uptrain-tiny", metadata={"help": "Recipe of each run: its text and schedule."})
    options: dict | str | None = field(
        default=None,
        metadata={
            "help": "JSON object: options of uptraining for all runs, such as learning_rate and data_files; "
            "`uptrain --help` shows them."
        },
    )
    pretraining_tokens: int | None = field(
        default=None, metadata={"help": "The source's pretraining tokens; read from its results.json if left out."}
    )
    methods: list[str] = field(
        default_factory=lambda: ["mean", "first", "random", "lowrank"],
        metadata={"help": f"Study conversion: how heads become one, of {', '.join(METHODS)}."},
    )
    shares: list[float] = field(
        default_factory=lambda: [0.01, 0.02, 0.05, 0.1],
        metadata={"help": "Study uptraining: tokens trained on, as shares of the pretraining tokens."},
    )
    share: float = field(default=0.05, metadata={"help": "Studies conversion and groups: the share trained on."})
    heads: int | None = field(
        default=None, metadata={"help": "Key/value heads of GQA; default: a quarter of the source's."}
    )
    calibration_tokens: int = field(
        default=32768, metadata={"help": "Tokens that methods see which calibrate, such as lowrank."}
    )
    prompt_tokens: int = field(default=512, metadata={"help": "Study groups: tokens of a sample's prompt."})
    new_tokens: int = field(default=128, metadata={"help": "Study groups: tokens that a sample generates."})
    rows: int = field(default=1, metadata={"help": "Study groups: samples at once."})
    seeds: int = field(default=3, metadata={"help": "Number of runs of each point."})
    seed: int = field(default=42, metadata={"help": "First seed; of the order of the text, and of random heads."})
    jobs: int = field(default=1, metadata={"help": "Runs at once on this machine; each has a GPU of its own, if any."})
    launcher: str = field(
        default="", metadata={"help": "What starts each run, such as `torchrun --nproc_per_node 8 -m`."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the studies. Default: runs/RECIPE."})

    def __post_init__(self) -> None:
        self.options = as_object("options", self.options)
        self.shares = sorted({float(share) for share in self.shares})
        for name, shares in (("share", [self.share]), ("shares", self.shares)):
            if not shares or not all(0 < share <= 1 for share in shares):
                raise ValueError(f"{name} must lie above 0 and up to 1")
        if wrong := [method for method in self.methods if method not in METHODS]:
            raise ValueError(f"there is no method {wrong[0]}; there are {', '.join(METHODS)}")
        least = {"seeds": 1, "jobs": 1, "rows": 1, "prompt_tokens": 1, "new_tokens": 1, "calibration_tokens": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        if found := sorted((SET_IN_RUNS | {"output_dir", "resume", "overwrite"}) & set(self.options)):
            raise ValueError(f"options has {found[0]}, which the study sets in each run: leave it out")


@dataclass(frozen=True)
class Student:
    """A conversion of the source.

    Args:
        heads: number of key/value heads.
        method: how heads become one; "" where the source has as many.
    """

    heads: int
    method: str

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.heads}-heads-{self.method}" if self.method else "source"


@dataclass(frozen=True)
class Point:
    """A student after a share of the source's pretraining tokens."""

    student: Student
    share: float

    def run_name(self, seed: int) -> str:
        return f"{self.student.name}-share{self.share:g}-seed{seed}"


def options_of_runs(recipe: StudyRecipe) -> dict[str, Any]:
    """Return the options that all runs have."""
    return {**NEXT_TOKEN, "publish": False, "keep_best": False, **as_object("options", recipe.options)}
