"""What vLLM would choose on NVIDIA GPUs, and how prompts are read there: run where there is none, as one line of JSON.

The capability is an argument, such as 9.0. vLLM's own classes validate and choose; what only a GPU's build has is
replaced: FlashAttention by the formula, which takes heads of one size as the kernel does, and the rest by nothing.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

CAPABILITY = DeviceCapability(*map(int, sys.argv[1].split(".")))
LATENT = {
    "Triton": "triton_mla.TritonMLABackend",
    "FlashAttention": "flashattn_mla.FlashAttnMLABackend",
    "FlashMLA": "flashmla.FlashMLABackend",
    "FlashInfer": "flashinfer_mla.FlashInferMLABackend",
    "cutlass": "cutlass_mla.CutlassMLABackend",
}


class FakePlatform(CpuPlatform):
    """A GPU of the capability."""

    _enum = PlatformEnum.CUDA
    get_mla_prefill_backend_cls = Platform.__dict__["get_mla_prefill_backend_cls"]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return CAPABILITY


def flash_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, return_softmax_lse=False, **kwargs):
    """Attend by rows of the batch; return what is asked for as vLLM's function does."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    outputs, sums = [], []
    for i in range(len(cu_seqlens_q) - 1):
        rows, columns = slice(*cu_seqlens_q[i : i + 2]), slice(*cu_seqlens_k[i : i + 2])
        scores = torch.einsum("thd,shd->hts", q[rows].double(), k[columns].double()) * softmax_scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
            scores = scores.masked_fill(later, -torch.inf)
        outputs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v[columns].double()))
        sums.append(scores.logsumexp(-1))
    output = torch.cat(outputs).to(q.dtype)
    return (output, torch.cat(sums, 1).float()) if return_softmax_lse else output


def replace_builds() -> None:
    vllm.platforms._current_platform = FakePlatform()
    flash = MagicMock(flash_attn_varlen_func=flash_attention, __path__=[])
    flash.is_fa_version_supported = lambda version: True
    names = ["vllm._C_stable_libtorch", "vllm._flashmla_C", "vllm._flashmla_extension_C", "flashinfer"]
    names += [
        "vllm.third_party.flashmla.flash_mla_interface",
        "flashinfer.decode",
        "flashinfer.prefill",
        "flashinfer.utils",
    ]
    for name in names:
        sys.modules[name] = MagicMock(__path__=[], __spec__=ModuleSpec(name, None))
    sys.modules["vllm.vllm_flash_attn"] = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"] = flash
    torch.cuda.get_device_properties = MagicMock()
    empty = torch.empty
    torch.empty = lambda *size, **options: empty(*size, **{**options, "device": "cpu"})


def refusals(name: str) -> list[str]:
    """Why the kernel does not attend over a latent of 512 + 64 here."""
    module, owner = LATENT[name].split(".")
    backend = getattr(__import__(f"vllm.v1.attention.backends.mla.{module}", fromlist=[owner]), owner)
    return backend.validate_configuration(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=True,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=CAPABILITY,
        attn_type="decoder",
    )


def choice(sizes: tuple[int, ...]) -> str | None:
    """The class that vLLM chooses for prompts of N, P and V; none where it refuses."""
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(**dict(zip(names, sizes, strict=True))))
    try:
        return FakePlatform.get_mla_prefill_backend_cls(config).__name__
    except ValueError:
        return None


def padded(sizes: tuple[int, ...]) -> dict:
    """Whether the plugin's class is valid for N, P and V here, and how far it is from the formula."""
    from vllm.v1.attention.backends.mla.prefill import flash_attn
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    from modeling_gqa_vllm.prompts import PaddedFlashAttention

    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dimensions = dict(zip(names, sizes, strict=True))
    config = MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(**dimensions))
    found = {"refusals": PaddedFlashAttention.validate_configuration(CAPABILITY, config)}
    if found["refusals"]:
        return found
    flash_attn._FA4_MLA_PREFILL_KERNEL.register_warmup = warmed = MagicMock()
    options = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=True))
    backend = PaddedFlashAttention(3, 0.2, 512, vllm_config=options, **dimensions).clone()
    torch.manual_seed(0)
    lengths, earlier = [5, 1, 9], [4, 7, 2]
    starts, before = (torch.tensor([0, *x]).cumsum(0) for x in (lengths, earlier))
    size, value = sizes[0] + sizes[1], sizes[2]
    query, key, values = (torch.randn(15, 3, n) for n in (size, size, value))
    old_key, old_values = torch.randn(13, 3, size), torch.randn(13, 3, value)
    backend.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=9))
    new = backend.run_prefill_new_tokens(query, key, values, return_softmax_lse=True)
    chunk = SimpleNamespace(query_start_loc=starts, cu_seq_lens=before, max_query_len=9, max_seq_len=7)
    old = backend.run_prefill_context_chunk(chunk, query, old_key, old_values)
    joined = torch.stack((new[1], old[1])).softmax(0).transpose(1, 2)[..., None]  # (2, T, H, 1)
    output = (joined * torch.stack((new[0], old[0]))).sum(0)[..., :value]
    error = 0.0
    for i in range(3):
        rows, columns = slice(*starts[i : i + 2]), slice(*before[i : i + 2])
        keys, vs = torch.cat((old_key[columns], key[rows])), torch.cat((old_values[columns], values[rows]))
        ones = torch.tensor([0, lengths[i]]), torch.tensor([0, len(keys)])
        width = torch.nn.functional.pad(vs, (0, size - value))
        expected = flash_attention(query[rows], keys, width, *ones, 0.2, True)[..., :value]
        error = max(error, (output[rows] - expected).abs().max().item())
    writes = {"quantizes": backend.supports_quant_output(None), "out": backend.supports_out()}
    return found | writes | {"error": error, "warmed": warmed.called}


def main() -> None:
    replace_builds()
    from vllm.config import VllmConfig, set_current_vllm_config

    sizes = [tuple(map(int, argument.split(","))) for argument in sys.argv[2:]]
    with set_current_vllm_config(VllmConfig()):
        latent = {name: refusals(name) for name in LATENT}
    answer = {
        "latent": latent,
        "prompts": [choice(size) for size in sizes],
        "padded": [padded(size) for size in sizes],
    }
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
