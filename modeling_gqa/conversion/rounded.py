"""A conversion whose cache is rounded too: how many numbers MLA keeps, and what the source loses so."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..common.atomic import read_object, write_json
from ..common.batches import Batch, first_batches
from ..common.progress import ShowProgress
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token
from ..modeling_gqa import GQAForCausalLM
from .convert import convert_model
from .divergence import compare_predictions
from .layer_store import SIZES
from .quantizing import train_rounded, with_cache_of
from .targets import cached_numbers
from .transform_coding import least_bytes

# Tokens that a size is tried on, without gradient steps: this number, or this many for each number of a layer's cache.
TRIAL_TOKENS, TOKENS_BY_NUMBER = 8192, 2


def best_neighbour(start: int, count: int, loss: Callable[[int], float]) -> int:
    """Return the number below `count` that is reached from `start` by steps to a neighbour with less loss."""
    loss, best = cache(loss), start
    for step in (1, -1):
        while 0 <= best + step < count and loss(best + step) < loss(best):
            best += step
    return best


def choose_size(
    model: GQAForCausalLM,
    targets: Sequence[GQAConfig],
    start: GQAConfig,
    budget: int,
    batches: dict[str, list[Batch]],
    dtype: torch.dtype,
    folder: Path,
    show_progress: ShowProgress,
    **how: Any,
) -> tuple[GQAConfig, list[dict[str, Any]]]:
    """Return the target that loses least with its cache rounded to `budget` bytes per token, and what was tried.

    A target is converted to without gradient steps, on 8,192 tokens or more, and judged by the KL on text held out.

    Args:
        model: the source.
        targets: MLA of sizes from small to large.
        start: the one of them that is tried first; then its neighbours, as long as they lose less.
        budget, dtype: bytes per token of the rounded cache, and the dtype of the result.
        batches: "calibration" and "selection".
        folder: where what was tried is written; the same call after an interruption does not try it again.
        show_progress: returns, for a description, what wraps an iterable to show progress.
        how: options of `convert_model`.

    Returns:
        The target, and {"name", "kl"} of each that was tried.
    """
    widest = max(map(cached_numbers, model.config.per_layer_config))
    text = first_batches(batches["calibration"], max(TRIAL_TOKENS, TOKENS_BY_NUMBER * widest))
    tried: dict[str, float] = read_object(folder / SIZES) or {}

    def loss(number: int) -> float:
        name = f"R + P = {max(map(cached_numbers, targets[number].per_layer_config))}"
        if name not in tried:

            def progress(what: str) -> Any:
                return show_progress(f"{name}: {what}")

            trial, _ = convert_model(
                model, targets[number], text, refine=0, share_weights=True, show_progress=progress, **how
            )
            rounded = with_cache_of(trial, text, {}, budget, dtype, progress)
            tried[name] = compare_predictions(model, rounded, batches["selection"], progress("measuring"))["kl"]
            write_json(folder / SIZES, tried)
        return tried[name]

    best = best_neighbour(targets.index(start), len(targets), loss)
    return targets[best], [{"name": name, "kl": kl} for name, kl in tried.items()]


def rounded_conversion(
    model: GQAForCausalLM,
    converted: GQAForCausalLM,
    budget: int | None,
    polish: int,
    batches: dict[str, list[Batch]],
    dtype: torch.dtype,
    show_progress: ShowProgress,
) -> tuple[GQAForCausalLM, dict[str, Any]]:
    """Return the conversion with a cache rounded to `budget` bytes per token, trained so, and entries of the report.

    The source with its own cache rounded to as many bytes is measured too, untrained, because it may lose less.
    """
    text = batches["calibration"]
    rounded = with_cache_of(converted, text, {}, budget, dtype, show_progress)
    used = cache_bytes_per_token(rounded.config, dtype)
    done: dict[str, Any] = {"polish": None, "exact": False, "kl_source_quantized": None}
    if least_bytes(model.config, dtype) <= used:  # windowed layers of the source take more as they are
        source = with_cache_of(model, text, {}, used, dtype, show_progress)
        found = compare_predictions(model, source, batches["evaluation"], show_progress("measuring the source"))
        done["kl_source_quantized"] = found["kl"]
    if polish:
        own, judges = [*batches.get("polish", ()), *text], batches["selection"]
        done["polish"] = train_rounded(model, rounded, own, judges, polish, dtype, show_progress)
    return rounded, done
