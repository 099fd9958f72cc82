"""Exported models compute what ours compute, bit by bit where they came from; the rest is refused with the reason."""

import json

import pytest
import torch
from small_models import make_config, make_model
from stock_models import (
    DYNAMIC,
    LINEAR,
    LLAMA3,
    MODELS,
    MSCALE,
    YARN,
    close,
    logits,
    randomise,
    stock_config,
    stock_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.common.errors import ConversionError
from modeling_gqa.conversion import convert_model, target_config
from modeling_gqa.conversion.checkpoints.exporting import export_checkpoint, export_config, inexactness
from modeling_gqa.conversion.checkpoints.families import import_config
from modeling_gqa.conversion.checkpoints.files import open_tensors
from modeling_gqa.conversion.checkpoints.importing import import_checkpoint

pytestmark = pytest.mark.compat

SIZES = {
    "vocab_size": 103,
    "hidden_size": 66,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 14}
LATENT = {
    **SIZES,
    "attention_kind": "mla",
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
BIASES = {"query_bias": True, "key_value_bias": True, "output_bias": False}


def own_config(**fields) -> GQAConfig:
    fields = {**(LATENT if fields.get("attention_kind") == "mla" else GROUPED), **fields}
    if "rope_parameters" in fields:
        fields["rope_parameters"] = dict(fields["rope_parameters"])
    return GQAConfig(**fields)


def own_model(**fields) -> GQAForCausalLM:
    model = GQAForCausalLM(own_config(**fields)).eval()
    randomise(model)
    model.tie_weights()
    return model


def exported(model, folder, **arguments):
    """The stock model that `model` is exported as, loaded from its folder."""
    model.save_pretrained(folder / "own")
    config = export_checkpoint(folder / "own", folder / "stock", **arguments)
    stock = AutoModelForCausalLM.from_pretrained(folder / "stock")
    assert stock.config.model_type == config.model_type
    assert not type(stock).__module__.startswith(("modeling_gqa", "transformers_modules"))
    return stock


# -- there and back

# The family that each model comes back as, where not its own.
OTHER_FAMILY = {"mistral-full": "llama", "deepseek-v2": "deepseek_v3", "youtu": "deepseek_v3"}
OTHER_FAMILY["youtu-half-split"] = "deepseek_v3"
# Without effect, or without a place here.
NOT_CARRIED = {
    "architectures",
    "num_nextn_predict_layers",  # none is exported
    "max_window_layers",  # follows from layer_types
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek-v2-biases"])
def test_import_then_export_gives_the_same_bits(name, tmp_path):
    model = stock_model(stock_config(name, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    import_checkpoint(tmp_path / "source", tmp_path / "own", max_shard_size=50_000)
    config = export_checkpoint(tmp_path / "own", tmp_path / "stock", max_shard_size=60_000)
    source, stock = open_tensors(tmp_path / "source"), open_tensors(tmp_path / "stock")
    assert source.keys() == stock.keys()
    for tensor_name, tensor in source.items():
        assert tensor.dtype == stock[tensor_name].dtype and torch.equal(tensor.load(), stock[tensor_name].load())
    assert config.model_type == OTHER_FAMILY.get(name, model.config.model_type)
    if name not in OTHER_FAMILY:
        before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("source", "stock"))
        assert {k: v for k, v in before.items() if k not in NOT_CARRIED} == {
            k: v for k, v in after.items() if k not in NOT_CARRIED
        }
        assert before["architectures"] == after["architectures"]
    loaded, original = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32) for folder in ("stock", "source")
    )
    assert close(logits(loaded), logits(original))


def test_a_stride_of_frequencies_is_a_smaller_heads():
    config = own_config(rope_frequency_indices=list(range(0, 14, 2)), rope_frequency_dim=28)
    assert export_config(config).head_dim == 14


def test_a_family_can_be_chosen(tmp_path):
    model = own_model()
    assert export_config(model.config).model_type == "llama"
    stock = exported(model, tmp_path, family="mistral")
    assert stock.config.model_type == "mistral" and stock.config.sliding_window is None
    assert close(logits(stock), logits(model))


def test_companions_come_along_and_our_code_does_not(tmp_path):
    model = own_model()
    model.save_pretrained(tmp_path / "own")
    vocabulary = {f"w{index}": index for index in range(9)}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        "added_tokens": [],
    }
    (tmp_path / "own" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    export_checkpoint(tmp_path / "own", tmp_path / "stock")
    assert {path.name for path in (tmp_path / "stock").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "stock")("w5")["input_ids"] == [5]


# -- the same function

EXPORTED = {
    "mqa": ({"num_key_value_heads": 1, "attention_kind": "mqa", "rope_parameters": YARN}, "llama"),
    "mha-biases": ({"attention_kind": "mha", "num_key_value_heads": 6, "attention_bias": True}, "llama"),
    "proportional": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        "llama",
    ),
    "odd-hidden-size": ({"hidden_size": 65}, "mistral"),
    "windows-qwen2": ({**WINDOWS, **BIASES, "tie_word_embeddings": True}, "qwen2"),
    "windows-qwen3": ({**WINDOWS, "qk_norm": True}, "qwen3"),
    "all-frequencies": ({"rope_frequency_indices": list(range(7)), "rope_frequency_dim": 14}, "llama"),
    "half-scale": ({"softmax_scale": 14**-0.5 / 2}, "llama"),
    "other-scale": ({"softmax_scale": 0.3, "attention_bias": True}, "llama"),
    "other-scale-qk-norm": ({"softmax_scale": 0.3, "qk_norm": True}, "qwen3"),
    "mla": ({"attention_kind": "mla", "q_lora_rank": 17, "attention_bias": True}, "deepseek_v3"),
    "mla-yarn": ({"attention_kind": "mla", "rope_parameters": YARN | MSCALE}, "deepseek_v3"),
    "mla-scale": (
        {"attention_kind": "mla", "softmax_scale": 0.3, "q_lora_rank": 17, "rope_parameters": YARN | MSCALE},
        "deepseek_v3",
    ),
    "mla-nothing-unrotated": ({"attention_kind": "mla", "qk_nope_head_dim": 0}, "deepseek_v3"),
    **{
        f"mla-stride-{rope['rope_type']}": (
            {
                "attention_kind": "mla",
                "rope_frequency_indices": [0, 3, 6],
                "rope_frequency_dim": 18,
                "rope_parameters": rope,
            },
            "deepseek_v3",
        )
        for rope in ({"rope_type": "default", "rope_theta": 500.0}, LINEAR, LLAMA3)
    },
}


@pytest.mark.parametrize("name", EXPORTED)
def test_logits_and_tokens_are_ours(name, tmp_path):
    fields, family = EXPORTED[name]
    model = own_model(**fields)
    assert (inexactness(model.config) is not None) == ("other-scale" in name or name == "mla-scale")
    stock = exported(model, tmp_path)
    assert stock.config.model_type == family
    assert close(logits(stock), logits(model))
    prompt = torch.arange(5, 17).unsqueeze(0)
    expected = model.generate(prompt, max_new_tokens=7, do_sample=False)
    assert torch.equal(stock.generate(prompt, max_new_tokens=7, do_sample=False), expected)


@pytest.mark.parametrize("q_lora_rank", [None, 17])
@pytest.mark.parametrize("biases", [{}, {"key_value_bias": True}, {"output_bias": True}])
def test_a_latent_without_norm_is_padded(biases, q_lora_rank, tmp_path):
    model = own_model(attention_kind="mla", latent_norm=False, q_lora_rank=q_lora_rank, softmax_scale=0.3, **biases)
    assert "1e-4" in inexactness(model.config)
    stock = exported(model, tmp_path)
    assert stock.config.kv_lora_rank == 23 and stock.config.q_lora_rank == (q_lora_rank and 18)
    assert close(logits(stock), logits(model), 1e-5)  # ten times better than is promised
    for layer in range(2):  # a norm that did divide by the latent would be told apart
        del stock.model.layers[layer].self_attn.kv_a_layernorm.weight
        stock.model.layers[layer].self_attn.kv_a_layernorm.weight = torch.nn.Parameter(torch.ones(23))
    assert not close(logits(stock), logits(model), 1e-2)


def test_padding_in_bfloat16_costs_no_more_than_bfloat16(tmp_path):
    model = own_model(attention_kind="mla", latent_norm=False).to(torch.bfloat16)
    stock = exported(model, tmp_path)
    assert stock.dtype == torch.bfloat16
    # The weights' own precision is kept: computed in float32, little is lost.
    assert close(logits(stock.float()), logits(model.float()), 5e-4)
    exact = logits(model)
    ours = (logits(model.bfloat16()).float() - exact).abs().max()
    assert (logits(stock.bfloat16()).float() - exact).abs().max() < 2 * ours


# -- refused

MIXED = {"per_layer_config": {0: {"num_key_value_heads": 3}}}
REFUSED = {
    "mixed": (
        MIXED,
        r"llama and mistral and qwen2 and qwen3: its layers differ in num_key_value_heads \(per_layer_config\)",
    ),
    "mixed-kinds": ({"per_layer_config": {1: {"attention_kind": "mla"}}}, "its layers differ"),
    "frequencies": (
        {"rope_frequency_indices": [0, 1, 1], "rope_frequency_dim": 14},
        "rope_frequency_indices of rope_frequency_dim=14 are not the frequencies of a head of 14 dimensions",
    ),
    "partial-rotary": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 4 / 7}},
        "partial_rotary_factor=0.57.*: the class rotates whole heads",
    ),
    "biases": (
        {"query_bias": True},
        "the biases are in other places than the class's: query True, key and value False, output False",
    ),
    "window-without-biases": (WINDOWS, r"llama and mistral: layer_types=\['full_attention', 'sliding_attention'\]"),
    "biases-and-qk-norm": ({**BIASES, "qk_norm": True}, "qwen2: qk_norm=True; qwen3: the biases are in other places"),
    "mlp-bias": ({**WINDOWS, "qk_norm": True, "mlp_bias": True}, "qwen3: mlp_bias=True"),
    "hidden-size": (
        {"hidden_size": 65, "attention_bias": True},
        "llama: hidden_size=65 is not a multiple of num_attention_heads=6",
    ),
    "coarse-scale": ({"softmax_scale": 0.3, "dtype": "bfloat16"}, "folded into query weights, for which .*float16"),
    "mla-query-bias": ({"attention_kind": "mla", "attention_bias": True}, r"q_proj has a bias \(query_bias=True\)"),
    "mla-biases": ({"attention_kind": "mla", "output_bias": True}, "the biases are in other places"),
    "mla-mlp-bias": ({"attention_kind": "mla", "mlp_bias": True}, "deepseek_v3: mlp_bias=True"),
    "mla-window": ({"attention_kind": "mla", "sliding_window": 5}, r"layer_types=\['sliding_attention'\]"),
    "mla-float16": (
        {"attention_kind": "mla", "latent_norm": False, "dtype": "float16"},
        "padding channel of a latent without a norm overflows float16",
    ),
    "mla-frequencies": (
        {"attention_kind": "mla", "rope_frequency_indices": [0, 2, 4], "rope_frequency_dim": 18},
        "are not the frequencies of a head of 6 dimensions",
    ),
    **{
        f"mla-stride-{rope['rope_type']}": (
            {
                "attention_kind": "mla",
                "rope_frequency_indices": [0, 3, 6],
                "rope_frequency_dim": 18,
                "rope_parameters": rope,
            },
            "are not the frequencies of a head of 6 dimensions",
        )
        for rope in (YARN, DYNAMIC)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_class_expresses_is_refused_with_the_reason(name, tmp_path):
    fields, reason = REFUSED[name]
    model = own_model(**fields)
    if model.config.dtype is not None:
        model.to(model.config.dtype)
    with pytest.raises(ConversionError, match=f"cannot be exported to transformers' own classes.*{reason}") as raised:
        export_config(model.config)
    assert "\n" not in str(raised.value)
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "stock").mkdir()
    with pytest.raises(ConversionError, match=reason):
        export_checkpoint(tmp_path / "own", tmp_path / "stock", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "stock"]
    assert list((tmp_path / "stock").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "family", "reason"),
    [
        ({}, "qwen2", "qwen2: the biases are in other places"),
        ({}, "qwen3", "qwen3: qk_norm=False"),
        ({}, "deepseek_v3", "deepseek_v3: attention_kind='gqa' is not this class's"),
        ({"attention_kind": "mla"}, "llama", "llama: attention_kind='mla' is not this class's"),
        ({"attention_bias": True}, "mistral", "mistral: the biases are in other places"),
        ({}, "gpt2", "family='gpt2' is unknown: choose one of llama, mistral, qwen2, qwen3, deepseek_v3"),
    ],
    ids=["qwen2", "qwen3", "latent-family", "grouped-family", "mistral", "unknown"],
)
def test_a_family_that_does_not_fit_is_refused(fields, family, reason):
    with pytest.raises(ConversionError, match=reason):
        export_config(own_config(**fields), family)


def test_only_complete_models_of_ours_are_exported(tmp_path):
    stock = stock_model(stock_config("llama"))
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(ConversionError, match="is a llama model: only modeling_gqa models are exported"):
        export_checkpoint(tmp_path / "stock", tmp_path / "target")
    model = GQAForCausalLM(import_config(stock.config))
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(ConversionError, match="is the source, or holds it"):
        export_checkpoint(tmp_path / "own", tmp_path / "own", force=True)
    path = tmp_path / "own" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConversionError, match="truncated"):
        export_checkpoint(tmp_path / "own", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "stock"]


def test_the_way_out_is_named_for_converted_mla():
    """Exact MLA of a GQA model repeats each frequency, which no stock class can say; its source can be exported."""
    source = make_config("gqa")
    sizes = {"kv_lora_rank": 28, "qk_rope_head_dim": 28}
    converted, _ = convert_model(make_model("gqa"), target_config(source, "mla", **sizes))
    with pytest.raises(ConversionError, match=r"not the frequencies of a head of 28 .*: export the source, or convert"):
        export_config(converted.config)
    assert export_config(source).model_type == "llama"
    assert export_config(target_config(source, "mqa")).model_type == "llama"
    with pytest.raises(ConversionError) as raised:
        export_config(make_config("mixed"))
    assert "export the source" not in str(raised.value)
