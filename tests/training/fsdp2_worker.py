"""Two steps under FSDP2, on the plan that the model and its configuration carry.

torchrun --nproc_per_node 2 tests/training/fsdp2_worker.py OUTPUT
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from modeling_gqa import GQAConfig, GQAForCausalLM


def build() -> GQAForCausalLM:
    torch.manual_seed(0)
    kinds = {0: {"attention_kind": "mha"}, 2: {"attention_kind": "mqa"}, 3: {"attention_kind": "mla"}}
    config = GQAConfig(  # type: ignore[call-arg]
        vocab_size=101,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
        per_layer_config=kinds,  # type: ignore[call-arg]
    )
    return GQAForCausalLM(config)


def make_batch() -> dict[str, torch.Tensor]:
    """Four rows, each of two packed documents."""
    ids = torch.randint(0, 101, (4, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(13), torch.arange(7)]).expand(4, 20)  # (4, 20)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def shard(model: GQAForCausalLM) -> list[str]:
    """Apply the plan to the modules that it names; return their names."""
    styles = {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in model.fsdp_plan.items()
        if re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern
    }
    for name, style in styles.items():
        fully_shard(model.get_submodule(name), reshard_after_forward=style == "free_full_weight")
    fully_shard(model)
    return sorted(styles)


def main(output: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build()
    names = shard(model)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = {name: tensor[rank::world_size] for name, tensor in make_batch().items()}
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world_size)
        losses.append(mean.item())
    parameters = list(model.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(output / "checkpoint", state_dict=state)
        report = {
            "world_size": world_size,
            "parameters": len(parameters),
            "dtensors": sum(isinstance(parameter, DTensor) for parameter in parameters),
            "sharded_modules": names,
            "losses": losses,
        }
        (output / "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads of gloo outlive destroy_process_group here. One that takes the GIL while Python ends aborts the process,
    # which was seen once (https://github.com/pytorch/pytorch/pull/179291).
    os._exit(0)
