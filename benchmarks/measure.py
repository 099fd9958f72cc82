"""Times of two or more functions run in turn, and what the machine can do at best."""

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from modeling_gqa.costs.measuring import machine_name, matmul_rate, read_bandwidth, seconds


def in_turn(functions: dict[str, Callable[[], object]], device: str, budget: float) -> dict[str, list[float]]:
    """Times of functions called in turn: once to warm up, then 3 to 30 rounds in about `budget` seconds."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for rounds in range(30):
        if rounds >= 3 and sum(map(sum, times.values())) > budget:
            break
        for name, function in functions.items():
            times[name].append(seconds(function, device))
    return times


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times longer theirs takes: the median over rounds, and the quartiles."""
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def milliseconds(times: list[float]) -> float:
    return statistics.median(times) * 1000


def describe_machine(device: str, dtypes: list[torch.dtype]) -> dict:
    """Name, read bandwidth in GB/s, and matrix product rate in GFLOP/s by dtype, measured now."""
    return {
        "machine": machine_name(device),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
        "read_gb_s": read_bandwidth(device) / 1e9,
        "matmul_gflop_s": {str(dtype)[6:]: matmul_rate(device, dtype) / 1e9 for dtype in dtypes},
    }


def floor_milliseconds(machine: dict, dtype: torch.dtype, nbytes: float, flops: float) -> float:
    """The roofline: the longer of reading `nbytes` and computing `flops` at the measured rates."""
    compute = flops / (machine["matmul_gflop_s"][str(dtype)[6:]] * 1e9)
    return max(nbytes / (machine["read_gb_s"] * 1e9), compute) * 1000


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process now, or at its peak so far."""
    name = "VmHWM" if peak else "VmRSS"
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak(device: str) -> int:
    """Begin to look for the peak of memory anew; returns the bytes held now, on the GPU or by the process."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident_bytes()


def peak_bytes(device: str) -> int:
    """Largest memory held since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident_bytes(peak=True)
