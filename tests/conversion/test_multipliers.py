"""Granite's multipliers change nothing but scales: a model that has them in its weights instead is treated alike."""

import copy

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, distance, logits, random_model
from small_models import MODELS
from stock_models import own_model, stock_config, stock_model
from transformers import GraniteForCausalLM

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import allocate, compare_predictions, convert_model, target_config
from modeling_gqa.conversion.allocation import measured_choices
from modeling_gqa.conversion.sequential import Setting
from modeling_gqa.conversion.targets import cached_numbers
from modeling_gqa.conversion.transform_coding import cache_means, cache_statistics

MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5}
LATENT = {"kv_lora_rank": 20, "qk_rope_head_dim": 12}


@torch.no_grad()
def pair(name: str, **fields) -> tuple[GQAForCausalLM, GQAForCausalLM]:
    """A model with multipliers, and one without that has them in its weights, in float64."""
    model = random_model(name, **{**MULTIPLIERS, **fields}).double().eval()
    plain = random_model(name, **fields).double().eval()
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    plain.model.embed_tokens.weight *= MULTIPLIERS["embedding_multiplier"]
    plain.lm_head.weight /= MULTIPLIERS["logits_scaling"]
    for layer in plain.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in linear.parameters():
                parameter *= MULTIPLIERS["residual_multiplier"]
    return model, plain


@pytest.mark.parametrize("name", [name for name in MODELS if "norm_position" not in MODELS[name]])
def test_every_kind_computes_with_multipliers(name):
    model, plain = pair(name, output_bias=True, mlp_bias=True)
    assert distance(logits(model), logits(plain)) < 1e-9
    assert distance(logits(model), logits(random_model(name, output_bias=True, mlp_bias=True).double())) > 0.1
    prompt = CALIBRATION[0]["input_ids"][:2]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    answer = model.generate(prompt, **options)
    assert torch.equal(answer, plain.generate(prompt, **options))
    rounded = {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "residual_length": 4}}
    answer = model.generate(prompt, **options, **rounded)
    assert torch.equal(answer, plain.generate(prompt, **options, **rounded))


@pytest.mark.parametrize("at_once", [None, 505], ids=["whole", "chunks"])
def test_the_loss_is_of_divided_logits(at_once):
    model, plain = pair("mixed")
    labels = CALIBRATION[0]["input_ids"]
    losses = []
    for each in (model, plain):
        each.train().logits_at_once = at_once
        losses.append(each(labels, labels=labels).loss)
    losses[0].backward()
    divided = torch.nn.functional.cross_entropy(logits_of(plain, labels), labels[:, 1:].flatten())
    assert losses[0].item() == pytest.approx(divided.item(), rel=1e-6) == pytest.approx(losses[1].item(), rel=1e-6)
    assert all(parameter.grad.any() for parameter in model.parameters())


def logits_of(model, labels: torch.Tensor) -> torch.Tensor:
    return model.eval()(labels).logits[:, :-1].flatten(0, 1)


@pytest.mark.parametrize("options", [{"refine": 0}, {"refine": 1}, {"refit": False}], ids=["fit", "refine", "plain"])
@pytest.mark.parametrize(("kind", "sizes"), [("gqa", {"num_key_value_heads": 2}), ("mla", LATENT)], ids=["gqa", "mla"])
def test_conversions_are_alike(kind, sizes, options):
    """Fits are to what the stream gets: the output projection's own output times the multiplier."""
    model, plain = pair("mha", attention_bias=True)
    target, other = (target_config(each.config, kind, **sizes) for each in (model, plain))
    converted, _ = convert_model(model, target, LONG_CALIBRATION, **options)
    expected, _ = convert_model(plain, other, LONG_CALIBRATION, **options)
    assert converted.config.residual_multiplier == 0.4 and converted.config.format_version == 4
    # The fits' products are in float32.
    assert distance(logits(converted), logits(expected)) < 1e-3
    assert distance(logits(converted), logits(model)) > 0.01
    found, wanted = (compare_predictions(*models, CALIBRATION) for models in ((model, converted), (plain, expected)))
    assert found["kl"] == pytest.approx(wanted["kl"], rel=1e-2)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_sizes_by_layer_are_alike(kind):
    model, plain = pair("mha")
    found, expected = (
        measured_choices(each, kind, [0, 2], CALIBRATION, Setting(refit=True), iter) for each in (model, plain)
    )
    for index, choices in found.items():
        losses = [choice.loss for choice in choices]
        assert losses == pytest.approx([choice.loss for choice in expected[index]], rel=1e-3, abs=1e-9)
    budget = 4 * 3 * 84
    one, two = (allocate(each, kind, budget, CALIBRATION) for each in (model, plain))
    assert [cached_numbers(layer) for layer in one.per_layer_config] == [
        cached_numbers(layer) for layer in two.per_layer_config
    ]


def test_what_matters_in_a_cache_is_alike():
    """Gradients of the predictions by what is cached take every multiplier into account."""
    model, plain = pair("mixed")
    statistics = []
    for each in (model, plain):
        means = cache_means(each, CALIBRATION)
        statistics.append([x for layer in cache_statistics(each, CALIBRATION, means) for part in layer for x in part])
    for one, two in zip(*statistics, strict=True):
        assert distance(one, two) < 1e-4


def test_transformers_granite_is_compared_by_its_logits():
    stock = stock_model(stock_config("granite"))
    assert type(stock) is GraniteForCausalLM
    found = compare_predictions(stock, own_model(stock), CALIBRATION)
    assert found["kl"] < 1e-6 and found["perplexity_before"] == pytest.approx(found["perplexity_after"], rel=1e-5)
