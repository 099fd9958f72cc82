"""Cached decoding computes what the full forward computes, and MLA's cache holds the latent alone.

Shapes: B batch, T tokens, R kv_lora_rank, P qk_rope_head_dim.
"""

import pytest
import torch
from small_models import make_batch, make_model
from transformers import DynamicCache, StaticCache

pytestmark = pytest.mark.compat

CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
}
LATENT_MODELS = ["mla", "mla-q-lora", "mla-qk-norm", "mixed"]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make_exact_model(model_name: str, **overrides):
    """Model in float64, in which any two ways to compute the same thing agree to 1e-10."""
    return make_model(model_name, **overrides).double()


def decode(model, batch, cache, sizes, start=0):
    """Logits of consecutive chunks of `sizes` tokens, each given with the cache of what went before."""
    logits = []
    for size in sizes:
        stop = start + size
        outputs = model(
            input_ids=batch["input_ids"][:, start:stop],
            attention_mask=batch["attention_mask"][:, :stop],
            position_ids=batch["position_ids"][:, start:stop],
            past_key_values=cache,
        )
        assert outputs.past_key_values is cache
        logits.append(outputs.logits)
        start = stop
    return torch.cat(logits, dim=1)  # (B, T, vocabulary)


def assert_equal_logits(actual, expected, mask):
    """Compare the logits of tokens that are not padding."""
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)


def count_calls(module):
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def storage_bytes(state) -> int:
    """Bytes of memory behind a cached tensor, be it plain, quantized by quanto, or a pair of numbers and scale."""
    if isinstance(state, tuple):
        return sum(storage_bytes(part) for part in state)
    if type(state) is torch.Tensor:
        return state.untyped_storage().nbytes()
    names, _ = state.__tensor_flatten__()
    return sum(storage_bytes(getattr(state, name)) for name in names)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("sizes", [(1,) * 11, (6, 4, 1), (2, 7, 2), (1, 10)], ids=["token by token", "6", "2", "1"])
def test_chunks_equal_full_forward(model_name, cache_name, padding, backend, sizes):
    """Tokens given with a cache, one at a time or several, for which MLA may expand or absorb, get the logits of one
    forward over all of them."""
    model, batch = make_exact_model(model_name), make_batch(padding=padding)
    model.set_attn_implementation(backend)
    cached = decode(model, batch, CACHES[cache_name](model), sizes)
    assert_equal_logits(cached, model(**batch, use_cache=False).logits, batch["attention_mask"])


@pytest.mark.parametrize("cache_name", CACHES)
def test_positions_and_mask_follow_from_the_cache(model_name, cache_name):
    """Without position ids and mask, a chunk goes on where the cache ends."""
    model, ids = make_exact_model(model_name), make_batch()["input_ids"]
    cache = CACHES[cache_name](model)
    cached = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split([5, 1, 3, 2], dim=1)], dim=1)
    assert_equal_logits(cached, model(ids, use_cache=False).logits, torch.ones_like(ids))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_continues_after_crop(model_name, padding):
    """After rejected tokens are cropped, the next ones get the logits of a forward that never saw the rejected."""
    model, batch, other = make_exact_model(model_name), make_batch(padding=padding), make_batch(seed=2)
    cache = DynamicCache(config=model.config)
    decode(model, batch, cache, [6])
    # As assisted decoding does it: a sliding layer must keep what a crop may bring back.
    cache.activate_past_recording()
    decode(model, batch, cache, [3], start=6)
    cache.crop(-3)
    batch["input_ids"][:, 6:] = other["input_ids"][:, 6:]
    accepted = decode(model, batch, cache, [3], start=6)[:, :2]
    cache.crop(-1)
    cached = torch.cat((accepted, decode(model, batch, cache, [3], start=8)), dim=1)
    assert_equal_logits(cached, model(**batch, use_cache=False).logits[:, 6:], batch["attention_mask"][:, 6:])


def test_reset_static_cache_starts_anew(model_name):
    model, batch, other = make_exact_model(model_name), make_batch(), make_batch(seed=2)
    cache = CACHES["static"](model)
    decode(model, other, cache, [9, 1])
    cache.reset()
    cached = decode(model, batch, cache, [10, 1])
    assert_equal_logits(cached, model(**batch, use_cache=False).logits, batch["attention_mask"])


@pytest.mark.parametrize("cache_name", CACHES)
def test_cache_carried_over_turns(model_name, cache_name):
    """A second `generate` with the first one's cache gives the tokens that it gives without a cache."""
    model, ids = make_model(model_name, eos_token_id=None), make_batch(batch=1)["input_ids"]
    cache = CACHES[cache_name](model)
    first = model.generate(ids[:, :5], past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 8, "the last token has not been through the model"
    # The model may have generated the padding token, which `generate` would mask by itself.
    second_turn = {"input_ids": torch.cat((first, ids[:, 5:]), dim=1), "max_new_tokens": 5}
    second_turn["attention_mask"] = torch.ones_like(second_turn["input_ids"])
    second = model.generate(**second_turn, past_key_values=cache)
    assert cache.get_seq_length() == 19
    assert second.tolist() == model.generate(**second_turn, use_cache=False).tolist()


def test_cache_is_made_unless_refused(model_name):
    model, ids = make_model(model_name), make_batch()["input_ids"]
    for use_cache in (None, True):
        assert model(ids, use_cache=use_cache).past_key_values.get_seq_length() == 11
    assert model(ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(ids).past_key_values is None


BATCH_OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize(
    ("cache_name", "operation"), [*(("dynamic", name) for name in BATCH_OPERATIONS), ("static", "reorder")]
)
def test_batch_operations(model_name, cache_name, operation):
    """After rows of a cache are repeated, chosen or reordered, decoding goes on as a full forward over those rows."""
    model, batch = make_exact_model(model_name), make_batch(padding="left")
    operate, rows = BATCH_OPERATIONS[operation]
    cache = CACHES[cache_name](model)
    decode(model, batch, cache, [6, 1])
    operate(cache)
    batch = {name: tensor[rows] for name, tensor in batch.items()}
    cached = decode(model, batch, cache, [1, 2, 1], start=7)
    assert_equal_logits(cached, model(**batch, use_cache=False).logits[:, 7:], batch["attention_mask"][:, 7:])


@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("model_name", LATENT_MODELS)
def test_decoding_is_absorbed(model_name, backend, padding, cache_name):
    """Counts calls of `kv_b_proj`: a prompt calls it once a layer, a single token never."""
    model, batch = make_model(model_name), make_batch(padding=padding)
    model.set_attn_implementation(backend)
    calls = count_calls(model.model.layers[0].self_attn.kv_b_proj)
    cache = CACHES[cache_name](model)
    decode(model, batch, cache, [8])
    if cache_name == "dynamic":
        assert len(calls) == 1, "a prompt is expanded"
    calls.clear()
    decode(model, batch, cache, [1, 1, 1], start=8)
    assert not calls, "a token is absorbed"


def test_short_chunk_is_absorbed_and_long_chunk_expanded():
    """After 9 tokens, 2 more are absorbed, and 14 more are expanded: each takes the way with fewer operations."""
    model, batch = make_model("mla"), make_batch(batch=1, length=25)
    calls = count_calls(model.model.layers[1].self_attn.kv_b_proj)
    cache = DynamicCache(config=model.config)
    decode(model, batch, cache, [9, 2], start=0)
    assert len(calls) == 1
    decode(model, batch, cache, [14], start=11)
    assert len(calls) == 2


def test_training_expands_at_every_step():
    """Absorbing reads the weight of `kv_b_proj` past its hooks, so a model in training mode never does it."""
    model, batch = make_model("mla").train(), make_batch()
    calls = count_calls(model.model.layers[0].self_attn.kv_b_proj)
    decode(model, batch, DynamicCache(config=model.config), [8, 1, 1])
    assert len(calls) == 3


@pytest.mark.parametrize("latent_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_cache_holds_rank_plus_rotary_key(dtype, latent_norm):
    model, batch = make_model("mla", latent_norm=latent_norm).to(dtype), make_batch()
    for sizes, tokens in (([8], 8), ([5, 1, 1, 4], 11)):
        cache = DynamicCache(config=model.config)
        decode(model, batch, cache, sizes)
        for layer in cache.layers:
            assert layer.keys.shape == (3, 1, tokens, 22)
            assert layer.values.shape == (3, 1, tokens, 6)
            assert storage_bytes(layer.keys) + storage_bytes(layer.values) == (22 + 6) * tokens * 3 * dtype.itemsize


@pytest.mark.parametrize("cache_name", CACHES)
def test_grouped_cache_holds_key_value_heads(cache_name):
    for model_name, heads in {"mha": 6, "mqa": 1, "gqa": 2}.items():
        model, batch = make_model(model_name), make_batch()
        cache = CACHES[cache_name](model)
        decode(model, batch, cache, [10, 1])
        tokens = 11 if cache_name == "dynamic" else 24
        for layer in cache.layers:
            assert storage_bytes(layer.keys) == storage_bytes(layer.values) == 3 * heads * tokens * 14 * 4


def test_sliding_cache_holds_the_window():
    model, batch = make_model("mixed-window"), make_batch()
    cache = DynamicCache(config=model.config)
    decode(model, batch, cache, [1] * 11)
    assert [layer.keys.shape[2] for layer in cache.layers] == [11, 4, 4]


def test_the_cache_is_taken_by_the_name_of_later_releases(kind):
    """transformers 5.24 hands the cache to a model as `cache`, which must not be overlooked."""
    model, ids = make_exact_model(kind), make_batch()["input_ids"]
    expected, cache = model(ids).logits, DynamicCache(config=model.config)
    logits = [model(ids[:, start:stop], cache=cache).logits for start, stop in ((0, 6), (6, 10), (10, 11))]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-9, atol=1e-9)
    assert cache.get_seq_length() == 11
