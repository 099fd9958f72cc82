"""Text on its way through the layers of a model and, at once, of its conversion, one layer at a time.

The two residual streams part at the first layer that changes: from there on a layer of the conversion gets what the
converted layers before it give, as it will when the model is used. GPTQ (2210.17323, section 3.3) calibrates in this
order too, but keeps the activations of all the text in memory; here memory holds one batch at a time, and hidden states
between two layers are in a temporary file.
Shapes: B rows, T tokens, E hidden size, M = heads times value size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ..attention import Attention, GroupedAttention
from ..common.batches import MODEL_INPUTS, Batch, evaluating, hooks
from ..modeling_gqa import GQAForCausalLM
from .calibration import Scratch, Sums, scratch
from .layers.moments import Statistics, windows
from .layers.normed import NormedSums

# The first token of a document counts as this share of the document's tokens, and as one at least. Most heads give it
# much of their attention, and in many models its states grow a thousandfold in one layer (massive activations,
# 2402.17762), which small errors before that layer prevent.
FIRST_SHARE = 0.1


@dataclass
class Passage:
    """One batch between two layers.

    Args:
        number: of the batch.
        kept: (B, T), which tokens are not padding.
        held: (B, T), which tokens are of documents that nothing is fitted to; see `Streams`.
        weight: (B, T), what each token counts: 1, 0 for padding, and more for the first token of a document.
        states: the hidden states (B, T, E) of the conversion, and those of the source where they are others; then what
            `Streams` has added.
        prepare: returns `arguments`.
    """

    number: int
    kept: torch.Tensor
    held: torch.Tensor
    weight: torch.Tensor
    states: tuple[torch.Tensor, ...]
    prepare: Callable[[], list[dict[str, Any]]]

    @cached_property
    def arguments(self) -> list[dict[str, Any]]:
        """Of each layer's forward; masks are made only where they are used."""
        return self.prepare()


def token_weights(first: torch.Tensor, kept: torch.Tensor, share: float) -> torch.Tensor:
    """Return what each token counts (B, T), where `first` (B, T) begin documents and `kept` (B, T) are not padding.

    A first token counts as `share` of the tokens of its document.
    """
    document, counts = first.cumsum(-1), kept.new_zeros(len(kept), kept.shape[1] + 1, dtype=torch.float32)
    length = counts.scatter_add(1, document, kept.float()).gather(1, document)
    return torch.where(first, (share * length).clamp(min=1), 1.0) * kept


def first_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens (B, T) of model inputs begin documents."""
    kept = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
    return kept & (kept.cumsum(-1) == 1 if "position_ids" not in batch else batch["position_ids"] == 0)


def held_out(batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """Yield which tokens (B, T) of each batch are of the last quarter of the documents, which nothing is fitted to.

    Of two or three documents one is held out, and one alone is not.
    """
    documents, begun = sum(int(first_tokens(batch).sum()) for batch in batches), 0
    fitted = documents - (max(documents // 4, 1) if documents > 1 else 0)
    for batch in batches:
        first = first_tokens(batch)
        yield (begun + first.flatten().cumsum(0) > fitted).view_as(first)
        begun += int(first.sum())


class Streams:
    """Batches of text on their way through the layers of a model in evaluation mode and of its conversion.

    For each layer in order, `advance_both` sends both streams through the model's own layer, or `collect`, `attend` and
    `finish` send the conversion's stream through another attention.

    Documents that `held_out` names judge what is fitted to the others. A document is a row, or a part of a packed row.

    Args:
        model: the source.
        batches: model inputs.
        states: holds each batch's states between two steps.
        first_share: of a document's tokens that its first one counts as; `None` for `FIRST_SHARE`.
    """

    def __init__(
        self, model: GQAForCausalLM, batches: Sequence[Batch], states: Scratch, first_share: float | None = None
    ) -> None:
        self.model, self.batches, self.states = model, batches, states
        self.first_share = FIRST_SHARE if first_share is None else first_share
        self.holds_out = any(held.any() for held in held_out(batches))

    @torch.no_grad()
    def passages(self) -> Iterator[Passage]:
        """Yield each batch with its states."""
        for number, (batch, held) in enumerate(zip(self.batches, held_out(self.batches), strict=True)):
            inputs = {name: x.to(self.model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            ids = inputs.pop("input_ids")
            states = self.states[number] if number in self.states else (self.model.model.embed_tokens(ids),)
            mask = inputs.get("attention_mask")
            kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            first = first_tokens(batch).to(kept.device)
            weight = token_weights(first, kept, self.first_share)
            prepare = partial(self.model.model.layer_arguments, states[0], **inputs)
            yield Passage(number, kept, held.to(kept.device), weight, states, prepare)

    @torch.no_grad()
    def advance_both(self, index: int) -> None:
        """Send both streams through layer `index` of the source."""
        layer = self.model.model.layers[index]
        for passage in self.passages():
            self.states[passage.number] = tuple(layer(x, **passage.arguments[index]) for x in passage.states)

    @torch.no_grad()
    def collect(self, index: int) -> Statistics:
        """Return the statistics of the conversion's input to layer `index`, and send the source through its attention.

        Afterwards the states are the conversion's before the attention, and the source's after it.

        Raises:
            UserError: there is no text, or activations are not finite.
        """
        layer, window = self.model.model.layers[index], windows(self.model.config)[index]
        heads = self.model.config.per_layer_config[index].num_attention_heads
        sums = Sums(heads, self.model.config.hidden_size, window, self.model.device)
        if isinstance(layer.self_attn, GroupedAttention) and layer.self_attn.k_norm is not None:
            sums.normed = NormedSums(layer.self_attn)
        for passage in self.passages():
            arguments, (hidden, *source) = passage.arguments[index], passage.states
            x = layer.input_layernorm(hidden)
            sums.collect(layer.self_attn, x, passage.kept, passage.weight, arguments)
            before = source[0] if source else hidden
            output, _ = layer.self_attn(layer.input_layernorm(before) if source else x, **arguments)
            after = before + output
            self.states[passage.number] = hidden, after
        return sums.statistics()

    @torch.no_grad()
    def attend(
        self, index: int, attention: Attention, trial: float | None = None
    ) -> Iterator[tuple[Passage, torch.Tensor]]:
        """Yield each batch and the heads' outputs (B, T, M) of `attention`, which takes layer `index`'s place.

        `trial`: tokens after which the batches end, and the outputs do not go to the states, for `finish`.
        """
        layer, given, seen = self.model.model.layers[index], [], 0
        with hooks(attention.o_proj.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))):
            for passage in self.passages():
                given.clear()  # what the caller has sent through the projection meanwhile
                attention(layer.input_layernorm(passage.states[0]), **passage.arguments[index])
                (heads,) = given
                if trial is None:
                    self.states[passage.number] = (*passage.states, heads)
                yield passage, heads
                seen += passage.kept.numel()
                if trial is not None and seen >= trial:
                    return

    def send(self, index: int, attention: Attention) -> None:
        """Do what `attend` does, for its effect on the states alone."""
        for _ in self.attend(index, attention):
            pass

    @torch.no_grad()
    def finish(self, index: int, attention: Attention) -> None:
        """Send the heads' outputs through the output projection of `attention`, and both streams through the MLP."""
        layer = self.model.model.layers[index]
        for passage in self.passages():
            hidden, after, heads = passage.states
            streams = (hidden + attention.o_proj(heads), after)
            self.states[passage.number] = tuple(x + layer.mlp(layer.post_attention_layernorm(x)) for x in streams)

    @torch.no_grad()
    def advance_source(self, index: int) -> None:
        """Send the source, after `collect`, through layer `index`'s MLP; the conversion goes on with its states."""
        layer = self.model.model.layers[index]
        for passage in self.passages():
            after = passage.states[1]
            self.states[passage.number] = (after + layer.mlp(layer.post_attention_layernorm(after)),)


@contextmanager
def streams(model: GQAForCausalLM, batches: Sequence[Batch], first_share: float | None = None) -> Iterator[Streams]:
    """Open `Streams` for `model`, which is in evaluation mode meanwhile."""
    with evaluating(model), scratch(model.device) as states:
        yield Streams(model, batches, states, first_share)
