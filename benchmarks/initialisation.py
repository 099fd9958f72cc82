"""Whether MLA trains better when the gains of its latents' norms begin at sqrt(hidden / rank) and not at 1.

    python -m benchmarks.initialisation runs/initialisation [--option of compare ...]

A latent has fewer numbers than the residual stream, so what is rebuilt from it begins sqrt(rank / hidden) as large as
what is projected from the stream. It is a comparison (`training.compare`) of models that differ in these first gains
alone: each learning rate is swept, and the best one is run over 3 seeds. The report lies in the folder. The same
command goes on where it was stopped.
"""

import json
import runpy
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from modeling_gqa.attention_latent import LatentAttention
from modeling_gqa.common.console import user_errors
from modeling_gqa.layers import GQARMSNorm
from modeling_gqa_cli.errors import UserError

SCALED = "scaled"  # in the names of the models whose gains begin at sqrt(hidden / rank)
LATENTS = {"quarter": 56, "eighth": 24}  # of the cache of tiny-mha, with rotary keys of 8
OPTIONS = {"max_steps": 300, "warmup_steps": 30, "eval_strategy": "no", "save_steps": 300, "bigram_baseline": False}


def compare_gains(argv: list[str]) -> None:
    """Compare models with and without the gain."""
    from training.compare import compare

    if not argv or argv[0].startswith("-"):
        raise UserError("name a folder: python -m benchmarks.initialisation FOLDER [--option of compare ...]")
    folder, *options = argv
    sizes = {"attention_kind": "mla", "qk_rope_head_dim": 8}
    kinds = {
        name: sizes | {"kv_lora_rank": rank}
        for part, rank in LATENTS.items()
        for name in (f"mla-{part}", f"mla-{part}-{SCALED}")
    }
    recipe = {
        "options": OPTIONS, "kinds": kinds, "match": "nothing", "jobs": 2, "output_dir": folder,
        "learning_rates": [1.5e-3, 3e-3, 6e-3, 1.2e-2],
        "launcher": shlex.join([sys.executable, "-m", "benchmarks.initialisation", "--run"]),
    }  # fmt: skip
    with TemporaryDirectory() as directory:
        path = Path(directory) / "gains.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        compare([str(path), *options])


def run(module: str, *arguments: str) -> None:
    """Run a module as the launcher of a comparison does, with scaled gains where the run's name says so."""
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    output = next(argument for argument in arguments if argument.startswith("--output_dir="))
    build = AutoModelForCausalLM.from_config

    def build_scaled(*args: Any, **options: Any) -> Any:
        return scale_latents(build(*args, **options))

    with patch.object(AutoModelForCausalLM, "from_config", build_scaled if SCALED in Path(output).name else build):
        runpy.run_module(module, run_name="__main__")


@torch.no_grad()
def scale_latents(model: Any) -> Any:
    """Set the gains of the latents' norms to sqrt(hidden / rank), and return the model."""
    for layer in model.modules():
        if isinstance(layer, LatentAttention):
            for norm in (getattr(layer, "q_a_layernorm", None), layer.kv_a_layernorm):
                if isinstance(norm, GQARMSNorm):
                    norm.weight.fill_((model.config.hidden_size / norm.weight.shape[0]) ** 0.5)
    return model


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
    else:
        with user_errors():
            compare_gains(sys.argv[1:])
