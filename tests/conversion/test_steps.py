"""Steps of training at the end: sizes of steps that follow what a linear layer computes."""

import pytest
import torch
from attention_oracle import inputs, random_model
from torch import nn

from modeling_gqa.conversion import steps
from modeling_gqa.conversion.fitting import refine
from modeling_gqa.conversion.steps import centred, observed, relative_muon, step_at
from modeling_gqa.layers import GQAHeadLinear


def layers() -> tuple[nn.ModuleList, torch.Tensor]:
    """A linear layer with a bias, one without, and a norm; with inputs far from zero, in batches of two documents."""
    torch.manual_seed(1)
    return nn.ModuleList((nn.Linear(6, 4), nn.Linear(6, 5, bias=False), nn.RMSNorm(6))), torch.randn(3, 2, 40, 6) + 5


def test_the_sizes_are_those_of_the_outputs_over_tokens():
    """By NumPy's means and variances, in float64."""
    module, text = layers()
    with observed(module) as seen:
        for x in text:
            for layer in module:
                layer(x)
    with centred(module, seen) as sizes:
        found = {name: sizes[parameter] for name, parameter in module.named_parameters()}
    weights = [layer.weight.detach().double().numpy() for layer in module[:2]]
    x = text.flatten(0, 2).double().numpy()
    outputs = [x @ weight.T for weight in weights]
    expected = {
        "0.weight": (outputs[0].var(0).sum() / x.var(0).sum()) ** 0.5,
        "0.bias": outputs[0].var(0).mean() ** 0.5,
        "1.weight": ((outputs[1] ** 2).sum() / (x**2).sum()) ** 0.5,
        "2.weight": 1.0,
    }
    assert found == pytest.approx(expected, rel=1e-4)


def test_centring_changes_no_output_and_keeps_the_mean_from_steps():
    """The mean output is the bias's alone meanwhile, and the trained layer computes the same without its hook."""
    module, text = layers()
    layer, x = module[0], text[0]
    with torch.no_grad():
        before = layer(x)
        with observed(layer) as seen:
            layer(x)
        with centred(layer, seen) as sizes:
            torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.bias, before.mean((0, 1)), rtol=1e-4, atol=1e-4)
            step, _ = torch.linalg.qr(torch.randn(6, 4))
            layer.weight.add_(step.T, alpha=0.1 * sizes[layer.weight])
            stepped = layer(x)
        torch.testing.assert_close(layer(x), stepped, rtol=1e-5, atol=1e-5)
    change = stepped - before
    assert change.mean((0, 1)).abs().max() < 1e-4
    assert 0 < change.square().mean() ** 0.5 <= 0.1 * before.var((0, 1), correction=0).sum().sqrt()


def test_a_layer_that_computes_nothing_is_not_trained():
    """Neither outputs of zero nor inputs of zero make a size that is not a number."""
    for factor in (0.0, 1.0):
        layer = nn.Linear(3, 2, bias=False)
        nn.init.constant_(layer.weight, factor)
        with observed(layer) as seen:
            layer(torch.full((5, 3), 1 - factor))
        with centred(layer, seen) as sizes:
            assert sizes[layer.weight] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_of_half_precision_is_trained_in_bfloat16(dtype):
    """In float16 gradients of a mean over many tokens are zeros. The layer has its own dtype again afterwards."""
    model, x, seen = random_model("gqa").to(dtype), inputs(rows=2).to(dtype), []
    layer, attention = model.model.layers[0], model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
    rotation = model.model.rotary_emb["14"](x, torch.arange(x.shape[1])[None])
    example = (x, {"position_embeddings": rotation}, x, torch.ones(x.shape[:2]))
    refine(attention, [example] * 2, 2, 1e-2, layer.attention_output)
    assert set(seen) == {torch.bfloat16} and attention.q_proj.weight.dtype == dtype


def test_maps_of_heads_step_as_linear_layers_do():
    """A step changes the outputs of each head as much as those of a linear layer of as many numbers."""
    torch.manual_seed(1)
    module, x = nn.ModuleList((GQAHeadLinear(8, 16, 20), nn.Linear(16, 20, bias=False))), torch.randn(3, 8, 50, 16)
    with torch.no_grad(), observed(module) as seen:
        before = [layer(x) for layer in module]
    with centred(module, seen) as sizes:
        optimizer = relative_muon(sizes, module)
        with torch.enable_grad():
            sum((layer(x) * torch.randn_like(y)).sum() for layer, y in zip(module, before, strict=True)).backward()
        step_at(optimizer, 0.01)
        changes = [((layer(x) - y).norm() / y.norm()).item() for layer, y in zip(module, before, strict=True)]
    assert changes[0] == pytest.approx(changes[1], rel=0.2) and changes[0] > 0.006


@pytest.mark.parametrize(("shape", "parts"), [((12, 9), 3), ((12, 8), 1), ((8, 12), 1), ((10, 9), 1), ((12,), 1)])
def test_wide_matrices_step_by_head(shape, parts, monkeypatch):
    """More than `WIDE` rows and columns, and rows for all heads; each part's singular values are the step's size."""
    monkeypatch.setattr(steps, "WIDE", 8)
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = relative_muon({parameter: 0.5}, nn.Module(), heads=3)
    parameter.grad = torch.randn(shape)
    step_at(optimizer, 0.1)
    assert parameter.grad is None and optimizer.param_groups[0]["parts"] == parts
    for part in parameter.detach().chunk(parts) if len(shape) == 2 else ():
        values = torch.linalg.svdvals(part) / (0.1 * 0.5)
        assert values.min() > 0.5 and values.max() < 1.3, values
