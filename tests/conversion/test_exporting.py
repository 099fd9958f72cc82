"""Exported models compute what ours compute, bit by bit where they came from; the rest is refused with the reason."""

import json
import re

import pytest
import torch
from command import call
from huggingface_hub import metadata_load
from small_models import make_config, make_model
from stock_models import (
    LINEAR,
    LLAMA3,
    MODELS,
    MSCALE,
    SCALING,
    YARN,
    close,
    logits,
    randomise,
    stock_config,
    stock_model,
)
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.checkpoints.exporting import export_checkpoint, export_config, inexactness
from modeling_gqa.checkpoints.families import import_config
from modeling_gqa.checkpoints.files import open_tensors
from modeling_gqa.checkpoints.writing import import_checkpoint
from modeling_gqa.conversion import convert_model, target_config
from modeling_gqa_cli.errors import UserError

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
OLMO = {"norm_position": "after", "qk_norm": True, "qk_norm_span": "all_heads"}
GEMMA = {"norm_position": "both", "qk_norm": True, "zero_centered_norms": True, "scale_embeddings": True}
BIASES = {"query_bias": True, "key_value_bias": True, "output_bias": False}
UNROTATED = {"per_layer_config": {1: {"rope_frequency_indices": [], "rope_frequency_dim": 14}}}
MULTIPLIERS = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 3.0}


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
OTHER_FAMILY |= {"youtu-half-split": "deepseek_v3", "olmo3-full": "olmo2"}
# Without effect, or without a place here.
NOT_CARRIED = {
    "architectures",
    "num_nextn_predict_layers",  # none is exported
    "max_window_layers",  # follows from layer_types
    "no_rope_layer_interval",  # no_rope_layers says it
    "sliding_window_pattern",  # layer_types says it
    "_sliding_window_pattern",
}


# What else differs where a model of MLA pairs halves of its rotary parts, or ties its output layer to its embeddings.
PAIRED = ("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")
UNTIED = {"rope_interleave", "tie_word_embeddings"}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek-v2-biases"])
def test_import_then_export_gives_the_same_bits(name, tmp_path):
    """The rows of rotary planes are in another order where the model paired halves."""
    model = stock_model(stock_config(name, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    import_checkpoint(tmp_path / "source", tmp_path / "own", max_shard_size=50_000)
    # Those that another class expresses too.
    family = {"phi3": "phi3", "granite4": "granitemoehybrid"}.get(name.split("-")[0])
    config = export_checkpoint(
        tmp_path / "own", tmp_path / "stock", max_shard_size=60_000, engine="transformers", family=family
    )
    source, stock = open_tensors(tmp_path / "source"), open_tensors(tmp_path / "stock")
    halves = name.endswith("half-split")
    untied = config.model_type == "deepseek_v3" and model.config.tie_word_embeddings
    assert stock.keys() - source.keys() == ({"lm_head.weight"} if untied else set())
    for tensor_name, tensor in source.items():
        before, after = tensor.load(), stock[tensor_name].load()
        if halves and tensor_name.endswith(PAIRED):
            assert not torch.equal(before, after)
            before, after = before.sort(0).values, after.sort(0).values
        assert tensor.dtype == stock[tensor_name].dtype and torch.equal(before, after)
    assert config.model_type == OTHER_FAMILY.get(name, model.config.model_type)
    if name not in OTHER_FAMILY:
        before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("source", "stock"))
        unlike = NOT_CARRIED | (UNTIED if halves else set())
        assert {k: v for k, v in before.items() if k not in unlike} == {
            k: v for k, v in after.items() if k not in unlike
        }
        assert before["architectures"] == after["architectures"]
    loaded, original = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32) for folder in ("stock", "source")
    )
    assert close(logits(loaded), logits(original))


def test_a_family_can_be_chosen(tmp_path):
    model = own_model()
    assert export_config(model.config).model_type == "llama"
    stock = exported(model, tmp_path, family="mistral")
    assert stock.config.model_type == "mistral" and stock.config.sliding_window is None
    assert close(logits(stock), logits(model))


def test_companions_come_along_and_our_code_does_not(tmp_path):
    own_model().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "LICENSE").write_text("free")
    export_checkpoint(tmp_path / "own", tmp_path / "stock")
    kept = {"config.json", "generation_config.json", "model.safetensors", "LICENSE"}
    assert {path.name for path in (tmp_path / "stock").iterdir()} == kept
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())


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
    "windows": (WINDOWS, "smollm3"),
    "mlp-biases": ({"attention_bias": True, "mlp_bias": True}, "smollm3"),  # which SGLang refuses, in place of dropping
    "unrotated": ({**UNROTATED, **WINDOWS, "softmax_scale": 14**-0.5 / 2}, "smollm3"),
    "all-unrotated": ({"rope_frequency_indices": [], "rope_frequency_dim": 14, "attention_bias": True}, "smollm3"),
    "multipliers": (MULTIPLIERS, "granite"),
    "multipliers-scale": ({"logits_scaling": 3, "softmax_scale": 0.3, "attention_bias": False}, "granite"),
    "mla": ({"attention_kind": "mla", "q_lora_rank": 17}, "deepseek_v3"),
    "mla-tied": ({"attention_kind": "mla", "tie_word_embeddings": True}, "deepseek_v3"),
    "mla-halves": ({"attention_kind": "mla", "rope_interleave": False}, "deepseek_v3"),
    "mla-halves-q-lora": ({"attention_kind": "mla", "rope_interleave": False, "q_lora_rank": 17}, "deepseek_v3"),
    "mla-yarn": ({"attention_kind": "mla", "rope_parameters": YARN | MSCALE}, "deepseek_v3"),
    "mla-scale": (
        {"attention_kind": "mla", "softmax_scale": 0.3, "q_lora_rank": 17, "rope_parameters": YARN | MSCALE},
        "deepseek_v3",
    ),
    "olmo2": ({**OLMO, "softmax_scale": 14**-0.5 / 2}, "olmo2"),
    "olmo2-mha": ({**OLMO, "attention_kind": "mha", "num_key_value_heads": 6, "hidden_size": 84}, "olmo2"),
    "olmo3": ({**OLMO, **WINDOWS, "sliding_rope_parameters": YARN, "attention_bias": True}, "olmo3"),
    "gemma3": (
        {**GEMMA, **WINDOWS, "sliding_rope_parameters": YARN, "softmax_scale": 23**-0.5, "hidden_act": "gelu"},
        "gemma3_text",
    ),
    "gemma3-biases-tied": ({**GEMMA, "attention_bias": True, "tie_word_embeddings": True}, "gemma3_text"),
    "mla-nothing-unrotated": ({"attention_kind": "mla", "qk_nope_head_dim": 0}, "deepseek_v3"),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_logits_and_tokens_are_ours(name, tmp_path):
    fields, family = EXPORTED[name]
    model = own_model(**fields)
    rounded = ("other-scale", "mla-scale")
    assert (inexactness(model.config, family) is not None) == any(part in name for part in rounded)
    stock = exported(model, tmp_path)
    assert stock.config.model_type == family
    assert close(logits(stock), logits(model))
    prompt = torch.arange(5, 17).unsqueeze(0)
    expected = model.generate(prompt, max_new_tokens=7, do_sample=False)
    assert torch.equal(stock.generate(prompt, max_new_tokens=7, do_sample=False), expected)
    if family == "deepseek_v3":  # read as vLLM and SGLang do: no biases, neighbours paired, nothing tied, one epsilon
        assert not any(tensor.endswith("bias") for tensor in open_tensors(tmp_path / "stock"))
        assert stock.config.rope_interleave and "lm_head.weight" in open_tensors(tmp_path / "stock")
        for size in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"):
            assert getattr(stock.config, size) == getattr(model.config, size)
        for part, module in stock.named_modules():
            if part.endswith("_a_layernorm"):
                module.variance_epsilon = stock.config.rms_norm_eps
        assert close(logits(stock), logits(model))


# -- for transformers alone

LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 7,
    "long_factor": [2.0] * 7,
}
ROPES = {rope["rope_type"]: rope for rope in (LINEAR, LLAMA3)}
ALONE = {
    "mla-biases": (
        {"attention_kind": "mla", "q_lora_rank": 17, "attention_bias": True},
        r"vLLM .* and SGLang .* drop the biases of the attention",
    ),
    "mla-one-bias": ({"attention_kind": "mla", "output_bias": True}, "drop the biases of the attention"),
    **{
        f"mla-{name}": (
            {"attention_kind": "mla", "rope_parameters": rope},
            f"rope_type='{name}' for those of 'yarn'",
        )
        for name, rope in ROPES.items()
    },
    **{
        f"mla-yarn-{name}": (
            {"attention_kind": "mla", "rope_parameters": YARN | {name: value}},
            f"ignore .*{name}",
        )
        for name, value in {"attention_factor": 1.0, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.6}.items()
    },
    "mla-epsilon": (
        {"attention_kind": "mla", "rms_norm_eps": 1e-2, "dtype": "bfloat16"},
        "use rms_norm_eps=0.01 in the norm of a latent, where transformers uses 1e-06",
    ),
    "granite4-heads": (
        {**MULTIPLIERS, "rope_frequency_indices": [], "rope_frequency_dim": 14},
        "granitemoehybrid: vLLM 0.32 and SGLang 0.5.23 take hidden_size / num_attention_heads for head_dim=14",
    ),
    "longrope": (
        {"rope_parameters": LONG},
        r"smollm3 and granitemoehybrid: vLLM 0.32 takes the factors of long texts .* for short ones",
    ),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
        r"smollm3 and granitemoehybrid: vLLM 0.32 has no frequencies beyond max_position_embeddings",
    ),
    "qwen3-biases": ({"qk_norm": True, "attention_bias": True}, "qwen3: vLLM 0.32 drops the bias of o_proj"),
    "ministral3": (
        {"rope_parameters": YARN | SCALING},
        "ministral3: vLLM 0.32 leaves queries of long texts as they are",
    ),
    "ministral3-window": (
        {"rope_parameters": LINEAR | SCALING, "sliding_window": 5, "softmax_scale": 14**-0.5 / 2},
        "ministral3: vLLM 0.32 leaves queries of long texts as they are",
    ),
    "granite-biases": (
        {**MULTIPLIERS, "attention_bias": True, "rope_parameters": LINEAR},
        "granite: SGLang 0.5.23 drops all biases of a Granite",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_engines_would_read_otherwise_is_exported_for_transformers_alone(name, tmp_path):
    """By default it is refused with the engines and the tensors; else the card of the folder says them."""
    fields, reason = ALONE[name]
    model = own_model(**fields)
    if model.config.dtype is not None:
        model.to(model.config.dtype)
    with pytest.raises(UserError, match=f"{reason}.*--for transformers"):
        export_config(model.config)
    stock = exported(model, tmp_path, engine="transformers")
    assert close(logits(stock.float()), logits(GQAForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)))
    card = (tmp_path / "stock" / "README.md").read_text()
    assert re.search(re.sub("^[a-z0-9 ]+: ", "", reason), card)
    assert "--model-impl transformers" in card and str(tmp_path) not in card


def test_a_card_says_no_more_than_there_is_to_say(tmp_path):
    """There is none where every engine computes the model and the source has no licence; a licence is kept."""
    exported(own_model(attention_kind="mla"), tmp_path / "norm")
    assert not (tmp_path / "norm" / "stock" / "README.md").exists()
    (tmp_path / "norm" / "own" / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    export_checkpoint(tmp_path / "norm" / "own", tmp_path / "norm" / "stock", force=True)
    assert metadata_load(tmp_path / "norm" / "stock" / "README.md")["license"] == "cc-by-nc-4.0"
    assert "Do not serve" not in (tmp_path / "norm" / "stock" / "README.md").read_text()
    import_checkpoint(tmp_path / "norm" / "stock", tmp_path / "norm" / "again")
    assert metadata_load(tmp_path / "norm" / "again" / "README.md")["license"] == "cc-by-nc-4.0"
    folder = tmp_path / "biases"
    own_model(attention_kind="mla", output_bias=True).save_pretrained(folder / "own")
    (folder / "own" / "README.md").write_text("---\nlicense: mit\n---\n")
    export_checkpoint(folder / "own", folder / "stock", engine="transformers")
    assert metadata_load(folder / "stock" / "README.md")["license"] == "mit"
    export_checkpoint(folder / "own", folder / "stock", engine="transformers", force=True)  # a card is a checkpoint's


def test_the_command_takes_the_engine(tmp_path):
    own_model(qk_norm=True, attention_bias=True).save_pretrained(tmp_path / "own")
    arguments = ["export", str(tmp_path / "own"), str(tmp_path / "stock")]
    refused = call(*arguments)
    assert refused.exit_code == 1 and "--for transformers" in refused.output and not (tmp_path / "stock").exists()
    assert call(*arguments, "--for", "transformers").exit_code == 0
    assert (tmp_path / "stock" / "README.md").is_file()


# -- refused

MIXED = {"per_layer_config": {0: {"num_key_value_heads": 3}}}
REFUSED = {
    "mixed": (
        MIXED,
        r"llama .* and gemma3_text: its layers differ in num_key_value_heads \(per_layer_config\)",
    ),
    "mixed-kinds": ({"per_layer_config": {1: {"attention_kind": "mla"}}}, "its layers differ"),
    "frequencies": (
        {"rope_frequency_indices": [0, 1, 1], "rope_frequency_dim": 14},
        "rope_frequency_indices are not the frequencies that a head of this size has",
    ),
    "partial-rotary": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 4 / 7}},
        "partial_rotary_factor=0.57.*: the class rotates whole heads",
    ),
    "biases": (
        {"query_bias": True},
        "the biases are in other places than the class's: query_bias=True, key_value_bias=False, output_bias=False",
    ),
    "windows-some-biases": (
        {**WINDOWS, "output_bias": True},
        "smollm3 and granitemoehybrid: the biases are in other places",
    ),
    "windows-multipliers": (
        {**WINDOWS, **MULTIPLIERS},
        r"granite and granitemoehybrid: layer_types=\['full_attention', 'sliding_attention",
    ),
    "unrotated-multipliers": (
        {**UNROTATED, **MULTIPLIERS},
        "_text: its layers differ in rope_frequency_indices, rope_frequency_dim .*; smollm3: embedding_multiplier=12",
    ),
    "all-unrotated-qk-norm": (
        {"rope_frequency_indices": [], "rope_frequency_dim": 14, "qk_norm": True},
        "qwen3 .*: rope_frequency_indices are not .*; smollm3 and granitemoehybrid: qk_norm=True",
    ),
    "biases-and-qk-norm": (
        {**BIASES, "qk_norm": True},
        "smollm3 and granitemoehybrid: qk_norm=True; qwen3: the biases are in other places",
    ),
    "mlp-bias": ({**WINDOWS, "qk_norm": True, "mlp_bias": True}, "qwen3: mlp_bias=True"),
    "coarse-scale": (
        {"softmax_scale": 0.3, "dtype": "bfloat16", "qk_norm": True},
        "smollm3 and olmo2 and olmo3: softmax_scale=0.3 would be folded into query weights, for which .*float16",
    ),
    "mla-multiplier": (
        {"attention_kind": "mla", "residual_multiplier": 0.22},
        "deepseek_v3: residual_multiplier=0.22, which the class does not have",
    ),
    "multiplier-qk-norm": (
        {"logits_scaling": 3.0, "qk_norm": True},
        "gemma3_text: logits_scaling=3.0, which the class does not have; granite and granitemoehybrid: qk_norm=True",
    ),
    "norms-after": (
        {"norm_position": "after"},
        "smollm3 and granitemoehybrid: norm_position='after'; .*olmo3: qk_norm=False",
    ),
    "norms-both": ({**OLMO, "norm_position": "both"}, "olmo2 and olmo3: norm_position='both'"),
    "norm-of-heads": ({"qk_norm": True, "qk_norm_span": "all_heads"}, "qwen3: qk_norm_span='all_heads'; olmo2"),
    "norm-of-each-head": ({**OLMO, "qk_norm_span": "head"}, "olmo2 and olmo3: qk_norm_span='head'"),
    "norms-zero-centered": (
        {"zero_centered_norms": True},
        "llama and .* olmo3: zero_centered_norms=True; gemma3_text: scale_embeddings=False",
    ),
    "embeddings-scaled": (
        {**GEMMA, "zero_centered_norms": False},
        "llama and .* olmo3: scale_embeddings=True; gemma3_text: zero_centered_norms=False",
    ),
    "gemma-scale": (
        {**GEMMA, "softmax_scale": 0.3},
        "gemma3_text: softmax_scale=0.3 is not the root of 1 / query_pre_attn_scalar, a whole number",
    ),
    "gemma-before": ({**GEMMA, "norm_position": "before"}, "gemma3_text: norm_position='before'"),
    "gemma-hidden-size": ({**GEMMA, "hidden_size": 65}, "_text: hidden_size=65 is not a multiple of num_attention"),
    "mla-zero-centered": (
        {"attention_kind": "mla", "zero_centered_norms": True},
        "deepseek_v3: zero_centered_norms=True",
    ),
    "two-ropes": ({**WINDOWS, "qk_norm": True, "sliding_rope_parameters": LINEAR}, "qwen3: sliding_rope_parameters"),
    "windows-olmo-truncate": (
        {**OLMO, **WINDOWS, "rope_parameters": YARN | {"truncate": False}},
        "olmo3: truncate=False in rope_parameters: the class rounds",
    ),
    "scaled-biases": (
        {"attention_bias": True, "rope_parameters": YARN | SCALING},
        "granitemoehybrid: llama_4_scaling_beta=0.7 in its rotary parameters; ministral3: the biases",
    ),
    "scaled-windows": (
        {**WINDOWS, **OLMO, "sliding_rope_parameters": LINEAR | SCALING},
        "olmo3: llama_4_scaling_beta=0.7 in its rotary parameters",
    ),
    "mla-scaled": (
        {"attention_kind": "mla", "rope_parameters": YARN | SCALING},
        "deepseek_v3: llama_4_scaling_beta=0.7 in its rotary parameters",
    ),
    "mla-after": ({"attention_kind": "mla", "norm_position": "after"}, "deepseek_v3: norm_position='after'"),
    "mla-query-bias": (
        {"attention_kind": "mla", "attention_bias": True},
        "deepseek_v3: the biases are in other places",
    ),
    "mla-mlp-bias": ({"attention_kind": "mla", "mlp_bias": True}, "deepseek_v3: mlp_bias=True"),
    "mla-window": ({"attention_kind": "mla", "sliding_window": 5}, r"layer_types=\['sliding_attention'\]"),
    "mla-without-norm": (
        {"attention_kind": "mla", "latent_norm": False},
        "latent_norm=False, and the class has a norm on its latent",
    ),
    "mla-frequencies": (
        {"attention_kind": "mla", "rope_frequency_indices": [0, 2, 4], "rope_frequency_dim": 18},
        "are not the frequencies that a head",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_class_expresses_is_refused_with_the_reason(name, tmp_path):
    fields, reason = REFUSED[name]
    model = own_model(**fields)
    if model.config.dtype is not None:
        model.to(model.config.dtype)
    with pytest.raises(UserError, match=f"cannot be exported to transformers' own classes.*{reason}") as raised:
        export_config(model.config)
    assert "\n" not in str(raised.value)
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "stock").mkdir()
    with pytest.raises(UserError, match=reason):
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
        (
            {"attention_bias": True, "mlp_bias": True},
            "llama",
            "llama: SGLang 0.5.23 drops the biases of gate_proj, up_proj and down_proj",
        ),
        ({"hidden_size": 65}, "llama", "llama: hidden_size=65 is not a multiple of num_attention_heads=6"),
        ({"attention_bias": True}, "mistral", "mistral: the biases are in other places"),
        (
            {},
            "gpt2",
            "family='gpt2' is unknown: choose one of llama, mistral, .*, deepseek_v3",
        ),
        *(({name: 3.0}, other, f"{other}: {name}=3.0") for name in MULTIPLIERS for other in ("llama", "mistral")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)[:12],
)
def test_a_family_that_does_not_fit_is_refused(fields, family, reason):
    with pytest.raises(UserError, match=reason):
        export_config(own_config(**fields), family)
    with pytest.raises(UserError, match="engine='vllm' is unknown: give 'transformers'"):
        export_config(own_config(**fields), engine="vllm")


def test_only_complete_models_of_ours_are_exported(tmp_path):
    stock = stock_model(stock_config("llama"))
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(UserError, match="is a llama model: only modeling_gqa models are exported"):
        export_checkpoint(tmp_path / "stock", tmp_path / "target")
    model = GQAForCausalLM(import_config(stock.config))
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match="is the source, or holds it"):
        export_checkpoint(tmp_path / "own", tmp_path / "own", force=True)
    path = tmp_path / "own" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="truncated"):
        export_checkpoint(tmp_path / "own", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "stock"]


def test_the_way_out_is_named_for_converted_mla():
    """Exact MLA of a GQA model repeats each frequency, which no stock class can say; its source can be exported."""
    source = make_config("gqa")
    sizes = {"kv_lora_rank": 28, "qk_rope_head_dim": 28}
    converted, _ = convert_model(make_model("gqa"), target_config(source, "mla", **sizes))
    with pytest.raises(UserError, match=r"not the frequencies that a head.*: export the source, or convert"):
        export_config(converted.config)
    assert export_config(source).model_type == "llama"
    assert export_config(target_config(source, "mqa")).model_type == "llama"
    with pytest.raises(UserError) as raised:
        export_config(make_config("mixed"))
    assert "export the source" not in str(raised.value)
