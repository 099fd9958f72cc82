"""How fast models decode, read and train here, measured in a process of its own.

Training sets OpenMP's policy of waiting, by which the many small steps of decoding take twice as long. A new process
has the policy with which models are used.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from modeling_gqa_cli.errors import UserError

from ..common.progress import no_progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from . import CostedModel
from .measuring import in_turn, machine_name, measure_decoding, seconds

POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Speed:
    """How fast a model is, with random weights.

    Args:
        decode_milliseconds: of one token of one sequence, by context.
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
    training_block: tuple[int, int],
) -> dict[str, Speed]:
    """Measure models in turn in a new process: on a GPU in bfloat16, else on the CPU in float32.

    Args:
        configs: of the models, by name.
        contexts: tokens in the cache at which decoding is measured.
        prompt_tokens: length of the prompt.
        training_block: sequences and tokens of a training step.

    Raises:
        UserError: they cannot be measured here.
    """
    told = {
        "configs": {name: config.to_json_string(use_diff=False) for name, config in configs.items()},
        "contexts": list(contexts),
        "prompt_tokens": prompt_tokens,
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
    models = [CostedModel(GQAConfig.from_dict(json.loads(text)), name) for name, text in told["configs"].items()]
    decoded = measure_decoding(models, told["contexts"], [1], dtype, device, no_progress)

    def read(model: Any, ids: torch.Tensor) -> float:
        with torch.no_grad():
            return seconds(lambda: model(ids, logits_to_keep=1), device)

    def train(model: Any, ids: torch.Tensor) -> float:
        took = seconds(lambda: model(ids, labels=ids).loss.backward(), device)
        model.zero_grad()  # one model at a time has gradients
        return took

    def tokens_per_second(step: Callable[[Any, torch.Tensor], float], rows: int, tokens: int) -> dict[str, float]:
        ids = torch.ones(rows, tokens, dtype=torch.long, device=device)
        built = {model.name: GQAForCausalLM._from_config(model.config, dtype=dtype).to(device) for model in models}
        medians, _ = in_turn({name: partial(step, model, ids) for name, model in built.items()}, budget=6.0)
        return {name: rows * tokens / median for name, median in medians.items()}

    prompts = tokens_per_second(read, 1, told["prompt_tokens"])
    training = tokens_per_second(train, *told["training_block"])
    return {
        name: Speed({token.context: token.milliseconds[name] for token in decoded}, prompts[name], training[name])
        for name in prompts
    }


if __name__ == "__main__":
    print(json.dumps({name: asdict(speed) for name, speed in measure_here(json.load(sys.stdin)).items()}))
