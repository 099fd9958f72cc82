"""Quantized weights and caches take the sizes that the table in docs/serving.md says, and stay near the exact ones."""

import copy

import pytest
import torch
from small_models import MODELS, make_batch, make_config, make_model
from test_caches import decode, storage_bytes
from transformers import DynamicCache, QuantizedCache

TINY = {"hidden_size": 96, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


@torch.no_grad()
def decode_quantized(name, group, prompt, **overrides):
    """Cosine of the logits of five tokens after a prompt, with quanto's cache and with one that is not quantized."""
    model = make_model(name, **{**TINY, **overrides})
    ids = make_batch(batch=2, length=prompt + 5)["input_ids"]
    outputs = []
    for cache in (
        QuantizedCache("quanto", config=model.config, q_group_size=group, residual_length=3),
        DynamicCache(config=model.config),
    ):
        model(ids[:, :prompt], past_key_values=cache, use_cache=True)
        outputs.append(torch.cat([model(ids[:, [i]], past_key_values=cache).logits for i in range(prompt, prompt + 5)]))
    return torch.cosine_similarity(*outputs, dim=-1).min()


@pytest.mark.parametrize(
    ("name", "sizes", "group"),
    [
        ("mha", {"head_dim": 40}, 32),
        ("gqa", {"head_dim": 40}, 16),
        ("mqa", {"head_dim": 96}, 32),
        ("mla", LATENT, 16),
        ("mla", {**LATENT, "kv_lora_rank": 96, "qk_rope_head_dim": 40}, 8),
    ],
)
def test_quanto_cache_takes_groups_that_divide_what_a_token_stores(name, sizes, group):
    for prompt in (5, 7, 11):
        assert decode_quantized(name, group, prompt, **sizes) > 0.9
    # Twice as large they do not divide it, so an odd number of tokens is refused.
    with pytest.raises(ValueError, match=r"Group size \(\d+\) must be a divisor of \(\d+\)"):
        decode_quantized(name, group * 2, 5, **sizes)


def quantize_with_quanto(model, bits):
    from optimum import quanto

    quanto.quantize(model, weights=getattr(quanto, bits))
    quanto.freeze(model)


def quantize_with_torchao(model, granularity=None):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(**({} if granularity is None else {"granularity": granularity})))


QUANTIZATIONS = {
    "quanto qint4": (lambda model: quantize_with_quanto(model, "qint4"), 0.8, 0.999999),
    "quanto qint8": (lambda model: quantize_with_quanto(model, "qint8"), 0.8, 0.999999),
    "torchao int8": (quantize_with_torchao, 0.99, 0.9999999),
}
QUANTIZED = ["mha", "mqa", "gqa", "mla", "mla-q-lora"]


@pytest.mark.parametrize("way", QUANTIZATIONS)
@pytest.mark.parametrize("name", QUANTIZED)
@torch.no_grad()
def test_quantized_weights_of_any_size(name, way):
    """Logits change, and stay near those of the exact weights."""
    model, batch = make_model(name, initializer_range=0.02), make_batch()
    quantize, least, most = QUANTIZATIONS[way]
    expected = model(**batch).logits
    quantize(model)
    assert least < torch.cosine_similarity(model(**batch).logits, expected, dim=-1).min() < most


@pytest.mark.parametrize("name", QUANTIZED)
def test_torchao_groups_must_divide_inputs(name):
    from torchao.quantization import PerGroup

    with pytest.raises(AssertionError, match="66 is not divisible by group size 32"):
        quantize_with_torchao(make_model(name, initializer_range=0.02), PerGroup(32))


def test_torchao_int4_leaves_weights_whole_that_its_groups_do_not_divide():
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = make_model("gqa")
    before = copy.deepcopy(model.state_dict())
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    assert all(type(x) is torch.Tensor and torch.equal(x, before[name]) for name, x in model.state_dict().items())


# Powers of two, because quanto quantizes groups of 16 numbers.
QUANTIZABLE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "initializer_range": 0.1}
QUANTIZABLE_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def make_quantized_cache(backend: str, config) -> QuantizedCache:
    options = {"q_group_size": 16, "residual_length": 4} if backend == "quanto" else {}
    try:
        return QuantizedCache(backend, config=config, **options)
    except ValueError as error:
        if backend == "fp8" and "Unknown quantization backend" in str(error):
            pytest.skip("needs a transformers release with an fp8 quantized cache")
        raise


# quanto is not installed beside the oldest transformers.
@pytest.mark.parametrize(
    ("backend", "similarity"), [("quanto", 0.97), pytest.param("fp8", 0.99, marks=pytest.mark.compat)]
)
@pytest.mark.parametrize(
    "model_name",
    [name for name in MODELS if make_config(name).sliding_window is None and name != "mla-unrotated"],
)
@torch.no_grad()
def test_quantized_cache(model_name, backend, similarity):
    sizes = dict(QUANTIZABLE)
    if model_name.startswith("mla"):
        sizes |= QUANTIZABLE_LATENT
    elif model_name == "mixed":
        sizes["per_layer_config"] = {0: {"attention_kind": "mla", **QUANTIZABLE_LATENT}, 2: {"attention_kind": "mha"}}
    model, batch = make_model(model_name, **sizes), make_batch(length=32, padding="left")
    exact, quantized = DynamicCache(config=model.config), make_quantized_cache(backend, model.config)
    chunks = [16, *[1] * 16]
    expected, actual = (decode(model, batch, cache, chunks)[:, 16:] for cache in (exact, quantized))
    assert not torch.equal(actual, expected), "nothing was quantized"
    assert torch.cosine_similarity(actual, expected, dim=-1).min() > similarity
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7
    for exact_layer, layer in zip(exact.layers, quantized.layers, strict=True):
        states = (layer._quantized_keys, layer._quantized_values, layer.keys, layer.values)
        ours = sum(storage_bytes(state) for state in states)
        assert ours < 0.4 * (storage_bytes(exact_layer.keys) + storage_bytes(exact_layer.values))


def test_quantized_caches_of_transformers_need_a_rotary_key():
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}}
    with pytest.raises(ValueError, match="hold no MLA layer without a rotary key"):
        make_model("mla-unrotated").generate(**make_batch(), max_new_tokens=2, **options)
