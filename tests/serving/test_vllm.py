"""vLLM serves every kind, with the plugin and, where that can be, without it."""

import pytest
import torch
from models import MODELS, draw_prompts, generate, save_model, serve
from transformers.cache_utils import DynamicSlidingWindowLayer

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM
from modeling_gqa.cache_layers import GrowingLayer
from modeling_gqa.layers import key_mean_size

PROMPTS = draw_prompts(1, 5, 20, 33, 40, 3)
# Without the plugin vLLM reads sizes of MLA of the whole model, so layers that differ cannot be served.
REMOTE = [name for name in MODELS if name not in ("mla-ranks", "all-mixed", "mla-key-mean", "mla-unrotated")]
# vLLM loads no plugin; on a CPU without AMX it must be told that there is no kernel for the latent either.
NO_PLUGIN = {"VLLM_PLUGINS": "", "VLLM_MLA_DISABLE": "1"}


def cached_bytes(directory, ranks: int = 1) -> list[float]:
    """Bytes of one token in each layer's cache on each rank, in float32."""
    layers = GQAConfig.from_pretrained(directory).per_layer_config
    sizes = []
    for layer in layers:
        numbers = sum(ATTENTION_CLASSES[layer.attention_kind].cache_sizes(layer)) + key_mean_size(layer)
        numbers += 8 * (layer.qk_rope_head_dim == 0)  # zeros, because vLLM's attention needs a rotary key
        grouped = layer.attention_kind != "mla"
        sizes.append(4 * numbers / (min(ranks, layer.num_key_value_heads) if grouped else 1))
    return sizes


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_generate_and_caches_hold_what_layers_store(name, tmp_path):
    """With the plugin, in float32: six prompts, 32 greedy tokens, and the bytes of vLLM's own specifications."""
    model = save_model(name, tmp_path)
    answer = serve(model, PROMPTS, 32)
    assert answer["tokens"] == generate(model, PROMPTS, 32)
    assert [size for _, size in answer["caches"][0].values()] == cached_bytes(model)
    latent = [spec.endswith("MLASpec") or spec == "MLAAttentionSpec" for spec, _ in answer["caches"][0].values()]
    kinds = [layer.attention_kind for layer in GQAConfig.from_pretrained(model).per_layer_config]
    assert latent == [kind == "mla" for kind in kinds]


OTHERWISE = [
    # By trust in the repository's own code; MLA caches expanded heads.
    *((name, NO_PLUGIN, {"trust_remote_code": True}) for name in REMOTE),
    # By the rules that the model carries for transformers' tensor parallelism.
    *(
        (name, NO_PLUGIN, {"trust_remote_code": True, "tensor_parallel_size": 2})
        for name in ("mqa", "mla", "mla-q-lora")
    ),
    # vLLM compiles the decoder unless `--enforce-eager` is given.
    ("all-mixed", None, {"enforce_eager": False}),
]


@pytest.mark.parametrize(("name", "variables", "options"), OTHERWISE, ids=str)
def test_tokens_equal_those_of_generate(name, variables, options, tmp_path):
    """Without the plugin, on one rank and on two, and with a compiled model."""
    model = save_model(name, tmp_path)
    assert serve(model, PROMPTS, 32, variables, **options)["tokens"] == generate(model, PROMPTS, 32)


@pytest.mark.parametrize("name", ["mqa", "gqa-norm-bias", "mla-q-lora", "mla-qk-norm", "all-mixed"])
def test_two_ranks_give_the_same_tokens(name, tmp_path):
    """Tensor parallelism: heads and their caches are divided, the latent is on each rank."""
    model = save_model(name, tmp_path)
    answer = serve(model, PROMPTS, 32, tensor_parallel_size=2)
    assert answer["tokens"] == generate(model, PROMPTS, 32)
    for caches in answer["caches"]:
        assert [size for _, size in caches.values()] == cached_bytes(model, 2)


def test_heads_that_do_not_divide_are_refused(tmp_path):
    """In one line, before the weights are loaded; vLLM itself refuses query heads."""
    model = save_model("gqa", tmp_path, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(RuntimeError, match="ValueError: layer 0 has 3 key/value heads: neither they nor the 2 ranks"):
        serve(model, PROMPTS, 4, tensor_parallel_size=2)


def test_a_norm_over_all_heads_is_refused_on_two_ranks(tmp_path):
    """In one line that names the field, because a rank has some of the heads."""
    with pytest.raises(RuntimeError, match="ValueError: layer 0 has qk_norm_span='all_heads'"):
        serve(save_model("gqa-olmo", tmp_path), PROMPTS, 4, tensor_parallel_size=2)


def test_lengths_at_which_frequencies_change_are_refused(tmp_path):
    """Those of a short request would be the ones of the longest beside it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    model = save_model("gqa", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(RuntimeError, match="serve it with max_model_len=64 at most"):
        serve(model, PROMPTS, 4, max_model_len=128)
    assert serve(model, PROMPTS[2:4], 8, max_model_len=64)["tokens"] == generate(model, PROMPTS[2:4], 8)


@pytest.mark.parametrize("name", ["mla", "mla-576", "mla-ranks", "mla-window"])
def test_an_fp8_cache_gives_the_tokens_of_a_cache_that_rounds(name, tmp_path, monkeypatch):
    """Greedy tokens of `generate` over latents that are rounded to float8_e4m3fn; a number takes one byte."""
    model = save_model(name, tmp_path)
    answer = serve(model, PROMPTS, 32, kv_cache_dtype="fp8")
    assert [size for _, size in answer["caches"][0].values()] == [size / 4 for size in cached_bytes(model)]
    exact = generate(model, PROMPTS, 32)
    round_caches(monkeypatch)
    assert answer["tokens"] == generate(model, PROMPTS, 32) != exact


def test_an_fp8_cache_loses_what_rounding_loses(tmp_path, monkeypatch):
    """Log-probabilities of given tokens: a number half way between two others may go to either, and no more differs."""
    model, prompts = save_model("mla-qk-norm", tmp_path), draw_prompts(200, 120)
    served = serve(model, prompts, prompt_logprobs=0, kv_cache_dtype="fp8")["logprobs"]
    served = torch.tensor([x for row in served for x in row])
    exact = score(model, prompts, torch.float32)
    round_caches(monkeypatch)
    rounded = score(model, prompts, torch.float32)
    assert (served - rounded).square().mean() < 0.01 * (rounded - exact).square().mean()


def round_caches(monkeypatch) -> None:
    """Let caches hold what is rounded to float8_e4m3fn."""

    def rounding(update):
        def rounded(self, keys, values, *args, **kwargs):
            keys, values = (states.to(torch.float8_e4m3fn).to(states.dtype) for states in (keys, values))
            return update(self, keys, values, *args, **kwargs)

        return rounded

    for layer in (GrowingLayer, DynamicSlidingWindowLayer):
        monkeypatch.setattr(layer, "update", rounding(layer.update))


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "bfloat16"])
def test_a_cache_of_another_dtype_is_refused_on_a_cpu(dtype, tmp_path):
    """At the start and in one line; vLLM would take it, and die at the first prompt."""
    model = save_model("mla-576", tmp_path)
    with pytest.raises(RuntimeError, match=f"ValueError: kv_cache_dtype='{dtype}': attention over the latent on a CPU"):
        serve(model, PROMPTS, 4, kv_cache_dtype=dtype)


@pytest.mark.parametrize("name", ["mla-qk-norm", "all-mixed"])
def test_prompts_in_chunks_and_cached_prefixes_give_the_same_tokens(name, tmp_path):
    """A prompt is computed in parts of at most 32 tokens, and a second one finds the blocks of the first."""
    prefix, first, second = draw_prompts(100, 30, 20)
    prompts = [prefix + first, prefix + second, prefix]
    model = save_model(name, tmp_path)
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 32, "one_by_one": True}
    answer = serve(model, prompts, 16, enable_chunked_prefill=True, enable_prefix_caching=True, **options)
    assert answer["tokens"] == generate(model, prompts, 16)
    assert answer["cached"] == [0, 96, 96]


@pytest.mark.parametrize("name", ["gqa", "mla", "mla-576", "mla-multipliers"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path):
    """Log-probabilities of given tokens, served in bfloat16, beside those that transformers computes in bfloat16."""
    model = save_model(name, tmp_path)
    prompts = draw_prompts(200, 120)
    exact, rounded = (score(model, prompts, dtype) for dtype in (torch.float32, torch.bfloat16))
    served = serve(model, prompts, dtype="bfloat16", prompt_logprobs=0)["logprobs"]
    served = torch.tensor([x for row in served for x in row])
    noise = (rounded - exact).square().mean().sqrt()
    assert (served - exact).square().mean().sqrt() < 1.5 * noise


def score(directory, prompts, dtype) -> torch.Tensor:
    """Log-probability of each prompt token after the first."""
    model = GQAForCausalLM.from_pretrained(directory, dtype=dtype)
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            rows.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(rows)
