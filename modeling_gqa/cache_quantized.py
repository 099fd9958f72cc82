"""A cache of numbers of a few bits that attention reads tile by tile.

A layer of the cache stores rows of bytes (`cache_formats.py`) of keys and values, or of MLA's latent and rotary key.
What is constant over tokens, a measured mean or the projections' biases, takes no bits: it is taken out before rounding
and put back exactly. A constant key is rotated to each token's position. A constant value is added to the output,
because weights sum to one. A constant latent adds the same to all scores of a query, which changes no weight.

Shapes: B batch, G key/value heads, S tokens held, T new tokens, C channels of a head, N bytes of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, DynamicLayer

from .attention_functions import FEW_TOKENS
from .cache_formats import CacheQuantization, RowFormat, Tile
from .cache_layers import GrowingLayer
from .layers import rotate

# Tokens of all rows whose numbers are read at once: enough to hide what each operation costs, few enough for the
# processor's caches.
TILE = 4096


@dataclass(frozen=True)
class HeldTokens:
    """Where the tokens of a quantized cache stand, the new ones included.

    Args:
        first: (B,), the place of each row's first token; those before it are padding.
        least, most: the smallest and the largest of them.
        position_embeddings: cosine and sine (B or 1, S, P) of all tokens, for a layer with a constant rotary key.
    """

    first: torch.Tensor
    least: int
    most: int
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None

    def to(self, device: Any, **kwargs: Any) -> "HeldTokens":
        """Move to the device of a layer, by the name that accelerate looks for."""
        embeddings: Any = self.position_embeddings and tuple(x.to(device) for x in self.position_embeddings)
        return replace(self, first=self.first.to(device), position_embeddings=embeddings)


class QuantizedLayer(GrowingLayer):
    """The growing layer with rows of bytes as its keys and values.

    Numbers come and go in the basis of the cache (`RowFormat.mix`). The first tokens of a row and the last are kept as
    they are, beside their rounded numbers.

    Args:
        formats: of the two tensors that the layer caches.
        exact_tokens, residual_length: numbers of first and last tokens that are kept as they are.
    """

    def __init__(self, formats: Sequence[RowFormat], exact_tokens: int = 0, residual_length: int = 0):
        super().__init__()
        self.formats, self.exact_tokens, self.residual_length = formats, exact_tokens, residual_length
        self.number_dtype: torch.dtype | None = None
        self.held: HeldTokens | None = None
        # (B, G, exact tokens, C) and (B, G, residual length or less, C), of both tensors.
        self.first_tokens: list[torch.Tensor] = []
        self.last_tokens: list[torch.Tensor] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        held: HeldTokens | None = None,
        whole: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round and append keys (B, G, T, C) and values; return all of them, rounded, unless `whole` is false.

        Then the rows of bytes are returned, (B, G, S, N); `read` and `tiles` give their numbers.

        Raises:
            ValueError: gradients are asked for, which do not pass through rounding.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("gradients do not pass through a quantized cache: use torch.no_grad(), or another cache")
        states = key_states, value_states
        self.number_dtype, self.held = key_states.dtype, held
        rows = super().update(*(form.pack(x) for form, x in zip(self.formats, states, strict=True)))
        start = self.get_seq_length() - key_states.shape[2]
        if self.exact_tokens and start < (held.most if held else 0) + self.exact_tokens:
            self._keep_first(states, start)
        if self.residual_length:
            kept = self.last_tokens if start else [x[:, :, :0] for x in states]
            joined = [torch.cat(pair, dim=2) for pair in zip(kept, states, strict=True)]
            self.last_tokens = [x[:, :, -self.residual_length :].clone() for x in joined]
        return self.read(rows) if whole else rows

    def read(
        self, rows: Sequence[torch.Tensor], start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, G, n, C) and values of the tokens from `start` to `stop`, all by default.

        `rows` are what `update` has returned: the layer's own may have been offloaded since.
        """
        length = self.get_seq_length()
        stop = length if stop is None else min(stop, length)
        first, second = (
            self._with_exact(number, form.unpack(stored[:, :, start:stop], self.number_dtype), start, stop)
            for number, (form, stored) in enumerate(zip(self.formats, rows, strict=True))
        )
        return first, second

    def spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """Divide the tokens into spans of at most `longest`; those with exact tokens are apart."""
        length = self.get_seq_length()
        first = min(length, (self.held.most if self.held else 0) + self.exact_tokens if self.first_tokens else 0)
        last = max(first, length - (self.last_tokens[0].shape[2] if self.last_tokens else 0))
        for low, high in ((0, first), (first, last), (last, length)):
            for start in range(low, high, longest):
                yield start, min(start + longest, high)

    def tiles(self, rows: Sequence[torch.Tensor], start: int, stop: int) -> list[Tile]:
        """The numbers of the tokens from `start` to `stop` of both tensors, to be multiplied; `rows` as for `read`."""
        # float16 ends at 65504, which sums over many tokens can pass.
        dtype = torch.float32 if self.number_dtype == torch.float16 else self.number_dtype
        most = self.held.most if self.held else 0
        exact = self.first_tokens and start < most + self.exact_tokens
        if exact or (self.last_tokens and stop > self.get_seq_length() - self.last_tokens[0].shape[2]):
            return [Tile([(x.to(dtype), None)]) for x in self.read(rows, start, stop)]
        return [
            Tile(form.levels(stored[:, :, start:stop], dtype)) for form, stored in zip(self.formats, rows, strict=True)
        ]

    def _keep_first(self, states: Sequence[torch.Tensor], start: int) -> None:
        """Keep those of the new tokens, which begin at place `start`, that are among the first of their rows."""
        batch, heads, new, _ = states[0].shape
        places = torch.arange(self.exact_tokens, device=states[0].device)
        places = (places - start).expand(batch, -1) if self.held is None else self.held.first[:, None] + places - start
        chosen = ((places >= 0) & (places < new))[:, None, :, None]  # (B, 1, exact tokens, 1)
        index = places.clamp(0, new - 1)[:, None, :, None].expand(batch, heads, -1, -1)
        kept = self.first_tokens or [x.new_zeros(batch, heads, self.exact_tokens, x.shape[3]) for x in states]
        self.first_tokens = [
            torch.where(chosen, x.gather(2, index.expand(-1, -1, -1, x.shape[3])), old)
            for x, old in zip(states, kept, strict=True)
        ]

    def _with_exact(self, number: int, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Put the tokens that are kept as they are in their places of `x` (B, G, stop - start, C)."""
        least, most = (self.held.least, self.held.most) if self.held else (0, 0)
        low, high = max(start, least), min(stop, most + self.exact_tokens)
        if self.first_tokens and low < high:
            kept, part = self.first_tokens[number], x[:, :, low - start : high - start]
            places = torch.arange(low, high, device=x.device)
            places = places - self.held.first[:, None] if self.held else places[None]  # (B or 1, n)
            chosen = ((places >= 0) & (places < self.exact_tokens))[:, None, :, None]
            index = places.clamp(0, self.exact_tokens - 1)[:, None, :, None].expand(*part.shape)
            part.copy_(torch.where(chosen, kept.gather(2, index), part))
        if self.last_tokens and (count := self.last_tokens[number].shape[2]):
            low = max(start, self.get_seq_length() - count)
            if low < stop:
                from_end = self.get_seq_length() - low
                x[:, :, low - start :] = self.last_tokens[number][:, :, count - from_end :][:, :, : stop - low]
        return x

    def crop(self, *args: Any, **kwargs: Any) -> None:
        before = self.get_seq_length()
        super().crop(*args, **kwargs)
        removed = before - self.get_seq_length()
        if removed:
            self.last_tokens = [x[:, :, : max(x.shape[2] - removed, 0)] for x in self.last_tokens]

    def _change_rows(self, name: str, argument: Any, change: Any) -> None:
        getattr(super(), name)(argument)
        self.held = None
        self.first_tokens = [change(x) for x in self.first_tokens]
        self.last_tokens = [change(x) for x in self.last_tokens]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows("batch_repeat_interleave", repeats, lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change_rows("batch_select_indices", indices, lambda x: x[indices])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._change_rows("reorder_cache", beam_idx, lambda x: x.index_select(0, beam_idx.to(x.device)))

    def reset(self) -> None:
        super().reset()
        self.first_tokens, self.last_tokens, self.held = [], [], None


class GQAQuantizedCache(DynamicCache):
    """The dynamic cache with rounded numbers in the layers that hold all tokens; those with a window stay as they are.

    Args:
        config: the model's configuration.
        options: as in `GQAConfig.cache_quantization`, which is taken where they are left out.
        kwargs: of `DynamicCache`.

    Raises:
        ValueError: an option is unknown, or the options do not fit a layer.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAForCausalLM, GQAQuantizedCache

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        cache = GQAQuantizedCache(config, {"nbits": 4})
        ids = torch.tensor([[1, 5, 7]])
        GQAForCausalLM(config).generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        ```
    """

    def __init__(self, config: Any, options: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        # Positions of all tokens, (B or 1, 1, S, 1), kept by a layer that grows as the others do.
        self.positions = GrowingLayer()
        self.first: torch.Tensor | None = None
        self.aligned = True
        from .modeling_gqa import ATTENTION_CLASSES  # which imports this file

        if not hasattr(config, "cache_quantization"):
            raise ValueError(f"GQAQuantizedCache is for a GQAConfig, and got a {type(config).__name__}")
        own = CacheQuantization.of((config.cache_quantization or {}) if options is None else options)
        for index, layer in enumerate(config.per_layer_config):
            if type(self.layers[index]) is DynamicLayer:
                formats = ATTENTION_CLASSES[layer.attention_kind].cache_formats(layer, own)
                self.layers[index] = QuantizedLayer(formats, own.exact_tokens, own.residual_length)

    def hold(self, position_ids: torch.Tensor, rows: int) -> HeldTokens:
        """Add the positions (B or 1, T) of tokens that the layers are about to hold, in a batch of `rows`."""
        places = position_ids.expand(rows, -1)
        start, new = self.positions.get_seq_length(), places.shape[1]
        # The last token at position 0 is the first of its row: those before it are padding.
        begins = places == 0
        found = torch.where(begins.any(1), start + new - 1 - begins.flip(1).int().argmax(1), -1)
        known = self.first is not None and self.first.shape == found.shape
        self.first = torch.where(found >= 0, found, self.first if known else torch.zeros_like(found))
        self.aligned = self.aligned and bool((places == places[:1]).all())
        stored = places.int()[:, None, :, None]
        self.positions.update(stored, stored[..., :0])
        return HeldTokens(self.first, int(self.first.min()), int(self.first.max()))

    @property
    def held_positions(self) -> torch.Tensor:
        """Positions of all tokens, (B, S), or (1, S) where those of all rows are alike."""
        positions = self.positions.keys[:, 0, :, 0]
        return positions[:1] if self.aligned else positions

    def _change(self, name: str, argument: Any) -> None:
        getattr(super(), name)(argument)
        getattr(self.positions, name)(argument)

    def crop(self, tokens_to_remove: int) -> None:
        self._change("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change("batch_repeat_interleave", repeats)
        self.first = None if self.first is None else self.first.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change("batch_select_indices", indices)
        self.first = None if self.first is None else self.first[indices]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._change("reorder_cache", beam_idx)
        self.first = None if self.first is None else self.first.index_select(0, beam_idx.to(self.first.device))

    def reset(self) -> None:
        super().reset()
        self.positions.reset()
        self.first, self.aligned = None, True


def rounds_cache(config: Any) -> bool:
    """Whether a configuration, be it ours or not, asks for a quantized cache."""
    return getattr(config, "cache_quantization", None) is not None


def quantized_layer(cache: Cache | None, layer_idx: int) -> QuantizedLayer | None:
    """Return the layer of `cache` if its numbers are rounded, else `None`."""
    layer: Any = cache.layers[layer_idx] if cache is not None and layer_idx < len(cache.layers) else None
    return layer if isinstance(layer, QuantizedLayer) else None


@dataclass(frozen=True)
class CacheBasis:
    """How the numbers of an attention layer go into its quantized cache, and come back.

    One of the two tensors that a layer caches is rotated: the keys, or MLA's rotary key. The other one is not: the
    values, or the latent.

    Args:
        cached: the layer of the cache.
        rotary_place: the place of the rotated one among the two.
        rotary_constant, plain_constant: (G, C), what every token has before rotation; `None`: nothing.
        rotation: cosine and sine (B or 1, T, P) of the new tokens; `None`: nothing is rotated.
        held: of all tokens, the new ones included.
    """

    cached: QuantizedLayer
    rotary_place: int
    rotary_constant: torch.Tensor | None = None
    plain_constant: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    held: HeldTokens | None = None

    @property
    def rotary(self) -> RowFormat:
        """The format of the rotated tensor."""
        return self.cached.formats[self.rotary_place]

    @property
    def plain(self) -> RowFormat:
        """The format of the other one."""
        return self.cached.formats[1 - self.rotary_place]

    def constant_query(self, query: torch.Tensor) -> torch.Tensor | None:
        """Factors (B, G, M, P) of the angles of each token in the scores of a query (B, G, M, C) with the constant key.

        A plane of the constant (m1, m2), turned by an angle a, has the product cos a (q1 m1 + q2 m2) + sin a (q2 m1 -
        q1 m2) with the query. What is not rotated adds the same for all tokens, which changes no weight.
        """
        if self.rotary_constant is None or self.held is None or self.held.position_embeddings is None:
            return None
        planes = self.held.position_embeddings[0].shape[-1] // 2
        first, second = (query[..., part * planes : (part + 1) * planes] for part in (0, 1))
        constant = self.rotary_constant[:, None]  # (G, 1, C)
        one, two = (constant[..., part * planes : (part + 1) * planes] for part in (0, 1))
        return torch.cat((first * one + second * two, second * one - first * two), dim=-1)

    def angles(self, start: int, stop: int) -> torch.Tensor:
        """Cosines and sines of the tokens from `start` to `stop`, (B or 1, 1, P, n)."""
        cos, sin = (part[:, start:stop] for part in self.held.position_embeddings)
        planes = cos.shape[-1] // 2
        return torch.cat((cos[..., :planes], sin[..., :planes]), dim=-1).mT.unsqueeze(1)

    def store_rotary(self, x: torch.Tensor) -> torch.Tensor:
        """The rotated (B, G, T, C) of new tokens as the cache holds them, before rounding."""
        constant = self._rotated(self.rotation)
        return self.rotary.mix(x if constant is None else x - constant)

    def store_plain(self, x: torch.Tensor) -> torch.Tensor:
        """What is not rotated of new tokens (B, G, T, C) as the cache holds it, before rounding."""
        return self.plain.mix(x if self.plain_constant is None else x - self.plain_constant[:, None])

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """What is not rotated (B, H, n, C), out of the basis of the cache, with its constant."""
        x = self.plain.unmix(x)
        if self.plain_constant is None:
            return x
        return x + self.plain_constant.repeat_interleave(x.shape[1] // self.plain_constant.shape[0], dim=0)[:, None]

    def with_constant(self, x: torch.Tensor) -> torch.Tensor:
        """The rotated (B, G, S, C) of all tokens, in the basis of the cache, with their constant."""
        constant = self._rotated(self.held.position_embeddings if self.held else None)
        return x if constant is None else x + self.rotary.mix(constant)

    def _rotated(self, rotation: Any) -> torch.Tensor | None:
        """The constant (B or 1, G, T, C) at places that `rotation` belongs to."""
        if self.rotary_constant is None or self.held is None or self.held.position_embeddings is None:
            return None
        constant = self.rotary_constant[None, :, None].expand(-1, -1, rotation[0].shape[1], -1)
        return rotate(constant, *rotation)


def held_by(basis: CacheBasis | None) -> dict[str, Any]:
    """The arguments of the cache's `update` beside the numbers; stock caches get none."""
    return {} if basis is None else {"held": basis.held, "whole": False}


def reads_tiles(query: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether attention of `query` (B, H, T, C) reads the cache by tiles: its tokens are few, and it is no prompt."""
    return query.shape[2] <= FEW_TOKENS and (attention_mask is not None or query.shape[2] == 1)


def tiled_attention(
    queries: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    value: int,
    basis: CacheBasis,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attend over a quantized cache whose numbers are read for some tokens at a time (2112.05682, section 3).

    Args:
        queries: of the first of the two cached tensors, or of both, whose scores are added: (B, H, T, C) each.
        rows: what the cache's `update` has returned.
        value: place of the tensor that is summed by the weights.
        attention_mask: (B or 1, H or 1, T, S), additive or boolean; `None` attends everywhere.

    Returns:
        (B, H, T, C), with constants and out of the basis of the cache.
    """
    cached, (batch, heads, length, _) = basis.cached, queries[0].shape
    groups, dtype = cached.keys.shape[1], torch.promote_types(queries[0].dtype, torch.float32)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, groups, heads // groups * length, x.shape[-1])  # (B, G, M, C)

    of_constant = basis.constant_query(grouped(queries[basis.rotary_place] * scaling))
    queries = [grouped(form.mix(query * scaling)) for form, query in zip(cached.formats, queries, strict=False)]
    shape = (*queries[0].shape[:3], 1)
    output = queries[0].new_zeros(*shape[:3], sum(cached.formats[value].sizes), dtype=dtype)
    total, largest = output.new_zeros(shape), output.new_full(shape, torch.finfo(dtype).min)
    for start, stop in cached.spans(max(TILE // batch, 1)):
        tiles = cached.tiles(rows, start, stop)
        products = [tile.products(query) for tile, query in zip(tiles, queries, strict=False)]
        scores = products[0] if len(products) == 1 else products[0] + products[1]  # (B, G, M, n)
        if of_constant is not None:
            scores = scores + of_constant @ basis.angles(start, stop)
        if attention_mask is not None:
            mask = grouped(attention_mask[..., start:stop].expand(batch, heads, length, -1))
            lowest = torch.finfo(dtype).min
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = (scores - largest).exp(), (before - largest).exp()
        output = output * kept + tiles[value].weighted(weights)
        total = total * kept + weights.sum(-1, keepdim=True)
    return basis.restore((output / total).to(queries[0].dtype).reshape(batch, heads, length, -1))
