"""The recipe of the studies: which model is converted, and how its conversions are trained."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from modeling_gqa_cli.options import Method
from modeling_gqa_cli.parser import option
from modeling_gqa_cli.recipes import filled

STUDIES: tuple[str, ...] = get_args(Literal["conversion", "uptraining", "groups"])
METHODS: tuple[str, ...] = get_args(Method)
SET_IN_RUNS = {"student", "pretraining_fraction", "pretraining_tokens", "max_steps", "seed", "data_seed"}
# Next-token loss on all parameters, as in the paper's section 2.1.
NEXT_TOKEN = {"teacher": "none", "trainable": "all", "layerwise_fraction": 0, "kl_weight": 0}


@dataclass
class StudyRecipe:
    """Every option of the studies."""

    _argument_group_name = "Study"
    script: ClassVar[str] = "study"
    unused: ClassVar[dict[str, str]] = {}
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    source: str = option("The model that is converted: folder or Hub name, ours or stock.", "runs/tiny-mha/final")
    uptraining: str = option("Recipe of each run: its text and schedule.", "uptrain-tiny")
    options: dict | str | None = option("JSON object: options of uptraining for all runs.", metavar="JSON")
    pretraining_tokens: int | None = option("The source's pretraining tokens. Default: its results.json.")
    methods: list[str] = filled(
        f"conversion: how heads become one, of {', '.join(METHODS)}.", ("mean", "first", "random", "lowrank")
    )
    shares: list[float] = filled("uptraining: shares of the pretraining tokens.", (0.01, 0.02, 0.05, 0.1))
    share: float = option("conversion and groups: the share of the pretraining tokens.", 0.05)
    heads: int | None = option("Key/value heads of GQA. Default: a quarter of the source's.")
    calibration_tokens: int = option("Tokens that calibrate methods such as lowrank.", 32768)
    prompt_tokens: int = option("groups: tokens of a prompt.", 512)
    new_tokens: int = option("groups: tokens that are generated after it.", 128)
    batch_size: int = option("groups: prompts at once.", 1)
    seeds: int = option("Runs of each point.", 3)
    seed: int = option("First seed, of the order of the text and of random heads.", 42)
    jobs: int = option("Runs at once on this machine; each has a GPU of its own.", 1)
    launcher: str = option("What starts a run, such as `torchrun --nproc_per_node 8 -m`.", "")
    output_dir: str | None = option("Folder of the studies. Default: runs/RECIPE.")

    def __post_init__(self) -> None:
        from modeling_gqa.training.recipe import as_object

        self.options = as_object("options", self.options)
        self.shares = sorted({float(share) for share in self.shares})
        for name, shares in (("share", [self.share]), ("shares", self.shares)):
            if not shares or not all(0 < share <= 1 for share in shares):
                raise ValueError(f"{name} must lie above 0 and up to 1")
        if wrong := [method for method in self.methods if method not in METHODS]:
            raise ValueError(f"there is no method {wrong[0]}; there are {', '.join(METHODS)}")
        for name in ("seeds", "jobs", "batch_size", "prompt_tokens", "new_tokens", "calibration_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if found := sorted((SET_IN_RUNS | {"output_dir", "resume", "overwrite"}) & set(self.options)):
            raise ValueError(f"options has {found[0]}, which the study sets in each run: leave it out")

    def options_of_runs(self) -> dict[str, Any]:
        """Return the options that all runs have."""
        fixed = {"publish": False, "keep_best": False, "eval_strategy": "no"}  # the last weights are measured
        return {**NEXT_TOKEN, **fixed, **self.options}  # type: ignore[dict-item]
