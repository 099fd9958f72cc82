"""Time to read a prompt, ours against transformers' own models: attention alone, and the whole model.

    python -m benchmarks.prefill --lengths 2048 --dtypes float32 bfloat16

Attention alone is one layer's attention function as each side calls it, without projections; with `padding`, under the
mask of a batch whose rows have prompts of different lengths.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward

from modeling_gqa.attention_functions import sdpa_attention_forward
from modeling_gqa.attention_latent import pad_heads
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
    "attention_ms": ".1f",
    "their_attention_ms": ".1f",
    "attention_ratio": ".2f",
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


def attention_functions(module: Any, batch: int, length: int, padding: bool, dtype: torch.dtype, device: str) -> dict:
    """Ours and theirs over the same random queries, keys and values of a prompt."""

    def random(heads: int, size: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, size, dtype=dtype, device=device)

    mask = None
    if padding:
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device).tril()
        mask[:, :, length // 8 :, : length // 8] = False
    if hasattr(module, "kv_lora_rank"):
        count = module.kv_b_proj.out_features // (module.qk_nope_head_dim + module.v_head_dim)
        sizes = module.qk_head_dim, module.qk_head_dim, module.v_head_dim
        query, key, value = (random(count, size) for size in sizes)
    else:
        heads = [layer.out_features // module.head_dim for layer in (module.q_proj, module.k_proj, module.v_proj)]
        query, key, value = (random(count, module.head_dim) for count in heads)

    def ours() -> tuple[torch.Tensor, None]:
        padded = pad_heads(query, key, value)
        return sdpa_attention_forward(module, padded[0], padded[1], padded[2], mask, scaling=module.scaling)

    return {
        "theirs": lambda: stock_sdpa_attention_forward(module, query, key, value, mask, scaling=module.scaling),
        "ours": ours,
    }


@torch.no_grad()
def prefill_row(kind: str, models, length: int, padding: bool, dtype: torch.dtype, arguments, machine: dict) -> dict:
    """One cell: attention alone and the whole model, with logits of the last token."""
    batch, device, budget = arguments.batch_size * (1 + padding), arguments.device, arguments.budget
    ours, theirs = models
    module = ours.model.layers[0].self_attn
    alone = in_turn(attention_functions(module, batch, length, padding, dtype, device), device, budget / 2)
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
        "attention_ms": milliseconds(alone["ours"]),
        "their_attention_ms": milliseconds(alone["theirs"]),
        "attention_ratio": ratio(alone["theirs"], alone["ours"])["ratio"],
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
