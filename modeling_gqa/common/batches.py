"""Batches of model inputs, models that are run on them for a while, and the device that both are on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from modeling_gqa_cli.errors import UserError, install_extra, one_line

# Model inputs by name; "input_ids" (B, T) is always there.
Batch = dict[str, torch.Tensor]
# The entries of a batch that a model's layers use; labels, for instance, are not among them.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
CGROUP = Path("/sys/fs/cgroup")


def first_batches(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Return the batches from the first to the one with which `tokens` tokens are reached."""
    found, room = [], tokens
    for batch in batches:
        if room > 0:
            found.append(batch)
            room -= batch["input_ids"].numel()
    return found


@contextmanager
def evaluating(*models: torch.nn.Module) -> Iterator[None]:
    """Put models in evaluation mode, and afterwards back in the mode that they were in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


@contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    """Remove hooks afterwards, given the handles that registering them returned."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def usable_device(device: str | None) -> str:
    """Return the device that is named, or "cuda" where it is, else "cpu"; raises `UserError`."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(
            f"--device={device} cannot be used: give one device, such as cpu or cuda:1 ({one_line(error)})"
        ) from error
    return device


def computing_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return `dtype`, or float32 where `device` is a CPU that multiplies `dtype` many times slower than float32.

    That is float16, and bfloat16 without AVX-512.
    """
    slow = dtype == torch.float16 or (
        dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    )
    return torch.float32 if slow and device == "cpu" else dtype


def free_memory(device: str) -> int:
    """Return the bytes that are free on a device, and to this process in a container of Linux (cgroup v2).

    Raises `UserError` without psutil, which comes with accelerate.
    """
    if device.startswith("cuda"):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # that torch keeps
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        import psutil
    except ImportError:
        raise UserError(f"to see how much memory is free takes psutil: {install_extra('conversion')}") from None
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container; "max" says that it has no limit
        most, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, most - used)
    return free
