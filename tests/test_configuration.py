"""GQAConfig: what it derives, stores, loads and refuses."""

import copy
import json
import pickle
import tempfile

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from random_configurations import ARRIVALS, sound
from small_models import (
    DEFAULT_ROPE,
    KIND_SIZES,
    MODELS,
    OLMO_MODELS,
    ROPES,
    SCALING,
    SIZES,
    make_batch,
    make_config,
    make_model,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM
from modeling_gqa.configuration_checks import ATTENTION_KINDS, MLA_FIELDS

pytestmark = pytest.mark.compat

MLA = KIND_SIZES["mla"]


def layers_of(config) -> list[tuple]:
    """Kind, key/value heads and head sizes (D or P, R, N + P, V) of each layer."""
    names = ("attention_kind", "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_head_dim", "v_head_dim")
    return [tuple(getattr(layer, name) for name in names) for layer in config.per_layer_config]


def same(one, other) -> bool:
    return one.to_dict() == other.to_dict() and layers_of(one) == layers_of(other)


# -- what follows from what is given


def test_the_default_is_a_small_gqa_model():
    config = GQAConfig()
    assert layers_of(config) == [("gqa", 3, 64, None, None, None)] * 12
    assert config.projection_biases == (False, False, False)
    assert (config.model_type, config.format_version, config.rope_parameters["rope_theta"]) == ("gqa", 2, 10000.0)
    with torch.device("meta"):
        assert 50e6 < GQAForCausalLM(config).num_parameters() < 200e6


def test_the_kinds_are_those_of_the_classes():
    assert tuple(ATTENTION_CLASSES) == ATTENTION_KINDS
    assert all(kind in attention_class.kinds for kind, attention_class in ATTENTION_CLASSES.items())


@pytest.mark.parametrize(("kind", "heads"), [("mha", 8), ("mqa", 1), ("gqa", 2), ("mla", 8)])
def test_key_value_heads_follow_from_the_kind(kind, heads):
    assert make_config(kind, num_attention_heads=8, num_key_value_heads=None).num_key_value_heads == heads
    assert make_config(kind, num_attention_heads=8, num_key_value_heads=heads).num_key_value_heads == heads


@pytest.mark.parametrize(("size", "rank", "nope", "rope", "value"), [(128, 512, 128, 64, 128), (10, 40, 10, 4, 10)])
def test_latent_sizes_have_the_proportions_of_deepseek_v2(size, rank, nope, rope, value):
    expected = [("mla", 4, rope, rank, nope + rope, value)]
    by_head = GQAConfig(attention_kind="mla", num_hidden_layers=1, num_attention_heads=4, head_dim=size)
    by_hidden = GQAConfig(attention_kind="mla", num_hidden_layers=1, num_attention_heads=4, hidden_size=4 * size)
    assert layers_of(by_head) == layers_of(by_hidden) == expected
    assert (by_head.q_lora_rank, by_head.rope_interleave, by_head.latent_norm) == (None, True, True)


def test_fields_of_one_kind_are_none_for_the_others(kind):
    values = [getattr(make_config(kind), name) for name in MLA_FIELDS if name != "q_lora_rank"]
    assert all((value is not None) == (kind == "mla") for value in values)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"attention_bias": True}, (True, True, True)),
        ({"query_bias": True}, (True, False, False)),
        ({"key_value_bias": True}, (False, True, False)),
        ({"attention_bias": True, "output_bias": False}, (True, True, False)),
    ],
    ids=str,
)
def test_biases_apart(kind, fields, expected):
    """`query_bias`, `key_value_bias` and `output_bias` each override `attention_bias` for their projection."""
    attention = GQAForCausalLM(make_config(kind, **fields)).model.layers[1].self_attn
    names = ("q_proj", "kv_a_proj_with_mqa" if kind == "mla" else "v_proj", "o_proj")
    assert tuple(getattr(attention, name).bias is not None for name in names) == expected
    if kind != "mla":
        assert (attention.k_proj.bias is not None) == expected[1]


# -- layers that differ

FULL_MLA = ("mla", 6, 6, 22, 16, 13)
BY_LAYER = {
    "kinds": ("gqa", {0: {"attention_kind": "mla", **MLA}, 2: {"attention_kind": "mqa"}},
              [FULL_MLA, ("gqa", 2, 14, None, None, None), ("mqa", 1, 14, None, None, None)]),
    "sizes derived": ("mha", {1: {"attention_kind": "mla"}, 2: {"attention_kind": "mla", "head_dim": 8}},
                      [("mha", 6, 14, None, None, None), ("mla", 6, 6, 56, 20, 14), ("mla", 6, 4, 32, 12, 8)]),
    "from mla": ("mla", {0: {"attention_kind": "mqa", "head_dim": 10}, 1: {"kv_lora_rank": 9}},
                 [("mqa", 1, 10, None, None, None), ("mla", 6, 6, 9, 16, 13), FULL_MLA]),
    "part of a key": ("mla", {2: {"qk_nope_head_dim": 3}}, [FULL_MLA, FULL_MLA, ("mla", 6, 6, 22, 9, 13)]),
    "heads": ("mha", {"1": {"num_attention_heads": 3}},
              [("mha", 6, 14, None, None, None), ("mha", 3, 14, None, None, None), ("mha", 6, 14, None, None, None)]),
    "no attention": ("gqa", {1: {"intermediate_size": 31}}, [("gqa", 2, 14, None, None, None)] * 3),
}  # fmt: skip


def by_rewriting(given, change):
    """Stored with overrides, which others replace when it is loaded."""
    return ARRIVALS["keyword"]({**given, "per_layer_config": {0: {"attention_kind": "mla"}}}, change)


@pytest.mark.parametrize("arrival", [*ARRIVALS.values(), by_rewriting], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BY_LAYER)
def test_layers_tell_the_truth_however_overrides_arrive(name, arrival, tmp_path):
    """`per_layer_config` gives the same sizes by constructor, assignment and loading, and modules have these sizes."""
    model, overrides, expected = BY_LAYER[name]
    config = arrival({**SIZES, **MODELS[model]}, {"per_layer_config": overrides})
    assert layers_of(config) == expected
    config.save_pretrained(tmp_path)
    assert same(GQAConfig.from_pretrained(tmp_path), config)
    shapes = [layer.self_attn.o_proj.in_features for layer in GQAForCausalLM(config).model.layers]
    heads = [layer.num_attention_heads for layer in config.per_layer_config]
    assert shapes == [n * (layer[5] or layer[2]) for n, layer in zip(heads, expected, strict=True)]


def test_copies_are_equal(model_name):
    """`==` works where layers differ, too, although transformers raises when such fields are read."""
    config = make_config(model_name)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config == make_config(model_name)
    assert (config == make_config("gqa")) == (model_name == "gqa")
    if model_name == "mixed":
        config.per_layer_config = None
        assert config == make_config("gqa")


@pytest.mark.parametrize("new", ATTENTION_CLASSES)
def test_loading_as_another_kind_derives_it_anew(model_name, new, tmp_path):
    """`from_pretrained(folder, attention_kind=...)` derives the sizes of the new kind and keeps none of the old."""
    make_config(model_name).save_pretrained(tmp_path)
    overrides = {"attention_kind": new, "head_dim": 14, **({"num_key_value_heads": 3} if new == "gqa" else {})}
    if "per_layer_config" in MODELS[model_name]:
        with pytest.raises(ValueError, match=r"would reach no layer.*per_layer_config"):
            GQAConfig.from_pretrained(tmp_path, **overrides)
        overrides["per_layer_config"] = None
    config = GQAConfig.from_pretrained(tmp_path, **overrides)
    assert [layer.attention_kind for layer in config.per_layer_config] == [new] * 3
    assert config.num_key_value_heads == {"mha": 6, "mqa": 1, "gqa": 3, "mla": 6}[new]
    sizes = (config.head_dim, config.v_head_dim, config.qk_head_dim)
    assert sizes == ((6, 14, 20) if new == "mla" else (14, None, None))
    GQAForCausalLM(config)


@pytest.mark.parametrize(("stored", "window"), [(None, 4), (4, None)])
def test_a_window_given_at_loading_reaches_every_layer(stored, window, tmp_path):
    make_config("gqa", sliding_window=stored).save_pretrained(tmp_path)
    config = GQAConfig.from_pretrained(tmp_path, sliding_window=window, num_hidden_layers=2)
    assert config.sliding_window == window
    assert config.layer_types == ["sliding_attention" if window else "full_attention"] * 2


@pytest.mark.parametrize("fields", [{"rope_theta": 5.0}, {"output_bias": True, "mlp_bias": True}], ids=str)
def test_keywords_of_from_pretrained_take_effect(model_name, fields, tmp_path):
    """A keyword of `from_pretrained` gives the configuration that the constructor makes with it."""
    make_config(model_name).save_pretrained(tmp_path)
    expected = make_config(model_name, **fields)
    expected.save_pretrained(tmp_path / "expected")  # which names the code's files in it
    assert same(GQAConfig.from_pretrained(tmp_path, **fields), expected)


# -- storing and loading


@pytest.mark.filterwarnings("ignore:.*is larger than the .* dimensions:UserWarning")
@settings(max_examples=120, deadline=None)
@given(sound())
def test_json_round_trip_is_exact(fields):
    with tempfile.TemporaryDirectory() as folder:
        config = GQAConfig(**fields)
        assert config == GQAConfig(**fields)
        config.save_pretrained(folder)
        loaded = GQAConfig.from_pretrained(folder)
        assert same(loaded, config)
        assert loaded == GQAConfig.from_pretrained(folder)
        for use_diff in (True, False):
            assert same(GQAConfig.from_dict(json.loads(config.to_json_string(use_diff=use_diff))), config)


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
@pytest.mark.parametrize("model", ["gqa", "mla", "mixed"])
def test_every_rope_type_builds_a_model_that_runs(rope_type, model):
    sizes = {"max_position_embeddings": 20}
    if model == "mla":
        sizes["qk_rope_head_dim"] = 14
    plain = make_model(model, **sizes)
    config = {**sizes, "rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **ROPES[rope_type]}}
    if (rope_type, model) == ("longrope", "mixed"):
        with pytest.raises(StrictDataclassError, match=r"layer 0: .*'short_factor'\] has 7 entries"):
            make_config(model, **config)
        return
    scaled, batch = make_model(model, **config), make_batch(length=30)
    logits = scaled(**batch).logits
    assert logits.isfinite().all()
    assert torch.allclose(logits, plain(**batch).logits, atol=1e-4) == (rope_type == "default")
    assert torch.equal(GQAForCausalLM(GQAConfig.from_dict(scaled.config.to_dict())).model.rotary_emb["14"].inv_freq,
                       make_model(model, **config).model.rotary_emb["14"].inv_freq)  # fmt: skip


def test_rope_parameters_of_the_caller_are_left_alone():
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    before = dict(rope)
    assert make_config("gqa", rope_parameters=rope).rope_parameters["original_max_position_embeddings"] == 256
    assert rope == before


def test_format_versions(tmp_path):
    """A checkpoint without a version is one of the first; one from the future is not guessed at."""
    saved = make_config("mixed").to_dict()
    del saved["format_version"]
    assert same(GQAConfig.from_dict(saved), make_config("mixed"))
    (tmp_path / "config.json").write_text(json.dumps({**saved, "format_version": 5}))
    with pytest.raises(
        StrictDataclassError, match=r"format_version=5 is newer than this code reads .4.: update modeling_gqa"
    ):
        GQAConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_name", [name for name in MODELS if "norm_position" not in MODELS[name]])
def test_only_configurations_that_earlier_code_cannot_read_have_a_newer_version(model_name):
    """Version 3 is that of MLA with qk_norm, however its fields were given; a mixed model names no new field else."""
    config, least = make_config(model_name), {"mla-qk-norm": 3, "mla-unrotated": 4}.get(model_name, 2)
    assert config.format_version == least
    stored = config.to_dict()
    new = {"qk_norm_head_dim", "qk_norm_key_value_heads"}
    assert not any(new & layer.keys() for layer in stored.get("per_layer_config", {}).values())
    assert same(GQAConfig.from_dict({**stored, "format_version": 2}), config)
    normed = {name: MODELS["mla-qk-norm"][name] for name in ("attention_kind", "qk_norm", *sorted(new))}
    config.per_layer_config = {1: {**normed, "head_dim": 14, "q_lora_rank": None, **MLA}}
    assert config.format_version == max(3, least)
    again = GQAConfig.from_dict(config.to_dict())
    assert same(again, config) and [layer.qk_norm_head_dim for layer in again.per_layer_config][1] == 15
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        multiplied = make_config(model_name, **{name: 3})
        assert multiplied.format_version == 4 and same(GQAConfig.from_dict(multiplied.to_dict()), multiplied)
        setattr(config, name, 3)
        assert config.format_version == 4
        setattr(config, name, 1.0)
    written = make_config("mla")
    for name, value in {**normed, "latent_norm": False}.items():  # a write derives nothing
        setattr(written, name, value)
    written.validate()
    assert same(written, make_config("mla-qk-norm"))


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_position": "after"},
        {"norm_position": "both"},
        {"qk_norm": True, "qk_norm_span": "all_heads"},
        {"zero_centered_norms": True},
        {"scale_embeddings": True},
        {"sliding_window": 5, "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        {"rope_parameters": {**DEFAULT_ROPE, **SCALING}},
    ],
    ids=lambda fields: "-".join(map(str, fields))[:30],
)
@pytest.mark.parametrize("arrival", ARRIVALS.values(), ids=lambda f: f.__name__)
def test_each_field_of_version_4_raises_the_version(fields, arrival):
    config = arrival({**SIZES, **MODELS["gqa"]}, fields)
    assert config.format_version == 4 and GQAConfig.from_dict(config.to_dict()).format_version == 4


def test_the_scaling_of_queries_written_in_place_raises_the_version():
    config = make_config("gqa", rope_parameters={**DEFAULT_ROPE, "original_max_position_embeddings": 4})
    assert config.format_version == 2
    config.rope_parameters["llama_4_scaling_beta"] = 0.5
    assert GQAForCausalLM(config).config.format_version == 4
    rope = {**DEFAULT_ROPE, **SCALING, "llama_4_scaling_beta": 0}
    assert make_config("gqa", rope_parameters=rope).format_version == 2


def test_rotary_parameters_of_layers_with_a_window_are_theirs():
    config = make_config("olmo")
    own = OLMO_MODELS["olmo"]["sliding_rope_parameters"]
    ropes = [layer.rope_parameters for layer in config.per_layer_config]
    assert ropes == [own, config.rope_parameters, own] and config.rope_parameters != own
    angles = [make_model("olmo").model.rotary_emb[name].inv_freq for name in ("14_sliding", "14")]
    torch.testing.assert_close(angles[0], 50.0 ** (-torch.arange(7) / 7) / 3)
    torch.testing.assert_close(angles[1], 10000.0 ** (-torch.arange(7) / 7))


def test_loading_without_qk_norm_drops_its_heads(tmp_path):
    make_config("mla-qk-norm").save_pretrained(tmp_path)
    config = GQAConfig.from_pretrained(tmp_path, qk_norm=False)
    assert layers_of(config) == layers_of(make_config("mla"))
    assert (config.qk_norm_head_dim, config.qk_norm_key_value_heads, config.latent_norm) == (None, None, True)
