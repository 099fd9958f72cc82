"""What all attention kinds share, and grouped attention: MHA, MQA and GQA.

Shapes: B batch, T query tokens, S cached and new tokens, H query heads, G key/value heads, D head_dim.

`docs/adding-a-kind.md` says how to add a kind. The tests iterate `ATTENTION_CLASSES`, in `modeling_gqa.py`, and the
presets.

Engines read a layer, some of it in the text of `forward`. vLLM (0.32, `models/transformers/fusers/attention.py` there)
refuses a model unless each layer has one module whose class's `forward`

- assigns a lookup in `ALL_ATTENTION_FUNCTIONS`, by that name, to a local variable and calls that variable exactly once,
- with `scaling=self.NAME`, where the attribute is the factor of the scores,

and which has `layer_idx` and the model's own `config`, whose `_attn_implementation` the engine sets. So each `forward`
ends in its own lookup and call, and what leads there is shared. `tests/test_engines.py` reads the classes as vLLM does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache

from .attention_functions import ALL_ATTENTION_FUNCTIONS, eager_attention_forward
from .cache_formats import BASES, CacheQuantization, CodedFormat, RowFormat
from .cache_layers import HeldTokens, is_paged
from .cache_quantized import (
    CacheBasis,
    Coordinates,
    QuantizedLayer,
    held_by,
    quantized_layer,
    reads_tiles,
    tiled_attention,
)
from .configuration_gqa import GQAConfig
from .layers import frequency_indices, head_norm, is_plain_linear, rotate, scale_queries, select_frequencies
from .masks import attended_part

# Our rules of tensor parallelism, beside those of transformers: each rank computes the whole output and uses it for its
# own query heads; a map by head, of which each rank has those of its own heads.
SHARED_BY_RANKS, SPLIT_BY_HEADS = "shared_by_ranks", "split_by_heads"


class Attention(nn.Module):
    """Base class of the attention kinds.

    A subclass sets `kinds` and `scaling`, and implements the methods that raise `NotImplementedError` here.

    Args:
        config: the model's configuration; the layer's own sizes are those of `config.per_layer_config[layer_idx]`.
        layer_idx: index of the layer, which is also its place in the cache.

    Raises:
        ValueError: the configuration asks for another attention kind in this layer.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    # Options of `cache_quantization` with the bits of what the kind caches, in the order of `cache_shapes`.
    bits_fields: ClassVar[tuple[str, str]] = ("key_bits", "value_bits")
    # Place there of the tensor that is rotated; the other one is not.
    rotary_place: ClassVar[int] = 0
    scaling: float
    frequency_indices: torch.Tensor | None
    cache_mean: torch.Tensor | None
    o_proj: nn.Linear

    def __init__(self, config: GQAConfig, layer_idx: int):
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        if layer.attention_kind not in self.kinds:
            raise ValueError(
                f"layer {layer_idx} has attention_kind={layer.attention_kind!r}: "
                "build it as ATTENTION_CLASSES[kind](config, layer_idx)"
            )
        formats: tuple[RowFormat | CodedFormat, ...] = ()
        if layer.cache_quantization is not None:
            try:
                options = CacheQuantization.of(layer.cache_quantization).by_layer(config.num_hidden_layers)
                formats = self.cache_formats(layer, options[layer_idx])
            except ValueError as error:
                raise ValueError(f"cache_quantization does not fit layer {layer_idx}: {error}") from None
        # Of the numbers that a token adds to the cache, in the order of `cache_shapes`; `None`: it was not measured.
        measured = layer.cache_quantization is not None and layer.cache_quantization.get("means")
        self.register_buffer("cache_mean", torch.zeros(sum(self.cache_sizes(layer))) if measured else None)
        # Of a layer with bits by blocks, the matrices that encode and decode what it caches: (2, C, C).
        for name, form in zip(self.bits_fields, formats, strict=False):
            self.register_buffer(BASES[name], torch.eye(form.channels).repeat(2, 1, 1) if form.own_basis else None)
        self.cached_shapes = self.cache_shapes(layer)
        # The model's own configuration, not the layer's copy: `set_attn_implementation` writes there.
        self.config = config
        self.layer_idx = layer_idx
        # Query heads per key/value head, as an attention function sees them.
        self.num_key_value_groups = layer.num_attention_heads // layer.num_key_value_heads
        self.attention_dropout = layer.attention_dropout
        self.is_causal = True
        # Rules of tensor parallelism for the layer's own modules; empty: the layer stays whole on each rank.
        self.tp_plan: dict[str, str] = {}
        # Heads of `k_proj` and `v_proj`, if they can be fewer than the ranks; `None` where no rank chooses among them.
        self.shared_heads: int | None = None
        indices = frequency_indices(layer)
        # accelerate offloads the buffers that are not persistent, and takes each for a tensor.
        self.register_buffer("frequency_indices", indices, persistent=indices is None)

    @property
    def backend(self) -> str:
        """Name of the attention implementation in the configuration now; "eager" where there is none."""
        name = self.config._attn_implementation or "eager"
        # In continuous batching transformers renames those with which a layer here updates the paged cache itself.
        return name.removeprefix("paged|") if name in ("paged|eager", "paged|sdpa") else name

    @property
    def sliding_window(self) -> int | None:
        """The layer's window in tokens as the configuration has it now, as in a model's masks; `None` without one."""
        sliding = self.config.layer_types[self.layer_idx] == "sliding_attention"
        return self.config.sliding_window if sliding else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        query_factors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from each token to itself and the tokens before it.

        Args:
            hidden_states: (B, T, hidden).
            position_embeddings: cosine and sine (B, T, rotary size); no rotation where `None`.
            attention_mask: padding mask (B, S), or a finished mask (B, 1, T, S); a layer alone builds its own.
            past_key_values: cache to extend by the new keys and values.
            query_factors: (B or 1, T), by which queries are multiplied; `None` for ones.
            kwargs: passed to the attention function; `is_causal=False` lets every token see all tokens.

        Returns:
            Output (B, T, hidden), and the weights (B, H, T, S) where the attention function gives them.
        """
        raise NotImplementedError

    @staticmethod
    def split_heads(x: torch.Tensor, size: int, norm: nn.Module | None = None) -> torch.Tensor:
        """Split (B, T, heads x size) into (B, heads, T, size); `norm` is applied to (B, T, heads, size)."""
        # -1 for the number of heads, because under tensor parallelism a rank has only some of them.
        x = x.view(*x.shape[:-1], -1, size)  # (B, T, heads, size)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def attend_to(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        past_key_values: Cache | None,
        kwargs: Any,
        basis: CacheBasis | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]:
        """Extend the cache by `key` and `value`, and find what `hidden_states` are to attend to.

        Args:
            key, value: those of the new tokens, as they are cached.
            kwargs: the keyword arguments of `forward`.
            basis: of a quantized cache.

        Returns:
            All keys and values, the mask, and the keyword arguments of the attention function but `scaling`.
        """
        if is_paged(kwargs, self.backend):
            from .integrations import update_paged

            key, value, kwargs = update_paged(self.layer_idx, key, value, kwargs, basis.cached if basis else None)
        elif past_key_values is not None:
            refuse_other_heads(past_key_values, key, value, self.layer_idx)
            key, value = past_key_values.update(key, value, self.layer_idx, **held_by(basis))
        window = self.sliding_window
        causal = kwargs.get("is_causal") is not False
        attention_mask, key, value = attended_part(
            self, hidden_states, attention_mask, key, value, past_key_values, causal, window
        )
        dropout = self.attention_dropout if self.training else 0.0
        return key, value, attention_mask, {"dropout": dropout, "sliding_window": window, **kwargs}

    def constants(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What all tokens are taken to have of the two tensors in the cache, (G, C) each: the rotated one comes first.

        Its constant is of numbers before rotation, whose pairs are half a head apart.
        """
        if self.cache_mean is None:
            return self.biases()
        parts = self.cache_mean.split([heads * size for heads, size in self.cached_shapes])
        constants = [part.view(shape) for part, shape in zip(parts, self.cached_shapes, strict=True)]
        return constants[self.rotary_place], constants[1 - self.rotary_place]

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`constants` of a layer without measured means: the biases of its projections, `None` without."""
        return None, None

    def cache_basis(
        self,
        new: torch.Tensor,
        past_key_values: Cache | None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        held: HeldTokens | None,
    ) -> CacheBasis | None:
        """How the layer's numbers go into a quantized cache; `None` where the cache keeps them as they are.

        Args:
            new: what is about to be cached.
            rotation: cosine and sine of the new tokens, of the layer's own frequencies.
            held: the tokens of the cache; without it no constant key is taken out.
        """
        cached = quantized_layer(past_key_values, self.layer_idx)
        if held is not None and held.formats:
            cached = QuantizedLayer(held.formats[self.layer_idx])
        if cached is None:
            return None
        if held is not None and held.position_embeddings is not None:
            held = replace(
                held, position_embeddings=select_frequencies(held.position_embeddings, self.frequency_indices)
            )
        if cached.means and self.cache_mean is None:
            raise ValueError(
                f"layer {self.layer_idx} of the model has no measured means: leave 'means' out of the options, or "
                "measure them by modeling-gqa quantize-cache with --text"
            )
        own = list(zip(self.bits_fields, cached.formats, self.cached_shapes, strict=True))
        for _, form, (heads, size) in own:
            if form.channels != size * (heads if form.own_basis else 1):
                raise ValueError(
                    f"the cache rounds {form.channels} numbers together, and layer {self.layer_idx} caches {heads} x "
                    f"{size}: it is of another model"
                )
        first, second = (self._coordinates(new, name, form, heads) for name, form, (heads, _) in own)
        return CacheBasis(cached, (first, second), self.rotary_place, *self.constants(), rotation, held)

    def _coordinates(self, new: torch.Tensor, name: str, form: RowFormat | CodedFormat, heads: int) -> Coordinates:
        """The basis of the tensor whose bits the option `name` says, of `heads` heads."""
        if isinstance(form, CodedFormat):
            basis = getattr(self, BASES[name], None)
            if basis is None:
                raise ValueError(f"layer {self.layer_idx} of the checkpoint has no basis for {name} by blocks")
            encoder, decoder = basis
            return Coordinates(encoder, decoder, heads)
        matrix = form.mixing_matrix(new.dtype, new.device)
        return Coordinates(matrix, matrix)

    @staticmethod
    def default_scale(layer: GQAConfig) -> float:
        """The factor of the scores of a layer of `config.per_layer_config` without a `softmax_scale`."""
        raise NotImplementedError

    @staticmethod
    def describe(layer: GQAConfig) -> str:
        """A layer of `config.per_layer_config` in a few words: its kind, heads and what it caches."""
        raise NotImplementedError

    @staticmethod
    def parameter_counts(layer: GQAConfig) -> tuple[int, int]:
        """Parameters of a layer of `config.per_layer_config`: in weight matrices, and in biases and norms."""
        raise NotImplementedError

    @staticmethod
    def cache_shapes(layer: GQAConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size of the keys, and of the values, that a layer caches."""
        raise NotImplementedError

    @classmethod
    def cache_formats(
        cls, layer: GQAConfig, options: CacheQuantization
    ) -> tuple[RowFormat | CodedFormat, RowFormat | CodedFormat]:
        """How the rows of a head look in a quantized cache, in the order of `cache_shapes`."""
        return options.formats(cls.bits_fields, cls.cache_shapes(layer))

    @classmethod
    def rounded_bytes(cls, layer: GQAConfig, formats: Sequence[RowFormat | CodedFormat]) -> int:
        """Bytes that one token adds to a quantized cache of these `formats`."""
        shapes = zip(cls.cache_shapes(layer), formats, strict=True)
        return sum((1 if form.own_basis else heads) * form.row_bytes for (heads, _), form in shapes)

    @classmethod
    def cache_sizes(cls, layer: GQAConfig) -> tuple[int, int]:
        """Numbers that one token adds to a layer's cached keys and to its cached values."""
        (heads, size), (value_heads, value_size) = cls.cache_shapes(layer)
        return heads * size, value_heads * value_size

    @classmethod
    def multiplications(cls, layer: GQAConfig, queries: int, keys: int, absorbed: bool = False) -> int:
        """Multiply-adds of one batch entry: projections of `queries` tokens, and attention of each to `keys` tokens.

        `absorbed` chooses between the two ways to compute latent attention; other kinds ignore it.
        """
        raise NotImplementedError


class GroupedAttention(Attention):
    """MHA, MQA and GQA: H / G query heads share a key/value head (Ainslie et al., 2305.13245).

    G is H for MHA, 1 for MQA and between them for GQA. Arguments and errors as in `Attention`.
    """

    kinds: ClassVar[tuple[str, ...]] = ("mha", "mqa", "gqa")

    def __init__(self, config: GQAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.per_layer_config[layer_idx]
        self.head_dim = layer.head_dim
        self.scaling = layer.softmax_scale or self.default_scale(layer)
        hidden = config.hidden_size
        heads, key_value_heads = layer.num_attention_heads, layer.num_key_value_heads
        query_size, key_value_size = heads * self.head_dim, key_value_heads * self.head_dim
        query_bias, key_value_bias, output_bias = layer.projection_biases
        self.q_proj = nn.Linear(hidden, query_size, bias=query_bias)
        self.k_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
        self.v_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=output_bias)
        # One key/value head cannot be split over ranks, so each computes it.
        self.shared_heads = key_value_heads
        of_keys = "colwise" if self.shared_heads > 1 else SHARED_BY_RANKS
        self.tp_plan = {"q_proj": "colwise", "k_proj": of_keys, "v_proj": of_keys, "o_proj": "rowwise"}
        if layer.qk_norm:
            self.tp_plan |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
        self.q_norm = head_norm(layer, heads, self.head_dim) if layer.qk_norm else None
        self.k_norm = head_norm(layer, key_value_heads, self.head_dim) if layer.qk_norm else None
        if layer.norms_all_heads:
            self.tp_plan = {}  # no rank has all heads

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        query_factors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with softmax(Q K^T scaling) V per head; arguments and results as in `Attention.forward`."""
        query = self.split_heads(self.q_proj(hidden_states), self.head_dim, self.q_norm)  # (B, H, T, D)
        key = self.split_heads(self.k_proj(hidden_states), self.head_dim, self.k_norm)  # (B, G, T, D)
        value = self.split_heads(self.v_proj(hidden_states), self.head_dim)  # (B, G, T, D)
        if position_embeddings is not None:
            position_embeddings = select_frequencies(position_embeddings, self.frequency_indices)
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        query = scale_queries(query, query_factors)
        basis = self.cache_basis(key, past_key_values, position_embeddings, kwargs.pop("held_tokens", None))
        if basis is not None:
            key, value = basis.store(key, value)
        key, value, attention_mask, options = self.attend_to(
            hidden_states, key, value, attention_mask, past_key_values, kwargs, basis
        )  # (B, G, S, D); of a quantized cache their bytes
        tiled = basis is not None and not (self.training or basis.learns) and self.backend == "sdpa"
        if basis is not None and tiled and reads_tiles(query, attention_mask):
            output = tiled_attention((query,), (key, value), 1, basis, attention_mask, self.scaling)  # (B, H, T, D)
            return self.o_proj(output.transpose(1, 2).flatten(2)), None  # (B, T, hidden)
        if basis is not None:
            key, value = basis.read((key, value))
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.backend, eager_attention_forward)
        output, weights = attention_interface(
            self, query, key, value, attention_mask, scaling=self.scaling, **options
        )  # (B, T, H, D)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights  # (B, T, hidden)

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        key, value = (
            projection.bias.view(-1, self.head_dim)
            if is_plain_linear(projection) and projection.bias is not None
            else None
            for projection in (self.k_proj, self.v_proj)
        )
        return (key if self.k_norm is None else None), value

    @staticmethod
    def default_scale(layer: GQAConfig) -> float:
        return layer.head_dim**-0.5

    @staticmethod
    def describe(layer: GQAConfig) -> str:
        """Such as `gqa, 2 of 8 heads of 64`: key/value heads, query heads and their size."""
        heads = f"{layer.num_key_value_heads} of {layer.num_attention_heads} heads of {layer.head_dim}"
        unrotated = ", no rotation" if layer.rope_frequency_indices == [] else ""
        return f"{layer.attention_kind}, {heads}{describe_norm(layer)}{unrotated}"

    @staticmethod
    def parameter_counts(layer: GQAConfig) -> tuple[int, int]:
        """Parameters of a layer of `config.per_layer_config`: in weight matrices, and in biases and norms."""
        query_bias, key_value_bias, output_bias = layer.projection_biases
        query_size, key_value_size = (
            heads * layer.head_dim for heads in (layer.num_attention_heads, layer.num_key_value_heads)
        )
        biases = query_bias * query_size + 2 * key_value_bias * key_value_size + output_bias * layer.hidden_size
        norms = (query_size + key_value_size if layer.norms_all_heads else 2 * layer.head_dim) if layer.qk_norm else 0
        return 2 * layer.hidden_size * (query_size + key_value_size), biases + norms

    @staticmethod
    def cache_shapes(layer: GQAConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size of the keys, and of the values, that a layer caches: G and D of both."""
        return ((layer.num_key_value_heads, layer.head_dim),) * 2

    @classmethod
    def multiplications(cls, layer: GQAConfig, queries: int, keys: int, absorbed: bool = False) -> int:
        """Multiply-adds of one batch entry: projections of `queries` tokens, and 2 D a head, query and key.

        Sharing key/value heads saves memory, not operations; `absorbed` concerns latent attention alone.
        """
        projections, _ = cls.parameter_counts(layer)
        return queries * projections + queries * keys * layer.num_attention_heads * 2 * layer.head_dim


def describe_norm(layer: GQAConfig) -> str:
    """How queries and keys are normed, as `describe` ends with it."""
    over = " over all heads" if layer.norms_all_heads else ""
    return f", qk-norm{over}" if layer.qk_norm else ""


def refuse_other_heads(cache: Cache, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> None:
    """Raise `ValueError` where `cache` holds other heads than `key` (B, G, T, D) and `value`, as of prefix tuning.

    PEFT's prefix tuning makes keys of the model's heads, where MLA caches its latent and mixed models differ by layer.
    """
    known = layer_idx < len(cache.layers) and quantized_layer(cache, layer_idx) is None
    for name, new in (("keys", key), ("values", value)) if known else ():
        held = getattr(cache.layers[layer_idx], name, None)
        if held is not None and held.ndim == 4 and (held.shape[1], held.shape[3]) != (new.shape[1], new.shape[3]):
            raise ValueError(
                f"the cache holds {name} of {held.shape[1]} x {held.shape[3]} numbers a token, and layer {layer_idx} "
                f"caches {new.shape[1]} x {new.shape[3]}: it is of another model; or of prefix tuning, which can adapt "
                "neither MLA nor layers that differ, where LoRA and prompt tuning can; or, with key_mean=True, made of "
                "another cache's tensors, which copy.deepcopy copies with their positions"
            )
