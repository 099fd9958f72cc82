"""`convert` as users call it: the source stays, what may not change is refused, and the report says what was done."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import (
    BIASES,
    CALIBRATION,
    LONG_CALIBRATION,
    distance,
    in_dtype,
    layer_inputs,
    layer_output,
    logits,
    random_model,
)
from small_models import make_batch, make_config, make_model
from stock_models import own_model, stock_config, stock_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from benchmarks.layerwise import collect
from modeling_gqa.conversion import METHODS, UserError, allocate, compare_predictions, convert_model, target_config
from modeling_gqa.conversion.convert import Search
from modeling_gqa.conversion.fitting import PASSES
from modeling_gqa.conversion.inspection import conversions
from modeling_gqa.conversion.layer_store import LayerStore
from modeling_gqa.conversion.sequential import NOT_CHOSEN, LatentChoice, Setting, convert_layer
from modeling_gqa.conversion.streams import FIRST_SHARE
from modeling_gqa.conversion.targets import layer_fields

MLA: dict[str, Any] = {"kv_lora_rank": 20, "qk_rope_head_dim": 8}


def target(model, kind: str, **sizes):
    return target_config(model.config, kind, **sizes)


def state_copy(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# -- the source and what is not attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "sizes"), [("mqa", {}), ("mha", {}), ("mla", MLA)], ids=["mqa", "mha", "mla"])
def test_the_source_is_untouched_and_nothing_is_shared(kind, sizes, dtype):
    """Overwriting the result leaves the source's tensors as they were, in every dtype."""
    model = in_dtype(random_model("gqa", attention_bias=True), dtype)
    before, mode = state_copy(model), model.training
    other, _ = convert_model(model, target(model, kind, **sizes), CALIBRATION, method="lowrank", refit=True, polish=64)
    for parameter in other.parameters():
        assert parameter.dtype == dtype and parameter.requires_grad and parameter.isfinite().all()
        parameter.data.fill_(1.0)
    assert same_state(before, model.state_dict()) and model.training == mode


def test_a_model_whose_logits_are_changed_behind_its_output_layer_is_not_compared():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = Gemma2ForCausalLM(Gemma2Config(vocab_size=101, num_key_value_heads=1, head_dim=16, **sizes))
    with pytest.raises(UserError, match="gemma2"):
        compare_predictions(other, other, CALIBRATION)


def test_a_normed_layer_can_be_mla_exactly():
    found = conversions(random_model("gqa", qk_norm=True).config, torch.float32)
    assert "mla with R = 28 and P = 28" in found["exact"]


def test_candidates_do_not_write_to_the_source(monkeypatch):
    """A candidate shares the source's other tensors, does not change them, and equals the final conversion."""
    model = random_model("gqa", output_bias=True).double()
    before = state_copy(model)
    search = Search(model, target(model, "mqa"), CALIBRATION, CALIBRATION, {}, LayerStore())
    shared, _ = search.converted(Setting(refit=True), share=True)
    assert same_state(before, model.state_dict())
    assert shared.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    alone, _ = search.converted(Setting(refit=True), share=False)
    assert same_state(shared.state_dict(), alone.state_dict())
    assert alone.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_everything_but_the_attention_is_the_same():
    """Only the chosen layer's keys and values change; ties, modes and the generation configuration are kept."""
    model = random_model("mixed", tie_word_embeddings=True, mlp_bias=True)
    model.generation_config.update(temperature=0.7, do_sample=True, max_length=19)
    model.set_attn_implementation("eager")
    model.train()
    other, _ = convert_model(model, target(model, "mqa", layers=[1]), CALIBRATION, method="mean")
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.generation_config.to_dict() == model.generation_config.to_dict()
    assert other.generation_config is not model.generation_config
    assert other.training and other.config._attn_implementation == "eager"
    before, after = model.state_dict(), other.state_dict()
    changed = {name for name in after if name not in before or not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv"}
    kinds = [layer.attention_kind for layer in other.config.per_layer_config]
    assert kinds == ["mla", "mqa", "mha"]


# -- models of transformers' own classes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama-mha-tied", MLA),
        ("phi3", MLA),
        ("granite", MLA),
        ("granite4-unrotated", MLA),
        ("qwen3-window-biases", {}),
    ],
)
def test_a_stock_model_is_converted_as_the_imported_one_is(name, sizes):
    """The result is that of the imported model, and the stock model keeps its tensors and computes what it did."""
    stock = stock_model(stock_config(name))
    stock.generation_config.update(temperature=0.7, do_sample=True)
    before, expected = state_copy(stock), logits(stock)
    wanted = target_config(stock.config, "mla" if sizes else "mqa", **sizes)
    converted, done = convert_model(stock, wanted, CALIBRATION, refine=1)
    imported = own_model(stock)
    imported.set_attn_implementation(stock.config._attn_implementation)
    own, _ = convert_model(imported, wanted, CALIBRATION, refine=1)
    assert same_state(converted.state_dict(), own.state_dict()) and not done["exact"]
    assert converted.generation_config.temperature == 0.7
    for parameter in converted.parameters():
        parameter.data.zero_()
    assert same_state(before, stock.state_dict()) and torch.equal(logits(stock), expected)


def test_what_is_no_causal_language_model_is_refused():
    stock = stock_model(stock_config("llama"))
    wanted = target_config(stock.config, "mqa")
    with pytest.raises(UserError, match="LlamaModel is not converted: give a causal language model"):
        convert_model(stock.model, wanted)
    with pytest.raises(UserError, match="Linear is not converted"):
        convert_model(stock.lm_head, wanted)
    stock.model.layers[0].self_attn.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(UserError, match=r"a tensor model\.layers\.0\.self_attn\.extra\.weight"):
        convert_model(stock, wanted)


# -- the report, and how to convert


def test_the_report_of_an_automatic_search():
    """The report lists each candidate once, the chosen one has the least KL, and KL is measured on the last quarter."""
    model = random_model("mixed-window", per_layer_config={2: {"attention_kind": "mqa"}})
    other, report = convert_model(model, target(model, "mha", layers=[2]), CALIBRATION)
    assert report["exact"] and report["layers"][2] == {
        "layer": 2,
        "from": "mqa, 1 of 6 heads of 14",
        "to": "mha, 6 of 6 heads of 14",
        "loss": 0.0,
        "gain": None,
        "alpha": None,
        "key_mean": None,
        "mean_share": None,
        "learning_rate": None,
        "ridge": None,
    }
    assert report["candidates"] == [] and report["setting"] is None and report["layers"][0]["loss"] is None

    model = random_model("mha")
    for kind, number in (("mqa", 2), ("gqa", 4)):  # weighted or not, grouped or not
        sizes = {"num_key_value_heads": 2} if kind == "gqa" else {}  # MQA has one group, however it is made
        wanted = target(model, kind, layers=[0], **sizes)
        other, report = convert_model(model, wanted, CALIBRATION, method="auto", refine=0)
        names = [candidate["name"] for candidate in report["candidates"]]
        assert len(names) == len(set(names)) == number
    kls = [candidate["kl"] for candidate in report["candidates"]]
    chosen = " ".join(f"{name}={value}" for name, value in report["setting"].items() if name != "seed")
    assert chosen == names[kls.index(min(kls))]
    # The last of four batches is what was chosen by.
    assert compare_predictions(model, other, CALIBRATION[3:])["kl"] == pytest.approx(min(kls), rel=1e-5)
    assert report["layers"][0] | {"loss": 0, "ridge": 0} == {
        "layer": 0,
        "from": "mha, 6 of 6 heads of 14",
        "to": "gqa, 2 of 6 heads of 14",
        "loss": 0,
        "gain": None,
        "alpha": None,
        "key_mean": None,
        "mean_share": None,
        "learning_rate": None,
        "ridge": 0,
    }
    json.dumps(report, allow_nan=False)


def test_settings_are_tried_without_gradient_steps():
    """The result has the best candidate's setting, and the gradient steps that were asked for."""
    model = random_model("mha")
    settings = []
    for refine in (None, 0, 2):
        _, report = convert_model(model, target(model, "mqa"), CALIBRATION, method="auto", refine=refine)
        best = min(report["candidates"], key=lambda candidate: candidate["kl"])["name"]
        settings.append(report["setting"])
        assert all(candidate["name"].endswith("refine=0") for candidate in report["candidates"])
        assert " ".join(f"{k}={v}" for k, v in (settings[-1] | {"refine": 0}).items() if k != "seed") == best
    assert [setting["refine"] for setting in settings] == [PASSES, 0, 2]


def test_the_search_of_a_model_of_both_kinds_beats_what_it_began_with():
    """For a target of GQA and MLA both searches run, and the result has the least KL of all candidates."""
    model = random_model("mha")
    both = target(random_model("gqa"), "mla", **MLA, layers=[0])
    other, report = convert_model(model, both, CALIBRATION, method="auto", refine=0)
    kls = [candidate["kl"] for candidate in report["candidates"]]
    assert len(kls) == 4 + 1 + 1  # the best of the ones before is not tried again
    assert {"by_layer=True" in candidate["name"] for candidate in report["candidates"]} == {True, False}
    assert compare_predictions(model, other, CALIBRATION[3:])["kl"] == pytest.approx(min(kls), rel=1e-5)
    assert [layer.attention_kind for layer in other.config.per_layer_config] == ["mla", "gqa", "gqa"]


def test_regroup_and_refit_can_be_set():
    """What is set is not searched."""
    model = random_model("mha")
    for regroup, refit in ((False, False), (True, True)):
        _, report = convert_model(model, target(model, "mqa"), CALIBRATION, method="auto", regroup=regroup, refit=refit)
        assert len(report["candidates"]) == 2
        for candidate in report["candidates"]:
            assert f"regroup={regroup} " in candidate["name"] and f"refit={refit}" in candidate["name"]
    _, report = convert_model(model, target(model, "mqa"), CALIBRATION, method="mean")
    assert report["method"] == "mean" and not report["setting"]["regroup"] and not report["setting"]["refit"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}], ids=["plain", "qk-norm"])
def test_every_method_works_with_and_without_text(method, fields):
    """Each method gives finite logits that differ from the source's, and a report that JSON holds."""
    model = random_model("mha", **fields)
    grouped = target(model, "gqa", num_key_value_heads=2)
    for text in (None, [], CALIBRATION):
        other, report = convert_model(model, grouped, text, method=method, refit=False)
        assert other.config.num_key_value_heads == 2 and not report["exact"]
        assert torch.isfinite(logits(other)).all() and distance(logits(other), logits(model)) > 1e-2
        assert report["setting"]["metric"] == "identity" or text
        json.dumps(report, allow_nan=False)


def test_the_same_seed_converts_alike():
    model = random_model("mha")
    for kind, sizes in (("gqa", {"num_key_value_heads": 2}), ("mla", MLA)):
        states = [
            convert_model(model, target(model, kind, **sizes), CALIBRATION, method="lowrank", regroup=True, seed=3)[0]
            for _ in range(2)
        ]
        assert same_state(*(other.state_dict() for other in states))


# -- refusals

REFUSED = {
    "unchanged": (make_config("gqa"), {}, "the target's attention is the source's: there is nothing to convert"),
    "method": (
        make_config("mqa"),
        {"method": "median"},
        r"method='median' is unknown \(did you mean mean\?\): choose one of lowrank, auto, mean",
    ),
    "refit": (make_config("mqa"), {"refit": True}, "refit needs calibration text"),
    "refine": (make_config("mqa"), {"refine": 3}, "refine needs calibration text"),
    "negative": (make_config("mqa"), {"refine": -1, "calibration": CALIBRATION}, "refine=-1 must not be negative"),
    "hidden-size": (make_config("mqa", hidden_size=60), {}, "the target's hidden_size=60 differs from the source's 66"),
    "tied": (make_config("mqa", tie_word_embeddings=True), {}, "tie_word_embeddings=True differs"),
    "rope": (
        make_config("mqa", rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
        {},
        "the target's rope_parameters=.* differs",
    ),
    "window": (make_config("mqa", sliding_window=4), {}, "the target's layer_types=.* differs"),
    "heads": (make_config("mqa", num_attention_heads=3), {}, "layer 0: the target's num_attention_heads=3 differs"),
    "head-size": (
        make_config("mqa", head_dim=20),
        {},
        "layer 0: the target's head_dim=20 differs from the source's 14",
    ),
    "qk-norm": (make_config("mqa", qk_norm=True), {}, "layer 0: the target's qk_norm=True differs"),
    "latent-sizes": (
        make_config("mla", qk_nope_head_dim=10, latent_norm=False),
        {},
        "layer 0: qk_nope_head_dim=10 of the target cannot be had: .*build the target with `target_config`",
    ),
    "merging-to-mla": (target_config(make_config("gqa"), "mla", **MLA), {"method": "mean"}, "to MLA none are merged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused(name):
    """Each impossible conversion is refused in one line that names the field."""
    config, arguments, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        convert_model(make_model("gqa"), config, **arguments)
    assert "\n" not in str(error.value)


# -- output projections fitted to the source's outputs


def seen_by(model, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What layer `index` gets, what its MLP's norm gets, and what its output projection gets: (tokens, ...)."""
    layer, seen = model.model.layers[index], []
    modules = (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.o_proj)
    hooks = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1))) for module in modules]
    with torch.no_grad():
        for batch in LONG_CALIBRATION:
            model(**batch)
    for hook in hooks:
        hook.remove()
    before, heads, after = (torch.cat(seen[i::3]) for i in range(3))
    return before, after, heads


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}], ids=["plain", "biases"])
@pytest.mark.parametrize(("kind", "sizes"), [("mqa", {}), ("mla", MLA)], ids=["mqa", "mla"])
def test_layers_are_fitted_on_what_the_converted_ones_before_give(kind, sizes, fields):
    """Layer 2 is calibrated on the stream that layer 0 as converted gives, and NumPy's ridge regression fits its output
    projection to the source's stream, each token relative to its power, the first of a row more; other layers stay."""
    model = random_model("gqa", **fields).double()
    both, done = convert_model(
        model, target(model, kind, layers=[0, 2], **sizes), LONG_CALIBRATION, regroup=False, refine=0
    )
    first, _ = convert_model(model, target(model, kind, layers=[0], **sizes), LONG_CALIBRATION, regroup=False, refine=0)
    state, source = both.state_dict(), model.state_dict()
    assert same_state({n: x for n, x in state.items() if ".1." in n}, {n: x for n, x in source.items() if ".1." in n})
    for name, x in first.state_dict().items():
        assert ".layers.0." not in name or torch.equal(x, state[name])
    ((_, statistics),) = collect(first, LONG_CALIBRATION, [2])
    fields = layer_fields(target(model, kind, **sizes))[2]
    layer = done["layers"][2]
    choice = LatentChoice(layer["mean_share"], layer["gain"], layer["alpha"]) if kind == "mla" else NOT_CHOSEN
    unfitted = convert_layer(model, 2, fields, statistics, Setting(regroup=False), True, choice)
    name = "model.layers.2.self_attn."
    for key, x in unfitted.state.items():
        assert key.startswith("o_proj") or distance(state[name + key], x) < 1e-6
    hidden, _, x = seen_by(both, 2)
    _, after, _ = seen_by(model, 2)
    missed = after - hidden - x @ unfitted.state["o_proj.weight"].T
    found = state[name + "o_proj.weight"] - unfitted.state["o_proj.weight"]
    weight = torch.where(torch.arange(len(x)) % 24 == 0, max(FIRST_SHARE * 24, 1), 1.0) / after.square().mean(-1)
    ridge = layer["ridge"] * (weight[:, None] * x.square()).sum(0).mean().item()
    if (bias := unfitted.state.get("o_proj.bias")) is not None:
        missed = missed - bias
        x = torch.nn.functional.pad(x, (0, 1), value=1.0)
        found = torch.cat((found, (state[name + "o_proj.bias"] - bias)[:, None]), dim=1)
    root = weight.sqrt()[:, None].numpy()
    rows = np.concatenate((root * x.numpy(), ridge**0.5 * np.eye(x.shape[1])))
    values = np.concatenate((root * missed.numpy(), np.zeros((x.shape[1], missed.shape[1]))))
    expected = np.linalg.lstsq(rows, values, rcond=None)[0].T
    assert distance(found, torch.from_numpy(expected)) < 1e-4
    assert (missed - x @ found.T).square().mean() < missed.square().mean()


def test_refitting_and_refining_come_nearer_on_their_text():
    """Each lowers the first layer's error on its text, whatever the padding, both the KL; the mode stays."""
    model = random_model("mha", attention_dropout=0.3, **BIASES)
    text = [make_batch(12, 15, padding="left", seed=i) for i in range(12)]
    text += [make_batch(24, 9, seed=i) for i in range(12, 18)]
    model.train()  # dropout must play no part
    ways: list[dict[str, Any]] = [{"refit": False}, {"refine": 0}, {"refine": 10}]
    found = [convert_model(model, target(model, "mqa"), text, **way)[0] for way in ways]
    assert all(other.training for other in (model, *found))
    for each in (model, *found):
        each.eval()
    errors = torch.zeros(3)
    for batch in text:
        rows = [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        for row in rows:
            x = layer_inputs(model, [{"input_ids": row}])[0][None].float()
            expected = layer_output(model, 0, x)
            for i, other in enumerate(found):
                errors[i] += (layer_output(other, 0, x) - expected).square().sum()
    assert errors[1] < 0.95 * errors[0] and errors[2] < 0.95 * errors[1]
    kls = [compare_predictions(model, other, text)["kl"] for other in found]
    assert max(kls[1:]) < kls[0]


@pytest.mark.parametrize("rotated", [14, 8], ids=["whole heads", "a part of each head"])
def test_a_model_with_factors_by_frequency_is_converted(rotated):
    """With longrope each layer chooses among the source's frequencies, each with its factor; with room it is exact."""
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6][: rotated // 2], "long_factor": [2.0] * (rotated // 2)}
    model = random_model("gqa", rope_parameters=rope | {"partial_rotary_factor": rotated / 14})
    for wanted in (target(model, "mqa"), target(model, "mla", **MLA), allocate(model, "mla", 600, CALIBRATION)):
        converted, report = convert_model(model, wanted, CALIBRATION, refine=1)
        assert not report["exact"] and converted.config.rope_parameters["short_factor"] == rope["short_factor"]
        frequencies = {converted.model.rotary_emb[size].original_inv_freq for size in converted.model.rotary_sizes}
        (source,) = (model.model.rotary_emb[size].original_inv_freq for size in set(model.model.rotary_sizes))
        assert all(torch.equal(found, source) for found in frequencies)
    latent, _ = convert_model(model, target(model, "mla", **MLA), CALIBRATION, refine=0)
    again, _ = convert_model(latent, target_config(latent.config, "mqa"), CALIBRATION, refine=0)
    assert compare_predictions(latent, again, CALIBRATION)["kl"] > 0
    back, report = convert_model(latent, target_config(latent.config, "mha"))
    assert report["exact"] and distance(logits(back), logits(latent)) < 1e-5
    whole = target(model, "mla", kv_lora_rank=66, qk_rope_head_dim=2 * rotated)
    converted, report = convert_model(model, whole)
    assert report["exact"] and distance(logits(converted), logits(model)) < 1e-5


def test_two_rotary_numbers_are_enough_with_dynamic_frequencies():
    """They are chosen among those of the source's heads, which have more than two dimensions."""
    model = random_model("gqa", rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0})
    wanted = target_config(model.config, "mla", kv_lora_rank=9, qk_rope_head_dim=2)
    for target in (wanted, allocate(model, "mla", 3 * 9 * 4, CALIBRATION)):
        converted, _ = convert_model(model, target, CALIBRATION)
        assert {layer.qk_rope_head_dim for layer in converted.config.per_layer_config} & {2}
        assert 0 < compare_predictions(model, converted, CALIBRATION)["kl"] < 3


@pytest.mark.parametrize("projection", ["k_proj", "o_proj"])
@pytest.mark.parametrize(("kind", "sizes"), [("mqa", {}), ("mla", MLA)], ids=["mqa", "mla"])
def test_a_layer_of_zeros_is_named(kind, sizes, projection):
    """As pruned models have, and grown ones whose new layers do nothing yet."""
    model = random_model("gqa")
    getattr(model.model.layers[1].self_attn, projection).weight.data.zero_()
    with pytest.raises(UserError, match="layer 1 has projections of zeros"):
        convert_model(model, target(model, kind, **sizes), method="lowrank")
