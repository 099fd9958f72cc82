"""Quantized weights and caches take the sizes that the table in docs/serving.md says."""

import copy

import pytest
import torch
from small_models import make_batch, make_model
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


@pytest.mark.parametrize("bits", ["qint4", "qint8"])
@pytest.mark.parametrize("name", ["mha", "mqa", "gqa", "mla", "mla-q-lora"])
def test_quanto_weights_of_any_size(name, bits):
    from optimum import quanto

    model, batch = make_model(name, initializer_range=0.02), make_batch()
    with torch.no_grad():
        expected = model(**batch).logits
        quanto.quantize(model, weights=getattr(quanto, bits))
        quanto.freeze(model)
        actual = model(**batch).logits
    assert 0.8 < torch.cosine_similarity(actual, expected, dim=-1).min() < 0.999999


@pytest.mark.parametrize("name", ["mha", "mqa", "gqa", "mla", "mla-q-lora"])
@pytest.mark.parametrize("whole_rows", [True, False])
def test_torchao_int8_takes_any_size_and_groups_must_divide_inputs(name, whole_rows):
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

    model, batch = make_model(name, initializer_range=0.02), make_batch()
    if not whole_rows:
        with pytest.raises(AssertionError, match="Last dimension of input 66 is not divisible by group size 32"):
            quantize_(model, Int8WeightOnlyConfig(granularity=PerGroup(32)))
        return
    with torch.no_grad():
        expected = model(**batch).logits
        quantize_(model, Int8WeightOnlyConfig())
        actual = model(**batch).logits
    assert 0.99 < torch.cosine_similarity(actual, expected, dim=-1).min() < 0.9999999


def test_torchao_int4_leaves_weights_whole_that_its_groups_do_not_divide():
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = make_model("gqa")
    before = copy.deepcopy(model.state_dict())
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    assert all(type(x) is torch.Tensor and torch.equal(x, before[name]) for name, x in model.state_dict().items())
