"""How fast models decode, read and train here, measured in a process of its own.

Training sets OpenMP's policy of waiting, by which the many small steps of decoding take twice as long. A new process
has the policy with which models are used.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
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
    policy = os.environ.pop(POLICY, None)  # the new process has what is left here
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure_here, configs, contexts, prompt_tokens, training_block).result()
    except Exception as error:  # too little memory, by which the process may also be killed
        raise UserError(f"speeds could not be measured: {error}") from error
    finally:
        if policy is not None:
            os.environ[POLICY] = policy


def device_and_dtype() -> tuple[str, torch.dtype]:
    """Return on what, and in which dtype, models are measured."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def where_measured() -> str:
    """Return the machine's name and the dtype, in words."""
    device, dtype = device_and_dtype()
    return f"{machine_name(device)}, {str(dtype).removeprefix('torch.')}"


def measure_here(
    configs: Mapping[str, GQAConfig], contexts: Sequence[int], prompt_tokens: int, training_block: tuple[int, int]
) -> dict[str, Speed]:
    """Measure in this process; arguments as for `measure_speeds`."""
    device, dtype = device_and_dtype()
    models = [CostedModel(config, name) for name, config in configs.items()]
    decoded = measure_decoding(models, contexts, [1], dtype, device, no_progress)

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

    prompts = tokens_per_second(read, 1, prompt_tokens)
    training = tokens_per_second(train, *training_block)
    return {
        name: Speed({token.context: token.milliseconds[name] for token in decoded}, prompts[name], training[name])
        for name in prompts
    }
