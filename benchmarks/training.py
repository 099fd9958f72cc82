"""Time and peak memory of a training step (forward and backward), ours against transformers' own models.

    python -m benchmarks.training --length 4096 --vocab_size 49152 --hidden_size 512

Memory is measured in a process per model: the peak of its resident memory (CUDA: of allocated memory) over what it was
before the model was built. Our loss is computed in chunks by default, in time and in memory alike.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import torch

from modeling_gqa.costs import training_flops

from .measure import describe_machine, floor_milliseconds, in_turn, milliseconds, peak_bytes, ratio, reset_peak
from .models import BASELINES, Sizes, make_pair
from .report import parse_arguments, print_machine, print_table, save

COLUMNS = {
    "kind": "",
    "baseline": "",
    "dtype": "",
    "length": "",
    "ours_ms": ".0f",
    "theirs_ms": ".0f",
    "ratio": ".2f",
    "ratio_low": ".2f",
    "ratio_high": ".2f",
    "floor_ms": ".0f",
    "ours_over_floor": ".2f",
    "theirs_over_floor": ".2f",
    "ours_mib": ".0f",
    "theirs_mib": ".0f",
    "memory": ".2f",
}


@dataclass
class TrainingArguments:
    """Steps to measure."""

    kinds: list[str] = field(default_factory=lambda: ["gqa", "mla"])
    length: int = field(default=4096, metadata={"help": "tokens of the one row of a step"})
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget: float = field(default=10.0, metadata={"help": "seconds to spend on a kind"})
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})
    measure_memory: str | None = field(default=None, metadata={"help": "KIND-SIDE: print one model's peak and exit"})


@dataclass
class TrainingSizes(Sizes):
    """A small model with a large vocabulary."""

    vocab_size: int = 49152
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    kv_lora_rank: int = 128


def make_step(model, length: int, device: str):
    """A function that computes loss and gradients of one row of random tokens."""
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    model.train()

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def step_bytes(kind: str, side: str, sizes: Sizes, length: int, dtype: torch.dtype, device: str) -> int:
    """Peak memory of a step, the model's weights and gradients included."""
    before = reset_peak(device)
    models = make_pair(kind, sizes, dtype, device, share=True)
    model = models[("ours", "theirs").index(side)]
    del models
    make_step(model, length, device)()
    return peak_bytes(device) - before


def peak_in_process(kind: str, side: str, dtype: str, arguments: TrainingArguments, sizes: Sizes) -> int:
    command = [sys.executable, "-m", "benchmarks.training", "--measure_memory", f"{kind}-{side}", "--dtypes", dtype]
    for name, value in {"length": arguments.length, "device": arguments.device, **asdict(sizes)}.items():
        command += [f"--{name}", str(value)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def training_row(kind: str, sizes: Sizes, dtype: torch.dtype, arguments: TrainingArguments, machine: dict) -> dict:
    """Time of both sides in turn, then memory of each in a process of its own."""
    ours, theirs = make_pair(kind, sizes, dtype, arguments.device, share=False)
    steps = {
        name: make_step(model, arguments.length, arguments.device)
        for name, model in (("theirs", theirs), ("ours", ours))
    }
    times = in_turn(steps, arguments.device, arguments.budget)
    floor = floor_milliseconds(machine, dtype, 0, training_flops(ours.config, 1, arguments.length))
    name = str(dtype)[6:]
    peaks = {side: peak_in_process(kind, side, name, arguments, sizes) for side in ("ours", "theirs")}
    return {
        "kind": kind,
        "baseline": BASELINES[kind],
        "dtype": name,
        "length": arguments.length,
        "ours_ms": milliseconds(times["ours"]),
        "theirs_ms": milliseconds(times["theirs"]),
        **ratio(times["theirs"], times["ours"]),
        "floor_ms": floor,
        "ours_over_floor": milliseconds(times["ours"]) / floor,
        "theirs_over_floor": milliseconds(times["theirs"]) / floor,
        "ours_mib": peaks["ours"] / 2**20,
        "theirs_mib": peaks["theirs"] / 2**20,
        "memory": peaks["ours"] / peaks["theirs"],
    }


def main(arguments: TrainingArguments, sizes: TrainingSizes) -> None:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    if arguments.measure_memory:
        kind, side = arguments.measure_memory.split("-")
        print(step_bytes(kind, side, sizes, arguments.length, dtypes[0], arguments.device))
        return
    machine = describe_machine(arguments.device, dtypes)
    print_machine(machine)
    rows = [training_row(kind, sizes, dtype, arguments, machine) for dtype in dtypes for kind in arguments.kinds]
    print_table("a training step, milliseconds and MiB", rows, COLUMNS)
    save(arguments.output, "training", " ".join(sys.argv), machine, sizes=asdict(sizes), rows=rows)


if __name__ == "__main__":
    main(*parse_arguments(TrainingArguments, TrainingSizes))
