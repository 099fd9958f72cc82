"""The basis and the bits of what a layer caches: against what noise does to the predictions, and all other choices.

Shapes: B batch, G heads, T tokens, D size of a head, C = G D channels.
"""

import itertools

import pytest
import torch
from small_models import make_batch, make_model
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
    watched,
)
from modeling_gqa.costs import cache_bytes_per_token
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
        attention = model.model.layers[index].self_attn
        original = attention.attend_to

        def noisy(hidden, *pair, place=place, original=original):
            noise = torch.randn(pair[place].shape, dtype=torch.float64, generator=generator)
            return *pair[:place], pair[place] + variance**0.5 * noise * kept, *pair[place + 1 :]

        def attend(hidden, first, second, *rest, noisy=noisy, original=original, **options):
            return original(hidden, *noisy(hidden, first, second), *rest, **options)

        attention.attend_to = attend
        found = model(**batch, use_cache=False).logits.log_softmax(-1)[predicted]
        del attention.attend_to
        lost = kl_div(found, exact, log_target=True, reduction="sum") / kept.sum()
        expected = variance * statistics[index][place].information.trace() / 2
        assert lost == pytest.approx(expected.item(), rel=0.25), (index, place)


def symmetric(size, seed):
    x = torch.randn(size, 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x @ x.T


def test_channels_are_uncorrelated_and_cost_alike():
    covariance, information = symmetric(12, 1), symmetric(12, 2)
    found = coding(covariance, information)
    torch.testing.assert_close(found.encoder @ found.decoder, torch.eye(12, dtype=torch.float64))
    assert (found.variances.diff() <= 0).all() and found.variances.min() > 0
    # Errors of the channels cost alike and apart from each other, where texts differ as the damping says.
    damped = information + DAMPING * information.trace() / 12 * torch.eye(12, dtype=torch.float64)
    cost = found.decoder @ damped @ found.decoder.T
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
        found.append(tuple(Coding(torch.eye(len(x)), torch.eye(len(x)), x.double()) for x in draws))
    return found


@pytest.mark.parametrize("share", [0.24, 0.3, 0.4, 0.5])
def test_no_other_bits_of_as_many_bytes_lose_less(share):
    """Against all choices for the pieces of two layers."""
    model = make_model("gqa", num_hidden_layers=2, head_dim=16, num_key_value_heads=1, attention_kind="mqa").bfloat16()
    codings = spread_codings(model)
    budget = int(share * cache_bytes_per_token(model.config))
    layers = choose_bits(model, codings, budget)
    assert cache_bytes_per_token(with_quantized_cache(model, {"layers": layers}).config) <= budget
    chosen = [blocks for layer in layers for blocks in layer.values()]
    assert all(len(blocks) == 1 and blocks[0][0] == STEP for blocks in chosen)
    lost = [own.variances.sum().item() for pair in codings for own in pair]
    bits = [blocks[0][1] for blocks in chosen]
    least = min(
        sum(DISTORTION[n] * x for n, x in zip(others, lost, strict=True))
        for others in itertools.product([n for n in DISTORTION if n], repeat=4)
        if sum(others) <= sum(bits)
    )
    assert sum(DISTORTION[n] * x for n, x in zip(bits, lost, strict=True)) == pytest.approx(least)


@pytest.mark.parametrize("share", [0.4, 0.2, 0.11])
def test_a_budget_is_used_and_kept(share):
    """Of many channels no more than a hundredth of it is left."""
    model = make_model("gqa", head_dim=128).bfloat16()
    budget = int(share * cache_bytes_per_token(model.config))
    layers = choose_bits(model, spread_codings(model), budget)
    assert 0.99 * budget < cache_bytes_per_token(with_quantized_cache(model, {"layers": layers}).config) <= budget
    with pytest.raises(UserError, match=r"per token is too small: the least is \d+"):
        choose_bits(model, spread_codings(model), 30)


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
        {name: [[len(own.variances), 8]] for name, own in zip(layer.self_attn.bits_fields, pair, strict=True)}
        for layer, pair in zip(model.model.layers, codings, strict=True)
    ]
    quantized = with_quantized_cache(model, {"layers": layers, "means": True})
    set_cache_constants(quantized, means, codings)
    batch = make_batch(length=40, padding="left")
    found, expected = quantized(**batch), model(**batch)
    assert isinstance(found.past_key_values, GQAQuantizedCache)
    mask = batch["attention_mask"].bool()
    assert (found.logits - expected.logits)[mask].std() < 0.05 * expected.logits[mask].std()


def test_blocks_are_mixed_but_those_that_are_dropped():
    own = Coding(torch.eye(6), torch.eye(6), torch.ones(6))
    encoder, decoder = folded(own, [[4, 3], [2, 0]])
    assert torch.equal(encoder[:4, :4].abs(), torch.full((4, 4), 0.5)) and torch.equal(encoder[4:, 4:], torch.eye(2))
    torch.testing.assert_close(encoder @ decoder, torch.eye(6))
