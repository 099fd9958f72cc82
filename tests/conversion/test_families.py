"""Every field of every family is followed, refused by name, or shown not to matter."""

import copy
from dataclasses import fields

import pytest
import torch
from stock_models import (
    DENSE,
    DYNAMIC,
    GROUPED,
    LATENT,
    LINEAR,
    LLAMA3,
    LONGROPE,
    MSCALE,
    MULTIPLIERS,
    NO_EXPERTS,
    PARTIAL,
    SCALING,
    SIZES,
    WINDOW,
    YARN,
    close,
    logits,
    own_model,
    stock_model,
)
from transformers import CONFIG_MAPPING

from modeling_gqa.checkpoints.export_blockers import TWO_ROPES
from modeling_gqa.checkpoints.families import FAMILIES, IGNORED_FIELDS, import_config
from modeling_gqa_cli.errors import UserError


def is_latent(family: str) -> bool:
    return family in ("deepseek_v2", "deepseek_v3", "youtu")


def family_fields(family: str) -> dict:
    """A model of the family in which every field matters: dynamic rope beyond its length, windows in some layers."""
    own = {**LATENT, **DENSE} if is_latent(family) else {**GROUPED}
    if family == "phi3":  # whose head size follows, and whose class knows no dynamic rope
        own = {"num_key_value_heads": 2, "hidden_size": 84, "sliding_window": 5, "rope_parameters": PARTIAL}
    if family == "youtu":
        own.pop("first_k_dense_replace")
        own["tie_word_embeddings"] = False
    if family.startswith("qwen"):
        own |= WINDOW
    if family == "granite":
        own |= MULTIPLIERS
    if family == "granitemoehybrid":
        own |= MULTIPLIERS | NO_EXPERTS | {"position_embedding_type": "rope"}
    if family == "smollm3":
        own |= {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2}
        own["tie_word_embeddings"] = False
    if family in ("mistral", "ministral3", *TWO_ROPES):
        own["sliding_window"] = 5
    if family == "ministral3":  # whose class needs these
        own["rope_parameters"] = DYNAMIC | SCALING
    if family == "gemma3_text":
        own["tie_word_embeddings"] = False
    if family in TWO_ROPES:
        own["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    return {**SIZES, "max_position_embeddings": 11, "rope_parameters": DYNAMIC, **own}


# A value unlike the model's for every field that any of the families has, with what must change with it.
CHANGED = {
    "architectures": ["SomeModel"],
    "attention_bias": True,
    "attention_dropout": 0.3,
    "attention_multiplier": 0.5,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 3,
    "dtype": "bfloat16",
    "embd_pdrop": 0.3,
    "embedding_initializer_range": 0.5,
    "embedding_multiplier": 3.0,
    "eos_token_id": [5, 6],
    "first_k_dense_replace": 2,
    "head_dim": 10,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 30.0,
    "hidden_act": "gelu",
    "hidden_activation": "relu",
    "hidden_size": 78,
    "id2label": {0: "a", 1: "b", 2: "c"},
    "initializer_range": 0.3,
    "intermediate_size": 46,
    "is_encoder_decoder": True,
    "kv_lora_rank": 20,
    "label2id": {"a": 0},
    "logits_scaling": 0.7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    **{f"mamba_{name}": 3 for name in ("n_groups", "d_state", "d_conv", "chunk_size")},
    "mamba_conv_bias": False,
    "mamba_d_head": 66,
    "mamba_expand": 4,
    "mamba_n_heads": 2,
    "mamba_proj_bias": True,
    "max_position_embeddings": 13,
    "max_window_layers": 2,
    "mlp_bias": True,
    "moe_intermediate_size": 11,
    "n_group": 2,
    "n_routed_experts": 3,
    "n_shared_experts": 3,
    "no_rope_layer_interval": 3,
    "no_rope_layers": [0, 0, 1],
    "norm_topk_prob": None,
    "num_attention_heads": 2,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "num_local_experts": 2,
    "num_mtp_layers": 2,
    "original_max_position_embeddings": 9,
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 9,
    "position_embedding_type": None,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "q_lora_rank": None,
    "qk_head_dim": 15,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 20,
    "resid_pdrop": 0.1,
    "residual_multiplier": 2,
    "return_dict": False,
    "rms_norm_eps": 0.3,
    "rope_interleave": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    "routed_scaling_factor": 0.1,
    "router_aux_loss_coef": 0.5,
    "shared_intermediate_size": 46,
    "sliding_window": 3,
    "tie_word_embeddings": True,
    "time_step_limit": (0.1, 1.0),
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
    "transformers_version": "5.0.0",
    "use_bidirectional_attention": True,
    "use_cache": False,
    "use_sliding_window": False,
    "v_head_dim": 9,
    "vocab_size": 105,
}
# Mapped, but not for the logits' sake: these are carried over.
CARRIED = (
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "use_cache",
)
# What has one value only.
LATENT_REFUSED = {"head_dim", "qk_head_dim", "num_key_value_heads", "first_k_dense_replace"}
REFUSED = {
    family: {"is_encoder_decoder", "return_dict"} | (LATENT_REFUSED if is_latent(family) else set())
    for family in FAMILIES
}
REFUSED["phi3"].add("resid_pdrop")
REFUSED["granitemoehybrid"] |= {"num_local_experts", "layer_types", "output_router_logits"}
REFUSED["gemma3_text"] |= {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"}
EXTRA_FIELDS = {
    **{family: ["head_dim"] for family in ("qwen2", "granite", "granitemoehybrid", "smollm3", "olmo2", "olmo3")},
    **{family: ["head_dim", "qk_head_dim"] for family in ("deepseek_v3", "youtu")},
}
FAMILY_FIELDS = [
    (family, name)
    for family in FAMILIES
    for name in [*(field.name for field in fields(CONFIG_MAPPING[family])), *EXTRA_FIELDS.get(family, [])]
]


def build_config(family: str, **changes):
    given = {**family_fields(family), **changes}
    rope = copy.deepcopy(given["rope_parameters"])  # transformers completes it in place
    if family in TWO_ROPES and not rope.keys() & {"full_attention", "sliding_attention"}:
        rope = {"full_attention": rope, "sliding_attention": dict(rope)}
    given["rope_parameters"] = rope
    return CONFIG_MAPPING[family](**given)


def written_config(family: str, **changes):
    """The same, with a field set even where the class's constructor derives it."""
    config = build_config(family, **changes)
    for name, value in changes.items():
        if name not in ("rope_parameters", "dtype") and getattr(config, name) != value:
            setattr(config, name, value)  # the class has overwritten it
    return config


BASE_LOGITS: dict[str, torch.Tensor] = {}


def base_logits(family: str) -> torch.Tensor:
    if family not in BASE_LOGITS:
        BASE_LOGITS[family] = logits(stock_model(build_config(family)))
    return BASE_LOGITS[family]


@pytest.mark.compat
@pytest.mark.parametrize(("family", "name"), FAMILY_FIELDS, ids=["-".join(pair) for pair in FAMILY_FIELDS])
def test_every_field_is_followed_refused_or_irrelevant(family, name):
    changes = {name: CHANGED[name]}  # a KeyError here is a field that a new transformers has: say what it is
    if name == "num_attention_heads" and is_latent(family):
        changes["num_key_value_heads"] = CHANGED[name]
    if name == "mamba_d_head":
        changes["mamba_n_heads"] = 2
    if name == "rope_parameters" and family == "ministral3":
        changes = {name: CHANGED[name] | SCALING}
    if name == "num_hidden_layers" and family in ("granitemoehybrid", *TWO_ROPES):  # whose classes do not cut the list
        changes["layer_types"] = family_fields(family)["layer_types"][: CHANGED[name]]
    config = written_config(family, **changes)
    if name in REFUSED[family]:
        with pytest.raises(UserError, match=name) as raised:
            import_config(config)
        assert "\n" not in str(raised.value)
        return
    imported = import_config(config)
    config.dtype = None
    stock = stock_model(config)
    imported.dtype = None
    expected = logits(stock)
    assert close(logits(own_model(stock, imported)), expected)
    moved = not close(base_logits(family), expected, 1e-3)
    stored_name = config.attribute_map.get(name, name)
    irrelevant = stored_name in IGNORED_FIELDS or stored_name in FAMILIES[family].ignored
    irrelevant |= (family, name) == ("phi3", "max_position_embeddings")  # its default rope does not look at it
    assert moved != (irrelevant or name in CARRIED)
    if name in CARRIED and name != "dtype":
        assert getattr(imported, name) == CHANGED[name]


ROPES = {
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "yarn": YARN | {"truncate": False},  # rounded, small changes of the others would change nothing
    "llama3": LLAMA3,
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2],
    },
}
LONG = ROPES["longrope"]
ROPE_CHANGES = {
    "linear": {"factor": 2.0, "rope_theta": 20.0},
    "dynamic": {"factor": 2.0, "rope_theta": 20.0},
    "yarn": {
        "factor": 2.0,
        "rope_theta": 50.0,
        "original_max_position_embeddings": 15,
        "attention_factor": 1.7,
        "beta_fast": 1.2,
        "beta_slow": 0.1,
        "truncate": True,
        "mscale": 0.2,
        "mscale_all_dim": 1.5,
    },
    "llama3": {
        "factor": 2.0,
        "rope_theta": 20.0,
        "original_max_position_embeddings": 15,
        "low_freq_factor": 0.3,
        "high_freq_factor": 3.0,
    },
    "longrope": {
        "factor": 2.0,
        "rope_theta": 20.0,
        "original_max_position_embeddings": 20,
        "attention_factor": 1.7,
        "long_factor": [3.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2],
    },
}


@pytest.mark.compat
@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3"])
def test_every_rotary_parameter_is_followed(family, rope_type):
    size = 3 if is_latent(family) else 7  # planes
    rope = {name: value[:size] if isinstance(value, list) else value for name, value in ROPES[rope_type].items()}
    if rope_type == "yarn" and is_latent(family):
        rope |= MSCALE
    base = logits(stock_model(build_config(family, rope_parameters=rope)))
    for name, value in ROPE_CHANGES[rope_type].items():
        if name.startswith("mscale") and not is_latent(family):
            continue
        value = value[:size] if isinstance(value, list) else value
        stock = stock_model(build_config(family, rope_parameters={**rope, name: value}))
        expected = logits(stock)
        assert close(logits(own_model(stock)), expected), name
        assert not close(base, expected, 1e-4), name


@pytest.mark.compat
@pytest.mark.parametrize("rope", [YARN | MSCALE, LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_the_scaling_of_queries_is_followed(rope):
    """Under every type of rotation, from position 0 on."""
    base = logits(stock_model(build_config("ministral3", rope_parameters=rope | SCALING)))
    for changed in ({"llama_4_scaling_beta": 0.3}, {"original_max_position_embeddings": 3}):
        stock = stock_model(build_config("ministral3", rope_parameters=rope | SCALING | changed))
        expected = logits(stock)
        assert close(logits(own_model(stock)), expected)
        assert not close(base, expected, 1e-3)


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is not supported: soft-capped attention scores"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported: soft-capped logits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported: quantized weights"),
        ({"per_layer_config": {0: {"intermediate_size": 20}}}, "per_layer_config makes layers differ"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"use_mrope": True}, "use_mrope=True is not supported"),
        ({"is_causal": False}, "is_causal=False is not a field"),
        ({"attention_sinks": 4}, "attention_sinks=4 is not a field"),
        ({"_sliding_window_step": 2}, "_sliding_window_step=2 is not a field"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"rope_parameters\['mrope_section'\]="),
        ({"rope_parameters": {"finetuned": True}}, r"rope_parameters\['finetuned'\]=True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_field_of_no_family_is_refused_by_name(family, changes, message):
    if "rope_parameters" in changes:
        changes = {"rope_parameters": family_fields(family)["rope_parameters"] | changes["rope_parameters"]}
    with pytest.raises(UserError, match=message) as raised:
        import_config(build_config(family, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"sliding_window": 5}, "sliding_window=5 is not a field"),
        ("llama", {"_sliding_window_pattern": 2}, "_sliding_window_pattern=2 is not a field"),
        ("gemma3_text", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": LINEAR, "rope_theta": 9.0}},
            r"rope_parameters\['rope_theta'\]=9.0",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("mistral", {"rope_parameters": {"rope_type": "other", "rope_theta": 9.0}}, "'other' is unknown"),
        ("mistral", {"rope_parameters": LINEAR | SCALING}, r"rope_parameters\['llama_4_scaling_beta'\]=0.7"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "llama_4_scaling_beta": 0.7}},
            "llama_4_scaling_beta.*original_max_position_embeddings",
        ),
        ("ministral3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("ministral3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True is not supported in a phi3 model: only False"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported"),
        ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers is not supported: layers without positions"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types=.* only .*'sliding_attention'"),
        ("mistral", {"sliding_window": 1}, "sliding_window=1"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True is not a field"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave=False is not a field"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported .* only 6"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 leaves mixture-of-experts layers"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank=0"),
        ("llama", {"num_key_value_heads": 4}, "not divisible by num_key_value_heads=4"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": LINEAR, "rope_theta": 9.0}},
            r"rope_parameters\['rope_theta'\]=9.0",
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {**LINEAR, "finetuned": True}}},
            r"rope_parameters\['finetuned'\]=True",
        ),
        *(
            (
                family,
                {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**YARN, "truncate": truncate}}},
                rf"rope_parameters\['sliding_attention'\]\['truncate'\]={truncate} is not supported",
            )
            for family in TWO_ROPES
            for truncate in (False, None)  # transformers reads neither there
        ),
        ("olmo2", {"sliding_window": 5}, "sliding_window=5 is not a field"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": LINEAR}},
            r"rope_parameters\['full_attention'\]",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)[:12],
)
def test_a_value_that_a_family_does_not_have_is_refused(family, changes, message):
    with pytest.raises(UserError, match=message):
        import_config(build_config(family, **changes))


def test_an_early_phi3_has_the_length_that_its_own_field_says():
    """Of rope_type 'su' transformers puts it into the rotary parameters only when it builds the model."""
    rope = LONGROPE | {"rope_type": "su", "original_max_position_embeddings": 30}
    config = build_config("phi3", rope_parameters=rope, original_max_position_embeddings=11)
    imported = import_config(config)
    stock = stock_model(config)
    assert close(logits(own_model(stock, imported)), logits(stock))


# Fields that transformers, of this version or an earlier one, writes beside those of the class.
HARMLESS = {
    "unk_token_id": 0,
    "max_sequence_length": 4096,
    "tokenizer_class": "LlamaTokenizer",
    "pruned_heads": {},
    "torchscript": False,
    "use_bfloat16": False,
    "model_max_length": 2048,
    "neftune_noise_alpha": 5.0,
    "gradient_checkpointing": True,
    "logits_to_keep": 1,
    "_model_name_or_path": "a name",
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_beside_a_models_fields_is_accepted(family, name):
    assert import_config(build_config(family, **{name: HARMLESS[name]})) == import_config(build_config(family))


def test_pruned_heads_are_refused():
    with pytest.raises(UserError, match=r"pruned_heads=\{0: .1.\} is not supported"):
        import_config(written_config("llama", pruned_heads={0: [1]}))


def test_a_field_can_be_ignored_by_name():
    config = build_config("llama", attention_sinks=4, alibi=True)
    with pytest.raises(UserError, match=r"ignore it with --ignore-field attention_sinks .*'attention_sinks'"):
        import_config(config)
    with pytest.raises(UserError, match="alibi=True is not a field"):
        import_config(config, ignore_fields=["attention_sinks"])
    assert import_config(config, ignore_fields=["attention_sinks", "alibi"]) == import_config(build_config("llama"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alibbi", r"no field alibbi to ignore \(did you mean alibi\?\)"),
        ("hidden_size", "hidden_size cannot be ignored: what the model computes depends on it"),
        ("return_dict", "return_dict cannot be ignored"),
        ("mlp_bias", "mlp_bias cannot be ignored"),
        ("attn_logit_softcapping", "attn_logit_softcapping cannot be ignored"),
    ],
)
def test_what_the_function_depends_on_cannot_be_ignored(name, message):
    config = build_config("llama", alibi=True, attn_logit_softcapping=30.0)
    with pytest.raises(UserError, match=message):
        import_config(config, ignore_fields=[name])
