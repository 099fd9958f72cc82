"""From one kind of attention to another: plan by layer, try what may serve, keep what does.

converted, report = convert(model, target_config(model.config, "mla", cache_size=64), calibration)
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from transformers.initialization import no_init_weights

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .calibration import Batch, Statistics, collect, without_data
from .errors import ConversionError
from .grouping import contiguous, regrouped
from .heads import merge_heads
from .latent import ALPHAS, GAINS, to_latent
from .matrices import Heads, read_heads, repeat_heads, write_grouped
from .measuring import evaluating, measure, predicted_states
from .moments import compute_moments
from .refit import refit_outputs
from .targets import Fields, check_ours, check_same_model, configuration, layer_fields, layer_head_dim, rotary_planes

# What "auto" chooses by at most: settings differ by more than texts do.
SELECTION_TOKENS = 16384
METHODS = ("auto", "lowrank", "procrustes", "mean", "first", "random")
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to convert: how heads are merged, under which metric of the input, MLA's gain and alpha, and whether the
    output projections are fitted afterwards."""

    method: str = "lowrank"
    metric: str = "full"
    weighted: bool = True
    regroup: bool = True
    gain: str = "mean"
    alpha: float = ALPHAS[0]
    refit: bool = False
    seed: int = 0


def convert(
    model: GQAForCausalLM,
    target_config: GQAConfig,
    calibration: Sequence[Batch] | None = None,
    *,
    selection: Sequence[Batch] | None = None,
    method: str = "auto",
    regroup: bool | None = None,
    refit: bool | None = None,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> tuple[GQAForCausalLM, dict[str, Any]]:
    """Give a trained model another attention.

    A multiple of the key/value heads, MQA to MLA, and MLA without a latent norm to MHA are exact.

    Args:
        model: the source; it is not changed.
        target_config: the same model with other attention, best made by `targets.target_config`. An MLA layer's
            frequencies, softmax scale and biases are found here, and it has no latent norm.
        calibration: batches of model inputs of typical text, `[{"input_ids": (B, T)}, ...]`, with "attention_mask" or
            "position_ids" where they are needed; without any, the weights alone decide.
        selection: text by which "auto" chooses, whose hidden states are kept meanwhile; where it is left out, the last
            quarter of `calibration`, at most SELECTION_TOKENS.
        method: how heads become fewer, of METHODS; "auto" tries settings of `lowrank` and `procrustes`, and of MLA's
            gain and weight, and keeps the least KL(source || converted) on `selection`.
        regroup: whether heads may be merged with others than their neighbours; "auto" tries both.
        refit: whether the output projections of converted layers are fitted to the source's outputs by least squares
            on `calibration`; "auto" tries both, other methods do not.

    Returns:
        The converted model, and what was done: {"exact", "method", "setting", "layers", "candidates"}.

    Raises:
        ConversionError: this cannot be converted, and why.
    """
    check_ours(model.config)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConversionError("the model's weights are not in memory (offloaded, or on the meta device): load them all")
    if method not in METHODS:
        raise ConversionError(f"method={method!r} is unknown: choose one of {', '.join(METHODS)}")
    check_same_model(model.config, target_config)
    changed = changed_layers(model.config, target_config)
    if not changed:
        raise ConversionError("the target's attention is the source's: there is nothing to convert")
    lossy = lossy_layers(model, target_config)
    if lossy and method == "auto" and calibration and selection is None:
        calibration, selection = hold_out(calibration)
    if refit and not calibration:
        raise ConversionError("refit needs calibration text")
    kinds = {target_config.per_layer_config[index].attention_kind == "mla" for index in lossy}
    if kinds == {True} and method not in ("auto", "lowrank"):
        raise ConversionError(f"method={method!r} merges heads, and to MLA none are merged: choose auto or lowrank")
    if all(target_config.per_layer_config[index].num_key_value_heads == 1 for index in lossy):
        regroup = regroup or False  # one group holds all heads, however they are ordered
    statistics = gather(model, calibration if lossy else None, progress)
    fixed = Setting(
        method="lowrank" if method == "auto" else method,
        metric="full" if calibration else "identity",
        regroup=regroup is True or (regroup is None and method == "auto"),
        refit=bool(refit and calibration),
        seed=seed,
    )
    search = Search(model, target_config, statistics, calibration, selection, progress)
    chosen = fixed
    if method == "auto" and lossy and selection:
        chosen = search.run(fixed, kinds, regroup, refit)
    converted, fields, losses = search.converted(chosen, share=False)
    report = {
        "exact": not lossy,
        "method": chosen.method if lossy else "exact",
        "setting": asdict(chosen) if lossy else None,
        "layers": [
            {"layer": index, "from": describe(before), "to": describe(after), "loss": losses.get(index)}
            for index, (before, after) in enumerate(zip(layer_fields(model.config), fields, strict=True))
        ],
        "candidates": [{"name": describe_setting(setting), "kl": kl} for kl, setting in search.tried],
    }
    return converted, report


def shape(layer: Fields) -> tuple:
    """What makes two attention layers the same but for their weights."""
    names: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    if layer["attention_kind"] == "mla":
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return (layer["attention_kind"] == "mla", *(layer[name] for name in names))


def changed_layers(source: GQAConfig, target: GQAConfig) -> list[int]:
    pairs = zip(layer_fields(source), layer_fields(target), strict=True)
    return [index for index, (before, after) in enumerate(pairs) if shape(before) != shape(after)]


def lossy_layers(model: GQAForCausalLM, target: GQAConfig) -> list[int]:
    """The changed layers that cannot keep their function; raises `ConversionError` where they cannot be had either."""
    lossy = [index for index in changed_layers(model.config, target) if not is_exact(model, target, index)]
    to_mla = [index for index in lossy if target.per_layer_config[index].attention_kind == "mla"]
    if to_mla and model.config.rope_parameters["rope_type"] == "longrope" and model.config.num_hidden_layers > 1:
        raise ConversionError(
            "rope_type 'longrope' lists a factor per rotary dimension, and in MLA each layer keeps other frequencies: "
            "convert this model to fewer key/value heads instead"
        )
    return lossy


def is_exact(model: GQAForCausalLM, target: GQAConfig, index: int) -> bool:
    """Whether layer `index` keeps its function: a multiple of the key/value heads, or MLA with room for all of them."""
    before, after = model.config.per_layer_config[index], target.per_layer_config[index]
    key_heads = before.num_key_value_heads
    if after.attention_kind != "mla":
        return after.num_key_value_heads % key_heads == 0
    planes, size = rotary_planes(before), layer_head_dim(before)
    needed = min(2 * (size - planes) * key_heads, model.config.hidden_size)  # unrotated keys and values
    return after.qk_rope_head_dim == 2 * planes * key_heads and after.kv_lora_rank >= needed


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


def gather(model: GQAForCausalLM, calibration: Sequence[Batch] | None, progress=iter) -> list[Statistics]:
    if calibration:
        return collect(model, calibration, progress)
    length = min(model.config.max_position_embeddings, 2048)
    heads = [layer.num_attention_heads for layer in model.config.per_layer_config]
    blank = {number: without_data(model.config.hidden_size, number, length, model.device) for number in set(heads)}
    return [blank[number] for number in heads]


@dataclass
class Search:
    """Settings tried on one model, and the KL(source || converted) of each on `selection`."""

    model: GQAForCausalLM
    target: GQAConfig
    statistics: list[Statistics]
    calibration: Sequence[Batch] | None
    selection: Sequence[Batch] | None
    progress: Callable[[Iterable], Iterable]
    tried: list[tuple[float, Setting]] = field(default_factory=list)

    @cached_property
    def source_states(self) -> list[torch.Tensor]:
        """The source's last hidden states on `selection`, which every candidate is compared with."""
        with evaluating(self.model):
            return [predicted_states(self.model, batch) for batch in self.selection]

    def converted(self, setting: Setting, share: bool) -> tuple[GQAForCausalLM, list[Fields], dict[int, float | None]]:
        """The model converted by `setting`; `share`: its other tensors are the source's own."""
        states, fields, losses = convert_layers(self.model, self.target, self.statistics, setting)
        model = assemble(self.model, configuration(self.target, fields), states, share)
        if setting.refit and self.calibration:
            refit_outputs(self.model, model, sorted(states), self.calibration)
        return model, fields, losses

    def best_of(self, settings: Iterable[Setting]) -> Setting:
        for setting in self.progress(list(settings)):
            candidate, _, _ = self.converted(setting, share=True)
            measured = measure(self.model, candidate, self.selection, known=self.source_states)
            self.tried.append((measured["kl"], setting))
        return min(self.tried, key=lambda pair: pair[0])[1]

    def run(self, start: Setting, to_mla: set[bool], regroup: bool | None, refit: bool | None) -> Setting:
        """One choice after another, each with what was best so far."""
        best = start
        groupings = [True, False] if regroup is None else [regroup]
        if False in to_mla:
            choices = product(("full", "root", "identity"), (True, False), groupings)
            settings = [replace(start, metric=metric, weighted=w, regroup=r) for metric, w, r in choices]
            best = self.best_of([*settings, *(replace(start, method="procrustes", regroup=r) for r in groupings)])
        if True in to_mla:
            best = self.best_of(replace(best, gain=gain, alpha=alpha) for gain, alpha in product(GAINS, ALPHAS))
            best = self.best_of(replace(best, metric=name) for name in ("root", "identity"))
        return self.best_of([replace(best, refit=True)]) if refit is None else best


def convert_layers(
    model: GQAForCausalLM,
    target: GQAConfig,
    statistics: list[Statistics],
    setting: Setting,
) -> tuple[dict[int, State], list[Fields], dict[int, float | None]]:
    """A layer at a time: the new parameters of the layers that change, all layers' fields, and what is lost."""
    states: dict[int, State] = {}
    fields, losses = layer_fields(target), {}
    before = layer_fields(model.config)
    changed = changed_layers(model.config, target)
    for index in set(range(len(fields))) - set(changed):
        fields[index] = {**before[index], **rotation(fields[index])}
    for index in changed:
        heads = read_heads(model, index)
        if fields[index]["attention_kind"] == "mla":
            moments = compute_moments(heads, statistics[index], setting.metric)
            rank, size = fields[index]["kv_lora_rank"], fields[index]["qk_rope_head_dim"]
            state, found, losses[index] = to_latent(heads, moments, rank, size, setting.gain, setting.alpha)
            check_sizes(index, fields[index], found)
        else:
            std, seed = model.config.initializer_range, setting.seed * len(fields) + index
            heads, losses[index] = fewer_heads(heads, fields[index], statistics[index], setting, std, seed)
            state, found = write_grouped(heads)
            if before[index]["attention_kind"] != "mla":  # rotated as it was, partly perhaps
                found |= rotation(fields[index])
            check_sizes(index, fields[index], found)
        fields[index] = {**fields[index], **found}
        states[index] = {name: tensor.to(model.dtype, copy=True).contiguous() for name, tensor in state.items()}
    return states, fields, losses


def fewer_heads(
    heads: Heads, fields: Fields, statistics: Statistics, setting: Setting, std: float, seed: int
) -> tuple[Heads, float | None]:
    """Grouped attention with as many key/value heads as `fields` say, and the loss (0: exact, `None`: unknown)."""
    number = fields["num_key_value_heads"]
    if number % len(heads.k) == 0:
        return repeat_heads(heads, number), 0.0
    # Where neither number divides the other, through a common multiple, which is exact.
    heads = repeat_heads(heads, math.lcm(len(heads.k), number))
    output_bias = heads.biases[2] or bool(fields["output_bias"])
    moments = compute_moments(heads, statistics, setting.metric, setting.weighted, centered=output_bias)
    partition = regrouped(moments, number, setting.seed) if setting.regroup else contiguous(len(heads.k), number)
    return merge_heads(heads, moments, partition, setting.method, output_bias, std, seed)


def rotation(fields: Fields) -> Fields:
    return {name: fields[name] for name in ("rope_frequency_indices", "rope_frequency_dim")}


def check_sizes(index: int, wanted: Fields, found: Fields) -> None:
    for name in ("qk_nope_head_dim", "v_head_dim", "head_dim"):
        if name in found and wanted[name] != found[name]:
            raise ConversionError(
                f"layer {index}: {name}={wanted[name]} of the target cannot be had: this source's heads make it "
                f"{found[name]}; build the target with `target_config`"
            )


def assemble(model: GQAForCausalLM, config: GQAConfig, states: dict[int, State], share: bool = False) -> GQAForCausalLM:
    """A model of `config` with the attention parameters in `states` by layer, and the source's for all the rest: copies
    of them, or (`share`) the very same tensors."""
    replaced = tuple(f"model.layers.{index}.self_attn." for index in states)
    state = {
        name: tensor if share else tensor.clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(replaced)
    }
    for index, attention in states.items():
        state |= {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in attention.items()}
    config._attn_implementation = model.config._attn_implementation
    with no_init_weights():
        converted: Any = GQAForCausalLM(config)
    converted.load_state_dict(state, assign=True)
    converted.tie_weights()
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.to(model.device).train(model.training)


def describe(layer: Fields) -> str:
    """For instance `gqa, 2 of 8 heads` or `mla, 32 + 16`."""
    if layer["attention_kind"] == "mla":
        return f"mla, {layer['kv_lora_rank']} + {layer['qk_rope_head_dim']}"
    return f"{layer['attention_kind']}, {layer['num_key_value_heads']} of {layer['num_attention_heads']} heads"


def describe_setting(setting: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(setting).items() if name != "seed")
