"""The models that are compared: their configurations, matched in parameters, in FLOPs or in bytes of cache."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ... import GQAConfig
from ...common.errors import UserError
from ...common.tables import Table, with_prefix
from ...costs import cache_bytes_per_token, count_parameters, training_flops
from ..recipe import load_recipe
from ..recipe.model import check_training, load_config
from ..recipe.objects import as_arguments, as_object
from ..recipe.pretraining import Recipe
from .recipe import CompareRecipe, Match


@dataclass(frozen=True)
class Candidate:
    """A model of a comparison.

    Args:
        name: by which it is shown.
        overrides: fields in which it differs from the preset, those that match it included.
        config: its configuration.
    """

    name: str
    overrides: dict[str, Any]
    config: GQAConfig


def candidates_of(recipe: CompareRecipe) -> tuple[list[Candidate], Recipe]:
    """Return the models of a comparison, and the pretraining recipe of their runs.

    Raises:
        UserError: a model cannot be built, matched or trained, or an option of pretraining is wrong.
    """
    pretraining, _ = pretraining_of(recipe)

    def build(overrides: dict[str, Any]) -> GQAConfig:
        changed = copy.copy(pretraining)
        changed.model_overrides = overrides
        return load_config(changed)  # type: ignore[return-value]

    kinds = as_object("kinds", recipe.kinds) or usual_kinds(build({}))
    if not recipe.kinds and recipe.match == "cache":  # of GQA at 1/4: no latent is as large as MHA's keys and values
        heads = {name: kinds[name] for name in ("gqa-quarter", "mha", "gqa-half", "mqa")}
        kinds = heads | {"mla": kinds["mla-quarter"]}
    candidates = make_candidates(build, kinds, recipe.match, pretraining.sequence_length)
    for candidate in candidates:
        try:
            check_training(pretraining, candidate.config)
        except UserError as error:
            raise UserError(f"{candidate.name}: {error}") from error
    return candidates, pretraining


def pretraining_of(recipe: CompareRecipe) -> tuple[Recipe, dict[str, Any]]:
    """Return the pretraining recipe of a comparison's runs, and its values; raises `UserError`."""
    options = {**as_object("options", recipe.options), "preset": recipe.preset}
    return load_recipe([recipe.pretraining, *as_arguments(options)])


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

    Args:
        config: of the model whose attention is replaced; its number of heads is divisible by 4.

    Raises:
        UserError: the number of heads is not, or heads are too small for an eighth of the cache.
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


def make_candidates(
    build: Callable[[dict[str, Any]], GQAConfig], kinds: dict[str, dict[str, Any]], match: Match, sequence_length: int
) -> list[Candidate]:
    """Return the models of a comparison, the first as it is and the others matched with it.

    Args:
        build: makes the configuration of a dict of overrides; it raises `UserError`.
        kinds: overrides by name.
        match: what they have alike.
        sequence_length: tokens of a block, for FLOPs.

    Raises:
        UserError: a model cannot be matched.
    """
    made: list[Candidate] = []
    for name, overrides in kinds.items():
        candidate = Candidate(name, overrides, build(overrides))
        if made and match == "cache":
            candidate = with_cache(candidate, made[0].config, build)
        elif made and match != "nothing":
            flops = partial(training_flops, batch_size=1, sequence_length=sequence_length)
            count: Callable[[GQAConfig], float] = count_parameters if match == "parameters" else flops
            candidate = with_width(candidate, count(made[0].config), count, build)
        made.append(candidate)
    return made


def with_width(
    candidate: Candidate,
    target: float,
    count: Callable[[GQAConfig], float],
    build: Callable[[dict[str, Any]], GQAConfig],
) -> Candidate:
    """Return a candidate with the width of the MLP at which `count`, which is linear in it, is nearest to `target`."""
    widths = candidate.config.intermediate_size, candidate.config.intermediate_size + 1
    counts = [count(build(candidate.overrides | {"intermediate_size": width})) for width in widths]
    width = round(widths[0] + (target - counts[0]) / (counts[1] - counts[0]))
    if width < 1:
        raise UserError(
            f"{candidate.name} cannot be matched: its attention alone is larger than the first model; match nothing "
            "or choose smaller sizes"
        )
    overrides = candidate.overrides | {"intermediate_size": width}
    return Candidate(candidate.name, overrides, build(overrides))


def with_cache(candidate: Candidate, first: GQAConfig, build: Callable[[dict[str, Any]], GQAConfig]) -> Candidate:
    """Return a candidate with the cache of the first one: by the size of its heads, or of its latent in MLA."""
    config = candidate.config
    kinds = {layer.attention_kind for layer in config.per_layer_config}
    numbers = cache_bytes_per_token(first) // first.num_hidden_layers // 2
    if len(kinds) > 1 or len({layer.attention_kind for layer in first.per_layer_config}) > 1:
        raise UserError(f"{candidate.name} cannot be matched by cache: its layers, or the first model's, differ")
    if kinds == {"mla"}:
        overrides = candidate.overrides | {"kv_lora_rank": numbers - config.qk_rope_head_dim}
    else:
        overrides = candidate.overrides | {"head_dim": numbers // (2 * config.num_key_value_heads)}
    try:
        made = build(overrides)
    except UserError as error:
        raise UserError(f"{candidate.name} cannot be matched by cache: {error}") from error
    if cache_bytes_per_token(made) != cache_bytes_per_token(first):
        raise UserError(
            f"{candidate.name} cannot be matched by cache: {numbers} numbers per token and layer are not a multiple of "
            "what its heads take"
        )
    return Candidate(candidate.name, overrides, made)
