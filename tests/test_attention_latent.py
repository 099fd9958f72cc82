"""LatentAttention's two ways to compute: absorbed equals expanded, and which of them is chosen when."""

import copy
import warnings

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_batch, make_config
from test_generation import NEW_TOKENS, generate, greedy_tokens, make_endless_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from modeling_gqa import GQAConfig
from modeling_gqa.attention_functions import eager_attention_forward
from modeling_gqa.attention_latent import LatentAttention, pad_heads


class WrappedLinear(nn.Linear):
    """A projection that may do more than its weight says, as adapters do."""


class WrappedParameter(nn.Parameter):
    """A weight that is not what it looks like, as quantized ones are."""


def make_layer(backend=None, **fields) -> LatentAttention:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # random ranks may be larger than what they compress
        config = GQAConfig(**{"attention_kind": "mla", "num_hidden_layers": 1, "hidden_size": 23, **fields})
    config._attn_implementation = backend
    torch.manual_seed(0)
    layer = LatentAttention(config, layer_idx=0).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def small_layer(backend=None) -> LatentAttention:
    config = make_config("mla", num_hidden_layers=1)
    config._attn_implementation = backend
    return LatentAttention(config, layer_idx=0).eval()


def embeddings(layer, batch: int, start: int, end: int):
    angles = torch.arange(start, end, dtype=torch.float64)[:, None] * torch.linspace(1.0, 0.1, layer.qk_rope_head_dim)
    return angles.cos().expand(batch, -1, -1), angles.sin().expand(batch, -1, -1)


def decode(layer, x, past: int, mask, absorb: bool | None = None):
    """Output and weights for the tokens after `past`, and how often `kv_b_proj` ran for them."""
    batch, total = x.shape[:2]
    cache, calls = DynamicCache(), []
    if past:
        layer(x[:, :past], embeddings(layer, batch, 0, past), past_key_values=cache)
    if absorb is not None:
        layer.absorbs = lambda *arguments: absorb
    hook = layer.kv_b_proj.register_forward_hook(lambda *arguments: calls.append(1))
    output = layer(x[:, past:], embeddings(layer, batch, past, total), mask, past_key_values=cache)
    hook.remove()
    return *output, len(calls)


@st.composite
def decoding_steps(draw):
    size = st.integers(1, 7)
    fields = {
        "num_attention_heads": draw(st.integers(1, 5)),
        "kv_lora_rank": draw(st.integers(1, 40)),
        "qk_nope_head_dim": draw(st.integers(0, 7)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 3)),
        "v_head_dim": draw(size),
        "rope_interleave": draw(st.booleans()),
        "latent_norm": draw(st.booleans()),
        "q_lora_rank": draw(st.none() | size),
        "sliding_window": draw(st.none() | st.integers(2, 7)),
    }
    if draw(st.booleans()):
        fields |= {"qk_norm": True, "latent_norm": False, "q_lora_rank": None}
        fields |= {"qk_norm_head_dim": draw(size), "qk_norm_key_value_heads": draw(st.integers(1, 3))}
    batch, length, past = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 9))
    mask = draw(st.sampled_from(["none", "padding", "boolean", "additive"]))
    return fields, batch, length, past, mask, draw(st.sampled_from([None, "eager", "sdpa"]))


def make_mask(kind: str, batch: int, length: int, total: int):
    """A mask under which every query sees something."""
    generator = torch.Generator().manual_seed(7)
    if kind == "padding":
        mask = torch.ones(batch, total, dtype=torch.long)
        mask[-1, : (total - length) // 2] = 0
        return mask
    seen = torch.rand(batch, 1, length, total, generator=generator) < 0.6
    seen[..., 0] = True
    if kind == "boolean":
        return seen
    bias = torch.randn(seen.shape, dtype=torch.float64, generator=generator)
    return bias.masked_fill(~seen, torch.finfo(torch.float64).min) if kind == "additive" else None


@settings(max_examples=150, deadline=None)
@given(decoding_steps())
def test_absorbed_equals_expanded(step):
    """For any sizes, masks and cache lengths, an absorbed step equals an expanded one to 1e-10."""
    fields, batch, length, past, mask, backend = step
    layer, total = make_layer(backend, **fields), past + length
    if mask == "none" and backend == "sdpa" and length > 1:
        mask = "padding"  # the attention function masks a prompt by itself and has to be called
    x = torch.randn(batch, total, 23, dtype=torch.float64)
    mask = make_mask(mask, batch, length, total)
    with torch.no_grad():
        output, weights, calls = decode(copy.deepcopy(layer), x, past, mask, absorb=True)
        assert calls == 0
        expanding = copy.deepcopy(layer)
        expanding.kv_b_proj.__class__ = WrappedLinear
        expected, expected_weights, calls = decode(expanding, x, past, mask)
        assert calls == 1
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
    if expected_weights is not None:
        torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=1e-10)


def test_a_wrapped_projection_is_called():
    """What a wrapper adds to `kv_b_proj` reaches the output of a decoding step."""
    layer, x = make_layer(num_attention_heads=3, head_dim=4), torch.randn(2, 6, 23, dtype=torch.float64)
    plain = decode(copy.deepcopy(layer), x, 5, None)[0]
    layer.kv_b_proj = nn.Sequential(layer.kv_b_proj, nn.Linear(24, 24, bias=False).double())
    nn.init.eye_(layer.kv_b_proj[1].weight)
    same, _, calls = decode(layer, x, 5, None)
    assert calls == 1
    torch.testing.assert_close(same, plain, atol=1e-10, rtol=1e-10)
    layer.kv_b_proj[1].weight.data *= 2
    assert not torch.allclose(decode(layer, x, 5, None)[0], plain)


@pytest.mark.parametrize(("sizes", "ways"), [((40, 3, 2, 5), {True, False}), ((7, 10, 6, 13), {True})], ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_way_with_fewer_operations_is_chosen(sizes, ways, backend):
    """Several tokens absorb where a FLOP counter finds no more operations, and no more scores than rebuilt numbers."""
    rank, nope, rope, value = sizes
    fields = {"kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    layer = make_layer(backend, num_attention_heads=3, **fields)
    chosen = set()
    for length, past in [(2, 0), (2, 3), (2, 60), (9, 0), (9, 3), (9, 60), (30, 0), (30, 60)]:
        x = torch.randn(1, length + past, 23, dtype=torch.float64)
        mask, counts = torch.ones(1, 1, length, length + past, dtype=torch.bool), {}
        for absorb in (True, False):
            counter = FlopCounterMode(display=False)
            forced = copy.deepcopy(layer)
            forced.config._attn_implementation = "eager"  # whose products the counter counts unpadded
            forced.absorbs = lambda *arguments, absorb=absorb: absorb
            cache = DynamicCache()
            cache.update(torch.zeros(1, 1, past, rank).double(), torch.zeros(1, 1, past, rope).double(), 0)
            with counter, torch.no_grad():
                forced(x[:, past:], None, mask, past_key_values=cache)
            counts[absorb] = counter.get_total_flops()
        small = length <= nope + rope + value
        assert layer.absorbs(length, length + past, mask) == (small and counts[True] <= counts[False])
        chosen.add(counts[True] <= counts[False])
    assert chosen == ways


FINISHED = torch.ones(1, 1, 2, 2, dtype=torch.bool)
ONE_TOKEN = (1, 9, None)
# Whether a layer of this backend absorbs tokens on so many keys under this mask.
WAYS = [
    *((backend, ONE_TOKEN, True) for backend in (None, "eager", "sdpa", "paged|eager", "paged|sdpa")),
    *((f"flash_attention_{n}", ONE_TOKEN, False) for n in (2, 3)),
    *((backend, ONE_TOKEN, False) for backend in ("flex_attention", "paged|flash_attention_2", "other")),
    # Several tokens without a mask are a causal prompt, which the attention function masks.
    *((backend, (2, 500, None), False) for backend in (None, "eager", "sdpa")),
    ("sdpa", (2, 500, FINISHED), True),
    ("sdpa", (500, 500, FINISHED), False),
]


@pytest.mark.parametrize(("backend", "arguments", "absorbs"), WAYS)
def test_which_way_is_taken(backend, arguments, absorbs):
    """A layer in training mode always expands, so that `kv_b_proj` is called and its hooks run."""
    layer = small_layer(backend)
    assert layer.absorbs(*arguments) == absorbs
    assert not layer.train().absorbs(*arguments)


def with_a_tensor_as_weight(layer):
    weight = layer.kv_b_proj.weight.detach()
    del layer.kv_b_proj.weight
    layer.kv_b_proj.weight = weight


CHANGES = {
    "wrapped": lambda layer: setattr(layer.kv_b_proj, "__class__", WrappedLinear),
    "adapted": lambda layer: setattr(layer, "kv_b_proj", nn.Sequential(layer.kv_b_proj)),
    "quantized": lambda layer: setattr(layer.kv_b_proj, "weight", WrappedParameter(layer.kv_b_proj.weight.data)),
    "offloaded": lambda layer: layer.kv_b_proj.to("meta"),
    "not a parameter": with_a_tensor_as_weight,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_is_more_than_its_weight_expands(change):
    """A `kv_b_proj` that is wrapped, quantized, offloaded or has a plain tensor as weight is called, not read."""
    layer = small_layer()
    assert layer.absorbs(1, 9, None)
    CHANGES[change](layer)
    assert not layer.absorbs(1, 9, None)


def test_padding_the_heads_changes_no_score():
    """Zero-padding to one head size leaves weights and output as they are; the added outputs are 0."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 5, size, dtype=torch.float64, generator=generator)
        for heads, size in ((6, 7), (2, 7), (2, 11))
    )
    padded = pad_heads(query, key, value)
    assert [x.shape[-1] for x in padded] == [11, 11, 11]
    expected, weights = eager_attention_forward(nn.Module(), query, key, value, None, scaling=0.3)
    output, padded_weights = eager_attention_forward(nn.Module(), *padded, None, scaling=0.3)
    torch.testing.assert_close(padded_weights, weights, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(output[..., :11], expected, atol=1e-14, rtol=1e-14)
    shorter = pad_heads(query, key, value[..., :3])
    output, _ = eager_attention_forward(nn.Module(), *shorter, None, scaling=0.3)
    torch.testing.assert_close(output[..., :3], expected[..., :3], atol=1e-14, rtol=1e-14)
    assert (output[..., 3:] == 0).all()


def wrap_in_lora(model, folder):
    import peft

    config = peft.LoraConfig(r=3, target_modules=["kv_b_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval().base_model.model


def quantize_with_torchao(model, folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("kv_b_proj"))
    return model


def quantize_with_quanto(model, folder):
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8, include="*kv_b_proj")
    freeze(model)
    return model


def offload_to_cpu(model, folder):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def offload_to_disk(model, folder):
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


WRAPPERS = [wrap_in_lora, quantize_with_torchao, quantize_with_quanto, offload_to_cpu, offload_to_disk]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("model_name", ["mla", "mla-q-lora", "mixed"])
def test_projection_that_is_not_plain_is_expanded(model_name, wrap, tmp_path):
    """A `kv_b_proj` with LoRA, quantized or offloaded is called at every token, because its weight is not all of it."""
    plain, batch = make_endless_model(model_name), make_batch(padding="left")
    model = wrap(make_endless_model(model_name), tmp_path)
    projections = [module for name, module in model.named_modules() if name.endswith("self_attn.kv_b_proj")]
    assert len(projections) == (1 if model_name == "mixed" else 3)
    calls = []
    for projection in projections:
        projection.register_forward_hook(lambda *_: calls.append(1))
    tokens = generate(model, batch)
    assert len(calls) == NEW_TOKENS * len(projections)
    assert tokens.tolist() == greedy_tokens(model, batch).tolist()
    with torch.no_grad():
        same = torch.equal(model(**batch).logits, plain(**batch).logits)
    assert same is wrap.__name__.startswith("offload"), "only offloading leaves the function as it was"
