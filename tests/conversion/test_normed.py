"""Models with an RMSNorm on each head (Qwen3) to MLA: exact at full size, and with the loss of the formulas.

Shapes: N tokens, H query heads, G key/value heads, D head size, n planes, P rotary size, R latent, M = 2 G D.
"""

import pytest
import torch
from attention_oracle import (
    CALIBRATION,
    collected,
    covariance,
    distance,
    grouped,
    inputs,
    layer_inputs,
    layer_output,
    logits,
    random_model,
)
from small_models import make_batch
from stock_models import YARN, batch, close, stock_config, stock_model
from stock_models import logits as stock_logits
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.exporting import export_config
from modeling_gqa.conversion import UserError, allocate, convert_model, load_source, target_config
from modeling_gqa.conversion.layers.heads import read_heads
from modeling_gqa.conversion.layers.moments import blank_statistics, compute_moments
from modeling_gqa.conversion.layers.normed import behind_norms, seen_behind
from modeling_gqa.costs import cache_bytes_per_token

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("one_layer_alone")]

QK_NORM = {"qk_norm": True}


def to_mla(model, text=CALIBRATION, method="lowrank", **sizes):
    return convert_model(model, target_config(model.config, "mla", **sizes), text, method=method)


# -- exact

ODD = {
    "odd-hidden": {"hidden_size": 65, "head_dim": 14, "num_key_value_heads": 2},
    "mha-wider-than-the-model": {"hidden_size": 26, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 22},
    "biases-yarn-tied": {
        "num_key_value_heads": 3,
        "head_dim": 18,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("text", [False, True], ids=["weights", "text"])
def test_a_random_qwen3_is_mla_exactly_at_full_size(name, text, tmp_path):
    """R = P = G D gives the logits and tokens of transformers' Qwen3ForCausalLM, saved and loaded, too."""
    stock = stock_model(stock_config("qwen3", **{"rope_parameters": None, "max_position_embeddings": 32, **ODD[name]}))
    assert type(stock).__name__ == "Qwen3ForCausalLM"
    stock.save_pretrained(tmp_path / "stock")
    source = load_source(tmp_path / "stock")
    size = source.config.num_key_value_heads * source.config.head_dim
    other, report = to_mla(source, [make_batch(4, 24)] if text else None, kv_lora_rank=size, qk_rope_head_dim=size)
    assert report["exact"] and (other.config.qk_nope_head_dim, other.config.kv_lora_rank) == (0, size)
    other.save_pretrained(tmp_path / "mla")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mla")
    assert type(loaded) is GQAForCausalLM and loaded.config.format_version == 3
    inputs = batch()
    expected = stock.generate(**inputs, max_new_tokens=9, do_sample=False)
    for model in (other, loaded):
        assert close(stock_logits(model), stock_logits(stock))
        assert torch.equal(model.generate(**inputs, max_new_tokens=9, do_sample=False), expected)
    loaded.model.layers[1].self_attn.q_head_proj.weight.data *= 1.1
    assert not close(stock_logits(loaded), stock_logits(stock), 1e-3)


# -- with loss


def test_statistics_behind_the_norms_are_those_of_all_tokens():
    """Second moments of normed keys with values, and of normed queries, without padding, whatever the batches."""
    model = random_model("gqa", attention_bias=True, **QK_NORM)
    padded = make_batch(6, 24, padding="left")
    rows = [{name: x[i : i + 1] for name, x in padded.items()} for i in range(6)]
    for split in ([padded], rows):
        for index, (x, found) in enumerate(zip(layer_inputs(model, [padded]), collected(model, split), strict=True)):
            layer = grouped(model, index)
            query, key, value = (layer.heads(x, part) for part in "qkv")
            y = torch.cat((*key, *value), dim=1)
            assert distance(found.normed.second, covariance(y, centered=False)) < 1e-5
            assert distance(found.normed.mean, y.mean(0)) < 1e-5
            expected = torch.stack([covariance(q, centered=False) for q in query])
            assert distance(found.normed.queries, expected) < 1e-5
            assert found.normed.queries.dtype == found.normed.second.dtype == torch.float64
    assert all(found.normed is None for found in collected(random_model("gqa"), [padded]))


def test_without_text_a_norm_scales_as_on_average():
    """Where inputs are uncorrelated, of mean zero, a norm brings a head to a mean square of one, times its weights."""
    model = random_model("gqa", attention_bias=True, **QK_NORM).double()
    layer, heads = grouped(model, 0), read_heads(model, 0)
    statistics = blank_statistics(model.config, 0, model.device)
    virtual = behind_norms(heads)
    moments = compute_moments(virtual, seen_behind(heads, statistics))
    rows, bias = [], []
    for g in range(2):
        power = (layer.k[g].square().sum() + layer.k_bias[g].square().sum()) / 14
        rows.append(layer.k_norm[:, None] * layer.k[g] / power.sqrt())
        bias.append(layer.k_norm * layer.k_bias[g] / power.sqrt())
    rows = torch.cat((*rows, *layer.v))  # (M, E)
    assert distance(moments.input_covariance, rows @ rows.T) < 1e-12
    assert distance(moments.input_mean, torch.cat((*bias, *layer.v_bias))) < 1e-12
    assert torch.equal(torch.cat((virtual.k, virtual.v)).flatten(0, 1), torch.eye(56, dtype=torch.float64))
    power = (layer.q.square().sum((1, 2)) + layer.q_bias.square().sum(1)) / 14
    query = layer.q_norm[:, None] * layer.q / power.sqrt()[:, None, None]
    query_bias = layer.q_norm * layer.q_bias / power.sqrt()[:, None]
    second = query @ query.mT + query_bias[:, :, None] * query_bias[:, None, :]
    assert distance(moments.query_metric / moments.query_metric.sum(), second_weighed(second, moments)) < 1e-12


def second_weighed(second, moments):
    """The queries' second moments with the weights of their heads, of sum one."""
    weight = moments.query_metric.diagonal(dim1=1, dim2=2).sum(1) / second.diagonal(dim1=1, dim2=2).sum(1)
    weighed = weight[:, None, None] * second
    return weighed / weighed.sum()


@torch.no_grad()
def kl(source, other) -> float:
    """KL(source || other) in nats per token, on text that nothing was calibrated on."""
    ours, theirs = (logits(model, batch=6, length=24, seed=77).log_softmax(-1) for model in (source, other))
    return (ours.exp() * (ours - theirs)).sum(-1).mean().item()


def test_text_and_norms_lower_the_loss():
    """Calibrated on text, less is lost than from weights alone, and than where norms are replaced by constants."""
    model = random_model("mha", **QK_NORM)
    size = 168 // 4
    constants = random_model("mha")
    constants.load_state_dict({n: x for n, x in model.state_dict().items() if "k_norm" not in n and "q_norm" not in n})
    for index, layer in enumerate(constants.model.layers):
        heads, statistics = read_heads(model, index), collected(model, CALIBRATION)[index]
        for name in "qk":
            weight = getattr(heads, name)  # (H, D, E)
            power = (weight @ statistics.second * weight).sum((1, 2)) / 14
            scale = getattr(heads, f"{name}_norm") / power.sqrt()[:, None]  # (H, D)
            layer.self_attn.get_submodule(f"{name}_proj").weight.data = (
                (weight * scale[..., None]).flatten(0, 1).float()
            )
    found = {
        "text": kl(model, to_mla(model, cache_size=size)[0]),
        "weights": kl(model, to_mla(model, None, cache_size=size)[0]),
        "constants": kl(model, to_mla(constants, cache_size=size)[0]),
    }
    assert found["text"] < 0.9 * found["weights"] and found["text"] < 0.97 * found["constants"], found


def test_a_budget_and_single_layers_behind_norms():
    """A budget holds behind norms as elsewhere; layers that stay keep their parameters bit by bit."""
    model = random_model("mha", **QK_NORM).double()
    target = allocate(model, "mla", 3 * 60 * 4, CALIBRATION, dtype=torch.float32)
    assert cache_bytes_per_token(target, torch.float32) <= 3 * 60 * 4
    other, _ = to_mla(model, cache_size=30, layers=[1])
    assert [layer.attention_kind for layer in other.config.per_layer_config] == ["mha", "mla", "mha"]
    x = inputs()
    assert torch.equal(layer_output(other, 2, x), layer_output(model, 2, x))
    assert GQAForCausalLM(other.config).state_dict().keys() == other.state_dict().keys()
    message = r"layer 1 is MLA with an RMSNorm on each head \(qk_norm=True\), with which no conversion begins"
    with pytest.raises(UserError, match=message):
        target_config(other.config, "mha")
    with pytest.raises(UserError, match=r"qk_norm=True"):
        export_config(target_config(model.config, "mla", cache_size=30))


def test_a_target_with_other_norms_is_refused():
    model, plain = random_model("gqa", **QK_NORM), random_model("gqa")
    sizes = {"kv_lora_rank": 20, "qk_rope_head_dim": 10}
    for source, target in ((model, plain), (plain, model)):
        with pytest.raises(UserError, match=r"layer 0: the target's qk_norm=.* differs from the source's"):
            convert_model(source, target_config(target.config, "mla", **sizes), CALIBRATION)
