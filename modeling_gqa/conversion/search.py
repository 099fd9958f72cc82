"""Settings of a conversion, the model that each of them makes, and the choice among them."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers.initialization import no_init_weights

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .calibration import Statistics
from .changes import changed_layers, is_exact
from .contexts import evaluating
from .errors import ConversionError
from .grouping import contiguous, regrouped
from .heads import merge_heads
from .latent import ALPHAS, GAINS, SPLITS, best_split, to_latent
from .matrices import Heads, read_heads, repeat_heads, write_grouped
from .measuring import measure, predicted_states
from .moments import compute_moments
from .refit import refit_outputs
from .targets import Fields, configuration, latent_fields, layer_fields
from .types import Batch, Progress, Stage, silent

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to convert: how heads are merged, under which metric of the input, MLA's gain and alpha, the weight by
    which its cache is shared between R and P (`None`: as the target says), and whether the output projections are
    fitted afterwards."""

    method: str = "lowrank"
    metric: str = "full"
    weighted: bool = True
    regroup: bool = True
    gain: str = "mean"
    alpha: float = ALPHAS[0]
    split: float | None = None
    refit: bool = False
    seed: int = 0


def describe_setting(setting: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(setting).items() if name != "seed")


@dataclass
class Search:
    """Settings tried on one model, and the KL(source || converted) of each on `selection`; `known` is to hold the
    source's hidden states there, which every candidate is compared with."""

    model: GQAForCausalLM
    target: GQAConfig
    statistics: Mapping[int, Statistics]
    calibration: Sequence[Batch] | None
    selection: Sequence[Batch] | None
    known: MutableMapping[int, torch.Tensor]
    stage: Stage = silent
    tried: list[tuple[float, Setting]] = field(default_factory=list)

    def converted(self, setting: Setting, share: bool) -> tuple[GQAForCausalLM, list[Fields], dict[int, float | None]]:
        """The model converted by `setting`; `share`: its other tensors are the source's own."""
        stage = silent if share else self.stage  # candidates are counted, and not their layers
        progress = stage("converting layers")
        states, fields, losses = convert_layers(self.model, self.target, self.statistics, setting, progress)
        model = assemble(self.model, configuration(self.target, fields), states, share)
        if setting.refit and self.calibration:
            refit_outputs(self.model, model, sorted(states), self.calibration, stage("fitting outputs"))
        return model, fields, losses

    def best_of(self, settings: Iterable[Setting]) -> Setting:
        if not self.known:
            with evaluating(self.model):
                self.known.update(
                    (number, predicted_states(self.model, batch)) for number, batch in enumerate(self.selection)
                )
        tried = {setting for _, setting in self.tried}
        for setting in self.stage("trying settings")([setting for setting in settings if setting not in tried]):
            candidate, _, _ = self.converted(setting, share=True)
            measured = measure(self.model, candidate, self.selection, known=self.known)
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
            if start.split:
                best = self.best_of(replace(best, split=weight) for weight in (None, *SPLITS))
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
    """A layer at a time: the new parameters of the layers that change, all layers' fields, and what is lost."""
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
                moments = compute_moments(heads, statistics[index], setting.metric)
                rank, size = fields[index]["kv_lora_rank"], fields[index]["qk_rope_head_dim"]
                if setting.split and not is_exact(model, target, index):
                    rank, size, _ = best_split(heads, moments, rank + size, setting.split, setting.gain)
                    fields[index] |= latent_fields(model.config, index, rank, size, None)
                state, found, losses[index] = to_latent(heads, moments, rank, size, setting.gain, setting.alpha)
                check_sizes(index, fields[index], found)
            else:
                std, seed = model.config.initializer_range, setting.seed * len(fields) + index
                heads, losses[index] = fewer_heads(heads, fields[index], statistics[index], setting, std, seed)
                state, found = write_grouped(heads)
                if before[index]["attention_kind"] != "mla":  # rotated as it was, partly perhaps
                    found |= rotation(fields[index])
                check_sizes(index, fields[index], found)
            computed |= state
        fields[index] = {**fields[index], **found}
        states[index] = {name: tensor.to(model.dtype, copy=True).contiguous() for name, tensor in state.items()}
    return states, fields, losses


@contextmanager
def living_layer(index: int) -> Iterator[State]:
    """Refuse a layer whose projections are zero, as pruning and growing models leave them: without a direction in
    which its keys, values or outputs vary there is none to keep. Takes what was computed of it."""
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
