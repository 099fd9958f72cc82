"""The recipe of an uptraining run: its options beside those of pretraining, its budget, and what its card says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_gqa_cli.recipes import UptrainOptions, public_name

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import LICENCES, copy_files, local_folder
from ..checkpoints.gguf import is_gguf
from ..common.atomic import read_object
from ..common.cards import base_metadata, kept_metadata
from .recipe import UNUSED, Recipe
from .results import RESULTS, Results

# Chosen with configuration/recipes/uptrain-tiny.yaml.
LAYERWISE_FRACTION, KL_WEIGHT = 0.5, 0.9


@dataclass
class UptrainRecipe(UptrainOptions, Recipe):  # type: ignore[misc]
    """Every option of an uptraining run: those of pretraining without the model's, then those of uptraining."""

    script = "uptrain"
    unused = UNUSED | dict.fromkeys(("preset", "model_overrides"), "the student is the model")
    budgets = ("max_steps", "pretraining_fraction")

    # Fields of pretraining with other defaults: the model is already trained.
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of AdamW."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay; not applied to norms and biases."})
    bigram_baseline: bool = field(default=False, metadata={"help": "Report the loss of a bigram model as well."})

    def __post_init__(self) -> None:
        if not self.student:
            raise ValueError("no student given: name the converted model, --student FOLDER or a Hub name")
        if self.teacher in ("", "none"):
            self.teacher = None
        for role, name in self.models().items():
            if is_gguf(name):
                raise ValueError(
                    f"the {role} {name} is a GGUF file: write it as a folder first, with modeling-gqa import"
                )
        if self.teacher is None:
            for name in ("layerwise_fraction", "kl_weight"):
                if getattr(self, name):
                    raise ValueError(f"{name} is {getattr(self, name)} and there is no teacher; give one, or {name} 0")
        for name, default in (("layerwise_fraction", LAYERWISE_FRACTION), ("kl_weight", KL_WEIGHT)):
            if getattr(self, name) is None:
                setattr(self, name, default if self.teacher else 0.0)
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be positive")
        if self.torch_compile and self.layerwise_fraction:
            raise ValueError("torch_compile cannot follow stage 1; set layerwise_fraction 0, or leave it out")
        budget = self.training_budget()
        super().__post_init__()
        if budget is not None:
            tokens = self.train_batch_size * self.gradient_accumulation_steps * self.world_size * self.sequence_length
            self.max_steps = round(budget / tokens)
            if self.max_steps < 1:
                self.check_models()
                raise ValueError(
                    f"pretraining_fraction leaves {budget:,.0f} tokens, and a step takes {tokens:,}: give a larger "
                    "fraction, or --max-steps N --pretraining-fraction 0"
                )

    def inputs(self) -> list[tuple[str, str]]:
        """Return student and teacher beside what pretraining reads."""
        return [*self.models().items(), *super().inputs()]

    def training_budget(self) -> float | None:
        """Return the number of tokens to train on: pretraining_fraction times the teacher's (2305.13245, section 2.1).

        Return `None` where max_steps sets the length of training.
        """
        if not self.pretraining_fraction:
            return None
        if not 0 < self.pretraining_fraction <= 1:
            raise ValueError(f"pretraining_fraction is {self.pretraining_fraction}; it must lie in [0, 1]")
        if self.max_steps > 0:
            raise ValueError(
                "max_steps and pretraining_fraction are both given, and a run has one budget: add "
                "--pretraining-fraction 0 or --max-steps -1"
            )
        self.max_steps = 1  # until the batch size is known
        return self.pretraining_fraction * (self.pretraining_tokens or self.tokens_of_teacher())

    def tokens_of_teacher(self) -> int:
        """Return the number of tokens that the teacher was pretrained on, from its results.json."""
        missing = "pretraining_fraction needs pretraining_tokens: "
        if self.teacher is None:
            raise ValueError(f"{missing}there is no teacher whose results.json could tell")
        self.check_models()
        results = local_folder(self.teacher) / RESULTS
        tokens = (read_object(results) or {}).get("tokens_seen")
        if not isinstance(tokens, int) or tokens <= 0:
            raise ValueError(f"{missing}no tokens_seen in {results}")
        return tokens

    def check_models(self) -> None:
        """Raise `ValueError` where student or teacher cannot be opened: it comes before what is wrong with a budget."""
        for role, name in self.models().items():
            try:
                open_checkpoint(name, companions=False)
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot load the {role} {name}: {error}") from error

    # -- What depends on the kind of recipe.

    @property
    def model_name(self) -> str:
        return public_name(self.student)

    def models(self) -> dict[str, str]:
        return {"student": self.student} | ({"teacher": self.teacher} if self.teacher else {})

    def origin(self, results: Results) -> str:
        source = f", a conversion of `{public_name(self.teacher)}`," if self.teacher else ""
        if results.get("result_step") == 0:
            return f"`{self.model_name}`{source} as it was, which uptraining with `modeling_gqa` did not improve"
        return f"`{self.model_name}`{source} uptrained with `modeling_gqa` on {results['tokens_seen']:,} tokens"

    def method(self) -> str:
        parts = "the attention parameters" if self.trainable == "attention" else "all parameters"
        if self.teacher is None:
            return f"- Next-token loss, of {parts}.\n"
        return (
            f"- {self.layerwise_fraction:.0%} of the steps regress each layer's attention output on the teacher's,"
            " for\n"
            f"  the teacher's input; the rest train {parts} with {self.kl_weight:g} times the KL divergence from the\n"
            f"  teacher at temperature {self.temperature:g} and {1 - self.kl_weight:g} times the next-token loss.\n"
        )

    def card_metadata(self) -> dict[str, Any]:
        card = local_folder(self.student) / "README.md"
        on_hub = [name for name in self.models().values() if not Path(name).exists()]
        base = on_hub[0] if on_hub else kept_metadata(card, ["base_model"]).get("base_model")
        return kept_metadata(card) | base_metadata(base)

    def saved_dtype(self, model: PreTrainedModel) -> torch.dtype:
        return open_checkpoint(self.student, download=False).dtype

    def copy_documents(self, folder: Path) -> None:
        copy_files(local_folder(self.student), folder, (*LICENCES, "conversion.json"))
