"""FSDP2 on the model's plan: of two processes, and times tensor parallelism on a mesh of 2 x 2."""

import pytest
import torch
from ranks_worker import IDS, train
from test_ranks import MODELS, build, run


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp", "mesh"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    for name, fields in MODELS.items():
        build(fields).save_pretrained(folder / name)
    return run(folder, request.param, 2)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_equal_one_process(name, results):
    """Of two rows for each half of the mesh, where one process has all four."""
    model = build(MODELS[name]).eval()
    assert results[name]["losses"] == pytest.approx(train(model, IDS), abs=1e-5)
    for parameter, tensor in model.named_parameters():
        expected = tensor.detach()
        torch.testing.assert_close(results[name]["weights"][parameter], expected, atol=1e-5, rtol=1e-4, msg=parameter)
