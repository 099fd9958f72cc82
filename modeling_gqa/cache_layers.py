"""A dynamic cache layer that appends in place instead of copying all it holds at every token.

Shapes: B batch, G key/value heads, S tokens held, T new tokens, D and V sizes of a key and of a value.
"""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils.import_utils import is_tracing

BLOCK = 64


class KeyValueBuffer:
    """Storage of one layer's keys and values with room for more tokens, and how far it is filled.

    One shared head's keys and values stand side by side, so that MLA can attend over both as one tensor.

    Args:
        keys, values: (B, G, S, D) and (B, G, S, V), copied.
        length: number of tokens that there must be room for; a quarter and a block more are allocated.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        self.filled = keys.shape[2]
        self.capacity = length + length // 4 + BLOCK
        if keys.shape[1] == 1:
            sizes = [keys.shape[3], values.shape[3]]
            storage = keys.new_empty(*keys.shape[:2], self.capacity, sum(sizes))  # (B, 1, capacity, D + V)
            self.keys, self.values = storage.split(sizes, dim=-1)
        else:
            self.keys = keys.new_empty(*keys.shape[:2], self.capacity, keys.shape[3])  # (B, G, capacity, D)
            self.values = values.new_empty(*values.shape[:2], self.capacity, values.shape[3])  # (B, G, capacity, V)
        self.keys[:, :, : self.filled] = keys
        self.values[:, :, : self.filled] = values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new `keys` (B, G, T, D) and `values` (B, G, T, V); return views of all, S + T tokens."""
        start, self.filled = self.filled, self.filled + keys.shape[2]
        self.keys[:, :, start : self.filled] = keys
        self.values[:, :, start : self.filled] = values
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class GrowingLayer(DynamicLayer):
    """The stock dynamic layer with amortised reallocation in place of a concatenation per token.

    `keys` and `values` are views of the filled part of a buffer. It is appended to in place only where it is filled
    exactly as far as this layer's tokens reach; after a crop, and in the second of two continuations of one cache, it
    is copied. Every other replacement of `keys` or `values` leaves the buffer. A prompt is kept as it comes.
    """

    buffer: KeyValueBuffer | None = None

    def __setattr__(self, name, value):
        if name in ("keys", "values"):
            self.__dict__["buffer"] = None
        super().__setattr__(name, value)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `key_states` (B, G, T, D) and `value_states` (B, G, T, V); return all keys and values."""
        if not self._appends(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        past = self.keys.shape[2]
        length, buffer = past + key_states.shape[2], self.buffer
        if buffer is None or buffer.filled != past or buffer.capacity < length or not _writable(buffer.keys):
            buffer = KeyValueBuffer(self.keys, self.values, length)
        self.keys, self.values = buffer.append(key_states, value_states)
        self.buffer = buffer
        return self.keys, self.values

    def _appends(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether a concatenation would only add tokens, and nothing watches it: no gradient, no trace."""
        if self.get_seq_length() == 0 or torch.is_grad_enabled() or is_tracing(key_states):
            return False
        return _fits(self.keys, key_states) and _fits(self.values, value_states)


def grow_in_place(cache: DynamicCache) -> DynamicCache:
    """Let the layers of a new, empty `cache` that hold all tokens grow in place; the others stay as they are."""
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _fits(held: torch.Tensor, new: torch.Tensor) -> bool:
    same = held.dtype == new.dtype and held.device == new.device
    return same and held.ndim == new.ndim == 4 and held.shape[:2] == new.shape[:2] and held.shape[3] == new.shape[3]


def _writable(tensor: torch.Tensor) -> bool:
    """Tensors made in inference mode may be changed only there."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()
