"""Load models under tensor parallelism and save what they compute, for `test_ranks.py`.

torchrun --nproc_per_node 4 tests/ranks/ranks_worker.py FOLDER TP FSDP

FOLDER has a folder for each model. Rank 0 writes FOLDER/ranks.pt: by model logits, tokens, gradients, losses of three
steps and the rank's share of the parameters of attention; or the message of the error.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from modeling_gqa import GQAForCausalLM
from modeling_gqa.common import muon
from modeling_gqa.common.muon import MuonAdamW
from modeling_gqa.training.trainer import muon_groups

IDS = torch.randint(3, 101, (4, 12), generator=torch.Generator().manual_seed(1))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: GQAForCausalLM, ids: torch.Tensor, group=None) -> list[float]:
    """Losses of three steps of Muon and AdamW; the mean over the processes of `group`, whose rows differ.

    Muon computes in float32, also where the CPU is fast in bfloat16, which would round the same gradients differently.
    """
    optimizer = MuonAdamW(muon_groups(model, (), 0.0), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        with patch.object(muon, "computing_dtype", return_value=torch.float32):
            optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss, group=group)
            loss = loss / group.size()
        losses.append(loss.item())
    return losses


def compute(model: Any) -> dict[str, Any]:
    """Logits, greedy tokens, gradients and losses of a model in one process or over ranks of tensor parallelism."""
    model.eval()
    result: dict[str, Any] = {}
    with torch.no_grad():
        result["logits"] = whole(model(IDS).logits)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    result["tokens"] = model.generate(IDS[:, :5], **options)
    result["static"] = model.generate(IDS[:, :5], **options, cache_implementation="static", disable_compile=True)
    model(IDS, labels=IDS).loss.backward()
    result["gradients"] = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    attention = [p for name, p in model.named_parameters() if "self_attn" in name]
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in attention)
    result["share"] = local / sum(p.numel() for p in attention)
    result["losses"] = train(model, IDS)
    return result


def main(folder: Path, tp: int, fsdp: int) -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for directory in sorted(path for path in folder.iterdir() if path.is_dir()):
        sizes: Any = {"tp_size": tp} if fsdp == 1 else {"tp_size": tp, "fsdp_size": fsdp}
        try:
            model = GQAForCausalLM.from_pretrained(
                directory, dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
            )
        except ValueError as error:
            results[directory.name] = str(error)
            continue
        if fsdp == 1:
            results[directory.name] = compute(model)
        else:
            mesh = model._mesh_manager.get_mesh("fsdp") if hasattr(model, "_mesh_manager") else None
            rows = IDS.chunk(fsdp)[mesh.get_local_rank()]
            losses = train(model.eval(), rows, mesh.get_group())
            results[directory.name] = {"losses": losses, "weights": {n: whole(p) for n, p in model.named_parameters()}}
    if dist.get_rank() == 0:
        torch.save(results, folder / "ranks.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    # Threads of gloo outlive destroy_process_group here. One that takes the GIL while Python ends aborts the process,
    # which was seen once (https://github.com/pytorch/pytorch/pull/179291).
    os._exit(0)
