"""A quantized cache gives back what float64 formulas say, and goes through all that `generate` does with a cache.

Shapes: B batch, G key/value heads, T tokens, C channels of a head.
"""

import copy
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from scipy.linalg import hadamard
from small_models import ROPES, make_batch, make_config, make_model
from test_caches import decode, no_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, DynamicLayer, LlamaConfig

from modeling_gqa import GQAForCausalLM, GQAQuantizedCache, costs
from modeling_gqa.attention import rotate
from modeling_gqa.cache_formats import BASES, FORMATS, STEPS, CodedFormat, RowFormat, orthogonal_matrix
from modeling_gqa.cache_quantized import TILE, QuantizedLayer
from modeling_gqa.configuration_checks import changing_rope
from modeling_gqa.layers import select_frequencies
from modeling_gqa.modeling_gqa import ATTENTION_CLASSES

pytestmark = pytest.mark.compat
assert no_gradients  # a fixture of all tests here
BITS = [bits for bits in FORMATS if isinstance(bits, int) and 0 < bits < 16]


def rounded(x, bits):
    """`x` (..., C) in one block: the nearest of 2^bits levels, at the scale of least squared error of those tried."""
    outermost, found, least = (2**bits - 1) / 2, None, None
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4) if bits <= 4 else (1.0,):
        scale = (share * x.abs().amax(-1, keepdim=True).float() / outermost).bfloat16().to(x.dtype)
        levels = torch.arange(2**bits).to(x) - outermost
        nearest = levels[(x[..., None] / scale[..., None] - levels).abs().argmin(-1)] * scale
        error = (nearest - x).square().sum(-1, keepdim=True)
        found = nearest if found is None else torch.where(error < least, nearest, found)
        least = error if least is None else torch.minimum(error, least)
    return found


# -- rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [64, 22, 6])
def test_rows_hold_the_nearest_levels(bits, size):
    x = torch.randn(3, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    stored = RowFormat(bits, (size,))
    found = stored.unpack(stored.pack(x), torch.float64)
    torch.testing.assert_close(found, rounded(x, bits), rtol=1e-6, atol=1e-6)
    # Codes of a few bits fill whole bytes of eight channels; the scale has two bytes.
    assert stored.pack(x).shape == (3, 5, stored.row_bytes)
    assert stored.row_bytes == (2 + bits * -(-size // 8) + 1) // 2 * 2


@pytest.mark.parametrize("bits", BITS)
def test_blocks_have_scales_of_their_own(bits):
    x = (
        torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1.0, 100, 0.01, 1])[torch.arange(50) // 16]
    )
    stored = RowFormat(bits, (16, 16, 16, 2))
    parts = stored.unpack(stored.pack(x), torch.float32).split(stored.sizes, -1)
    for found, expected in zip(parts, x.split(stored.sizes, -1), strict=True):
        torch.testing.assert_close(found, rounded(expected, bits), rtol=1e-5, atol=1e-6)
    assert stored.row_bytes == (8 + bits * 7 + 1) // 2 * 2


def rounded_together(x, blocks):
    """`x` (..., C) in the blocks of a basis: levels at the same half steps in all, at the best of eight scales."""
    usual = {2: 0.9957, 3: 0.586, 4: 0.3352, 6: 0.1041, 8: 0.0308}
    kept = [(size, bits) for size, bits in blocks if bits]
    steps = torch.cat([torch.full((size,), usual[bits]) for size, bits in kept]).to(x)
    outermost = torch.cat([torch.full((size,), (2**bits - 1) / 2) for size, bits in kept]).to(x)
    y, found, least = x[..., : len(steps)], None, None
    for spread in (0.6, 0.7, 0.8, 0.9, 1.0, 1.12, 1.26, 1.5):
        scale = (spread * (y * steps).square().mean(-1, keepdim=True).sqrt()).bfloat16().to(x)
        code = ((y / scale + outermost).round()).clamp(min=0).minimum(2 * outermost)
        nearest = (code - outermost) * scale
        error = (nearest - y).square().sum(-1, keepdim=True)
        found = nearest if found is None else torch.where(error < least, nearest, found)
        least = error if least is None else torch.minimum(error, least)
    return torch.nn.functional.pad(found, (0, x.shape[-1] - len(steps)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [((16, 8), (24, 6), (13, 4), (8, 3), (30, 2), (9, 0)), ((5, 3),)])
def test_blocks_of_a_basis_share_a_scale(blocks, dtype):
    form = CodedFormat(blocks)
    sizes = torch.tensor([x for size, bits in blocks for x in [1 / STEPS[bits] if bits else 1.0] * size])
    x = (torch.randn(2, 7, form.channels, generator=torch.Generator().manual_seed(2)) * sizes).to(dtype)
    found = form.unpack(form.pack(x), dtype)
    expected = rounded_together(x.float(), blocks).to(dtype)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    total = 2 + sum(bits * -(-size // 8) for size, bits in blocks)
    assert form.pack(x).shape[-1] == form.row_bytes == total + total % 2
    assert form.unpack(form.pack(0 * x), dtype).abs().max() < 1e-25


def test_numbers_beyond_a_format_are_bounded():
    largest = torch.tensor([[1e6, -1e6, *[0.0] * 6]])
    stored = RowFormat("fp8", (8,))
    assert stored.unpack(stored.pack(largest), torch.float32)[0, 0] == 448
    for bits in BITS:
        stored = RowFormat(bits, (8,))
        torch.testing.assert_close(stored.unpack(stored.pack(torch.zeros(1, 8)), torch.float32), torch.zeros(1, 8))


@pytest.mark.parametrize("size", [1, 2, 3, 6, 14, 22, 48, 64])
def test_the_mixing_matrix_is_orthogonal_and_even(size):
    matrix = orthogonal_matrix(size)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert matrix.abs().max() <= (2 / size) ** 0.5 + 1e-12
    if size == 64:
        assert torch.equal(matrix.sign(), torch.from_numpy(hadamard(64)).double())


# -- a model that attends to rounded numbers, against one whose cache rounds by formulas in float64


class Oracle(DynamicLayer):
    """Keeps what it gets after rounding by formulas: less the constant, mixed, rounded, and all that undone.

    Args:
        attention: the attention layer whose numbers it holds.
        bits, exact: as `nbits` and `exact_tokens`.
        rotation: cosine and sine (B or 1, T, P) of all tokens.
        first: (B,), the place of each row's first token.
    """

    def __init__(self, attention, bits, exact, rotation, first):
        super().__init__()
        self.attention, self.bits, self.exact, self.first = attention, bits, exact, first
        self.rotation = select_frequencies(rotation, attention.frequency_indices)

    def update(self, key_states, value_states, *args, **kwargs):
        start = self.get_seq_length()
        place = (self.attention.rotary_place, 1 - self.attention.rotary_place)
        pair, constants = [key_states, value_states], dict(zip(place, self.attention.constants(), strict=True))
        # The angles of a key that all tokens share, where a cache of transformers holds them, are kept as they are.
        sizes = [size for _, size in self.attention.cached_shapes]
        pair, angles = zip(
            *(x.split([n, x.shape[-1] - n], dim=-1) for n, x in zip(sizes, pair, strict=True)), strict=True
        )
        pair = list(pair)
        for number, x in enumerate(pair):
            batch, _, new, _ = x.shape
            constant = torch.zeros_like(x)
            # A key is not turned back where frequencies change with the length.
            if constants[number] is not None and (number != place[0] or changing_rope(self.attention.config) is None):
                constant = constants[number][None, :, None].expand(batch, -1, new, -1)
                if number == place[0]:
                    constant = rotate(constant, *(part[:, start : start + new] for part in self.rotation))
            found = constant + self.coded(x - constant, self.attention.bits_fields[number])
            places = torch.arange(start, start + new) - self.first[:, None]
            kept = (places >= 0) & (places < self.exact)
            pair[number] = torch.where(kept[:, None, :, None], x, found)
        return super().update(*(torch.cat(x, dim=-1) for x in zip(pair, angles, strict=True)))

    def coded(self, x, field):
        """`x` (B, G, T, D) in the basis of the cache, rounded, and back."""
        if not x.shape[-1]:  # no rotary key
            return x
        layers = self.attention.config.cache_quantization.get("layers")
        if not layers:
            matrix = orthogonal_matrix(x.shape[-1])
            return rounded(x @ matrix, self.bits) @ matrix
        encoder, decoder = getattr(self.attention, field.replace("bits", "basis"))
        blocks = layers[self.attention.layer_idx][field]
        found = rounded_together(x.transpose(1, 2).flatten(2) @ encoder, blocks) @ decoder
        return found.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


def held_exactly(model, batch, bits, exact=4):
    """A dynamic cache with the oracle as its layers."""
    cache = DynamicCache(config=model.config)
    # Of right-padded rows the first token is the one at position 0, of left-padded ones it is the last of these.
    first = (batch["attention_mask"] == 0).sum(1) if batch["attention_mask"][:, -1].all() else torch.zeros(3).long()
    for index, (layer, size) in enumerate(zip(model.model.layers, model.model.rotary_sizes, strict=True)):
        if type(cache.layers[index]) is DynamicLayer:
            states = torch.zeros(1, dtype=model.dtype)
            rotation = model.model.rotary_emb[size](states, batch["position_ids"])
            cache.layers[index] = Oracle(layer.self_attn, bits, exact, rotation, first)
    return cache


def own_bases(config):
    """Options with two or three blocks for all that a layer caches, of which some keep nothing."""
    layers = []
    for layer in config.per_layer_config:
        attention, bits = ATTENTION_CLASSES[layer.attention_kind], iter([4, 3])
        numbers = zip(attention.bits_fields, attention.cache_sizes(layer), strict=True)
        layers.append({name: [[n // 3, 6], [n // 3, next(bits)], [n - n // 3 * 2, 0]][: 3 * n] for name, n in numbers})
    return {"layers": layers}


def model_with_constants(name, means, bases=False, **overrides):
    """Model in float64 with biases, and with means that are not theirs, and with bases if these are asked for."""
    options = {"nbits": 4, "means": means}
    if bases:
        options |= own_bases(make_config(name, attention_bias=True, **overrides))
    model = make_model(name, attention_bias=True, cache_quantization=options, **overrides).double()
    generator = torch.Generator().manual_seed(3)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("_proj.bias", "_mqa.bias", "cache_mean")):
            x.copy_(torch.randn(x.shape, generator=generator, dtype=x.dtype))
        if name.split(".")[-1] in BASES.values():
            x[0].add_(0.1 * torch.randn(x[0].shape, generator=generator, dtype=x.dtype))
            x[1] = x[0].inverse()
    return model


@pytest.mark.parametrize("sizes", [(17, *(1,) * 13), (3, 20, 7)], ids=["token by token", "chunks"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("constants", ["biases", "means", "means and bases"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_model_attends_to_the_rounded_numbers(model_name, backend, constants, padding, sizes, monkeypatch):
    """Whether MLA expands or absorbs, and the cache is read at once or by tiles: attention sees what formulas give."""
    monkeypatch.setattr("modeling_gqa.cache_quantized.TILE", 3 * 7)
    model = model_with_constants(model_name, "means" in constants, "bases" in constants)
    batch = make_batch(length=30, padding=padding)
    model.set_attn_implementation(backend)
    cache = GQAQuantizedCache(model.config)
    found = decode(model, batch, cache, sizes)
    expected = decode(model, batch, held_exactly(model, batch, 4), sizes)
    mask = batch["attention_mask"].bool()
    # A number half way between two levels may be rounded either way, because the cache rounds in float32.
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)
    exact = decode(model, batch, DynamicCache(config=model.config), sizes)
    assert (expected - exact)[mask].abs().max() > 0.01 * exact[mask].std()


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_heads_that_rotate_in_part_have_constants_at_the_places_of_each_row(padding, means):
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    model = model_with_constants("gqa", means, head_dim=16, rope_parameters=rope)
    batch, sizes = make_batch(length=30, padding=padding), (17, 13)
    found = decode(model, batch, GQAQuantizedCache(model.config), sizes)
    expected = decode(model, batch, held_exactly(model, batch, 4), sizes)
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mla", "mla-q-lora"])
def test_tiles_add_up(name, monkeypatch):
    """The softmax over several tiles, with padding, is that over all tokens."""
    model, batch = model_with_constants(name, True), make_batch(length=40, padding="left")
    whole = decode(model, batch, GQAQuantizedCache(model.config), (39, 1))
    monkeypatch.setattr("modeling_gqa.cache_quantized.TILE", 3 * 7)
    tiles = decode(model, batch, GQAQuantizedCache(model.config), (39, 1))
    torch.testing.assert_close(tiles[:, -1], whole[:, -1], rtol=1e-9, atol=1e-9)


class LargestFloat(TorchDispatchMode):
    """Remembers how many numbers the largest floating-point tensor has that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.numbers = max(self.numbers, x.numel())
        return result


def test_decoding_mla_never_holds_the_whole_cache_as_numbers():
    model = make_model("mla", max_position_embeddings=2 * TILE, num_hidden_layers=1)
    ids = torch.randint(3, 101, (2, 3 * TILE // 2))
    cache = GQAQuantizedCache(model.config, {})
    model(ids, past_key_values=cache)
    with LargestFloat() as largest:
        model(ids[:, :1], past_key_values=cache)
    # The latent has 22 numbers, and there are 6 heads.
    assert largest.numbers <= TILE * 22 < 2 * cache.layers[0].get_seq_length() * 22


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "yarn", "llama3"])
def test_constants_come_back_whatever_the_rope(rope):
    """Also where the frequencies change when a text becomes longer than those that the model was trained on."""
    ropes = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    model = model_with_constants("gqa", True, rope_parameters=ropes, max_position_embeddings=24)
    batch, options = make_batch(length=40), {"exact_tokens": 64, "means": True}
    found = decode(model, batch, GQAQuantizedCache(model.config, options), (12, 8, 20))
    model = model_with_constants("gqa", True, rope_parameters=ropes, max_position_embeddings=24)
    exact = decode(model, batch, DynamicCache(config=model.config), (12, 8, 20))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_sums_over_many_tokens_fit_float16(name):
    model = make_model(name, cache_quantization={"nbits": 8}, max_position_embeddings=8192, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    model.model.embed_tokens.weight.add_(1.0)
    attention.q_proj.weight.mul_(0.01)
    if name == "mla":
        attention.kv_a_proj_with_mqa.weight.add_(0.1)
        attention.kv_a_layernorm.weight.fill_(5.0)
    else:
        attention.v_proj.weight.add_(0.3)
    model, ids = model.half(), torch.randint(3, 101, (1, 4500))
    for cache in (DynamicCache(config=model.config), GQAQuantizedCache(model.config)):
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        assert model(ids[:, -1:], past_key_values=cache).logits.isfinite().all()


def test_rows_may_leave_the_device_after_an_update(model_name, monkeypatch):
    """As in an offloaded cache, which takes the layer's rows away before attention reads them."""
    model, batch = model_with_constants(model_name, True), make_batch(length=30)
    caches = [GQAQuantizedCache(model.config) for _ in range(2)]
    for cache in caches:
        decode(model, batch, cache, [20])
    expected, update = decode(model, batch, caches[0], [1], start=20), QuantizedLayer.update

    def offloading(self, *args, **kwargs):
        rows = update(self, *args, **kwargs)
        self.__dict__.update(keys=self.keys.to("meta"), values=self.values.to("meta"))
        return rows

    monkeypatch.setattr(QuantizedLayer, "update", offloading)
    assert torch.equal(decode(model, batch, caches[1], [1], start=20), expected)


def test_a_padded_prompt_may_come_token_by_token():
    model, batch = model_with_constants("mixed", True), make_batch(length=30, padding="left")
    caches = [GQAQuantizedCache(model.config) for _ in range(2)]
    whole, single = (decode(model, batch, cache, sizes) for cache, sizes in zip(caches, ([30], [1] * 30), strict=True))
    assert torch.equal(caches[0].held.first, caches[1].held.first) and caches[0].held.first.tolist() == [[0], [2], [3]]
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(single[mask], whole[mask], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_padding_is_no_first_token(kind):
    """Without positions the mask alone says where a row begins: the four tokens after padding lose nothing."""
    model = make_model(kind, cache_quantization={"nbits": 2}).double()
    ids = torch.tensor([[0, 0, 0, 0, 5, 6, 7, 8], [0, 0, 4, 9, 6, 2, 7, 3]])
    mask, cache = (ids != 0).long(), GQAQuantizedCache(model.config)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits[:, 4:]
        steps = [
            model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for end in range(1, 9)
        ]
        single = torch.cat(steps, dim=1)[:, 4:]
        for found in (whole, single):
            torch.testing.assert_close(found[:1], model(ids[:1, 4:], use_cache=False).logits)
        expected = model(ids[1:, 2:6], use_cache=False).logits[:, 2:]
        torch.testing.assert_close(whole[1:, :2], expected)
    assert cache.held.first.tolist() == [[4], [2]]


def test_packed_documents_are_attended_to_as_alone(model_name):
    """In each document of a row the first tokens are exact."""
    model, lengths = model_with_constants(model_name, True), [[9, 6, 13, 2], [14, 16]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.randint(3, 101, (2, 30), generator=torch.Generator().manual_seed(5))
    found = model(ids, position_ids=positions, use_cache=True).logits  # rows are packed where no cache is given
    for row, logits, row_lengths in zip(ids, found, lengths, strict=True):
        for part, expected in zip(row.split(row_lengths), logits.split(row_lengths), strict=True):
            alone = model(part[None], past_key_values=GQAQuantizedCache(model.config)).logits[0]
            torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)


def test_stand_ins_do_not_stay():
    """What is mixed while a graph is traced, or on the meta device, leaves nothing behind."""
    form, number = RowFormat(8, (20,)), torch.zeros(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        form.mixing_matrix(torch.float32, number.device)
    with torch.device("meta"):
        form.mixing_matrix(torch.float32, torch.device("meta"))
        assert form.mixing_matrix(torch.float32, number.device).device.type == "cpu"
    assert type(form.mixing_matrix(torch.float32, number.device)) is torch.Tensor


def test_an_exported_model_does_not_round():
    model, ids = make_model("mla", cache_quantization={"nbits": 2}), make_batch()["input_ids"]
    exported = torch.export.export(model, (ids,), kwargs={"use_cache": False}, strict=False).module()
    torch.testing.assert_close(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("options", [{"exact_tokens": 64}, {"residual_length": 64}])
def test_what_is_kept_exactly_loses_nothing(model_name, options):
    model, batch = make_model(model_name).double(), make_batch(length=40, padding="left")
    found = decode(model, batch, GQAQuantizedCache(model.config, options), (9, 25, *(1,) * 6))
    exact = decode(model, batch, DynamicCache(config=model.config), (9, 25, *(1,) * 6))
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(found[mask], exact[mask], rtol=1e-9, atol=1e-9)


def test_sixteen_bits_lose_what_bfloat16_loses(model_name):
    model, batch = make_model(model_name).double(), make_batch(length=40)
    found = decode(model, batch, GQAQuantizedCache(model.config, {"nbits": 16}), (39, 1))
    exact = decode(model, batch, DynamicCache(config=model.config), (39, 1))
    assert 1e-4 < (found - exact).std() / exact.std() < 1e-2


# -- what `generate` does with a cache


def test_bits_by_layer_and_by_what_is_cached():
    layers = [{"latent_bits": [[16, 4], [6, 0]], "rope_bits": [[6, 3]]}, None, None]
    options = {"nbits": 8, "rope_bits": 16, "value_bits": 2, "q_group_size": 8, "layers": layers}
    cache = GQAQuantizedCache(make_config("mixed"), options)
    latent, rope = cache.layers[0].formats
    assert (latent.blocks, latent.channels, rope.blocks) == (((16, 4), (6, 0)), 22, ((6, 3),))
    assert [(form.bits, form.sizes) for form in cache.layers[1].formats] == [(8, (8, 6)), (2, (8, 6))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nbits": 8, "residual_length": 5}, {"nbits": 3, "exact_tokens": 0}, None])
def test_bytes_are_those_of_the_accounting(model_name, options, dtype):
    """Of a layer with a window the accounting has one token more than transformers holds."""
    options = own_bases(make_config(model_name)) if options is None else options
    model = make_model(model_name, cache_quantization=options).to(dtype)
    cache, batch = GQAQuantizedCache(model.config), make_batch(length=40)
    model(**batch, past_key_values=cache)
    held = [cache.positions.keys]
    for layer in cache.layers:
        held += [layer.keys, layer.values]
        held += [*layer.first_tokens, *layer.last_tokens] if isinstance(layer, QuantizedLayer) else []
    used = sum(x.numel() * x.element_size() for x in held)
    windows = [layer for layer in costs.CostedModel(model.config).layers if layer.window]
    used += 3 * sum(layer.cached_numbers for layer in windows) * dtype.itemsize
    assert used == costs.cache_bytes(model.config, batch_size=3, tokens=40, dtype=dtype)
    assert costs.cache_bytes_per_token(model.config, dtype) < costs.cache_bytes_per_token(
        make_config(model_name), dtype
    )


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
@pytest.mark.parametrize("way", ["configuration", "argument", "cache"])
def test_generates(model_name, way, strategy):
    """The tokens are those of a cache with the same formats, however it is asked for; at eight bits, the model's own
    but where two tokens are about equally likely."""
    options = {"nbits": 8, "exact_tokens": 2}
    model = make_model(model_name, cache_quantization=options if way == "configuration" else None)
    batch = make_batch(batch=1, length=9) if "prompt_lookup_num_tokens" in strategy else make_batch(padding="left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    asked = {
        "configuration": {},
        "argument": {"cache_implementation": "quantized", "cache_config": options},
        "cache": {"past_key_values": GQAQuantizedCache(model.config, options)},
    }[way]
    run = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **strategy}
    found = model.generate(**inputs, **asked, **run)
    assert isinstance(found.past_key_values, GQAQuantizedCache)
    model.config.cache_quantization = None
    given = model.generate(**inputs, past_key_values=GQAQuantizedCache(model.config, options), **run)
    assert torch.equal(found.sequences, given.sequences)
    expected = model.generate(**inputs, **run)
    assert not isinstance(expected.past_key_values, GQAQuantizedCache)
    if not strategy:
        torch.testing.assert_close(found.logits[1], expected.logits[1], rtol=0.1, atol=0.3)
        assert not torch.equal(found.logits[1], expected.logits[1])


def test_a_crop_and_rows_that_move_are_as_if_they_had_not(model_name):
    """After a crop, a repeat, a choice and a new order of rows, the next logits are those of rows that began so."""
    model, batch = model_with_constants(model_name, True), make_batch(length=30, padding="left")
    options = {"nbits": 4, "residual_length": 6, "means": True}
    cache = GQAQuantizedCache(model.config, options)
    decode(model, batch, cache, [20])
    cache.activate_past_recording()
    decode(model, batch, cache, [4], start=20)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    rows = [2, 0, 1]
    moved = {name: x[rows] for name, x in batch.items()}
    found = decode(model, moved, cache, [4], start=20)
    fresh = GQAQuantizedCache(model.config, options)
    decode(model, moved, fresh, [20])
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        if isinstance(layer, QuantizedLayer):
            # Of the six last tokens that were kept exactly the crop has removed four.
            assert torch.equal(layer.keys[:, :, :20], other.keys)
            kept = layer.last_tokens[0][:, :, :2], other.last_tokens[0][:, :, -2:]
            torch.testing.assert_close(*kept, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(layer.first_tokens[0], other.first_tokens[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, decode(model, moved, fresh, [4], start=20), rtol=0, atol=2)
    assert torch.equal(cache.held_positions, fresh.held_positions)


def test_copies_and_pickles_go_on_alike():
    model, batch = model_with_constants("mixed", True), make_batch(length=30)
    cache = GQAQuantizedCache(model.config)
    decode(model, batch, cache, [20])
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    first, *others = (decode(model, batch, each, [1, 5], start=20) for each in copies)
    assert all(torch.equal(other, first) for other in others)


def test_a_reset_cache_starts_anew():
    model, batch, other = model_with_constants("mla", True), make_batch(padding="left"), make_batch(seed=2)
    cache = GQAQuantizedCache(model.config)
    decode(model, batch, cache, [11])
    cache.reset()
    found = decode(model, other, cache, [6, 5])
    assert torch.equal(found, decode(model, other, GQAQuantizedCache(model.config), [6, 5]))


def test_saving_keeps_the_means(tmp_path):
    model, batch = model_with_constants("mixed", True), make_batch()
    model.save_pretrained(tmp_path)
    loaded = GQAForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.cache_quantization == {"nbits": 4, "means": True}
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    remote = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float64)
    assert torch.equal(remote(**batch).logits, model(**batch).logits)


def test_a_checkpoint_without_means_gets_zeros(tmp_path):
    make_model("mixed").save_pretrained(tmp_path)
    loaded = GQAForCausalLM.from_pretrained(tmp_path, cache_quantization={"means": True})
    assert not any(layer.self_attn.cache_mean.any() for layer in loaded.model.layers)


@pytest.mark.parametrize("name", ["mixed", "mixed-window"])
def test_an_assistant_may_round(name):
    model, assistant = (make_model(name, seed=seed, cache_quantization={"exact_tokens": 64}) for seed in (0, 1))
    ids, run = make_batch(batch=1)["input_ids"], {"max_new_tokens": 8, "do_sample": False}
    assisted = model.generate(ids, assistant_model=assistant, **run)
    assert torch.equal(assisted, model.generate(ids, **run))


@pytest.mark.parametrize("name", ["mixed", "gqa"])
def test_first_layers_draft_with_their_own_bits(name):
    """Early exit lowers `num_hidden_layers` while it drafts, and the options of all layers stay valid."""
    model = make_model(name, cache_quantization=own_bases(make_config(name)) | {"exact_tokens": 64})
    ids, model.config.num_hidden_layers = make_batch(batch=1)["input_ids"], 1
    cache = model(ids[:, :6]).past_key_values
    assert isinstance(cache, GQAQuantizedCache)
    torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, model(ids).logits[:, 6:])


def test_gradients_see_the_numbers_themselves():
    model, batch = make_model("mla", cache_quantization={"nbits": 2}), make_batch()
    with torch.enable_grad():
        outputs = model(**batch, use_cache=True)
    assert not isinstance(outputs.past_key_values, GQAQuantizedCache)
    assert isinstance(model(**batch).past_key_values, GQAQuantizedCache)


@pytest.mark.parametrize("kind", ["gqa", "mla", "mixed"])
@pytest.mark.parametrize("options", [{"nbits": 2}, {"nbits": 8, "residual_length": 2}])
def test_gradients_pass_straight_through(kind, options):
    """The outputs are those of rounded numbers; the gradients are those by numbers that happen to be these."""
    model, batch = make_model(kind, cache_quantization=options), make_batch()
    expected = model(**batch).logits
    cache = GQAQuantizedCache(model.config)
    with torch.enable_grad():
        found = model(**batch, past_key_values=cache).logits
        assert torch.equal(found, expected)
        for name, parameter in model.model.layers[0].self_attn.named_parameters():
            (gradient,) = torch.autograd.grad(found.square().sum(), parameter, retain_graph=True)
            assert gradient.any() and gradient.isfinite().all(), name
        with pytest.raises(ValueError, match="was empty before, and this one holds"):
            model(**batch, past_key_values=cache)


@pytest.mark.parametrize("length", [7, 24])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("gqa", {}), ("mla", {}), ("mla", {"kv_lora_rank": 6, "v_head_dim": 16, "qk_nope_head_dim": 16})],
)
def test_gradients_straight_through_are_those_at_the_rounded_numbers(kind, sizes, length):
    """With 8 bits rounding changes little, and gradients are nearly those without it, also where a mask is given."""
    model = make_model(kind, **sizes, cache_quantization={"nbits": 8, "means": True, "exact_tokens": 0})
    batch = make_batch(length=length)
    parameters = [p for layer in model.model.layers for p in layer.self_attn.parameters()]
    with torch.enable_grad():
        rounded = model(**batch, past_key_values=GQAQuantizedCache(model.config)).logits
        plain = model(**batch, use_cache=False).logits
        pairs = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (rounded, plain))
        for one, two in zip(*pairs, strict=True):
            assert (one - two).norm() < 0.1 * two.norm()


def test_layers_with_a_window_keep_their_numbers():
    cache = GQAQuantizedCache(make_config("mixed-window"), {})
    assert [isinstance(layer, QuantizedLayer) for layer in cache.layers] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 4}, "no option 'bits'"),
        ({"nbits": 5}, r"\['nbits'\]=5"),
        ({"nbits": 0}, r"\['nbits'\]=0"),
        ({"nbits": None}, r"\['nbits'\]=None"),
        ({"nbits": [4]}, r"\['nbits'\]"),
        ({"nbits": True}, r"\['nbits'\]=True"),
        ({"rope_bits": "int4"}, r"\['rope_bits'\]='int4'"),
        ({"key_bits": [4, 5]}, r"\['key_bits'\]"),
        ({"key_bits": []}, r"\['key_bits'\]=\[\]"),
        ({"exact_tokens": 2000}, r"\['exact_tokens'\]=2000"),
        ({"exact_tokens": -1}, r"\['exact_tokens'\]=-1"),
        ({"q_group_size": 4}, r"\['q_group_size'\]=4"),
        ({"residual_length": 1.5}, r"\['residual_length'\]=1.5"),
        ({"means": 1}, r"\['means'\]=1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        make_config("mixed", cache_quantization=options)
    with pytest.raises(ValueError, match=said):
        GQAQuantizedCache(make_config("mixed"), options)


ROPE = {"rope_bits": [[6, 4]]}


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (ROPE | {"latent_bits": [[22, 0]]}, "latent_bits keeps no bit"),
        (ROPE | {"latent_bits": [[4, 0], [18, 2]]}, "latent_bits has a block of 0 bits before others"),
        (ROPE | {"latent_bits": [[16, 4]]}, "latent_bits has 16 channels in its blocks, and not 22"),
        (
            {"key_bits": [[22, 4]], "value_bits": [[22, 4]]},
            "has blocks for key_bits and value_bits, and the layer caches",
        ),
        (ROPE | {"latent_bits": [[22, 5]]}, r"\['layers'\]\[0\]\['latent_bits'\]=\[\[22, 5\]\] must be pairs"),
        (ROPE | {"latent_bits": [[22, [4]]]}, "must be pairs"),
        (ROPE | {"latent_bits": [4, 4]}, "must be pairs"),
        (ROPE | {"latent_bits": []}, "latent_bits keeps no bit"),
        (ROPE | {"latent_bits": 4}, "must be pairs"),
        (ROPE | {"latent_bits": [[22, 4], [0, 4]]}, "must be pairs"),
        (ROPE | {"nbits": 4}, r"\['layers'\]\[0\] must be a dict with two of key_bits, "),
        (ROPE, "must be a dict with two of"),
    ],
)
def test_blocks_that_cannot_be_are_refused(layer, said):
    with pytest.raises(ValueError, match=said):
        GQAQuantizedCache(make_config("mla"), {"layers": [layer] * 3})


def test_layers_must_be_as_many_as_the_model_has():
    for layers, said in (
        ([None], "has 1 entries, and the model 3 layers"),
        ([None] * 9, "has 9 entries, and the model 3 layers"),
        ("all", "must be a list with a dict or None"),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=said):
            make_config("mla", cache_quantization={"layers": layers})
        with pytest.raises(ValueError, match=said):
            GQAQuantizedCache(make_config("mla"), {"layers": layers})


def test_bases_that_the_checkpoint_has_not_are_refused():
    model = make_model("mla")
    cache = GQAQuantizedCache(model.config, {"layers": [{"latent_bits": [[22, 4]], **ROPE}, None, None]})
    with pytest.raises(ValueError, match="layer 0 of the checkpoint has no basis for latent_bits"):
        model(**make_batch(), past_key_values=cache)


def test_means_that_the_model_has_not_are_refused():
    model = make_model("gqa")
    with pytest.raises(ValueError, match="layer 0 of the model has no measured means"):
        model(**make_batch(), past_key_values=GQAQuantizedCache(model.config, {"means": True}))


def test_a_cache_of_another_model_is_refused():
    cache = GQAQuantizedCache(make_config("mha"), {"nbits": 4})
    with pytest.raises(ValueError, match="rounds 14 numbers together, and layer 0 caches 1 x 22"):
        make_model("mla")(**make_batch(), past_key_values=cache)


@pytest.mark.parametrize(
    ("asked", "nbits"),
    [
        ({}, 2),
        ({"cache_implementation": "quantized"}, 2),
        ({"cache_config": {"nbits": 8}}, 8),
        ({"cache_implementation": "quantized", "cache_config": {"nbits": 8}}, 8),
        ({"cache_implementation": "dynamic"}, None),
    ],
)
def test_generate_takes_the_cache_that_is_asked_for(asked, nbits):
    model = make_model("gqa", cache_quantization={"nbits": 2})
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, **asked}
    cache = model.generate(torch.tensor([[5, 6, 7]]), **options).past_key_values
    assert isinstance(cache, GQAQuantizedCache) == (nbits is not None)
    assert nbits is None or {form.bits for layer in cache.layers for form in layer.formats} == {nbits}


def test_a_configuration_that_is_no_gqa_config_is_refused():
    with pytest.raises(ValueError, match="is for a GQAConfig, and got a LlamaConfig"):
        GQAQuantizedCache(LlamaConfig(), {})
    with pytest.raises(ValueError, match="cache_quantization=4 must be a dict of options"):
        GQAQuantizedCache(make_config("mha"), 4)  # type: ignore[arg-type]
