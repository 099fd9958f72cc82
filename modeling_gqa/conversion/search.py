"""One setting of a conversion, the model that it makes, and the search for the setting that changes least."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers.initialization import no_init_weights

from ..common.errors import ConversionError
from ..common.progress import Progress, ShowProgress, no_progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .layers.grouping import contiguous, merge_heads, regrouped
from .layers.heads import Heads, read_heads, repeat_heads, write_grouped
from .layers.latent import ALPHAS, GAINS, KEY_WEIGHTS, best_sizes, to_latent
from .layers.moments import Statistics, compute_moments
from .layers.normed import latent_source
from .layers.refit import refit_outputs
from .targets import Fields, changed_layers, configuration, is_exact, latent_fields, layer_fields
from .text.calibration import Batch, evaluating
from .text.measuring import compare_predictions, predicted_states

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to convert.

    Args:
        method: how heads are merged: a key of `layers.merging.MERGES`.
        metric: of the layers' input; see `Statistics.metric`.
        weighted: whether the errors of keys are weighted by the queries that read them when heads are merged.
        regroup: whether heads may be merged with others than their neighbours.
        gain: factor of the queries in planes that MLA no longer rotates; see `layers.latent.query_gain`.
        alpha: weight of the keys' errors against the values' in MLA's latent.
        key_weight: the same weight where MLA's cache is divided between R and P; `None` keeps the target's R and P.
        refit: whether the output projections are fitted to the source's outputs afterwards.
        seed: of regrouping and of the method "random".
    """

    method: str = "lowrank"
    metric: str = "full"
    weighted: bool = True
    regroup: bool = True
    gain: str = "mean"
    alpha: float = ALPHAS[0]
    key_weight: float | None = None
    refit: bool = False
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields as `conversion.json` names them; there `key_weight` has always been "split"."""
        return {"split" if name == "key_weight" else name: value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_json().items() if name != "seed")


@dataclass
class Search:
    """Settings tried on one model, with the KL(source || converted) of each on the text `selection`.

    Args:
        model: the source.
        target: the configuration to convert it to.
        statistics: of the input of each layer that changes.
        calibration: text that output projections are fitted on, if any.
        selection: text that settings are compared on, if any.
        source_states: filled with the source's last hidden states on `selection`, to compare every candidate with.
        show_progress: wraps loops.
        tried: the settings tried so far, each after its KL in nats per token.
    """

    model: GQAForCausalLM
    target: GQAConfig
    statistics: Mapping[int, Statistics]
    calibration: Sequence[Batch] | None
    selection: Sequence[Batch] | None
    source_states: MutableMapping[int, torch.Tensor]
    show_progress: ShowProgress = no_progress
    tried: list[tuple[float, Setting]] = field(default_factory=list)

    def converted(self, setting: Setting, share: bool) -> tuple[GQAForCausalLM, list[Fields], dict[int, float | None]]:
        """Convert the model by `setting`.

        Args:
            setting: the setting.
            share: whether the result's other tensors are the source's own, instead of copies.

        Returns:
            The converted model, the fields of all its layers, and the loss of each layer that changed.
        """
        show_progress = no_progress if share else self.show_progress  # of candidates, their number is shown instead
        progress = show_progress("converting layers")
        states, fields, losses = convert_layers(self.model, self.target, self.statistics, setting, progress)
        model = assemble(self.model, configuration(self.target, fields), states, share)
        if setting.refit and self.calibration:
            refit_outputs(self.model, model, sorted(states), self.calibration, show_progress("fitting outputs"))
        return model, fields, losses

    def best_of(self, settings: Iterable[Setting]) -> Setting:
        """Try the settings that were not tried yet and return the best of all tried."""
        if not self.source_states:
            with evaluating(self.model):
                self.source_states.update(
                    (number, predicted_states(self.model, batch)) for number, batch in enumerate(self.selection)
                )
        tried = {setting for _, setting in self.tried}
        for setting in self.show_progress("trying settings")([setting for setting in settings if setting not in tried]):
            candidate, _, _ = self.converted(setting, share=True)
            measured = compare_predictions(self.model, candidate, self.selection, source_states=self.source_states)
            self.tried.append((measured["kl"], setting))
        return min(self.tried, key=lambda pair: pair[0])[1]

    def run(self, start: Setting, to_mla: set[bool], regroup: bool | None, refit: bool | None) -> Setting:
        """Search greedily: one choice after another, each with the best of those before it.

        Args:
            start: the setting to begin with.
            to_mla: whether the layers that change with loss become MLA; both values for a mixed model.
            regroup: of the settings; `None` to try both.
            refit: of the settings; `None` to try both.
        """
        best = start
        groupings = [True, False] if regroup is None else [regroup]
        if False in to_mla:
            choices = product(("full", "root", "identity"), (True, False), groupings)
            settings = [replace(start, metric=metric, weighted=w, regroup=r) for metric, w, r in choices]
            best = self.best_of([*settings, *(replace(start, method="procrustes", regroup=r) for r in groupings)])
        if True in to_mla:
            if start.key_weight:
                best = self.best_of(replace(best, key_weight=weight) for weight in (None, *KEY_WEIGHTS))
            best = self.best_of(replace(best, gain=gain, alpha=alpha) for gain, alpha in product(GAINS, ALPHAS))
            best = self.best_of([replace(best, metric="root")])
        return self.best_of([replace(best, refit=True)]) if refit is None else best


def convert_layers(
    model: GQAForCausalLM,
    target: GQAConfig,
    statistics: Mapping[int, Statistics],
    setting: Setting,
    progress: Progress = iter,
) -> tuple[dict[int, State], list[Fields], dict[int, float | None]]:
    """Convert one layer after another.

    Returns:
        By index the new parameters of the layers that change; the fields of all layers; and by index the loss of the
        layers that change (0 where exact, `None` where unknown).
    """
    states: dict[int, State] = {}
    fields, losses = layer_fields(target), {}
    before = layer_fields(model.config)
    changed = changed_layers(model.config, target)
    for index in set(range(len(fields))) - set(changed):
        fields[index] = {**before[index], **rotation(fields[index])}
    for index in progress(changed):
        with living_layer(index) as computed:
            heads = read_heads(model, index)
            if fields[index]["attention_kind"] == "mla":
                heads, moments = latent_source(heads, statistics[index], setting.metric)
                rank, size = fields[index]["kv_lora_rank"], fields[index]["qk_rope_head_dim"]
                if setting.key_weight and not is_exact(model.config, target, index):
                    rank, size, _ = best_sizes(heads, moments, rank + size, setting.key_weight, setting.gain)
                    fields[index] |= latent_fields(model.config, index, rank, size, None)
                state, found, losses[index] = to_latent(heads, moments, rank, size, setting.gain, setting.alpha)
            else:
                std, seed = model.config.initializer_range, setting.seed * len(fields) + index
                heads, losses[index] = fewer_heads(heads, fields[index], statistics[index], setting, std, seed)
                state, found = write_grouped(heads)
                if before[index]["attention_kind"] != "mla":  # its heads are rotated as before, partly perhaps
                    found |= rotation(fields[index])
            refuse_other_sizes(index, fields[index], found)
            computed |= state
        fields[index] = {**fields[index], **found}
        states[index] = {name: tensor.to(model.dtype, copy=True).contiguous() for name, tensor in state.items()}
    return states, fields, losses


@contextmanager
def living_layer(index: int) -> Iterator[State]:
    """Raise `ConversionError` for a layer whose projections are zero, as pruned and grown models have them.

    Such a layer has no direction in which its keys, values or outputs vary, so there is none to keep. Yields a dict, to
    be filled with the layer's new parameters.
    """
    state: State = {}
    dead = f"layer {index} has projections of zeros, or too near: leave it out (--layers), or choose --method mean"
    try:
        yield state
    except torch.linalg.LinAlgError as error:
        raise ConversionError(dead) from error
    if not all(tensor.isfinite().all() for tensor in state.values()):
        raise ConversionError(dead)


def fewer_heads(
    heads: Heads, fields: Fields, statistics: Statistics, setting: Setting, std: float, seed: int
) -> tuple[Heads, float | None]:
    """Convert heads to the number of key/value heads in `fields`.

    Args:
        heads: the layer's weights.
        fields: the target's, of this layer.
        statistics: of the layer's input.
        setting: how heads are merged.
        std: standard deviation of the method "random".
        seed: seed of the method "random".

    Returns:
        The heads, and the loss (0 where exact, `None` where unknown).
    """
    number = fields["num_key_value_heads"]
    if number % len(heads.k) == 0:
        return repeat_heads(heads, number), 0.0
    # Where neither number divides the other, heads are repeated up to a common multiple first, which is exact.
    heads = repeat_heads(heads, math.lcm(len(heads.k), number))
    output_bias = heads.biases[2] or bool(fields["output_bias"])
    moments = compute_moments(heads, statistics, setting.metric, setting.weighted, centered=output_bias)
    partition = regrouped(moments, number, setting.seed) if setting.regroup else contiguous(len(heads.k), number)
    return merge_heads(heads, moments, partition, setting.method, output_bias, std, seed)


def rotation(fields: Fields) -> Fields:
    """Return the fields that say with which frequencies a layer rotates."""
    return {name: fields[name] for name in ("rope_frequency_indices", "rope_frequency_dim")}


def refuse_other_sizes(index: int, wanted: Fields, found: Fields) -> None:
    """Raise `ConversionError` where a head has another size than the target says."""
    for name in ("qk_nope_head_dim", "v_head_dim", "head_dim"):
        if name in found and wanted[name] != found[name]:
            raise ConversionError(
                f"layer {index}: {name}={wanted[name]} of the target cannot be had: this source's heads make it "
                f"{found[name]}; build the target with `target_config`"
            )


def assemble(model: GQAForCausalLM, config: GQAConfig, states: dict[int, State], share: bool = False) -> GQAForCausalLM:
    """Build a model from the new attention parameters of some layers and the source's tensors for all the rest.

    Args:
        model: the source.
        config: of the model to build.
        states: the attention parameters by index of the layer.
        share: whether the rest are the source's own tensors, instead of copies.
    """
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
