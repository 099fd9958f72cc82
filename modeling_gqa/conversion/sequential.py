"""A model's layers converted one after another, each for the input that the converted layers before it give.

With text, each layer's statistics are of the conversion's own stream, and its output projection is fitted to bring that
stream back to the source's: the target is the source's stream after the attention, less the conversion's before it.
"""

import copy
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from transformers.initialization import no_init_weights

from ..common.progress import Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .fitting import examples, fit, pieces
from .layers.moments import Statistics, blank_statistics
from .layers.refine import refine
from .new_layer import NewLayer, Setting, State, convert_layer, new_attention, rotation
from .targets import Fields, changed_layers, is_exact, layer_fields
from .text.calibration import Batch
from .text.streams import Streams, streams

# Factor between two sizes P that are tried for a layer, and tokens on which they are compared.
ROTARY_STEP, DIVISION_TOKENS = 1.4, 4096


@torch.no_grad()
def convert_layers(
    model: GQAForCausalLM,
    target: GQAConfig,
    text: Sequence[Batch] | None,
    setting: Setting,
    done: MutableMapping[int, NewLayer],
    progress: Progress = iter,
) -> list[Fields]:
    """Convert the layers that change, in order.

    Args:
        model: the source.
        target: the configuration to convert it to.
        text: to calibrate on; `None`: the weights alone decide.
        setting: how to convert.
        done: the new layers by index; those that are in it already are taken as they are, the others are added.
        progress: wraps the iteration over the layers.

    Returns:
        The fields of all layers.
    """
    fields, before = layer_fields(target), layer_fields(model.config)
    changed = changed_layers(model.config, target)
    lossy = [index for index in changed if not is_exact(model.config, target, index)]
    blank = blank_statistics(model.config, changed, model.device)
    last = max((index for index in lossy if text and index not in done), default=-1)  # that needs the text
    with streams(model, text) if text and last >= 0 else nullcontext() as streaming:
        for index in progress(range(len(fields)) if text and lossy else changed):
            if index in changed:
                new = known = done.get(index)
                if streaming and index in lossy and index <= last:
                    new = convert_on_text(model, index, fields[index], streaming, setting, known)
                elif known is None:
                    new = convert_layer(model, index, fields[index], blank[index], setting, index in lossy)
                if known is None:
                    done[index] = new
                fields[index] = {**fields[index], **new.fields}
            else:
                fields[index] = {**before[index], **rotation(fields[index])}
            if streaming and index not in lossy and index < last:
                streaming.pass_on(index)
    return fields


def convert_on_text(
    model: GQAForCausalLM, index: int, fields: Fields, text: Streams, setting: Setting, known: NewLayer | None
) -> NewLayer:
    """Convert layer `index` for the states that `text` is in, and send these through the result.

    `known` is the result where it was found before.
    """
    statistics = text.see(index, root=setting.metric == "root")
    if known is None and setting.share_cache and setting.refit and fields["attention_kind"] == "mla":
        _, new = best_division(text, index, fields, statistics, setting)
    else:
        new = known or convert_layer(model, index, fields, statistics, setting, True)
    attention = new_attention(model, index, new)
    if setting.refine and known is None:
        steps = setting.refine * sum(len(pieces(batch["input_ids"])) for batch in text.batches)
        refine(attention, partial(examples, text, index), steps)
    if setting.refit and known is None:
        fit(text, index, attention)
    else:
        text.send(index, attention)
    if known is None:
        new = new._replace(state=dict(attention.state_dict()))
    text.finish(index, attention)
    return new


def best_division(
    text: Streams, index: int, fields: Fields, statistics: Statistics, setting: Setting
) -> tuple[float, NewLayer]:
    """Convert layer `index` to MLA with the R and P, of the sum in `fields`, of which the fit leaves the least error.

    P begins as `divided` has it, and grows or else shrinks by `ROTARY_STEP` as long as that helps. Arguments are as for
    `convert_layer`.

    Returns:
        The factor of P in `divided`, and the new layer, not yet fitted.
    """

    @cache
    def tried(factor: float) -> tuple[float, NewLayer]:
        new = convert_layer(text.model, index, fields, statistics, setting, True, factor)
        copied = new._replace(state={name: x.clone() for name, x in new.state.items()})  # which the fit changes
        return fit(text, index, new_attention(text.model, index, copied), trial=DIVISION_TOKENS), new

    best = 1.0
    for step in (ROTARY_STEP, 1 / ROTARY_STEP):
        while tried(best * step)[0] < tried(best)[0]:
            best *= step
        if best != 1:
            break
    return best, tried(best)[1]


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
