"""Sizes that the attention kernels of vLLM 0.32 and 0.33 take, as its source has them (`vllm/v1/attention/backends`).

Letters, of MLA: R latent, P rotary key, and of a head N unrotated part and V value. D is a grouped head's size.
"""

from copy import copy
from typing import NamedTuple

from modeling_gqa.configuration_gqa import GQAConfig
from modeling_gqa.layers import key_mean_size


class LatentKernel(NamedTuple):
    """A kernel that attends over MLA's latent on an NVIDIA GPU.

    Args:
        name: what vLLM's users know it as.
        devices: generations that it is made for; none where it runs on all.
        sizes: pairs of R and P; none where it takes all.
        unrotated: values of N; none where it takes all.
    """

    name: str
    devices: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    unrotated: tuple[int, ...] = ()


LATENT_KERNELS = (
    LatentKernel("Triton"),
    LatentKernel("FlashAttention", ("Hopper",), ((512, 64), (256, 64))),
    LatentKernel("FlashMLA", ("Hopper",), ((512, 64),)),
    LatentKernel("FlashInfer", ("Blackwell",), ((512, 64), (256, 64)), (64, 128, 192)),
    LatentKernel("cutlass", ("Blackwell",), ((512, 64),)),
)
# Pairs of R and P that more than one kernel takes, largest first.
FAST_SIZES = sorted({size for kernel in LATENT_KERNELS for size in kernel.sizes}, reverse=True)
# Sums R + P by which vLLM takes the fast kernels to fit; some of them look at R and P when they run, and fail. With
# other sums its kernel that gathers the latents of a prompt's earlier tokens refuses when it is called.
FAST_SUMS = (320, 512, 576)
# N, P and V with which vLLM by itself reads prompts on NVIDIA GPUs, where keys and values are rebuilt from the latent.
PROMPT_SIZES = ((128, 64, 128), (64, 64, 128), (192, 64, 256))
# D of grouped attention on a CPU.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# D of grouped attention on a GPU: FlashAttention takes multiples of this up to that, Triton all from a size on.
FLASH_MULTIPLE, FLASH_MOST, TRITON_LEAST = 8, 256, 32


# Size of the zeros that stand in vLLM's cache for a rotary key of size 0, which its attention does not take.
NO_ROTARY_KEY = FLASH_MULTIPLE


def stored(layer: GQAConfig) -> GQAConfig:
    """Return an MLA layer's sizes as vLLM's cache has them.

    With `key_mean` P holds cosine and sine of each plane, too. Where it would be 0 it is `NO_ROTARY_KEY`.
    """
    more = key_mean_size(layer) or (0 if layer.qk_rope_head_dim else NO_ROTARY_KEY)
    if more:
        layer = copy(layer)
        layer.__dict__ |= {name: getattr(layer, name) + more for name in ("qk_rope_head_dim", "qk_head_dim")}
    return layer


def reads_prompts(nope: int, rope: int, value: int) -> bool:
    """Return whether vLLM with this package's plugin reads prompts of N, P and V on NVIDIA GPUs.

    The plugin reads those that are not in `PROMPT_SIZES` by FlashAttention, with values padded to the size of the keys.
    """
    size = nope + rope
    return nope > 0 and size % FLASH_MULTIPLE == 0 and value <= size <= FLASH_MOST


def latent_kernels(layer: GQAConfig) -> list[LatentKernel]:
    """Return the kernels that attend over an MLA layer's latent on NVIDIA GPUs, none where no prompt can be read."""
    layer = stored(layer)
    if not reads_prompts(layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim):
        return []
    sizes = (layer.kv_lora_rank, layer.qk_rope_head_dim)
    return [
        kernel
        for kernel in LATENT_KERNELS
        if sizes in (kernel.sizes or (sizes,))
        and layer.qk_nope_head_dim in (kernel.unrotated or (layer.qk_nope_head_dim,))
    ]


def is_mistaken(layer: GQAConfig) -> bool:
    """Return whether vLLM takes an MLA layer, by R + P alone, for one that a fast kernel takes."""
    sizes = (layer.kv_lora_rank, stored(layer).qk_rope_head_dim)
    return sum(sizes) in FAST_SUMS and sizes not in FAST_SIZES


def grouped_kernel(layer: GQAConfig) -> str:
    """Return the name of the kernel that vLLM uses first for a layer of grouped attention on a GPU."""
    if layer.head_dim % FLASH_MULTIPLE == 0 and layer.head_dim <= FLASH_MOST:
        return "FlashAttention"
    return "Triton" if layer.head_dim >= TRITON_LEAST else "FlexAttention"
