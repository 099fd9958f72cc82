"""What Muon gives in place of AdamW: the quickstart's validation loss by tokens, with the learning rate swept for both.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --steps 400 --rates 6e-3 --seeds 42 43 44 --overrides "--lr_scheduler_type linear"

Each run is one of `pretrain`. Rows that the file of results holds already stay, and are not run again.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

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


def run(row: dict[str, Any]) -> dict[str, Any]:
    """Train as `row` says and return it with what came out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "training.pretrain", row["recipe"], f"--output-dir={folder}/run"]
        command += [f"--max-steps={row['steps']}", f"--learning-rate={row['learning_rate']}", f"--seed={row['seed']}"]
        command += ["--save-strategy=no", "--no-publish", "--no-bigram-baseline", *shlex.split(row["options"])]
        command.append(f"--muon={row['optimizer'] == 'muon'}")  # whatever the recipe has
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
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
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
