"""What a dry run says of memory, against what is there."""

import pytest
import torch
from small_models import make_model

from modeling_gqa.common.muon import MuonAdamW
from modeling_gqa.training.estimate import moment_bytes, saved_bytes
from modeling_gqa.training.trainer import muon_groups

LOGITS = 101 * 24  # of a row


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("at_once", [None, LOGITS // 3, 3 * LOGITS])  # the last: chunks for the batch and for no row
@pytest.mark.parametrize("half", [False, True])
def test_activations_are_what_a_step_saves(model_name, implementation, rows, at_once, half):
    model = make_model(model_name).train()
    model.set_attn_implementation(implementation)
    model.logits_at_once = at_once
    ids = torch.randint(3, 101, (rows, 24), generator=torch.Generator().manual_seed(1))

    def loss_of(tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # alive, so that no other has its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_of(ids)
    expected = sum(storage.nbytes() for storage in saved.values())
    assert saved_bytes(model, ids, loss_of) == pytest.approx(expected, rel=0.02) and model.logits_at_once == at_once


def test_an_optimizer_keeps_what_it_will():
    model = make_model("gqa")
    parameters = list(model.parameters())
    for optimizer in (
        torch.optim.SGD(parameters, lr=0.0),
        torch.optim.AdamW(parameters, lr=0.0),
        MuonAdamW(muon_groups(model, (), 0.0), lr=0.0),
    ):
        expected = moment_bytes(optimizer)
        for x in parameters:
            x.grad = torch.ones_like(x)
        optimizer.step()
        tensors = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
        assert sum(x.nbytes for x in tensors if x.numel() > 1) == expected
