"""What is exported is served by vLLM's own classes, or where they would not do by its transformers backend."""

import pytest
import torch
from models import GEMMA, GQA, LARGE, MODELS, MULTIPLIERS, SIZES, UNROTATED, WINDOWS, draw_prompts, generate, serve
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import export_checkpoint

PROMPTS = draw_prompts(1, 5, 20, 33, 40, 3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
PART = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
BIASES = {"query_bias": True, "key_value_bias": True, "output_bias": False}
OWN = {
    "llama": {**GQA, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mistral": {**GQA, "sliding_window": 16},
    "qwen2": {**GQA, **BIASES, "hidden_size": 256, "tie_word_embeddings": True},
    "qwen3": {**GQA, "qk_norm": True},
    "phi3": {**GQA, "hidden_size": 256, "rope_parameters": PART, "tie_word_embeddings": True},
    "phi3-window": {**GQA, "hidden_size": 256, "rope_parameters": PART, "sliding_window": 16},
    "granite": {**GQA, **MULTIPLIERS, "softmax_scale": 0.1},
    "granite4": {**GQA, **MULTIPLIERS, **UNROTATED, "hidden_size": 256, "softmax_scale": 0.1},
    "gemma3": {**GQA, **GEMMA, **WINDOWS, "softmax_scale": 20**-0.5},
    "mla": LARGE,
    "mla-q-lora": {**LARGE, "q_lora_rank": 80},
    "mla-yarn": {**LARGE, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}},
    "mla-tied": {**LARGE, "tie_word_embeddings": True},
    "mla-q-lora-halves": {**LARGE, "q_lora_rank": 96, "rope_interleave": False, "softmax_scale": 0.3},
    "mla-halves": {**LARGE, "rope_interleave": False},
}
FOR_TRANSFORMERS = {
    "mla-biases": {**LARGE, "key_value_bias": True, "output_bias": True, "rms_norm_eps": 1e-5},
    "mla-q-lora-biases": {**LARGE, "q_lora_rank": 96, "attention_bias": True},
    "mla-llama3": {**LARGE, "rope_parameters": LLAMA3},
    "qwen3-biases": {**GQA, "qk_norm": True, "attention_bias": True},
    "mlp-biases": {**GQA, "attention_bias": True, "mlp_bias": True},
}


def exported(folder, fields, engine=None):
    """The folder of the exported model, whose norms and biases are not those of a beginning."""
    torch.manual_seed(0)
    model = GQAForCausalLM(GQAConfig(**{**SIZES, **fields}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder / "own")
    export_checkpoint(folder / "own", folder / "stock", engine=engine)
    return folder / "stock"


def served(stock, **options) -> list[list[int]]:
    """What vLLM answers without the plugin; its own rotary kernel for CPUs is wrong for MLA's queries."""
    mla = "deepseek" in (stock / "config.json").read_text()
    if mla:  # the attention that vLLM takes by itself where the CPU has AMX refuses float32
        options["attention_backend"] = "CPU_MLA"
    answer = serve(stock, PROMPTS, 32, {"VLLM_PLUGINS": ""}, compilation_config={"custom_ops": ["none"]}, **options)
    if mla:  # the latent alone, of the size that it had
        assert {tuple(cache) for cache in answer["caches"][0].values()} == {("MLAAttentionSpec", 4.0 * (512 + 64))}
    return answer["tokens"]


@pytest.mark.parametrize("name", OWN)
def test_own_classes_give_the_tokens_of_transformers_class(name, tmp_path):
    stock = exported(tmp_path, OWN[name])
    assert not (stock / "README.md").exists() or "Do not serve" not in (stock / "README.md").read_text()
    expected = generate(stock, PROMPTS, 32, AutoModelForCausalLM)
    assert expected == generate(tmp_path / "own", PROMPTS, 32)
    assert served(stock, model_impl="vllm") == expected


def test_smollm3_is_served_by_the_transformers_backend(tmp_path):
    """vLLM has no class of its own for it."""
    stock = exported(tmp_path, MODELS["gqa-unrotated"])
    expected = generate(tmp_path / "own", PROMPTS, 32)
    assert expected == generate(stock, PROMPTS, 32, AutoModelForCausalLM) == served(stock)


@pytest.mark.parametrize("name", FOR_TRANSFORMERS)
def test_what_the_card_says_is_right_is_right(name, tmp_path):
    stock = exported(tmp_path, FOR_TRANSFORMERS[name], "transformers")
    assert "--model-impl transformers" in (stock / "README.md").read_text()
    expected = generate(stock, PROMPTS, 32, AutoModelForCausalLM)
    assert expected == generate(tmp_path / "own", PROMPTS, 32)
    assert served(stock, model_impl="transformers") == expected
