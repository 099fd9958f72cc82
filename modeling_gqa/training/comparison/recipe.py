"""The recipe of a comparison: what is trained, by which pretraining recipe, and how it is matched."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from modeling_gqa_cli.recipes import CompareOptions

from ..recipe.objects import as_object
from ..recipe.trackers import check_trackers


@dataclass
class CompareRecipe(CompareOptions):
    """Every option of a comparison."""

    script: ClassVar[str] = "compare"
    unused: ClassVar[dict[str, str]] = {}
    budgets: ClassVar[tuple[str, ...]] = ()

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
