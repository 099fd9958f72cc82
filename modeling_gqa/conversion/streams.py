"""Text on its way through the layers of a model and, at once, of its conversion, one layer at a time.

The two residual streams part at the first layer that changes: from there on a layer of the conversion gets what the
converted layers before it give, as it will when the model is used. GPTQ (2210.17323, section 3.3) calibrates in this
order too, but keeps the activations of all the text in memory; here memory holds one batch at a time, and hidden states
between two layers are in a temporary file.
Shapes: B rows, T tokens, E hidden size, H query heads, S lags, M = heads times value size.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Any

import torch

from modeling_gqa_cli.errors import UserError

from ..attention import Attention, GroupedAttention
from ..common.batches import MODEL_INPUTS, Batch, evaluating, hooks
from ..modeling_gqa import GQAForCausalLM
from .divergence import not_finite
from .layers.moments import Statistics, product, windows

if TYPE_CHECKING:
    from .layers.normed import NormedSums

# The first token of a document counts as this share of the document's tokens, and as one at least. Most heads give it
# much of their attention, and in many models its states grow a thousandfold in one layer (massive activations,
# 2402.17762), which small errors before that layer prevent.
FIRST_SHARE = 0.1
# Parts of the documents, each of which judges what is fitted to the others; the first of them judges gradient steps.
FOLDS = 4
# Attention by lag is taken from one row of a batch, from at most this number of tokens.
LAGS_SEEN = 512
# Bytes of tensors that a `Scratch` keeps in memory before it writes to its file.
IN_MEMORY = 2**28


class Scratch(MutableMapping[int, Any]):
    """A mapping from numbers to tensors, or tuples of them, that takes little memory however much it holds.

    The first `IN_MEMORY` bytes stay in memory; everything else lies in a file.

    Args:
        file: a temporary file without a name, which the system removes however the process ends.
        device: where tensors are read to.
    """

    def __init__(self, file: IO[bytes], device: torch.device) -> None:
        self.file, self.device = file, device
        self.memory: dict[int, Any] = {}
        self.places: dict[int, tuple[int, int, int]] = {}  # start, length, and room there in bytes
        self.room, self.end = IN_MEMORY, 0

    def __setitem__(self, number: int, value: Any) -> None:
        self.room += size(self.memory.pop(number, ()))
        if size(value) <= self.room:
            self.memory[number] = value
            self.room -= size(value)
            return
        content = BytesIO()
        torch.save(value, content)
        start, _, room = self.places.get(number, (0, 0, 0))
        if content.tell() > room:
            start, room, self.end = self.end, content.tell(), self.end + content.tell()
        try:
            self.file.seek(start)
            self.file.write(content.getbuffer())
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"temporary files cannot be written to {gettempdir()} ({error.strerror}): set TMPDIR to a folder with "
                "more room"
            ) from error
        self.places[number] = (start, content.tell(), room)

    def __getitem__(self, number: int) -> Any:
        if number in self.memory:
            return self.memory[number]
        start, length, _ = self.places[number]
        self.file.seek(start)
        content = BytesIO(self.file.read(length))
        # Only what this process wrote is read, so pickled objects are safe.
        return torch.load(content, map_location=self.device, weights_only=False)

    def __delitem__(self, number: int) -> None:
        self.room += size(self.memory.pop(number, ()))
        self.places.pop(number, None)

    def __iter__(self) -> Iterator[int]:
        return iter({**self.places, **self.memory})

    def __len__(self) -> int:
        return len({**self.places, **self.memory})


def size(value: torch.Tensor | tuple[torch.Tensor, ...]) -> int:
    """Return the bytes of a tensor, or of several."""
    return value.nbytes if isinstance(value, torch.Tensor) else sum(x.nbytes for x in value)


@contextmanager
def scratch(device: torch.device) -> Iterator[Scratch]:
    """Open a `Scratch`, whose file lies in the folder that the environment variable TMPDIR names."""
    file = TemporaryFile(prefix="modeling-gqa-")  # noqa: SIM115 (closing what a full disk refused fails again)
    try:
        yield Scratch(file, device)
    finally:
        with suppress(OSError):
            file.close()


class Sums:
    """Running sums of one layer's `Statistics`."""

    def __init__(self, heads: int, hidden: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.second = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        self.total = torch.zeros(hidden, dtype=torch.float64, device=device)
        self.lags = torch.zeros(heads, 0, dtype=torch.float64, device=device)
        self.weight, self.tokens, self.length = 0.0, 0, 0
        self.normed: NormedSums | None = None
        self.dtype = torch.float32  # that the model computes in, once it was seen

    def collect(
        self, attention: Any, x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, arguments: dict[str, Any]
    ) -> None:
        """Add the inputs `x` (B, T, E) of `attention` where `kept` (B, T).

        Each counts its `weight` (B, T); `arguments` are those of the attention's forward.
        """
        self.dtype = x.dtype
        root = weight[kept].float().sqrt()[:, None]
        rows = root * x[kept].float()
        self.second += product(rows, rows, x.dtype)
        self.total += (rows.mT @ root)[:, 0].double()
        self.weight += weight[kept].sum(dtype=torch.float64).item()
        self.tokens += len(rows)
        self.length = max(self.length, x.shape[1])
        if self.normed is not None:
            self.normed.add(x[kept], root)
        row = kept.sum(-1).argmax()  # the row with the least padding
        start = kept[row].int().argmax()
        seen = slice(start, min(start + LAGS_SEEN, x.shape[1]))
        weights = attention_weights(attention, x, row, seen, arguments)  # (1, H, t, t)
        self.add_lags(weights[0] * kept[row, seen][:, None])

    def add_lags(self, weights: torch.Tensor) -> None:
        """Add attention weights (H, T, T), summed along their diagonals."""
        length = weights.shape[-1]
        if length > self.lags.shape[1]:
            self.lags = torch.nn.functional.pad(self.lags, (0, length - self.lags.shape[1]))
        # Row i is moved i places to the right, so that what has one lag stands in one column.
        moved = torch.nn.functional.pad(weights.flip(-1), (0, length)).flatten(1)[:, :-length]
        self.lags[:, :length] += moved.unflatten(1, (length, -1))[..., length - 1 :].sum(1).double()

    def statistics(self) -> Statistics:
        """Return the means; raises `UserError` where there are none, or one is not finite."""
        if not self.tokens:
            raise UserError("the calibration text is empty")
        if not (torch.isfinite(self.second).all() and torch.isfinite(self.lags).all()):
            raise not_finite("the activations on the calibration text", self.dtype)
        lags, weight = self.lags / self.lags.sum(-1, keepdim=True), self.weight
        seen = Statistics(self.second / weight, self.total / weight, lags, self.length, self.window)
        seen.normed = None if self.normed is None else self.normed.statistics(seen, weight)
        return seen


def attention_weights(
    attention: Any, x: torch.Tensor, row: torch.Tensor, seen: slice, arguments: dict[str, Any]
) -> torch.Tensor:
    """Return the attention weights (1, H, t, t) over the t tokens `seen` of one row of `x` (B, T, E)."""
    cosine_sine = tuple(part[row if len(part) > 1 else 0, seen][None] for part in arguments["position_embeddings"])
    factors = arguments["query_factors"]
    factors = None if factors is None else factors[row if len(factors) > 1 else 0, seen][None]
    mask = arguments["attention_mask"]
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        mask = mask[row if len(mask) > 1 else 0, :, seen, seen][None]
    else:  # causal: flash attention's masks, and those of flex attention, say no more of a row without padding
        mask = None
    # Only the eager function returns weights.
    backend, attention.config._attn_implementation = attention.config._attn_implementation, "eager"
    try:
        given = {"position_embeddings": cosine_sine, "query_factors": factors}
        _, weights = attention(x[row, seen][None], attention_mask=mask, **given)
    finally:
        attention.config._attn_implementation = backend
    return weights


@dataclass
class Passage:
    """One batch between two layers.

    Args:
        number: of the batch.
        kept: (B, T), which tokens are not padding.
        fold: (B, T), which of `FOLDS` each token's document is in.
        weight: (B, T), what each token counts: 1, 0 for padding, and more for the first token of a document.
        states: the hidden states (B, T, E) of the conversion, and those of the source where they are others; then what
            `Streams` has added.
        prepare: returns `arguments`.
    """

    number: int
    kept: torch.Tensor
    fold: torch.Tensor
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


def folds(batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """Yield the fold (B, T) of each token of each batch: documents go to 0, 1, 2, 3, 0, ... in turn."""
    begun = 0
    for batch in batches:
        first = first_tokens(batch)
        yield ((begun + first.flatten().cumsum(0) - 1).clamp(min=0) % FOLDS).view_as(first)
        begun += int(first.sum())


class Streams:
    """Batches of text on their way through the layers of a model in evaluation mode and of its conversion.

    For each layer in order, `advance_both` sends both streams through the model's own layer, or `collect`, `attend` and
    `finish` send the conversion's stream through another attention.

    Documents of one fold judge what is fitted to the others, and `judges` says whether there are two at all. A document
    is a row, or a part of a packed row.

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
        self.folds = list(folds(batches))
        self.judges = sum(int(first_tokens(batch).sum()) for batch in batches) > 1

    def norm_behind(self, index: int) -> torch.nn.Module:
        """Return the norm between the attention of layer `index` and the stream; an identity where there is none."""
        layer: Any = self.model.model.layers[index]
        return layer.get_submodule(layer.norm_names[1])

    def wanted(self, passage: Passage) -> torch.Tensor:
        """Return what is wanted behind that norm, (B, T, E), to bring the stream, after `collect`, to the source's."""
        hidden, after = passage.states[:2]
        return (after - hidden) / self.model.config.residual_multiplier

    @torch.no_grad()
    def passages(self) -> Iterator[Passage]:
        """Yield each batch with its states."""
        decoder = self.model.model
        for number in range(len(self.batches)):
            batch, fold = self.batches[number], self.folds[number]
            inputs = {name: x.to(self.model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            ids = inputs.pop("input_ids")
            if (states := self.states.get(number)) is None:
                states = (decoder.embedding_multiplier(decoder.embed_tokens(ids)),)
            mask = inputs.get("attention_mask")
            kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            first = first_tokens(batch).to(kept.device)
            weight = token_weights(first, kept, self.first_share)
            prepare = partial(decoder.layer_arguments, states[0], **inputs)
            yield Passage(number, kept, fold.to(kept.device), weight, states, prepare)

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
            from .layers.normed import NormedSums

            sums.normed = NormedSums(layer.self_attn)
        for passage in self.passages():
            arguments, (hidden, *source) = passage.arguments[index], passage.states
            x = layer.attention_input(hidden)
            sums.collect(layer.self_attn, x, passage.kept, passage.weight, arguments)
            before = source[0] if source else hidden
            output, _ = layer.self_attn(layer.attention_input(before) if source else x, **arguments)
            after = before + layer.attention_output(output)
            self.states[passage.number] = hidden, after
        return sums.statistics()

    @torch.no_grad()
    def attend(
        self, index: int, attention: Attention, trial: float | None = None
    ) -> Iterator[tuple[Passage, torch.Tensor]]:
        """Yield each batch and the heads' outputs (B, T, M) of `attention`, which takes layer `index`'s place.

        `trial`: tokens after which the batches end; the outputs do not go to the states, for `finish`.
        """
        layer, given, seen = self.model.model.layers[index], [], 0
        with hooks(attention.o_proj.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))):
            for passage in self.passages():
                given.clear()  # what the caller has sent through the projection meanwhile
                attention(layer.attention_input(passage.states[0]), **passage.arguments[index])
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
            streams = (hidden + layer.attention_output(attention.o_proj(heads)), after)
            self.states[passage.number] = tuple(x + layer.mlp_output(x) for x in streams)

    @torch.no_grad()
    def advance_source(self, index: int) -> None:
        """Send the source, after `collect`, through layer `index`'s MLP; the conversion goes on with its states."""
        layer = self.model.model.layers[index]
        for passage in self.passages():
            after = passage.states[1]
            self.states[passage.number] = (after + layer.mlp_output(after),)


@contextmanager
def streams(model: GQAForCausalLM, batches: Sequence[Batch], first_share: float | None = None) -> Iterator[Streams]:
    """Open `Streams` for `model`, which is in evaluation mode meanwhile."""
    with evaluating(model), scratch(model.device) as states:
        yield Streams(model, batches, states, first_share)
