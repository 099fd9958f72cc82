"""Models with norms after attention and MLP, or over all heads (OLMo 2, Gemma 3): exact conversions, fits and losses.

Shapes: T tokens, E hidden size, H query heads, G key/value heads, D head size.
"""

import copy

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, distance, inputs, layer_output, random_model
from small_models import OLMO_MODELS, OLMO_NORMS, make_batch, make_model
from stock_models import batch, close, logits, own_model, stock_config, stock_model

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.exporting import export_config
from modeling_gqa.conversion import convert_model, layer_errors, target_config
from modeling_gqa.conversion.fitting import error_weights, fit, refine
from modeling_gqa.conversion.layers.heads import read_heads
from modeling_gqa.conversion.sequential import Setting, fewer_heads
from modeling_gqa.conversion.streams import streams
from modeling_gqa.costs import count_parameters

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("one_layer_alone")]

SOURCES = {
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3-two-ropes": ("olmo3-two-ropes", {"num_key_value_heads": 2}),
}


# -- exact


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("text", [False, True], ids=["weights", "text"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_random_olmo_is_mha_and_mla_exactly(name, kind, text):
    """Logits and tokens are those of transformers' class, beyond the window: with each head repeated, and as MLA with
    R = P = G D."""
    stock_name, fields = SOURCES[name]
    stock = stock_model(stock_config(stock_name, **fields))
    source = own_model(stock)
    size = source.config.num_key_value_heads * source.config.head_dim
    sizes = {"kv_lora_rank": size, "qk_rope_head_dim": size} if kind == "mla" else {}
    target = target_config(source.config, kind, **sizes)
    other, report = convert_model(source, target, [make_batch(4, 24)] if text else None)
    assert report["exact"] and other.config.attention_kind == kind
    assert (other.config.norm_position, other.config.qk_norm_span) == ("after", "all_heads")
    assert other.config.format_version == 4 and other.num_parameters() == count_parameters(other.config)
    assert close(logits(other), logits(stock))
    options = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(other.generate(**batch(), **options), stock.generate(**batch(), **options))
    if kind == "mha":
        assert export_config(other.config, engine="transformers").model_type == name[:5]


# -- norms after attention


@pytest.mark.parametrize("position", ["after", "both"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_fit_behind_a_norm_brings_the_stream_back(bias, position):
    """Its error is the stream's behind the norm, before and after, where three folds are judged on the other one."""
    model = random_model("gqa", attention_bias=bias, norm_position=position).double().eval()
    closed = copy.deepcopy(model)
    attention = closed.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.o_proj.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def left() -> float:
        """The stream's error behind layer 0's attention, from the norms' outputs in two whole models."""
        seen, lost, counted = [], 0.0, 0.0
        hooks = [
            m.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *a: seen.append(a[2]))
            for m in (model, closed)
        ]
        with torch.no_grad(), streams(model, LONG_CALIBRATION) as text:
            for passage in text.passages():
                seen.clear()
                given = LONG_CALIBRATION[passage.number]
                for each in (model, closed):
                    each(**given)
                x = model.model.embed_tokens(given["input_ids"])
                passage.states = (x, x + seen[0])
                weight = error_weights(passage).double()
                lost += (weight * (seen[0] - seen[1]).square().sum(-1)).sum().item()
                counted += weight.sum().item()
        for hook in hooks:
            hook.remove()
        return lost / counted

    with torch.no_grad(), streams(model, LONG_CALIBRATION) as text:
        text.collect(0)
        before = attention.o_proj.weight.clone()
        plain = fit(text, 0, attention, refit=False)
        assert plain.error == pytest.approx(left(), rel=1e-5) and torch.equal(attention.o_proj.weight, before)
        found = fit(text, 0, attention)
    assert found.ridge is not None and found.error < 0.2 * plain.error
    # All folds are fitted now, and those that were fitted are nearer than the one that judged.
    assert 0.5 * found.error < left() < 1.01 * found.error


@pytest.mark.parametrize("position", ["after", "both"])
def test_text_lowers_the_loss_behind_norms(position):
    """The fit lowers the error of what the layers add to the stream, and gradient steps lower it more."""
    model = random_model("mha", norm_position=position, **OLMO_NORMS)
    target = target_config(model.config, "mla", cache_size=56)
    found = []
    for options in ({"refine": 0}, {"refine": 0, "refit": True}, {"refine": 4, "refit": True}):
        converted, _ = convert_model(model, target, LONG_CALIBRATION, **options)
        found.append(sum(layer_errors(model, converted, CALIBRATION)))
    assert found[2] < found[1] < found[0], found


def test_gradient_steps_go_through_the_norm():
    """An output that is three times too large is right behind the norm: steps correct the values' weights alone."""
    model = random_model("gqa", norm_position="after")
    layer, x = model.model.layers[0], inputs(rows=8).float()
    target = layer.attention_output(layer_output(model, 0, x)).detach()
    generator = torch.Generator().manual_seed(1)
    layer.self_attn.o_proj.weight.data *= 3
    weight = layer.self_attn.v_proj.weight
    weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    rotation = model.model.rotary_emb["14"](x, torch.arange(x.shape[1])[None])
    example = (x, {"position_embeddings": rotation}, target, torch.ones(x.shape[:2]))

    def error() -> float:
        return (layer.attention_output(layer_output(model, 0, x)) - target).square().sum().item()

    before = error()
    refine(layer.self_attn, [example] * 100, 100, 1e-2, layer.attention_output)
    assert error() < 0.2 * before


# -- norms over all heads


def test_heads_that_are_equal_merge_exactly():
    """MHA whose heads are those of GQA repeated becomes that GQA again: no other number of the norm is lost."""
    model = random_model("gqa", attention_bias=True, **OLMO_NORMS).double()
    for layer in model.model.layers:  # a plane's two weights are equal, as the map of merged heads needs them
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            first, _ = norm.weight.data.view(-1, 2, 7).unbind(1)
            norm.weight.data = first.repeat(1, 2).flatten().abs() + 0.2
    repeated, _ = convert_model(model, target_config(model.config, "mha"))
    for text in (None, CALIBRATION):
        target = target_config(repeated.config, "gqa", num_key_value_heads=2)
        merged, report = convert_model(repeated, target, text, refit=False, refine=0, method="lowrank")
        assert not report["exact"]
        x = inputs()
        assert distance(layer_output(merged, 1, x), layer_output(model, 1, x)) < 1e-4


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("partial", [None, 0.6], ids=["whole", "partial"])
def test_merged_heads_are_linear_in_normed_heads(number, partial):
    """Times the number that the norm divides a token by; behind the new norm they have the power that the map gives."""
    rope = {} if partial is None else {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": partial}}
    model = random_model("mha", attention_bias=True, **OLMO_NORMS, **rope).double().eval()
    layer = model.model.layers[0]
    with torch.no_grad(), streams(model, LONG_CALIBRATION) as text:
        statistics = text.collect(0)
        x = torch.cat([layer.attention_input(passage.states[0])[passage.kept] for passage in text.passages()])
    fields = {"num_key_value_heads": number, "output_bias": True}
    merged, _ = fewer_heads(read_heads(model, 0), fields, statistics, Setting())
    with torch.no_grad():
        for name, heads in (("k", number), ("q", 6)):
            raw = layer.self_attn.get_submodule(f"{name}_proj")(x).unflatten(-1, (6, 14))
            normed = layer.self_attn.get_submodule(f"{name}_norm")(raw).flatten(1)  # (T, H D)
            new = torch.einsum("gde,te->tgd", getattr(merged, name), x) + getattr(merged, f"{name}_bias")
            size = (new.square().mean((1, 2)) / raw.square().mean((1, 2))).sqrt()  # (T,)
            wanted = (getattr(merged, f"{name}_norm") * new).flatten(1) / raw.square().mean((1, 2)).sqrt()[:, None]
            left = wanted - normed @ torch.linalg.lstsq(normed, wanted).solution
            assert new.shape[1:] == (heads, 14) and left.norm() < 1e-5 * wanted.norm()
            assert 0.9 < size.square().mean() < 1.1  # of noise, with first tokens that count more


# -- the models


@pytest.mark.parametrize("name", OLMO_MODELS)
def test_cached_decoding_and_costs_are_those_of_the_model(name, tmp_path):
    """Token by token beyond the window, as all at once; parameters as counted; and the same after loading."""
    model = make_model(name)
    ids = make_batch(2, 14)["input_ids"]
    with torch.no_grad():
        whole, cache, parts = model(ids).logits, None, []
        for token in ids.split(1, dim=1):
            output = model(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    assert close(torch.cat(parts, dim=1), whole)
    assert count_parameters(model.config) == model.num_parameters() and model.config.format_version == 4
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert close(GQAForCausalLM.from_pretrained(tmp_path)(ids).logits, whole)
