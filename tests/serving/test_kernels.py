"""The table of vLLM's kernels against vLLM's source, which is read and not imported: most of it needs a GPU's build."""

import ast
import importlib.util
from pathlib import Path

import pytest

from modeling_gqa.accounting import kernels

ROOT = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
BACKENDS = ROOT / "v1" / "attention" / "backends"


def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def method(path: Path, owner: str, name: str) -> ast.FunctionDef:
    """The method `name` of the class `owner`."""
    (found,) = [node for node in ast.walk(source(path)) if isinstance(node, ast.ClassDef) and node.name == owner]
    return next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name)


def returned(path: Path, owner: str) -> list[int]:
    """The list of head sizes that a backend returns."""
    (value,) = [x for x in ast.walk(method(path, owner, "get_supported_head_sizes")) if isinstance(x, ast.Return)]
    return ast.literal_eval(value.value)


def test_head_sizes():
    common = ROOT / "model_executor" / "layers" / "attention" / "mla_attention.py"
    assert returned(common, "MLACommonBackend") == list(kernels.FAST_SUMS)
    assert returned(BACKENDS / "cpu_attn.py", "CPUAttentionBackend") == list(kernels.CPU_HEADS)
    assert returned(BACKENDS / "mla" / "triton_mla.py", "TritonMLABackend") == []
    assert returned(BACKENDS / "flex_attention.py", "FlexAttentionBackend") == []
    flash = ast.unparse(method(BACKENDS / "flash_attn.py", "FlashAttentionBackend", "supports_head_size"))
    assert f"head_size % {kernels.FLASH_MULTIPLE} != 0" in flash and f"head_size <= {kernels.FLASH_MOST}" in flash
    triton = ast.unparse(method(BACKENDS / "triton_attn.py", "TritonAttentionBackend", "supports_head_size"))
    assert f"head_size >= {kernels.TRITON_LEAST}" in triton


def test_sizes_of_prompts():
    """(N, P, V) of every backend that reads prompts on NVIDIA GPUs, but those without a rotary key."""
    found = set()
    for name in ("flash_attn", "flashinfer", "trtllm_ragged", "tokenspeed_mla"):
        for call in ast.walk(source(BACKENDS / "mla" / "prefill" / f"{name}.py")):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "MLADimensions":
                sizes = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                found.add((sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]))
    assert {sizes for sizes in found if sizes[1]} == set(kernels.PROMPT_SIZES)


@pytest.mark.parametrize(
    ("name", "file", "owner", "devices"),
    [
        ("FlashAttention", "flashattn_mla", "FlashAttnMLABackend", {"Hopper"}),
        ("FlashMLA", "flashmla", "FlashMLABackend", {"Hopper", "Blackwell"}),
        ("FlashInfer", "flashinfer_mla", "FlashInferMLABackend", {"Blackwell"}),
        ("cutlass", "cutlass_mla", "CutlassMLABackend", {"Blackwell"}),
    ],
)
def test_devices(name, file, owner, devices):
    (kernel,) = [kernel for kernel in kernels.LATENT_KERNELS if kernel.name == name]
    generations = {9: "Hopper", 10: "Blackwell"}
    check = method(BACKENDS / "mla" / f"{file}.py", owner, "supports_compute_capability")
    numbers = {x.value for x in ast.walk(check) if isinstance(x, ast.Constant) and isinstance(x.value, int)}
    assert {generations[number] for number in numbers} == devices == set(kernel.devices)


def test_sizes_that_kernels_check_themselves():
    by_name = {kernel.name: kernel for kernel in kernels.LATENT_KERNELS}
    cutlass = ast.unparse(source(BACKENDS / "mla" / "cutlass_mla.py"))
    (sizes,) = by_name["cutlass"].sizes
    assert f"D_latent = {sizes[0]}\n" in cutlass and f"D_rope = {sizes[1]}\n" in cutlass
    check = method(BACKENDS / "mla" / "flashinfer_mla.py", "FlashInferMLABackend", "supports_combination")
    assert f"not in {list(by_name['FlashInfer'].unrotated)}" in ast.unparse(check)
