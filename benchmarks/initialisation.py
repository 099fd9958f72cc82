"""Whether MLA trains better when the gains of its latents' norms begin at sqrt(hidden / rank) or at 1.

    python -m benchmarks.initialisation runs/initialisation [--option of compare ...]

It is a comparison (`training.compare`) of models that differ in these first gains alone. Each learning rate is swept,
and the best one is run over 3 seeds. The report lies in the folder. The same command goes on where it was stopped.
"""

import json
import runpy
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from modeling_gqa import attention_latent
from training.console import main

AT_ONE = "gain-1"  # in the names of the models whose gains begin at 1
LATENTS = {"quarter": 56, "eighth": 24}  # of the cache of tiny-mha, with rotary keys of 8
OPTIONS = {"max_steps": 300, "warmup_steps": 30, "eval_strategy": "no", "save_steps": 300, "bigram_baseline": False}


def compare_gains(argv: list[str]) -> None:
    """Compare models with and without the gain."""
    from training.compare import compare

    folder, *options = argv
    sizes = {"attention_kind": "mla", "qk_rope_head_dim": 8}
    kinds = {
        name: sizes | {"kv_lora_rank": rank}
        for part, rank in LATENTS.items()
        for name in (f"mla-{part}", f"mla-{part}-{AT_ONE}")
    }
    recipe = {
        "options": OPTIONS, "kinds": kinds, "match": "nothing", "jobs": 2, "output_dir": folder,
        "learning_rates": [1.5e-3, 3e-3, 6e-3, 1.2e-2],
        "launcher": shlex.join([sys.executable, "-m", "benchmarks.initialisation", "--run"]),
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(f"{folder}.yaml")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    compare([str(path), *options])


def run(module: str, *arguments: str) -> None:
    """Run a module as the launcher of a comparison does, with gains of 1 where the run's name says so."""
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    output = next(argument for argument in arguments if argument.startswith("--output_dir="))
    gain = attention_latent.latent_gain if AT_ONE not in output else lambda hidden_size, rank: 1.0
    with patch.object(attention_latent, "latent_gain", gain):
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
    else:
        main(compare_gains)
