"""A cache of numbers of a few bits that attention reads tile by tile.

A layer of the cache stores rows of bytes (`cache_formats.py`) of keys and values, or of MLA's latent and rotary key.
What is constant over tokens, a measured mean or the projections' biases, takes no bits: it is taken out before rounding
and put back exactly. A constant key is rotated to each token's position. A constant value is added to the output,
because weights sum to one. A constant latent adds the same to all scores of a query, which changes no weight.

Shapes: B batch, G key/value heads of size D, H query heads, S tokens held, T new tokens, C channels of a row, N bytes
of a row or documents in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import Cache

from .attention_functions import FEW_TOKENS
from .cache_formats import CacheQuantization, CodedFormat, Levels, RowFormat, Tile
from .cache_layers import PADDING, GrowingLayer, HeldTokens, PositionedCache
from .layers import multiply_by_head, plane_angles, rotate

# Tokens of all rows whose numbers are read at once: enough to hide what each operation costs, few enough for the
# processor's caches.
TILE = 4096
NOWHERE = 2**30  # a place that no token has


class QuantizedLayer(GrowingLayer):
    """The growing layer with rows of bytes as its keys and values.

    Numbers come and go in the basis of the cache (`Coordinates`). The first tokens of a document and the last are kept
    as they are, beside their rounded numbers.

    Args:
        formats: of the two tensors that the layer caches.
        exact_tokens, residual_length: numbers of first and last tokens that are kept as they are.
        means: the attention that uses the layer must have measured means.
    """

    def __init__(
        self,
        formats: Sequence[RowFormat | CodedFormat],
        exact_tokens: int = 0,
        residual_length: int = 0,
        means: bool = False,
    ):
        super().__init__()
        self.means = means
        self.formats, self.exact_tokens, self.residual_length = formats, exact_tokens, residual_length
        self.number_dtype: torch.dtype | None = None
        self.held: HeldTokens | None = None
        # (B, G, N exact tokens, C) and (B, G, residual length or less, C), of both tensors.
        self.first_tokens: list[torch.Tensor] = []
        self.last_tokens: list[torch.Tensor] = []
        # What gradients of the numbers pass to, both (B, G, S, C), after an update with gradients.
        self.learned: tuple[torch.Tensor, torch.Tensor] | None = None

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

        Then the rows of bytes are returned, (B, G, S, N); `read` and `tiles` give their numbers. Gradients of what
        `read` returns pass to the first tokens of a cache as if nothing were rounded (straight through, 1308.3432).

        Raises:
            ValueError: gradients are asked for, and the cache holds tokens already.
        """
        learned = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if learned and self.get_seq_length():
            raise ValueError(
                "gradients pass through a quantized cache that was empty before, and this one holds "
                f"{self.get_seq_length()} tokens: use torch.no_grad(), or begin with an empty cache"
            )
        self.learned = (key_states, value_states) if learned else None
        states = key_states.detach(), value_states.detach()
        self.held = held
        rows = super().update(*self.pack(*states))
        start = self.get_seq_length() - key_states.shape[2]
        if self.exact_tokens and start < (held.most if held else 0) + self.exact_tokens:
            self._keep_first(states, start)
        if self.residual_length:
            kept = self.last_tokens if start else [x[:, :, :0] for x in states]
            joined = [torch.cat(pair, dim=2) for pair in zip(kept, states, strict=True)]
            self.last_tokens = [x[:, :, -self.residual_length :].clone() for x in joined]
        return self.read(rows) if whole else rows

    def pack(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Round keys (B, G, T, C) and values, and return their rows of bytes, (B, G, T, N)."""
        self.number_dtype = states[0].dtype
        return [form.pack(x) for form, x in zip(self.formats, states, strict=True)]

    def read(
        self, rows: Sequence[torch.Tensor], start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, G, n, C) and values of the tokens from `start` to `stop`, all by default.

        `rows` are what `update` has returned: the layer's own may have been offloaded since.
        """
        length = self.get_seq_length()
        stop = length if stop is None else min(stop, length)
        numbers = [
            self._with_exact(number, form.unpack(stored[:, :, start:stop], self.number_dtype), start, stop)
            for number, (form, stored) in enumerate(zip(self.formats, rows, strict=True))
        ]
        if self.learned is not None:
            pairs = zip(numbers, (x[:, :, start:stop] for x in self.learned), strict=True)
            numbers = [x + (states - states.detach()) for x, states in pairs]
        first, second = numbers
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
            return [Tile([Levels(x.to(dtype).mT, None, x.shape[-1])]) for x in self.read(rows, start, stop)]
        return [
            Tile(form.levels(stored[:, :, start:stop], dtype)) for form, stored in zip(self.formats, rows, strict=True)
        ]

    def _keep_first(self, states: Sequence[torch.Tensor], start: int) -> None:
        """Keep those of the new tokens, which begin at place `start`, that are among the first of their rows."""
        batch, heads, new, _ = states[0].shape
        first = states[0].new_zeros(batch, 1, dtype=torch.long) if self.held is None else self.held.first
        places = first[:, :, None] + torch.arange(self.exact_tokens, device=first.device) - start
        places = places.flatten(1)  # (B, N exact tokens)
        chosen = ((places >= 0) & (places < new))[:, None, :, None]
        index = places.clamp(0, new - 1)[:, None, :, None].expand(batch, heads, -1, -1)
        kept = self.first_tokens or [x[:, :, :0] for x in states]
        more = places.shape[1] - kept[0].shape[2]  # documents have begun since
        self.first_tokens = [
            torch.where(chosen, x.gather(2, index.expand(-1, -1, -1, x.shape[3])), pad(old, (0, 0, 0, more)))
            for x, old in zip(states, kept, strict=True)
        ]

    def _with_exact(self, number: int, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Put the tokens that are kept as they are in their places of `x` (B, G, stop - start, C)."""
        least, most = (self.held.least, self.held.most) if self.held else (0, 0)
        low, high = max(start, least), min(stop, most + self.exact_tokens)
        if self.first_tokens and low < high:
            kept, part = self.first_tokens[number], x[:, :, low - start : high - start]
            places = torch.arange(low, high, device=x.device).expand(1, 1, -1)
            places = places - self.held.first[:, :, None] if self.held else places  # (B or 1, N, n)
            inside = (places >= 0) & (places < self.exact_tokens)
            document = inside.int().argmax(1, keepdim=True)  # (B or 1, 1, n)
            index = document * self.exact_tokens + places.gather(1, document).clamp(0, self.exact_tokens - 1)
            found = kept.gather(2, index.unsqueeze(-1).expand(*part.shape))
            part.copy_(torch.where(inside.any(1)[:, None, :, None], found, part))
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
        self.first_tokens, self.last_tokens, self.held, self.learned = [], [], None, None


class GQAQuantizedCache(PositionedCache):
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
        self.held: HeldTokens | None = None  # `None`: the rows have changed
        if not hasattr(config, "cache_quantization"):
            raise ValueError(f"GQAQuantizedCache is for a GQAConfig, and got a {type(config).__name__}")
        given = CacheQuantization.of((config.cache_quantization or {}) if options is None else options)
        for index, formats in enumerate(formats_by_layer(config, given)):
            if type(self.layers[index]) is GrowingLayer:
                self.layers[index] = QuantizedLayer(formats, given.exact_tokens, given.residual_length, given.means)

    def hold(self, position_ids: torch.Tensor, rows: int) -> HeldTokens:
        """Add the positions (B or 1, T) of tokens that the layers are about to hold, in a batch of `rows`."""
        super().hold(position_ids, rows)
        positions = self.positions.keys[:, 0, :, 0]
        if self.held is None or (positions[:, -position_ids.shape[1] - 1 :] <= 0).any():  # the token before may pad
            first = _first_places(positions)
            self.held = HeldTokens(first=first, least=int(first.min()), most=int(first[first < NOWHERE].max()))
        return self.held

    def change_rows(self, name: str, argument: Any) -> None:
        super().change_rows(name, argument)
        self.held = None

    def reset(self) -> None:
        super().reset()
        self.held = None


def formats_by_layer(config: Any, options: CacheQuantization) -> list[Sequence[RowFormat | CodedFormat]]:
    """Formats of the two tensors that each layer of a `GQAConfig` caches."""
    from .modeling_gqa import ATTENTION_CLASSES  # which imports this file

    # While a model drafts with its first layers (early exit), `layer_types` alone says how many it has.
    layers = zip(config.per_layer_config, options.by_layer(len(config.layer_types)), strict=False)
    return [ATTENTION_CLASSES[layer.attention_kind].cache_formats(layer, own) for layer, own in layers]


def rounds_cache(config: Any) -> bool:
    """Whether a configuration, be it ours or not, asks for a quantized cache."""
    return getattr(config, "cache_quantization", None) is not None


def quantized_layer(cache: Cache | None, layer_idx: int) -> QuantizedLayer | None:
    """Return the layer of `cache` if its numbers are rounded, else `None`."""
    layer: Any = cache.layers[layer_idx] if cache is not None and layer_idx < len(cache.layers) else None
    return layer if isinstance(layer, QuantizedLayer) else None


def _first_places(positions: torch.Tensor) -> torch.Tensor:
    """The places (B, N) of first tokens, as in `HeldTokens`, for the positions (B, S) of all tokens.

    Of neighbours at position 0 the last is a first token: those before it are padding. A row without position 0 begins
    with its first token that is no `PADDING`.
    """
    begins = (positions == 0) & (pad(positions[:, 1:], (0, 1), value=1) != 0)
    first = (positions != PADDING).int().argmax(1, keepdim=True)  # (B, 1)
    begins = begins.scatter(1, first, begins.gather(1, first) | ~begins.any(1, keepdim=True))
    places = torch.arange(positions.shape[1], device=positions.device)
    return torch.where(begins, places, NOWHERE).sort(dim=1).values[:, : int(begins.sum(1).max())]


class Coordinates(NamedTuple):
    """The basis in which one of the tensors that a layer caches is rounded.

    Args:
        encoder, decoder: (C, C), of a head or of all heads together; `None`: numbers stay as they are.
        heads: number of heads that are taken together, G, or 1: each by itself.
    """

    encoder: torch.Tensor | None = None
    decoder: torch.Tensor | None = None
    heads: int = 1

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (B, G, T, D) as it is cached, (B, G / heads, T, C)."""
        if self.heads > 1:
            x = x.transpose(1, 2).flatten(2).unsqueeze(1)
        return _times(x, self.encoder)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (B, G / heads, S, C) as it was, (B, G, S, D)."""
        x = _times(x, self.decoder)
        return x.squeeze(1).unflatten(-1, (self.heads, -1)).transpose(1, 2) if self.heads > 1 else x

    def encode_query(self, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied with cached numbers in place of a query (B, H, T, D) with decoded ones: (B, H, T, C)."""
        if self.decoder is None or self.heads == 1:
            return _times(x, self.decoder if self.decoder is None else self.decoder.mT)
        return self._by_head(x, self.decoder.unflatten(1, (self.heads, -1)).permute(1, 2, 0))  # (G, D, C)

    def decode_output(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of decoded numbers that belong to the sums of cached ones `x` (B, H, T, C): (B, H, T, D)."""
        if self.decoder is None or self.heads == 1:
            return _times(x, self.decoder)
        return self._by_head(x, self.decoder.unflatten(1, (self.heads, -1)).transpose(0, 1))  # (G, C, D)

    def _by_head(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = x.shape
        found = multiply_by_head(x.reshape(batch, self.heads, -1, x.shape[-1]), matrices.to(x.dtype))
        return found.reshape(batch, heads, length, -1)


def _times(x: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    """`x` (..., C) times (C, C'); of a product with many leading dimensions torch would copy the matrix."""
    return x if matrix is None else (x.reshape(-1, x.shape[-1]) @ matrix.to(x.dtype)).view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class CacheBasis:
    """How the numbers of an attention layer go into its quantized cache, and come back.

    One of the two tensors that a layer caches is rotated: the keys, or MLA's rotary key. The other one is not: the
    values, or the latent.

    Args:
        cached: the layer of the cache.
        coordinates: of both tensors.
        rotary_place: the place of the rotated one among the two.
        rotary_constant, plain_constant: (G, D), what every token has before rotation; `None`: nothing.
        rotation: cosine and sine (B or 1, T, P) of the new tokens; `None`: nothing is rotated.
        held: of all tokens, the new ones included.
    """

    cached: QuantizedLayer
    coordinates: tuple[Coordinates, Coordinates]
    rotary_place: int
    rotary_constant: torch.Tensor | None = None
    plain_constant: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    held: HeldTokens | None = None

    @property
    def learns(self) -> bool:
        """Whether gradients pass to what was stored last: `read` alone gives numbers that have them."""
        return self.cached.learned is not None

    def constant_query(self, query: torch.Tensor) -> torch.Tensor | None:
        """Factors (B, H, T, P) of the angles of each token in the scores of a query (B, H, T, D) with the constant key.

        A plane of the constant (m1, m2), turned by an angle a, has the product cos a (q1 m1 + q2 m2) + sin a (q2 m1 -
        q1 m2) with the query. What is not rotated adds the same for all tokens, which changes no weight.
        """
        if self.rotary_constant is None or self.held is None or self.held.position_embeddings is None:
            return None
        planes = self.held.position_embeddings[0].shape[-1] // 2
        first, second = (query[..., part * planes : (part + 1) * planes] for part in (0, 1))
        constant = self._by_query_head(self.rotary_constant, query.shape[1])
        one, two = (constant[..., part * planes : (part + 1) * planes] for part in (0, 1))
        return torch.cat((first * one + second * two, second * one - first * two), dim=-1)

    def angles(self, start: int, stop: int) -> torch.Tensor:
        """Cosines and sines of the tokens from `start` to `stop`, (B or 1, 1, P, n)."""
        return plane_angles(*(part[:, start:stop] for part in self.held.position_embeddings)).mT.unsqueeze(1)

    def store(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors (B, G, T, D) of new tokens, rotated, as the cache rounds them."""
        pair = zip(self.coordinates, (first, second), self._constants(self.rotation), strict=True)
        one, two = (own.encode(x if constant is None else x - constant) for own, x, constant in pair)
        return one, two

    def read(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors (B, G, S, D) of all tokens, from what the cache's `update` has returned."""
        constants = self._constants(self.held.position_embeddings if self.held else None)
        pair = zip(self.coordinates, self.cached.read(rows), constants, strict=True)
        decoded = ((own.decode(x), constant) for own, x, constant in pair)
        one, two = (x if constant is None else x + constant for x, constant in decoded)
        return one, two

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """What is attended to, (B, H, T, D), for the sums of what the cache holds in place of it, (B, H, T, C)."""
        x = self.coordinates[1 - self.rotary_place].decode_output(x)
        return x if self.plain_constant is None else x + self._by_query_head(self.plain_constant, x.shape[1])

    def _constants(self, rotation: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The constants (B or 1, G, T, D) of both tensors at places that `rotation` belongs to."""
        rotated = plain = None
        if self.rotary_constant is not None and self.held is not None and self.held.position_embeddings is not None:
            rows, places = rotation[0].shape[:2]
            rotated = rotate(self.rotary_constant[None, :, None].expand(rows, -1, places, -1), *rotation)
        if self.plain_constant is not None:
            plain = self.plain_constant[None, :, None]
        return (plain, rotated) if self.rotary_place else (rotated, plain)

    @staticmethod
    def _by_query_head(constant: torch.Tensor, heads: int) -> torch.Tensor:
        """`constant` (G, D) for each query head, (H, 1, D)."""
        return constant.repeat_interleave(heads // constant.shape[0], dim=0)[:, None]


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

    of_constant = basis.constant_query(queries[basis.rotary_place] * scaling)
    of_constant = None if of_constant is None else grouped(of_constant)
    pairs = zip(basis.coordinates, queries, strict=False)
    queries = [grouped(own.encode_query(query * scaling)) for own, query in pairs]
    shape = (*queries[0].shape[:3], 1)
    output = queries[0].new_zeros(*shape[:3], cached.formats[value].channels, dtype=dtype)
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
    return basis.output((output / total).to(queries[0].dtype).reshape(batch, heads, length, -1))
