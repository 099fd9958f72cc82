"""The parts of a model beside attention: norms, MLP, multipliers, maps by head, embeddings, chunked loss.

Rotary embedding is that of Su et al. (2104.09864, eq. 34), half-split and interleaved.

Shapes: B batch, T tokens, H heads, P rotated dimensions of a head.
"""

import copy
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

from .compatibility import CACHE, is_tracing, optional
from .configuration_checks import CHANGING, QUERY_SCALING, ROPE_INIT_FUNCTIONS
from .configuration_gqa import GQAConfig


def _without_updates(forward: Callable) -> Callable:
    @wraps(forward)
    def wrapper(self, x: torch.Tensor, position_ids: torch.Tensor):
        if self.rope_type in CHANGING:
            raise ValueError(f"this release of transformers cannot compute rope_type={self.rope_type!r} for this model")
        return forward(self, x, position_ids)

    return wrapper


dynamic_rope_update = optional(
    "transformers.modeling_rope_utils",
    "dynamic_rope_update",
    _without_updates,
    "models of rope_type 'dynamic' or 'longrope' cannot be used",
)
ForCausalLMLoss = optional(
    "transformers.loss.loss_utils", "ForCausalLMLoss", None, "large training steps compute all logits at once"
)


class GQARMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, 1910.07467, eq. 4), in at least float32."""

    offset = 0.0  # what is added to the weights

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if hidden_states.dtype != weight.dtype:  # under autocast
            dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        return torch.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class GQAZeroCenteredRMSNorm(GQARMSNorm):
    """RMSNorm that multiplies by 1 + weight, and rounds to the dtype of its input at the end, as in Gemma 3."""

    offset = 1.0

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__(hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # This branch keeps vLLM from tracing the norm, which it would take for one that multiplies by `weight`.
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        factor = self.offset + self.weight.to(dtype)
        normed = torch.rms_norm(hidden_states.to(dtype), factor.shape, factor, self.variance_epsilon)
        return normed.to(hidden_states.dtype)


class GQAHeadsRMSNorm(GQARMSNorm):
    """RMSNorm over all heads of a token at once, of `hidden_states` (..., heads, size), as in OLMo 2 (2501.00656)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.flatten(-2)).view_as(hidden_states)


class GQAZeroCenteredHeadsRMSNorm(GQAHeadsRMSNorm, GQAZeroCenteredRMSNorm):
    """RMSNorm over all heads that multiplies by 1 + weight."""


def rms_norm(config: GQAConfig, size: int, eps: float | None = None) -> GQARMSNorm:
    """The norm of `size` numbers, with `rms_norm_eps` unless another `eps` is given."""
    norm = GQAZeroCenteredRMSNorm if config.zero_centered_norms else GQARMSNorm
    return norm(size, config.rms_norm_eps if eps is None else eps)


def head_norm(layer: GQAConfig, heads: int, size: int) -> GQARMSNorm:
    """The norm of `heads` heads of queries or keys, over what `qk_norm_span` says."""
    if layer.qk_norm_span == "head":
        return rms_norm(layer, size)
    norm = GQAZeroCenteredHeadsRMSNorm if layer.zero_centered_norms else GQAHeadsRMSNorm
    return norm(heads * size, layer.rms_norm_eps)


class GQAScaledEmbedding(nn.Embedding):
    """Embedding times the root of its size, which is rounded to the dtype of the weights, as in Gemma 3."""

    @property
    def embed_scale(self) -> torch.Tensor:
        """The factor, by the name that PEFT looks for."""
        return torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.embed_scale


class GQAMLP(nn.Module):
    """Gated feed-forward block, `down(act(gate(x)) * up(x))` (Shazeer, 2002.05202, eq. 5)."""

    def __init__(self, config: GQAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GQAMultiplier(nn.Module):
    """Multiplication by a fixed number, by which Granite keeps muP's scales (2203.03466) apart from its weights."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"


def multiplier(factor: float) -> nn.Module:
    """A `GQAMultiplier`, or where there is nothing to do an identity."""
    return nn.Identity() if factor == 1 else GQAMultiplier(factor)


class GQAHeadLinear(nn.Module):
    """A linear map without bias for each head, from `in_features` to `out_features` numbers.

    It is no `nn.Linear`, because tools that replace or wrap those would give every head the maps of all heads.
    """

    def __init__(self, heads: int, in_features: int, out_features: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * out_features, in_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as in nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` (B, H, T, in_features) to (B, H, T, out_features)."""
        return multiply_by_head(x, self.weight.unflatten(0, (x.shape[1], -1)).mT)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"


class GQAKeyMean(nn.Module):
    """A key for each head that all tokens share before rotation: of its scores only the query's factors are computed.

    Turned by the angle a of a token, a plane (m1, m2) of it and that of a rotated query have the product
    cos a (q1 m1 + q2 m2) + sin a (q2 m1 - q1 m2). What stands in brackets is independent of the token.

    Args:
        heads: number of query heads H.
        size: rotated dimensions 2 n of the key.
    """

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.zeros(heads * size))  # by that name optimizers do not decay it

    def forward(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Factors (B, H, T, 2 n) of `plane_angles` in the scores of unrotated queries (B, H, T, at least 2 n).

        `cos` and `sin`: (B or 1, T, 2 n), of the queries' positions.
        """
        first, second = rotate(query[..., : self.size], cos, sin).chunk(2, dim=-1)
        one, two = self.bias.view(-1, 1, self.size).chunk(2, dim=-1)  # (H, 1, n)
        return torch.cat((first * one + second * two, second * one - first * two), dim=-1)

    def extra_repr(self) -> str:
        return f"{len(self.bias) // self.size} heads of {self.size}"


def key_mean_size(layer: GQAConfig) -> int:
    """Dimensions 2 n of the key that all tokens share, 0 without `key_mean`."""
    return layer.rotary_dim if layer.key_mean else 0


def plane_angles(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Cosines and then sines of n planes, (B, T, 2 n), from those of all their dimensions, (B, T, 2 n) each."""
    size = cos.shape[-1]
    return torch.where(torch.arange(size, device=cos.device) < size // 2, cos, sin)  # autocast joins no float16


def multiply_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply each head of `x` (B, H, T, n) with its matrix in `weight` (H, n, m), which is not copied per row."""
    batch, _, length, _ = x.shape
    x = x.transpose(0, 1).flatten(1, 2) @ weight  # (H, B T, m)
    return x.unflatten(1, (batch, length)).transpose(0, 1)  # (B, H, T, m)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether using `module.weight` directly is the same as calling `module`.

    A wrapped, quantized, sharded or offloaded layer does more than its weight says, or lacks it.
    """
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or type(weight) is not nn.Parameter or weight.is_meta:
        return False
    return weight.shape == (module.out_features, module.in_features)


class GQARotaryEmbedding(nn.Module):
    """Cosine and sine of every token's angles, for layers of the same `rotary_dim` as layer `layer_idx`.

    transformers' `_init_weights` finds it by its name and its attributes `rope_type`, `original_inv_freq` and
    `compute_default_rope_parameters`.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: GQAConfig, layer_idx: int = 0):
        super().__init__()
        config = copy.copy(config.per_layer_config[layer_idx])
        config.head_dim = config.rotary_dim  # where transformers' functions read the size
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = compute(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: GQAConfig, device=None, seq_len=None) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `theta ** (-2 i / P)` of the P / 2 planes, and the factor of cosine and sine (1)."""
        dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each (B, T, P) in the dtype of `x`, for `position_ids` (B, T)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(x.device, dtype)  # (B, T, P / 2)
        angles = torch.cat((angles, angles), dim=-1)  # (B, T, P)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def frequency_indices(layer: GQAConfig) -> torch.Tensor | None:
    """`rope_frequency_indices` of `config.per_layer_config[i]` as an index, `None` for the standard frequencies."""
    indices = layer.rope_frequency_indices
    return None if indices is None else torch.tensor(indices, dtype=torch.int64)


def select_frequencies(
    position_embeddings: tuple[torch.Tensor, torch.Tensor], indices: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (B, T, 2 n) of the n planes `indices` of those given (B, T, P), all of them for `None`."""
    if indices is None:
        return position_embeddings
    cos, sin = position_embeddings
    twice = torch.cat((indices, indices))
    return cos.index_select(-1, twice), sin.index_select(-1, twice)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first P dimensions of each head and leave the others as they are.

    Args:
        x: queries or keys (B, heads, T, D) with D >= P.
        cos, sin: (B, T, P), as `GQARotaryEmbedding` returns them.
        interleaved: the pairs of `x` are neighbours instead of half a head apart; the result is half-split all the
            same, which changes no score because queries and keys are permuted alike.
    """
    size = cos.shape[-1]
    if size == 0:
        return x
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, interleaved), x[..., size:]), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, P)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)


def query_factors(
    rope_parameters: dict[str, Any], position_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Factors (B or 1, T) of queries at `position_ids` (B or 1, T), `None` for ones, by `llama_4_scaling_beta`.

    They are 1 + beta ln(1 + floor(position / original_max_position_embeddings)), as in Ministral 3.
    """
    beta = rope_parameters.get(QUERY_SCALING)
    if not beta:
        return None
    # Padding has positions that mean nothing, and may have -1.
    position_ids = position_ids.clamp(min=0).to(torch.promote_types(dtype, torch.float32))
    lengths = torch.floor(position_ids / rope_parameters["original_max_position_embeddings"])
    return (1 + beta * torch.log(1 + lengths)).to(dtype)


def scale_queries(query: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Queries (B, H, T, D) times their `factors` (B or 1, T), `None` for ones."""
    return query if factors is None else query * factors[:, None, :, None].to(query.dtype)


def can_chunk_loss(lm_head: nn.Module, hidden_states: torch.Tensor, loss_function: Callable) -> bool:
    """Whether the loss of `lm_head(hidden_states)` is that of `chunked_causal_lm_loss`: stock head, stock loss."""
    available = hasattr(nn.functional, "linear_cross_entropy")  # torch 2.13
    plain = is_plain_linear(lm_head) and lm_head.bias is None and lm_head.weight.device == hidden_states.device
    return available and plain and loss_function is ForCausalLMLoss


class ChunkedLossOutput(CausalLMOutputWithPast):
    """Output of a training step whose loss was computed in chunks: reading its `logits` raises `AttributeError`."""

    # Those of the dataclass would read the logits.
    __repr__ = dict.__repr__

    def __reduce__(self):
        return CausalLMOutputWithPast, (self.loss, None, getattr(self, CACHE), self.hidden_states, self.attentions)

    @property
    def logits(self):
        # Of this type, so that `getattr(outputs, "logits", None)` and `hasattr` know of none.
        raise AttributeError(
            "a training step as large as this computes its loss in chunks and returns no logits: call the model with "
            "output_logits=True, or set model.logits_at_once = None"
        )

    @logits.setter
    def logits(self, value):
        """Take the `None` that the dataclass sets."""


def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    logits_at_once: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute transformers' `ForCausalLMLoss` of the logits `hidden_states @ weight.T`, never holding all of them.

    The gradients are computed in the forward pass, chunk by chunk.

    Args:
        hidden_states: (B, T, hidden).
        weight: (vocabulary, hidden), of the language modeling head.
        labels: (B, T) token ids, shifted here unless `shift_labels` (B, T) are given.
        logits_at_once: the largest number of logits held at a time; those of one token are, however many they are.
        num_items_in_batch: divisor of the summed loss; `None` divides by the number of labels that have a loss.
        ignore_index: label without a loss.

    Returns:
        The loss, a scalar in at least float32.

    Raises:
        ValueError: there is not one label for each hidden state.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden_states, shift_labels = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)
    if len(shift_labels) != len(hidden_states):
        raise ValueError(f"{len(shift_labels)} labels for the hidden states of {len(hidden_states)} tokens")
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    # torch returns the loss in the dtype of the logits, too coarse for a sum over many tokens.
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)
    rows = max(1, logits_at_once // weight.shape[0])
    with torch.autocast(device, enabled=False):
        losses = nn.functional.linear_cross_entropy(
            hidden_states,
            weight,
            shift_labels,
            reduction="sum" if accumulate == hidden_states.dtype else "none",
            ignore_index=ignore_index,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None),
        )
    total = losses.to(accumulate).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def refuse_without_tokens(name: str, inputs: torch.Tensor, bos_token_id: int | None) -> None:
    """Raise a ValueError where `inputs` (B, T) or (B, T, hidden) holds no token: a reshape would fail later."""
    if not is_tracing(inputs) and 0 in inputs.shape[:2]:
        example = "" if bos_token_id is None else f", such as config.bos_token_id={bos_token_id}"
        raise ValueError(
            f"{name} has shape {tuple(inputs.shape)}, which holds no token to compute: give at least one{example}"
        )
