"""RMSNorm, the gated MLP, and what may be done with a linear layer's weight."""

import torch
from torch import nn
from transformers.activations import ACT2FN


class GQARMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, 1910.07467, eq. 4), in at least float32."""

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


class GQAMLP(nn.Module):
    """Gated feed-forward block, `down(act(gate(x)) * up(x))` (Shazeer, 2002.05202, eq. 5)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether using `module.weight` directly is the same as calling `module`.

    A wrapped, quantized, sharded or offloaded layer does more than its weight says, or lacks it.
    """
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or type(weight) is not nn.Parameter or weight.is_meta:
        return False
    return weight.shape == (module.out_features, module.in_features)
