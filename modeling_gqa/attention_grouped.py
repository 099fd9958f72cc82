"""MHA, MQA and GQA: one layer whose number of key/value heads is H, 1 or between (Ainslie et al., 2305.13245).

Shapes: B batch, T query tokens, S cached and new tokens, H query heads, G key/value heads, D head_dim.
"""

import torch
from torch import nn

from .attention_functions import ALL_ATTENTION_FUNCTIONS, eager_attention_forward
from .layers import GQARMSNorm
from .masks import filled_part, lone_layer_mask
from .rotary import frequency_indices, rotate, select_frequencies


class GroupedAttention(nn.Module):
    """Attention in which H / G query heads share a key/value head.

    Args:
        config: the model's configuration; the layer's own sizes are those of `config.per_layer_config[layer_idx]`.
        layer_idx: index of the layer, which is also its place in the cache.

    Raises:
        ValueError: the configuration asks for another attention kind in this layer.
    """

    kinds = ("mha", "mqa", "gqa")
    frequency_indices: torch.Tensor | None

    def __init__(self, config, layer_idx: int):
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        if layer.attention_kind not in self.kinds:
            raise ValueError(
                f"layer {layer_idx} has attention_kind={layer.attention_kind!r}: "
                "build it as ATTENTION_CLASSES[kind](config, layer_idx)"
            )
        # The model's own configuration, not the layer's copy: `set_attn_implementation` writes there.
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = layer.head_dim
        self.num_key_value_groups = layer.num_attention_heads // layer.num_key_value_heads
        self.scaling = layer.softmax_scale or self.head_dim**-0.5
        self.attention_dropout = layer.attention_dropout
        self.is_causal = True
        self.register_buffer("frequency_indices", frequency_indices(layer), persistent=False)

        hidden = config.hidden_size
        query_size, key_value_size = (
            heads * self.head_dim for heads in (layer.num_attention_heads, layer.num_key_value_heads)
        )
        query_bias, key_value_bias, output_bias = layer.projection_biases
        self.q_proj = nn.Linear(hidden, query_size, bias=query_bias)
        self.k_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
        self.v_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=output_bias)
        # One key/value head cannot be split over ranks, so its layer stays whole on each.
        self.tp_plan: dict[str, str] = {}
        if layer.num_key_value_heads > 1:
            self.tp_plan = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
            if layer.qk_norm:
                self.tp_plan |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
        self.q_norm = GQARMSNorm(self.head_dim, eps=config.rms_norm_eps) if layer.qk_norm else None
        self.k_norm = GQARMSNorm(self.head_dim, eps=config.rms_norm_eps) if layer.qk_norm else None

    @property
    def sliding_window(self) -> int | None:
        """The layer's window as the configuration has it now: the masks that a model builds follow it, too."""
        sliding = self.config.layer_types[self.layer_idx] == "sliding_attention"
        return self.config.sliding_window if sliding else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        key_value_states: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from each token to itself and the tokens before it.

        Args:
            hidden_states: (B, T, hidden).
            position_embeddings: cosine and sine (B, T, rotary size); no rotation where `None`.
            attention_mask: padding mask (B, S), or a finished mask (B, 1, T, S); a layer alone builds its own.
            past_key_values: cache to extend by the new keys and values.
            key_value_states: (B, S, hidden) to attend to instead; see `cross_attention`.
            kwargs: passed to the attention function; `is_causal=False` lets every token see all tokens.

        Returns:
            Output (B, T, hidden), and the weights (B, H, T, S) where the attention function gives them.
        """
        if key_value_states is not None:
            return self.cross_attention(hidden_states, key_value_states, attention_mask, **kwargs)
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(head_shape)  # (B, T, H, D)
        key = self.k_proj(hidden_states).view(head_shape)  # (B, T, G, D)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (B, H, T, D), (B, G, T, D)
        value = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)  # (B, G, T, D)
        if position_embeddings is not None:
            position_embeddings = select_frequencies(position_embeddings, self.frequency_indices)
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)  # (B, G, S, D)
            attention_mask, key, value = filled_part(self, attention_mask, past_key_values, key, value)

        backend = self.config._attn_implementation or "eager"
        window = self.sliding_window
        attention_mask = lone_layer_mask(
            self,
            hidden_states,
            attention_mask,
            key.shape[2],
            past_key_values,
            kwargs.get("is_causal"),
            window,
        )
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1)), weights  # (B, T, hidden)

    def cross_attention(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` (B, T, hidden) to all of `key_value_states` (B, S, hidden): no rotation, no
        cache; `attention_mask` (B, S) marks the keys to attend to. Returns what `forward` returns."""
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        key = self.k_proj(key_value_states).unflatten(-1, (-1, self.head_dim))  # (B, S, G, D)
        value = self.v_proj(key_value_states).unflatten(-1, (-1, self.head_dim))  # (B, S, G, D)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        backend = self.config._attn_implementation or "eager"
        attention_mask = lone_layer_mask(self, hidden_states, attention_mask, key.shape[2], is_causal=False)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **{**kwargs, "is_causal": False},
        )
        return self.o_proj(output.flatten(2)), weights  # (B, T, hidden)

    @staticmethod
    def parameter_counts(layer) -> tuple[int, int]:
        """Parameters of `config.per_layer_config[i]` in weight matrices, and in biases and norms."""
        query_bias, key_value_bias, output_bias = layer.projection_biases
        query_size, key_value_size = (
            heads * layer.head_dim for heads in (layer.num_attention_heads, layer.num_key_value_heads)
        )
        biases = query_bias * query_size + 2 * key_value_bias * key_value_size + output_bias * layer.hidden_size
        norms = 2 * layer.head_dim if layer.qk_norm else 0
        return 2 * layer.hidden_size * (query_size + key_value_size), biases + norms

    @staticmethod
    def cache_sizes(layer) -> tuple[int, int]:
        """Numbers that one token adds to the cache's keys and to its values: G D each."""
        return (layer.num_key_value_heads * layer.head_dim,) * 2

    @classmethod
    def multiplications(cls, layer, queries: int, keys: int, absorbed: bool = False) -> int:
        """Multiply-adds of one batch entry: projections of `queries` tokens, and 2 D a head, query and key.

        Sharing key/value heads saves memory, not operations; `absorbed` concerns latent attention alone.
        """
        projections, _ = cls.parameter_counts(layer)
        return queries * projections + queries * keys * layer.num_attention_heads * 2 * layer.head_dim
