"""The models that are compared: the recipe, and configurations matched in parameters or FLOPs."""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import CompareOptions, as_arguments

from ... import GQAConfig
from ...common.tables import Table, with_prefix
from ...costs import cache_bytes_per_token, count_parameters, training_flops
from ..recipe import Recipe, as_object, load_recipe
from ..recipe_model import check_training, load_config

MATCHED = {
    "parameters": "All models have the parameters of the first, by the width of the MLP.",
    "flops": "All models take the training FLOPs of the first, by the width of the MLP.",
    "nothing": "Nothing but the preset is matched: models differ in parameters, FLOPs and cache.",
}
# Options that the comparison sets in each run.
SET_IN_RUNS = {"learning_rate", "seed", "data_seed", "preset", "model_overrides", "output_dir", "resume", "overwrite"}
SET_IN_RUNS |= {"init_from", "dry_run", "publish", "eval_tasks", "eval_data", "eval_limit"}


@dataclass
class CompareRecipe(CompareOptions):
    """Every option of a comparison."""

    script: ClassVar[str] = "compare"
    unused: ClassVar[dict[str, str]] = {}
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __post_init__(self) -> None:
        self.options = as_object("options", self.options)
        self.kinds = as_object("kinds", self.kinds)
        self.learning_rates = sorted({float(rate) for rate in self.learning_rates})
        self.contexts = sorted({int(tokens) for tokens in self.contexts})
        if len(self.learning_rates) < 3:
            raise ValueError(f"learning_rates has {len(self.learning_rates)} of them; a sweep needs at least 3")
        if not all(0 < rate < math.inf for rate in self.learning_rates):
            raise ValueError("learning_rates must be positive numbers")
        if len({f"{rate:.2e}" for rate in self.learning_rates}) < len(self.learning_rates):  # as runs are named
            raise ValueError("learning_rates has two that are equal in three digits: leave one of them out")
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.seed < 2**32 - self.seeds:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to {2**32 - 1 - self.seeds}")
        if min(self.contexts, default=0) < 1:
            raise ValueError("contexts must be at least 1")
        if len(self.kinds) == 1:
            raise ValueError("kinds names one model; a comparison needs two")
        for name, fields in self.kinds.items():
            if not isinstance(fields, dict):
                raise ValueError(f"kinds has {fields!r} for {name}; give an object, such as {{attention_kind: mha}}")
            if not re.fullmatch(r"[\w+-][\w.+-]{0,99}", name):  # it names folders
                raise ValueError(f"kinds has the name {name!r}; names have up to 100 letters, digits, - _ + .")
        if taken := sorted(SET_IN_RUNS & set(self.options)):
            raise ValueError(f"options has {taken[0]}, which the comparison sets in each run: leave it out")


@dataclass(frozen=True)
class Candidate:
    """A model of a comparison; `overrides` are fields in which it differs from the preset."""

    name: str
    overrides: dict[str, Any]
    config: GQAConfig


def candidates_of(recipe: CompareRecipe) -> tuple[list[Candidate], Recipe, dict[str, Any]]:
    """Return the models of a comparison, the pretraining recipe of their runs, and its values.

    Raises:
        UserError: a model cannot be built, matched or trained, or an option of pretraining is wrong.
    """
    pretraining, values = load_runs(recipe)

    def build(overrides: dict[str, Any]) -> GQAConfig:
        changed = copy.copy(pretraining)
        changed.model_overrides = overrides
        return load_config(changed)  # type: ignore[return-value]

    kinds: Any = recipe.kinds or usual_kinds(build({}))
    made: list[Candidate] = []
    for name, overrides in kinds.items():
        try:
            if made:
                overrides = overrides | matching_field(recipe.match, made[0].config, overrides, build, pretraining)
            config = build(overrides)
            if pretraining.tokens_per_parameter:  # of the first model: all train on the same tokens
                tokens = round(pretraining.tokens_per_parameter * count_parameters(config))
                others = {key: value for key, value in recipe.options.items() if key != "tokens_per_parameter"}  # type: ignore[union-attr]
                recipe.options = others | {"tokens": str(tokens)}
                pretraining, values = load_runs(recipe)
            check_training(pretraining, config)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        made.append(Candidate(name, overrides, config))
    return made, pretraining, values


def load_runs(recipe: CompareRecipe) -> tuple[Recipe, dict[str, Any]]:
    """Return the pretraining recipe of a comparison's runs, and its values."""
    options = {"publish": False, **recipe.options, "preset": recipe.preset}  # type: ignore[dict-item]
    return load_recipe([recipe.pretraining, *as_arguments(options)])


def matching_field(
    match: str,
    first: GQAConfig,
    overrides: dict[str, Any],
    build: Callable[[dict[str, Any]], GQAConfig],
    pretraining: Recipe,
) -> dict[str, int]:
    """Return the field by which a model gets the parameters or FLOPs of the first; raises `UserError`.

    Both are linear in the width of the MLP, of which the nearest is taken.
    """
    if match == "nothing":
        return {}
    config = build(overrides)
    flops = partial(training_flops, batch_size=1, sequence_length=pretraining.sequence_length)
    count: Callable[[GQAConfig], float] = count_parameters if match == "parameters" else flops
    width = config.intermediate_size
    missing, step = (
        count(first) - count(config),
        count(build(overrides | {"intermediate_size": width + 1})) - count(config),
    )
    width += round(missing / step)
    if width < 1:
        raise UserError(
            "cannot be matched: its attention alone is larger than the first model; match nothing, or choose smaller "
            "sizes"
        )
    return {"intermediate_size": width}


def sizes_table(candidates: Sequence[Candidate], sequence_length: int) -> Table:
    """Return the sizes that the rule of matching has led to."""
    rows = [
        [
            candidate.name,
            f"{count_parameters(candidate.config):,}",
            with_prefix(training_flops(candidate.config, 1, sequence_length) / sequence_length),
            f"{cache_bytes_per_token(candidate.config):,}",
            f"{candidate.config.intermediate_size:,}",
            ", ".join(f"{name}={value}" for name, value in candidate.overrides.items() if name != "intermediate_size"),
        ]
        for candidate in candidates
    ]
    header = ["model", "parameters", "FLOP per token", "cache, bytes per token", "MLP", "sizes"]
    return Table(header, rows)


def usual_kinds(config: GQAConfig) -> dict[str, dict[str, Any]]:
    """Return the kinds that are compared by default: MHA, GQA at 1/2 and 1/4 of its cache, MQA, MLA at 1/4 and 1/8.

    The last one mixes GQA and MLA at 1/4.

    Raises:
        UserError: 4 does not divide the heads of `config`, or they are too small for an eighth of the cache.
    """
    heads, size, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    if heads % 4:
        raise UserError(f"the model has {heads} heads, which 4 does not divide: say which kinds to compare")
    quarter = 2 * (heads // 4) * size  # numbers per token and layer
    rotary = 2 * max(1, size // 4)
    if quarter // 2 <= rotary:
        raise UserError(
            f"heads of {size} dimensions leave MLA no latent at 1/8 of the cache: say which kinds to compare"
        )

    def latent(numbers: int) -> dict[str, Any]:
        return {"attention_kind": "mla", "kv_lora_rank": numbers - rotary, "qk_rope_head_dim": rotary}

    grouped = {"attention_kind": "gqa", "num_key_value_heads": heads // 4}
    return {
        "mha": {"attention_kind": "mha"},
        "gqa-half": {"attention_kind": "gqa", "num_key_value_heads": heads // 2},
        "gqa-quarter": grouped,
        "mqa": {"attention_kind": "mqa"},
        "mla-quarter": latent(quarter),
        "mla-eighth": latent(quarter // 2),
        "mixed": {**grouped, "per_layer_config": {str(index): latent(quarter) for index in range(1, layers, 2)}},
    }
