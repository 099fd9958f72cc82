"""What layers store in caches that grow in place, and how paged caches are told from others.

The dynamic cache of transformers copies all it holds at every token; `grow_in_place` makes its layers append. What
layers store in paged caches is in `integrations.py`.

Shapes: B batch, G key/value heads, S tokens held, T new tokens, D and V sizes of a key and of a value, N documents in a
row, P rotated dimensions.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, DynamicLayer

from .compatibility import is_tracing

# A new buffer has room for a quarter of the tokens held and this number of tokens more.
BLOCK = 64


class KeyValueBuffer:
    """Storage of one layer's keys and values with room for more tokens, of which the first `filled` are used.

    Where there is one head, keys and values stand side by side, so that MLA can attend over both as one tensor.

    Args:
        keys, values: (B, G, S, D) and (B, G, S, V), copied.
        length: number of tokens to make room for; a quarter of it and `BLOCK` tokens more are allocated.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        self.batch, self.heads, self.filled, self.key_size = keys.shape
        self.value_size = values.shape[3]
        self.capacity = length + length // 4 + BLOCK
        self.dtype, self.device = keys.dtype, keys.device
        if self.heads == 1:
            storage = keys.new_empty(self.batch, 1, self.capacity, self.key_size + self.value_size)
            key_room, value_room = storage[..., : self.key_size], storage[..., self.key_size :]
        else:
            key_room = keys.new_empty(self.batch, self.heads, self.capacity, self.key_size)
            value_room = values.new_empty(self.batch, self.heads, self.capacity, self.value_size)
        key_room[:, :, : self.filled] = keys
        value_room[:, :, : self.filled] = values
        self.keys, self.values = key_room, value_room
        # Written through `data`, so that autograd counts no change: earlier views do not show the new places.
        self.writable = key_room.data, value_room.data

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether `keys` and `values` have the buffer's sizes, dtype and device, and it has room and may be written."""
        new = keys.shape[-2]
        return (
            keys.shape == (self.batch, self.heads, new, self.key_size)
            and values.shape == (self.batch, self.heads, new, self.value_size)
            and self.filled + new <= self.capacity
            and keys.dtype is values.dtype is self.dtype
            and keys.device == values.device == self.device
            # Tensors made in inference mode may be changed only there.
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new `keys` (B, G, T, D) and `values` (B, G, T, V); return views of all, S + T tokens."""
        start, new = self.filled, keys.shape[2]
        self.filled = end = start + new
        for room, states in zip(self.writable, (keys, values), strict=True):
            room.narrow(2, start, new).copy_(states)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class GrowingLayer(DynamicLayer):
    """The stock dynamic layer with amortised reallocation in place of a concatenation per token.

    `keys` and `values` are views of the filled part of a buffer. New tokens are written into the buffer only if its
    filled part ends with this layer's last token; after a crop, and in a copy of the layer, a new buffer is made.
    Assigning `keys` or `values` drops the buffer. A prompt is kept as it comes, without a buffer. With gradients or
    while tracing, tokens are concatenated as in the stock layer.
    """

    # A slot, because tools that walk a cache (`torch.export`) take every tensor under `__dict__` for a state.
    __slots__ = ("buffer",)
    buffer: KeyValueBuffer | None

    def __new__(cls, *args, **kwargs):
        layer = super().__new__(cls)
        layer.buffer = None
        return layer

    def __getstate__(self):
        # Copies and pickles hold the tokens alone: a pickled buffer and `keys` would no longer be the same memory.
        return self.__dict__

    def __setattr__(self, name, value):
        if name in ("keys", "values"):
            super().__setattr__("buffer", None)
        super().__setattr__(name, value)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `key_states` (B, G, T, D) and `value_states` (B, G, T, V); return all keys and values."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return super().update(key_states, value_states, *args, **kwargs)
        buffer = self.buffer
        if buffer is None or buffer.filled != self.keys.shape[2] or not buffer.takes(key_states, value_states):
            buffer = self._new_buffer(key_states, value_states)
        if buffer is None:
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = buffer.append(key_states, value_states)
        # Not through `__setattr__`, which would drop the buffer: these are its views.
        self.__dict__.update(keys=keys, values=values)
        super().__setattr__("buffer", buffer)
        return keys, values

    def _new_buffer(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeyValueBuffer | None:
        """A buffer with this layer's tokens and room for the new ones; `None` where a concatenation is wanted."""
        if self.get_seq_length() == 0 or self.keys.ndim != 4:
            return None
        if self.keys.shape[:3] != self.values.shape[:3] or self.keys.device != self.values.device:
            return None
        if key_states.ndim != 4 or value_states.ndim != 4:
            return None
        buffer = KeyValueBuffer(self.keys, self.values, self.keys.shape[2] + key_states.shape[2])
        return buffer if buffer.takes(key_states, value_states) else None

    def reset(self) -> None:
        """Drop all tokens; transformers 5.17 would zero them, in every layer that shares the buffer."""
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()


@dataclass(frozen=True)
class HeldTokens:
    """Where the tokens of a cache stand, the new ones included.

    Args:
        position_embeddings: cosine and sine (B or 1, S, P) of all tokens, for layers with a constant key.
        angles: `plane_angles` of these.
        first: of a quantized cache, (B, N), the places of first tokens: of each document in a row, or of what follows
            the padding. Rows of fewer documents end with `NOWHERE`.
        least, most: the smallest and the largest place there.
        formats: of a paged cache of rounded numbers, those of each layer; `None` for layers that are not rounded.
    """

    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    angles: torch.Tensor | None = None
    first: torch.Tensor | None = None
    least: int = 0
    most: int = 0
    formats: tuple[Any, ...] | None = None

    def to(self, device: Any, **kwargs: Any) -> "HeldTokens":
        """Move to the device of a layer, by the name that accelerate looks for."""
        embeddings: Any = self.position_embeddings and tuple(x.to(device) for x in self.position_embeddings)
        first, angles = (x if x is None else x.to(device) for x in (self.first, self.angles))
        return replace(self, first=first, angles=angles, position_embeddings=embeddings)


PADDING = -1  # the position of a token that no other attends to, where nobody gives positions


class PositionedCache(DynamicCache):
    """The dynamic cache that grows in place and knows the position of each token, for layers with a constant key."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Positions of all tokens, (B or 1, 1, S, 1), kept by a layer that grows as the others do.
        self.positions = GrowingLayer()
        self.aligned = True
        grow_in_place(self)

    def hold(self, position_ids: torch.Tensor, rows: int) -> HeldTokens:
        """Add the positions (B or 1, T) of tokens that the layers are about to hold, in a batch of `rows`."""
        places = position_ids.expand(rows, -1)
        # A trace cannot ask.
        alike = len(position_ids) == 1 or (not is_tracing(places) and bool((places == places[:1]).all()))
        self.aligned = self.aligned and alike
        stored = places.int()[:, None, :, None]
        self.positions.update(stored, stored[..., :0])
        return HeldTokens()

    @property
    def held_positions(self) -> torch.Tensor:
        """Positions of all tokens, (B, S), or (1, S) where those of all rows are alike."""
        positions = self.positions.keys[:, 0, :, 0]
        return positions[:1] if self.aligned else positions

    def change_rows(self, name: str, argument: Any) -> None:
        """Call the method `name` of the layers' cache, and of the positions."""
        getattr(super(), name)(argument)
        getattr(self.positions, name)(argument)

    def crop(self, tokens_to_remove: int) -> None:
        self.change_rows("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_rows("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.change_rows("batch_select_indices", indices)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.change_rows("reorder_cache", beam_idx)

    def reset(self) -> None:
        super().reset()
        self.positions.reset()
        self.aligned = True


def grow_in_place(cache: DynamicCache) -> DynamicCache:
    """Let the layers of a new, empty `cache` that hold all tokens grow in place; the others stay as they are."""
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def is_paged(kwargs: dict[str, Any], backend: str) -> bool:
    """Return whether the keyword arguments of a layer's forward hold a paged cache that the layer updates itself.

    Attention functions of flash attention update a cache of keys and values themselves.
    """
    cache = kwargs.get("cache")
    return cache is not None and (rows_of(cache) is not None or backend in ("eager", "sdpa"))


def rows_of(cache: Any) -> Any:
    """Return the `Rows` that a paged cache was made of; `None` for one of keys and values."""
    return getattr(getattr(cache, "config", None), "rows", None)
