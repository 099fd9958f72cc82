"""Wrong configurations: one error each, at construction, that names field, value and remedy."""

import importlib.util
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import KIND_SIZES, ROPES, make_config
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM, compatibility, configuration_gqa
from modeling_gqa.configuration_checks import ROPE_NEEDS

pytestmark = pytest.mark.compat

MLA = KIND_SIZES["mla"]
NAN, INF = float("nan"), float("inf")
ROPE: dict[str, dict[str, Any]] = {
    kind: {"rope_type": kind, "rope_theta": 1e4, **needed} for kind, needed in ROPES.items()
}
ROPE["yarn"] = {**ROPE["yarn"], "mscale": 1.0, "attention_factor": 1.0}
LONGROPE = ROPE["longrope"]
NO_ROPE_VALUES: tuple[Any, ...] = (NAN, INF, -INF, None, "4", True, 0, -1.0, 1e39, [], {})
ROPE_KEYS = [("linear", "rope_theta"), ("linear", "factor"), ("dynamic", "factor"), ("llama3", "high_freq_factor")]
ROPE_KEYS += [("yarn", key) for key in ROPE["yarn"] if key not in ("rope_type", "rope_theta")]
LAYER = "per_layer_config"
# Model and fields; the error names one of the fields and its value.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("gqa", {"head_dim": None, "num_attention_heads": 4}),
    ("mla", {"num_attention_heads": 4, "kv_lora_rank": None, "head_dim": None}),
    ("gqa", {"num_key_value_heads": 4}),
    ("mha", {"num_key_value_heads": 2}),
    ("mqa", {"num_key_value_heads": 6}),
    ("mla", {"num_key_value_heads": 2}),
    ("gqa", {"head_dim": 13}),
    *(("gqa", {"partial_rotary_factor": factor}) for factor in (0.4, 2.0)),
    ("mla", {"partial_rotary_factor": 0.5}),
    ("mla", {"qk_rope_head_dim": 5}),
    ("mla", {"qk_head_dim": 5}),
    ("mla", {"qk_nope_head_dim": -2}),
    ("mla", {"qk_norm": True}),
    ("mla", {"qk_norm_head_dim": 4}),
    ("gqa", {"qk_norm": True, "qk_norm_head_dim": 4}),
    *(("mla-qk-norm", fields) for fields in ({"latent_norm": True}, {"q_lora_rank": 5}, {"qk_norm_head_dim": 0})),
    ("mla-qk-norm", {"qk_norm_key_value_heads": 60000, "qk_norm_head_dim": 200}),
    *(("gqa", {name: wrong}) for name, values in {
        "attention_kind": ["GQA"], "hidden_size": ["66"], "hidden_act": ["swoosh"], "sliding_window": [1],
        "attention_dropout": [1.5, NAN, INF, 1e9], "initializer_range": [-0.1, NAN, INF, 1e9],
        "rms_norm_eps": [NAN, INF, 1e9], "softmax_scale": [NAN, INF, 1e9], "format_version": [5],
        "embedding_multiplier": [0, INF, True], "residual_multiplier": [-1.0, NAN], "logits_scaling": [0.0, "2"],
        "norm_position": ["pre", 1, None], "qk_norm_span": ["all", "all_heads", None],
        "zero_centered_norms": [1, "True", None], "scale_embeddings": [0.5, None],
        "sliding_rope_parameters": [ROPE["linear"], 3],
        "rope_scaling": [0, 3], "torch_dtype": ["float33"], "num_labels": [1.5, 10**9], "label2id": [{5: 0, "b": 1}],
        "dtype": ["float33", "nn", "int8", "auto", torch.int8, torch.float8_e4m3fn], "eos_token_id": [[], [2, 500]],
        "num_attention_heads": [10**12], "num_hidden_layers": [10**9], "is_encoder_decoder": [True],
        "output_hidden_states": ["4"],
    }.items() for wrong in values),  # type: ignore[attr-defined]
    *(("gqa", {name: wrong}) for name in ("pad_token_id", "bos_token_id", "eos_token_id") for wrong in (101, -1)),
    *(("gqa", {name: 0}) for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")),
    *(("mla", {name: -3}) for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")),
    ("mixed", {"num_hidden_layers": 10**9}),
    ("mha", {"num_attention_heads": 2**16, "head_dim": 2**16}),
    ("gqa", {"rope_parameters": {"rope_type": "spiral"}}),
    ("gqa", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    *(("gqa", {"rope_parameters": {**ROPE[kind], key: value}}) for kind, key in ROPE_KEYS for value in NO_ROPE_VALUES
      if not (value is None and key in ("beta_fast", "beta_slow", "mscale", "attention_factor"))
      if not (value == 0 and key == "mscale")),
    *(("gqa", {"rope_parameters": {**ROPE["llama3"], "llama_4_scaling_beta": value}})
      for value in NO_ROPE_VALUES if value is not None and value is not False and value != 0),
    ("gqa", {"rope_parameters": {**ROPE["llama3"], "low_freq_factor": 2.0}}),
    ("gqa", {"head_dim": 2, "rope_parameters": ROPE["dynamic"]}),
    ("mla", {"qk_rope_head_dim": 2, "rope_parameters": ROPE["dynamic"]}),
    ("mha", {LAYER: {1: {"attention_kind": "gqa", "num_key_value_heads": 5}}}),
    ("mha", {LAYER: {2: {"attention_kind": "mlp"}}}),
    *(("mha", {LAYER: {0: {name: value}}}) for name, value in (("kv_lora_rank", 5), ("head_dim", "x"))),
    ("mla", {LAYER: {0: {"kv_lora_rank": 0}}}),
    ("gqa", {LAYER: {1: {"query_bias": 3}}}),
    ("gqa", {LAYER: {1: {"attention_dropout": NAN}}}),
    ("gqa", {LAYER: {0: 5}}),
]  # fmt: skip
# Of what is missing, misspelled or in the wrong place the error names that.
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("gqa", {"num_key_value_heads": None}, "num_key_value_heads must be given"),
    ("mla-qk-norm", {"qk_norm_key_value_heads": None}, "qk_norm=True without qk_norm_key_value_heads"),
    ("gqa", {"layer_types": ["chunked_attention"] * 3}, r"layer_types has \['chunked_attention'\]"),
    ("gqa", {"layer_types": ["full_attention"]}, r"num_hidden_layers.*3.*layer_types.*1"),
    ("gqa", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
    *(("mixed-window", {"sliding_rope_parameters": rope}, said) for rope, said in (
        ({"rope_type": "default"}, r"sliding_rope_parameters=.* lacks 'rope_theta'"),
        ({**ROPE["linear"], "factor": NAN}, r"sliding_rope_parameters\['factor'\]=nan"),
        ({**ROPE["linear"], "partial_rotary_factor": 0.5}, r"sliding_rope_parameters\['partial_rotary_factor'\]=0.5"),
        (LONGROPE, r"sliding_rope_parameters\['rope_type'\]='longrope'"))),
    ("gqa", {"num_key_value_head": 2}, "'num_key_value_head', did you mean 'num_key_value_heads'"),
    ("gqa", {LAYER: {1: {"attention_knd": "mla"}}}, r"\[1\] sets 'attention_knd'.* did you mean 'attention_kind'"),
    ("gqa", {"rope_parameters": {"rope_typ": "yarn"}}, "no key 'rope_typ', did you mean 'rope_type'"),
    ("gqa", {"rope_parameters": {5: 6}}, "has the key 5"),
    *((model, {rope: {"rope_type": "default", "rope_theta": 9.0, "llama_4_scaling_beta": 0.1}},
       rf"{rope}\['llama_4_scaling_beta'\]=0.1 needs 'original_max_position_embeddings'")
      for model, rope in (("mla", "rope_parameters"), ("mixed-window", "sliding_rope_parameters"))),
    *(("gqa", {LAYER: {key: {}}}, f"the key {key!r}: keys are layer indices") for key in (3, -1, "first")),
    ("gqa", {LAYER: {1: {"hidden_size": 60}}}, r"\[1\] sets 'hidden_size', which cannot differ by layer"),
    ("gqa", {LAYER: {0: {5: 6}}}, r"\[0\] sets 5, which cannot differ by layer"),
    ("gqa", {LAYER: {0: {}, "00": {}}}, "names layer 0 twice"),
    *(("gqa", {"rope_parameters": {k: v for k, v in ROPE[kind].items() if k != key}}, f"lacks '{key}'.*'{kind}' needs")
      for kind, keys in ROPE_NEEDS.items() for key in keys if key != "original_max_position_embeddings"),
    *(("gqa", {"rope_parameters": {**LONGROPE, key: value}}, rf"\['{key}'\]{said}")
      for key in ("short_factor", "long_factor")
      for value, said in (([1.0] * 6, " has 6 entries.* 7 rotary planes"), ([1.0] * 6 + [NAN], r"\[6\]=nan"),
                          ([1.0] * 6 + ["1"], r"\[6\]='1'"), ("1", "='1'"))),
]  # fmt: skip


def leaves(fields: dict) -> Iterator[tuple[str, str]]:
    """Names and values of fields, also of those within a dictionary."""
    for name, value in fields.items():
        yield str(name), str(value)
        if isinstance(value, dict):
            yield from leaves(value)


def refusal(model: str, fields: dict[str, Any]) -> str:
    with pytest.raises((ValueError, StrictDataclassError)) as error:
        make_config(model, **fields)
    assert "\n" not in str(error.value.__cause__ or error.value)  # huggingface_hub's headline may precede ours
    return str(error.value)


@pytest.mark.parametrize(("model", "fields"), WRONG, ids=str)
def test_an_error_names_field_and_value(model, fields):
    said = refusal(model, fields)
    assert any(name in said and value in said for name, value in leaves(fields)), said


@pytest.mark.parametrize(("model", "fields", "named"), NAMED, ids=str)
def test_an_error_names_what_is_missing_or_misplaced(model, fields, named):
    assert re.search(named, refusal(model, fields), flags=re.DOTALL)


@pytest.mark.parametrize("kind", [kind for kind in ATTENTION_CLASSES if kind != "mla"])
@pytest.mark.parametrize("field", [*MLA, "q_lora_rank", "qk_head_dim", "rope_interleave", "latent_norm"])
def test_latent_fields_belong_to_mla(kind, field):
    value = False if field in ("rope_interleave", "latent_norm") else 8
    with pytest.raises(
        StrictDataclassError, match=f"{field}={value} belongs to attention_kind='mla', .*'{kind}': leave"
    ):
        make_config(kind, **{field: value})


KNOWN = sorted({field.name for field in fields(GQAConfig)} | set(configuration_gqa.FOLDED_KEYWORDS))


def one_edit_away(name: str) -> set[str]:
    """All names that one inserted, deleted, replaced or swapped character makes of `name`."""
    letters = "abcdefghijklmnopqrstuvwxyz_0123456789ABC-"
    splits = [(name[:i], name[i:]) for i in range(len(name) + 1)]
    made = {left + letter + right for left, right in splits for letter in letters}
    made |= {left + letter + right[1:] for left, right in splits if right for letter in ("", *letters)}
    return made | {left + right[1] + right[0] + right[2:] for left, right in splits if len(right) > 1}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KNOWN), st.data())
def test_a_keyword_one_edit_away_from_a_field_is_refused(field, data):
    wrong = data.draw(st.sampled_from(sorted(one_edit_away(field))))
    if wrong in KNOWN or hasattr(GQAConfig, wrong):
        return
    with pytest.raises(ValueError, match="did you mean") as error:
        GQAConfig(**{wrong: 3})
    suggested = re.search(r"no field '(.*)', did you mean '(.*)'\?", str(error.value))
    assert suggested[1] == wrong
    assert suggested[2] == field or wrong in one_edit_away(suggested[2])


def test_keywords_that_resemble_no_field_are_kept():
    """transformers stores unknown keywords; so do configurations of later versions."""
    assert make_config("gqa", invented_elsewhere=3).invented_elsewhere == 3
    assert make_config("gqa", num_labels=3).num_labels == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 67}, "kv_lora_rank=67 is larger than the 66 dimensions that it compresses"),
        ({"hidden_size": 300, "kv_lora_rank": 139}, "kv_lora_rank=139 is larger than the 138 dimensions"),
        ({"q_lora_rank": 67}, "q_lora_rank=67 is larger than the 66 dimensions"),
        ({"hidden_size": 300, "q_lora_rank": 97}, "q_lora_rank=97 is larger than the 96 dimensions"),
    ],
    ids=str,
)
def test_a_rank_larger_than_what_it_compresses_warns(fields, message):
    with pytest.warns(UserWarning, match=message):
        make_config("mla", **fields)
    (name,) = {"kv_lora_rank", "q_lora_rank"} & fields.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_config("mla", **{**fields, name: fields[name] - 1})


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [
        ("gqa", "num_key_value_heads", 5, r"num_attention_heads=6 is not divisible by num_key_value_heads=5"),
        ("mha", "num_key_value_heads", 3, r"num_key_value_heads=3 contradicts attention_kind='mha'"),
        ("mha", "num_attention_heads", 5, r"num_key_value_heads=6 contradicts attention_kind='mha', which has 5"),
        ("mla", "attention_kind", "mha", r"lora_rank=22 belongs to attention_kind='mla', but attention_kind='mha'"),
        ("mha", "attention_kind", "mla", r"kv_lora_rank=None .*attention_kind='mla'"),
        ("mla", "qk_nope_head_dim", 9, r"qk_head_dim=16 must be .* = 15"),
        ("mla", "kv_lora_rank", None, r"kv_lora_rank=None .*attention_kind='mla'"),
        ("mla", "qk_nope_head_dim", None, r"qk_nope_head_dim=None .*attention_kind='mla'"),
        ("gqa", "num_key_value_heads", None, r"num_key_value_heads must be given: num_attention_heads=6 is not divisi"),
        ("mla", "head_dim", 8, r"head_dim=8 must be qk_rope_head_dim=6 in a layer of attention_kind='mla': write that"),
        ("gqa", "layer_types", None, r"layer_types=None is no longer derived: name each layer's"),
        ("gqa", "rope_parameters", None, r"rope_parameters=None cannot be used: set it to"),
        ("gqa", "rope_parameters", {"rope_type": "linear", "factor": 2.0}, r"lacks 'rope_theta', .* needs: add it"),
        ("gqa", "layer_types", ["full_attention"], r"num_hidden_layers.*3.*layer_types.*1"),
        ("mixed", "num_attention_heads", 5, r"layer 0: num_key_value_heads=6 contradicts attention_kind='mla'"),
        ("mixed", "rope_parameters", LONGROPE, r"layer 0: .*'short_factor'\] has 7 entries"),
        ("mixed", "per_layer_config", {1: {"num_key_value_heads": 5}}, r"layer 1: .*num_key_value_heads=5"),
    ],
)
def test_the_models_constructor_checks_what_was_written_since(model, field, value, message):
    """Writing a field skips the checks of combinations, so the model's constructor runs them again."""
    config = make_config(model)
    setattr(config, field, value)
    with pytest.raises(StrictDataclassError, match=message):
        GQAForCausalLM(config)


def test_keywords_of_a_models_from_pretrained_are_checked(tmp_path):
    GQAForCausalLM(make_config("gqa")).save_pretrained(tmp_path)
    for wrong in ({"num_key_value_heads": 5}, {"per_layer_config": {0: {"num_key_value_heads": 5}}}):
        with pytest.raises(StrictDataclassError, match="num_key_value_heads=5"):
            GQAForCausalLM.from_pretrained(tmp_path, **wrong)


def load_configuration_anew():
    spec = importlib.util.spec_from_file_location("modeling_gqa.freshly_loaded", configuration_gqa.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_transformers_too_old_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(compatibility.transformers, "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers 5.17 to 5.24 and found 4\.57\.1: .*pip") as error:
        load_configuration_anew()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "times"), [("5.16.4", 1), ("5.17.0", 0), ("5.24.9", 0), ("5.99.0.dev0", 1), ("6.1.0", 1)]
)
def test_other_releases_of_transformers_are_warned_of_once(version, times, monkeypatch):
    """Nothing is refused, and a second load says nothing."""
    monkeypatch.setattr(compatibility.transformers, "__version__", version)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()  # the command line, which other tests call in this process, shows only errors
    try:
        with CaptureLogger(compatibility.logger) as said:
            load_configuration_anew()
            load_configuration_anew()
    finally:
        logging.set_verbosity(verbosity)
    assert said.out.count(version) == said.out.count("\n") == times
