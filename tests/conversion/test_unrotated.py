"""Layers that rotate nothing, as some of SmolLM3's: attention without positions in every kind, cache and conversion."""

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, distance, inputs, layer_output, logits, random_model
from huggingface_hub.errors import StrictDataclassError
from small_models import UNROTATED, make_config

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import allocate, compare_predictions, convert_model, layer_errors, target_config
from modeling_gqa.conversion.allocation import layer_sizes, measured_choices
from modeling_gqa.conversion.inspection import conversions
from modeling_gqa.conversion.quantizing import with_cache_of
from modeling_gqa.conversion.sequential import Setting
from modeling_gqa.conversion.targets import cached_numbers, configuration, divided, layer_fields, lossy_layers


def unrotated_model(kind: str = "gqa", **fields) -> GQAForCausalLM:
    """Three layers, of which the middle one does not rotate."""
    return random_model(kind, per_layer_config={1: UNROTATED}, **fields).double().eval()


@torch.no_grad()
def sees_no_order(model: GQAForCausalLM, index: int) -> bool:
    """Whether the output for the last token of a layer stays when the tokens before it change places."""
    x = inputs()
    shuffled = torch.cat((x[:, :-1].flip(1), x[:, -1:]), dim=1)
    found, other = (layer_output(model, index, rows)[:, -1] for rows in (x, shuffled))
    return distance(found, other) < 1e-6


@pytest.mark.parametrize("kind", ["mha", "mqa", "gqa"])
def test_the_order_of_tokens_does_not_matter(kind):
    model = unrotated_model(kind, attention_bias=True)
    assert [sees_no_order(model, index) for index in range(3)] == [False, True, False]
    assert model.config.format_version == 4
    assert make_config(kind, **UNROTATED).format_version == 4
    again = GQAConfig.from_dict(model.config.to_dict())
    assert [layer.rope_frequency_indices for layer in again.per_layer_config] == [None, [], None]


LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 0, "v_head_dim": 10}


def test_which_sizes_go_without_a_rotary_key():
    for fields, match in (
        ({"rope_frequency_indices": [], "rope_frequency_dim": 14}, "rope_frequency_indices"),
        ({"qk_rope_head_dim": 0}, "rotates nothing"),
    ):
        with pytest.raises(StrictDataclassError, match=match):
            make_config("mla", **fields)
    with pytest.raises(ValueError, match="qk_head_dim=0 must be positive"):
        make_config("mla", qk_rope_head_dim=0, qk_nope_head_dim=0, **UNROTATED)
    with pytest.raises(StrictDataclassError, match="head_dim=0 must be positive"):
        make_config("gqa", head_dim=0)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("extra", [{}, {"q_lora_rank": 12}, {"latent_norm": False}], ids=["", "q_lora", "no norm"])
def test_mla_without_a_rotary_key_is_its_formula(extra, backend):
    """softmax(q (U c)^T / sqrt(N)) (U' c) in float64, whatever the cache; the layer is one of three that rotate."""
    model = random_model("mla", attn_implementation=backend, per_layer_config={1: UNROTATED | LATENT | extra}).double()
    attention, x = model.eval().model.layers[1].self_attn, inputs()
    layer = model.config.per_layer_config[1]
    assert layer.head_dim == 0 and attention.cached_shapes == ((1, 20), (1, 0))
    (batch, length), heads = x.shape[:2], layer.num_attention_heads
    query = x
    if attention.q_lora_rank:
        query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(query)))
    else:
        query = attention.q_proj(query)
    query = query.view(batch, length, heads, 14).transpose(1, 2)
    latent = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x))
    key, value = (
        (latent @ attention.kv_b_proj.weight.T).view(batch, length, heads, 24).transpose(1, 2).split([14, 10], -1)
    )
    scores = query @ key.mT / 14**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = attention.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert distance(layer_output(model, 1, x), expected) < 1e-12
    assert sees_no_order(model, 1) and not sees_no_order(model, 0)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("mla", {"kv_lora_rank": 56, "qk_rope_head_dim": 28}), ("mla", {"cache_size": 84}), ("mha", {})],
    ids=["mla with zeros", "mla", "mha"],
)
def test_conversions_that_keep_the_function(kind, sizes):
    model = unrotated_model(attention_bias=True, num_key_value_heads=2)
    converted, _ = convert_model(model, target_config(model.config, kind, **sizes))
    assert distance(logits(converted), logits(model)) < 1e-6
    assert sees_no_order(converted, 1) and not sees_no_order(converted, 0)
    layer = converted.config.per_layer_config[1]
    if kind == "mla":
        rope = sizes.get("qk_rope_head_dim", 0)
        assert (layer.kv_lora_rank, layer.qk_rope_head_dim, layer.qk_nope_head_dim) == (56, rope, 14)
        assert not converted.model.layers[1].self_attn.kv_a_proj_with_mqa.weight[56:].any()
        back, _ = convert_model(converted, target_config(converted.config, "mha"))
        assert distance(logits(back), logits(model)) < 1e-6 and sees_no_order(back, 1)
    else:
        assert layer.rope_frequency_indices == []


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("mqa", {}), ("gqa", {"num_key_value_heads": 3}), ("mla", {"cache_size": 60})],
    ids=["mqa", "gqa", "mla"],
)
@pytest.mark.parametrize("text", [None, LONG_CALIBRATION], ids=["weights", "text"])
def test_conversions_that_lose(kind, sizes, text):
    """A layer without rotation stays one, also where gradient steps have trained it."""
    model = unrotated_model("mha", attention_bias=True)
    options = {"refine": 1, "divide_cache": kind == "mla"} if text else {}
    converted, _ = convert_model(model, target_config(model.config, kind, **sizes), text, **options)
    assert sees_no_order(converted, 1) and not sees_no_order(converted, 0)
    assert all(0 < error < 1 for error in layer_errors(model, converted, CALIBRATION))
    if kind == "mla":
        layers = converted.config.per_layer_config
        assert [cached_numbers(layer) for layer in layers] == [60] * 3 and layers[1].qk_rope_head_dim == 0


ZEROS = {"kv_lora_rank": 50, "qk_rope_head_dim": 10}


@pytest.mark.parametrize(
    ("given", "kind", "sizes"),
    [
        (ZEROS, "mqa", {}),
        ({"cache_size": 60}, "gqa", {"num_key_value_heads": 3}),
        ({"cache_size": 60}, "mla", {"cache_size": 40}),
    ],
    ids=["zeros to mqa", "gqa", "mla"],
)
def test_mla_is_converted_once_more(given, kind, sizes):
    """MLA without a rotary key, or with one of zeros, is read as no rotation."""
    model = unrotated_model("mha", attention_bias=True)
    latent, _ = convert_model(model, target_config(model.config, "mla", **given), CALIBRATION)
    converted, _ = convert_model(latent, target_config(latent.config, kind, **sizes), CALIBRATION)
    assert [layer.rope_frequency_indices == [] for layer in converted.config.per_layer_config] == [False, True, False]
    assert converted.config.per_layer_config[1].qk_rope_head_dim == (0 if kind == "mla" else None)
    assert sees_no_order(converted, 1) and not sees_no_order(converted, 0)
    assert all(0 < error < 1 for error in layer_errors(latent, converted, CALIBRATION))


@pytest.mark.parametrize("text", [None, LONG_CALIBRATION], ids=["weights", "text"])
def test_layers_that_rotate_can_do_without_a_rotary_key(text):
    """More is lost than with one; the way back to MHA is exact."""
    model, errors = random_model("mha").double().eval(), {}
    for rope in (0, 20):
        target = target_config(model.config, "mla", kv_lora_rank=60, qk_rope_head_dim=rope)
        converted, _ = convert_model(model, target, text, key_mean=False)
        errors[rope] = sum(layer_errors(model, converted, CALIBRATION)) / 3
        back, _ = convert_model(converted, target_config(converted.config, "mha"))
        assert distance(logits(back), logits(converted)) < 1e-12
        assert sees_no_order(converted, 0) == (rope == 0)
    assert 0 < errors[20] < errors[0] < 1


def test_what_layers_without_rotation_can_become():
    found = conversions(random_model("gqa", **UNROTATED).config, torch.float32)
    assert found["exact"] == {"mha": 2016, "mla with R = 56 and P = 0": 672}
    assert list(found["impossible"]) == ["gqa with 3 key/value heads"]


def test_a_latent_is_no_larger_than_the_layers_input():
    """66 numbers are all that there is to hold; a P that is given, as for a kernel, is zeros."""
    model = unrotated_model("mha")
    assert divided(60, model.config.per_layer_config[1]) == (60, 0)
    target = target_config(model.config, "mla", cache_size=130)
    assert [(x.kv_lora_rank, x.qk_rope_head_dim) for x in target.per_layer_config] == [(66, 64), (66, 0), (66, 64)]
    assert lossy_layers(model.config, target) == [0, 2]
    target = target_config(model.config, "mla", kv_lora_rank=66, qk_rope_head_dim=84)
    converted, report = convert_model(model, target)
    assert distance(logits(converted), logits(model)) < 1e-6 and report["layers"][1]["loss"] == 0
    assert not converted.model.layers[1].self_attn.kv_a_proj_with_mqa.weight[-84:].any()
    assert lossy_layers(model.config, target) == []


def test_sizes_by_layer():
    model = unrotated_model("mha")
    numbers = 3 * 80
    target = allocate(model, "mla", 8 * numbers, CALIBRATION)
    assert layer_sizes(model.config, 1, "mla").keys() <= set(range(67))
    assert sum(cached_numbers(layer) for layer in target.per_layer_config) <= numbers
    converted, _ = convert_model(model, target, CALIBRATION)
    assert sees_no_order(converted, 1)


def test_an_exact_size_loses_nothing_and_says_nothing_of_others():
    """Sizes below it lose what they lose when they are tried themselves, and not some of the noise of rounding."""
    model = unrotated_model("mha")
    *lossy, exact, _ = measured_choices(model, "mla", [1], CALIBRATION, Setting(refit=True), iter)[1]
    assert (exact.numbers, exact.loss) == (66, 0)
    assert lossy[-1].numbers > 60
    kls = []
    for choice in (lossy[0], lossy[-1]):
        fields = layer_fields(model.config)
        fields[1] = choice.fields
        converted, _ = convert_model(model, configuration(model.config, fields), CALIBRATION)
        kls.append(compare_predictions(model, converted, CALIBRATION)["kl"])
    assert 0.5 < lossy[-1].loss / lossy[0].loss * kls[0] / kls[1] < 2


@pytest.mark.parametrize("budget", [None, 3 * 70], ids=["equal bits", "bits by channel"])
@pytest.mark.parametrize("kind", ["mha", "mla", "mla with zeros"])
def test_quantized_caches(kind, budget):
    """The mean of a key without rotation is the same at every place, and a rotary key of zeros stays zeros."""
    model = unrotated_model("mha", attention_bias=True, max_position_embeddings=64).float()
    if kind != "mha":
        sizes = {"cache_size": 60} if kind == "mla" else {"kv_lora_rank": 48, "qk_rope_head_dim": 12}
        model, _ = convert_model(model, target_config(model.config, "mla", **sizes), CALIBRATION)
    options = {"nbits": 8, "residual_length": 4, "exact_tokens": 1}
    rounded = with_cache_of(model, CALIBRATION, options, budget, torch.float32)
    found = compare_predictions(model, rounded, CALIBRATION)
    assert 0 < found["kl"] < (0.02 if budget is None else 0.2)
    prompt = CALIBRATION[0]["input_ids"][:2]
    held = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    assert rounded.generate(prompt, **held).shape == (2, 32)
