"""Wrong configurations: one error each, at construction, that names field, value and remedy."""

import importlib.util
import re
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import KIND_SIZES, make_config
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM, compatibility, configuration_gqa
from modeling_gqa.configuration_checks import ROPE_NEEDS

pytestmark = pytest.mark.compat

MLA = KIND_SIZES["mla"]
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}
LONGROPE |= {"original_max_position_embeddings": 16, "rope_theta": 1e4}
NAN, INF = float("nan"), float("inf")
ROPE: dict[str, dict[str, Any]] = {
    kind: {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} for kind in ("linear", "dynamic", "yarn")
}
ROPE["yarn"] |= {"original_max_position_embeddings": 16, "beta_fast": 9.0, "mscale": 1.0, "attention_factor": 1.0}
ROPE["llama3"] = {**ROPE["yarn"], "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.0}
ROPE["longrope"] = LONGROPE
NO_ROPE_VALUES: tuple[Any, ...] = (NAN, INF, -INF, None, "4", True, 0, -1.0, 1e39, [], {})
ROPE_KEYS = [("linear", "rope_theta"), ("linear", "factor"), ("dynamic", "factor"), ("llama3", "high_freq_factor")]
ROPE_KEYS += [("yarn", key) for key in ROPE["yarn"] if key not in ("rope_type", "rope_theta")]
# what is wrong -> the model, its fields, the message
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads and hidden size": ("gqa", {"head_dim": None, "num_attention_heads": 4},
                              r"hidden_size=66 is not divisible by num_attention_heads=4: set head_dim"),
    "heads and hidden size, mla": ("mla", {"num_attention_heads": 4, "kv_lora_rank": None, "head_dim": None},
                                   r"hidden_size=66 is not divisible by num_attention_heads=4: set head_dim"),
    "heads and groups": ("gqa", {"num_key_value_heads": 4},
                         r"num_attention_heads=6 is not divisible by num_key_value_heads=4: choose one of 1, 2, 3, 6"),
    "no groups": ("gqa", {"num_key_value_heads": None}, r"num_key_value_heads must be given: num_attention_heads=6"),
    "mha and groups": ("mha", {"num_key_value_heads": 2},
                       r"num_key_value_heads=2 contradicts attention_kind='mha', which has 6: leave it out"),
    "mqa and groups": ("mqa", {"num_key_value_heads": 6},
                       r"num_key_value_heads=6 contradicts attention_kind='mqa', which has 1: leave it out"),
    "mla and groups": ("mla", {"num_key_value_heads": 2},
                       r"num_key_value_heads=2 contradicts attention_kind='mla', which .* \(6\) .*: leave it out"),
    "odd head": ("gqa", {"head_dim": 13}, r"head_dim=13 .* must be even"),
    "odd rotary part": ("gqa", {"partial_rotary_factor": 0.4}, r"head_dim=14 with partial_rotary_factor=0.4 .* even"),
    "too much rotary": ("gqa", {"partial_rotary_factor": 2.0}, r"rotary_factor'\]=2.0 must lie between 0 and 1"),
    "odd rotary key": ("mla", {"qk_rope_head_dim": 5}, r"qk_rope_head_dim=5 must be even"),
    "part of a rotary key": ("mla", {"partial_rotary_factor": 0.5},
                             r"partial_rotary_factor=0.5 .* attention_kind='mla': qk_rope_head_dim"),
    "qk_head_dim": ("mla", {"qk_head_dim": 5}, r"qk_head_dim=5 must be .* = 16: leave it out"),
    "qk_norm and mla": ("mla", {"qk_norm": True}, r"qk_norm=True .* attention_kind='mla': use latent_norm"),
    "qk_norm without heads": ("mla-qk-norm", {"qk_norm_key_value_heads": None},
                              r"qk_norm=True without qk_norm_key_value_heads .*: use latent_norm, or give qk_norm_h"),
    "heads without qk_norm": ("mla", {"qk_norm_head_dim": 4}, r"qk_norm_head_dim=4 belongs to qk_norm=True, and"),
    "heads outside mla": ("gqa", {"qk_norm": True, "qk_norm_head_dim": 4}, r"qk_norm_head_dim=4 belongs to .*='mla'"),
    "qk_norm and latent_norm": ("mla-qk-norm", {"latent_norm": True}, r"latent_norm=True does not go with qk_norm=Tr"),
    "qk_norm and q_lora_rank": ("mla-qk-norm", {"q_lora_rank": 5}, r"q_lora_rank=5 does not go with qk_norm=True"),
    "size of qk_norm": ("mla-qk-norm", {"qk_norm_head_dim": 0}, r"qk_norm_head_dim=0 must be positive|must lie"),
    "wide heads of qk_norm": ("mla-qk-norm", {"qk_norm_key_value_heads": 60000, "qk_norm_head_dim": 200},
                              r"qk_norm_key_value_heads=60000 heads of qk_norm_head_dim=200 make .* 24000000 numbers"),
    "unknown kind": ("gqa", {"attention_kind": "GQA"}, r"attention_kind='GQA' is unknown: choose 'mha', 'mqa', 'gqa'"),
    "type": ("gqa", {"hidden_size": "66"}, r"'hidden_size' expected int, got str \(value: '66'\)"),
    "dropout": ("gqa", {"attention_dropout": 1.5}, r"attention_dropout=1.5 must lie between 0 and 1"),
    "activation": ("gqa", {"hidden_act": "swoosh"}, r"hidden_act='swoosh' is unknown: choose one of .*silu"),
    "initializer": ("gqa", {"initializer_range": -0.1}, r"initializer_range=-0.1 must lie between 0 and 10"),
    "negative part of a key": ("mla", {"qk_nope_head_dim": -2}, r"qk_nope_head_dim=-2 must lie between 0 and 16777216"),
    "layer type": ("gqa", {"layer_types": ["chunked_attention"] * 3}, r"layer_types has \['chunked_attention'\]: use"),
    "number of layer types": ("gqa", {"layer_types": ["full_attention"]}, r"num_hidden_layers.*3.*layer_types.*1"),
    "no window": ("gqa", {"layer_types": ["sliding_attention"] * 3}, r"sliding_window is None: set it in tokens"),
    "window of one": ("gqa", {"sliding_window": 1}, r"sliding_window=1 .*: set 2 or more"),
    "rope type": ("gqa", {"rope_parameters": {"rope_type": "spiral"}},
                  r"rope_parameters\['rope_type'\]='spiral' is unknown: choose one of default, dynamic, .*yarn"),
    "rope by layer type": ("gqa", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
                           r"rope_parameters by layer type is not supported: give one set"),
    "rope keys": ("gqa", {"rope_parameters": {"rope_type": "yarn"}}, r"lacks 'factor', which rope_type='yarn' needs"),
    "mixed longrope, one head size": ("gqa", {"rope_parameters": LONGROPE,
                                              "per_layer_config": {0: {"attention_kind": "mqa"}}},
                                      r"rope_type'\]='longrope' .*mixed model \(per_layer_config\): use 'yarn'"),
    "mixed longrope, two head sizes": ("mixed", {"rope_parameters": LONGROPE},
                                       r"rope_type'\]='longrope' .*mixed model \(per_layer_config\): use 'yarn'"),
    "format": ("gqa", {"format_version": 4}, r"format_version=4 is newer than this code reads \(3\): update"),
    "misspelled": ("gqa", {"num_key_value_head": 2},
                   r"no field 'num_key_value_head', did you mean 'num_key_value_heads'"),
    "misspelled in a layer": ("gqa", {"per_layer_config": {1: {"attention_knd": "mla"}}},
                              r"per_layer_config\[1\] sets 'attention_knd'.* did you mean 'attention_kind'"),
    "global in a layer": ("gqa", {"per_layer_config": {1: {"hidden_size": 60}}},
                          r"per_layer_config\[1\] sets 'hidden_size', which cannot differ by layer.*: attention_kind,"),
    "layer index": ("gqa", {"per_layer_config": {3: {"attention_kind": "mla"}}},
                    r"per_layer_config has the key 3: .* below num_hidden_layers=3"),
    "negative layer index": ("gqa", {"per_layer_config": {-1: {"attention_kind": "mla"}}},
                             r"per_layer_config has the key -1: keys are layer indices, counted from 0"),
    "layer name": ("gqa", {"per_layer_config": {"first": {}}}, r"per_layer_config has the key 'first'"),
    "layer's groups": ("mha", {"per_layer_config": {1: {"attention_kind": "gqa", "num_key_value_heads": 5}}},
                       r"layer 1: num_attention_heads=6 is not divisible by num_key_value_heads=5: choose one of"),
    "layer's kind": ("mha", {"per_layer_config": {2: {"attention_kind": "mlp"}}}, r"layer 2: attention_kind='mlp' is"),
    "layer's latent": ("mha", {"per_layer_config": {0: {"kv_lora_rank": 5}}}, r"layer 0: kv_lora_rank=5 belongs to"),
    "layer's rank": ("mla", {"per_layer_config": {0: {"kv_lora_rank": 0}}}, r"layer 0: kv_lora_rank=0 must be"),
    "layer's type": ("mha", {"per_layer_config": {0: {"head_dim": "x"}}}, r"'head_dim'.*'x'"),
    **{f"{name} {value}": ("gqa", {name: value}, f"{name}={value} must lie between") for value in (NAN, INF, -INF, 1e9)
       for name in ("initializer_range", "rms_norm_eps", "softmax_scale", "attention_dropout")
       if not value < 0},
    **{f"rope {key} {value}": ("gqa", {"rope_parameters": {**ROPE[kind], key: value}}, rf"rope_parameters\['{key}'\]=")
       for kind, key in ROPE_KEYS for value in NO_ROPE_VALUES
       if not (value is None and key in ("beta_fast", "mscale", "attention_factor"))
       if not (value == 0 and key == "mscale")},
    **{f"rope {kind} without {key}": ("gqa", {"rope_parameters": {k: v for k, v in ROPE[kind].items() if k != key}},
                                      rf"lacks '{key}', which rope_type='{kind}' needs: add it")
       for kind, keys in ROPE_NEEDS.items() for key in keys if key != "original_max_position_embeddings"},
    **{f"{key} {value}": ("gqa", {"rope_parameters": {**LONGROPE, key: value}}, rf"rope_parameters\['{key}'\]{said}")
       for key in ("short_factor", "long_factor")
       for value, said in (([1.0] * 6, r" has 6 entries, .* head_dim=14 has 7 rotary planes: give a factor for each"),
                           ([1.0] * 6 + [NAN], r"\[6\]=nan must"), ([1.0] * 6 + ["1"], r"\[6\]='1' must be a number"),
                           ("1", "='1' must be a list of numbers, one per rotary plane"))},
    "llama3 factors": ("gqa", {"rope_parameters": {**ROPE["llama3"], "low_freq_factor": 2.0}},
                       r"high_freq_factor'\]=2.0 must be larger than rope_parameters\['low_freq_factor'\]=2.0"),
    "dynamic and two dimensions": ("gqa", {"head_dim": 2, "rope_parameters": ROPE["dynamic"]},
                                   r"'dynamic' needs more than 2 rotary dimensions, .* head_dim=2 rotates 2: choose a"),
    "dynamic and two dimensions, mla": ("mla", {"qk_rope_head_dim": 2, "rope_parameters": ROPE["dynamic"]},
                                        r"head_dim=2 rotates 2: choose a larger head"),
    **{f"scaling {value}": ("gqa", {"rope_scaling": value}, rf"rope_scaling={value} must be a dict, such as")
       for value in (0, 3)},
    "older name of dtype": ("gqa", {"torch_dtype": "float33"}, r"torch_dtype='float33' is no dtype of weights"),
    "rope key of another type": ("gqa", {"rope_parameters": {5: 6}}, r"has the key 5: keys must be text, as in \{"),
    "label of another type": ("gqa", {"label2id": {5: 0, "b": 1}}, r"label2id.*\{5: 0, 'b': 1\} (must|doesn't)"),
    "misspelled rope": ("gqa", {"rope_parameters": {"rope_typ": "yarn"}}, r"no key 'rope_typ', did you mean 'rope_typ"),
    **{f"{name} {value}": ("gqa", {name: value}, rf"{name}={value} is not in the vocabulary: choose from 0 to 100 \(vo")
       for name in ("pad_token_id", "bos_token_id", "eos_token_id") for value in (101, -1)},
    "no end": ("gqa", {"eos_token_id": []}, r"eos_token_id=\[\] names no token: give at least one id, or None"),
    "an end": ("gqa", {"eos_token_id": [2, 500]}, r"eos_token_id=\[2, 500\] is not in the vocabulary"),
    **{f"dtype {dtype}": ("gqa", {"dtype": dtype}, rf"dtype={dtype!r} is no dtype of weights: choose one of torch.floa")
       for dtype in ("float33", "nn", "int8", "auto", torch.int8, torch.float8_e4m3fn)},
    "numbers in a layer": ("gqa", {"per_layer_config": {0: {5: 6}}}, r"per_layer_config\[0\] sets 5, which cannot dif"),
    "no layers": ("gqa", {"per_layer_config": {0: 5}}, r"per_layer_config=\{0: 5\} must be \{layer index: \{field: va"),
    "a layer twice": ("gqa", {"per_layer_config": {0: {}, "00": {}}}, r"per_layer_config names layer 0 twice"),
    "a layer's bias": ("gqa", {"per_layer_config": {1: {"query_bias": 3}}}, r"layer 1: Field 'query_bias' with value"),
    "a layer's dropout": ("gqa", {"per_layer_config": {1: {"attention_dropout": NAN}}}, r"layer 1: attention_dropout"),
    "heads": ("gqa", {"num_attention_heads": 10**12}, r"num_attention_heads=1000000000000 must lie between 1 and 6553"),
    "layers": ("gqa", {"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000 must lie between 1 and 65536"),
    "layers, mixed": ("mixed", {"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000 must lie between"),
    "half a label": ("gqa", {"num_labels": 1.5}, r"num_labels=1.5 must be of type int"),
    "labels": ("gqa", {"num_labels": 10**9}, r"num_labels=1000000000 must lie between 1 and 65536"),
    "rows": ("mha", {"num_attention_heads": 2**16, "head_dim": 2**16}, r"num_attention_heads=65536 heads of 65536 dim"),
    "encoder": ("gqa", {"is_encoder_decoder": True}, r"is_encoder_decoder=True does not go with a decoder: leave it o"),
    "a switch": ("gqa", {"output_hidden_states": "4"}, r"output_hidden_states.*'4'"),
    **{f"no {name}": ("gqa", {name: 0}, f"{name}=0 must be positive") for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")},
    **{f"negative {name}": ("mla", {name: -3}, f"{name}=-3 must be positive") for name in (
        "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name):
    model, wrong, message = WRONG[name]
    with pytest.raises((ValueError, StrictDataclassError), match=f"(?s){message}") as error:
        make_config(model, **wrong)
    assert "\n" not in str(error.value.__cause__ or error.value)  # huggingface_hub's headline may precede ours


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
        ("mixed", "rope_parameters", LONGROPE, r"'longrope' .*per_layer_config"),
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
    with pytest.raises(ImportError, match=r"needs transformers 5.17 to 5.23 and found 4\.57\.1: .*pip") as error:
        load_configuration_anew()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "times"), [("5.16.4", 1), ("5.17.0", 0), ("5.23.9", 0), ("5.99.0.dev0", 1), ("6.1.0", 1)]
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
