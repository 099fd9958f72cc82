"""Conversions meant for vLLM: the sizes that are chosen, and the kernels that are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call, run
from small_models import make_config, make_model

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import UserError
from modeling_gqa.conversion.options import Goal, Options, find_goal
from modeling_gqa.conversion.report import vllm_kernels

SMALL: dict[str, Any] = {"vocab_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
SOURCES: dict[str, dict[str, Any]] = {
    # heads of 128, 2,048 numbers per token and layer
    "8B": {**SMALL, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    # heads of 64, 1,024 numbers
    "1B": {**SMALL, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    # heads of 64, 384 numbers
    "135M": {**SMALL, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "narrow": {**SMALL, "hidden_size": 300, "num_attention_heads": 8, "attention_kind": "mha", "head_dim": 128},
    "mqa": {**SMALL, "hidden_size": 256, "num_attention_heads": 4, "attention_kind": "mqa", "head_dim": 64},
    "tiny": {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "attention_kind": "mha", "head_dim": 16},
}


def goal(name: str, kind: str = "mla", **options) -> tuple[Options, Goal]:
    wanted = Options("source", Path("target"), kind, **{"engine": "vllm", **options})  # type: ignore[arg-type]
    return wanted, find_goal(wanted, GQAConfig(**SOURCES[name]), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "options", "sizes", "chosen"),
    [
        ("8B", {}, (512, 64), True),
        ("8B", {"cache_size": 1024}, (512, 64), True),
        ("8B", {"cache_size": 512}, (512, 64), True),  # an eighth more
        ("8B", {"cache_size": 511}, (256, 64), True),
        ("8B", {"cache_size": 285}, (256, 64), True),
        ("8B", {"cache_size": 284}, (142, 142), False),
        ("8B", {"cache_bytes": 1024}, (512, 64), True),
        ("8B", {"kv_lora_rank": 256}, (256, 64), True),
        ("8B", {"kv_lora_rank": 100}, (100, 100), False),
        ("8B", {"kv_lora_rank": 512, "qk_rope_head_dim": 128}, (512, 128), False),
        ("8B", {"cache_size": 2048}, (1024, 1024), False),  # exact
        ("1B", {"kv_lora_rank": 512}, (512, 512), False),  # exact
        ("135M", {}, (256, 64), True),
        ("135M", {"cache_size": 192}, (96, 96), False),
        ("mqa", {}, (64, 64), False),  # exact
        ("tiny", {"cache_size": 64}, (32, 32), False),
        ("narrow", {"cache_size": 1000}, (256, 64), True),  # its input fills no latent of 512
    ],
)
def test_choice(name, options, sizes, chosen):
    """The largest fast size that is at most an eighth more than was asked; what cannot be had or is exact is kept."""
    wanted, found = goal(name, **options)
    assert found.target is not None and (found.options is not wanted) == chosen
    assert [(x.kv_lora_rank, x.qk_rope_head_dim) for x in found.target.per_layer_config] == [sizes] * 2
    if options and not chosen:
        _, without = goal(name, **options, engine=None)
        assert without.target is not None and found.target.to_dict() == without.target.to_dict()


@pytest.mark.parametrize("size", [2049, 0, -5])
def test_sizes_that_are_refused_without_the_engine_are_refused_with_it(size):
    with pytest.raises(UserError, match=f"size={size}"):
        goal("8B", cache_size=size)


def test_a_chosen_size_is_not_divided_anew(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for size, later in ((600, False), (128, True)):
        wanted, found = goal("8B", cache_size=size, text=[tmp_path])
        assert wanted.divides_cache and found.later is later
    wanted, found = goal("8B", "gqa", num_key_value_heads=2)
    assert not found.later and found.options is wanted


TRITON = "Triton, without cached prefixes and prompts in chunks"
FAST = (
    "Triton, FlashAttention on Hopper, FlashMLA on Hopper, FlashInfer on Blackwell, cutlass on Blackwell"  # of 512 + 64
)
KERNELS = {
    (512, 64): FAST,
    (256, 64): "Triton, FlashAttention on Hopper, FlashInfer on Blackwell",
    (100, 64): TRITON,
    (448, 64): "Triton, with --attention-backend TRITON_MLA",
    (512, 32): TRITON,
    (512, 36): "none",  # heads of 128 + 36
}


@pytest.mark.parametrize("sizes", KERNELS, ids=str)
def test_kernels_over_the_latent(sizes):
    _, found = goal("8B", kv_lora_rank=sizes[0], qk_rope_head_dim=sizes[1])
    where, needed = vllm_kernels(found.target)
    assert where == f"vLLM, layers 0-1: GPUs: {KERNELS[sizes]}; CPU: yes."
    assert needed.startswith("vLLM needs this package")


@pytest.mark.parametrize(
    ("size", "kernel", "cpu"),
    [
        (128, "FlashAttention", "yes"),
        (72, "FlashAttention", "no"),
        (512, "Triton", "yes"),
        (36, "Triton", "no"),
        (12, "FlexAttention", "no"),
    ],
)
def test_heads_of_grouped_attention(size, kernel, cpu):
    config = GQAConfig(**{**SOURCES["tiny"], "head_dim": size})
    assert vllm_kernels(config) == [f"vLLM, layers 0-1: GPUs: {kernel}; CPU: {cpu}."]


@pytest.mark.parametrize(("options", "kept"), [((), True), (("--no-key-mean",), False), (("--for", "vllm"), False)])
def test_the_mean_of_keys_is_kept_but_for_engines(options, kept, tmp_path):
    model = make_model("gqa", attention_bias=True)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    model.save_pretrained(tmp_path / "source")
    run("convert", tmp_path / "source", tmp_path / "out", "--attention-kind", "mla", "--cache-size", 24, *options)
    assert GQAConfig.from_pretrained(tmp_path / "out").key_mean == kept


def test_layers_that_differ_are_told_apart():
    """Also a window over the latent, which no GPU has."""
    said = vllm_kernels(make_config("mixed-window"))
    assert [line.split(":")[0] for line in said[:-1]] == ["vLLM, layers 0-1", "vLLM, layers 2"]
    assert "GPUs: none" in said[1]


def test_the_command_chooses_says_and_saves(tmp_path):
    """Memory and sizes are said before the conversion; report, card and `inspect` name the kernels alike."""
    sizes = {**SOURCES["tiny"], "hidden_size": 300, "num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    GQAForCausalLM(GQAConfig(**sizes)).save_pretrained(tmp_path / "source")
    source, target = tmp_path / "source", tmp_path / "out"
    arguments = ("convert", source, target, "--attention-kind", "mla", "--cache-size", 300)
    sized = "Sizes: R = 256 and P = 64; vLLM's fast kernels take R + P = 512 + 64 or 256 + 64."
    assert sized in run(*arguments, "--for", "vllm", "--dry-run") and not target.exists()
    printed = run(*arguments, "--for", "vllm")
    assert printed.index(sized) < printed.index("before")
    report = json.loads((target / "conversion.json").read_text())
    assert report["command"]["engine"] == "vllm" and report["command"]["cache_size"] == 300
    layer = GQAConfig.from_pretrained(target).per_layer_config[0]
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == (256, 64)
    card = (target / "README.md").read_text()
    assert all(card.count(f"- {line}\n") == 1 for line in report["serving"])
    assert json.loads(call("inspect", target, "--json").stdout)["vllm"] == report["serving"]
    assert report["serving"][0] in run("inspect", target)
    assert not layer.key_mean
    result = call(*arguments, "--for", "tgi", "--force")
    assert result.exit_code == 2 and "tgi" in result.output and "vllm" in result.output
