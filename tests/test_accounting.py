"""Predictions from a configuration alone against the built model, the live cache and torch's FLOP counter.

FLOPs are counted under eager attention, whose products all are matrix products that the counter knows: its table has
the fused attention of CUDA but not the CPU's, so that it takes SDPA on the CPU for nothing. `test_flops_of_sdpa` runs
SDPA's own mathematical reference, which consists of matrix products. Equality is exact: both count matrix products.
"""

import pytest
import torch
from small_models import MODELS, make_config, make_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from modeling_gqa import GQAForCausalLM
from modeling_gqa.costs import (
    cache_bytes,
    cache_bytes_per_token,
    count_parameters,
    decode_flops,
    decode_weights,
    prefill_flops,
    training_flops,
)
from modeling_gqa.layers import key_mean_size

BATCH, LENGTH = 2, 31
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "query-bias": {"query_bias": True},
    "key-value-bias": {"key_value_bias": True},
    "output-bias": {"output_bias": True},
}
LAYERS = {
    0: {"attention_kind": "mla", "q_lora_rank": 17, "intermediate_size": 38},
    1: {"attention_kind": "mqa", "num_attention_heads": 5, "head_dim": 18, "mlp_bias": True, "query_bias": True},
    2: {"qk_norm": True, "attention_bias": True, "output_bias": False},
}
# name -> model and fields
CASES: dict[str, tuple[str, dict]] = {
    **{name: (name, {}) for name in MODELS},
    **{f"{name}-qk-norm": (name, {"qk_norm": True}) for name in ("mha", "mqa", "gqa")},
    **{f"{name}-no-latent-norm": (name, {"latent_norm": False}) for name in ("mla", "mla-q-lora")},
    "layers that differ in every field": ("gqa", {"per_layer_config": LAYERS}),
}


class WrappedLinear(nn.Linear):
    """Not a plain `nn.Linear`, so that MLA expands."""


def make_eager(model: str, **overrides) -> GQAForCausalLM:
    return make_model(model, attn_implementation="eager", **overrides)


def count_flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def make_ids(length: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(0))


def storage_bytes(cache) -> int:
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values))


def angles_bytes(model: GQAForCausalLM, tokens: int) -> int:
    """What transformers' caches hold for keys that all tokens share."""
    numbers = sum(map(key_mean_size, model.config.per_layer_config))
    return BATCH * tokens * numbers * model.dtype.itemsize


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_parameters(case, variant):
    """The predicted number of parameters is that of the built model, for every kind and variant."""
    model_name, fields = CASES[case]
    config = make_config(model_name, **fields, **VARIANTS[variant])
    assert count_parameters(config) == sum(parameter.numel() for parameter in GQAForCausalLM(config).parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_read_by_a_decoded_token(model_name, tied):
    """They are all parameters but the embedding of other tokens: with nan there the logits are finite."""
    model = make_model(model_name, tie_word_embeddings=tied)
    read = sum(parameter.numel() for name, parameter in model.named_parameters() if "embed_tokens" not in name)
    assert decode_weights(model.config) == read + (101 if tied else 1) * 66
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not tied:
            parameter.data[:5] = parameter.data[6:] = torch.nan
    assert model(torch.tensor([[5]])).logits.isfinite().all()


def test_no_model_is_built(model_name, monkeypatch):
    """Predictions come from the configuration: no module is constructed."""
    config = make_config(model_name)
    monkeypatch.setattr(nn.Module, "__init__", lambda *args, **kwargs: pytest.fail("a module was built"))
    predictions = [f(config, 1, 8) for f in (training_flops, prefill_flops, decode_flops, cache_bytes)]
    assert min(count_parameters(config), cache_bytes_per_token(config), *predictions) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_cache_bytes(model_name, dtype):
    """Predicted bytes are those of a dynamic cache's storage after each decoded token, beyond the window too.

    Caches of transformers hold the angles of a key that all tokens share besides.
    """
    model = make_model(model_name).to(dtype)
    ids = make_ids(9)
    # One token at a time, below and beyond the window of 5 tokens.
    cache = DynamicCache(config=model.config)
    for tokens in range(1, 10):
        cache = model(ids[:, tokens - 1 : tokens], past_key_values=cache, use_cache=True).past_key_values
        stored = storage_bytes(cache) - angles_bytes(model, tokens)
        assert cache_bytes(model.config, BATCH, tokens, dtype) == stored
        if tokens == 1:
            assert cache_bytes_per_token(model.config, dtype) == stored / BATCH


@torch.no_grad()
def test_cache_bytes_after_a_prompt(model_name):
    """After a prompt the prediction holds, for a window from the first decoded token on."""
    model = make_model(model_name)
    cache = DynamicCache(config=model.config)
    model(make_ids(9), past_key_values=cache)
    if model.config.sliding_window:  # the prompt's storage is let go at the first decoded token
        assert storage_bytes(cache) > cache_bytes(model.config, BATCH, 9, torch.float32)
    else:
        assert storage_bytes(cache) - angles_bytes(model, 9) == cache_bytes(model.config, BATCH, 9, torch.float32)
    model(make_ids(1), past_key_values=cache)
    assert storage_bytes(cache) - angles_bytes(model, 10) == cache_bytes(model.config, BATCH, 10, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_training_flops(case):
    """Predicted FLOPs of a training step are those that torch's FLOP counter counts."""
    model = make_eager(CASES[case][0], use_cache=False, **CASES[case][1]).train()
    ids = make_ids(LENGTH)
    counted = count_flops(lambda: model(ids, labels=ids).loss.backward())
    assert training_flops(model.config, BATCH, LENGTH) == counted


@torch.no_grad()
def test_prefill_flops(model_name):
    """Predicted FLOPs of a prompt are those that torch's FLOP counter counts."""
    model = make_eager(model_name)
    counted = count_flops(lambda: model(make_ids(LENGTH), use_cache=True, logits_to_keep=1))
    assert prefill_flops(model.config, BATCH, LENGTH) == counted


@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("cache_length", [3, LENGTH])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decode_flops(case, cache_length, absorbed):
    """Predicted FLOPs of a decoded token are those counted, absorbed and expanded."""
    model = make_eager(CASES[case][0], **CASES[case][1])
    if not absorbed:
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "kv_b_proj"):
                layer.self_attn.kv_b_proj.__class__ = WrappedLinear
    cache = model(make_ids(cache_length), use_cache=True).past_key_values
    counted = count_flops(lambda: model(make_ids(1), past_key_values=cache))
    assert decode_flops(model.config, BATCH, cache_length, absorbed) == counted


@pytest.mark.parametrize("model_name", ["mha", "mqa", "gqa"])
def test_flops_of_sdpa(model_name):
    """The counts hold for torch's attention kernel as well."""
    # MLA is left out: SDPA counts its values padded to the size of its keys.
    model = make_model(model_name, attn_implementation="sdpa").train()
    ids = make_ids(LENGTH)
    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(lambda: model(ids, labels=ids, use_cache=False).loss.backward())
    assert training_flops(model.config, BATCH, LENGTH) == counted
