"""Time to read a prompt, ours against transformers' own models.

    python -m benchmarks.prefill --lengths 2048 --dtypes float32 bfloat16

With `padding` a batch has a second row, whose prompt is shorter by an eighth.
"""

import sys
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from modeling_gqa.compatibility import CACHE
from modeling_gqa.costs import prefill_flops

from .measure import describe_machine, floor_milliseconds, in_turn, milliseconds, ratio
from .models import BASELINES, Sizes, make_pair
from .report import parse_arguments, print_machine, print_table, save

COLUMNS = {
    "kind": "",
    "dtype": "",
    "batch": "",
    "length": "",
    "padding": "",
    "ours_ms": ".1f",
    "theirs_ms": ".1f",
    "ratio": ".2f",
    "floor_ms": ".1f",
    "ours_over_floor": ".2f",
    "theirs_over_floor": ".2f",
}


@dataclass
class PrefillArguments:
    """Cells to measure."""

    kinds: list[str] = field(default_factory=lambda: ["mha", "gqa", "mqa", "mla"])
    lengths: list[int] = field(default_factory=lambda: [2048])
    batch_size: int = 1
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget: float = field(default=1.5, metadata={"help": "seconds to spend on a cell"})
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})


@dataclass
class PrefillSizes(Sizes):
    """Fewer layers: transformers' MLA takes seconds."""

    num_hidden_layers: int = 2


@torch.no_grad()
def prefill_row(kind: str, models, length: int, padding: bool, dtype: torch.dtype, arguments, machine: dict) -> dict:
    """One cell: the whole model, with logits of the last token."""
    batch, device, budget = arguments.batch_size * (1 + padding), arguments.device, arguments.budget
    ours, theirs = models
    ids = torch.ones(batch, length, dtype=torch.long, device=device)
    mask = torch.ones_like(ids)
    mask[1:, : length // 8] = 0

    def read(model):
        cache = DynamicCache(config=model.config)
        return lambda: (cache.reset(), model(ids, attention_mask=mask, logits_to_keep=1, **{CACHE: cache}))

    times = in_turn({"theirs": read(theirs), "ours": read(ours)}, device, budget)
    floor = floor_milliseconds(machine, dtype, 0, prefill_flops(ours.config, batch, length))
    return {
        "kind": kind,
        "baseline": BASELINES[kind],
        "dtype": str(dtype)[6:],
        "batch": batch,
        "length": length,
        "padding": "left" if padding else "none",
        "ours_ms": milliseconds(times["ours"]),
        "theirs_ms": milliseconds(times["theirs"]),
        **ratio(times["theirs"], times["ours"]),
        "floor_ms": floor,
        "ours_over_floor": milliseconds(times["ours"]) / floor,
        "theirs_over_floor": milliseconds(times["theirs"]) / floor,
    }


def main(arguments: PrefillArguments, sizes: PrefillSizes) -> None:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    machine = describe_machine(arguments.device, dtypes)
    print_machine(machine)
    rows = []
    for dtype in dtypes:
        for kind in arguments.kinds:
            models = make_pair(kind, sizes, dtype, arguments.device)
            for length in arguments.lengths:
                for padding in (False, True):
                    rows.append(prefill_row(kind, models, length, padding, dtype, arguments, machine))
    print_table("prefill, milliseconds", rows, COLUMNS)
    save(arguments.output, "prefill", " ".join(sys.argv), machine, sizes=vars(sizes), rows=rows)


if __name__ == "__main__":
    main(*parse_arguments(PrefillArguments, PrefillSizes))
