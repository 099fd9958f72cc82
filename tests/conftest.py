"""Small models of every attention kind, and the rule that a skip must be on a list."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM

# Models this small run slower on more threads, and the test processes share the cores.
torch.set_num_threads(1)

# Reasons for which a test may be skipped; any other skip fails.
PERMITTED_SKIPS = {
    "needs CUDA: flash attention",
    "needs CUDA: offloaded caches",
    "needs a transformers release with an fp8 quantized cache",
}

# Sizes whose products differ, so that a mistaken transpose or reshape cannot fit.
SIZES = {
    "vocab_size": 101,
    "hidden_size": 66,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 14,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KIND_SIZES = {
    "gqa": {"num_key_value_heads": 2},
    "mla": {"kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 13},
}
# Every kind in every layer, and models whose layers differ.
MODELS = {
    **{kind: {"attention_kind": kind, **KIND_SIZES.get(kind, {})} for kind in ATTENTION_CLASSES},
    "mla-q-lora": {"attention_kind": "mla", **KIND_SIZES["mla"], "q_lora_rank": 17},
    "mixed": {
        **KIND_SIZES["gqa"],
        "per_layer_config": {0: {"attention_kind": "mla", **KIND_SIZES["mla"]}, 2: {"attention_kind": "mha"}},
    },
    "mixed-window": {
        **KIND_SIZES["gqa"],
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "per_layer_config": {2: {"attention_kind": "mla", **KIND_SIZES["mla"]}},
    },
}


def make_config(model: str, **overrides) -> GQAConfig:
    """Configuration of a small model, by its name in MODELS."""
    return GQAConfig(**{**SIZES, **MODELS[model], **overrides})


def make_model(model: str, seed: int = 0, **overrides) -> GQAForCausalLM:
    """Small causal language model with seeded weights, in evaluation mode."""
    torch.manual_seed(seed)
    return GQAForCausalLM(make_config(model, **overrides)).eval()


def make_batch(batch: int = 3, length: int = 11, padding: str = "none", seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids, padding mask (none, left, right) and the positions of the tokens that are not padding."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)
    mask = torch.ones_like(input_ids)
    if padding != "none":
        for row in range(1, batch):
            mask[row, slice(0, row + 1) if padding == "left" else slice(length - row - 1, length)] = 0
    input_ids[mask == 0] = SIZES["pad_token_id"]
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


@pytest.fixture(params=MODELS)
def model_name(request) -> str:
    return request.param


@pytest.fixture(params=ATTENTION_CLASSES)
def kind(request) -> str:
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in PERMITTED_SKIPS:
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/conftest.py does not permit: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole module was skipped: {report.longrepr[2]}"
    return report
