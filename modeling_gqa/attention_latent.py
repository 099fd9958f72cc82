"""MLA: keys and values rebuilt from a cached low-rank latent (DeepSeek-V2, 2405.04434, eq. 9 to 19).

Shapes: B batch, T query tokens, S cached and new tokens, H query heads, R kv_lora_rank, P qk_rope_head_dim,
N qk_nope_head_dim, V v_head_dim.
"""

import math

import torch
from torch import nn

from .attention_functions import (
    ALL_ATTENTION_FUNCTIONS,
    absorbed_attention_forward,
    eager_attention_forward,
    pad_heads,
)
from .layers import GQARMSNorm, is_plain_linear
from .masks import filled_part, lone_layer_mask
from .rotary import frequency_indices, rotate, select_frequencies

# DeepSeek's latent norms use this whatever `rms_norm_eps` says; its checkpoints must keep their function here.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention: caches a latent of size R and one rotary key of size P per token.

    Long queries rebuild keys and values from the latent (expand); short ones attend over the latent itself, with
    `kv_b_proj` folded into the query and the output (absorb).

    Args:
        config: the model's configuration; the layer's own sizes are those of `config.per_layer_config[layer_idx]`.
        layer_idx: index of the layer, which is also its place in the cache.

    Raises:
        ValueError: the configuration asks for another attention kind in this layer.
    """

    kinds = ("mla",)
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
        self.q_lora_rank = layer.q_lora_rank
        self.kv_lora_rank = layer.kv_lora_rank
        self.qk_nope_head_dim = layer.qk_nope_head_dim
        self.qk_rope_head_dim = layer.qk_rope_head_dim
        self.qk_head_dim = layer.qk_head_dim
        self.v_head_dim = layer.v_head_dim
        self.rope_interleave = layer.rope_interleave
        # What an attention function sees are H expanded key/value heads.
        self.num_key_value_groups = 1
        self.scaling = layer.softmax_scale or self.qk_head_dim**-0.5 * _yarn_scale(config.rope_parameters)
        self.attention_dropout = layer.attention_dropout
        self.is_causal = True
        self.register_buffer("frequency_indices", frequency_indices(layer), persistent=False)

        hidden, heads = config.hidden_size, layer.num_attention_heads
        query_bias, key_value_bias, output_bias = layer.projection_biases
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * self.qk_head_dim, bias=query_bias)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=query_bias)
            self.q_a_layernorm = self._norm(layer, self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, heads * self.qk_head_dim, bias=False)
        # The rotary key bypasses kv_b_proj: with heads split over ranks its gradient would have to be summed.
        self.tp_plan: dict[str, str] = {}
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=key_value_bias)
        self.kv_a_layernorm = self._norm(layer, self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden, bias=output_bias)

    @staticmethod
    def _norm(layer, size: int) -> nn.Module:
        return GQARMSNorm(size, eps=LATENT_NORM_EPS) if layer.latent_norm else nn.Identity()

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
        """Attend from each token to itself and the tokens before it; arguments and results as in `GroupedAttention`."""
        if key_value_states is not None:
            return self.cross_attention(hidden_states, key_value_states, attention_mask, **kwargs)
        query, query_rope = self.project_query(hidden_states)
        latent, key_rope = self.project_latent(hidden_states)
        if position_embeddings is not None:
            position_embeddings = select_frequencies(position_embeddings, self.frequency_indices)
            query_rope = rotate(query_rope, *position_embeddings, interleaved=self.rope_interleave)
            key_rope = rotate(key_rope, *position_embeddings, interleaved=self.rope_interleave)
        if past_key_values is not None:
            latent, key_rope = past_key_values.update(latent, key_rope, self.layer_idx)  # (B, 1, S, R), (B, 1, S, P)
            attention_mask, latent, key_rope = filled_part(self, attention_mask, past_key_values, latent, key_rope)

        backend = self.config._attn_implementation or "eager"
        window = self.sliding_window
        attention_mask = lone_layer_mask(
            self,
            hidden_states,
            attention_mask,
            latent.shape[2],
            past_key_values,
            kwargs.get("is_causal"),
            window,
        )
        if past_key_values is not None and self.absorbs(query.shape[2], latent.shape[2], attention_mask):
            output, weights = absorbed_attention_forward(
                query,
                query_rope,
                latent,
                key_rope,
                self.kv_b_proj.weight,
                attention_mask,
                self.scaling,
                fused=backend == "sdpa",
            )
            return self.o_proj(output.flatten(2)), weights  # (B, T, hidden)

        query = torch.cat((query, query_rope), dim=-1)  # (B, H, T, N + P)
        key, value = self.expand_kv(latent, key_rope)  # (B, H, S, N + P), (B, H, S, V)
        if backend != "eager":
            query, key, value = pad_heads(query, key, value)
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
        return self.o_proj(output[..., : self.v_head_dim].flatten(2)), weights  # (B, T, hidden)

    def cross_attention(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` (B, T, hidden) to all of `key_value_states` (B, S, hidden): no rotation, no
        cache; `attention_mask` (B, S) marks the keys to attend to. Returns what `forward` returns."""
        query = torch.cat(self.project_query(hidden_states), dim=-1)  # (B, H, T, N + P)
        key, value = self.expand_kv(*self.project_latent(key_value_states))  # (B, H, S, N + P), (B, H, S, V)
        backend = self.config._attn_implementation or "eager"
        attention_mask = lone_layer_mask(self, hidden_states, attention_mask, key.shape[2], is_causal=False)
        if backend != "eager":
            query, key, value = pad_heads(query, key, value)
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
        return self.o_proj(output[..., : self.v_head_dim].flatten(2)), weights  # (B, T, hidden)

    def project_query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated (B, H, T, N) and rotary part (B, H, T, P) of the queries of `hidden_states` (B, T, hidden)."""
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)  # (B, H, T, N + P)
        return query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

    def project_latent(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent (B, 1, T, R) and shared rotary key (B, 1, T, P) of `hidden_states` (B, T, hidden), as cached."""
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, key_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent).unsqueeze(1), key_rope.unsqueeze(1)  # (B, 1, T, R), (B, 1, T, P)

    def expand_kv(self, latent: torch.Tensor, key_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rebuild keys (B, H, S, N + P) and values (B, H, S, V) from `latent` (B, 1, S, R) and `key_rope`."""
        expanded = self.kv_b_proj(latent.squeeze(1))
        expanded = expanded.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).transpose(1, 2)
        key, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)  # (B, H, S, N), (B, H, S, V)
        key_rope = key_rope.expand(-1, key.shape[1], -1, -1)  # (B, H, S, P)
        return torch.cat((key, key_rope), dim=-1), value

    def absorbs(self, length: int, kv_length: int, attention_mask: torch.Tensor | None) -> bool:
        """Whether attending over the latent is possible and takes no more operations than rebuilding from it.

        Per batch entry and head: expanding rebuilds S keys and values and attends with N + P and V numbers a pair;
        absorbing maps T queries and outputs and attends with R + P and R numbers a pair. One token always absorbs.
        """
        backend = self.config._attn_implementation or "eager"
        # Several tokens without a mask are a prompt on an empty cache, masked by the attention function itself.
        masked = attention_mask is not None or length == 1
        if self.training or not is_plain_linear(self.kv_b_proj) or not masked or backend not in ("eager", "sdpa"):
            return False
        rank, up = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
        pairs = length * kv_length
        expand = kv_length * rank * up + pairs * (self.qk_head_dim + self.v_head_dim)
        absorb = length * rank * up + pairs * (2 * rank + self.qk_rope_head_dim)
        return length == 1 or absorb <= expand

    @staticmethod
    def parameter_counts(layer) -> tuple[int, int]:
        """Parameters of `config.per_layer_config[i]` in weight matrices, and in biases and norms."""
        query_bias, key_value_bias, output_bias = layer.projection_biases
        hidden, rank, query_rank = layer.hidden_size, layer.kv_lora_rank, layer.q_lora_rank
        query_size = layer.num_attention_heads * layer.qk_head_dim
        value_size = layer.num_attention_heads * layer.v_head_dim
        first = query_rank or query_size
        matrices = hidden * (first + rank + layer.qk_rope_head_dim + value_size)
        matrices += (query_rank or 0) * query_size
        matrices += rank * layer.num_attention_heads * (layer.qk_nope_head_dim + layer.v_head_dim)
        biases = query_bias * first + key_value_bias * (rank + layer.qk_rope_head_dim) + output_bias * hidden
        return matrices, biases + (rank + (query_rank or 0) if layer.latent_norm else 0)

    @staticmethod
    def cache_sizes(layer) -> tuple[int, int]:
        """Numbers that one token adds to the cache: the latent (R) in place of keys, the rotary key (P) of values."""
        return layer.kv_lora_rank, layer.qk_rope_head_dim

    @classmethod
    def multiplications(cls, layer, queries: int, keys: int, absorbed: bool = False) -> int:
        """Multiply-adds of one batch entry: `kv_b_proj` is paid per key if expanded, per query if `absorbed`.

        A head, query and key take N + P + V expanded and 2 R + P absorbed (DeepSeek-V2, 2405.04434, section 2.1.2).
        """
        heads, rank, rope = layer.num_attention_heads, layer.kv_lora_rank, layer.qk_rope_head_dim
        up_projection = rank * heads * (layer.qk_nope_head_dim + layer.v_head_dim)
        projections = cls.parameter_counts(layer)[0] - up_projection
        pair = 2 * rank + rope if absorbed else layer.qk_head_dim + layer.v_head_dim
        return queries * projections + (queries if absorbed else keys) * up_projection + queries * keys * heads * pair


def _yarn_scale(rope_parameters: dict) -> float:
    """DeepSeek's correction of the softmax scale under YaRN: `(0.1 mscale_all_dim ln(factor) + 1) ** 2`."""
    mscale, factor = rope_parameters.get("mscale_all_dim", 0), rope_parameters.get("factor", 1.0)
    if rope_parameters["rope_type"] == "default" or not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2
