"""A LoRA adapter and a checkpoint in int8 are served right by vLLM, or refused in words."""

import json

import peft
import pytest
import torch
from models import draw_prompts, generate, save_model, serve
from safetensors.torch import load_file, save_file
from test_vllm import score

from modeling_gqa import GQAForCausalLM

PROMPTS = draw_prompts(60, 20)


def save_adapter(model, folder, targets) -> list[list[int]]:
    """Save an adapter with random weights; return the tokens that PEFT's model generates."""
    torch.manual_seed(1)
    loaded = GQAForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(loaded, config).eval()
    adapted.save_pretrained(folder)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    return [
        adapted.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    ("name", "targets"),
    [("gqa", ["q_proj", "v_proj"]), ("mla", ["q_proj", "kv_a_proj_with_mqa", "o_proj"]), ("all-mixed", ["q_proj"])],
)
def test_adapter(name, targets, tmp_path):
    model = save_model(name, tmp_path / "model")
    expected = save_adapter(model, tmp_path / "adapter", targets)
    answer = serve(model, PROMPTS, 16, enable_lora=True, adapter=str(tmp_path / "adapter"))
    assert answer["tokens"] == expected != generate(model, PROMPTS, 16)


def test_adapter_of_what_attention_over_the_latent_absorbs_is_refused(tmp_path):
    model = save_model("mla", tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", ["q_proj", "kv_b_proj"])
    with pytest.raises(RuntimeError, match=r"expected target modules in .* but received \[.*kv_b_proj'\]"):
        serve(model, PROMPTS, 16, enable_lora=True, adapter=str(tmp_path / "adapter"))


def quantize(model, skipped: tuple[str, ...]) -> None:
    """Turn a checkpoint into compressed-tensors' int8: weights by output channel, activations by token as they come."""
    state = load_file(model / "model.safetensors")
    for name in [name for name in state if name.endswith(("_proj.weight", "_mqa.weight"))]:
        if not any(part in name for part in (*skipped, "q_head_proj")):
            scale = state[name].abs().amax(1, keepdim=True) / 127
            state[name], state[f"{name}_scale"] = (state[name] / scale).round().to(torch.int8), scale
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", *(f"re:.*{part}" for part in skipped)],
        "config_groups": {"group_0": group},
    }
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "skipped"), [("gqa", ()), ("mla", ("kv_b_proj",)), ("mla-qk-norm", ("kv_b_proj",))])
def test_int8(name, skipped, tmp_path):
    """Log-probabilities stay near those of the exact model; these random weights amplify rounding, in every kind alike.

    Rounding weights and activations in float32 changes them by 0.2 to 0.3, vLLM's kernel by 0.4 to 0.7. Wrong weights
    change them by more than their deviation, 2.3.
    """
    exact, model = (save_model(name, tmp_path / folder) for folder in ("exact", "model"))
    quantize(model, skipped)
    # vLLM's kernel for AMX takes no float32.
    dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
    answer = serve(model, PROMPTS, prompt_logprobs=0, dtype=dtype)
    served = torch.tensor([x for row in answer["logprobs"] for x in row])
    expected = score(exact, PROMPTS, torch.float32)
    assert (served - expected).square().mean().sqrt() < 0.4 * expected.std()


def test_int8_of_what_attention_over_the_latent_absorbs_is_refused(tmp_path):
    model = save_model("mla", tmp_path)
    quantize(model, ())
    with pytest.raises(RuntimeError, match="quantize the checkpoint without it"):
        serve(model, PROMPTS)
