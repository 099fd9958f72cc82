"""TransMLA and MHA2MLA, as `benchmarks.peers` writes them, against their formulas in float64."""

import math

import pytest
import torch
from attention_oracle import (
    BIASES,
    CALIBRATION,
    PARTIAL,
    YARN,
    Grouped,
    distance,
    grouped,
    in_dtype,
    inputs,
    layer_inputs,
    layer_output,
    logits,
    random_model,
)
from small_models import make_model

from benchmarks.peers import mha2mla, plane_norms, transmla
from modeling_gqa_cli.errors import UserError


def causal(x: torch.Tensor, layer: Grouped, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Output (T, E) of `scores` (H, T, T) before scale and mask, and values (G, T, D)."""
    ahead = torch.ones(len(x), len(x)).triu(1).bool()
    weights = (scores / math.sqrt(layer.q.shape[1])).masked_fill(ahead, -math.inf).softmax(-1)
    return torch.einsum("htd,hed->te", weights @ values[layer.shared], layer.o) + layer.o_bias


def lags(x: torch.Tensor) -> torch.Tensor:
    time = torch.arange(len(x), dtype=torch.float64)
    return time[:, None] - time


def folded(layer: Grouped, z: torch.Tensor, fold: int) -> torch.Tensor:
    """Planes `z` (G, n, T) by fold of frequencies: (n / F, G F, T)."""
    return z.unflatten(1, (-1, fold)).movedim(1, 0).flatten(1, 2)


def transmla_formula(layer: Grouped, seen, derotated, x, rank: int, kept: int, fold: int) -> torch.Tensor:
    """Output (T, E) of a layer whose keys keep `kept` rotated components of each fold, from texts themselves.

    Args:
        seen, derotated: what the layer reads in the source, and where unkept components are no longer rotated.
    """
    n, folds = layer.planes, layer.planes // fold

    def components(name: str, text: torch.Tensor) -> torch.Tensor:
        return folded(layer, layer.complex_planes(layer.heads(text, name).mT), fold)

    samples = components("k", seen)
    turn = torch.linalg.svd(torch.cat((samples.real, samples.imag), dim=2))[0]  # (n / F, G F, G F), leading first

    def unrotated(text: torch.Tensor) -> torch.Tensor:  # (K, T)
        dropped = (turn.mT.to(torch.complex128) @ components("k", text))[:, kept:].flatten(0, 1)
        return torch.cat((dropped.real, dropped.imag, layer.heads(text, "k")[..., 2 * n :].mT.flatten(0, 1)))

    def values(text: torch.Tensor) -> torch.Tensor:  # (G D, T)
        return layer.heads(text, "v").mT.flatten(0, 1)

    norms = [part(derotated).norm(dim=1).mean() for part in (unrotated, values)]
    both = torch.cat((unrotated(derotated) / norms[0] * norms[1], values(derotated)))
    leading = torch.linalg.svd(both, full_matrices=False)[0][:, :rank]
    found = leading @ leading.T @ torch.cat((unrotated(x) / norms[0] * norms[1], values(x)))
    keys, brought = found.split((len(found) - len(values(x)), len(values(x))))
    keys = keys / norms[1] * norms[0]
    dropped = len(turn.mT[:, kept:].flatten(0, 1))
    planes = torch.complex(keys[:dropped], keys[dropped : 2 * dropped]).unflatten(0, (folds, -1))
    never = keys[2 * dropped :].unflatten(0, (len(layer.k), -1))  # (G, D - 2 n, T)

    rotating, scores = turn.mT.to(torch.complex128) @ components("k", x), []
    omega = layer.omega.unflatten(0, (folds, fold))[
        :, [c * fold // kept if kept <= fold else c % fold for c in range(kept)]
    ]
    turned = torch.exp(1j * omega[:, :, None, None] * lags(x))  # (n / F, kept, T, T)
    for h, g in enumerate(layer.shared):
        mine = layer.heads(x, "q")[h]  # (T, D)
        z = torch.zeros(len(layer.k), n, len(x), dtype=torch.complex128)
        z[g] = torch.complex(mine[:, :n], mine[:, n : 2 * n]).T
        query = turn.mT.to(torch.complex128) @ folded(layer, z, fold)  # (n / F, G F, T)
        score = torch.einsum("fct,fcs,fcts->ts", query[:, :kept], rotating[:, :kept].conj(), turned).real
        score = score + torch.einsum("fct,fcs->ts", query[:, kept:], planes.conj()).real
        scores.append(score + mine[:, 2 * n :] @ never[g])
    return causal(x, layer, torch.stack(scores), brought.unflatten(0, (len(layer.v), -1)).mT)


@pytest.mark.parametrize(
    ("fields", "fold", "size", "rank"),
    [
        ({}, 1, 16, 29),
        (BIASES, 4, 4, 31),
        ({"num_key_value_heads": 6}, 4, 4, 31),
        ({**BIASES, "num_key_value_heads": 3}, 2, 32, 7),
        ({"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5}}, 2, 4, 29),
    ],
    ids=str,
)
def test_transmla_equals_its_formula(fields, fold, size, rank):
    model = in_dtype(random_model("gqa", head_dim=16, **fields), torch.float64)
    layer = grouped(model, 1)
    derotated = transmla(model, CALIBRATION, min(32 * len(layer.k) - size, 66), size, fold)
    texts = layer_inputs(model, CALIBRATION)[1], layer_inputs(derotated, CALIBRATION)[1]
    converted = transmla(model, CALIBRATION, rank, size, fold)
    assert converted.config.kv_lora_rank == rank and converted.config.qk_rope_head_dim == size
    x = inputs(1)
    expected = transmla_formula(layer, *texts, x[0], rank, size // 2 // (layer.planes // fold), fold)
    assert distance(layer_output(converted, 1, x)[0], expected) < 1e-5
    assert distance(layer_output(model, 1, x)[0], expected) > 1e-2


def mha2mla_formula(layer: Grouped, seen, x, rank: int, kept: int) -> torch.Tensor:
    """Output (T, E) of a layer whose heads keep `kept` rotary planes, from the text that it reads."""
    n, groups, head_dim, hidden = layer.planes, len(layer.k), layer.k.shape[1], layer.k.shape[2]
    norms = [layer.complex_planes(layer.heads(seen, name).mT).abs().mean(2) for name in "qk"]
    chosen = torch.zeros(groups, head_dim, dtype=torch.bool)
    for g in range(groups):
        score = sum(norms[0][h] * norms[1][g] for h, shared in enumerate(layer.shared) if shared == g)
        for plane in sorted(range(n), key=lambda i: -score[i])[:kept]:
            chosen[g, plane] = chosen[g, plane + n] = True

    parts = [layer.k[~chosen], layer.v.reshape(-1, hidden)]
    left, values, right = torch.linalg.svd(torch.cat(parts), full_matrices=False)
    parts = (left[:, :rank] * values[:rank] @ right[:rank]).split([len(part) for part in parts])
    unrotated = torch.zeros_like(layer.k)
    unrotated[~chosen] = parts[0]
    values = parts[1].reshape(layer.v.shape) @ x.T + layer.v_bias[..., None]  # (G, D, T)
    zq, zk = (layer.complex_planes(layer.heads(x, name).mT) for name in "qk")
    turned, scores = torch.exp(1j * layer.omega[:, None, None] * lags(x)), []
    for h, g in enumerate(layer.shared):
        mask = chosen[g, :n, None]
        score = torch.einsum("nt,ns,nts->ts", zq[h] * mask, zk[g].conj(), turned).real
        scores.append(score + layer.heads(x, "q")[h] @ (unrotated[g] @ x.T))
    return causal(x, layer, torch.stack(scores), values.mT)


@pytest.mark.parametrize(("fields", "size", "rank"), [({}, 8, 23), (BIASES, 20, 30)], ids=str)
def test_mha2mla_equals_its_formula(fields, size, rank):
    model = in_dtype(random_model("gqa", **fields), torch.float64)
    layer = grouped(model, 1)
    converted = mha2mla(model, CALIBRATION, rank, size)
    x, seen = inputs(1), layer_inputs(model, CALIBRATION)[1]
    norms = [layer.complex_planes(layer.heads(seen, name).mT).abs().mean(2) for name in "qk"]
    assert distance(plane_norms(model, CALIBRATION)[1], norms[0].unflatten(0, (2, 3)).sum(1) * norms[1]) < 1e-5
    expected = mha2mla_formula(layer, seen, x[0], rank, size // 4)
    assert distance(layer_output(converted, 1, x)[0], expected) < 1e-5
    assert distance(layer_output(model, 1, x)[0], expected) > 1e-2


@pytest.mark.parametrize("convert", [transmla, mha2mla])
@pytest.mark.parametrize("fields", [{}, BIASES, {"rope_parameters": PARTIAL}, {"rope_parameters": YARN}], ids=str)
def test_all_planes_rotated_in_a_latent_that_holds_the_rest_change_nothing(convert, fields):
    """P = 2 n G, and the latent as large as it may be; FreqFold 1."""
    model = random_model("gqa", **fields)
    size = 2 * grouped(model, 0).planes * 2
    options = {"freqfold": 1} if convert is transmla else {}
    converted = convert(model, CALIBRATION, 2 * 2 * 14, size, **options)
    assert distance(logits(converted), logits(model)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "fields", "convert", "options", "said"),
    [
        ("gqa", {}, transmla, (20, 8, 4), "freqfold|qk_rope_head_dim"),
        ("gqa", {}, mha2mla, (20, 6), "equal numbers"),
        ("gqa", {"qk_norm": True}, transmla, (20, 14, 1), "qk_norm"),
        ("mla", {}, mha2mla, (20, 8), "is MLA"),
    ],
)
def test_what_cannot_be_converted_is_refused(kind, fields, convert, options, said):
    with pytest.raises(UserError, match=said):
        convert(make_model(kind, **fields), CALIBRATION, *options)
