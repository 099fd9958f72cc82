"""What Muon gives in place of AdamW: the quickstart's validation loss by tokens, with the learning rate swept for both.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --steps 400 --rates 6e-3 --seeds 42 43 44 --overrides "--lr_scheduler_type linear"
    python -m benchmarks.optimizers --optimizers muon muon-apart --overrides "--preset tiny-mla"

`muon-apart` is Muon with each projection that MLA stacks in one weight as a matrix of its own. Each run is one of
`pretrain`. Rows that the file of results holds already stay, and are not run again.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from modeling_gqa.attention_latent import LatentAttention
from modeling_gqa.common import muon
from training.pretrain import pretrain

from .measure import describe_machine
from .report import RESULTS, ResultRows, print_table

COLUMNS = {
    "recipe": "",
    "optimizer": "",
    "options": "",
    "steps": ",",
    "learning_rate": "g",
    "seed": "",
    "loss": ".4f",
    "seconds": ".0f",
}
KEY = ("recipe", "optimizer", "options", "steps", "learning_rate", "seed")


def pretrain_apart() -> None:
    """Pretrain as the command line says, with a step of Muon for each projection that MLA stacks in one weight.

    In `kv_a_proj_with_mqa` they are the latent's and the rotary key's, in `kv_b_proj` each head's keys and its values.
    A weight is told by its shape, so no other matrix of the model may have the shape of these two.
    """
    stacked: dict[tuple[int, ...], list[int]] = {}  # the rows of the parts
    initialize, whole = LatentAttention.__init__, muon.orthogonal

    def noted(layer: LatentAttention, *values: Any) -> None:
        initialize(layer, *values)
        heads = layer.kv_b_proj.out_features // (layer.qk_nope_head_dim + layer.v_head_dim)
        stacked[tuple(layer.kv_a_proj_with_mqa.weight.shape)] = [layer.kv_lora_rank, layer.qk_rope_head_dim]
        stacked[tuple(layer.kv_b_proj.weight.shape)] = [layer.qk_nope_head_dim, layer.v_head_dim] * heads

    def apart(matrix: torch.Tensor) -> torch.Tensor:
        parts = matrix.split(stacked.get(tuple(matrix.shape), len(matrix)))
        # The optimizer multiplies by the root of the weight's longer side; a part's own is due.
        scales = [(max(part.shape) / max(matrix.shape)) ** 0.5 for part in parts]
        return torch.cat([whole(part) * scale for part, scale in zip(parts, scales, strict=True)])

    with patch.object(LatentAttention, "__init__", noted), patch.object(muon, "orthogonal", apart):
        pretrain(sys.argv[1:])
    if not stacked:
        sys.exit("muon-apart is for a model with MLA: name one, as by --overrides '--preset tiny-mla'")


def run(row: dict[str, Any]) -> dict[str, Any]:
    """Train as `row` says and return it with what came out."""
    with tempfile.TemporaryDirectory() as folder:
        start = ["-m", "training.pretrain"]
        if row["optimizer"] == "muon-apart":
            start = ["-c", "from benchmarks.optimizers import pretrain_apart; pretrain_apart()"]
        command = [sys.executable, *start, row["recipe"], f"--output-dir={folder}/run"]
        command += [f"--max-steps={row['steps']}", f"--learning-rate={row['learning_rate']}", f"--seed={row['seed']}"]
        command += ["--save-strategy=no", "--no-publish", "--no-bigram-baseline", *shlex.split(row["options"])]
        command.append(f"--muon={row['optimizer'] != 'adamw'}")  # whatever the recipe has
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "run" / "results.json").read_text(encoding="utf-8"))
    return row | {
        "loss": found["validation_loss"],
        "tokens": found["tokens_seen"],
        "seconds": found["training_seconds"],
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and write what the command line asks for; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--json", type=Path, default=RESULTS / "optimizers.json")
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon", "muon-apart"), default=["adamw", "muon"])
    parser.add_argument("--steps", nargs="+", type=int, default=[800, 1600])
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3, 6e-3, 1.2e-2, 2.4e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--overrides", default="", help="further options of pretrain")
    options = parser.parse_args(arguments)
    machine = describe_machine("cpu", [torch.float32])
    command = " ".join(["python -m benchmarks.optimizers", *(sys.argv[1:] if arguments is None else arguments)])
    rows = ResultRows(options.json, KEY)
    for steps in options.steps:
        for seed in options.seeds:
            for rate in options.rates:
                for optimizer in options.optimizers:
                    values = options.recipe, optimizer, options.overrides, steps, rate, seed
                    row = dict(zip(KEY, values, strict=True))
                    if not rows.has(row):
                        rows.put(run(row), command, machine)
    print_table("Validation loss, nats per token", rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
