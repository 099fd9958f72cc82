"""Logits and gradients equal those of transformers' own models with the same weights."""

from typing import Any

import pytest
import torch
import transformers
from small_models import GEMMA, KIND_SIZES, ROPES, SIZES, make_batch, make_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM

pytestmark = pytest.mark.compat

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
    "original_max_position_embeddings": 16,
}
# What a transformers model needs to be ours: DeepSeek-V3 has dense layers only, no default rank, no further tokens.
OTHERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True},
    "Qwen3": {"use_sliding_window": True},
    "Mistral": {"sliding_window": None},
    "Granite": {"attention_multiplier": 0.3},
    "Gemma3": {"query_pre_attn_scalar": 20},
    "DeepseekV3": {
        **KIND_SIZES["mla"],
        "head_dim": KIND_SIZES["mla"]["qk_rope_head_dim"],
        "q_lora_rank": None,
        "first_k_dense_replace": SIZES["num_hidden_layers"],
        "num_nextn_predict_layers": 0,
    },
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MULTIPLIERS = {"embedding_multiplier": 5, "residual_multiplier": 0.4, "logits_scaling": 3.0}
OWN_GEMMA = {
    **GEMMA,
    "qk_norm": True,
    "softmax_scale": 20**-0.5,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
# name -> our kind, transformers' model, the fields of both, those of ours alone
TWINS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mha-llama": ("mha", "Llama", {}, {}),
    "mqa-llama": ("mqa", "Llama", {}, {}),
    "gqa-llama": ("gqa", "Llama", {}, {}),
    "biases-llama": ("gqa", "Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "tied-llama": ("gqa", "Llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}, {}),
    "biases-qwen2": ("gqa", "Qwen2", {}, {"query_bias": True, "key_value_bias": True}),
    "qk-norm-qwen3": ("gqa", "Qwen3", {}, {"qk_norm": True}),
    "window-mistral": ("gqa", "Mistral", {"sliding_window": 4}, {}),
    "multipliers-granite": ("mqa", "Granite", MULTIPLIERS, {"softmax_scale": 0.3}),
    "gemma3": ("gqa", "Gemma3", {**WINDOWS, "tie_word_embeddings": False}, OWN_GEMMA),
    "windows-by-layer-qwen3": ("mha", "Qwen3", WINDOWS, {"qk_norm": True}),
    "mla-deepseek": ("mla", "DeepseekV3", {"rope_interleave": True}, {}),
    "mla-deepseek-half-split": ("mla", "DeepseekV3", {"rope_interleave": False}, {}),
    "mla-deepseek-q-lora": ("mla", "DeepseekV3", {"rope_interleave": True, "q_lora_rank": 17}, {}),
    "mla-deepseek-q-lora-half-split": ("mla", "DeepseekV3", {"rope_interleave": False, "q_lora_rank": 17}, {}),
    "mla-deepseek-q-lora-biases": ("mla", "DeepseekV3", {"attention_bias": True, "q_lora_rank": 17}, {}),
    # DeepSeek's plain q_proj never has a bias.
    "mla-deepseek-biases": ("mla", "DeepseekV3", {"attention_bias": True}, {"query_bias": False}),
    "mla-deepseek-eps": ("mla", "DeepseekV3", {"rms_norm_eps": 0.3, "q_lora_rank": 17}, {}),
    "mla-deepseek-yarn": ("mla", "DeepseekV3", {"rope_parameters": YARN}, {}),
}


def make_twins(name: str, backend: str = "eager", **fields):
    """Our model with random weights, norms and biases, and transformers' model with the same ones."""
    kind, other, both, ours = TWINS[name]
    both = {**both, **fields}
    torch.manual_seed(0)
    model = GQAForCausalLM(make_config(kind, **both, **ours)).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.data.normal_(mean=1.0 if "norm" in parameter_name else 0.0, std=0.2)
    sizes = {**SIZES, "num_key_value_heads": model.config.num_key_value_heads, **OTHERS[other], **both}
    twin_class = getattr(transformers, f"{other}ForCausalLM")
    twin = twin_class(twin_class.config_class(**sizes)).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    for one in (model, twin):
        one.set_attn_implementation(backend)
    return model, twin


def run(model, batch) -> torch.Tensor:
    """Logits of the tokens that are not padding; their loss's gradients are left in the parameters."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, labels=labels, use_cache=False)
    output.loss.backward()
    return output.logits[batch["attention_mask"].bool()]


def assert_parity(model, twin, batch):
    torch.testing.assert_close(run(model, batch), run(twin, batch), atol=1e-5, rtol=1e-5)
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-3, name  # a hundred times what is tolerated
        torch.testing.assert_close(
            parameter.grad,
            gradients.pop(name),
            atol=1e-5,
            rtol=1e-5,
            msg=lambda message, name=name: f"{name}: {message}",
        )
    assert not gradients


def test_every_kind_has_a_twin():
    """Each attention kind is compared with a model of transformers' own."""
    assert {kind for kind, *_ in TWINS.values()} == set(ATTENTION_CLASSES)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TWINS)
def test_logits_and_gradients(name, backend, padding):
    """With the twin's weights, logits and the gradient of every parameter agree to 1e-5."""
    model, twin = make_twins(name, backend=backend)
    assert_parity(model, twin, make_batch(padding=padding))


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_rope_types_below_and_beyond_the_original_length(rope_type):
    """Every rotary type agrees with the twin below and beyond the original length, and is not the default type."""
    rope = {"rope_type": rope_type, "rope_theta": 500.0, **ROPES[rope_type]}
    if rope_type == "proportional":
        rope["partial_rotary_factor"] = 0.5
    sizes = {"max_position_embeddings": 20, "rope_parameters": rope}
    model, twin = make_twins("gqa-llama", **sizes)
    for length in (9, 31, 9):
        assert_parity(model, twin, make_batch(length=length))
        model.zero_grad()
        twin.zero_grad()
    if rope_type != "default":
        plain, _ = make_twins("gqa-llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
        batch = make_batch(length=31)
        assert not torch.allclose(run(model, batch), run(plain, batch), atol=1e-2)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TWINS)
def test_bfloat16_is_as_close_to_float32_as_the_twin(name, backend):
    """In bfloat16 the root mean square error is at most 1.25 times the twin's."""
    model, twin = make_twins(name, backend=backend)
    batch = make_batch(padding="left")
    for one in (model, twin):  # weights that bfloat16 holds, so that only the computation rounds
        one.bfloat16().float()
    with torch.no_grad():
        exact = twin(**batch).logits[batch["attention_mask"].bool()]
        errors = []
        for one in (model, twin):
            logits = one.bfloat16()(**batch).logits
            assert logits.dtype == torch.bfloat16
            errors.append((logits[batch["attention_mask"].bool()].float() - exact).pow(2).mean().sqrt())
    assert errors[0] <= 1.25 * errors[1]
