"""Layers converted in order on text: memory, documents and padding, and the fit of a finished conversion."""

import gc
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, distance, random_model
from small_models import make_batch
from torch._subclasses.fake_tensor import FakeTensor

from modeling_gqa.conversion import (
    compare_predictions,
    convert_model,
    fitting,
    sequential,
    target_config,
)
from modeling_gqa.conversion.fitting import RIDGES, Regression, error_weights, fit
from modeling_gqa.conversion.layers.moments import product
from modeling_gqa.conversion.streams import FIRST_SHARE, FOLDS, first_tokens, folds, streams

MLA: dict[str, Any] = {"kv_lora_rank": 20, "qk_rope_head_dim": 8}


def numbers_held() -> int:
    """Numbers in all tensors that exist, those that share memory counted once."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor):  # those of other tests
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
    return sum(storages.values())


def held(model, target, batches, folder=None) -> list[int]:
    """What is held when each layer's turn comes, beyond what was before."""
    found, before = [], numbers_held()

    def watched(layers):
        for index in layers:
            found.append(numbers_held() - before)
            yield index

    convert_model(model, target, batches, folder=folder, refine=2, show_progress=lambda _: watched)
    return found


def test_memory_grows_by_the_new_layers_alone(tmp_path, monkeypatch, objects_set_aside):
    """Neither with the text nor with the layers once states go to a file; where there is a folder, layers are in it."""
    monkeypatch.setattr("modeling_gqa.conversion.streams.IN_MEMORY", 0)
    model = random_model("mha", num_hidden_layers=6)
    target = target_config(model.config, "gqa", num_key_value_heads=2)
    batches = [make_batch(6, 24, seed=seed) for seed in range(9)]
    short, long = held(model, target, batches[:3]), held(model, target, batches)
    row = 24 * model.config.hidden_size
    layer = 2 * 66 * (6 + 2) * 14  # queries and outputs of six heads, keys and values of two
    assert all(abs(a - b) < row for a, b in zip(short, long, strict=True))
    assert all(b - a < layer + row for a, b in pairwise(long[1:])), long
    on_disk = held(model, target, batches, tmp_path)
    assert on_disk[-1] - on_disk[1] < row and len(list(tmp_path.iterdir())) == 6


def alone(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The documents of a batch as rows of their own, without padding."""
    found = []
    for ids, mask, positions in zip(*(batch[name] for name in batch), strict=True):
        starts = [*((positions == 0) & mask.bool()).nonzero().flatten().tolist(), len(ids)]
        for start, end in pairwise(starts):
            found.append({"input_ids": ids[start:end][mask[start:end].bool()][None]})
    return found


def packed() -> dict[str, torch.Tensor]:
    """A row of documents of 9, 1 and 14 tokens."""
    positions = torch.cat([torch.arange(length) for length in (9, 1, 14)])[None]
    return {**make_batch(1, 24, seed=5), "position_ids": positions}


def padded(side: str) -> dict[str, torch.Tensor]:
    """A row of 24 tokens of which the first or last three are padding."""
    return {name: x[2:] for name, x in make_batch(3, 24, side, seed=6).items()}


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}], ids=["full", "window"])
@pytest.mark.parametrize(("kind", "sizes"), [("gqa", {"num_key_value_heads": 2}), ("mla", MLA)], ids=["gqa", "mla"])
@pytest.mark.parametrize("batch", [packed(), padded("left"), padded("right")], ids=["packed", "left", "right"])
def test_documents_are_converted_on_as_if_they_came_alone(batch, kind, sizes, fields):
    """Neither packing nor padding changes the conversion, in its statistics nor in its fits."""
    model = random_model("mha", attention_bias=True, **fields).double()
    target = target_config(model.config, kind, **sizes)
    row = make_batch(1, 24, seed=7)  # so that the longest row is the same
    batches = [{"input_ids": row["input_ids"]}]
    whole, _ = convert_model(model, target, [batch, *batches], refine=0)
    apart, _ = convert_model(model, target, [*alone(batch), *batches], refine=0)
    for name, x in whole.state_dict().items():
        # The fits' products are in float32.
        assert distance(x, apart.state_dict()[name]) < 1e-4, name


def test_documents_go_to_four_folds_in_turn():
    """They are counted over all batches. Padding begins none."""
    rows, three = make_batch(4, 6), {"input_ids": torch.zeros(3, 5, dtype=torch.long)}
    many = [rows, packed(), rows, three]  # 4 + 3 + 4 + 3 documents
    found = zip(folds(many), map(first_tokens, many), strict=True)
    assert [fold[first].tolist() for fold, first in found] == [[0, 1, 2, 3], [0, 1, 2], [3, 0, 1, 2], [3, 0, 1]]
    (fold,) = folds([packed()])
    assert fold[0].bincount()[2] == 14 and fold[0].diff().min() == 0 and fold[0, 10:].eq(2).all()
    (fold,) = folds([padded("left")])
    assert not fold.any()
    left = make_batch(3, 24, "left", seed=6)
    (fold,) = folds([left])
    assert [fold[row][left["attention_mask"][row] == 1].unique().tolist() for row in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(("kind", "sizes"), [("mqa", {}), ("mla", MLA)], ids=["mqa", "mla"])
def test_the_error_is_what_the_attention_leaves(kind, sizes):
    """In float64, by the layer's output in the whole model: of all tokens, and of the first fold's documents."""
    model = random_model("mha", attention_bias=True).double().eval()
    target, layer = target_config(model.config, kind, layers=[0], **sizes), model.model.layers[0]
    closed, _ = convert_model(model, target, CALIBRATION, refit=False)
    attention, seen = closed.model.layers[0].self_attn, []
    hooks = [
        m.self_attn.register_forward_hook(lambda *a: seen.append(a[2][0])) for m in (layer, closed.model.layers[0])
    ]
    total, weights, documents = torch.zeros(2), torch.zeros(2), 0
    with torch.no_grad():
        for batch in CALIBRATION:
            seen.clear()
            x = model.model.embed_tokens(batch["input_ids"])
            for each in (model, closed):
                each(**batch)
            power = (x + seen[0]).square().mean(-1)
            weight = torch.where(batch["position_ids"] == 0, max(FIRST_SHARE * 24, 1), 1.0) / power
            number = documents + (batch["position_ids"] == 0).flatten().cumsum(0).view_as(batch["position_ids"]) - 1
            documents = int(number.max()) + 1
            error, first = weight * (seen[0] - seen[1]).square().sum(-1), number % 4 == 0
            total += torch.stack((error.sum(), error[first].sum())).float()
            weights += torch.stack((weight.sum(), weight[first].sum())).float()
    for hook in hooks:
        hook.remove()
    with torch.no_grad(), streams(model, CALIBRATION) as text:
        text.collect(0)
        before = attention.o_proj.weight.clone()
        found = fit(text, 0, attention, refit=False)
        assert found == (*(pytest.approx(x, rel=1e-5) for x in (total / weights).tolist()), None)
        assert torch.equal(attention.o_proj.weight, before)
        fitted = fit(text, 0, attention)  # on 432 tokens of noise: it helps, or is not kept
        assert fitted.error <= found.error and (fitted.ridge is None) == torch.equal(attention.o_proj.weight, before)


def test_each_fold_judges_the_fit_to_the_others():
    """In float64, with every ridge; the best one's fit is to all folds."""
    model = random_model("mha", attention_bias=True).double().eval()
    closed, _ = convert_model(model, target_config(model.config, "mqa", layers=[0]), LONG_CALIBRATION, refit=False)
    attention = closed.model.layers[0].self_attn
    with torch.no_grad(), streams(model, LONG_CALIBRATION) as text:
        text.collect(0)
        rows = []
        for passage, heads in text.attend(0, attention, math.inf):
            hidden, after = passage.states
            x = torch.nn.functional.pad(heads, (0, 1), value=1.0)
            rows.append([t.flatten(0, 1) for t in (x, after - hidden - attention.o_proj(heads))])
            rows[-1] += [t.flatten() for t in (error_weights(passage).double(), passage.fold)]
        x, residual, weight, fold = (torch.cat(each) for each in zip(*rows, strict=True))

        def solution(chosen: torch.Tensor, ridge: float) -> torch.Tensor:
            weighted = weight[chosen, None] * x[chosen]
            second = weighted.mT @ x[chosen]
            added = ridge * second.diagonal()[:-1].mean() * torch.eye(len(second)).double()
            return torch.linalg.solve(second + added, weighted.mT @ residual[chosen])

        errors = {}
        for ridge in RIDGES:
            left = torch.stack([residual - x @ solution(fold != number, ridge) for number in range(FOLDS)])
            own = weight * left[fold, torch.arange(len(fold))].square().sum(-1)
            first = fold == 0
            errors[ridge] = (own.sum() / weight.sum()).item(), (own[first].sum() / weight[first].sum()).item()
        best = min(errors, key=lambda ridge: errors[ridge][0])
        wanted = attention.o_proj.weight + solution(fold >= 0, best)[:-1].mT
        found = fit(text, 0, attention)
        assert found == (*(pytest.approx(error, rel=1e-5) for error in errors[best]), best)
        assert torch.allclose(attention.o_proj.weight, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "sizes"), [("gqa", {"num_key_value_heads": 2}), ("mla", MLA)], ids=["gqa", "mla"])
def test_steps_that_do_harm_on_held_out_text_are_dropped(kind, sizes, monkeypatch):
    """Steps that are far too large, the last to nan, and a fit to one document leave the conversion as it was."""
    model = random_model("mha")
    target = target_config(model.config, kind, **sizes)
    plain, _ = convert_model(model, target, LONG_CALIBRATION, refine=0)
    helped, done = convert_model(model, target, LONG_CALIBRATION, refine=4)
    assert any(layer["learning_rate"] for layer in done["layers"])
    assert not torch.equal(
        plain.model.layers[0].self_attn.q_proj.weight, helped.model.layers[0].self_attn.q_proj.weight
    )
    monkeypatch.setattr(sequential, "LEARNING_RATES", (math.inf, 1.0, 1e-3))
    _, done = convert_model(model, target, LONG_CALIBRATION, refine=4)
    assert {layer["learning_rate"] for layer in done["layers"]} - {None} == {1e-3}
    monkeypatch.setattr(sequential, "LEARNING_RATES", (1.0, 10.0, math.inf))
    guarded, done = convert_model(model, target, LONG_CALIBRATION, refine=1)
    assert not any(layer["learning_rate"] for layer in done["layers"])
    for name, x in plain.state_dict().items():
        assert torch.equal(x, guarded.state_dict()[name]), name
    alone = [make_batch(1, 24, seed=5)]
    closed, _ = convert_model(model, target, alone, refit=False)
    guarded, done = convert_model(model, target, alone)
    assert not any(layer["learning_rate"] or layer["ridge"] for layer in done["layers"])
    for name, x in closed.state_dict().items():
        assert torch.equal(x, guarded.state_dict()[name]), name


def test_a_fit_says_what_error_is_left():
    """It is the weighted mean of the squared norms of the residuals, before and after its correction."""
    generator = torch.Generator().manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(5, 3, bias=bias).requires_grad_(False)
        x, target = torch.randn(40, 5, generator=generator), torch.randn(40, 3, generator=generator)
        weight = torch.rand(40, generator=generator)
        regression, other = Regression(linear), Regression(linear)
        for sums, part in ((regression, slice(0, 25)), (other, slice(25, 40))):
            sums.add(x[part], (target - linear(x))[part], weight[part])
        change = regression.solution()
        alone = (weight[25:] * (target - linear(x))[25:].square().sum(-1)).sum().item() / weight[25:].sum().item()
        assert other.error() == pytest.approx(alone)
        judged = other.error(change)
        regression.include(other)
        whole = regression.solution()
        regression.apply(whole)
        left = (weight * (target - linear(x)).square().sum(-1)).sum().item() / weight.sum().item()
        assert regression.error(whole) == pytest.approx(left)
        regression.apply(change - whole)
        alone = (weight[25:] * (target - linear(x))[25:].square().sum(-1)).sum().item() / weight[25:].sum().item()
        assert judged == pytest.approx(alone)


def test_a_fit_of_many_outputs_is_judged_in_some_directions(monkeypatch):
    """All directions of a turned basis give the error itself, `DIRECTIONS` random ones about the error."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(5, 300).requires_grad_(False)
    x, residual = torch.randn(200, 5, generator=generator), torch.randn(200, 300, generator=generator)
    turned = torch.linalg.qr(torch.randn(300, 300, generator=generator).double())[0]

    def errors() -> tuple[float, float]:
        regression = Regression(linear)
        regression.add(x, residual, torch.ones(200))
        judging = regression.judging()
        assert regression.cross.shape == (6, 300)
        return judging.error(), judging.error(judging.solution())

    exact = errors()
    assert exact[0] == pytest.approx(residual.square().sum(-1).mean().item())
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "directions", lambda outputs, device: turned)
        assert errors() == pytest.approx(exact)
    monkeypatch.setattr(fitting, "DIRECTIONS", 128)
    fitting.directions.cache_clear()
    found = errors()
    fitting.directions.cache_clear()
    assert found != exact and found == pytest.approx(exact, rel=4 * (2 / 128) ** 0.5)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-9), (torch.float32, 1e-6)], ids=str)
def test_products_are_as_fine_as_what_the_model_computes(dtype, error):
    """Factors that the model gave are multiplied exactly, weighted ones are rounded as the model's dtype does, and the
    setting of PyTorch by which the CPU does so is the same afterwards."""
    generator, settings = torch.Generator().manual_seed(0), torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    # Numbers of 8 bits, as bfloat16 has: float32 holds every sum of 300 products, in whatever order a CPU adds them.
    whole = torch.randint(-128, 129, (2, 300, 20), generator=generator).to(dtype)
    assert torch.equal(product(whole, whole, dtype), whole.double().mT @ whole.double())
    x, weight = torch.randn(2, 300, 20, generator=generator).to(dtype), torch.rand(300, 1, generator=generator)
    weighted = weight * x.float()
    assert distance(product(weighted, x, dtype), weighted.double().mT @ x.double()) < error
    assert settings.fp32_precision == before


def test_a_token_of_zeros_does_not_count_infinitely():
    """Where a document begins with a token whose embedding is zeros, the fit is finite and comes nearer."""
    model = random_model("mha").eval()
    model.model.embed_tokens.weight.data[3] = 0
    batches = [{"input_ids": batch["input_ids"].clone()} for batch in CALIBRATION]
    for batch in batches:
        batch["input_ids"][:, 0] = 3
    target = target_config(model.config, "gqa", num_key_value_heads=2)
    kls = [
        compare_predictions(model, convert_model(model, target, batches, refit=refit)[0], batches)["kl"]
        for refit in (True, False)
    ]
    assert kls[0] < kls[1]
