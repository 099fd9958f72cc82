"""The basis and the bits of what a layer caches: against what noise does to the predictions, and all other choices.

Shapes: B batch, G heads, T tokens, D size of a head, C = G D channels.
"""

import itertools

import pytest
import torch
from small_models import ROPES, make_batch, make_model
from torch.nn.functional import kl_div

from modeling_gqa import GQAQuantizedCache
from modeling_gqa.conversion.divergence import predicted_positions
from modeling_gqa.conversion.quantizing import set_cache_constants, with_quantized_cache
from modeling_gqa.conversion.transform_coding import (
    DAMPING,
    DISTORTION,
    STEP,
    Coding,
    cache_codings,
    cache_means,
    cache_statistics,
    choose_bits,
    coding,
    folded,
    intercepted,
    over_positions,
    watched,
)
from modeling_gqa.costs import cache_bytes_per_token
from modeling_gqa.layers import rotate
from modeling_gqa_cli.errors import UserError

POSITIONS = torch.cat((torch.arange(9), torch.arange(17), torch.arange(14))).expand(3, -1)


def packed_text(number=2):
    """Batches of three documents in each of three rows."""
    ids = [make_batch(length=40, seed=seed)["input_ids"] for seed in range(number)]
    return [{"input_ids": x, "position_ids": POSITIONS} for x in ids]


@torch.no_grad()
def test_covariances_are_those_of_what_is_cached(model_name):
    """Of the tensor that is not rotated, less its mean, without the first four tokens of each document."""
    model, text, rows = make_model(model_name, attention_bias=True).double(), packed_text(), {}
    means = cache_means(model, text)
    with watched(model) as seen:
        for batch in text:
            model.model(**batch, use_cache=False)
            for index, pair in seen.items():
                x = pair[1 - model.model.layers[index].self_attn.rotary_place]
                rows.setdefault(index, []).append(x.transpose(1, 2)[POSITIONS >= 4].flatten(1))
    for index, found in enumerate(cache_statistics(model, text, means)):
        x, place = torch.cat(rows[index]), 1 - model.model.layers[index].self_attn.rotary_place
        expected = x.T.cov(correction=0)
        torch.testing.assert_close(found[place].covariance, expected, rtol=1e-4, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("name", ["gqa", "mla", "mixed"])
@torch.no_grad()
def test_the_information_says_what_noise_costs(name):
    """KL(source || noisy), for small noise of the same variance in all numbers of one tensor, to second order."""
    model, text, variance = make_model(name).double(), packed_text(60), 1e-6
    statistics = cache_statistics(model, text, cache_means(model, text))
    batch = {name: torch.cat([part[name] for part in text[:10]]) for name in text[0]}
    predicted = torch.nn.functional.pad(predicted_positions(batch), (0, 1))
    exact = model(**batch, use_cache=False).logits.log_softmax(-1)[predicted]
    kept = (batch["position_ids"] >= 4)[:, None, :, None]
    generator = torch.Generator().manual_seed(2)
    for index, place in itertools.product(range(len(statistics)), range(2)):

        def noisy(layer, pair, index=index, place=place):
            noise = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in pair]
            wanted = [variance**0.5 * (layer == index and n == place) for n in range(2)]
            return [x + w * y * kept for x, w, y in zip(pair, wanted, noise, strict=True)]

        with intercepted(model, noisy):
            found = model(**batch, use_cache=False).logits.log_softmax(-1)[predicted]
        lost = kl_div(found, exact, log_target=True, reduction="sum") / kept.sum()
        expected = variance * statistics[index][place].information.trace() / 2
        assert lost == pytest.approx(expected.item(), rel=0.25), (index, place)


def symmetric(size, seed):
    x = torch.randn(size, 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x @ x.T


def test_channels_are_uncorrelated_and_cost_alike():
    covariance, information = symmetric(12, 1), symmetric(12, 2)
    found = coding(covariance, information)
    decoder = found.encoder.inverse()
    assert (found.variances.diff() <= 0).all() and found.variances.min() > 0
    # Errors of the channels cost alike and apart from each other, where texts differ as the damping says.
    damped = information + DAMPING * information.trace() / 12 * torch.eye(12, dtype=torch.float64)
    cost = decoder @ damped @ decoder.T
    torch.testing.assert_close(cost, cost[0, 0] * torch.eye(12, dtype=torch.float64))
    varies = found.encoder.T @ covariance @ found.encoder
    torch.testing.assert_close(varies * cost[0, 0], found.variances.diag())
    assert varies.trace() == pytest.approx(covariance.trace())


def test_a_layer_that_does_nothing_keeps_its_basis():
    for pair in ((symmetric(4, 1), torch.zeros(4, 4).double()), (torch.zeros(4, 4).double(), symmetric(4, 1))):
        found = coding(*pair)
        assert torch.equal(found.encoder, torch.eye(4)) and not found.variances.any()


def spread_codings(model):
    """Codings whose variances spread over many orders of size, differently by layer."""
    generator, found = torch.Generator().manual_seed(3), []
    for layer, own in zip(model.model.layers, model.config.per_layer_config, strict=True):
        sizes = layer.self_attn.cache_sizes(own)
        draws = [torch.randn(size, generator=generator).mul(3).exp().sort(descending=True).values for size in sizes]
        found.append(tuple(Coding(torch.eye(len(x)), x.double()) for x in draws))
    return found


@pytest.mark.parametrize("share", [0.24, 0.3, 0.4])
def test_no_other_bits_of_as_many_bytes_lose_less(share):
    """Against all choices for the pieces of a layer, four of keys and four of values."""
    sizes = {"num_hidden_layers": 1, "head_dim": 4 * STEP, "num_key_value_heads": 1}
    model = make_model("gqa", attention_kind="mqa", **sizes).bfloat16()
    codings = spread_codings(model)
    budget = int(share * cache_bytes_per_token(model.config))
    layers = choose_bits(model, codings, budget)
    assert cache_bytes_per_token(with_quantized_cache(model, {"layers": layers}).config) <= budget
    lost = [piece.sum() for own in codings[0] for piece in own.variances.split(STEP)]
    bits = [n for blocks in layers[0].values() for size, n in blocks for _ in range(size // STEP)]
    known, factors = torch.tensor(list(DISTORTION)), torch.tensor(list(DISTORTION.values()), dtype=torch.float64)
    others = torch.cartesian_prod(*[torch.arange(len(known))] * 8)
    as_small = others[known[others].sum(1) <= sum(bits)]
    least = (factors[as_small] * torch.stack(lost)).sum(1).min()
    assert sum(DISTORTION[n] * x for n, x in zip(bits, lost, strict=True)) == pytest.approx(least)


@pytest.mark.parametrize("share", [0.4, 0.2, 0.11])
def test_a_budget_is_used_and_kept(share):
    """Of many channels no more than a hundredth of it is left."""
    model = make_model("gqa", head_dim=128).bfloat16()
    budget = int(share * cache_bytes_per_token(model.config))
    layers = choose_bits(model, spread_codings(model), budget)
    assert 0.99 * budget < cache_bytes_per_token(with_quantized_cache(model, {"layers": layers}).config) <= budget
    with pytest.raises(UserError, match=r"per token is too small: the least is \d+"):
        choose_bits(model, spread_codings(model), 20)


def test_a_layer_with_a_window_keeps_its_numbers():
    model = make_model("mixed-window").bfloat16()
    budget = int(0.9 * cache_bytes_per_token(model.config))
    layers = choose_bits(model, spread_codings(model), budget)
    assert [layer is None for layer in layers] == [kind != "full_attention" for kind in model.config.layer_types]
    assert cache_bytes_per_token(with_quantized_cache(model, {"layers": layers}).config) <= budget


@torch.no_grad()
def test_a_cache_of_many_bits_in_its_basis_loses_little(model_name):
    """Encoders, decoders and means fit together: with all channels at 8 bits the predictions are the model's own."""
    model, text = make_model(model_name, attention_bias=True), packed_text()
    means = cache_means(model, text)
    codings = cache_codings(model, text, means)
    layers = [
        {
            n: [[len(own.variances), 8]][: len(own.variances)]
            for n, own in zip(layer.self_attn.bits_fields, pair, strict=True)
        }
        for layer, pair in zip(model.model.layers, codings, strict=True)
    ]
    quantized = with_quantized_cache(model, {"layers": layers, "means": True})
    set_cache_constants(quantized, means, codings)
    batch = make_batch(length=40, padding="left")
    found, expected = quantized(**batch), model(**batch)
    assert isinstance(found.past_key_values, GQAQuantizedCache)
    mask = batch["attention_mask"].bool()
    assert (found.logits - expected.logits)[mask].std() < 0.05 * expected.logits[mask].std()


def test_blocks_are_mixed_and_their_levels_lie_alike():
    variances = torch.tensor([9.0, 9, 9, 9, 1, 1, 0.1, 0.1])
    encoder = folded(Coding(torch.eye(8), variances), [[4, 3], [2, 2], [2, 0]])
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1)) * variances.sqrt()
    spread = (x @ encoder).std(0)
    # By the steps with which normal numbers of variance 1 lose least.
    torch.testing.assert_close(spread[:4] / spread[4], torch.full((4,), 0.9957 / 0.586), rtol=0.06, atol=0)
    assert torch.equal(encoder[:4, 0].abs(), encoder[:4, 1].abs()) and torch.equal(encoder[6:, 6:], torch.eye(2))


PARTIAL = {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(("name", "options"), [("gqa", {}), ("gqa", PARTIAL), ("mla", {}), ("mixed-window", {})])
def test_statistics_of_what_is_rotated_are_means_over_all_positions(name, options):
    """Against the mean over rotations by each of 4,096 numbers of tokens from 0 to the longest."""
    model = make_model(name, max_position_embeddings=64, **options)
    attention = model.model.layers[0].self_attn
    heads, size = attention.cached_shapes[attention.rotary_place]
    root = torch.randn(heads * size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    frequencies = model.model.rotary_emb[model.model.rotary_sizes[0]].original_inv_freq.double()
    turns = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096 * 64
    angles = turns[:, None] * torch.cat((frequencies, frequencies))
    vectors = root.T.unflatten(1, (heads, size)).permute(1, 0, 2)  # (G, 3, D)
    turned = rotate(vectors[None].expand(4096, -1, -1, -1), *(x[:, None] for x in (angles.cos(), angles.sin())))
    turned = turned.permute(0, 2, 1, 3).flatten(2)  # (turns, 3, C)
    expected = torch.einsum("tka,tkb->ab", turned, turned) / 4096
    torch.testing.assert_close(over_positions(model, 0, root @ root.T), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        over_positions(make_model(name, max_position_embeddings=1, **options), 0, root @ root.T).trace(),
        expected.trace(),
    )


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_values_lose_their_mean_whatever_the_rope(rope):
    ropes = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    model = make_model("gqa", attention_bias=True, rope_parameters=ropes).double()
    model.model.layers[0].self_attn.v_proj.bias.data.add_(3)
    text = packed_text()
    _, values = cache_statistics(model, text, cache_means(model, text))[0]
    assert values.covariance.trace() < 28 * 3**2 / 3


def test_too_little_text_is_refused():
    model = make_model("mha")
    text = [{"input_ids": make_batch(length=20)["input_ids"]}]
    means = cache_means(model, text)
    with pytest.raises(UserError, match="the text has 48 tokens beyond the first 4 of their documents, and 84 are the"):
        cache_codings(model, text, means)
    lonely = [{"input_ids": make_batch(length=5)["input_ids"].repeat(40, 1)}]
    with pytest.raises(UserError, match="give more --calibration-tokens, or longer documents"):
        cache_codings(model, lonely, cache_means(model, lonely))


def test_one_row_of_positions_is_of_all_rows():
    model, text = make_model("gqa"), packed_text(1)
    means = cache_means(model, text)
    alike = [{"input_ids": text[0]["input_ids"], "position_ids": POSITIONS[:1]}]
    for one, other in zip(cache_statistics(model, text, means), cache_statistics(model, alike, means), strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x.covariance, y.covariance)
            torch.testing.assert_close(x.information, y.information)


def test_the_model_is_as_before_after_an_error():
    model, text = make_model("gqa").requires_grad_(True).train(), packed_text(1)
    means = cache_means(model, text)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises((UserError, RuntimeError)):
        cache_codings(model, text, means)
    assert model.training and all(x.requires_grad for x in model.parameters())
    assert "attend_to" not in vars(model.model.layers[0].self_attn)
