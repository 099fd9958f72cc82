"""Models with an RMSNorm on each head (Qwen3) to MLA: exact at full size, and with the loss of the formulas.

Shapes: N tokens, H query heads, G key/value heads, D head size, n planes, P rotary size, R latent, M = 2 G D.
"""

from dataclasses import dataclass, fields

import pytest
import torch
from attention_oracle import (
    BIASES,
    CALIBRATION,
    PARTIAL,
    Grouped,
    collected,
    covariance,
    distance,
    grouped,
    inputs,
    layer_inputs,
    layer_output,
    logits,
    mean_rotation,
    metrics,
    random_model,
)
from small_models import make_batch
from stock_models import LLAMA3, YARN, batch, close, stock_config, stock_model
from stock_models import logits as stock_logits
from test_latent import components
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.exporting import export_config
from modeling_gqa.conversion import UserError, allocate, convert_model, load_source, target_config
from modeling_gqa.conversion.layers.heads import read_heads
from modeling_gqa.conversion.layers.normed import latent_source

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("one_layer_alone")]

QK_NORM = {"qk_norm": True}


@dataclass
class Normed(Grouped):
    """Weights of a layer whose queries and keys have an RMSNorm on each head, with weights (D,)."""

    q_norm: torch.Tensor
    k_norm: torch.Tensor

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Normed queries or keys, or values ("q", "k", "v") of `x` (T, E): (heads, T, D)."""
        found = super().heads(x, name)
        if name == "v":
            return found
        return getattr(self, f"{name}_norm") * found / (found.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def normed(model, index: int) -> Normed:
    layer, attention = grouped(model, index), model.model.layers[index].self_attn
    norms = (norm.weight.detach().double() for norm in (attention.q_norm, attention.k_norm))
    return Normed(*(getattr(layer, field.name) for field in fields(Grouped)), *norms)


def to_mla(model, text=CALIBRATION, method="lowrank", **sizes):
    return convert_model(model, target_config(model.config, "mla", **sizes), text, method=method)


# -- exact

ODD = {
    "odd-hidden": {"hidden_size": 65, "head_dim": 14, "num_key_value_heads": 2},
    "three-of-nine-heads": {"hidden_size": 42, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10},
    "mha-wider-than-the-model": {"hidden_size": 26, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 22},
    "one-head-biases-window": {
        "hidden_size": 33,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": True,
        "rope_parameters": LLAMA3,
    },
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

LOSSY = {
    "gqa": ("gqa", {}, 20, 10),
    "mha-biases": ("mha", {"attention_bias": True}, 30, 18),
    "gqa-partial-qwen2-biases": ("gqa", {**BIASES, "rope_parameters": PARTIAL}, 23, 8),
}


@pytest.mark.parametrize("name", LOSSY)
def test_the_loss_is_the_error_measured_behind_the_norms(name):
    """Rotary key, turned queries, latent, output bias and loss follow their formulas from normed queries and keys."""
    model_name, options, rank, size = LOSSY[name]
    model = random_model(model_name, **QK_NORM, **options).double()
    other, report = to_mla(model, kv_lora_rank=rank, qk_rope_head_dim=size)
    for index, x in enumerate(layer_inputs(model, CALIBRATION)):
        layer = normed(model, index)
        query, key, value = (layer.heads(x, part) for part in "qkv")  # (H, N, D), (G, N, D)
        y = torch.cat((*key, *value), dim=1)  # (N, M)
        turned = mean_rotation(layer, [rows[0] for rows in x.view(4, 6, 24, -1)])
        projections, kept, loss = components(layer, x, turned, size // 2)
        attention, sizes = other.model.layers[index].self_attn, other.config.per_layer_config[index]
        assert sorted(sizes.rope_frequency_indices) == kept and sizes.qk_nope_head_dim == 14
        maps = attention.q_head_proj.weight.detach().view(6, 14 + size, 14)
        made_q = torch.einsum("hod,htd->hot", maps, query)  # (H, N + P, tokens)
        made = (y @ attention.kv_a_proj_with_mqa.weight.detach().T).T  # (R + P, tokens)
        up = attention.kv_b_proj.weight.detach().view(6, 28, rank)

        # What a rotary query and key give is what the projection leaves of their planes.
        zq, zk = layer.complex_planes(query.mT), layer.complex_planes(key.mT)  # (heads, n, tokens)
        half = size // 2
        q_rope, k_rope = (torch.complex(r[..., :half, :], r[..., half:, :]) for r in (made_q[:, 14:], made[rank:]))
        frequencies = torch.tensor(sizes.rope_frequency_indices)
        restored = torch.einsum("nab,bnt->ant", projections, zk)
        for i in range(layer.planes):
            ours = torch.einsum("hct,cs->hts", q_rope[:, frequencies == i].conj(), k_rope[frequencies == i])
            expected = torch.einsum("ht,hs->hts", zq[:, i].conj(), restored[layer.shared, i])
            assert (ours - expected).abs().max() < 1e-4

        # The rest is read unrotated, by queries that are turned as far as keys are on average.
        assert distance(layer.complex_planes(made_q[:, :14]), turned[:, None] * zq) < 1e-6
        left = zk - restored
        left = torch.cat((left.real, left.imag, key.mT[:, 2 * layer.planes :]), dim=1)  # (G, D, tokens)
        _, value_metric, _ = metrics(layer, x)
        for h, g in enumerate(layer.shared):
            t = (value_metric[h] * covariance(value[g])).sum()
            metric = t / 14 * covariance(made_q[h, :14].T, centered=False)
            loss += (covariance((left[g] - up[h, :14] @ made[:rank]).T) * metric).sum().item()
            loss += (covariance((value[g].T - up[h, 14:] @ made[:rank]).T) * value_metric[h]).sum().item()
        assert loss == pytest.approx(report["layers"][index]["loss"], rel=1e-4)

        # What is lost of the values' mean stands in the output's bias.
        whole = torch.einsum("hd,hed->e", value.mean(1)[layer.shared], layer.o) + layer.o_bias
        kept_mean = torch.einsum("hvr,r->hv", up[:, 14:], made[:rank].mean(1))
        assert distance(attention.o_proj(kept_mean.flatten()).detach(), whole) < 1e-5


def test_statistics_behind_the_norms_are_those_of_all_tokens():
    """Second moments of normed keys with values, and of normed queries, without padding, whatever the batches."""
    model = random_model("gqa", attention_bias=True, **QK_NORM)
    padded = make_batch(6, 24, padding="left")
    rows = [{name: x[i : i + 1] for name, x in padded.items()} for i in range(6)]
    for split in ([padded], rows):
        for index, (x, found) in enumerate(zip(layer_inputs(model, [padded]), collected(model, split), strict=True)):
            layer = normed(model, index)
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
    layer, heads = normed(model, 0), read_heads(model, 0)
    seen = collected(model, CALIBRATION)[0]
    virtual, moments = latent_source(heads, seen, "identity")
    rows, bias = [], []
    for g in range(2):
        power = (layer.k[g].square().sum() + layer.k_bias[g].square().sum()) / 14
        rows.append(layer.k_norm[:, None] * layer.k[g] / power.sqrt())
        bias.append(layer.k_norm * layer.k_bias[g] / power.sqrt())
    rows = torch.cat((*rows, *layer.v))  # (M, E)
    assert distance(moments.input_covariance, rows @ rows.T) < 1e-12
    assert torch.equal(moments.input_mean, seen.normed.mean)
    assert torch.equal(torch.cat((virtual.k, virtual.v)).flatten(0, 1), torch.eye(56, dtype=torch.float64))
    power = (layer.q.square().sum((1, 2)) + layer.q_bias.square().sum(1)) / 14
    query = layer.q_norm[:, None] * layer.q / power.sqrt()[:, None, None]
    query_bias = layer.q_norm * layer.q_bias / power.sqrt()[:, None]
    second = query @ query.mT + query_bias[:, :, None] * query_bias[:, None, :]
    assert distance(moments.query_metric / moments.query_metric.sum(), second_weighed(second, moments)) < 1e-12
    seen.normed = None
    _, moments = latent_source(heads, seen, "identity")
    assert distance(moments.input_covariance, rows @ rows.T) < 1e-12


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


@pytest.mark.parametrize("share", [1 / 2, 1 / 4])
def test_text_and_norms_lower_the_loss(share):
    """Calibrated on text, less is lost than from weights alone, and than where norms are replaced by constants."""
    model = random_model("mha", **QK_NORM)
    size = round(share * 168)
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


@pytest.mark.parametrize("method", ["lowrank", "auto"])
def test_sizes_are_chosen_layer_by_layer(method):
    """A shared cache and a budget work behind norms as elsewhere."""
    model = random_model("mha", **QK_NORM)
    target = target_config(model.config, "mla", cache_size=60)
    other, _ = convert_model(model, target, CALIBRATION, method=method, divide_cache=True)
    assert all(layer.kv_lora_rank + layer.qk_rope_head_dim == 60 for layer in other.config.per_layer_config)
    assert all(layer.qk_norm for layer in other.config.per_layer_config)
    numbers = 3 * 60
    target = allocate(model, "mla", numbers * 4, CALIBRATION, dtype=torch.float32)
    other, _ = convert_model(model, target, CALIBRATION, method="lowrank")
    cached = other(CALIBRATION[0]["input_ids"], use_cache=True).past_key_values
    assert sum(layer.keys.shape[-1] * layer.keys.shape[1] + layer.values.shape[-1] * layer.values.shape[1]
               for layer in cached.layers) <= numbers  # fmt: skip
    assert torch.isfinite(logits(other)).all()


def test_one_layer_of_several():
    """The other layers stay grouped and keep their parameters bit by bit."""
    model = random_model("gqa", **QK_NORM).double()
    other, report = to_mla(model, cache_size=30, layers=[1])
    assert [layer.attention_kind for layer in other.config.per_layer_config] == ["gqa", "mla", "gqa"]
    assert [layer["loss"] is None for layer in report["layers"]] == [True, False, True]
    x = inputs()
    assert torch.equal(layer_output(other, 2, x), layer_output(model, 2, x))
    assert GQAForCausalLM(other.config).state_dict().keys() == other.state_dict().keys()


# -- what cannot be


def test_no_conversion_begins_with_the_result():
    other, _ = to_mla(random_model("gqa", **QK_NORM), cache_size=30)
    message = r"layer 0 is MLA with an RMSNorm on each head \(qk_norm=True\), with which no conversion begins"
    for kind, sizes in (("mla", {"cache_size": 20}), ("mha", {}), ("gqa", {"num_key_value_heads": 2})):
        with pytest.raises(UserError, match=message):
            target_config(other.config, kind, **sizes)


def test_a_target_with_other_norms_is_refused():
    model, plain = random_model("gqa", **QK_NORM), random_model("gqa")
    sizes = {"kv_lora_rank": 20, "qk_rope_head_dim": 10}
    for source, target in ((model, plain), (plain, model)):
        with pytest.raises(UserError, match=r"layer 0: the target's qk_norm=.* differs from the source's"):
            convert_model(source, target_config(target.config, "mla", **sizes), CALIBRATION)


def test_no_class_of_transformers_has_it():
    other, _ = to_mla(random_model("gqa", **QK_NORM), kv_lora_rank=28, qk_rope_head_dim=28)
    with pytest.raises(UserError, match=r"deepseek_v3: .*qk_norm=True"):
        export_config(other.config)
