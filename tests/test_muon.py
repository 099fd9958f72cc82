"""Muon and AdamW as one optimizer, against torch's own two."""

import copy
import io

import pytest
import torch
from torch import nn

from modeling_gqa.common.muon import MuonAdamW

RATE, DECAY = 0.05, 0.1


@pytest.mark.parametrize(("instructions", "tolerance"), [("AVX512", 1e-5), ("AVX2", 0.02)])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_it_is_torchs_muon_and_adamw(shape, instructions, tolerance, monkeypatch):
    """Nearly bit for bit in bfloat16, and to its rounding in float32, which a CPU without AVX-512 multiplies in."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    torch.manual_seed(0)
    first, bias, gradients = torch.randn(shape), torch.randn(7), torch.randn(4, *shape)
    options = {"lr": RATE, "weight_decay": DECAY}

    def trained(*kinds):
        matrix, vector = nn.Parameter(first.clone()), nn.Parameter(bias.clone())
        optimizers = [kind(matrix, vector) for kind in kinds]
        for gradient in gradients:
            matrix.grad, vector.grad = gradient.clone(), gradient[0, :7].clone()
            for optimizer in optimizers:
                optimizer.step()
        return matrix.detach() - first, vector.detach() - bias

    ours = trained(
        lambda matrix, vector: MuonAdamW([{"params": [matrix], "muon": True}, {"params": [vector]}], **options)
    )
    theirs = trained(
        lambda matrix, _: torch.optim.Muon([matrix], adjust_lr_fn="match_rms_adamw", **options),
        lambda _, vector: torch.optim.AdamW([vector], **options),
    )
    assert (ours[0] - theirs[0]).norm() < tolerance * theirs[0].norm()
    assert torch.equal(ours[1], theirs[1])


def test_a_step_has_the_singular_values_of_the_rate():
    """Without "rms" about 1 times the rate, as five iterations bring them; a matrix without a gradient stays."""
    torch.manual_seed(0)
    matrix, still = nn.Parameter(torch.zeros(8, 20)), nn.Parameter(torch.ones(2, 2))
    optimizer = MuonAdamW([{"params": [matrix, still], "muon": True, "rms": None}], lr=RATE, weight_decay=DECAY)
    matrix.grad = torch.randn(8, 20)
    optimizer.step()
    values = torch.linalg.svdvals(matrix.detach()) / RATE
    assert values.min() > 0.6 and values.max() < 1.3 and torch.equal(still.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("rms", [None, 0.2])
def test_parts_of_a_matrix_are_matrices_of_their_own(rms):
    """Two halves of the rows step as two matrices do."""
    torch.manual_seed(0)
    first, gradients = torch.randn(12, 30), torch.randn(3, 12, 30)
    whole, halves = nn.Parameter(first.clone()), [nn.Parameter(half.clone()) for half in first.chunk(2)]
    kinds = {"muon": True, "rms": rms}
    optimizers = [
        MuonAdamW([{"params": parameters, "parts": parts, **kinds}], lr=RATE, weight_decay=DECAY)
        for parameters, parts in (([whole], 2), (halves, 1))
    ]
    for gradient in gradients:
        whole.grad = gradient.clone()
        for half, part in zip(halves, gradient.chunk(2), strict=True):
            half.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole.detach(), torch.cat([half.detach() for half in halves]))


def test_a_saved_state_goes_on_exactly():
    """Also under a schedule, which changes the rates of all groups."""
    torch.manual_seed(0)
    gradients = torch.randn(6, 4, 5)

    def fresh():
        matrix, vector = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5))
        optimizer = MuonAdamW([{"params": [matrix], "muon": True}, {"params": [vector]}], lr=RATE)
        return [matrix, vector], optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)

    def train(parameters, optimizer, schedule, some):
        for gradient in some:
            parameters[0].grad, parameters[1].grad = gradient.clone(), gradient[0].clone()
            optimizer.step()
            schedule.step()

    whole, stopped = fresh(), fresh()
    train(*whole, gradients)
    train(*stopped, gradients[:3])
    file = io.BytesIO()
    torch.save([stopped[1].state_dict(), stopped[2].state_dict()], file)
    file.seek(0)
    resumed = fresh()
    with torch.no_grad():
        for parameter, trained in zip(resumed[0], copy.deepcopy(stopped[0]), strict=True):
            parameter.copy_(trained)
    for part, state in zip(resumed[1:], torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, gradients[3:])
    assert all(torch.equal(a, b) for a, b in zip(whole[0], resumed[0], strict=True))
