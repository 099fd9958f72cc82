"""The fused attention functions against the eager reference in float64, and which function a name stands for.

Shapes: B batch, T query tokens, S key tokens, H query heads, G key/value heads, D head size, R latent size, P rotary
size, N and V sizes of the unrotated key and of the value.
"""

from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import all_pairs
from torch import nn
from transformers import modeling_utils

from modeling_gqa import attention_functions, attention_latent
from modeling_gqa.attention_functions import (
    ALL_ATTENTION_FUNCTIONS,
    eager_attention_forward,
    sdpa_attention_forward,
    stock_sdpa_attention_forward,
)
from modeling_gqa.attention_latent import _joint_keys, absorbed_attention_forward
from modeling_gqa.cache_layers import KeyValueBuffer

pytestmark = pytest.mark.compat

BATCH, HEADS, KEYS, SIZE, SCALING = 3, 6, 43, 7, 0.3
KEY_HEADS = {"mha": 6, "gqa": 2, "mqa": 1}
LENGTHS = [1, 2, 8, 9, 40]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
MASKS = {
    "none": None,
    "boolean": (BATCH, 1, True),
    "additive": (BATCH, 1, False),
    "boolean per head": (BATCH, HEADS, True),
    "additive per head": (BATCH, HEADS, False),
    "boolean of one row": (1, 1, True),
    "additive of one row": (1, 1, False),
    "additive per head of one row": (1, HEADS, False),
}
# The same for all queries, as biases by distance (ALiBi) are given, and as torch and transformers broadcast them.
BROADCAST = {
    "broadcast": (BATCH, 1, False),
    "broadcast per head": (BATCH, HEADS, False),
    "broadcast per head of one row": (1, HEADS, False),
}


def test_all_pairs_holds_every_pair():
    """`all_pairs` covers every pair of values of any two columns, without repeated rows."""
    columns = [tuple(range(size)) for size in (3, 5, 8, 4, 2)]
    rows = all_pairs(*columns)
    assert rows == all_pairs(*columns) and len(rows) == len(set(rows)) < 60
    assert all(value in column for row in rows for value, column in zip(row, columns, strict=True))
    for first, second in combinations(range(5), 2):
        assert {(row[first], row[second]) for row in rows} == set(product(columns[first], columns[second]))


def make_module(groups: int) -> nn.Module:
    """What a stock attention function asks of a layer."""
    module: Any = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = groups, True
    return module


def make_mask(name: str, length: int, keys: int, dtype=torch.float64, batch: int = BATCH, heads: int = HEADS):
    """A mask under which every query sees something."""
    described = {**MASKS, **BROADCAST}[name]
    if described is None:
        return None
    rows, per_head, boolean = described
    generator = torch.Generator().manual_seed(5)
    shape = (min(rows, batch), min(per_head, heads), 1 if name in BROADCAST else length, keys)
    seen = torch.rand(shape, generator=generator) < 0.6
    seen[..., 0] = True
    if boolean:
        return seen
    return torch.randn(shape, generator=generator).to(dtype).masked_fill(~seen, torch.finfo(dtype).min)


def make_states(kind: str, length: int, keys: int = KEYS, dtype=torch.float64, value_size: int = SIZE):
    """Query (B, H, T, D), key (B, G, S, D) and value (B, G, S, V)."""
    generator = torch.Generator().manual_seed(3)
    heads = KEY_HEADS[kind]
    shapes = [(HEADS, length, SIZE), (heads, keys, SIZE), (heads, keys, value_size)]
    return [torch.randn(BATCH, *shape, generator=generator).to(dtype) for shape in shapes]


def reference(query, key, value, mask):
    """The eager function in float64; without a mask it is causal, as the fused ones are."""
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    states = [state.double() for state in (query, key, value)]
    return eager_attention_forward(nn.Module().eval(), *states, mask, scaling=SCALING)[0]


def assert_same_gradients(output, expected, leaves):
    toward = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    gradients = (torch.autograd.grad(result, leaves, toward) for result in (output, expected))
    for actual, exact in zip(*gradients, strict=True):
        assert exact.abs().max() > 0
        torch.testing.assert_close(actual, exact, atol=1e-10, rtol=1e-10)


AMX = [True, False]
ABSORBED_MASKS = ["none", "boolean", "additive", "boolean per head", "additive of one row"]


@pytest.fixture(params=AMX, ids=["amx", "no-amx"])
def amx(request, monkeypatch):
    for module in (attention_functions, attention_latent):
        monkeypatch.setattr(module, "CPU_HAS_AMX", request.param)


@pytest.fixture
def fused_calls(monkeypatch) -> list[tuple]:
    """Query, key and value of each call of torch's fused kernel."""
    calls, function = [], nn.functional.scaled_dot_product_attention

    def spied(query, key, value, *arguments, **kwargs):
        calls.append((query, key, value))
        return function(query, key, value, *arguments, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spied)
    return calls


@pytest.mark.parametrize(
    ("grouping", "length", "mask_name", "dtype", "amx", "value_size"),
    [
        *all_pairs(KEY_HEADS, LENGTHS, MASKS, TOLERANCES, AMX, [SIZE]),
        # One row in bfloat16 has ways of its own, by grouping and processor.
        *all_pairs(KEY_HEADS, [1], MASKS, [torch.bfloat16], AMX, [SIZE]),
        *product(KEY_HEADS, LENGTHS, ["boolean"], [torch.float64], [True], [11]),
        *product(KEY_HEADS, LENGTHS, BROADCAST, [torch.float64], [True], [SIZE]),
    ],
    indirect=["amx"],
    ids=str,
)
def test_sdpa_equals_eager(grouping, length, mask_name, dtype, amx, value_size):
    """Our `sdpa` equals the eager reference for every grouping, length, mask, dtype, processor and size of values."""
    keys = length if mask_name == "none" and length > 1 else KEYS
    states = make_states(grouping, length, keys, dtype, value_size)
    mask, module = make_mask(mask_name, length, keys, dtype), make_module(HEADS // KEY_HEADS[grouping])
    output, weights = sdpa_attention_forward(module, *states, mask, scaling=SCALING)
    assert weights is None and output.dtype == dtype and output.is_contiguous()
    stock, _ = stock_sdpa_attention_forward(module, *states, mask, scaling=SCALING)
    for found in (output, stock):
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found.double(), reference(*states, mask), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("grouping", "length", "mask_name"), all_pairs(KEY_HEADS, LENGTHS, MASKS), ids=str)
def test_gradients_of_sdpa_equal_those_of_eager(grouping, length, mask_name):
    """Gradients of queries, keys, values and additive masks equal the eager reference's."""
    keys = length if mask_name == "none" and length > 1 else KEYS
    leaves = [state.requires_grad_() for state in make_states(grouping, length, keys)]
    mask = make_mask(mask_name, length, keys)
    if mask is not None and mask.dtype != torch.bool:
        leaves.append(mask.requires_grad_())
    output, _ = sdpa_attention_forward(make_module(HEADS // KEY_HEADS[grouping]), *leaves[:3], mask, scaling=SCALING)
    assert_same_gradients(output, reference(*leaves[:3], mask), leaves)


@pytest.mark.parametrize(
    ("grouping", "length", "hidden", "dtype"),
    all_pairs(KEY_HEADS, LENGTHS, ["false", "minimum", "infinity"], TOLERANCES),
    ids=str,
)
def test_queries_that_see_nothing_are_finite_where_stock_ones_are(grouping, length, hidden, dtype):
    """A fully masked query gives no nan where transformers' function gives none, and changes no other query."""
    states, module = make_states(grouping, length, dtype=dtype), make_module(HEADS // KEY_HEADS[grouping])
    mask = make_mask("boolean", length, KEYS)
    mask[1, :, -1] = False
    if hidden != "false":
        value = torch.finfo(dtype).min if hidden == "minimum" else -torch.inf
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value)
    stock, _ = stock_sdpa_attention_forward(module, *states, mask, scaling=SCALING)
    output, _ = sdpa_attention_forward(module, *states, mask, scaling=SCALING)
    assert output[stock.isfinite()].isfinite().all()
    sees = torch.ones(BATCH, length, dtype=torch.bool)
    sees[1, -1] = False
    tolerance = 2 * TOLERANCES[dtype]
    torch.testing.assert_close(output[sees], stock[sees], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("grouping", "length", "mask_name"), all_pairs(KEY_HEADS, LENGTHS, MASKS), ids=str)
def test_keys_and_values_are_not_repeated(grouping, length, mask_name, fused_calls):
    """The fused kernel receives the G key/value heads themselves: no copy, no repetition."""
    if mask_name == "none":
        length = 1
    states = make_states(grouping, length)
    # A module that asks the stock function for a repetition, which must not happen.
    module = make_module(HEADS // KEY_HEADS[grouping])
    sdpa_attention_forward(module, *states, make_mask(mask_name, length, KEYS), scaling=SCALING)
    ((_, key, value),) = fused_calls
    for state, reached in zip(states[1:], (key, value), strict=True):
        assert reached.shape == state.shape and reached.data_ptr() == state.data_ptr()


@pytest.mark.parametrize(
    ("grouping", "length", "dtype", "amx", "heads", "rows"),
    [
        # Up to 8 tokens, the H / G heads that share a key/value head become rows of one product.
        *(("gqa", length, torch.float64, True, 2, 3 * length) for length in (1, 2, 8)),
        *(("gqa", length, torch.float64, True, HEADS, length) for length in (9, 40)),
        # One row in bfloat16 is computed as two on a processor without AMX.
        ("mha", 1, torch.bfloat16, False, HEADS, 2),
        ("mha", 1, torch.bfloat16, True, HEADS, 1),
        *(("mha", 1, torch.float32, has_amx, HEADS, 1) for has_amx in AMX),
    ],
    indirect=["amx"],
    ids=str,
)
def test_rows_of_one_product(grouping, length, dtype, amx, heads, rows, fused_calls):
    """Few tokens of the heads that share a key/value head are packed, and a single row is doubled where it is slow."""
    mask = make_mask("none" if grouping == "mha" else "boolean", length, KEYS)
    states = make_states(grouping, length, dtype=dtype)
    sdpa_attention_forward(make_module(HEADS // KEY_HEADS[grouping]), *states, mask, scaling=SCALING)
    ((query, _, _),) = fused_calls
    assert query.shape == (BATCH, heads, rows, SIZE)


SPECIAL = {"position_bias": torch.zeros(1, HEADS, 2, KEYS), "cache": object(), "softcap": 30.0}


@pytest.mark.parametrize("special", [*SPECIAL, "output_attentions", "many tokens without a mask"])
def test_what_only_the_stock_function_knows_goes_to_it(special, monkeypatch):
    """Arguments that only transformers' `sdpa` understands reach it unchanged, and its result is returned."""
    calls, result = [], (object(), None)
    monkeypatch.setattr(
        attention_functions,
        "stock_sdpa_attention_forward",
        lambda *given, **kwargs: calls.append((given, kwargs)) or result,
    )
    states, module, mask = make_states("gqa", 2), make_module(3), make_mask("boolean", 2, KEYS)
    extra = {special: SPECIAL.get(special, True), "sliding_window": 4}
    if special == "many tokens without a mask":
        mask, extra = None, {"is_causal": False}
    output = sdpa_attention_forward(module, *states, mask, dropout=0.1, scaling=SCALING, **extra)
    assert output is result
    ((given, kwargs),) = calls
    assert all(one is other for one, other in zip(given, (module, *states, mask), strict=True))
    assert kwargs == {"dropout": 0.1, "scaling": SCALING, **extra}


def test_absent_special_arguments_stay_here(monkeypatch):
    """Special arguments that are `None` do not hand the call to transformers' function."""
    monkeypatch.setattr(attention_functions, "stock_sdpa_attention_forward", None)
    states = make_states("gqa", 2)
    mask = make_mask("boolean", 2, KEYS)
    absent = dict.fromkeys(("cache", "position_bias", "softcap"))
    output, _ = sdpa_attention_forward(make_module(3), *states, mask, scaling=SCALING, is_causal=True, **absent)
    torch.testing.assert_close(output, reference(*states, mask), atol=1e-10, rtol=1e-10)


def test_names_stand_for_the_shared_functions_but_sdpa():
    """Every registered name gives transformers' function, except `sdpa`, which gives ours."""
    shared = modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert set(ALL_ATTENTION_FUNCTIONS) == set(shared) and len(shared) > 3
    for name in shared:
        expected = sdpa_attention_forward if name == "sdpa" else shared[name]
        assert ALL_ATTENTION_FUNCTIONS[name] is expected
        assert ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward) is expected
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager_attention_forward) is eager_attention_forward


@pytest.mark.parametrize("where", ["_global_mapping", "_local_mapping"])
@pytest.mark.parametrize("name", ["sdpa", "a new one"])
def test_a_function_that_a_user_registers_wins(name, where, monkeypatch):
    """A function registered with transformers, even as `sdpa`, is the one that our layers call."""

    def own(*arguments, **kwargs):
        raise NotImplementedError

    shared = modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(shared, where, dict(getattr(shared, where)))
    if where == "_global_mapping":
        interface = modeling_utils.AttentionInterface
        monkeypatch.setattr(interface, where, dict(interface._global_mapping))
        monkeypatch.delattr(shared, where)
        interface.register(name, own)
    else:
        shared[name] = own
    assert ALL_ATTENTION_FUNCTIONS[name] is own
    assert ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward) is own
    assert name in ALL_ATTENTION_FUNCTIONS


def test_unknown_names_are_refused():
    """An unregistered name raises a KeyError that shows it."""
    for name in ("a new one", "sdp", "paged"):
        assert name not in ALL_ATTENTION_FUNCTIONS
        with pytest.raises(KeyError, match=name):
            ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        with pytest.raises(KeyError, match=name):
            ALL_ATTENTION_FUNCTIONS[name]


RANK, ROPE, NOPE, VALUE = 22, 6, 10, 13
# The folded products are rounded more often than the single attention is.
LATENT_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def make_latent(batch: int, length: int, dtype, adjacent: bool, keys: int = KEYS):
    """Queries, latent, rotary key and weight, as `absorbed_attention_forward` takes them."""
    generator = torch.Generator().manual_seed(2)
    shapes = [
        (batch, HEADS, length, NOPE),
        (batch, HEADS, length, ROPE),
        (batch, 1, keys, RANK),
        (batch, 1, keys, ROPE),
    ]
    query, query_rope, latent, key_rope = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    weight = (torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator) / RANK**0.5).to(dtype)
    if adjacent:
        buffer = KeyValueBuffer(latent[:, :, :-2], key_rope[:, :, :-2], keys)
        latent, key_rope = buffer.append(latent[:, :, -2:], key_rope[:, :, -2:])
        assert latent.untyped_storage().data_ptr() == key_rope.untyped_storage().data_ptr()
    return query, query_rope, latent, key_rope, weight


def expanded(query, query_rope, latent, key_rope, weight, mask):
    """Attention over rebuilt keys and values in float64."""
    query, query_rope, latent, key_rope, weight = (x.double() for x in (query, query_rope, latent, key_rope, weight))
    rebuilt = torch.einsum("bsr,hnr->bhsn", latent[:, 0], weight.view(HEADS, NOPE + VALUE, RANK))  # (B, H, S, N + V)
    key = torch.cat((rebuilt[..., :NOPE], key_rope.expand(-1, HEADS, -1, -1)), dim=-1)  # (B, H, S, N + P)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    query = torch.cat((query, query_rope), dim=-1)  # (B, H, T, N + P)
    return eager_attention_forward(nn.Module().eval(), query, key, rebuilt[..., NOPE:], mask, scaling=SCALING)


@pytest.mark.parametrize(
    ("adjacent", "batch", "length", "mask_name", "dtype", "amx"),
    # Whether keys are joined by a copy depends on three of these together.
    all_pairs([True, False], [1, 3], [1, 3, 8, 9, 20], ABSORBED_MASKS, TOLERANCES, AMX)
    + all_pairs([False], [1, 3], [1, 3, 8, 9, 20], ABSORBED_MASKS, [torch.bfloat16, torch.float16], [False]),
    indirect=["amx"],
    ids=str,
)
def test_absorbed_equals_expanded(adjacent, batch, length, mask_name, dtype, amx):
    """Attention over the latent equals attention over rebuilt keys and values: output and weights, fused or not."""
    states, tolerance = make_latent(batch, length, dtype, adjacent), LATENT_TOLERANCES[dtype]
    mask = make_mask(mask_name, length, KEYS, dtype, batch=batch)
    expected, expected_weights = expanded(*states, mask)
    output, weights = absorbed_attention_forward(*states, mask, SCALING)
    torch.testing.assert_close(weights.double(), expected_weights, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    output, weights = absorbed_attention_forward(*states, mask, SCALING, fused=True)
    assert weights is None and output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "separate"])
def test_gradients_of_absorbed_equal_those_of_expanded(adjacent, length, fused):
    """Gradients of queries, latent, rotary key and `kv_b_proj` are those of the expanded computation."""
    query, query_rope, latent, key_rope, weight = make_latent(3, length, torch.float64, adjacent=False)
    joint = torch.cat((latent, key_rope), dim=-1)
    leaves = [leaf.requires_grad_() for leaf in (query, query_rope, joint, weight)]
    latent, key_rope = joint.split([RANK, ROPE], dim=-1)
    if not adjacent:
        latent, key_rope = latent.clone(), key_rope.clone()
    states, mask = (query, query_rope, latent, key_rope, weight), make_mask("boolean", length, KEYS)
    expected, _ = expanded(*states, mask)
    output, _ = absorbed_attention_forward(*states, mask, SCALING, fused=fused)
    assert_same_gradients(output, expected, leaves)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_adjacent_keys_are_joined_without_a_copy(dtype, batch, amx):
    """A latent and a rotary key that lie side by side become one tensor over the same memory."""
    _, _, latent, key_rope, _ = make_latent(batch, 1, dtype, adjacent=True)
    for tokens in (slice(None), slice(0, 1), slice(3, 29), slice(2, 41, 3)):
        part, part_rope = latent[:, :, tokens], key_rope[:, :, tokens]
        joint = _joint_keys(part, part_rope)
        assert joint.data_ptr() == part.data_ptr()
        assert torch.equal(joint, torch.cat((part, part_rope), dim=-1))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_separate_keys_are_copied_only_where_products_are_slow(dtype, amx):
    """Keys that lie apart are joined by a copy only in 16 bits on a processor without AMX."""
    _, _, latent, key_rope, _ = make_latent(3, 1, dtype, adjacent=False)
    joint = _joint_keys(latent, key_rope)
    if attention_latent.CPU_HAS_AMX or dtype in (torch.float32, torch.float64):
        assert joint is None
    else:
        assert torch.equal(joint, torch.cat((latent, key_rope), dim=-1))


def layouts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Latents and rotary keys of one storage each that are not side by side, though near to it."""
    storage = torch.arange(2000.0)
    rows, batch, keys, width = (RANK + ROPE,), 2, 9, RANK + ROPE
    whole = storage[: batch * keys * width].view(batch, 1, keys, width)
    transposed = storage[: batch * keys * width].view(batch, 1, width, keys).mT
    return {
        "rotary key first": whole.split([ROPE, RANK], dim=-1)[::-1],
        "one number apart": (whole[..., : RANK - 1], whole[..., RANK:]),
        "overlapping": (whole[..., :RANK], whole[..., RANK - 1 :]),
        "one token further": (whole[:, :, :-1, :RANK], whole[:, :, 1:, RANK:]),
        "other batch order": (whole[..., :RANK], whole.flip(0)[..., RANK:]),
        "transposed": transposed.split([RANK, ROPE], dim=-1),
        "every second number": whole[..., ::2].split([RANK // 2, ROPE // 2], dim=-1),
        "rows end to end": (
            storage.as_strided((batch, 1, keys, RANK), (500, 500, RANK, 1)),
            storage.as_strided((batch, 1, keys, ROPE), (500, 500, *rows, 1), RANK),
        ),
        "one row repeated": (
            whole[:, :, :1, :RANK].expand(-1, -1, keys, -1),
            whole[:, :, :1, RANK:].expand(-1, -1, keys, -1),
        ),
        "keys of one token, stacked": (storage[:RANK].view(1, 1, 1, -1), storage[RANK:width].view(1, 1, 1, -1)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_keys_in_another_layout_are_not_joined(layout, monkeypatch):
    """Layouts that only look adjacent are never joined as a view."""
    monkeypatch.setattr(attention_latent, "CPU_HAS_AMX", True)
    assert _joint_keys(*layouts()[layout]) is None


@settings(max_examples=400, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
)
def test_what_is_joined_is_right_in_any_layout(sizes, strides, latent_offset, key_offset, same):
    """For any strides and offsets, a joined tensor equals the concatenation."""
    batch, keys, rank, rope = sizes
    storage = torch.arange(200.0)
    latent_strides, key_strides = strides[:3], strides[:3] if same else strides[3:]
    latent = storage.as_strided((batch, 1, keys, rank), (latent_strides[0], 1, *latent_strides[1:]), latent_offset)
    key_offset = latent_offset + rank if same else key_offset
    key_rope = storage.as_strided((batch, 1, keys, rope), (key_strides[0], 1, *key_strides[1:]), key_offset)
    joint = _joint_keys(latent, key_rope)
    assert joint is None or torch.equal(joint, torch.cat((latent, key_rope), dim=-1))
    if same and strides[1] >= rank + rope and strides[2] == 1:
        assert joint is not None
