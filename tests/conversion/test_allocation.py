"""Sizes by layer within a budget, and what they are measured by."""

from functools import partial
from itertools import product

import pytest
import torch
from attention_oracle import CALIBRATION, random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_gqa.conversion import UserError, allocate, compare_predictions, convert_model, target_config
from modeling_gqa.conversion.allocation import (
    SizeChoice,
    kl_alone,
    layer_sizes,
    measured_choices,
    smallest_target,
    spend,
    spread,
)
from modeling_gqa.conversion.divergence import predicted_states
from modeling_gqa.conversion.fitting import fit
from modeling_gqa.conversion.layers.latent import ALPHAS, GAINS, MEAN_SHARES
from modeling_gqa.conversion.sequential import (
    ROTARY_STEP,
    TIE,
    LatentChoice,
    Setting,
    assemble,
    best_latent,
    convert_layer,
    new_attention,
)
from modeling_gqa.conversion.streams import streams
from modeling_gqa.conversion.targets import cached_numbers, configuration, divided, layer_fields, mean_bytes
from modeling_gqa.costs import cache_bytes_per_token


def sizes(config) -> list[tuple[str, int, int | None, int | None]]:
    return [
        (layer.attention_kind, layer.num_key_value_heads, layer.kv_lora_rank, layer.qk_rope_head_dim)
        for layer in config.per_layer_config
    ]


def uneven_model(name: str = "mha", **fields):
    """A model whose first layer's heads are nearly copies of each other, and whose last layer says little."""
    model = random_model(name, **fields)
    first, last = model.model.layers[0].self_attn, model.model.layers[2].self_attn
    with torch.no_grad():
        for linear in (first.k_proj, first.v_proj):
            heads = linear.weight.view(-1, 14, 66)
            heads.copy_(heads[:1] + 0.05 * heads)
        last.o_proj.weight.mul_(0.05)
    return model


def relative_losses(model, config) -> float:
    """Summed losses of a conversion, each relative to the stream that the layer adds to."""
    _, report = convert_model(model, config, CALIBRATION, selection=CALIBRATION, method="lowrank", regroup=True)
    streams = []
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: streams.append(args[0].square().sum(-1).mean().item())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        for batch in CALIBRATION:
            model(**batch)
    for hook in hooks:
        hook.remove()
    stream = torch.tensor(streams).view(len(CALIBRATION), 3).mean(0).tolist()
    return sum((layer["loss"] or 0.0) / s for layer, s in zip(report["layers"], stream, strict=True))


@pytest.mark.parametrize(
    ("kind", "uniform"),
    [("gqa", {"num_key_value_heads": 2}), ("mla", {"cache_size": 42})],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_budget_is_kept_and_well_spent(kind, uniform, dtype):
    """The cache keeps to the budget, and the layers lose less than with equal sizes."""
    model = uneven_model()
    equal = target_config(model.config, kind, **uniform)
    budget = cache_bytes_per_token(equal, dtype)
    config = allocate(model, kind, budget, CALIBRATION, dtype=dtype)
    assert cache_bytes_per_token(config, dtype) <= budget
    assert sizes(config) != sizes(equal)
    if dtype == torch.bfloat16:
        assert relative_losses(model, config) < relative_losses(model, equal)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mla", {"key_mean": False, "refit": False}), ("gqa", {"method": "mean", "regroup": True, "seed": 3})],
    ids=str,
)
def test_sizes_are_tried_as_the_conversion_makes_them(kind, options, monkeypatch):
    used = set()

    def spy(model, index, fields, statistics, setting, *others):
        used.add(setting)
        return convert_layer(model, index, fields, statistics, setting, *others)

    monkeypatch.setattr("modeling_gqa.conversion.allocation.convert_layer", spy)
    allocate(uneven_model(), kind, 1500, CALIBRATION, **options)
    expected = {"regroup": True, "refit": True, **options} if kind == "mla" else {"refit": False, **options}
    assert used == {Setting(**expected)}


def test_layers_that_may_not_change_are_counted():
    """The cache of unchanged layers counts towards the budget, and with room for all caches every layer stays."""
    model = uneven_model()
    config = allocate(model, "gqa", 3 * 500, CALIBRATION, layers=[0, 2], dtype=torch.float16)
    assert cache_bytes_per_token(config, torch.float16) <= 3 * 500
    assert sizes(config)[1] == ("mha", 6, None, None)
    for kind in ("gqa", "mla"):
        assert sizes(allocate(model, kind, 3 * 2 * 6 * 14 * 4, CALIBRATION)) == sizes(model.config)


def test_a_layer_without_smaller_sizes_stays_whatever_it_is():
    """A layer that cannot become smaller keeps its attention."""
    model = random_model("mixed-window")  # the last layer is MLA with a latent norm, smaller than one key/value head
    smallest = smallest_target(model.config, "gqa", 1000, dtype=torch.bfloat16)
    config = allocate(model, "gqa", mean_bytes(smallest, torch.bfloat16), CALIBRATION, dtype=torch.bfloat16)
    assert sizes(config)[:2] == [("mqa", 1, None, None)] * 2 and sizes(config)[2] == sizes(model.config)[2]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_window_counts_what_it_keeps(kind):
    """Of 64 tokens a window keeps 4, so that the layers without one become smaller, and the budget is kept.

    With three quarters of the cache MLA loses about 1e-5 in each layer, so that half of it is asked about.
    """
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = random_model("mha", sliding_window=4, layer_types=types, max_position_embeddings=64)
    layer = cached_numbers(model.config.per_layer_config[0]) * 2  # bytes
    assert mean_bytes(model.config, torch.bfloat16) == layer + 2 * layer * 4 // 64
    for budget in (layer * 3 // 4, layer // 2):
        config = allocate(model, kind, budget, CALIBRATION, dtype=torch.bfloat16)
        assert mean_bytes(config, torch.bfloat16) <= budget
    first, second, third = (cached_numbers(layer) for layer in config.per_layer_config)
    assert min(first, third) > second


@pytest.mark.parametrize(("kind", "layers", "least"), [("gqa", None, 3 * 56), ("gqa", [1], 2 * 336 + 56)])
def test_a_small_budget_is_refused_and_the_least_is_enough(kind, layers, least):
    """One byte less than the least is refused, which the message names; the least is enough."""
    model = uneven_model()
    message = f"a budget of {least - 1} bytes per token is too small: the least with {kind} in these layers is {least}"
    given = {"layers": layers, "dtype": torch.bfloat16}
    with pytest.raises(UserError, match=f"{message}, and the source takes 1008$"):
        allocate(model, kind, least - 1, CALIBRATION, **given)
    assert cache_bytes_per_token(allocate(model, kind, least, CALIBRATION, **given), torch.bfloat16) == least


@pytest.mark.parametrize(
    ("kind", "layers", "text", "message"),
    [
        ("mha", None, CALIBRATION, "a budget chooses sizes of gqa or mla, and mha has none to choose"),
        ("gqa", [3], CALIBRATION, "layers has 3, but the model's 3 layers are 0 to 2"),
        ("gqa", [-1], CALIBRATION, "layers has -1"),
        ("gqa", None, [], "the calibration text is empty"),
    ],
)
def test_impossible_budgets_are_refused(kind, layers, text, message):
    """Kinds without sizes, unknown layers and missing text are refused."""
    with pytest.raises(UserError, match=message):
        allocate(random_model("gqa"), kind, 1000, text, layers=layers)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("index", [0, 2])
def test_what_one_layer_does_to_the_predictions(kind, index):
    """It is what comparing the source with the source with this one new layer gives."""
    model = random_model("mha" if kind == "gqa" else "gqa")
    fields = layer_fields(model.config)
    numbers, changed = next(iter(layer_sizes(model.config, index, kind).items()))
    fields[index] |= changed
    with torch.no_grad(), streams(model, CALIBRATION) as text:
        for before in range(index):
            text.advance_both(before)
        new = convert_layer(model, index, fields[index], text.collect(index), Setting(refit=True), True)
        attention = new_attention(model, index, new)
        fit(text, index, attention, trial=1000)
        ends = {number: predicted_states(model, batch) for number, batch in enumerate(CALIBRATION[:2])}
        found = kl_alone(text, index, attention, ends)
    fields[index] |= new.fields
    other = assemble(model, configuration(model.config, fields), {index: dict(attention.state_dict())})
    assert cached_numbers(other.config.per_layer_config[index]) == numbers
    assert found == pytest.approx(compare_predictions(model, other, CALIBRATION[:2])["kl"], rel=1e-3)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_trying_sizes_leaves_the_text_as_it_was(kind):
    """The losses of a layer are the same whichever layers before it were tried, and fall with the size."""
    model = random_model("mha")
    measured = partial(
        measured_choices, model, kind, calibration=CALIBRATION, setting=Setting(refit=True), progress=iter
    )
    alone, together = measured([2])[2], measured([0, 1, 2])[2]
    assert [choice.loss for choice in alone] == pytest.approx([choice.loss for choice in together], rel=1e-4)
    assert alone[0].loss > alone[len(alone) // 2].loss > alone[-1].loss == 0


@pytest.mark.parametrize("total", [21, 120])
@pytest.mark.parametrize("refit", [True, False])
def test_a_layer_becomes_mla_in_the_way_that_leaves_least(total, refit):
    """Nothing else beside what is chosen leaves less on documents held out; R + P is what was given."""
    model, setting = random_model("mha"), Setting(divide_cache=True, refit=refit)
    fields = layer_fields(target_config(model.config, "mla", cache_size=total))[0]
    with torch.no_grad(), streams(model, CALIBRATION) as text:
        statistics = text.collect(0)
        choice, new = best_latent(text, 0, fields, statistics, setting)
        assert (new.gain, new.alpha) == (choice.gain, choice.alpha)

        def error(choice: LatentChoice) -> float:
            other = convert_layer(model, 0, fields, statistics, setting, True, choice)
            assert other.fields["kv_lora_rank"] + other.fields["qk_rope_head_dim"] == total
            return fit(text, 0, new_attention(model, 0, other), refit, 1000).error

        least = fit(text, 0, new_attention(model, 0, new), refit, 1000).error
        assert least == error(choice)
        nearly = 1 - TIE  # of ways that are equal but for this the first is taken
        assert least * nearly <= min(
            error(choice._replace(factor=choice.factor * step)) for step in (ROTARY_STEP, 1 / ROTARY_STEP)
        )
        assert (new.mean_share, new.key_mean) == (choice.mean_share, True)
        plain = LatentChoice(mean_share=choice.mean_share)
        assert error(plain) * nearly <= min(error(LatentChoice(mean_share=share)) for share in MEAN_SHARES)
        first = plain._replace(gain=choice.gain)
        assert error(first) * nearly <= min(error(plain._replace(gain=gain)) for gain in GAINS)
        assert least * nearly <= min(error(first._replace(alpha=alpha)) for alpha in ALPHAS)
        assert [len(text.states[number]) for number in text.states] == [2] * len(CALIBRATION)


def test_sizes_are_divided_as_is_best_at_one():
    """At the third of the sizes that are tried P is what `best_latent` finds there; the others have the same factor."""
    model, setting = random_model("mha"), Setting(refit=True, divide_cache=True)
    choices = measured_choices(model, "mla", [0], CALIBRATION, Setting(refit=True), iter)[0][:-1]
    rotary = {choice.numbers: choice.fields["qk_rope_head_dim"] for choice in choices}
    probe = spread(sorted(rotary))[2]
    with torch.no_grad(), streams(model, CALIBRATION) as text:
        fields = layer_fields(target_config(model.config, "mla", cache_size=probe))[0]
        choice, new = best_latent(text, 0, fields, text.collect(0), setting)
    assert rotary[probe] == new.fields["qk_rope_head_dim"]
    layer = model.config.per_layer_config[0]
    assert rotary == {numbers: divided(numbers, layer, choice.factor)[1] for numbers in rotary}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    curves=st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=5), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
)
def test_spending_is_best_for_losses_that_fall_ever_slower(curves, share):
    """Best of all choices, where steps are equally large and each of a layer's saves less than the one before."""
    options = {}
    for index, savings in enumerate(curves):
        losses = [float(sum(sorted(savings, reverse=True)[taken:])) for taken in range(len(savings) + 1)]
        options[index] = [SizeChoice(2 * (i + 1), loss, {}) for i, loss in enumerate(losses)]
    least = sum(layer[0].numbers for layer in options.values())
    most = sum(layer[-1].numbers for layer in options.values())
    budget = least + round(share * (most - least))
    picked = spend(options, budget)
    assert sum(option.numbers for option in picked.values()) <= budget
    best = min(
        sum(option.loss for option in choice)
        for choice in product(*options.values())
        if sum(option.numbers for option in choice) <= budget
    )
    assert sum(option.loss for option in picked.values()) == pytest.approx(best)
