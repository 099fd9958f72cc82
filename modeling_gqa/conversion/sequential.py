"""A model's layers converted one after another, each for the input that the converted layers before it give.

With text, each layer's statistics are of the conversion's own stream, and its output projection is fitted to bring that
stream back to the source's: the target is the source's stream after the attention, less the conversion's before it.
"""

import copy
import math
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from modeling_gqa_cli.errors import UserError

from ..attention import Attention
from ..checkpoints.checkpoint import meta_model, own_tensors
from ..checkpoints.files import LazyTensor
from ..checkpoints.stock_tensors import own_names
from ..common.batches import Batch
from ..common.progress import Progress
from ..configuration_checks import changing_rope
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM
from .fitting import LEARNING_RATES, TRIAL_STEPS, Fit, examples, fit, refine, steps
from .layers.heads import Heads, read_heads, repeat_heads, write_grouped
from .layers.latent import ALPHAS, GAINS, MEAN_SHARES, keeps_mean, to_latent
from .layers.moments import Moments, Statistics, blank_statistics, compute_moments
from .streams import Streams, streams
from .targets import Fields, as_ours, changed_layers, configuration, divided, is_exact, latent_fields, layer_fields

State = dict[str, torch.Tensor]
LatentSource = tuple[Heads, Moments]
# Factor between two sizes P that are tried for a layer, and tokens on which ways to make MLA of it are compared.
ROTARY_STEP, TRIAL_TOKENS = 1.4, 8192
# Share by which a way's error must be lower than that of the ways before it: rounding shall not decide between equals.
TIE = 1e-4
# Methods whose output projections are fitted on text where nothing else is said; "mean" is the GQA paper's.
FITTED_METHODS = ("lowrank", "auto")
# Fields that say with which frequencies a layer rotates.
ROTATION_FIELDS = ("rope_frequency_indices", "rope_frequency_dim")


class LatentChoice(NamedTuple):
    """How MLA is made of a layer.

    Args:
        mean_share: by which the keys' mean counts though it is kept, one of `MEAN_SHARES`.
        gain: of the queries of unrotated keys, one of `GAINS`.
        alpha: weight of the keys' errors against the values' in the latent, one of `ALPHAS`.
        factor: of P in `divided`, where the cache is divided anew.
    """

    mean_share: float = MEAN_SHARES[0]
    gain: float = GAINS[0]
    alpha: float = ALPHAS[0]
    factor: float = 1.0


NOT_CHOSEN = LatentChoice()


class NewLayer(NamedTuple):
    """A layer's new attention.

    Args:
        state: its parameters.
        fields: its configuration fields.
        loss: the squared error that its conversion minimises, estimated; 0 where exact, `None` where unknown.
        learning_rate, ridge: of the gradient steps, and of the fit of its output projection; `None` for none.
        gain, alpha: of a lossy layer of MLA, those of its `LatentChoice`.
        key_mean: whether a lossy layer of MLA keeps the mean of its keys beside the cache.
        mean_share: of a layer that does, that of its `LatentChoice`.
    """

    state: State
    fields: Fields
    loss: float | None
    learning_rate: float | None = None
    ridge: float | None = None
    gain: float | None = None
    alpha: float | None = None
    key_mean: bool | None = None
    mean_share: float | None = None


@dataclass(frozen=True)
class Setting:
    """One way to convert.

    Args:
        method: how heads are merged: a key of `layers.merging.MERGES`.
        metric: of the layers' input, as reports name it: "full", what text shows, or "identity", uncorrelated inputs.
        weighted: whether the errors of keys are weighted by the queries that read them when heads are merged.
        regroup: whether heads may be merged with others than their neighbours.
        by_layer: whether each layer of MLA gets the `LatentChoice` that leaves the least error on documents held out.
        divide_cache: whether R + P is divided anew: with `by_layer` by that error, else by the rule `divided`.
        key_mean: whether lossy layers of MLA keep the mean of their keys beside the cache, where they have a place.
        refit: whether the output projections are fitted on text.
        refine: passes over the text in which each layer's new attention is trained by gradient steps, before the fit.
        seed: of regrouping.
    """

    method: str = "lowrank"
    metric: str = "full"
    weighted: bool = True
    regroup: bool = True
    by_layer: bool = True
    divide_cache: bool = False
    key_mean: bool = True
    refit: bool = False
    refine: int = 0
    seed: int = 0

    @classmethod
    def start(
        cls, method: str, regroup: bool | None, refit: bool | None, text: bool = True, **others: Any
    ) -> "Setting":
        """Return the setting that a conversion begins with, by the options of `convert_model`."""
        fitted = method in FITTED_METHODS
        return cls(
            method="lowrank" if method == "auto" else method,
            metric="full" if text else "identity",
            by_layer=text,
            regroup=fitted if regroup is None else regroup,
            refit=text and (fitted if refit is None else refit),
            **others,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as `conversion.json` names them."""
        return {"share_cache" if name == "divide_cache" else name: value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_json().items() if name != "seed")


@torch.no_grad()
def convert_layers(
    model: GQAForCausalLM,
    target: GQAConfig,
    text: Sequence[Batch] | None,
    setting: Setting,
    done: MutableMapping[int, NewLayer],
    progress: Progress = iter,
) -> list[Fields]:
    """Convert the layers that change, in order, and return the fields of all layers.

    `text`: to calibrate on; `None`: the weights alone decide. `done`: the new layers by index; those that are in it
    already are taken as they are, the others are added.
    """
    fields, before = layer_fields(target), layer_fields(model.config)
    changed = changed_layers(model.config, target)
    lossy = [index for index in changed if not is_exact(model.config, target, index)]
    last = max((index for index in lossy if text and index not in done), default=-1)  # that needs the text
    with streams(model, text) if text and last >= 0 else nullcontext() as streaming:
        for index in progress(range(len(fields)) if text and lossy else changed):
            if index in changed:
                new = known = done.get(index)
                if streaming and index in lossy and index <= last:
                    new = convert_on_text(model, index, fields[index], streaming, setting, known)
                elif known is None:
                    blank = blank_statistics(model.config, index, model.device)
                    new = convert_layer(model, index, fields[index], blank, setting, index in lossy)
                if known is None:
                    done[index] = new
                fields[index] = {**fields[index], **new.fields}
            else:
                fields[index] = {**before[index], **{name: fields[index][name] for name in ROTATION_FIELDS}}
            if streaming and index not in lossy and index < last:
                streaming.advance_both(index)
    return fields


def convert_on_text(
    model: GQAForCausalLM,
    index: int,
    fields: Fields,
    text: Streams,
    setting: Setting,
    known: NewLayer | None,
) -> NewLayer:
    """Convert layer `index` for the states that `text` is in, and send these through the result.

    `known` is the result where it was found before.
    """
    statistics = text.collect(index)
    if known is None and setting.by_layer and text.judges and fields["attention_kind"] == "mla":
        _, new = best_latent(text, index, fields, statistics, setting)
    else:
        new = known or convert_layer(model, index, fields, statistics, setting, True)
    attention = new_attention(model, index, new)
    if known is None:
        attention, rate, ridge = best_attention(text, index, attention, setting)
        new = new._replace(state=dict(attention.state_dict()), learning_rate=rate, ridge=ridge)
    text.send(index, attention)
    text.finish(index, attention)
    return new


def best_attention(
    text: Streams, index: int, attention: Attention, setting: Setting
) -> tuple[Attention, float | None, float | None]:
    """Return the new attention of layer `index` after what helps, the learning rate and the ridge that did.

    Gradient steps and the fit of the output projection are judged on documents that they have not seen. Each is dropped
    (`None`) where the stream's error there is not less with it. `TRIAL_STEPS` with each of `LEARNING_RATES` say in
    which order these are tried in full. The first that helps is taken.
    """
    untrained = copy.deepcopy(attention)
    plain = fit(text, index, attention, setting.refit)
    if not (setting.refine and text.judges):
        return attention, None, plain.ridge
    whole = setting.refine * steps(text)

    def trained(rate: float, number: int, trial: float | None = None) -> tuple[Attention, Fit]:
        result = copy.deepcopy(untrained)
        refine(result, examples(text, index), number, rate, text.norm_behind(index))
        return result, fit(text, index, result, setting.refit, trial)

    def tried(rate: float) -> float:
        found = trained(rate, min(TRIAL_STEPS, whole), TRIAL_TOKENS)[1].held
        return found if math.isfinite(found) else math.inf

    for rate in sorted(LEARNING_RATES, key=tried):
        result, found = trained(rate, whole)
        if found.held < plain.held:
            return result, rate, found.ridge
    return attention, None, plain.ridge


def best_latent(
    text: Streams, index: int, fields: Fields, statistics: Statistics, setting: Setting
) -> tuple[LatentChoice, NewLayer]:
    """Make MLA of layer `index` in the way that leaves the least error of the stream on documents held out.

    Mean share, gain, alpha and, where the sum R + P in `fields` is divided anew, P are chosen in turn. P begins as
    `divided` has it, and grows or else shrinks by `ROTARY_STEP` as long as that helps. Of ways that are equal but for
    `TIE` the first is taken. Each trial has the fit of the
    output projection where the setting has it. Returns the choice, and the new layer, not yet fitted.
    """
    source = read_latent_source(text.model, index, statistics)

    def made(choice: LatentChoice) -> NewLayer:
        return convert_layer(text.model, index, fields, statistics, setting, True, choice, source)

    @cache
    def error(choice: LatentChoice) -> float:
        return fit(text, index, new_attention(text.model, index, made(choice)), setting.refit, TRIAL_TOKENS).error

    def better(choice: LatentChoice, best: LatentChoice) -> bool:
        return error(choice) < error(best) * (1 - TIE)

    best = LatentChoice()
    trials: dict[str, Sequence[float]] = {"mean_share": MEAN_SHARES, "gain": GAINS, "alpha": ALPHAS}
    if not makes_mean(text.model.config, source[0], setting):
        del trials["mean_share"]
    for name, values in trials.items():
        best, *others = (best._replace(**{name: value}) for value in values)
        for choice in others:
            best = choice if better(choice, best) else best
    for step in (ROTARY_STEP, 1 / ROTARY_STEP) if setting.divide_cache else ():
        while better(further := best._replace(factor=best.factor * step), best):
            best = further
        if best.factor != 1:
            break
    return best, made(best)


def convert_layer(
    model: GQAForCausalLM,
    index: int,
    fields: Fields,
    statistics: Statistics,
    setting: Setting,
    lossy: bool,
    choice: LatentChoice = NOT_CHOSEN,
    source: LatentSource | None = None,
) -> NewLayer:
    """Convert layer `index` to what `fields` say, where `lossy` not exactly.

    `choice` says how, where it becomes MLA. `source` is what `read_latent_source` returns, for callers that make MLA in
    several ways of it.
    """
    before, chosen = model.config.per_layer_config[index], {}
    with living_layer(index) as computed:
        if fields["attention_kind"] == "mla":
            heads, moments = source or read_latent_source(model, index, statistics)
            rank, size = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
            if setting.divide_cache and lossy:
                rank, size = divided(rank + size, before, choice.factor)
                fields = fields | latent_fields(model.config, index, rank, size, None)
            mean = lossy and makes_mean(model.config, heads, setting)
            how = choice.alpha, choice.gain, mean, choice.mean_share
            state, found, loss = to_latent(heads, moments, rank, size, *how)
            chosen = {"gain": choice.gain, "alpha": choice.alpha, "key_mean": found["key_mean"]} if lossy else {}
            chosen |= {"mean_share": choice.mean_share} if found["key_mean"] else {}
        else:
            heads, loss = fewer_heads(read_heads(model, index), fields, statistics, setting)
            state, found = write_grouped(heads)
            if before.attention_kind != "mla":  # its heads are rotated as before, partly perhaps
                found |= {name: fields[name] for name in ROTATION_FIELDS}
        for name in ("qk_nope_head_dim", "v_head_dim", "head_dim"):
            if name in found and fields[name] != found[name]:
                raise UserError(
                    f"layer {index}: {name}={fields[name]} of the target cannot be had: this source's heads make it "
                    f"{found[name]}; build the target with `target_config`, or convert what this model was made of"
                )
        if model.config.zero_centered_norms:
            state |= {name: tensor - 1 for name, tensor in state.items() if name.endswith("_norm.weight")}
        computed |= state
    state = {name: tensor.to(model.dtype, copy=True).contiguous() for name, tensor in state.items()}
    return NewLayer(state, {**fields, **found}, loss if lossy else 0.0, **chosen)


def makes_mean(config: GQAConfig, heads: Heads, setting: Setting) -> bool:
    """Return whether a lossy layer that becomes MLA keeps the mean of its keys beside the cache."""
    return setting.key_mean and changing_rope(config) is None and keeps_mean(heads)


def read_latent_source(model: GQAForCausalLM, index: int, statistics: Statistics) -> LatentSource:
    """Return the heads of layer `index` that `to_latent` converts, and their moments."""
    with living_layer(index):
        heads = read_heads(model, index)
        if heads.k_norm is not None:
            from .layers.normed import behind_norms, seen_behind

            heads, statistics = behind_norms(heads), seen_behind(heads, statistics)
        return heads, compute_moments(heads, statistics)


def new_attention(model: GQAForCausalLM, index: int, new: NewLayer) -> Attention:
    """Return the attention module that stands in layer `index` of a model with this new layer."""
    fields = layer_fields(model.config)
    fields[index] = new.fields
    config = configuration(model.config, fields)
    config._attn_implementation = model.config._attn_implementation
    with no_init_weights():
        attention = ATTENTION_CLASSES[new.fields["attention_kind"]](config, index)
    attention.load_state_dict(new.state, assign=True)
    return attention.requires_grad_(False).eval().to(model.device)


@contextmanager
def living_layer(index: int) -> Iterator[State]:
    """Raise `UserError` for a layer whose projections are zero, as pruned and grown models have them.

    Such a layer has no direction in which its keys, values or outputs vary. Yields a dict for its new parameters.
    """
    state: State = {}
    dead = f"layer {index} has projections of zeros, or too near: leave it out (--layers), or choose --method mean"
    try:
        yield state
    except torch.linalg.LinAlgError as error:
        raise UserError(dead) from error
    if not all(tensor.isfinite().all() for tensor in state.values()):
        raise UserError(dead)


def fewer_heads(heads: Heads, fields: Fields, statistics: Statistics, setting: Setting) -> tuple[Heads, float]:
    """Return heads with the number of key/value heads in `fields`, and the loss (0 where exact)."""
    number = fields["num_key_value_heads"]
    if number % len(heads.k) == 0:
        return repeat_heads(heads, number), 0.0
    from .layers.grouping import contiguous, merge_heads, regrouped
    from .layers.normed import before_norms_of_all, behind_norms, seen_behind

    source, seen = heads, statistics
    if heads.norms_all_heads:
        source, seen = behind_norms(heads), seen_behind(heads, statistics)
    # Where neither number divides the other, heads are repeated up to a common multiple first, which is exact.
    source = repeat_heads(source, math.lcm(len(heads.k), number))
    output_bias = heads.biases[2] or bool(fields["output_bias"])
    moments = compute_moments(source, seen, setting.weighted, centered=output_bias)
    partition = regrouped(moments, number, setting.seed) if setting.regroup else contiguous(len(source.k), number)
    merged, loss = merge_heads(source, moments, partition, setting.method, output_bias)
    return (before_norms_of_all(heads, merged, seen, partition) if heads.norms_all_heads else merged), loss


def as_own(model: PreTrainedModel) -> GQAForCausalLM:
    """Return a model as this package's; one of another family shares its tensors with the result.

    Raises:
        UserError: it is no causal language model of a family that can be imported, or has other tensors.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UserError(
            f"a {type(model).__name__} is not converted: give a causal language model, such as LlamaForCausalLM, and "
            "merge an adapter into it first"
        )
    config = as_ours(model.config)
    if config is model.config:
        return model  # type: ignore[return-value]
    given = {name: LazyTensor(tuple(x.shape), x.dtype, x.detach) for name, x in model.state_dict().items()}
    tensors = own_tensors(
        meta_model(GQAForCausalLM, config), own_names(config, model.config.model_type, given)
    )  # raises where they are others
    return built(config, {name: tensor.load() for name, tensor in tensors.items()}, model)


def assemble(
    model: PreTrainedModel, config: GQAConfig, states: dict[int, State], share: bool = False
) -> GQAForCausalLM:
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
    return built(config, state, model)


def built(config: GQAConfig, state: State, model: PreTrainedModel) -> GQAForCausalLM:
    """Return a model of these parameters, and of all else as `model` is: device, mode, and how it generates."""
    config._attn_implementation = model.config._attn_implementation
    with no_init_weights():
        converted: Any = GQAForCausalLM(config)
    tied = {name: state[kept] for name, kept in converted.all_tied_weights_keys.items()}
    converted.load_state_dict(tied | state, assign=True)
    converted.tie_weights()
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.to(model.device).train(model.training)
