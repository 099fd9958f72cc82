"""Attention layers alone, against formulas in float64 that are written here and share no code with the package."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from pairs import all_pairs
from small_models import make_config
from torch import nn
from transformers import DynamicCache, StaticCache

from modeling_gqa import ATTENTION_CLASSES, GQAConfig
from modeling_gqa.attention_functions import masked_softmax
from modeling_gqa.layers import GQARMSNorm, GQAZeroCenteredRMSNorm

compat = pytest.mark.compat

HIDDEN, BATCH, WINDOW = 66, 3, 4
BIASES = {"attention_bias": True}
QK_NORM = {"qk_norm": True, "qk_norm_head_dim": 5, "qk_norm_key_value_heads": 3}
# Every kind, and what each kind can do besides: name -> kind, configuration.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, BIASES) for kind in ATTENTION_CLASSES},
    "gqa-qk-norm": ("gqa", {"qk_norm": True}),
    "gqa-norm-over-heads": ("gqa", {"qk_norm": True, "qk_norm_span": "all_heads", **BIASES}),
    "gqa-zero-centered": ("gqa", {"qk_norm": True, "zero_centered_norms": True}),
    "gqa-zero-centered-over-heads": (
        "gqa",
        {"qk_norm": True, "qk_norm_span": "all_heads", "zero_centered_norms": True},
    ),
    "mla-zero-centered": ("mla", {"q_lora_rank": 17, "zero_centered_norms": True}),
    "mla-qk-norm-zero-centered": ("mla", {**QK_NORM, "zero_centered_norms": True}),
    "mla-q-lora": ("mla", {"q_lora_rank": 17, **BIASES}),
    "mla-no-latent-norm": ("mla", {"latent_norm": False, "q_lora_rank": 17}),
    "mla-half-split": ("mla", {"rope_interleave": False}),
    "mla-all-rotary": ("mla", {"qk_nope_head_dim": 0}),
    "mla-qk-norm": ("mla", {**QK_NORM, **BIASES}),
    "mla-key-mean": ("mla", {"key_mean": True, "latent_norm": False, **BIASES}),
    "mla-norm-over-heads": ("mla", {**QK_NORM, "qk_norm_span": "all_heads", **BIASES}),
    "mla-qk-norm-half-split": ("mla", {**QK_NORM, "rope_interleave": False, "qk_nope_head_dim": 0}),
}


def make_layer(name: str, backend: str | None = None, dtype=torch.float64, **overrides) -> nn.Module:
    """A lone layer whose weights, norms and biases are all random."""
    kind, fields = LAYERS[name]
    config = make_config(kind, num_hidden_layers=1, **fields, **overrides)
    config._attn_implementation = backend
    layer = ATTENTION_CLASSES[kind](config, layer_idx=0).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return layer.to(dtype)


def make_input(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- the formulas


def linear(projection, x):
    y = torch.einsum("bti,oi->bto", x, projection.weight)
    return y if projection.bias is None else y + projection.bias


def norm(module, x, eps=1e-6):
    if module is None or isinstance(module, nn.Identity):
        return x
    factor = module.weight + 1 if "ZeroCentered" in type(module).__name__ else module.weight
    return factor * x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()


def norm_heads(module, x, size):
    """Norm the heads in (B, T, heads x size) one by one, or at once where the norm is wider than a head."""
    if module is not None and len(module.weight) > size:
        return norm(module, x)
    return torch.cat([norm(module, head) for head in x.split(size, -1)], -1)


def turn(x, angles, neighbours: bool):
    """Rotate (B, T, D) by angles (B, T, P / 2) as complex numbers; what is beyond P stays."""
    if angles is None:
        return x
    size = 2 * angles.shape[-1]
    real, imaginary = (x[..., 0:size:2], x[..., 1:size:2]) if neighbours else x[..., :size].split(size // 2, -1)
    z = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag, x[..., size:]), -1)


def attend(query, key, value, allowed, bias=0.0):
    """One head: (B, T, D), (B, S, D), (B, S, V) and who may see what (B, T, S)."""
    scores = torch.einsum("btd,bsd->bts", query, key) / math.sqrt(query.shape[-1]) + bias
    weights = torch.where(allowed, scores.exp(), 0.0)
    return torch.einsum("bts,bsv->btv", weights / weights.sum(-1, keepdim=True), value)


def grouped_formula(layer, x, allowed, angles=None, bias=0.0, factors=1.0):
    size = layer.head_dim
    query, key, value = (linear(projection, x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads, groups = query.shape[-1] // size, key.shape[-1] // size
    query, key = norm_heads(layer.q_norm, query, size) * factors, norm_heads(layer.k_norm, key, size)
    outputs = []
    for head in range(heads):
        own, shared = slice(head * size, (head + 1) * size), head * groups // heads
        shared = slice(shared * size, (shared + 1) * size)
        q = turn(query[..., own], angles, neighbours=False)
        k = turn(key[..., shared], angles, neighbours=False)
        outputs.append(attend(q, k, value[..., shared], allowed, bias))
    return linear(layer.o_proj, torch.cat(outputs, -1))


def normed_queries(layer, x):
    """Each head's D numbers after their norm, times the head's own N + P rows."""
    config, query = layer.config, linear(layer.q_proj, x)
    size, made = config.qk_norm_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    heads = []
    for head, normed in enumerate(norm_heads(layer.q_norm, query, size).split(size, -1)):
        heads.append(torch.einsum("btd,od->bto", normed, layer.q_head_proj.weight[head * made : (head + 1) * made]))
    return torch.cat(heads, -1)


def normed_keys_and_values(layer, x):
    """The key heads after their norms, and the values."""
    key = norm_heads(layer.k_norm, linear(layer.k_proj, x), layer.config.qk_norm_head_dim)
    return torch.cat((key, linear(layer.v_proj, x)), -1)


def latent_formula(layer, x, allowed, angles=None, bias=0.0, factors=1.0):
    config = layer.config
    rank, nope, rope, v = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.qk_norm:
        query, x = normed_queries(layer, x), normed_keys_and_values(layer, x)
    elif config.q_lora_rank is None:
        query = linear(layer.q_proj, x)
    else:
        query = linear(layer.q_b_proj, norm(layer.q_a_layernorm, linear(layer.q_a_proj, x)))
    query = query * factors
    compressed = linear(layer.kv_a_proj_with_mqa, x)
    latent = compressed[..., :rank] if config.qk_norm else norm(layer.kv_a_layernorm, compressed[..., :rank])
    rebuilt = linear(layer.kv_b_proj, latent)
    key_rope = turn(compressed[..., rank:], angles, config.rope_interleave)
    outputs = []
    for head in range(config.num_attention_heads):
        q = query[..., head * (nope + rope) : (head + 1) * (nope + rope)]
        q = torch.cat((q[..., :nope], turn(q[..., nope:], angles, config.rope_interleave)), -1)
        own = rebuilt[..., head * (nope + v) : (head + 1) * (nope + v)]
        k = torch.cat((own[..., :nope], key_rope), -1)
        added = bias
        if layer.key_mean is not None and angles is not None:
            size = 2 * angles.shape[-1]
            mean = layer.key_mean.bias[head * size : (head + 1) * size].expand(*x.shape[:2], -1)
            pair = (turn(y, angles, neighbours=False) for y in (query[..., head * (nope + rope) :][..., :size], mean))
            added = bias + torch.einsum("btd,bsd->bts", *pair) / math.sqrt(nope + rope)
        outputs.append(attend(q, k, own[..., nope:], allowed, added))
    return linear(layer.o_proj, torch.cat(outputs, -1))


FORMULAS = {"mha": grouped_formula, "mqa": grouped_formula, "gqa": grouped_formula, "mla": latent_formula}


def formula(name, layer, x, allowed, **kwargs):
    with torch.no_grad():
        return FORMULAS[LAYERS[name][0]](layer, x, allowed, **kwargs)


def who_sees_whom(length, keys=None, causal=True, window=None, padding=None) -> torch.Tensor:
    """(B, T, S) as booleans, for the last `length` of `keys` tokens."""
    keys = keys or length
    allowed = torch.ones(BATCH, length, keys, dtype=torch.bool)
    for i in range(length):
        for j in range(keys):
            distance = i + keys - length - j
            seen = distance >= 0 if causal else True
            if window is not None:  # transformers' windows: the token itself counts only where one side is seen
                seen = seen and (distance < window if causal else abs(distance) <= window)
            allowed[:, i, j] = seen
    return allowed if padding is None else allowed & padding.bool()[:, None]


def padding_mask(keys: int, side: str) -> torch.Tensor:
    """Padding of as many tokens as a row's index on the side `left` or `right`, or of none."""
    mask = torch.ones(BATCH, keys, dtype=torch.long)
    for row in range(1, BATCH if side != "none" else 0):
        mask[row, slice(0, row) if side == "left" else slice(keys - row, keys)] = 0
    return mask


def angles_and_embeddings(layer, length: int):
    """Angles (B, T, P / 2) of shifted positions, and the cosine and sine that a model passes to its layers."""
    size = layer.config.head_dim
    positions = torch.arange(length, dtype=torch.float64) + torch.tensor([[0.0], [3.0], [11.0]])
    angles = positions[..., None] * 100.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    doubled = torch.cat((angles, angles), -1)
    return angles, (doubled.cos(), doubled.sin())


def assert_same(output, expected, allowed=None, tolerance=1e-10):
    """Equal wherever a token sees anything; finite everywhere."""
    assert output.isfinite().all()
    seeing = ... if allowed is None else allowed.any(-1)
    torch.testing.assert_close(output[seeing], expected[seeing], atol=tolerance, rtol=tolerance)


# -- each kind alone

CASES = {
    "causal": ({}, {}),
    "not causal": ({"is_causal": False}, {}),
    "left padding": ({"padding": "left"}, {}),
    "right padding": ({"padding": "right"}, {}),
    "not causal, padding": ({"padding": "right", "is_causal": False}, {}),
    "window": ({}, {"sliding_window": WINDOW}),
    "window, padding": ({"padding": "left"}, {"sliding_window": WINDOW}),
    "window, not causal": ({"is_causal": False}, {"sliding_window": WINDOW}),
}


@pytest.mark.parametrize(("name", "case", "rotary", "backend"), all_pairs(LAYERS, CASES, [False, True], [None, "sdpa"]))
def test_a_layer_alone_computes_its_formula(name, case, rotary, backend):
    """Under every mask a lone layer's output is its formula's, and eager weights are 0 where nothing is seen."""
    arguments, fields = CASES[case]
    layer, x = make_layer(name, backend, **fields), make_input(9)
    padding = padding_mask(9, arguments["padding"]) if "padding" in arguments else None
    call = {"is_causal": False} if "is_causal" in arguments else {}
    angles, embeddings = angles_and_embeddings(layer, 9) if rotary else (None, None)
    output, weights = layer(x, attention_mask=padding, position_embeddings=embeddings, **call)
    allowed = who_sees_whom(9, causal=not call, window=fields.get("sliding_window"), padding=padding)
    assert_same(output, formula(name, layer, x, allowed, angles=angles), allowed)
    if backend is None:
        assert weights.shape == (BATCH, layer.config.num_attention_heads, 9, 9)
        assert (weights[~allowed[:, None].expand_as(weights) & allowed.any(-1)[:, None, :, None]] == 0).all()


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_queries_are_multiplied_by_their_factors(name, rotary, backend):
    """Before the scores, whole: rotated and unrotated parts, and what meets a key that all tokens share."""
    layer, x = make_layer(name, backend), make_input(9)
    angles, embeddings = angles_and_embeddings(layer, 9) if rotary else (None, None)
    factors = 1 + torch.rand(BATCH, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    allowed = who_sees_whom(9)
    for rows in (factors, factors[:1]):
        output, _ = layer(x, position_embeddings=embeddings, query_factors=rows)
        assert_same(output, formula(name, layer, x, allowed, angles=angles, factors=rows[..., None]))
    cache = DynamicCache()
    for token in range(9):
        at = slice(token, token + 1)
        own = None if embeddings is None else tuple(part[:, at] for part in embeddings)
        output, _ = layer(x[:, at], position_embeddings=own, query_factors=factors[:, at], past_key_values=cache)
    assert_same(output, formula(name, layer, x, allowed, angles=angles, factors=factors[..., None])[:, -1:])


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", LAYERS)
def test_flex_attention_alone_is_causal_too(name, padding):
    """Under flex attention a lone layer builds a causal mask, to 1e-4 of the formula."""
    layer, x = make_layer(name, "flex_attention", torch.float32), make_input(9)
    mask = None if padding is None else padding_mask(9, padding)
    # Flex attention has no gradients on a CPU, and compiling it takes long.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output, _ = layer(x.float(), attention_mask=mask)
    allowed = who_sees_whom(9, padding=mask)
    assert_same(output.double(), formula(name, layer.double(), x, allowed), allowed, tolerance=1e-4)


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("name", LAYERS)
def test_finished_masks_are_taken_as_they_are(name, backend):
    """A boolean and an additive mask (B, 1, T, S) replace the causal mask and are applied without a change."""
    layer, x = make_layer(name, backend), make_input(7)
    generator = torch.Generator().manual_seed(5)
    allowed = torch.rand(BATCH, 7, 7, generator=generator) < 0.5
    allowed |= torch.eye(7, dtype=torch.bool)
    bias = torch.randn(BATCH, 7, 7, dtype=torch.float64, generator=generator)
    additive = bias.masked_fill(~allowed, torch.finfo(torch.float64).min)
    assert_same(layer(x, attention_mask=allowed[:, None])[0], formula(name, layer, x, allowed))
    assert_same(layer(x, attention_mask=additive[:, None])[0], formula(name, layer, x, allowed, bias=bias))


# Caches of a lone layer, and whether its window bounds what it sees: name -> maker, window.
CACHES = {
    "dynamic": (lambda config: DynamicCache(), None),
    "window": (lambda config: DynamicCache(), WINDOW),
    "sliding": (lambda config: DynamicCache(config=config), WINDOW),
    "static": (lambda config: StaticCache(config, max_cache_len=15), None),
    "static window": (lambda config: StaticCache(config, max_cache_len=15), WINDOW),
}


def attend_in_chunks(layer, x, cache, lengths, mask=None, embeddings=None, **kwargs) -> torch.Tensor:
    """Output (B, T, hidden) of `x` given in chunks over a cache."""
    outputs, start = [], 0
    for length in lengths:
        end = start + length
        turned = None if embeddings is None else tuple(part[:, start:end] for part in embeddings)
        seen = None if mask is None else mask[:, :end]
        outputs.append(layer(x[:, start:end], turned, seen, past_key_values=cache, **kwargs)[0])
        start = end
    return torch.cat(outputs, 1)


CHUNKS = CACHES, [None, "left"], [None, "sdpa"], [(4, 3, 1, 1, 2, 1), (1, 5, 6)]


@compat
@pytest.mark.parametrize(
    ("name", "cache", "padding", "backend", "lengths"),
    # Which mask is built depends on all of these; what a layer computes under it, on each of them.
    [*product(["gqa", "mla"], *CHUNKS), *all_pairs(LAYERS, *CHUNKS)],
    ids=str,
)
def test_chunks_over_a_cache_equal_the_whole(name, cache, padding, backend, lengths):
    """Chunks of any lengths over any cache give the formula's output over the whole sequence."""
    make_cache, window = CACHES[cache]
    layer, x = make_layer(name, backend, sliding_window=window), make_input(12)
    mask = None if padding is None else padding_mask(12, padding)
    angles, embeddings = angles_and_embeddings(layer, 12)
    output = attend_in_chunks(layer, x, make_cache(layer.config), lengths, mask, embeddings)
    allowed = who_sees_whom(12, window=window, padding=mask)
    assert_same(output, formula(name, layer, x, allowed, angles=angles), allowed)


@compat
@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("padding", [None, "none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "window", "static"])
def test_what_is_not_causal_sees_its_own_chunk_and_all_before(kind, cache, padding, backend):
    """With `is_causal=False` and a cache, a token sees all of its own chunk and of the chunks before it."""
    make_cache, window = CACHES[cache]
    layer, x = make_layer(kind, backend, sliding_window=window), make_input(12)
    mask = None if padding is None else padding_mask(12, padding)
    lengths = (4, 3, 1, 4)
    output = attend_in_chunks(layer, x, make_cache(layer.config), lengths, mask, is_causal=False)
    ends = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths))
    allowed = who_sees_whom(12, causal=False, window=window, padding=mask) & (torch.arange(12) < ends[:, None])
    assert_same(output, formula(kind, layer, x, allowed), allowed)


@compat
@pytest.mark.parametrize("cache", ["sliding", "static window"])
def test_a_two_sided_window_over_a_cache_that_drops_its_keys_is_refused(kind, cache):
    """A cache that drops keys cannot serve a window to both sides: a ValueError says which cache can."""
    layer = make_layer(kind, sliding_window=WINDOW)
    with pytest.raises(ValueError, match="is_causal=False with a cache of a sliding window"):
        layer(make_input(9), past_key_values=CACHES[cache][0](layer.config), is_causal=False)


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_stays_within_its_rounding(name):
    """A bfloat16 layer differs from the float64 formula by at most 8 roundings of the largest output."""
    layer, x = make_layer(name, dtype=torch.bfloat16), make_input(9).to(torch.bfloat16)
    output = layer(x)[0]
    expected = formula(name, layer.to(torch.float64), x.double(), who_sees_whom(9))
    assert output.dtype == torch.bfloat16
    # Three roundings of 2 ** -9 each follow one another on the way through projections, scores and output.
    assert (output.double() - expected).abs().max() <= 8 * 2**-9 * expected.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_the_function(name):
    """Gradients of the input and of every parameter equal finite differences in float64."""
    kind, fields = LAYERS[name]
    sizes = {"kv_lora_rank": 3, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 3} if kind == "mla" else {}
    fields = {**fields, **({"q_lora_rank": 2} if "q_lora_rank" in fields else {})}
    fields |= {"qk_nope_head_dim": 2} if "key_mean" in fields else {}
    config = GQAConfig(hidden_size=5, head_dim=2, num_attention_heads=4, num_hidden_layers=1, attention_kind=kind,
                       **{**sizes, **fields})  # fmt: skip
    torch.manual_seed(0)
    layer = ATTENTION_CLASSES[kind](config, layer_idx=0).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    parameters = [torch.randn_like(parameter).requires_grad_() for parameter in parameters]
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, None, mask))[0]

    assert torch.autograd.gradcheck(function, (x, *parameters))


@pytest.mark.parametrize("wrong", [(BATCH, 5), (BATCH + 1, 9), (9, 9)], ids=str)
def test_a_padding_mask_of_the_wrong_shape_is_refused(kind, wrong):
    """A padding mask that has not (batch, keys) elements raises a ValueError that names its shape."""
    with pytest.raises(ValueError, match=rf"attention_mask has shape \({wrong[0]}, {wrong[1]}\)"):
        make_layer(kind)(make_input(9), attention_mask=torch.ones(wrong))


def test_a_layer_of_another_kind_is_refused(kind):
    """A class builds only layers of its own kinds; the ValueError names the layer and its kind."""
    config = make_config(kind)
    for attention_class in set(ATTENTION_CLASSES.values()) - {ATTENTION_CLASSES[kind]}:
        with pytest.raises(ValueError, match=f"layer 1 has attention_kind='{kind}'"):
            attention_class(config, layer_idx=1)


# -- the parts


@pytest.mark.parametrize("norm_class", [GQARMSNorm, GQAZeroCenteredRMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_norm_and_softmax_compute_in_float32_at_least(dtype, norm_class):
    """As exact as the dtype of the result allows, so nothing in between is rounded to less than float32."""
    x = 30 * make_input(9).to(dtype)
    norm_layer = norm_class(HIDDEN).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {"atol": 1e-14, "rtol": 1e-14} if dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(norm_layer(x).double(), exact.to(wide).to(dtype).double(), **tolerance)
    weights = masked_softmax(x, None, wide)
    torch.testing.assert_close(weights.double(), x.double().softmax(-1), **tolerance)
    assert masked_softmax(x, None, dtype).dtype == norm_layer(x).dtype == dtype
