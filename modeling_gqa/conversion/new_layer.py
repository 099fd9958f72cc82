"""One layer's new attention: its parameters and fields, from the layer's weights and statistics of its input."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from transformers.initialization import no_init_weights

from ..attention import Attention
from ..common.errors import ConversionError
from ..modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM
from .layers.grouping import contiguous, merge_heads, regrouped
from .layers.heads import Heads, read_heads, repeat_heads, write_grouped
from .layers.latent import ALPHAS, divided, to_latent
from .layers.moments import Statistics, compute_moments
from .layers.normed import latent_source
from .targets import Fields, configuration, latent_fields, layer_fields

State = dict[str, torch.Tensor]


class NewLayer(NamedTuple):
    """A layer's new attention.

    Args:
        state: its parameters.
        fields: its configuration fields.
        loss: the squared error that its conversion minimises, estimated; 0 where exact, `None` where unknown.
    """

    state: State
    fields: Fields
    loss: float | None


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
        share_cache: whether MLA's cache is divided anew between R and P: with `refit` by `best_division`, else by the
            rule `divided`.
        refit: whether the output projections are fitted on text, to bring the residual stream back to the source's.
        refine: passes over the text in which each layer's new attention is trained by gradient steps, before the fit.
        seed: of regrouping and of the method "random".
    """

    method: str = "lowrank"
    metric: str = "full"
    weighted: bool = True
    regroup: bool = True
    gain: str = "mean"
    alpha: float = ALPHAS[0]
    share_cache: bool = False
    refit: bool = False
    refine: int = 0
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields as `conversion.json` names them."""
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_json().items() if name != "seed")


def convert_layer(
    model: GQAForCausalLM,
    index: int,
    fields: Fields,
    statistics: Statistics,
    setting: Setting,
    lossy: bool,
    factor: float = 1.0,
) -> NewLayer:
    """Convert layer `index` to what `fields` say.

    Args:
        model: the source.
        index: of the layer.
        fields: the target's, of this layer.
        statistics: of the layer's input.
        setting: how to convert.
        lossy: whether the layer cannot keep its function.
        factor: of P in `divided`, where the cache is shared.
    """
    before = layer_fields(model.config)[index]
    with living_layer(index) as computed:
        heads = read_heads(model, index)
        if fields["attention_kind"] == "mla":
            heads, moments = latent_source(heads, statistics, setting.metric)
            rank, size = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
            if setting.share_cache and lossy:
                shapes = heads.planes, len(heads.k), heads.k.shape[1], heads.k.shape[2]
                rank, size = divided(rank + size, *shapes, factor)
                fields = fields | latent_fields(model.config, index, rank, size, None)
            state, found, loss = to_latent(heads, moments, rank, size, setting.gain, setting.alpha)
        else:
            std, seed = model.config.initializer_range, setting.seed * model.config.num_hidden_layers + index
            heads, loss = fewer_heads(heads, fields, statistics, setting, std, seed)
            state, found = write_grouped(heads)
            if before["attention_kind"] != "mla":  # its heads are rotated as before, partly perhaps
                found |= rotation(fields)
        refuse_other_sizes(index, fields, found)
        computed |= state
    state = {name: tensor.to(model.dtype, copy=True).contiguous() for name, tensor in state.items()}
    return NewLayer(state, {**fields, **found}, loss)


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
