"""The table of vLLM's kernels against vLLM: its source, and what its classes choose where a GPU is put in their way."""

import ast
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import answer_of

from modeling_gqa_vllm import kernels, model

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


GENERATIONS = {"8.0": "Ampere", "9.0": "Hopper", "10.0": "Blackwell"}
# N, P and V, and whether vLLM reads prompts of them by itself, and the plugin by padding.
HEADS = {
    (128, 64, 128): (True, True),
    (64, 64, 128): (True, True),
    (192, 64, 256): (True, True),
    (64, 64, 64): (False, True),
    (64, 32, 64): (False, True),
    (96, 64, 96): (False, True),
    (0, 64, 64): (False, False),
    (128, 192, 64): (False, False),
    (64, 64, 192): (False, False),
    (12, 8, 12): (False, False),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def on_gpu(request) -> dict:
    """What vLLM and the plugin choose with this capability; see `gpu.py`."""
    sizes = [",".join(map(str, size)) for size in HEADS]
    return answer_of("gpu.py", request.param, *sizes) | {"generation": GENERATIONS[request.param]}


def test_kernels_of_a_generation_are_those_that_vllm_takes_for_valid(on_gpu):
    """By all that vLLM checks, and not the capability alone."""
    valid = {name for name, refusals in on_gpu["latent"].items() if not refusals}
    table = {x.name for x in kernels.LATENT_KERNELS if not x.devices or on_gpu["generation"] in x.devices}
    assert valid == table


def test_prompts_are_read_by_vllm_or_by_padding(on_gpu):
    """Heads that vLLM's choice leaves out; the padded values come out as the formula's."""
    assert [bool(name) for name in on_gpu["prompts"]] == [by_itself for by_itself, _ in HEADS.values()]
    assert [not found["refusals"] for found in on_gpu["padded"]] == [padded for _, padded in HEADS.values()]
    for found in on_gpu["padded"]:
        if not found["refusals"]:
            assert found["error"] < 2e-6
            assert not found["quantizes"] and not found["out"] and not found["warmed"]
    assert {size for size, (by_itself, _) in HEADS.items() if by_itself} == set(kernels.PROMPT_SIZES)
    assert [kernels.reads_prompts(*size) for size in HEADS] == [padded for _, padded in HEADS.values()]


@pytest.mark.parametrize("sizes", HEADS)
def test_the_plugin_pads_where_vllm_would_refuse(sizes, monkeypatch):
    padded = SimpleNamespace(PaddedFlashAttention="padded")
    config = SimpleNamespace(model_config=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modeling_gqa_vllm.prompts", padded)
    monkeypatch.setattr(model, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    monkeypatch.setattr(model, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(model, "set_current_vllm_config", nullcontext)
    monkeypatch.setattr(model, "MLAAttention", lambda prefill_backend_cls, **options: prefill_backend_cls)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    layer = SimpleNamespace(q_lora_rank=None, kv_lora_rank=512, **dict(zip(names, sizes, strict=True)))
    chosen = model.latent_attention(SimpleNamespace(kv_b_proj=SimpleNamespace()), layer, None, 0)
    assert (chosen == "padded") == (HEADS[sizes] == (False, True)) and chosen in (None, "padded")


def test_sizes_that_kernels_check_themselves():
    by_name = {kernel.name: kernel for kernel in kernels.LATENT_KERNELS}
    cutlass = ast.unparse(source(BACKENDS / "mla" / "cutlass_mla.py"))
    (sizes,) = by_name["cutlass"].sizes
    assert f"D_latent = {sizes[0]}\n" in cutlass and f"D_rope = {sizes[1]}\n" in cutlass
    check = method(BACKENDS / "mla" / "flashinfer_mla.py", "FlashInferMLABackend", "supports_combination")
    assert f"not in {list(by_name['FlashInfer'].unrotated)}" in ast.unparse(check)
