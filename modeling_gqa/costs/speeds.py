"""How fast models decode, read and train here, measured in a process of its own.

Training sets OpenMP's policy of waiting (`training/__init__.py`), by which the many small steps of decoding take twice
as long. A new process has the policy with which models are used.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..common.errors import UserError
from ..common.progress import no_progress
from ..configuration_gqa import GQAConfig
from . import Model
from .measuring import machine_name, measure_decoding, measure_prompts, measure_training

POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Speed:
    """How fast a model is, with random weights.

    Args:
        decode_milliseconds: of one token of all rows, by context.
        prompt_tokens_per_second: of a prompt; nan where it was not measured.
        training_tokens_per_second: of forward and backward, without the optimizer; nan where it was not measured.
    """

    decode_milliseconds: dict[int, float] = field(default_factory=dict)
    prompt_tokens_per_second: float = math.nan
    training_tokens_per_second: float = math.nan


def measure_speeds(
    configs: Mapping[str, GQAConfig],
    contexts: Sequence[int],
    prompt_tokens: int,
    rows: int = 1,
    training_block: tuple[int, int] | None = None,
) -> dict[str, Speed]:
    """Measure models in turn in a new process: on a GPU in bfloat16, else on the CPU in float32.

    Args:
        configs: of the models, by name.
        contexts: tokens in the cache at which decoding is measured.
        prompt_tokens: length of the prompt.
        rows: that decode at once.
        training_block: rows and tokens of a training step; `None`: it is not measured.

    Raises:
        UserError: they cannot be measured here.
    """
    told = {
        "configs": {name: config.to_json_string(use_diff=False) for name, config in configs.items()},
        "contexts": list(contexts),
        "prompt_tokens": prompt_tokens,
        "rows": rows,
        "training_block": training_block,
    }
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(told),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:]
        raise UserError(f"speeds could not be measured: {' '.join(last)}")
    found = json.loads(process.stdout.splitlines()[-1])
    return {
        name: Speed({int(tokens): time for tokens, time in speed.pop("decode_milliseconds").items()}, **speed)
        for name, speed in found.items()
    }


def device_and_dtype() -> tuple[str, torch.dtype]:
    """Return on what, and in which dtype, models are measured."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def where_measured() -> str:
    """Return the machine's name and the dtype, in words."""
    device, dtype = device_and_dtype()
    return f"{machine_name(device)}, {str(dtype).removeprefix('torch.')}"


def measure_here(told: dict[str, Any]) -> dict[str, Speed]:
    """Measure in this process what `measure_speeds` was told."""
    device, dtype = device_and_dtype()
    models = [Model(GQAConfig.from_dict(json.loads(text)), name) for name, text in told["configs"].items()]
    decoded = measure_decoding(models, told["contexts"], [told["rows"]], dtype, device, no_progress)
    prompts = measure_prompts(models, told["prompt_tokens"], dtype, device)
    block = told["training_block"]
    training = dict.fromkeys(prompts, math.nan)
    if block is not None:
        rows, tokens = block
        training = measure_training(models, rows, tokens, dtype, device)
    return {
        name: Speed({token.context: token.milliseconds[name] for token in decoded}, prompts[name], training[name])
        for name in prompts
    }


if __name__ == "__main__":
    print(json.dumps({name: asdict(speed) for name, speed in measure_here(json.load(sys.stdin)).items()}))
