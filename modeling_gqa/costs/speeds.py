"""How fast models decode here, measured in a process of its own.

Training sets OpenMP's policy of waiting, by which the many small steps of decoding take twice as long. A new process
has the policy with which models are used.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from modeling_gqa_cli.errors import UserError

from ..common.progress import no_progress
from ..configuration_gqa import GQAConfig
from . import CostedModel
from .measuring import machine_name, measure_decoding

POLICY = "OMP_WAIT_POLICY"
Speeds = dict[str, dict[int, float]]  # milliseconds of a decoded token by model and context


def decoding_speeds(configs: Mapping[str, GQAConfig], contexts: Sequence[int]) -> Speeds:
    """Measure models in turn in a new process: on a GPU in bfloat16, else on the CPU in float32.

    Args:
        configs: of the models, by name; their weights are random.
        contexts: tokens in the cache at which a token of one sequence is decoded.

    Raises:
        UserError: they cannot be measured here.
    """
    policy = os.environ.pop(POLICY, None)  # the new process has what is left here
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure_here, configs, contexts).result()
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


def measure_here(configs: Mapping[str, GQAConfig], contexts: Sequence[int]) -> Speeds:
    """Measure in this process; arguments as for `decoding_speeds`."""
    device, dtype = device_and_dtype()
    models = [CostedModel(config, name) for name, config in configs.items()]
    decoded = measure_decoding(models, contexts, [1], dtype, device, no_progress)
    return {name: {token.context: token.milliseconds[name] for token in decoded} for name in configs}
