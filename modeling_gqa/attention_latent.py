"""Latent attention, MLA: keys and values rebuilt from a cached low-rank latent (DeepSeek-V2, 2405.04434, eq. 9 to 19).

Shapes: B batch, T query tokens, S cached and new tokens, H query heads, R kv_lora_rank, P qk_rope_head_dim,
N qk_nope_head_dim, V v_head_dim; with qk_norm D qk_norm_head_dim, G qk_norm_key_value_heads.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention import SHARED_BY_RANKS, SPLIT_BY_HEADS, Attention, describe_norm
from .attention_functions import (
    ALL_ATTENTION_FUNCTIONS,
    CPU_HAS_AMX,
    eager_attention_forward,
    fused_attention,
    masked_softmax,
    with_scores,
)
from .cache_layers import is_paged
from .cache_quantized import CacheBasis, quantized_layer, tiled_attention
from .compatibility import is_tracing
from .configuration_gqa import GQAConfig
from .layers import (
    GQAHeadLinear,
    GQAKeyMean,
    head_norm,
    is_plain_linear,
    key_mean_size,
    multiply_by_head,
    plane_angles,
    rms_norm,
    rotate,
    scale_queries,
    select_frequencies,
)

# DeepSeek's latent norms use this whatever `rms_norm_eps` says; its checkpoints must keep their function here.
LATENT_NORM_EPS = 1e-6
# Attention functions of engines, by the beginning of their names: these pad values themselves, and join the heads of
# their output.
ENGINES = ("vllm", "sglang")
PLUGIN = "vllm_gqa"  # the name of that of `modeling_gqa_vllm`


class LatentAttention(Attention):
    """Multi-head latent attention: caches a latent of size R and one rotary key of size P per token.

    Long queries rebuild keys and values from the latent (expand). Short ones attend over the latent itself, with
    `kv_b_proj` folded into the query and the output (absorb).

    With `qk_norm` the latent c and the rotary key m are linear in what is there after the norms, y = [k; v]:
    k = k_norm(W_k x) of G heads, v = W_v x, [c; m] = W_a y. The query of head h is W_h q_norm(W_q,h x) with a
    matrix W_h of its own. y is computed for new tokens only; the cache holds R + P numbers as without the norms.

    With `key_mean` the scores also have those of a key that all tokens share before rotation. Of it nothing is cached
    but the tokens' positions in a `PositionedCache`. In other caches and in engines the rotary key ends with the
    cosine and sine of each plane, and the query with their factors.

    Arguments and errors as in `Attention`.
    """

    kinds = ("mla",)
    bits_fields = ("latent_bits", "rope_bits")
    rotary_place = 1

    def __init__(self, config: GQAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.per_layer_config[layer_idx]
        self.q_lora_rank = layer.q_lora_rank
        self.kv_lora_rank = layer.kv_lora_rank
        self.qk_nope_head_dim = layer.qk_nope_head_dim
        self.qk_rope_head_dim = layer.qk_rope_head_dim
        self.qk_head_dim = layer.qk_head_dim
        self.v_head_dim = layer.v_head_dim
        self.rope_interleave = layer.rope_interleave
        self.scaling = layer.softmax_scale or self.default_scale(layer)

        hidden, heads = config.hidden_size, layer.num_attention_heads
        query_bias, key_value_bias, output_bias = layer.projection_biases
        self.qk_norm_head_dim = layer.qk_norm_head_dim
        compressed = hidden
        if layer.qk_norm:
            size, key_value_heads = layer.qk_norm_head_dim, layer.qk_norm_key_value_heads
            key_value_size = key_value_heads * size
            self.q_proj = nn.Linear(hidden, heads * size, bias=query_bias)
            self.q_norm = head_norm(layer, heads, size)
            self.q_head_proj = GQAHeadLinear(heads, size, self.qk_head_dim)
            self.k_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
            self.k_norm = head_norm(layer, key_value_heads, size)
            self.v_proj = nn.Linear(hidden, key_value_size, bias=key_value_bias)
            compressed, key_value_bias = 2 * key_value_size, False
        elif self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * self.qk_head_dim, bias=query_bias)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=query_bias)
            self.q_a_layernorm = self._norm(layer, self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(compressed, self.kv_lora_rank + self.qk_rope_head_dim, bias=key_value_bias)
        self.kv_a_layernorm = self._norm(layer, self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden, bias=output_bias)
        self.key_mean = GQAKeyMean(heads, layer.rotary_dim) if layer.key_mean else None
        # `kv_b_proj` sums the gradient of the latent over the ranks, but the rotary key bypasses it.
        of_queries = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        self.tp_plan = {of_queries: "colwise", "kv_a_proj_with_mqa": SHARED_BY_RANKS}
        self.tp_plan |= {"kv_b_proj": "colwise", "o_proj": "rowwise"}
        if layer.qk_norm:
            self.tp_plan |= {"q_norm": "replicated_with_grad_allreduce", "q_head_proj": SPLIT_BY_HEADS}
        if layer.key_mean:
            self.tp_plan["key_mean"] = SPLIT_BY_HEADS
        if layer.norms_all_heads:
            self.tp_plan = {}  # no rank has all heads

    @staticmethod
    def _norm(layer: GQAConfig, size: int) -> nn.Module:
        return rms_norm(layer, size, LATENT_NORM_EPS) if layer.latent_norm else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        query_factors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over the latent, or over what is rebuilt from it; arguments and results as in `Attention.forward`."""
        projected = (scale_queries(x, query_factors) for x in self.project_query(hidden_states))
        query, query_rope = projected  # (B, H, T, N), (B, H, T, P)
        latent, key_rope = self.project_latent(hidden_states)  # (B, 1, T, R), (B, 1, T, P)
        held, factors, angles = kwargs.pop("held_tokens", None), None, None
        if position_embeddings is not None:
            if self.key_mean is not None:
                factors = self.key_mean(query, *position_embeddings)  # (B, H, T, 2 n)
                angles = plane_angles(*position_embeddings)  # (B or 1, T, 2 n)
            position_embeddings = select_frequencies(position_embeddings, self.frequency_indices)
            query_rope = rotate(query_rope, *position_embeddings, interleaved=self.rope_interleave)
            key_rope = rotate(key_rope, *position_embeddings, interleaved=self.rope_interleave)
        cached = past_key_values is not None or is_paged(kwargs, self.backend)
        if factors is not None and cached and held is None:
            refuse_without_positions(past_key_values, self.layer_idx)
            query_rope, key_rope = with_angles(query_rope, key_rope, factors, angles)  # P + 2 n in place of P
            factors = None
        basis = self.cache_basis(latent, past_key_values, position_embeddings, held)
        if basis is not None:
            latent, key_rope = basis.store(latent, key_rope)
        latent, key_rope, attention_mask, options = self.attend_to(
            hidden_states, latent, key_rope, attention_mask, past_key_values, kwargs, basis
        )  # (B, 1, S, R), (B, 1, S, P); of a quantized cache their bytes
        if factors is not None and cached:
            angles = held.angles[:, -latent.shape[2] :]  # (B or 1, S, 2 n)
        absorbs = cached and self.absorbs(query.shape[2], latent.shape[2], attention_mask)
        absorbs = absorbs and not (basis is not None and basis.learns)
        if factors is not None and absorbs:
            attention_mask = with_scores(attention_mask, angle_scores(factors * self.scaling, angles))
        if basis is not None and absorbs and self.backend == "sdpa":
            rows = latent, key_rope
            output = self.absorb_tiles(query, query_rope, rows, basis, attention_mask)  # (B, T, H, V)
            return self.o_proj(output.flatten(2)), None  # (B, T, hidden)
        if basis is not None:
            latent, key_rope = basis.read((latent, key_rope))
        if absorbs:
            output, weights = self.absorb(query, query_rope, latent, key_rope, attention_mask)  # (B, T, H, V)
            return self.o_proj(output.flatten(2)), weights  # (B, T, hidden)
        if factors is not None:
            refuse_without_plugin(self.backend, self.layer_idx)
            query_rope, key_rope = with_angles(query_rope, key_rope, factors, angles)
        query = torch.cat((query, query_rope), dim=-1)  # (B, H, T, N + P)
        key, value = self.expand_kv(latent, key_rope)  # (B, H, S, N + P), (B, H, S, V)
        padded = self.backend != "eager" and not self.backend.startswith(ENGINES)
        if padded:
            query, key, value = pad_heads(query, key, value)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.backend, eager_attention_forward)
        output, weights = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling, **options)
        output = output[..., : self.v_head_dim] if padded else output
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights  # (B, T, hidden)

    def project_query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated (B, H, T, N) and rotary part (B, H, T, P) of the queries of `hidden_states` (B, T, hidden)."""
        if self.qk_norm_head_dim is not None:
            query = self.split_heads(self.q_proj(hidden_states), self.qk_norm_head_dim, self.q_norm)  # (B, H, T, D)
            query = self.q_head_proj(query)  # (B, H, T, N + P)
        elif self.q_lora_rank is None:
            query = self.split_heads(self.q_proj(hidden_states), self.qk_head_dim)  # (B, H, T, N + P)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
            query = self.split_heads(query, self.qk_head_dim)  # (B, H, T, N + P)
        return query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

    def project_latent(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent (B, 1, T, R) and shared rotary key (B, 1, T, P) of `hidden_states` (B, T, hidden), as cached."""
        if self.qk_norm_head_dim is not None:
            key = self.k_proj(hidden_states).unflatten(-1, (-1, self.qk_norm_head_dim))  # (B, T, G, D)
            key = self.k_norm(key).flatten(2)  # (B, T, G D)
            hidden_states = torch.cat((key, self.v_proj(hidden_states)), dim=-1)  # (B, T, 2 G D)
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

    @property
    def can_absorb(self) -> bool:
        """Whether this layer, as it is now, can attend over the latent itself."""
        return not self.training and is_plain_linear(self.kv_b_proj) and self.backend in ("eager", "sdpa")

    def absorbs(self, length: int, kv_length: int, attention_mask: torch.Tensor | None) -> bool:
        """Whether attending over the latent is possible, with no more operations and memory than rebuilding takes.

        Per batch entry and head: expanding rebuilds S keys and values and attends with N + P and V numbers a pair;
        absorbing maps T queries and outputs and attends with R + P and R numbers a pair. Expanding holds N + P + V
        numbers a key, absorbing T scores. One token always absorbs.
        """
        # Several tokens without a mask are a prompt on an empty cache, masked by the attention function itself.
        masked = attention_mask is not None or length == 1
        if not masked or not self.can_absorb:
            return False
        rank, up = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
        pairs = length * kv_length
        rebuilt = self.qk_head_dim + self.v_head_dim
        expand = kv_length * rank * up + pairs * rebuilt
        absorb = length * rank * up + pairs * (2 * rank + self.qk_rope_head_dim)
        return length == 1 or (length <= rebuilt and absorb <= expand)

    def absorb(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`absorbed_attention_forward` with this layer's `kv_b_proj`; no weights are computed under sdpa."""
        weight, fused = self.kv_b_proj.weight, self.backend == "sdpa"
        return absorbed_attention_forward(
            query, query_rope, latent, key_rope, weight, attention_mask, self.scaling, fused=fused
        )

    def absorb_tiles(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        basis: CacheBasis,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """`absorb` over the rows of a quantized cache, read tile by tile; returns (B, T, H, V)."""
        up = self.kv_b_proj.weight.view(query.shape[1], -1, self.kv_lora_rank)  # (H, N + V, R)
        nope = self.qk_nope_head_dim
        queries = multiply_by_head(query, up[:, :nope]), query_rope  # (B, H, T, R), (B, H, T, P)
        output = tiled_attention(queries, rows, 0, basis, attention_mask, self.scaling)  # (B, H, T, R)
        output = multiply_by_head(output, up[:, nope:].mT)  # (B, H, T, V)
        return output.transpose(1, 2).contiguous()

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        bias = self.kv_a_proj_with_mqa.bias if is_plain_linear(self.kv_a_proj_with_mqa) else None
        if bias is None:
            return None, None
        latent, key_rope = bias[None].split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if self.rope_interleave:  # rotated keys are half-split
            key_rope = torch.cat((key_rope[:, 0::2], key_rope[:, 1::2]), dim=-1)
        return key_rope, latent if isinstance(self.kv_a_layernorm, nn.Identity) else None

    @staticmethod
    def default_scale(layer: GQAConfig) -> float:
        return layer.qk_head_dim**-0.5 * yarn_scale(layer.rope_parameters)

    @staticmethod
    def describe(layer: GQAConfig) -> str:
        """Such as `mla, 8 heads, R + P = 32 + 16`: query heads, and sizes of the latent and the rotary key."""
        norm = describe_norm(layer) or ("" if layer.latent_norm else ", no latent norm")
        sizes = f"R + P = {layer.kv_lora_rank} + {layer.qk_rope_head_dim}"
        return f"mla, {layer.num_attention_heads} heads, {sizes}{norm}{', key mean' if layer.key_mean else ''}"

    @staticmethod
    def parameter_counts(layer: GQAConfig) -> tuple[int, int]:
        """Parameters of a layer of `config.per_layer_config`: in weight matrices, and in biases and norms."""
        query_bias, key_value_bias, output_bias = layer.projection_biases
        hidden, rank, query_rank = layer.hidden_size, layer.kv_lora_rank, layer.q_lora_rank
        heads, cached = layer.num_attention_heads, rank + layer.qk_rope_head_dim
        query_size = heads * layer.qk_head_dim
        matrices = hidden * heads * layer.v_head_dim + rank * heads * (layer.qk_nope_head_dim + layer.v_head_dim)
        if layer.qk_norm:
            first, size = heads * layer.qk_norm_head_dim, layer.qk_norm_head_dim
            key_values = 2 * layer.qk_norm_key_value_heads * size
            matrices += hidden * (first + key_values) + query_size * size + key_values * cached
            norms = first + key_values // 2 if layer.norms_all_heads else 2 * size
        else:
            first, key_values = query_rank or query_size, cached
            matrices += hidden * (first + cached) + (query_rank or 0) * query_size
            norms = rank + (query_rank or 0) if layer.latent_norm else 0
        vectors = query_bias * first + key_value_bias * key_values + output_bias * hidden + norms
        return matrices, vectors + heads * key_mean_size(layer)

    @staticmethod
    def cache_shapes(layer: GQAConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size of what a layer caches: one latent (R) in place of keys, a rotary key (P) of values."""
        return (1, layer.kv_lora_rank), (1, layer.qk_rope_head_dim)

    @classmethod
    def multiplications(cls, layer: GQAConfig, queries: int, keys: int, absorbed: bool = False) -> int:
        """Multiply-adds of one batch entry: `kv_b_proj` is paid per key if expanded, per query if `absorbed`.

        A head, query and key take N + P + V expanded and 2 R + P absorbed (DeepSeek-V2, 2405.04434, section 2.1.2),
        and 2 n more with `key_mean`.
        """
        heads, rank, rope = layer.num_attention_heads, layer.kv_lora_rank, layer.qk_rope_head_dim
        up_projection = rank * heads * (layer.qk_nope_head_dim + layer.v_head_dim)
        projections = cls.parameter_counts(layer)[0] - up_projection
        pair = 2 * rank + rope if absorbed else layer.qk_head_dim + layer.v_head_dim
        pair += key_mean_size(layer)
        return queries * projections + (queries if absorbed else keys) * up_projection + queries * keys * heads * pair


def yarn_scale(rope_parameters: dict) -> float:
    """DeepSeek's correction of the softmax scale under YaRN: `(0.1 mscale_all_dim ln(factor) + 1) ** 2`."""
    mscale, factor = rope_parameters.get("mscale_all_dim", 0), rope_parameters.get("factor", 1.0)
    if rope_parameters["rope_type"] == "default" or not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2


def absorbed_attention_forward(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """MLA over the cached latent, `kv_b_proj` folded into query and output (DeepSeek-V2, 2405.04434, section 2.1.2).

    All heads share the latent, so heads and tokens of the query form the rows of one matrix product per batch entry.

    Args:
        query, query_rope: unrotated (B, H, T, N) and rotated (B, H, T, P) part of the queries.
        latent, key_rope: (B, 1, S, R) and (B, 1, S, P), as cached.
        kv_b_weight: (H (N + V), R), the weight of `kv_b_proj`.
        attention_mask: (B or 1, H or 1, T, S), additive or boolean; `None` attends everywhere.
        fused: no weights are asked for, so a fused kernel may be used where it is faster.

    Returns:
        Output (B, T, H, V), and weights (B, H, T, S) unless `fused`.
    """
    heads, length, nope = query.shape[1:]
    rank = latent.shape[-1]
    kv_b = kv_b_weight.view(heads, -1, rank)  # (H, N + V, R)
    query = multiply_by_head(query, kv_b[:, :nope])  # (B, H, T, R)
    joint = _joint_keys(latent, key_rope) if fused else None
    weights = None
    if joint is not None:
        # The values are the latent; the kernel wants them as long as the keys, so the rotary part comes along.
        query = torch.cat((query, query_rope), dim=-1)  # (B, H, T, R + P)
        output = fused_attention(query, joint, joint, attention_mask, scaling)[..., :rank]  # (B, H, T, R)
    else:
        latent, key_rope = latent.squeeze(1), key_rope.squeeze(1)  # (B, S, R), (B, S, P)
        scores = query.flatten(1, 2) @ latent.mT + query_rope.flatten(1, 2) @ key_rope.mT  # (B, H T, S)
        scores = scores.unflatten(1, (heads, length)) * scaling  # (B, H, T, S)
        weights = masked_softmax(scores, attention_mask, query.dtype)
        output = (weights.flatten(1, 2) @ latent).unflatten(1, (heads, length))  # (B, H, T, R)
    output = multiply_by_head(output, kv_b[:, nope:].mT)  # (B, H, T, V)
    return output.transpose(1, 2).contiguous(), None if fused else weights  # (B, T, H, V)


def _joint_keys(latent: torch.Tensor, key_rope: torch.Tensor) -> torch.Tensor | None:
    """[latent; rotary key] (B, 1, S, R + P) where the fused kernel over it is the fastest way, else `None`.

    `GrowingLayer` keeps both side by side, which makes it a view. A copy pays only where a CPU has no fast matrix
    products in the dtype: there, they are up to a hundred times slower than the fused kernel.
    """
    if latent.device.type != "cpu" or latent.requires_grad or key_rope.requires_grad or is_tracing(latent):
        return None
    size = latent.shape[-1] + key_rope.shape[-1]
    same_storage = latent.untyped_storage().data_ptr() == key_rope.untyped_storage().data_ptr()
    next_to = latent.storage_offset() + latent.shape[-1] == key_rope.storage_offset()
    if (
        same_storage
        and next_to
        and latent.stride() == key_rope.stride()
        and latent.stride(2) >= size
        and latent.stride(3) == 1
    ):
        return latent.as_strided((*latent.shape[:-1], size), latent.stride())
    reduced = latent.dtype in (torch.bfloat16, torch.float16)
    return torch.cat((latent, key_rope), dim=-1) if reduced and not CPU_HAS_AMX else None


def with_angles(
    query_rope: torch.Tensor, key_rope: torch.Tensor, factors: torch.Tensor, angles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary queries (B, H, T, P + 2 n) and keys (B, 1, S, P + 2 n) whose scores have those of a `GQAKeyMean`."""
    angles = angles.unsqueeze(1).expand(*key_rope.shape[:-1], -1)
    return torch.cat((query_rope, factors), dim=-1), torch.cat((key_rope, angles), dim=-1)


def refuse_without_positions(cache: Cache | None, layer_idx: int) -> None:
    """Raise `ValueError` for a quantized cache without its model, which alone tells the layer where tokens stand."""
    if quantized_layer(cache, layer_idx) is not None:
        raise ValueError(f"layer {layer_idx} has key_mean=True: give a quantized cache to the model, not to the layer")


def refuse_without_plugin(backend: str, layer_idx: int) -> None:
    """Raise `ValueError` in an engine that is not told of the angles behind the rotary key."""
    if backend.startswith(ENGINES) and backend != PLUGIN:
        raise ValueError(
            f"layer {layer_idx} has key_mean=True, by which its keys are longer than the configuration says: serve the "
            "model with modeling_gqa installed, or convert its source with --no-key-mean"
        )


def angle_scores(factors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Scores (B, H, T, S) of `factors` (B, H, T, 2 n) with `angles` (B or 1, S, 2 n); those of one row serve all.

    They are added to others that kernels do not round, so they are in at least float32.
    """
    dtype = torch.promote_types(factors.dtype, torch.float32)
    factors, angles = factors.to(dtype), angles.to(dtype)
    if len(angles) == 1:
        return nn.functional.linear(factors, angles[0])
    return factors @ angles.mT.unsqueeze(1)


def pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zero-pad the last dimensions to the largest, because fused kernels want one head size; no score changes."""
    size = max(tensor.shape[-1] for tensor in tensors)
    missing = [size - tensor.shape[-1] for tensor in tensors]
    # `pad` copies even where nothing is missing.
    return [nn.functional.pad(tensor, (0, n)) if n else tensor for tensor, n in zip(tensors, missing, strict=True)]
