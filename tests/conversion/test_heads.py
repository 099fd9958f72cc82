"""Fewer key/value heads: what is lost is what the formulas say, baselines are theirs, and copies merge without loss.

Shapes: N tokens, E hidden size, H query heads, m heads of a group, D head size, n rotary planes.
"""

import copy
from dataclasses import replace

import pytest
import torch
from attention_oracle import (
    BIASES,
    CALIBRATION,
    PARTIAL,
    YARN,
    change_gauge,
    covariance,
    distance,
    grouped,
    inputs,
    layer_inputs,
    layer_output,
    mean_rotation,
    metrics,
    random_gauge,
    random_model,
    write,
)

from modeling_gqa.conversion import convert_model, target_config
from modeling_gqa.conversion.layers.heads import read_heads, write_grouped

pytestmark = pytest.mark.usefixtures("one_layer_alone")


def fewer(model, number: int, method: str, **arguments):
    """Conversion with all of CALIBRATION, without any search."""
    target = target_config(model.config, "gqa" if number > 1 else "mqa", num_key_value_heads=number)
    return convert_model(model, target, CALIBRATION, selection=CALIBRATION, method=method, **arguments)


def solve(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The matrix X with before X = after, which must exist."""
    found = torch.linalg.lstsq(before, after).solution
    assert distance(before @ found, after) < 1e-9
    return found


def measured_loss(before, after, x: torch.Tensor, rotation: torch.Tensor, output_bias: bool) -> float:
    """Mean squared error of keys and values on the tokens `x` (N, E), from the two layers' weights alone: what queries
    and output projection have become tells how each head's key and value are restored."""
    n, total = before.planes, torch.zeros((), dtype=torch.float64)
    key_metric, value_metric, plane_metric = metrics(before, x)
    keys, values = (before.heads(x, name) for name in "kv")
    new_keys, new_values = (after.heads(x, name) for name in "kv")
    queries = [torch.cat((w, b[..., None]), -1) for w, b in ((before.q, before.q_bias), (after.q, after.q_bias))]
    for h, (g, j) in enumerate(zip(before.shared, after.shared, strict=True)):
        old, new = (layer.complex_planes(q[h][None])[0] for layer, q in zip((before, after), queries, strict=True))
        decoder = ((old.conj() * new).sum(1) / old.abs().square().sum(1)).conj()  # (n,)
        assert distance(decoder.conj()[:, None] * old, new) < 1e-9
        z, m = (layer.complex_planes(k.mT)[i] for layer, k, i in ((before, keys, g), (after, new_keys, j)))  # (n, N)
        error = z - decoder[:, None] * m
        mean = error.mean(1)
        lost = (error - mean[:, None]).abs().square().mean(1) + (1 - rotation.abs() ** 2) * mean.abs() ** 2
        total += (plane_metric[h] * lost).sum()
        if 2 * n < before.k.shape[1]:
            rest = solve(queries[0][h, 2 * n :].T, queries[1][h, 2 * n :].T)  # (D - 2 n, D - 2 n)
            error = keys[g][:, 2 * n :] - new_keys[j][:, 2 * n :] @ rest.T
            total += (covariance(error) * key_metric[h][2 * n :, 2 * n :]).sum()
        error = values[g] - new_values[j] @ solve(before.o[h], after.o[h]).T
        total += (covariance(error, centered=output_bias) * value_metric[h]).sum()
    return total.item()


def dropped_eigenvalues(layer, groups: list[list[int]], x: torch.Tensor, rotation: torch.Tensor) -> float:
    """The sum of the eigenvalues that the best component of each plane, and subspace of each group, leave out."""
    n, total = layer.planes, torch.zeros((), dtype=torch.float64)
    per_head = [
        torch.stack(
            [metric[[h for h, g in enumerate(layer.shared) if g == head]].sum(0) for head in range(len(layer.k))]
        )
        for metric in metrics(layer, x)
    ]
    key_metric, value_metric, plane_metric = per_head
    keys, values = layer.heads(x, "k"), layer.heads(x, "v")
    for group in groups:
        planes = layer.complex_planes(keys[group].mT)  # (m, n, N)
        for i in range(n):
            z, weight = planes[:, i].T, plane_metric[group, i].sqrt()
            second = covariance(z) + (1 - rotation[i].abs() ** 2) * torch.outer(z.mean(0), z.mean(0).conj())
            total += torch.linalg.eigvalsh(weight[:, None] * second * weight)[:-1].sum()
        for vectors, metric in (
            (values[group], value_metric[group]),
            (keys[group][..., 2 * n :], key_metric[group][:, 2 * n :, 2 * n :]),
        ):
            width = vectors.shape[-1]
            if width:
                cholesky = torch.block_diag(*torch.linalg.cholesky(metric))
                weighed = vectors.movedim(0, 1).flatten(1) @ cholesky
                total += torch.linalg.eigvalsh(covariance(weighed))[:-width].sum()
    return total.item()


# -- lowrank

LOSSY = {
    "mha-3": ("mha", {"output_bias": True}, 3),
    "mha-1-biases": ("mha", {"attention_bias": True}, 1),
    "gqa-1-partial": ("gqa", {"attention_bias": True, "rope_parameters": PARTIAL}, 1),
    "mha-2-qwen2-biases": ("mha", BIASES, 2),
}


@pytest.mark.parametrize("name", LOSSY)
def test_the_loss_of_lowrank_is_the_error_measured_and_the_eigenvalues_dropped(name):
    """The reported loss equals the error measured from weights and text, and the sum of the eigenvalues left out."""
    model_name, fields, number = LOSSY[name]
    model = random_model(model_name, **fields).double()
    other, report = fewer(model, number, "lowrank")
    assert not report["exact"] and report["method"] == "lowrank"
    output_bias = model.config.projection_biases[2]
    for index, x in enumerate(layer_inputs(model, CALIBRATION)):
        before, after = grouped(model, index), grouped(other, index)
        rotation = mean_rotation(before, [rows[0] for rows in x.view(4, 6, 24, -1)])
        loss = report["layers"][index]["loss"]
        assert measured_loss(before, after, x, rotation, output_bias) == pytest.approx(loss, rel=1e-4)
        if output_bias:
            heads = len(before.k)
            groups = torch.arange(heads).view(number, -1).tolist()
            # The metric's root is damped before it is inverted, which costs less than 1e-3.
            assert dropped_eigenvalues(before, groups, x, rotation) == pytest.approx(loss, rel=1e-3)
    other, baseline = fewer(model, number, "mean")
    loss = baseline["layers"][0]["loss"]
    before, x = grouped(model, 0), layer_inputs(model, CALIBRATION)[0]
    rotation = mean_rotation(before, [rows[0] for rows in x.view(4, 6, 24, -1)])
    assert measured_loss(before, grouped(other, 0), x, rotation, output_bias) == pytest.approx(loss, rel=1e-4)
    assert loss > report["layers"][0]["loss"]


# -- copies of heads, up to what can be changed freely


def copies(name: str, seed: int = 0, number: int = 6, **fields):
    """A model of `number` heads that computes what `name` computes with fewer: each a copy in a gauge of its own."""
    model = random_model(name, seed, **fields).double()
    kind = "mha" if number == model.config.num_attention_heads else "gqa"
    many, _ = convert_model(model, target_config(model.config, kind, num_key_value_heads=number))
    for index in range(3):
        layer = grouped(many, index)
        write(change_gauge(layer, *random_gauge(layer, seed + index)), many, index)
    return model, many


def worst(model, other) -> float:
    x = inputs()
    return max(distance(layer_output(other, i, x), layer_output(model, i, x)) for i in range(3))


@pytest.mark.parametrize(
    "fields",
    [{"attention_bias": True}, {"rope_parameters": PARTIAL, **BIASES}, {"initializer_range": 0.05}],
    ids=["biases", "partial", "small"],
)
def test_copies_in_any_gauge_merge_without_loss(fields):
    """Heads that are copies of each other, each in a gauge of its own, merge exactly by lowrank and not by the mean."""
    model, many = copies("gqa", **fields)
    other, report = fewer(many, 2, "lowrank")
    assert all(abs(layer["loss"]) < 1e-9 for layer in report["layers"])
    assert worst(model, other) < 1e-7
    blind, _ = convert_model(many, target_config(many.config, "gqa", num_key_value_heads=2))
    assert worst(model, blind) < 1e-7
    baseline, report = fewer(many, 2, "mean")
    assert worst(model, baseline) > 0.05 and all(layer["loss"] > 1e-4 for layer in report["layers"])


def test_numbers_of_heads_that_do_not_nest():
    """6 heads become 4 through 12: groups 0 0 1, 1 2 2, 3 3 4, 4 5 5, here copies of each other."""
    sizes = {"num_attention_heads": 12, "head_dim": 6}
    model, many = copies("gqa", number=6, num_key_value_heads=2, **sizes)
    assert many.config.num_key_value_heads == 6
    other, report = fewer(many, 4, "lowrank")
    assert other.config.num_key_value_heads == 4 and not report["exact"]
    assert worst(model, other) < 1e-7
    assert worst(model, fewer(many, 4, "mean")[0]) > 0.05
    mean = grouped(fewer(many, 4, "mean")[0], 0)
    assert torch.allclose(mean.k[1], (grouped(many, 0).k[1] + 2 * grouped(many, 0).k[2]) / 3)


@pytest.mark.parametrize("what", ["values", "keys"])
def test_the_result_does_not_depend_on_the_sources_gauge(what):
    """Two sources that compute the same function in other gauges give the same converted function and losses."""
    model = random_model("mha", seed=2, attention_bias=True).double()
    other = random_model("mha", seed=2, attention_bias=True).double()
    for index in range(3):
        layer = grouped(other, index)
        planes, values, rest = random_gauge(layer, 40 + index)
        if what == "keys":
            values = torch.eye(14, dtype=torch.float64).expand(6, -1, -1)
        else:
            planes = torch.ones_like(planes)
        write(change_gauge(layer, planes, values, rest), other, index)
    assert worst(model, other) < 1e-10
    (found, report), (expected, expected_report) = (fewer(m, 3, "lowrank") for m in (other, model))
    for layer, as_before in zip(report["layers"], expected_report["layers"], strict=True):
        assert layer["loss"] == pytest.approx(as_before["loss"], rel=1e-4)
    assert worst(expected, found) < 1e-3  # the damping of the metric's root is not free of gauge
    assert worst(model, expected) > 0.1


# -- baselines


def test_the_mean_changes_keys_and_values_alone():
    model = random_model("mha", seed=3, attention_bias=True)
    other, _ = fewer(model, 2, "mean")
    for index in range(3):
        before, after = grouped(model, index), grouped(other, index)
        for name in ("q", "q_bias", "o", "o_bias"):
            assert torch.equal(getattr(before, name), getattr(after, name))
        for name in ("k", "k_bias", "v", "v_bias"):
            expected = getattr(before, name).unflatten(0, (2, 3)).mean(1)
            assert torch.allclose(getattr(after, name), expected, atol=1e-7)


# -- RMSNorm on each head


@pytest.mark.parametrize("method", ["lowrank", "mean"])
def test_norms_on_heads_are_balanced_only_for_turning(method):
    """Each plane's two norm weights become their root mean square for methods that turn planes, and else stay."""
    model = random_model("mha", qk_norm=True)
    other, _ = fewer(model, 3, method)
    for index in range(3):
        for name in ("q_norm", "k_norm"):
            before, after = (getattr(m.model.layers[index].self_attn, name).weight for m in (model, other))
            if method == "lowrank":
                pairs = (before.double().unflatten(0, (2, 7)).square().mean(0)).sqrt().repeat(2)
                assert torch.allclose(after.double(), pairs, atol=1e-6)
            else:
                assert torch.equal(after, before)


def test_equal_heads_with_norms_merge_without_loss():
    """By every method; by lowrank also where they are turned, since a plane's phase is free where its two norm weights
    are equal, and values are as free as ever."""
    model = random_model("gqa", qk_norm=True).double()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data[7:] = norm.weight.data[:7]
    many, _ = convert_model(model, target_config(model.config, "mha"))
    for method in ("lowrank", "mean"):
        assert worst(model, fewer(many, 2, method)[0]) < 1e-6
    for index in range(3):
        layer = grouped(many, index)
        planes, values, rest = random_gauge(layer, index)
        write(change_gauge(layer, planes / planes.abs(), values, rest), many, index)
    assert worst(model, many) < 1e-10
    assert worst(model, fewer(many, 2, "lowrank")[0]) < 1e-6
    assert worst(model, fewer(many, 2, "mean")[0]) > 0.05


# -- grouping


def shuffled(model, order: list[int]):
    """The same model with its key/value heads, and the queries that read them, in another order."""
    for index in range(3):
        heads = read_heads(model, index)
        queries = torch.arange(len(heads.q)).view(-1, heads.groups)[order].flatten()
        moved = {name: getattr(heads, name)[order] for name in ("k", "k_bias", "v", "v_bias")}
        moved |= {name: getattr(heads, name)[queries] for name in ("q", "q_bias", "o")}
        state, _ = write_grouped(replace(heads, **moved))
        model.model.layers[index].self_attn.load_state_dict({name: x.clone() for name, x in state.items()})
    return model


@pytest.mark.parametrize("exact_sets", [500, 0], ids=["whole-groups", "pairs"])
def test_planted_groups_are_found(exact_sets, monkeypatch):
    """Copies in shuffled order are found and merge exactly; merging neighbours does not."""
    monkeypatch.setattr("modeling_gqa.conversion.layers.grouping.EXACT_SETS", exact_sets)
    model, many = copies("gqa", seed=6, attention_bias=True)
    many = shuffled(many, [5, 0, 3, 1, 4, 2])
    assert worst(model, many) < 1e-9
    other, report = fewer(many, 2, "lowrank", regroup=True)
    assert worst(model, other) < 1e-7 and all(abs(layer["loss"]) < 1e-9 for layer in report["layers"])
    assert worst(model, fewer(many, 2, "lowrank", regroup=False)[0]) > 0.05


@pytest.mark.parametrize("exact_sets", [500, 0], ids=["whole-groups", "pairs"])
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_never_worse_than_neighbours(seed, exact_sets, monkeypatch):
    """The groups that are found lose at most what neighbours lose, in every layer."""
    monkeypatch.setattr("modeling_gqa.conversion.layers.grouping.EXACT_SETS", exact_sets)
    model = random_model("mha", seed)
    losses = [
        [layer["loss"] for layer in fewer(model, 3, "lowrank", regroup=regroup)[1]["layers"]]
        for regroup in (True, False)
    ]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(*losses, strict=True)) and losses[0] != losses[1]


def test_the_size_of_a_head_that_its_norm_takes_away_is_no_matter():
    """A head scaled by 20 behind an RMSNorm converts as before, with the same losses."""
    model = random_model("mha", qk_norm=True).double()
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.k_proj.weight.data[14:28] *= 20  # the second of six heads
    assert worst(model, other) < 1e-3  # by the epsilon of the norm
    (ours, report), (theirs, their_report) = (fewer(m, 3, "lowrank") for m in (model, other))
    assert worst(ours, theirs) < 1e-2
    for row, their_row in zip(report["layers"], their_report["layers"], strict=True):
        assert row["loss"] == pytest.approx(their_row["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("gqa", {"num_key_value_heads": 3}), ("mla", {"kv_lora_rank": 20, "qk_rope_head_dim": 8})]
)
def test_losses_do_not_depend_on_where_scores_are_scaled(kind, sizes):
    """YaRN's factor on cosine and sine, or its square in softmax_scale: one function, and one loss."""
    losses = []
    for factor, scale in ((1.0, 0.3), (2.0, 0.3 / 4)):
        rope = {**YARN, "attention_factor": factor}
        model = random_model("mha", rope_parameters=rope, softmax_scale=scale).double()
        _, report = convert_model(model, target_config(model.config, kind, **sizes), CALIBRATION, method="lowrank")
        losses.append([row["loss"] for row in report["layers"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_no_other_subspace_of_values_loses_less():
    """Moving the kept subspace of values in any direction, a little or far, loses more."""
    model = random_model("mha", output_bias=True).double()
    other, _ = fewer(model, 2, "lowrank")
    x = layer_inputs(model, CALIBRATION)[0]
    before, after = grouped(model, 0), grouped(other, 0)
    values = before.heads(x, "v")[:3].movedim(0, 1).flatten(1)  # (N, m D), of the first group
    values = values - values.mean(0)
    metric = torch.block_diag(*(before.o.mT @ before.o)[:3])

    def loss(kept: torch.Tensor) -> float:  # (N, D), from which all values are restored as well as can be
        error = values - kept @ torch.linalg.lstsq(kept, values).solution
        return (covariance(error) * metric).sum().item()

    found = after.heads(x, "v")[0]
    found = found - found.mean(0)
    least = loss(found)
    generator = torch.Generator().manual_seed(5)
    for step in (1e-3, 1e-2, 1e-1, 1.0, 100.0):
        for _ in range(4):
            other_way = values @ torch.randn(42, 14, generator=generator, dtype=torch.float64) / 42**0.5
            assert loss(found + step * other_way) > least * (1 + 1e-9)


def test_the_output_bias_takes_up_the_values_mean():
    """On average over tokens that attend to all tokens alike nothing is lost."""
    model = random_model("mha", attention_bias=True).double()
    other, _ = fewer(model, 2, "lowrank")
    x = layer_inputs(model, CALIBRATION)[1]
    outputs = [
        torch.einsum("hd,hed->e", layer.heads(x, "v").mean(1)[layer.shared], layer.o) + layer.o_bias
        for layer in (grouped(model, 1), grouped(other, 1))
    ]
    assert distance(outputs[1], outputs[0]) < 1e-5


@pytest.mark.parametrize(("kind", "fields"), [("gqa", {}), ("mla", {"latent_norm": False})], ids=["gqa", "mla"])
def test_shapes_are_read_without_weights(kind, fields):
    model = random_model(kind, **fields)
    shape = read_heads(model, 0).k.shape
    assert read_heads(model.to("meta"), 0).k.shape == shape
