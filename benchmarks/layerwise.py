"""Steps of a conversion for other ways to convert layers: statistics of all layers, and the fit of a finished model."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from modeling_gqa import GQAForCausalLM
from modeling_gqa.common.batches import Batch, evaluating
from modeling_gqa.conversion.fitting import fit
from modeling_gqa.conversion.layers.moments import Statistics
from modeling_gqa.conversion.streams import streams
from modeling_gqa.conversion.targets import changed_layers


def collect(
    model: GQAForCausalLM,
    batches: Sequence[Batch],
    layers: Iterable[int] | None = None,
    first_share: float | None = None,
) -> Iterator[tuple[int, Statistics]]:
    """Send `batches` through `model` a layer at a time and yield the index and statistics of each of `layers`.

    `layers` is `None` for all; `first_share` as for `Streams`.
    """
    wanted = set(range(model.config.num_hidden_layers) if layers is None else layers)
    with streams(model, batches, first_share) as text:
        for index in range(max(wanted, default=-1) + 1):
            if index in wanted:
                yield index, text.collect(index)
                text.advance_source(index)
            else:
                text.advance_both(index)


@torch.no_grad()
def refit_outputs(source: GQAForCausalLM, converted: GQAForCausalLM, batches: Sequence[Batch]) -> None:
    """Fit the output projections of a converted model, in place, as `convert_model` fits them."""
    changed = changed_layers(source.config, converted.config)
    with streams(source, batches) as text, evaluating(converted):
        for index in range(len(source.model.layers)):
            if index in changed:
                text.collect(index)
                attention = converted.model.layers[index].self_attn
                fit(text, index, attention)
                text.send(index, attention)
                text.finish(index, attention)
            else:
                text.advance_both(index)
