"""From one kind of attention to another: what changes, what stays exact, and on which text the rest is chosen.

converted, report = convert(model, target_config(model.config, "mla", cache_size=64), calibration)
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .calibration import Statistics, collect, windows, without_data
from .changes import changed_layers, lossy_layers
from .errors import ConversionError
from .latent import SPLITS
from .layerwise import scratch
from .search import Search, Setting, describe_setting
from .targets import Fields, check_ours, check_same_model, layer_fields
from .types import Batch, Stage, silent

# What "auto" chooses by at most: settings differ by more than texts do.
SELECTION_TOKENS = 16384
METHODS = ("auto", "lowrank", "procrustes", "mean", "first", "random")


def convert(
    model: GQAForCausalLM,
    target_config: GQAConfig,
    calibration: Sequence[Batch] | None = None,
    *,
    selection: Sequence[Batch] | None = None,
    method: str = "auto",
    regroup: bool | None = None,
    refit: bool | None = None,
    split: bool = False,
    seed: int = 0,
    stage: Stage = silent,
) -> tuple[GQAForCausalLM, dict[str, Any]]:
    """Give a trained model another attention.

    A multiple of the key/value heads, MQA to MLA, and MLA without a latent norm to MHA are exact.

    Args:
        model: the source; it is not changed.
        target_config: the same model with other attention, best made by `targets.target_config`. An MLA layer's
            frequencies, softmax scale and biases are found here, and it has no latent norm.
        calibration: batches of model inputs of typical text, `[{"input_ids": (B, T)}, ...]`, with "attention_mask" or
            "position_ids" where they are needed; without any, the weights alone decide.
        selection: text by which "auto" chooses; where it is left out, the last quarter of `calibration`, at most
            SELECTION_TOKENS.
        method: how heads become fewer, of METHODS; "auto" tries settings of `lowrank` and `procrustes`, and of MLA's
            gain and weight, and keeps the least KL(source || converted) on `selection`.
        regroup: whether heads may be merged with others than their neighbours; "auto" tries both.
        refit: whether the output projections of converted layers are fitted to the source's outputs by least squares
            on `calibration`; "auto" tries both, other methods do not.
        split: whether each lossy MLA layer may share its cache, of R + P as in `target_config`, between the two by what
            it would lose; needs `calibration`.
        seed: of "random", and of regrouping.
        stage: gives, for a description, what wraps an iterable to show progress.

    Returns:
        The converted model, and what was done: {"exact", "method", "setting", "layers", "candidates"}.

    Raises:
        ConversionError: this cannot be converted, and why.
    """
    check_source(model, target_config, method)
    lossy = lossy_layers(model, target_config)
    if lossy and method == "auto" and calibration and selection is None:
        calibration, selection = hold_out(calibration)
    if refit and lossy and not calibration:
        raise ConversionError("refit needs calibration text")
    kinds = {target_config.per_layer_config[index].attention_kind == "mla" for index in lossy}
    if kinds == {True} and method not in ("auto", "lowrank"):
        raise ConversionError(f"method={method!r} merges heads, and to MLA none are merged: choose auto or lowrank")
    if all(target_config.per_layer_config[index].num_key_value_heads == 1 for index in lossy):
        regroup = regroup or False  # one group holds all heads, however they are ordered
    searching = bool(method == "auto" and lossy and selection)
    setting = Setting(
        method="lowrank" if method == "auto" else method,
        metric="full" if calibration else "identity",
        regroup=regroup is True or (regroup is None and method == "auto"),
        split=SPLITS[0] if split and calibration else None,
        refit=bool(refit and calibration),
        seed=seed,
    )
    changed = changed_layers(model.config, target_config)
    with scratch(model.device) as seen, scratch(model.device) as known:
        if lossy and calibration:
            progress = stage("calibrating layers")
            seen.update(collect(model, calibration, changed, root=searching, progress=progress))
        statistics = seen or blank_statistics(model, changed)
        search = Search(model, target_config, statistics, calibration, selection, known, stage)
        if searching:
            setting = search.run(setting, kinds, regroup, refit)
        converted, fields, losses = search.converted(setting, share=False)
    report = {
        "exact": not lossy,
        "method": setting.method if lossy else "exact",
        "setting": asdict(setting) if lossy else None,
        "layers": [
            {"layer": index, "from": describe(before), "to": describe(after), "loss": losses.get(index)}
            for index, (before, after) in enumerate(zip(layer_fields(model.config), fields, strict=True))
        ],
        "candidates": [{"name": describe_setting(setting), "kl": kl} for kl, setting in search.tried],
    }
    return converted, report


def check_source(model: GQAForCausalLM, target: GQAConfig, method: str) -> None:
    """Raise `ConversionError` where there is nothing that could be converted, or no such method."""
    check_ours(model.config)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConversionError("the model's weights are not in memory (offloaded, or on the meta device): load them all")
    if method not in METHODS:
        raise ConversionError(f"method={method!r} is unknown: choose one of {', '.join(METHODS)}")
    check_same_model(model.config, target)
    if not changed_layers(model.config, target):
        raise ConversionError("the target's attention is the source's: there is nothing to convert")


def hold_out(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The first three quarters and the last quarter of the batches, of single rows where there are few; the second has
    at most SELECTION_TOKENS, or one batch."""
    if len(batches) < 4:
        batches = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()}
            for batch in batches
            for row in range(len(batch["input_ids"]))
        ]
    if len(batches) < 4:
        raise ConversionError(
            f"{len(batches)} rows of text are too few for auto to choose by: give 4, or name a method"
        )
    held_out = len(batches) // 4
    while held_out > 1 and sum(batch["input_ids"].numel() for batch in batches[-held_out:]) > SELECTION_TOKENS:
        held_out -= 1
    return list(batches[:-held_out]), list(batches[-held_out:])


def blank_statistics(model: GQAForCausalLM, layers: Iterable[int]) -> dict[int, Statistics]:
    """The statistics of `layers` without text; layers that are alike share one."""
    length = min(model.config.max_position_embeddings, 2048)
    heads = [layer.num_attention_heads for layer in model.config.per_layer_config]
    kinds = list(zip(heads, windows(model.config), strict=True))
    hidden, device = model.config.hidden_size, model.device
    blank = {(number, window): without_data(hidden, number, length, device, window) for number, window in set(kinds)}
    return {index: blank[kinds[index]] for index in layers}


def describe(layer: Fields) -> str:
    """For instance `gqa, 2 of 8 heads` or `mla, 32 + 16`."""
    if layer["attention_kind"] == "mla":
        return f"mla, {layer['kv_lora_rank']} + {layer['qk_rope_head_dim']}"
    return f"{layer['attention_kind']}, {layer['num_key_value_heads']} of {layer['num_attention_heads']} heads"
