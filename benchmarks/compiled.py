"""Our decoding compiled by torch.compile over the static cache, against the same model run eagerly.

    python -m benchmarks.compiled --kinds gqa mla

Once warm, a recompilation is an error.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import CompileConfig

from .decode import TokenClock
from .measure import describe_machine, milliseconds, ratio
from .models import Sizes, make_pair
from .report import parse_arguments, print_machine, print_table, save

COLUMNS = {
    "kind": "",
    "dtype": "",
    "length": "",
    "dynamic_ms": ".1f",
    "static_ms": ".1f",
    "compiled_ms": ".1f",
    "ratio": ".2f",
    "ratio_low": ".2f",
    "ratio_high": ".2f",
    "warm_up_s": ".0f",
}


@dataclass
class CompiledArguments:
    """Models to compile."""

    kinds: list[str] = field(default_factory=lambda: ["gqa", "mla"])
    length: int = field(default=256, metadata={"help": "tokens of the prompt"})
    tokens: int = field(default=24, metadata={"help": "tokens to generate in a round"})
    rounds: int = 5
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})


def seconds_per_token(model, cache: str, compiled: bool, arguments: CompiledArguments) -> float:
    """Median over the tokens after the first of one `generate`."""
    clock = TokenClock(arguments.device)
    ids = torch.ones(1, arguments.length, dtype=torch.long, device=arguments.device)
    config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    # On the CPU, generate compiles only when told so.
    config._compile_all_devices = True  # type: ignore[assignment]
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=arguments.tokens,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[clock],
        cache_implementation=cache,
        **({"compile_config": config} if compiled else {"disable_compile": True}),
    )
    return statistics.median(clock.seconds())


def compiled_row(kind: str, sizes: Sizes, dtype: torch.dtype, arguments: CompiledArguments) -> dict:
    """Eager over the dynamic and the static cache, and compiled over the static one; the ratio is to the first."""
    model, _ = make_pair(kind, sizes, dtype, arguments.device)
    ways = {"dynamic": ("dynamic", False), "static": ("static", False), "compiled": ("static", True)}
    begin = time.perf_counter()
    seconds_per_token(model, *ways["compiled"], arguments)
    warm_up = time.perf_counter() - begin
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                times[name].append(seconds_per_token(model, *way, arguments))
    return {
        "kind": kind,
        "dtype": str(dtype)[6:],
        "length": arguments.length,
        **{f"{name}_ms": milliseconds(values) for name, values in times.items()},
        **ratio(times["dynamic"], times["compiled"]),
        "warm_up_s": warm_up,
    }


def main(arguments: CompiledArguments, sizes: Sizes) -> None:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    machine = describe_machine(arguments.device, dtypes)
    print_machine(machine)
    rows = [compiled_row(kind, sizes, dtype, arguments) for dtype in dtypes for kind in arguments.kinds]
    print_table("decoding with torch.compile, milliseconds per token", rows, COLUMNS)
    save(arguments.output, "compiled", " ".join(sys.argv), machine, sizes=vars(sizes), rows=rows)


if __name__ == "__main__":
    main(*parse_arguments(CompiledArguments, Sizes))
