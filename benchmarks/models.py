"""The pairs that are compared: our model of each attention kind, and transformers' model of the same shape.

MHA, GQA and MQA stand against Llama, MLA against DeepSeek-V3 with all layers dense. Both sides have the same weights.
"""

from dataclasses import dataclass

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from modeling_gqa import GQAConfig, GQAForCausalLM

BASELINES = {"mha": "Llama", "gqa": "Llama", "mqa": "Llama", "mla": "DeepSeek-V3"}


@dataclass
class Sizes:
    """Sizes of every model of a run; `head_dim` is also MLA's unrotated key size and value size."""

    vocab_size: int = 8192
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    head_dim: int = 64
    kv_lora_rank: int = 256
    qk_rope_head_dim: int = 32

    def shared(self) -> dict:
        """What all models have in common."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return {name: getattr(self, name) for name in names} | {"max_position_embeddings": 2**17}


def key_value_heads(kind: str, sizes: Sizes) -> int:
    """MHA has a key/value head per query head, GQA one per four, MQA one."""
    heads = sizes.num_attention_heads
    return {"mha": heads, "gqa": max(1, heads // 4), "mqa": 1, "mla": heads}[kind]


def make_config(kind: str, sizes: Sizes, heads: int | None = None) -> GQAConfig:
    """Our configuration; `heads` key/value heads in place of the kind's own number."""
    if kind == "mla":
        return GQAConfig(**sizes.shared(), attention_kind="mla", **_latent(sizes))
    heads = heads or key_value_heads(kind, sizes)
    return GQAConfig(**sizes.shared(), attention_kind=kind, num_key_value_heads=heads, head_dim=sizes.head_dim)


def make_pair(
    kind: str, sizes: Sizes, dtype: torch.dtype, device: str, heads: int | None = None, share: bool = True
) -> tuple[GQAForCausalLM, PreTrainedModel]:
    """Our model and transformers', with the same weights: in the same memory if `share`, else each its own."""
    config = make_config(kind, sizes, heads)
    torch.manual_seed(0)
    with torch.device(device):
        if kind == "mla":
            layers = sizes.num_hidden_layers
            theirs: PreTrainedModel = DeepseekV3ForCausalLM(
                DeepseekV3Config(**sizes.shared(), **_latent(sizes), q_lora_rank=None, first_k_dense_replace=layers)
            )
        else:
            count = config.num_key_value_heads
            theirs = LlamaForCausalLM(LlamaConfig(**sizes.shared(), num_key_value_heads=count, head_dim=sizes.head_dim))
        ours = GQAForCausalLM(config)
    theirs = theirs.to(dtype).eval()  # type: ignore[arg-type]
    ours = ours.to(dtype).eval()  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict(), assign=share)
    return ours, theirs


def _latent(sizes: Sizes) -> dict:
    return {
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "qk_nope_head_dim": sizes.head_dim,
        "v_head_dim": sizes.head_dim,
    }
