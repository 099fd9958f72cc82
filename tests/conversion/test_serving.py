"""Conversions meant for vLLM: the sizes that are chosen, what is said of cost and kernels, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call
from small_models import make_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import UserError
from modeling_gqa.conversion.command.options import Options
from modeling_gqa.conversion.command.serving import (
    describe_elsewhere,
    describe_layer_runs,
    describe_runs,
    describe_serving,
)
from modeling_gqa.conversion.command.sizing import Goal, expected_target, find_goal

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
EXACT = "is kept, since the conversion is exact with it"
KEPT = "is kept; vLLM's fast kernels take R + P = 512 + 64 or 256 + 64."
SMALLER = "256 + 64, more than this model can use"


def goal(name: str, kind: str = "mla", config: GQAConfig | None = None, **options) -> tuple[GQAConfig, Options, Goal]:
    config = config or GQAConfig(**SOURCES[name])
    wanted = Options("source", Path("target"), kind, engine="vllm", **options)  # type: ignore[arg-type]
    return config, wanted, find_goal(wanted, config, torch.bfloat16)


def lines(name: str, kind: str = "mla", config: GQAConfig | None = None, **options) -> list[str]:
    config, wanted, found = goal(name, kind, config, **options)
    after = expected_target(found.options, config, found.target, torch.bfloat16)
    return describe_serving(config, after, torch.bfloat16, wanted, found.chosen, found.later, False)


@pytest.mark.parametrize(
    ("name", "options", "sizes", "said"),
    [
        ("8B", {}, (512, 64), "as none were given"),
        ("8B", {"cache_size": 1024}, (512, 64), "for --cache-size=1024"),
        ("8B", {"cache_size": 576}, (512, 64), "for --cache-size=576"),
        ("8B", {"cache_size": 512}, (512, 64), "for --cache-size=512"),  # an eighth more
        ("8B", {"cache_size": 511}, (256, 64), "for --cache-size=511"),
        ("8B", {"cache_size": 285}, (256, 64), "for --cache-size=285"),
        ("8B", {"cache_size": 284}, (142, 142), KEPT),
        ("8B", {"cache_bytes": 1024}, (512, 64), "for --cache-bytes=1024"),
        ("8B", {"kv_lora_rank": 512}, (512, 64), "for --kv-lora-rank=512"),
        ("8B", {"kv_lora_rank": 256}, (256, 64), "for --kv-lora-rank=256"),
        ("8B", {"kv_lora_rank": 100}, (100, 100), KEPT),
        ("8B", {"kv_lora_rank": 100, "qk_rope_head_dim": 64}, (100, 64), "=64 are kept."),
        ("8B", {"kv_lora_rank": 512, "qk_rope_head_dim": 128}, (512, 128), "=128 are kept."),
        ("8B", {"cache_size": 2048}, (1024, 1024), EXACT),
        ("1B", {"cache_size": 512}, (512, 64), "for --cache-size=512"),
        ("1B", {"kv_lora_rank": 512}, (512, 512), EXACT),
        ("135M", {}, (256, 64), "as none were given"),
        ("135M", {"cache_size": 350}, (256, 64), "for --cache-size=350"),
        ("135M", {"cache_size": 192}, (96, 96), KEPT),
        ("mqa", {}, (64, 64), EXACT),
        ("mqa", {"cache_size": 64}, (32, 32), SMALLER),
        ("tiny", {"cache_size": 64}, (32, 32), SMALLER),
        ("narrow", {"cache_size": 1000}, (256, 64), "for --cache-size=1000"),  # its input fills no latent of 512
    ],
)
def test_choice(name, options, sizes, said):
    """The largest fast size that is at most an eighth more than was asked; what cannot be had or is exact is kept."""
    config, wanted, found = goal(name, **options)
    assert found.target is not None
    assert [(x.kv_lora_rank, x.qk_rope_head_dim) for x in found.target.per_layer_config] == [sizes] * 2
    assert said in found.chosen
    assert found.chosen.startswith(f"R = {sizes[0]} and P = {sizes[1]} ") == (found.options is not wanted)
    assert found.exact == (EXACT in found.chosen)
    before = Options("source", Path("target"), "mla", **options)
    if options and found.options is wanted:  # as without --for
        assert found.target.to_dict() == find_goal(before, config, torch.bfloat16).target.to_dict()


@pytest.mark.parametrize("size", [2049, 99999, 0, -5])
def test_sizes_that_are_refused_without_the_engine_are_refused_with_it(size):
    with pytest.raises(UserError, match=f"size={size}(: a latent of| is more than layer| must be pos)"):
        goal("8B", cache_size=size)


def test_a_chosen_size_is_not_divided_anew(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for size, later in ((600, False), (128, True)):
        _, wanted, found = goal("8B", cache_size=size, text=[tmp_path])
        assert wanted.shares_cache and found.later is later
    _, _, found = goal("8B", "gqa", num_key_value_heads=2)
    assert not found.later and not found.chosen


def test_cost():
    """Numbers and bytes per token and layer, and the share of the source's cache."""
    cost = "1,152 bytes in bfloat16 (576 numbers) per token and layer; 2,304 bytes per token of the whole model"
    assert lines("8B", cache_size=600)[1] == f"Cache: {cost}, 0.28 of the source's 8,192."
    mixed = lines("8B", cache_size=600, layers=[1])
    assert (
        "1,152 bytes in bfloat16 (576 numbers) per token and layer; 5,248 bytes" in mixed[1] and "0.64 of" in mixed[1]
    )
    (cost,) = [line for line in lines("8B", "gqa", num_key_value_heads=2) if line.startswith("Cache")]
    assert "1,024 bytes in bfloat16 (512 numbers)" in cost and "0.25 of the source's 8,192" in cost


def test_a_budget_is_the_most(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    said = lines("8B", budget=4096, text=[tmp_path])
    assert said[:2] == [
        "Sizes: --budget chooses R and P by layer.",
        "Cache: at most 4,096 bytes per token of the whole model, 0.50 of the source's 8,192.",
    ]
    assert "NVIDIA GPUs (Triton) where N + P = 128 + P becomes a multiple of 8" in said[2]
    assert "N + P = 64 + P" in lines("1B", budget=2048, text=[tmp_path])[2]
    heads = lines("8B", "gqa", budget=4096, text=[tmp_path])
    assert heads[1] == "vLLM runs it on: GPUs (FlashAttention); a CPU." and "at most 4,096 bytes" in heads[0]


FAST = "NVIDIA GPUs (Triton; FlashAttention on Hopper; FlashMLA on Hopper; FlashInfer on Blackwell; cutlass"
KERNELS = {
    "512 + 64": ("8B", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, FAST),
    "256 + 64": ("8B", {"kv_lora_rank": 256, "qk_rope_head_dim": 64}, "Hopper; FlashInfer on Blackwell)"),
    "100 + 64": ("8B", {"kv_lora_rank": 100, "qk_rope_head_dim": 64}, "NVIDIA GPUs (Triton; no cached prefixes"),
    "448 + 64": ("8B", {"kv_lora_rank": 448, "qk_rope_head_dim": 64}, "(Triton, with --attention-backend TRITON_MLA)"),
    "512 + 32": ("8B", {"kv_lora_rank": 512, "qk_rope_head_dim": 32}, "NVIDIA GPUs (Triton; no cached prefixes"),
    "512 + 36": ("8B", {"kv_lora_rank": 512, "qk_rope_head_dim": 36}, "these have 128 + 36 and 128"),
    "heads of 64": ("1B", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, FAST),
    "whole rotation": ("mqa", {}, "these have 0 + 64 and 64"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_over_the_latent(name):
    source, options, said = KERNELS[name]
    (where,) = [line for line in lines(source, **options) if line.startswith("vLLM runs it on: ")]
    assert where.startswith("vLLM runs it on: a CPU (this package's attention); ") and said in where
    assert ("no NVIDIA GPU" in where) == ("these have" in said)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (128, "GPUs (FlashAttention); a CPU"),
        (72, "GPUs (FlashAttention); no CPU"),
        (512, "GPUs (Triton); a CPU"),
        (36, "GPUs (Triton); no CPU"),
        (12, "GPUs (FlexAttention); no CPU"),
    ],
)
def test_heads_of_grouped_attention(size, said):
    config = GQAConfig(**{**SOURCES["tiny"], "head_dim": size})
    *_, runs, needs, elsewhere = lines("", "gqa", config, num_key_value_heads=2)
    assert runs.startswith(f"vLLM runs it on: {said}") and needs.startswith("vLLM needs: nothing")
    assert "as llama, vLLM's own class, SGLang's (untried) and llama.cpp" in elsewhere
    assert ("224, 256 or 512, and these have" in runs) == ("no CPU" in said)


def test_layers_that_differ_are_told_apart():
    """Also a window over the latent, which no GPU has."""
    said = describe_runs(make_config("mixed-window"))
    assert [line.split(" on: ")[0] for line in said[:-1]] == ["vLLM runs layers 0-1", "vLLM runs layers 2"]
    assert "no GPU, where vLLM has no window over the latent" in said[1] and said[-1].startswith(
        "vLLM needs: this pack"
    )
    layer = GQAConfig(**SOURCES["8B"]).per_layer_config[0]
    assert describe_layer_runs(layer, window=5) == describe_layer_runs(layer)


def test_other_engines():
    """As far as what is converted can be exported; frequencies of MLA are known when it is converted."""
    latent = {**SOURCES["8B"], "attention_kind": "mla", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    heads = {"qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 128, "num_key_value_heads": None}
    fast = GQAConfig(**{**latent, **heads})
    assert "as deepseek_v3, vLLM's own class on a CPU and NVIDIA GPUs and SGLang's (un" in describe_elsewhere(fast)
    small = GQAConfig(**{**latent, **heads, "kv_lora_rank": 448, "v_head_dim": 64})
    assert describe_elsewhere(small) == (
        "Elsewhere: transformers; after modeling-gqa export, as deepseek_v3, SGLang's (untried)."
    )
    assert "transformers alone; modeling-gqa export says why" in describe_elsewhere(make_config("mixed"))
    for size in (600, 2048):
        assert lines("8B", cache_size=size)[-1].startswith("Elsewhere: transformers alone, as most MLA")


# -- the command


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """One layer of 8 heads of 128, which caches 2,048 numbers."""
    torch.manual_seed(0)
    sizes = {**SOURCES["tiny"], "hidden_size": 300, "num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    folder = tmp_path_factory.mktemp("serving") / "source"
    GQAForCausalLM(GQAConfig(**sizes)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def printed_by(*arguments) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_chooses_says_and_saves(source, tmp_path):
    arguments = ("convert", source, tmp_path / "out", "--attention-kind", "mla", "--cache-size", 300, "--for", "vllm")
    planned = printed_by(*arguments, "--dry-run")
    assert not (tmp_path / "out").exists()
    printed = printed_by(*arguments)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["command"]["engine"] == "vllm" and report["command"]["cache_size"] == 300
    assert [line.split(":")[0] for line in report["serving"]] == [
        "Sizes",
        "Cache",
        "vLLM runs it on",
        "vLLM needs",
        "Elsewhere",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    for line in report["serving"]:  # before the table of what was done, and once; frequencies are known after
        assert printed.count(f"{line}\n") == card.count(f"- {line}\n") == 1
        if not line.startswith("Elsewhere"):
            assert planned.count(f"{line}\n") == 1 and printed.index(line) < printed.index("before")
    assert planned.count("Elsewhere: ") == 1 and printed.index("Elsewhere: ") < printed.index("before")
    assert "1,280 bytes in float32 (320 numbers) per token and layer" in report["serving"][1]
    layer = GQAConfig.from_pretrained(tmp_path / "out").per_layer_config[0]
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == (256, 64)
    model = GQAForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2, pad_token_id=0).shape == (1, 4)
    inspected = json.loads(printed_by("inspect", tmp_path / "out", "--json"))
    assert inspected["vllm"] == report["serving"][2:4]
    assert "vLLM runs it on: a CPU (this package's attention); NVIDIA GPUs (Triton; Flash" in printed_by(
        "inspect", tmp_path / "out"
    )


def test_with_text_the_sizes_that_were_chosen_stay(source, tmp_path):
    """Where a cache size is kept, the text divides it between R and P."""
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(" ".join(f"w{(index * n) % 61}" for n in range(1, 60)))
    text = ("--text", tmp_path, "--sequence-length", 32, "--calibration-tokens", 512, "--evaluation-tokens", 256)
    target = tmp_path.parent / f"{tmp_path.name}-out"
    printed_by("convert", source, target, "--attention-kind", "mla", "--cache-size", 300, "--for", "vllm", *text)
    layer = GQAConfig.from_pretrained(target).per_layer_config[0]
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == (256, 64)


def test_without_the_option_nothing_is_chosen_and_the_same_is_said(source, tmp_path):
    """Before the conversion, and in the card."""
    printed = printed_by("convert", source, tmp_path / "out", "--attention-kind", "mla", "--cache-size", 300)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    said = [line.split(":")[0] for line in report["serving"]]
    assert said == ["Cache", "vLLM runs it on", "vLLM needs", "Elsewhere"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"- {line}\n" in card for line in report["serving"])
    assert printed.index(report["serving"][1]) < printed.index("before")
    layer = GQAConfig.from_pretrained(tmp_path / "out").per_layer_config[0]
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == (150, 150)


def test_another_engine_is_refused_with_those_that_are_known(source, tmp_path):
    arguments = ["convert", str(source), str(tmp_path / "out"), "--attention-kind", "mla", "--for", "tgi"]
    result = call(*arguments)
    assert result.exit_code == 2 and "tgi" in result.output and "vllm" in result.output
    assert not (tmp_path / "out").exists()
