"""The masks of a model and of a layer that is used without one.

Shapes: B batch, T query tokens, S key tokens, G key/value heads, D size of a key, V of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionMaskInterface, Cache

from .compatibility import is_tracing
from .configuration_gqa import GQAConfig

# Attention functions whose masks are built here. Those of others are asked from transformers, where they register.
OWN_MASKS = ("eager", "sdpa", "flex_attention")
OTHER_MASKS = AttentionMaskInterface()


class AttentionModule(Protocol):
    """The attributes of a layer that `attended_part` reads."""

    layer_idx: int

    @property
    def backend(self) -> str: ...


def attended_part(
    module: AttentionModule,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key_values: Cache | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the mask of a layer, and the keys and values that it attends to.

    A model builds its layers' masks; these pass through. A layer that is used without a model gets its own mask. Places
    that a static cache has not filled yet are cut off, except while tracing, and except where eager attention returns
    weights as wide as the cache.

    Args:
        module: the layer; without an attention implementation in its configuration it uses eager.
        hidden_states: (B, T, hidden), the last T of the tokens seen.
        attention_mask: `None`, a padding mask (B, S) with 1 or True for tokens to attend to, or a finished mask.
        key, value: (B, G, S, D) and (B, G, S, V); with a cache what its `update` has returned.
        past_key_values: cache that holds the keys, the T new ones included.
        is_causal: a token sees no later ones.
        sliding_window: number of tokens within which to attend.

    Returns:
        A mask (B, 1, T, S), or `None` where the attention function masks by itself or nothing is masked; keys; values.

    Raises:
        ValueError: a padding mask has not one column per key, or the cache has dropped keys that are to be seen.
    """
    if past_key_values is not None:
        attention_mask, key, value = _filled_part(module, attention_mask, past_key_values, key, value)
    layer: Any = None if past_key_values is None else past_key_values.layers[module.layer_idx]
    static = layer is not None and layer.is_compileable
    if attention_mask is None and hidden_states.shape[1] == 1 and sliding_window is None and not static:
        return None, key, value
    backend = module.backend
    # A trace cannot ask how far a static cache is filled; without a mask it is a prompt, which `sdpa` masks itself.
    if attention_mask is None and static and backend == "sdpa" and is_tracing(hidden_states):
        return None, key, value
    if is_finished(attention_mask) or backend not in OWN_MASKS:
        return attention_mask, key, value
    if not is_causal and layer is not None and layer.is_sliding:
        raise ValueError(
            "is_causal=False with a cache of a sliding window, which drops keys that a two-sided window sees: "
            "give a cache that keeps all tokens, such as DynamicCache(), or none"
        )
    keys = key.shape[2]
    total = keys if past_key_values is None else int(past_key_values.get_seq_length(module.layer_idx))
    return _lone_layer_mask(backend, hidden_states, attention_mask, keys, total, is_causal, sliding_window), key, value


def is_finished(attention_mask: Any) -> bool:
    """Whether a model has built the mask: (B, 1, T, S), or an object of the attention function's own."""
    return attention_mask is not None and (not torch.is_tensor(attention_mask) or attention_mask.ndim == 4)


def _filled_part(
    module: AttentionModule, attention_mask: Any, past_key_values: Cache, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Cut what a static cache hands out, and the mask, to the tokens it holds; traced shapes must stay as they are."""
    layer: Any = past_key_values.layers[module.layer_idx]
    finished = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
    if not layer.is_compileable or layer.is_sliding or not (finished or attention_mask is None) or is_tracing(key):
        return attention_mask, key, value
    # Eager returns weights as wide as the cache, so there only a mask that is narrower than the cache cuts it.
    whole = not finished or attention_mask.shape[-1] == key.shape[2]
    if whole and module.backend == "eager":
        return attention_mask, key, value
    filled = int(past_key_values.get_seq_length(module.layer_idx))
    if finished:
        attention_mask = attention_mask[..., :filled]
    return attention_mask, key[:, :, :filled], value[:, :, :filled]


def _lone_layer_mask(
    backend: str,
    hidden_states: torch.Tensor,
    padding_mask: torch.Tensor | None,
    keys: int,
    total: int,
    is_causal: bool,
    sliding_window: int | None,
) -> torch.Tensor | None:
    """The mask of a layer without a model, over `keys` keys of `total` tokens; the rest as in `attended_part`."""
    batch, length = hidden_states.shape[:2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    seen = min(total, keys)  # a window holds the last ones, a static cache has room for more
    if padding_mask is None and window is None:
        unmasked = seen == keys and (length == 1 or not is_causal)
        if unmasked or (backend == "sdpa" and seen == length > 1 and is_causal):
            return None
    if padding_mask is None and seen < keys:
        padding_mask = hidden_states.new_ones(batch, seen)
    elif padding_mask is not None:
        refuse_other_padding(padding_mask, batch, total)
        padding_mask = padding_mask[:, -keys:]  # (B, seen)
    if padding_mask is not None:
        padding_mask = padding_mask.to(hidden_states.device, torch.bool)
    span = Span(batch, length, keys, seen - length, 0)
    return built_mask(backend, attention_rule(is_causal, window, filled_up(padding_mask, keys)), span, hidden_states)


def refuse_other_padding(padding_mask: torch.Tensor, batch: int, tokens: int) -> None:
    """Raise a ValueError for a padding mask of another shape than (`batch`, `tokens`)."""
    if padding_mask.shape != (batch, tokens):
        raise ValueError(
            f"attention_mask has shape {tuple(padding_mask.shape)}: a padding mask is (batch, keys) = "
            f"({batch}, {tokens}), any other mask has four dimensions"
        )


@dataclass(frozen=True)
class Span:
    """Numbers of rows, queries and keys of a mask, and places of its first query and its first key in the text."""

    batch: int
    queries: int
    keys: int
    first_query: Any
    first_key: Any


def attention_rule(
    is_causal: bool,
    window: int | None = None,
    padding_mask: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> Callable:
    """A function of row, head, and places of query and key, which says whether that query attends to that key.

    Args:
        is_causal: no query sees later keys.
        window: number of tokens within which to attend.
        padding_mask: (B, S), True for keys to attend to.
        documents: (B, S), the document of each token; none sees another.
    """

    def attends(row: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query if is_causal else key >= 0
        if window is not None:
            seen = seen & (key > query - window if is_causal else (query - key).abs() <= window)
        if padding_mask is not None:
            seen = seen & padding_mask[row, key]
        if documents is not None:
            seen = seen & (documents[row, query] == documents[row, key])
        return seen

    return attends


def built_mask(backend: str, rule: Callable, span: Span, states: torch.Tensor) -> Any:
    """The mask of a rule: a `BlockMask` of flex attention, else (B, 1, T, S), additive for eager and boolean for sdpa.

    Its dtype, if additive, and its device are those of `states`.
    """
    device = states.device
    if backend == "flex_attention":

        def from_first(row: Any, head: Any, query: Any, key: Any) -> Any:
            return rule(row, head, query + span.first_query, key + span.first_key)

        return create_block_mask(from_first, span.batch, None, span.queries, span.keys, device=device, _compile=True)
    row = torch.arange(span.batch, device=device)[:, None, None, None]
    query = torch.arange(span.queries, device=device)[:, None] + span.first_query  # (T, 1)
    key = torch.arange(span.keys, device=device) + span.first_key  # (S,)
    mask = rule(row, 0, query, key).expand(span.batch, 1, span.queries, span.keys)
    if backend == "eager":
        return torch.where(mask, torch.zeros((), dtype=states.dtype, device=device), torch.finfo(states.dtype).min)
    return mask


def filled_up(padding_mask: torch.Tensor | None, tokens: Any) -> torch.Tensor | None:
    """A padding mask with a column for each of `tokens` tokens: nothing attends to those that are yet to come."""
    if padding_mask is None or padding_mask.shape[1] >= tokens:
        return padding_mask
    return nn.functional.pad(padding_mask, (0, tokens - padding_mask.shape[1]))


def model_masks(
    config: GQAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    restarts: torch.Tensor | None,
) -> dict[str, Any]:
    """The mask of each layer type in `config.layer_types`, in the form that the attention implementation wants.

    Args:
        inputs_embeds: (B, T, hidden); only its shape, dtype and device are used.
        attention_mask: padding mask (B, S), finished mask, or the dictionary that this function returns.
        restarts: position ids if the caller gave them, else `None`; a packed document begins where they restart.
    """
    if isinstance(attention_mask, dict):  # `generate` has made them, for a compiled decoding step
        return attention_mask
    kinds, backend = dict.fromkeys(config.layer_types), config._attn_implementation or "eager"
    if is_finished(attention_mask):
        return dict.fromkeys(kinds, attention_mask)
    if backend not in OWN_MASKS and backend not in OTHER_MASKS.valid_keys():  # an engine's, which masks by itself
        return dict.fromkeys(kinds)
    if attention_mask is not None:
        attention_mask = attention_mask.to(inputs_embeds.device, torch.bool)
    documents = None
    if restarts is not None and past_key_values is None:
        documents = packed_documents(restarts.expand(inputs_embeds.shape[0], -1), attention_mask)
    return {
        kind: _mask_of(config, backend, kind, inputs_embeds, attention_mask, past_key_values, documents)
        for kind in kinds
    }


def causal_documents(
    config: GQAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    restarts: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """The documents (B, T) of the layer types whose mask lets a token see all of its document before it, nothing else.

    `sdpa` on a CPU attends to each of them alone then. `None` for other layer types. Arguments as in `model_masks`.
    """
    documents, none = None, dict.fromkeys(config.layer_types)
    fused = config._attn_implementation == "sdpa" and inputs_embeds.device.type == "cpu"
    is_causal = getattr(config, "is_causal", True) is not False and attention_mask is None and past_key_values is None
    if restarts is not None and fused and is_causal and not is_tracing(inputs_embeds):
        documents = packed_documents(restarts.expand(inputs_embeds.shape[0], -1), None)
    if documents is None:
        return none
    longest = max(int(row.unique_consecutive(return_counts=True)[1].max()) for row in documents)
    wide = config.sliding_window is not None and longest <= config.sliding_window
    return {kind: documents if wide or kind != "sliding_attention" else None for kind in none}


def flash_documents(
    config: GQAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    restarts: torch.Tensor | None,
) -> dict[str, Any]:
    """What tells flash attention where packed documents begin, in the names of transformers; arguments as above.

    It has no mask, and transformers looks for documents in the positions of a single row alone.
    """
    backend = config._attn_implementation or "eager"
    apart = attention_mask is None and past_key_values is None and restarts is not None
    if not apart or "flash" not in backend or backend.startswith("paged|"):
        return {}
    if (documents := packed_documents(restarts.expand(inputs_embeds.shape[0], -1), None)) is None:
        return {}
    begins = nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    ends = nn.functional.pad(begins, (0, 1), value=documents.numel()).int()  # (documents + 1,)
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _mask_of(
    config: GQAConfig,
    backend: str,
    kind: str,
    inputs_embeds: torch.Tensor,
    padding_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    documents: torch.Tensor | None,
) -> Any:
    """The mask of the layers of type `kind`; `documents` (B, T) as of `packed_documents`, the rest as above."""
    batch, queries = inputs_embeds.shape[:2]
    if past_key_values is None:
        span = Span(batch, queries, queries, 0, 0)
    else:
        layer = config.layer_types.index(kind)
        past: Any = past_key_values.get_seq_length(layer)  # a tensor in a static cache
        past = past.to(inputs_embeds.device) if torch.is_tensor(past) else past
        keys, first = past_key_values.get_mask_sizes(queries, layer)
        span = Span(batch, queries, keys, past, first)
    window = config.sliding_window if kind == "sliding_attention" else None
    is_causal = getattr(config, "is_causal", True) is not False
    if backend not in OWN_MASKS:
        return OTHER_MASKS[backend](
            batch_size=batch,
            q_length=queries,
            kv_length=span.keys,
            q_offset=span.first_query,
            kv_offset=span.first_key,
            mask_function=attention_rule(is_causal, window, None, documents),
            attention_mask=padding_mask,
            allow_is_causal_skip=False,
            local_size=window,
            dtype=inputs_embeds.dtype,
            config=config,
            use_vmap=False,
            device=inputs_embeds.device,
        )
    padding_mask = filled_up(padding_mask, span.first_key + span.keys)
    static = getattr(past_key_values, "is_compileable", False)
    decodes = static and queries == 1  # whose masks must be alike at each step
    if documents is None and not decodes and (window is None or span.keys < window) and not is_tracing(inputs_embeds):
        whole, prompt = _sees_all(padding_mask, span)
        if backend == "sdpa" and is_causal and (prompt or (whole and queries in (1, span.keys))):
            return None  # which the attention function takes for causal
        if whole and not is_causal and backend != "flex_attention":
            return None
        padding_mask = None if whole else padding_mask
    return built_mask(backend, attention_rule(is_causal, window, padding_mask, documents), span, inputs_embeds)


def _sees_all(padding_mask: torch.Tensor | None, span: Span) -> tuple[bool, bool]:
    """Whether no key is padding, and whether the keys are a prompt without padding and places yet to be filled."""
    at_start = bool(span.first_query == 0)
    if padding_mask is None:
        return True, at_start
    whole = bool(padding_mask[:, span.first_key : span.first_key + span.keys].all())
    prompt, rest = padding_mask[:, : span.queries], padding_mask[:, span.queries :]
    return whole, at_start and bool(prompt.all()) and not bool(rest.any())


def packed_documents(position_ids: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Number the documents of each row; `None` where each row is one, which cannot be asked while tracing.

    With a padding mask one begins where a token's position is not beyond that of the token before it. Without, as in
    transformers, one begins where it is not the next.

    Args:
        position_ids: (B, T); those of padding mean nothing.
        padding_mask: (B, T), True for tokens that are not padding. One of another shape speaks of other tokens too, and
            then no documents are looked for.

    Returns:
        (B, T) document indices, counted from 0.
    """
    if padding_mask is None:
        begins = nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0))  # (B, T)
    elif padding_mask.shape == position_ids.shape:
        index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
        index = index.masked_fill(~padding_mask, -1).cummax(dim=-1).values  # (B, T), the last token at or before
        before = nn.functional.pad(index[:, :-1], (1, 0), value=-1)  # (B, T), the last token before
        position_before = position_ids.gather(1, before.clamp(min=0)).masked_fill(before < 0, -1)  # (B, T)
        begins = padding_mask & (position_ids <= position_before)
    else:
        return None
    # A trace serves all later calls, so it always tells documents apart.
    return begins.cumsum(dim=-1) if is_tracing(begins) or bool(begins.any()) else None
