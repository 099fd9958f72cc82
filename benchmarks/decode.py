"""Time per decoded token, ours against transformers' own models, through `generate`.

    python -m benchmarks.decode --lengths 128 2048 8192 --batch_sizes 1 8 --dtypes float32 bfloat16

Caches are filled with random numbers in place of a prompt. Each round lets one side and then the other generate some
tokens from there; a round's time is the median token after the first. Tokens at which our cache is reallocated are
rare, and count in the mean alone; transformers' cache is copied at every token.
"""

import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation import StoppingCriteria

from modeling_gqa import ATTENTION_CLASSES, GQAConfig
from modeling_gqa.cache_layers import grow_in_place
from modeling_gqa.compatibility import CACHE
from modeling_gqa.costs import cache_bytes, count_parameters, decode_flops
from modeling_gqa.costs.measuring import filled_cache

from .measure import describe_machine, floor_milliseconds, milliseconds, ratio
from .models import BASELINES, Sizes, make_config, make_pair
from .report import parse_arguments, print_machine, print_table, save

COLUMNS = {
    "kind": "",
    "key_value_heads": "",
    "dtype": "",
    "batch": "",
    "length": "",
    "ours_ms": ".1f",
    "theirs_ms": ".1f",
    "ratio": ".2f",
    "ratio_low": ".2f",
    "ratio_high": ".2f",
    "floor_ms": ".1f",
    "ours_over_floor": ".2f",
    "theirs_over_floor": ".2f",
}
MEMORY_COLUMNS = {"kind": "", "tokens": "", "over_theoretical": ".2f", "worst_from_1024": ".2f"}


@dataclass
class DecodeArguments:
    """Cells to measure."""

    kinds: list[str] = field(default_factory=lambda: ["mha", "gqa", "mqa", "mla"])
    lengths: list[int] = field(default_factory=lambda: [128, 2048, 4096, 8192])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    key_value_heads: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8, 16],
        metadata={"help": "numbers of heads of GQA, measured at the largest batch and 2048 tokens"},
    )
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget: float = field(default=2.5, metadata={"help": "seconds to spend on a cell, rounds permitting"})
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})


class TokenClock(StoppingCriteria):
    """Notes the time after every token; never stops."""

    def __init__(self, device: str):
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, input_ids, scores, **kwargs):
        if self.device.startswith("cuda"):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> list[float]:
        """Time of each token after the first."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def generate(model, cache: DynamicCache, batch: int, length: int, tokens: int, device: str) -> list[float]:
    """Seconds of each of `tokens` tokens but the first, generated from the first `length` tokens of `cache`."""
    if cache.get_seq_length() > length:
        cache.crop(length - cache.get_seq_length())
    clock = TokenClock(device)
    ids = torch.ones(batch, length + 1, dtype=torch.long, device=device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    return clock.seconds()


@torch.no_grad()
def measure(models, batch: int, length: int, dtype: torch.dtype, device: str, budget: float) -> list[list[float]]:
    """Median seconds per token of each model (theirs, ours) in each round."""
    configs = [model.config if isinstance(model.config, GQAConfig) else models[-1].config for model in models]
    caches = [filled_cache(*pair, batch, length, dtype, device) for pair in zip(models, configs, strict=True)]

    def turn(index: int, tokens: int) -> float:
        return statistics.median(generate(models[index], caches[index], batch, length, tokens, device))

    both = sum(turn(index, 2) for index in range(len(models)))
    tokens = min(16, max(2, int(budget / both / 5)))
    rounds = min(9, max(3, int(budget / both / tokens)))
    times = [[turn(index, tokens) for index in range(len(models))] for _ in range(rounds)]
    return [list(side) for side in zip(*times, strict=True)]


def decode_row(
    kind: str, models, batch: int, length: int, dtype: torch.dtype, device: str, budget: float, machine
) -> dict:
    """One cell: times, their ratio, and the distance of both sides to the floor of what each must move and do."""
    ours, theirs = models
    times = dict(zip(("theirs", "ours"), measure((theirs, ours), batch, length, dtype, device, budget), strict=True))
    config = ours.config
    weights = count_parameters(config) - config.vocab_size * config.hidden_size  # the embedding is looked up
    nbytes = weights * dtype.itemsize + cache_bytes(config, batch, length, dtype)
    floor = floor_milliseconds(machine, dtype, nbytes, decode_flops(config, batch, length))
    expanded = floor_milliseconds(machine, dtype, nbytes, decode_flops(config, batch, length, absorbed=False))
    return {
        "kind": kind,
        "baseline": BASELINES[kind],
        "key_value_heads": config.num_key_value_heads if kind != "mla" else None,
        "dtype": str(dtype)[6:],
        "batch": batch,
        "length": length,
        "ours_ms": milliseconds(times["ours"]),
        "theirs_ms": milliseconds(times["theirs"]),
        **ratio(times["theirs"], times["ours"]),
        "floor_ms": floor,
        "ours_over_floor": milliseconds(times["ours"]) / floor,
        "theirs_over_floor": milliseconds(times["theirs"]) / expanded,
    }


@torch.no_grad()
def memory_row(kind: str, sizes: Sizes, dtype: torch.dtype, tokens: int) -> dict:
    """Storage of one layer of the cache that `generate` makes, over the bytes of its tokens, decoded one by one."""
    config = make_config(kind, sizes)
    cache = grow_in_place(DynamicCache(config=config))
    shapes = ATTENTION_CLASSES[kind].cache_shapes(config.per_layer_config[0])
    keys, values = (torch.zeros(1, heads, 1, size, dtype=dtype) for heads, size in shapes)
    worst = 0.0
    for count in range(1, tokens + 1):
        held = cache.update(keys, values, 0)
        stored = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
        over = stored / (count * sum(heads * size for heads, size in shapes) * dtype.itemsize)
        worst = max(worst, over) if count >= 1024 else worst
    return {"kind": kind, "tokens": tokens, "over_theoretical": over, "worst_from_1024": worst}


def main(arguments: DecodeArguments, sizes: Sizes) -> None:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    machine = describe_machine(arguments.device, dtypes)
    print_machine(machine)
    rows, by_heads = [], []
    cell: dict[str, Any] = {"device": arguments.device, "budget": arguments.budget, "machine": machine}
    for dtype in dtypes:
        for kind in arguments.kinds:
            models = make_pair(kind, sizes, dtype, arguments.device)
            for batch, length in itertools.product(arguments.batch_sizes, arguments.lengths):
                row = decode_row(kind, models, batch, length, dtype, **cell)
                rows.append(row)
                times = f"ours {row['ours_ms']:.1f} ms, {row['baseline']} {row['theirs_ms']:.1f} ms"
                print(f"{kind} {row['dtype']} batch {batch} length {length}: {times}, {row['ratio']:.2f}x", flush=True)
    for heads in arguments.key_value_heads:
        dtype, batch, length = dtypes[0], max(arguments.batch_sizes), 2048
        models = make_pair("gqa", sizes, dtype, arguments.device, heads)
        by_heads.append(decode_row("gqa", models, batch, length, dtype, **cell))
    memory = [memory_row(kind, sizes, dtypes[0], 8192) for kind in arguments.kinds]
    print_table("decoding, milliseconds per token", rows, COLUMNS)
    print_table("by key/value heads", by_heads, COLUMNS)
    print_table("cache storage over the bytes of its tokens", memory, MEMORY_COLUMNS)
    results = {"rows": rows, "by_heads": by_heads, "memory": memory}
    save(arguments.output, "decode", " ".join(sys.argv), machine, sizes=vars(sizes), **results)


if __name__ == "__main__":
    main(*parse_arguments(DecodeArguments, Sizes))
