"""What layers store in caches: one that appends in place, and the paged cache of transformers' continuous batching.

The dynamic cache of transformers copies all it holds at every token; `grow_in_place` makes its layers append.

transformers sizes a paged cache by one number of key/value heads and one head size for all layers. The cache only
stores: it writes and reads what a layer gives it. So the numbers of each layer are laid out as rows of one width, and a
row is what transformers takes for a layer: a key of one head with half of the row's numbers, and a value with the other
half. A view of the model's configuration tells transformers of these rows while it makes the cache.

Shapes: B batch, G key/value heads, S tokens held, T new tokens, D and V sizes of a key and of a value. In a paged cache
B is 1, T counts the new tokens of all requests, and S those held and new.
"""

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.continuous_batching import PagedAttentionCache

# A layer takes at most this number of rows of a paged cache.
MOST_ROWS = 4
# A row is written and read by itself. One more for each layer must save this share of the cache to be worth it.
COST_OF_A_ROW = 0.02
# transformers 5.17 makes indices for each layer of a group, later releases for each type of layers.
BY_GROUP = "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters
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


def grow_in_place(cache: DynamicCache) -> DynamicCache:
    """Let the layers of a new, empty `cache` that hold all tokens grow in place; the others stay as they are."""
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass(frozen=True)
class Rows:
    """How the layers' numbers lie in a paged cache.

    Args:
        width: numbers of a row, even.
        counts: rows of each layer.
    """

    width: int
    counts: tuple[int, ...]

    def first(self, layer_idx: int) -> int:
        """Return the place of the layer's first row among all rows."""
        return sum(self.counts[:layer_idx])


def choose_rows(numbers: Sequence[int]) -> Rows:
    """Return the rows that take least for layers that store `numbers` per token."""

    def of(width: int) -> Rows:
        return Rows(width, tuple(-(-n // width) for n in numbers))

    def cost(rows: Rows) -> float:
        total = sum(rows.counts)
        return rows.width * total * (1 + COST_OF_A_ROW * (total / len(rows.counts) - 1))

    widest = max(numbers) + max(numbers) % 2
    if BY_GROUP:  # where another number of rows would change the groups
        return of(widest)
    narrowest = -(-widest // MOST_ROWS)
    return min(map(of, range(widest, narrowest + narrowest % 2 - 1, -2)), key=cost)


class PagedView:
    """A model's configuration as the paged cache is to see it; all else is read from the configuration itself.

    Args:
        config: the configuration.
        rows: of the model's layers.
        at_peak: numbers per token of the context that a layer's attention holds at most while it computes.
    """

    def __init__(self, config: PreTrainedConfig, rows: Rows, at_peak: int):
        self.config, self.rows = config, rows
        self.num_hidden_layers = sum(rows.counts)
        types = zip(config.layer_types, rows.counts, strict=True)
        self.layer_types = [kind for kind, count in types for _ in range(count)]
        self.num_key_value_heads, self.head_dim = 1, rows.width // 2
        # transformers plans for keys and values that are repeated to this number of heads.
        self.num_attention_heads = -(-at_peak // rows.width)

    def get_text_config(self, *args: Any, **kwargs: Any) -> "PagedView":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


class ViewedModel:
    """A model with another configuration."""

    def __init__(self, model: nn.Module, config: PagedView):
        self.model, self.config = model, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def with_rows(manager: Any, rows: Rows, at_peak: int) -> Any:
    """Let a `ContinuousBatchingManager` make its cache of `rows`; `at_peak` as for `PagedView`."""
    if str(manager.model.config._attn_implementation).startswith("paged|flash"):
        manager.model.set_attn_implementation("paged|sdpa")  # 5.17 prefers flash, which there updates the cache itself
    create = manager._create_batch_processor  # which is called in the manager's own thread, or by its warm-up

    def create_batch_processor() -> Any:
        model = manager.model
        manager.model = ViewedModel(model, PagedView(model.config, rows, at_peak))
        try:
            return create()
        finally:
            manager.model = model

    manager._create_batch_processor = create_batch_processor
    return manager


def is_paged(kwargs: dict[str, Any], backend: str) -> bool:
    """Return whether the keyword arguments of a layer's forward hold a paged cache that the layer updates itself.

    Attention functions of flash attention update a cache of keys and values themselves.
    """
    cache = kwargs.get("cache")
    return isinstance(cache, PagedAttentionCache) and (rows_of(cache) is not None or backend in ("eager", "sdpa"))


def rows_of(cache: PagedAttentionCache) -> Rows | None:
    """Return the rows that a cache was made of; `None` for one of keys and values."""
    return getattr(cache.config, "rows", None)


def update_paged(
    layer_idx: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Store the keys (1, G, T, D) and values (1, G, T, V) of new tokens in the cache in `kwargs`.

    Returns:
        Keys (1, G, S, D) and values (1, G, S, V) of all tokens, and the keyword arguments without the cache.
    """
    cache = kwargs["cache"]
    rows = rows_of(cache)
    if rows is None:
        return update_row(cache, layer_idx, key, value, kwargs)
    new = torch.cat([x.transpose(1, 2).flatten(2) for x in (key, value)], dim=-1)  # (1, T, n)
    missing = rows.counts[layer_idx] * rows.width - new.shape[-1]
    new = nn.functional.pad(new, (0, missing)) if missing else new
    halves: list[torch.Tensor] = []  # (1, 1, S, width / 2) each
    rest = kwargs
    for number, row in enumerate(new.unsqueeze(1).split(rows.width, dim=-1)):
        first, second = row.chunk(2, dim=-1)
        first, second, rest = update_row(cache, rows.first(layer_idx) + number, first, second, kwargs)
        halves += first, second
    sizes = [x.shape[1] * x.shape[3] for x in (key, value)]
    held = torch.cat(halves, dim=-1).squeeze(1)[..., : sum(sizes)].split(sizes, dim=-1)  # (1, S, G D), (1, S, G V)
    key, value = (
        x.unflatten(-1, (new.shape[1], -1)).transpose(1, 2) for x, new in zip(held, (key, value), strict=True)
    )
    return key, value, rest


def update_row(
    cache: PagedAttentionCache, index: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Update one of the layers that `cache` has; arguments and results as for `update_paged`."""
    rest = {name: x for name, x in kwargs.items() if name != "cache"}
    if not BY_GROUP:
        return *cache.update(key, value, index, rest), rest
    held = cache.update(key, value, index, kwargs["read_index"], kwargs["write_index"])  # (S, G, size) each
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in held)
    return key, value, rest


def batching_options(given: Any, generation_config: Any) -> Any:
    """Return the `ContinuousBatchingConfig` to use: nothing but the layers reads a cache of rows.

    Args:
        given: what the caller gave, if anything; it is not changed.
        generation_config: may hold one as well.
    """
    given = given or getattr(generation_config, "continuous_batching_config", None)
    options = copy(given) if given else ContinuousBatchingConfig()
    options.max_blocks_per_request = 0
    if hasattr(options, "auto_switch_to_flash"):
        options.auto_switch_to_flash = False
    return options
