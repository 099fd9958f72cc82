"""Tensor parallelism over gloo processes equals one process, for every kind and mix."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_worker import compute

from modeling_gqa import GQAConfig, GQAForCausalLM

pytestmark = pytest.mark.compat

SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MODELS: dict[str, dict[str, Any]] = {
    "mha": {"attention_kind": "mha", "attention_bias": True},
    "mqa": {"attention_kind": "mqa", "qk_norm": True},
    "gqa": {"num_key_value_heads": 2, "qk_norm": True, "attention_bias": True},
    "mla": {"attention_kind": "mla", **MLA, "attention_bias": True},
    "mla-q-lora": {"attention_kind": "mla", **MLA, "q_lora_rank": 10},
    "mla-qk-norm": {
        "attention_kind": "mla",
        **MLA,
        "qk_norm": True,
        "qk_norm_head_dim": 6,
        "qk_norm_key_value_heads": 2,
        "key_mean": True,
    },
    "mixed": {
        "num_key_value_heads": 2,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {0: {"attention_kind": "mla", **MLA}, 2: {"attention_kind": "mqa"}},
    },
}
# A norm over all heads leaves the attention of a layer whole on each rank.
ALL_HEADS = {"qk_norm": True, "qk_norm_span": "all_heads"}
MODELS["mla-olmo"] = {**MODELS["mla-qk-norm"], **ALL_HEADS, "norm_position": "both"}
MODELS["mixed-olmo"] = {
    **ALL_HEADS,
    "num_key_value_heads": 2,
    "norm_position": "after",
    "per_layer_config": {0: {"attention_kind": "mla", **MLA}},
}
REFUSED = {
    "three-heads": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "layer 0 has 3 query heads, which"),
    "three-key-value-heads": ({"num_attention_heads": 12, "num_key_value_heads": 3}, "layer 0 has 3 key/value heads: "),
}


def build(fields: dict[str, Any]) -> GQAForCausalLM:
    torch.manual_seed(0)
    model = GQAForCausalLM(GQAConfig(**{**SIZES, **fields}))
    for name, parameter in model.named_parameters():
        if name.endswith("key_mean.bias"):  # zeros, as it begins
            torch.nn.init.normal_(parameter)
    return model


def run(folder: Path, tp: int, fsdp: int = 1) -> dict[str, Any]:
    """What `ranks_worker.py` computed of the models in `folder`.

    A rank that dies of SIGSEGV or SIGABRT has one more try: threads of gloo crash PyTorch about once in some
    hundreds of runs, whichever model they have (https://github.com/pytorch/pytorch/issues/190489).
    """
    worker = Path(__file__).with_name("ranks_worker.py")
    processes = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(tp * fsdp)]
    for last in (False, True):
        ran = subprocess.run(
            [*processes, worker, folder, str(tp), str(fsdp)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if last or not ("(SIGSEGV)" in ran.stderr or "(SIGABRT)" in ran.stderr):
            break
    assert ran.returncode == 0, ran.stderr[-6000:]
    return torch.load(folder / "ranks.pt")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """Number of ranks, and what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, fields in [*MODELS.items(), *((name, fields) for name, (fields, _) in REFUSED.items())]:
        build(fields).save_pretrained(folder / name)
    return request.param, run(folder, request.param)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one_process(name, ranks):
    """Logits, greedy tokens with two caches, every gradient, and the losses of three steps."""
    results, expected = ranks[1][name], compute(build(MODELS[name]))
    torch.testing.assert_close(results["logits"], expected["logits"], atol=1e-5, rtol=1e-5)
    assert torch.equal(results["tokens"], expected["tokens"])
    assert torch.equal(results["static"], expected["static"])
    assert results["gradients"].keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        torch.testing.assert_close(results["gradients"][parameter], gradient, atol=1e-5, rtol=1e-4, msg=parameter)
    assert results["losses"] == pytest.approx(expected["losses"], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_divided(name, ranks):
    """A rank holds its part of what is made by head; what all heads share is on each."""
    number, results = ranks
    model = build(MODELS[name])
    whole = sum(p.numel() for n, p in model.named_parameters() if "self_attn" in n)
    local = 0
    for layer in model.model.layers:
        attention = layer.self_attn
        grouped = layer.self_attn.shared_heads
        for n, p in attention.named_parameters():
            module = n.partition(".")[0]
            whole_layer = model.config.per_layer_config[attention.layer_idx].norms_all_heads
            divided = module in ("q_b_proj", "kv_b_proj", "q_head_proj", "key_mean") or n == "o_proj.weight"
            divided |= module == "q_proj" or (
                grouped is not None and grouped >= number and module in ("k_proj", "v_proj")
            )
            local += p.numel() // number if divided and not whole_layer else p.numel()
    assert results[name]["share"] == pytest.approx(local / whole)


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_divide_are_refused(name, ranks):
    """In one line, while the model is loaded."""
    if ranks[0] == 4 or name == "three-heads":
        assert ranks[1][name].startswith(REFUSED[name][1])
