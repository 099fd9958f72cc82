"""To MLA with loss: the error is the one reported, sizes buy accuracy, and the model works as any other.

Shapes: N tokens, E hidden size, H query heads, G key/value heads, D head size, n planes, P rotary size, R latent.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_oracle import (
    BIASES,
    CALIBRATION,
    PARTIAL,
    YARN,
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
from transformers import DynamicCache, StaticCache

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import convert_model, sequential, target_config
from modeling_gqa.conversion.layers.heads import read_heads
from modeling_gqa.conversion.layers.latent import to_latent
from modeling_gqa.conversion.layers.moments import compute_moments
from modeling_gqa.conversion.sequential import LatentChoice
from modeling_gqa.conversion.targets import divided

pytestmark = pytest.mark.usefixtures("one_layer_alone")


def to_mla(model, rank: int, size: int, **arguments):
    target = target_config(model.config, "mla", kv_lora_rank=rank, qk_rope_head_dim=size)
    return convert_model(model, target, CALIBRATION, **{"method": "lowrank", "key_mean": False, **arguments})


def components(layer, x: torch.Tensor, rotation: torch.Tensor, number: int):
    """The complex components of keys whose rotation is kept: the projection (n, G, G) of each frequency's planes on
    them, how many each frequency has, and what the others lose with their rotation."""
    heads = len(layer.k)
    weight = torch.stack(
        [metrics(layer, x)[2][[h for h, g in enumerate(layer.shared) if g == i]].sum(0) for i in range(heads)]
    )
    planes = layer.complex_planes(layer.heads(x, "k").mT)  # (G, n, N)
    found = []
    for i in range(layer.planes):
        root = weight[:, i].sqrt()
        second = covariance(planes[:, i].T, centered=False)
        values, vectors = torch.linalg.eigh(root[:, None] * second * root)
        for value, vector in zip(values, vectors.T, strict=True):
            projection = torch.outer(vector / root, vector.conj() * root)
            found.append(((value * 2 * (1 - rotation[i].real)).item(), i, projection))
    found.sort(key=lambda item: -item[0])
    projections = torch.zeros(layer.planes, heads, heads, dtype=torch.complex128)
    for _, i, projection in found[:number]:
        projections[i] += projection
    return projections, sorted(i for _, i, _ in found[:number]), sum(gain for gain, *_ in found[number:])


LOSSY: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gqa": ("gqa", {}, 20, 10),
    "gqa-qwen2-biases-yarn": ("gqa", {**BIASES, "rope_parameters": YARN}, 26, 6),
    "gqa-partial": ("gqa", {"rope_parameters": PARTIAL}, 23, 8),
    "mha-biases-norms": ("mha", {"attention_bias": True, "qk_norm": True}, 30, 18),
    "gqa-partial-qwen2-biases-norms": ("gqa", {**BIASES, "qk_norm": True, "rope_parameters": PARTIAL}, 23, 8),
}


@pytest.mark.parametrize("chosen", [LatentChoice(), LatentChoice(gain=0.5, alpha=0.3)], ids=["plain", "chosen"])
@pytest.mark.parametrize("name", LOSSY)
@torch.no_grad()
def test_the_loss_is_the_error_measured(name, chosen, monkeypatch):
    """Rotary key, turned queries, latent, output bias and loss follow their formulas, from queries, keys and values of
    the text: as the layer makes them, or behind their norms."""
    monkeypatch.setattr(sequential, "GAINS", (chosen.gain,))
    monkeypatch.setattr(sequential, "ALPHAS", (chosen.alpha,))
    model_name, fields, rank, size = LOSSY[name]
    model = random_model(model_name, **fields).double()
    other, report = to_mla(model, rank, size)
    for index, x in enumerate(layer_inputs(model, CALIBRATION)):
        layer = grouped(model, index)
        rotary = model.model.rotary_emb[model.model.rotary_sizes[index]]
        layer.omega = rotary.original_inv_freq.double()  # YaRN's are not the oracle's
        gain = rotary.attention_scaling**2
        turned = mean_rotation(layer, [rows[0] for rows in x.view(4, 6, 24, -1)])
        if name == "gqa-qwen2-biases-yarn":  # the oracle's attention knows no YaRN
            assert gain != 1.0
            turned = compute_moments(read_heads(model, index), collected(model, CALIBRATION)[index]).rotation.mean(0)
        projections, kept, loss = components(layer, x, turned, size // 2)
        loss *= gain**2  # which YaRN scales a score by
        attention, sizes = other.model.layers[index].self_attn, other.config.per_layer_config[index]
        assert sorted(sizes.rope_frequency_indices) == kept and sizes.qk_nope_head_dim == 14
        query, key, value = (layer.heads(x, part) for part in "qkv")  # (H, T, D), (G, T, D)
        if layer.k_norm is None:
            made_q = attention.q_proj(x).view(len(x), 6, -1).movedim(0, 2)  # (H, N + P, T)
            made = attention.kv_a_proj_with_mqa(x).T  # (R + P, T)
        else:
            maps = attention.q_head_proj.weight.view(6, 14 + size, 14)
            made_q = torch.einsum("hod,htd->hot", maps, query)
            made = (torch.cat((*key, *value), dim=1) @ attention.kv_a_proj_with_mqa.weight.T).T
        up = attention.kv_b_proj.weight.view(6, 28, rank)

        # What a rotary query and key give is what the projection leaves of their planes.
        zq, zk = layer.complex_planes(query.mT), layer.complex_planes(key.mT)  # (heads, n, T)
        half = size // 2
        q_rope, k_rope = (torch.complex(r[..., :half, :], r[..., half:, :]) for r in (made_q[:, 14:], made[rank:]))
        frequencies = torch.tensor(sizes.rope_frequency_indices)
        restored = torch.einsum("nab,bnt->ant", projections, zk)
        for i in range(layer.planes):
            ours = torch.einsum("hct,cs->hts", q_rope[:, frequencies == i].conj(), k_rope[frequencies == i])
            expected = torch.einsum("ht,hs->hts", zq[:, i].conj(), restored[layer.shared, i])
            assert (ours - expected).abs().max() < 1e-4

        # The rest is read unrotated, by queries that are turned as far as keys are on average.
        shrunk = turned / turned.abs() * turned.abs() ** chosen.gain
        assert distance(layer.complex_planes(made_q[:, :14]), shrunk[:, None] * gain * zq) < 1e-6
        assert report["layers"][index]["gain"] == chosen.gain and report["layers"][index]["alpha"] == chosen.alpha
        left = zk - restored
        left = torch.cat((left.real, left.imag, key.mT[:, 2 * layer.planes :]), dim=1)  # (G, D, T)
        _, value_metric, _ = metrics(layer, x)
        for h, g in enumerate(layer.shared):
            t = (value_metric[h] * covariance(value[g])).sum()
            metric = t / 14 * covariance(made_q[h, :14].T, centered=False)
            loss += (covariance((left[g] - up[h, :14] @ made[:rank]).T) * metric).sum().item()
            loss += (covariance((value[g].T - up[h, 14:] @ made[:rank]).T) * value_metric[h]).sum().item()
        assert loss == pytest.approx(report["layers"][index]["loss"], rel=1e-4)

        # What is lost of the values' mean stands in the output's bias.
        whole = torch.einsum("hd,hed->e", value.mean(1)[layer.shared], layer.o) + layer.o_bias
        brought = torch.einsum("hvr,r->hv", up[:, 14:], made[:rank].mean(1))
        assert distance(attention.o_proj(brought.flatten()), whole) < 1e-5


def smallest_loss(layer, x: torch.Tensor, turned: torch.Tensor, rank: int, size: int) -> float:
    """What sizes R and P must lose: eigenvalues of what the heads make of the text."""
    projections, _, lost = components(layer, x, turned, size // 2)
    q, k = layer.complex_planes(layer.q), layer.complex_planes(layer.k)
    left = k - torch.einsum("nab,bne->ane", projections, k)
    left = torch.cat((left.real, left.imag, layer.k[:, 2 * layer.planes :]), dim=1)  # (G, D, E)
    q = turned[:, None] * q
    queries = torch.einsum("hde,te->htd", torch.cat((q.real, q.imag, layer.q[:, 2 * layer.planes :]), dim=1), x)
    _, value_metric, _ = metrics(layer, x)
    made = []
    for g in range(len(layer.k)):
        readers = [h for h, shared in enumerate(layer.shared) if shared == g]
        heard = [(value_metric[h] * covariance(layer.heads(x, "v")[g])).sum() / 14 for h in readers]
        key_metric = sum(t * covariance(queries[h], centered=False) for t, h in zip(heard, readers, strict=True))
        for rows, metric in ((left[g], key_metric), (layer.v[g], value_metric[readers].sum(0))):
            values, vectors = torch.linalg.eigh(metric)
            made.append(x @ rows.T @ vectors * values.clamp(min=0).sqrt())
    return lost + torch.linalg.eigvalsh(covariance(torch.cat(made, dim=1)))[:-rank].sum().item()


def test_the_loss_of_a_size_is_its_dropped_eigenvalues():
    """The reported loss equals that of explicit keys and values."""
    model = random_model("gqa").double()
    for index, x in enumerate(layer_inputs(model, CALIBRATION)):
        layer = grouped(model, index)
        turned = mean_rotation(layer, [rows[0] for rows in x.view(4, 6, 24, -1)])
        heads, statistics = read_heads(model, index), collected(model, CALIBRATION)[index]
        statistics = replace(statistics, second=covariance(x, centered=False), mean=x.mean(0))
        for size in (2, 8, 24):
            _, _, loss = to_latent(heads, compute_moments(heads, statistics), 32 - size, size)
            assert loss == pytest.approx(smallest_loss(layer, x, turned, 32 - size, size), rel=1e-2)


def test_how_a_cache_is_divided():
    """P is a fifth of R + P, and a twentieth more for each halving of the source's cache, and even."""
    sizes: dict[str, Any] = {"hidden_size": 576, "num_attention_heads": 9, "head_dim": 64, "num_hidden_layers": 1}
    layer = GQAConfig(**sizes, num_key_value_heads=3).per_layer_config[0]
    for total, expected in ((384, 76), (192, 48), (96, 28), (48, 16), (4, 2), (3, 2)):
        assert divided(total, layer) == (total - expected, expected)
    assert divided(96, layer, factor=0.5) == (82, 14)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.0625}
    few = GQAConfig(**sizes, num_key_value_heads=3, rope_parameters=rope).per_layer_config[0]
    assert divided(96, few) == (84, 12)  # no more planes than there are
    many = GQAConfig(**sizes, num_key_value_heads=9).per_layer_config[0]
    assert divided(1000, many) == (576, 424)  # no more than there is to hold


@pytest.mark.parametrize(("method", "norms"), [("lowrank", True), ("auto", False)])
def test_converted_with_a_divided_cache(method, norms):
    """R and P chosen layer by layer sum to the given cache, in the configuration and in the cache itself."""
    model = random_model("mha", attention_bias=True, qk_norm=norms)
    target = target_config(model.config, "mla", cache_size=30, layers=[0, 2])
    other, report = convert_model(model, target, CALIBRATION, method=method, divide_cache=True)
    changed = [other.config.per_layer_config[index] for index in (0, 2)]
    assert all(layer.kv_lora_rank + layer.qk_rope_head_dim == 30 and layer.qk_norm == norms for layer in changed)
    assert report["setting"]["share_cache"]
    cached = other(CALIBRATION[0]["input_ids"], use_cache=True).past_key_values
    assert [cached.layers[i].keys.shape[-1] + cached.layers[i].values.shape[-1] for i in (0, 2)] == [30, 30]
    _, report = convert_model(model, target, divide_cache=True)
    assert "R + P = 20 + 10" in report["layers"][0]["to"]


def test_what_is_exact_is_not_divided_anew():
    """A target that is exact keeps its R and P."""
    model = random_model("mqa")
    _, report = convert_model(model, target_config(model.config, "mla", cache_size=28), CALIBRATION, divide_cache=True)
    assert report["exact"] and all("R + P = 14 + 14" in layer["to"] for layer in report["layers"])


def test_more_room_loses_less():
    """Losses and errors fall strictly as R or P grows, down to 0 where there is room for all."""
    model = random_model("mha", initializer_range=0.1).double()
    x = layer_inputs(model, CALIBRATION)[0][None, :24]
    expected, losses, errors = layer_output(model, 0, x), {}, {}
    for rank, size in [(8, 12), (20, 12), (40, 12), (66, 12), (66, 30), (66, 84), (40, 30), (40, 60)]:
        other, report = to_mla(model, rank, size)
        losses[rank, size] = [layer["loss"] for layer in report["layers"]]
        errors[rank, size] = (layer_output(other, 0, x) - expected).norm().item()
    for path in ([(8, 12), (20, 12), (40, 12), (66, 12), (66, 30), (66, 84)], [(40, 12), (40, 30), (40, 60)]):
        for less, more in pairwise(path):
            assert all(a > b for a, b in zip(losses[less], losses[more], strict=True)), (less, more)
            assert errors[less] > errors[more], (less, more)
    assert errors[66, 84] < 1e-10 * expected.norm()


# Frequencies of 1, 1e-5, 1e-10, ... so that next to nothing is lost with the rotation of all planes but the first.
SLOW = {"rope_type": "default", "rope_theta": 1e35}
UNROTATED = {
    "qwen2-biases": ("gqa", {**BIASES, "rope_parameters": SLOW}),
    "partial-biases": ("gqa", {"attention_bias": True, "rope_parameters": {**SLOW, "partial_rotary_factor": 0.6}}),
    "yarn-biases": ("gqa", {**BIASES, "rope_parameters": {**YARN, "rope_theta": 1e35, "attention_factor": 1.4}}),
}


@pytest.mark.parametrize("name", UNROTATED)
def test_planes_that_hardly_turn_need_no_rotation(name):
    """With frequencies near 0 an unrotated conversion is exact to 1e-4; a wrong factor or bias is off by 1e-2."""
    model_name, fields = UNROTATED[name]
    model = random_model(model_name, **fields).double()
    other, _ = to_mla(model, 56, 4)  # room for all keys and values
    for index in range(3):
        assert other.config.per_layer_config[index].rope_frequency_indices == [0, 0]
        x = inputs()
        expected = layer_output(model, index, x)
        assert distance(layer_output(other, index, x), expected) < 1e-4
        # Had the queries of what lost its rotation lost its factor, or a bias been mistaken:
        attention = other.model.layers[index].self_attn
        damaged = [attention.q_proj.weight.data.view(6, 18, 66)[:, :14]]
        damaged += [] if attention.q_proj.bias is None else [attention.q_proj.bias.data.view(6, 18)[:, :14]]
        for part in damaged:
            part /= 1.4**2
        assert distance(layer_output(other, index, x), expected) > 1e-2


# -- a converted model is a model

CONVERTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("mha", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, {}),
    "biases-eager": ("mha", BIASES, {"attn_implementation": "eager"}),
    "partial-one-layer": ("gqa", {"rope_parameters": PARTIAL}, {"layers": [1]}),
    "window": ("gqa", {"sliding_window": 6}, {}),
    "qk-norm": ("gqa", {"qk_norm": True, "attention_bias": True}, {}),
}


def converted(name: str):
    model_name, fields, options = CONVERTED[name]
    model = random_model(model_name, **fields)
    model.set_attn_implementation(options.get("attn_implementation", "sdpa"))
    target = target_config(model.config, "mla", cache_size=24, layers=options.get("layers"))
    return convert_model(model, target, CALIBRATION, method="lowrank")[0]


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", CONVERTED)
@torch.no_grad()
def test_decoding_is_the_full_forward(name, cache_class):
    """Logits token by token with a cache are those of one forward."""
    model, ids = converted(name), make_batch()["input_ids"]
    expected = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config) if cache_class is DynamicCache else StaticCache(model.config, 11)
    steps = [model(ids[:, :4], past_key_values=cache).logits]
    steps += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(4, 11)]
    assert distance(torch.cat(steps, dim=1), expected) < 1e-5


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_saved_and_loaded(name, tmp_path):
    """Frequencies chosen layer by layer survive saving and loading, with equal logits."""
    model = converted(name)
    indices = [layer.rope_frequency_indices for layer in model.config.per_layer_config]
    if name == "plain":
        assert len(set(map(tuple, indices))) > 1  # each layer has its own
    model.save_pretrained(tmp_path)
    loaded = GQAForCausalLM.from_pretrained(tmp_path)
    assert [layer.rope_frequency_indices for layer in loaded.config.per_layer_config] == indices
    assert torch.equal(logits(loaded), logits(model))
