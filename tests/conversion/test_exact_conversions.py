"""Conversions that are exact: the same attention, the same logits, the same text; and errors that these would show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import (
    BIASES,
    PARTIAL,
    YARN,
    change_gauge,
    distance,
    grouped,
    in_dtype,
    inputs,
    layer_output,
    logits,
    random_gauge,
    random_model,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import KEY_MEAN, MODELS, SCALING, make_batch

from modeling_gqa.conversion import convert_model, target_config

pytestmark = pytest.mark.compat

PLAIN = {"latent_norm": False}
FULL = {"kv_lora_rank": 28, "qk_rope_head_dim": 28}
# name -> (model, its fields, target's kind, target's sizes)
EXACT: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gqa-mha": ("gqa", {}, "mha", {}),
    "gqa-mha-biases": ("gqa", {"attention_bias": True}, "mha", {}),
    "gqa-mha-qk-norm-window": ("gqa", {"qk_norm": True, "sliding_window": 4}, "mha", {}),
    "gqa-mha-partial-yarn": ("gqa", {"rope_parameters": {**PARTIAL, **YARN}}, "mha", {}),
    "mqa-gqa": ("mqa", BIASES, "gqa", {"num_key_value_heads": 3}),
    "mqa-mla": ("mqa", {}, "mla", {}),
    "mqa-mla-biases-window": ("mqa", {"attention_bias": True, "sliding_window": 5}, "mla", {}),
    "mqa-mla-qwen2-biases-yarn": ("mqa", {**BIASES, "rope_parameters": YARN}, "mla", {}),
    "mqa-mla-partial-biases": ("mqa", {"attention_bias": True, "rope_parameters": PARTIAL}, "mla", {}),
    "mqa-mla-partial-one-layer": ("mqa", {"rope_parameters": PARTIAL}, "mla", {"layers": [2]}),
    "mqa-mla-one-layer": ("mqa", BIASES, "mla", {"layers": [1]}),
    "gqa-mla-full": ("gqa", {}, "mla", FULL),
    "gqa-mla-full-biases-yarn": ("gqa", {"attention_bias": True, "rope_parameters": YARN}, "mla", FULL),
    "gqa-mla-full-partial": (
        "gqa",
        {**BIASES, "rope_parameters": PARTIAL},
        "mla",
        {"kv_lora_rank": 40, "qk_rope_head_dim": 16},
    ),
    "gqa-mha-scaled": ("gqa", {"rope_parameters": {**YARN, **SCALING}}, "mha", {}),
    "gqa-mla-full-scaled": ("gqa", {"attention_bias": True, "rope_parameters": {**YARN, **SCALING}}, "mla", FULL),
    "gqa-mla-full-partial-scaled": (
        "gqa",
        {"rope_parameters": {**PARTIAL, **SCALING}},
        "mla",
        {"kv_lora_rank": 40, "qk_rope_head_dim": 16},
    ),
    "mla-mha-key-mean-scaled": ("mla", {**PLAIN, "key_mean": True, "rope_parameters": {**YARN, **SCALING}}, "mha", {}),
    "gqa-mla-full-qk-norm": ("gqa", {"qk_norm": True, "attention_bias": True, "rope_parameters": YARN}, "mla", FULL),
    "gqa-mla-full-partial-qk-norm": (
        "gqa",
        {**BIASES, "qk_norm": True, "rope_parameters": PARTIAL},
        "mla",
        {"kv_lora_rank": 40, "qk_rope_head_dim": 16},
    ),
    "mqa-mla-qk-norm-window": ("mqa", {"qk_norm": True, "sliding_window": 5}, "mla", {}),
    "mha-mla-as-wide-as-the-model": ("mha", BIASES, "mla", {"kv_lora_rank": 66, "qk_rope_head_dim": 84}),
    "mla-mha": ("mla", PLAIN, "mha", {}),
    "mla-mha-half-split-biases": ("mla", {**PLAIN, "rope_interleave": False, "attention_bias": True}, "mha", {}),
    "mla-mha-large-values": ("mla", {**PLAIN, "v_head_dim": 20, **BIASES}, "mha", {}),
    "mla-mha-no-unrotated-part": ("mla", {**PLAIN, "qk_nope_head_dim": 0, "v_head_dim": 16}, "mha", {}),
    "mla-mha-odd-values": ("mla", {**PLAIN, "qk_nope_head_dim": 0, "v_head_dim": 13}, "mha", {}),
    "mla-mha-q-lora-biases": ("mla-q-lora", {**PLAIN, "attention_bias": True}, "mha", {}),
    "mla-mha-yarn-mscale": ("mla", {**PLAIN, "rope_parameters": YARN}, "mha", {}),
    "mla-mha-key-mean-biases-yarn": (
        "mla",
        {**PLAIN, "key_mean": True, "attention_bias": True, "rope_parameters": YARN},
        "mha",
        {},
    ),
    "mla-mha-key-mean-chosen-frequencies": ("mla", {**PLAIN, **KEY_MEAN, "rope_interleave": False}, "mha", {}),
    "mla-mha-two-layers": ("mla", PLAIN, "mha", {"layers": [0, 2]}),
    "mixed-mha": ("mixed", {}, "mha", {}),
    "mixed-window-mha": ("mixed-window", {"rope_parameters": YARN}, "mha", {"layers": [1, 2]}),
}


def converted(name: str, prepare=lambda model: model):
    """Source, converted model and report of one of EXACT."""
    model_name, fields, kind, sizes = EXACT[name]
    if layers := MODELS[model_name].get("per_layer_config"):  # there the norm is a field of the MLA layers
        latent = {index: {**layer, **PLAIN} for index, layer in layers.items() if layer["attention_kind"] == "mla"}
        fields = {**fields, "per_layer_config": {**layers, **latent}}
    model = prepare(random_model(model_name, **fields))
    return model, *convert_model(model, target_config(model.config, kind, **sizes))


@pytest.mark.parametrize("name", EXACT)
def test_attention_logits_and_tokens_are_the_same(name):
    """Each layer's attention output on random inputs, logits and generated tokens equal the source's."""
    model, other, report = converted(name, torch.nn.Module.double)
    assert report["exact"] and report["method"] == "exact" and not report["candidates"]
    x = inputs()
    for index in range(3):
        assert distance(layer_output(other, index, x), layer_output(model, index, x)) < 1e-10
    _, _, kind, sizes = EXACT[name]
    for index in sizes.get("layers", range(3)):
        assert other.config.per_layer_config[index].attention_kind == kind
    model, other = model.float(), other.float()
    assert distance(logits(other), logits(model)) < 1e-5
    batch = make_batch(padding="left")
    batch.pop("position_ids")
    texts = [m.generate(**batch, do_sample=False, max_new_tokens=6, eos_token_id=None) for m in (model, other)]
    assert texts[0].shape[1] == 17 and torch.equal(*texts)


@pytest.mark.parametrize(
    "name", ["gqa-mha-biases", "mqa-mla-biases-window", "gqa-mla-full", "gqa-mla-full-qk-norm", "mla-mha-large-values"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_stays_that_of_the_dtype(name, dtype):
    """In bfloat16 and float16 an exact conversion is at most twice as far from float64 as the source is."""
    model, other, _ = converted(name, lambda model: in_dtype(model, dtype))
    assert {parameter.dtype for parameter in other.parameters()} == {dtype}
    found, rounded = logits(other), logits(model)
    if name == "gqa-mha-biases":
        assert torch.equal(found, rounded)
    exact = logits(model.double())
    assert (found - exact).norm() < 2 * (rounded - exact).norm()


# -- what can be changed freely

GAUGED = {
    "plain": ("gqa", {}),
    "biases": ("gqa", {"attention_bias": True, "num_key_value_heads": 3}),
    "partial": ("mha", {**BIASES, "rope_parameters": PARTIAL}),
}


@pytest.mark.parametrize("name", GAUGED)
def test_the_oracle_is_the_models_attention(name):
    """The oracle that the tests compare with computes what the model computes."""
    model_name, fields = GAUGED[name]
    model = random_model(model_name, **fields).double()
    x = inputs(rows=1)
    assert distance(layer_output(model, 1, x)[0], grouped(model, 1).attend(x[0])) < 1e-10


@pytest.mark.parametrize("name", GAUGED)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_changes_of_gauge_leave_attention_and_logits_alone(name, seed):
    """Queries and keys, and values and outputs, may be changed together by any gauge; keys alone may not."""
    model_name, fields = GAUGED[name]
    model = random_model(model_name, **fields).double()
    x, layer = inputs(rows=1, seed=seed), grouped(model, 0)
    expected, whole = layer_output(model, 0, x), logits(model)
    write(change_gauge(layer, *random_gauge(layer, seed)), model, 0)
    assert distance(layer_output(model, 0, x), expected) < 1e-10
    for index in (1, 2):
        other = grouped(model, index)
        write(change_gauge(other, *random_gauge(other, seed + index)), model, index)
    assert distance(logits(model), whole) < 1e-5  # norms and softmax compute in float32
    # The phases are one gauge: keys alone must not be free.
    turned = change_gauge(layer, *random_gauge(layer, seed))
    write(replace(layer, k=turned.k, k_bias=turned.k_bias), model, 0)
    assert distance(layer_output(model, 0, x), expected) > 1e-3


# -- errors that the tests above would show


def unscaled(model, attention):
    attention.scaling = attention.qk_head_dim**-0.5


def other_layout(model, attention):
    attention.rope_interleave = not attention.rope_interleave


def tiled_heads(model, attention):
    for linear in (attention.k_proj, attention.v_proj):
        rows = linear.weight.data.unflatten(0, (2, 3, 14))  # each of two heads three times
        linear.weight.data = rows.transpose(0, 1).flatten(0, 2).contiguous()


def standard_frequencies(model, attention):
    attention.frequency_indices = torch.arange(7).repeat(2)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gqa-mla-full", unscaled),
        ("gqa-mla-full", other_layout),
        ("gqa-mla-full", standard_frequencies),
        ("gqa-mha", tiled_heads),
    ],
)
def test_a_wrong_conversion_is_far_off(name, damage):
    """Each of these mistakes would be seen by the tests above."""
    model, other, _ = converted(name, torch.nn.Module.double)
    damage(other, other.model.layers[1].self_attn)
    x = inputs()
    assert distance(layer_output(other, 1, x), layer_output(model, 1, x)) > 1e-2


# -- what is free, and what is not


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_mixing_all_heads_planes_of_a_frequency_leaves_mla_alone(seed):
    """With every frequency once for each key head, any complex matrix over the heads is free."""
    model = random_model("gqa", seed=seed % 7).double()
    other, _ = convert_model(model, target_config(model.config, "mla", **FULL))
    attention, x = other.model.layers[0].self_attn, inputs(rows=1, seed=seed)
    frequencies = torch.tensor(other.config.per_layer_config[0].rope_frequency_indices)
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(14, dtype=torch.complex128)
    for frequency in range(7):
        where = (frequencies == frequency).nonzero().flatten()
        assert len(where) == 2
        mixing[where[:, None], where] = torch.randn(2, 2, generator=generator, dtype=torch.complex128)

    def mixed(rows, matrix):  # (..., 28, E): the rotary rows, half-split
        z = matrix @ torch.complex(rows[..., :14, :], rows[..., 14:, :])
        return torch.cat((z.real, z.imag), dim=-2)

    rank = other.config.per_layer_config[0].kv_lora_rank
    with torch.no_grad():
        key = attention.kv_a_proj_with_mqa.weight
        key[rank:] = mixed(key[rank:], mixing)
        query = attention.q_proj.weight.view(6, 28, 66)
        query.copy_(mixed(query, torch.linalg.inv(mixing).mH))
    assert distance(layer_output(other, 0, x), layer_output(model, 0, x)) < 1e-9


def test_biases_that_drop_out():
    """A value's bias is one of the output; a constant in unrotated key dimensions is none, in rotated ones it is."""
    model = random_model("gqa", attention_bias=True, rope_parameters=PARTIAL).double()
    x, layer = inputs(rows=1), grouped(model, 0)
    expected = layer_output(model, 0, x)
    o_bias = layer.o_bias + torch.einsum("hed,hd->e", layer.o, layer.v_bias[layer.shared])
    k_bias = layer.k_bias.clone()
    k_bias[:, 8:] = 5.0
    write(replace(layer, v_bias=torch.zeros_like(layer.v_bias), o_bias=o_bias, k_bias=k_bias), model, 0)
    assert distance(layer_output(model, 0, x), expected) < 1e-10
    write(replace(layer, k_bias=k_bias + 1.0), model, 0)
    assert distance(layer_output(model, 0, x), expected) > 1e-3


def test_interleaved_rows_are_half_split_ones_in_another_order():
    """The two rotary layouts differ by a permutation of rows."""
    model = random_model("mla", latent_norm=False, rope_interleave=False, attention_bias=True).double()
    other = random_model("mla", latent_norm=False, rope_interleave=True, attention_bias=True).double()
    other.load_state_dict(model.state_dict())
    order = torch.stack((torch.arange(3), torch.arange(3) + 3), 1).flatten()
    x, attention = inputs(), other.model.layers[0].self_attn
    assert distance(layer_output(other, 0, x), layer_output(model, 0, x)) > 1e-2
    with torch.no_grad():
        for parameter in (attention.q_proj.weight, attention.q_proj.bias):
            rows = parameter.unflatten(0, (6, 16))
            parameter.copy_(torch.cat((rows[:, :10], rows[:, 10:][:, order]), 1).flatten(0, 1))
        for parameter in (attention.kv_a_proj_with_mqa.weight, attention.kv_a_proj_with_mqa.bias):
            parameter.copy_(torch.cat((parameter[:22], parameter[22:][order])))
    assert distance(layer_output(other, 0, x), layer_output(model, 0, x)) < 1e-10
