"""MLA that keeps the mean of the keys beside the cache: it is exact, and nothing is cached for it.

Shapes: B batch, H query heads, G key/value heads, T tokens.
"""

import pytest
import torch
from attention_oracle import CALIBRATION, PARTIAL, YARN, logits, random_model
from huggingface_hub.errors import StrictDataclassError
from small_models import KEY_MEAN, make_batch, make_config, make_model
from transformers import DynamicCache

from modeling_gqa import GQAQuantizedCache
from modeling_gqa.cache_layers import PositionedCache
from modeling_gqa.conversion import convert_model, target_config
from modeling_gqa.conversion.report import vllm_kernels
from modeling_gqa.costs import cache_bytes_per_token
from modeling_gqa_vllm.kernels import latent_kernels, stored

SIZES = {"kv_lora_rank": 20, "qk_rope_head_dim": 4}


def to_mla(model, text=None, **options):
    return convert_model(model, target_config(model.config, "mla", **SIZES), text, refine=0, **options)


def log_weights(model, ids):
    """Logarithms of the first layer's attention weights, (B, H, T, T), without a constant for each query."""
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions[0].log()
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mean = weights.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    return (weights - mean).masked_fill(~seen, 0)


@pytest.mark.parametrize(
    "fields", [{}, {"rope_parameters": YARN}, {"rope_parameters": PARTIAL}], ids=["plain", "yarn", "partial"]
)
@torch.no_grad()
def test_a_constant_in_the_keys_costs_nothing(fields):
    """What conversion changes of the scores is the same whatever is added to all keys; without the mean it is not."""
    model, ids, errors = random_model("gqa", attention_bias=True, **fields).double(), make_batch()["input_ids"], {}
    bias = model.model.layers[0].self_attn.k_proj.bias
    for added in (0.0, 8.0):
        bias += added * torch.linspace(-1, 1, len(bias))
        for kept in (True, False):
            converted, done = to_mla(model, key_mean=kept)
            assert [layer["key_mean"] for layer in done["layers"]] == [kept] * 3
            errors[added, kept] = log_weights(converted, ids) - log_weights(model, ids)
    torch.testing.assert_close(errors[8.0, True], errors[0.0, True], rtol=1e-6, atol=1e-6)
    assert (errors[8.0, False] - errors[0.0, False]).abs().max() > 0.1
    assert errors[8.0, True].square().mean() < errors[8.0, False].square().mean()


@torch.no_grad()
def test_keys_that_hardly_vary_are_kept():
    """Of keys behind a norm, which are the same for all tokens but for a thousandth, hardly a score changes."""
    model = random_model("gqa", attention_bias=True, qk_norm=True).double()
    model.model.layers[0].self_attn.k_proj.weight *= 1e-3
    ids = make_batch()["input_ids"]
    kept, left_out = (
        (log_weights(to_mla(model, CALIBRATION, refit=False, key_mean=mean)[0], ids) - log_weights(model, ids)).norm()
        for mean in (True, False)
    )
    assert kept < 0.1 * left_out


@torch.no_grad()
def test_a_cache_of_its_own_holds_positions_alone():
    """transformers' caches hold cosine and sine too, and both give the same tokens; so does the saved model."""
    model = make_model("mla", latent_norm=False, **KEY_MEAN)
    batch = make_batch(padding="left")
    batch.pop("position_ids")
    layer = model.config.per_layer_config[0]
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    own, stock = (
        model.generate(**batch, past_key_values=cache, **options) for cache in (None, DynamicCache(config=model.config))
    )
    assert torch.equal(own.sequences, stock.sequences)
    held = {type(x.past_key_values): x.past_key_values.layers[0].values.shape[-1] for x in (own, stock)}
    assert held == {PositionedCache: layer.qk_rope_head_dim, DynamicCache: layer.qk_rope_head_dim + 8}
    numbers = 3 * (layer.kv_lora_rank + layer.qk_rope_head_dim)
    assert cache_bytes_per_token(model.config, torch.float32) == 4 * numbers


def test_what_engines_store_has_the_angles():
    """P of vLLM's cache is larger by the rotary dimensions of a head, by which kernels are chosen."""
    fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    config = make_config("mla", hidden_size=768, latent_norm=False, rope_interleave=False, **fields)
    assert "FlashMLA" in {kernel.name for kernel in latent_kernels(config)} and stored(config) is config
    config.key_mean = True
    sizes = stored(config)
    assert (sizes.qk_rope_head_dim, sizes.qk_head_dim, config.qk_rope_head_dim) == (128, 192, 64)
    assert [kernel.name for kernel in latent_kernels(config)] == ["Triton"]
    assert vllm_kernels(config)[0].endswith("with 64 numbers more in the cache, for the mean key; CPU: yes.")


def test_a_converted_model_is_saved_and_loaded(tmp_path):
    model = random_model("gqa", attention_bias=True)
    converted, _ = to_mla(model, CALIBRATION)
    assert converted.config.key_mean and converted.config.format_version == 4
    converted.save_pretrained(tmp_path)
    assert torch.equal(logits(type(converted).from_pretrained(tmp_path)), logits(converted))


@torch.no_grad()
def test_scores_of_a_large_mean_are_not_rounded():
    """In bfloat16 a cache of its own is as near to float64 as one of transformers, which holds the angles."""
    model = make_model("mla", latent_norm=False, key_mean=True)
    for layer in model.model.layers:
        layer.self_attn.key_mean.bias *= 30
    ids = make_batch(length=40)["input_ids"]
    exact = model.bfloat16().double()(ids).logits[:, -1].log_softmax(-1)
    errors = []
    for cache in (None, DynamicCache(config=model.config)):
        model.bfloat16()
        held = model(ids[:, :-1], past_key_values=cache, use_cache=True).past_key_values
        found = model(ids[:, -1:], past_key_values=held).logits[:, -1].double().log_softmax(-1)
        errors.append((exact.exp() * (exact - found)).sum(-1).mean())
    assert errors[0] < 2 * errors[1]


def test_changing_frequencies_have_no_place_for_it():
    model = random_model("gqa", rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0})
    converted, done = to_mla(model, CALIBRATION)
    assert not any(layer["key_mean"] for layer in done["layers"]) and not converted.config.key_mean
    with pytest.raises(StrictDataclassError, match="key_mean=True does not go with rope_type='dynamic'"):
        make_config("mla", key_mean=True, rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0})
    with pytest.raises(StrictDataclassError, match="key_mean=True does not go with rope_type='dynamic'"):
        make_config(
            "mla",
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0},
            per_layer_config={1: {"key_mean": True}},
        )


@torch.no_grad()
def test_caches_that_lack_positions_are_refused():
    model = make_model("mla", latent_norm=False, key_mean=True)
    ids = make_batch()["input_ids"]
    own = model(ids, use_cache=True).past_key_values
    copied = DynamicCache([(layer.keys, layer.values) for layer in own.layers])
    with pytest.raises(
        ValueError, match=r"values of 1 x 6 numbers a token, and layer 0 caches 1 x 12: .* copy.deepcopy"
    ):
        model(ids, past_key_values=copied)
    rotation = model.model.rotary_emb["6"](torch.zeros(1), torch.arange(2)[None])
    with pytest.raises(ValueError, match="give a quantized cache to the model"):
        model.model.layers[0].self_attn(
            torch.zeros(1, 2, 66), rotation, past_key_values=GQAQuantizedCache(model.config, {"nbits": 8})
        )


@torch.no_grad()
def test_the_cache_is_traced_as_a_whole():
    model, ids = make_model("mla", latent_norm=False, key_mean=True), make_batch()["input_ids"]
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    expected = model(ids).logits[:, -1:]
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids[:, -1:], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)
