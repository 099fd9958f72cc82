"""Prompts of MLA on NVIDIA GPUs, where vLLM's own choice of kernels leaves most sizes of heads out."""

from copy import copy

from vllm.config import VllmConfig
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

from .kernels import reads_prompts


class PaddedFlashAttention(FlashAttnPrefillBackend):
    """FlashAttention with values padded by zeros to the size of the keys, as an ordinary head of that size."""

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        sizes = mla_dimensions
        return reads_prompts(sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim)

    def __init__(self, *args, vllm_config: VllmConfig, **kwargs):
        # What vLLM compiles ahead on Blackwell is for values that are not padded, of sizes that all layers share.
        vllm_config = copy(vllm_config)
        vllm_config.kernel_config = copy(vllm_config.kernel_config)
        vllm_config.kernel_config.enable_jit_warmup = False
        super().__init__(*args, vllm_config=vllm_config, **kwargs)
        self.requires_v_padding = True

    def supports_quant_output(self, quant_key) -> bool:
        """No: what is computed is wider than what is wanted, so it cannot be written in place."""
        return False
