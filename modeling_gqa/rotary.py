"""Rotary position embedding (Su et al., 2104.09864, eq. 34), half-split and interleaved.

Shapes: B batch, T tokens, P rotated dimensions of a head.
"""

import copy

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


class GQARotaryEmbedding(nn.Module):
    """Cosine and sine of every token's angles, for layers of the same `rotary_dim` as layer `layer_idx`.

    transformers' `_init_weights` finds it by its name and its attributes `rope_type`, `original_inv_freq` and
    `compute_default_rope_parameters`.
    """

    inv_freq: torch.Tensor

    def __init__(self, config, layer_idx: int = 0):
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
    def compute_default_rope_parameters(config, device=None, seq_len=None) -> tuple[torch.Tensor, float]:
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


def frequency_indices(layer) -> torch.Tensor | None:
    """`rope_frequency_indices` of `config.per_layer_config[i]` as an index, `None` for the standard frequencies."""
    indices = layer.rope_frequency_indices
    return None if indices is None else torch.tensor(indices, dtype=torch.int64)


def select_frequencies(
    position_embeddings: tuple[torch.Tensor, torch.Tensor], indices: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (B, T, 2 n) of the n planes `indices` of those given (B, T, P), all of them for `None`."""
    if indices is None:
        return position_embeddings
    cos, sin = (x.index_select(-1, indices) for x in position_embeddings)  # (B, T, n)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)  # (B, T, 2 n)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first P dimensions of each head; what lies beyond passes through.

    Args:
        x: queries or keys (B, heads, T, D) with D >= P.
        cos, sin: (B, T, P), as `GQARotaryEmbedding` returns them.
        interleaved: the pairs of `x` are neighbours instead of half a head apart; the result is half-split all the
            same, which changes no score because queries and keys are permuted alike.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, interleaved), x[..., size:]), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, P)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)
