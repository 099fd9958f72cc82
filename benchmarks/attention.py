"""Attention alone, one token over a filled cache, ours and transformers', against the roofline.

    python -m benchmarks.attention --lengths 8192 --batch_sizes 8

One layer without its projections (MLA: with `kv_b_proj` or what it is folded into). The floor is the longer of reading
the cache once and of doing the operations, at rates measured in the same run.
"""

import sys
from dataclasses import dataclass, field

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward

from modeling_gqa import ATTENTION_CLASSES, GQAConfig
from modeling_gqa.attention_functions import sdpa_attention_forward
from modeling_gqa.attention_latent import absorbed_attention_forward
from modeling_gqa.cache_layers import KeyValueBuffer

from .measure import describe_machine, floor_milliseconds, in_turn, milliseconds, ratio
from .models import BASELINES, Sizes, make_config
from .report import parse_arguments, print_machine, print_table, save

COLUMNS = {
    "kind": "",
    "dtype": "",
    "batch": "",
    "length": "",
    "ours_ms": ".2f",
    "theirs_ms": ".2f",
    "ratio": ".2f",
    "floor_ms": ".2f",
    "ours_over_floor": ".2f",
    "over_mha": ".2f",
    "over_float32": ".2f",
}


@dataclass
class AttentionArguments:
    """Cells to measure."""

    lengths: list[int] = field(default_factory=lambda: [8192])
    batch_sizes: list[int] = field(default_factory=lambda: [8])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget: float = field(default=2.5, metadata={"help": "seconds to spend on a cell"})
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})


def attention_functions(kind: str, config: GQAConfig, batch: int, length: int, dtype: torch.dtype, device: str) -> dict:
    """Ours and theirs over the same random cache; theirs finds it dense, as a concatenation leaves it."""
    layer = ATTENTION_CLASSES[kind](config, 0).to(device, dtype).eval()
    heads, size = config.num_attention_heads, config.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    if kind != "mla":
        query = random(batch, heads, 1, size)
        keys, values = (random(batch, config.num_key_value_heads, length, size) for _ in range(2))
        held = _as_cached(keys, values)
        return {
            "theirs": lambda: stock_sdpa_attention_forward(layer, query, keys, values, None, scaling=layer.scaling),
            "ours": lambda: sdpa_attention_forward(layer, query, *held, None, scaling=layer.scaling),
        }
    query, query_rope = random(batch, heads, 1, config.qk_nope_head_dim), random(batch, heads, 1, size)
    latent, key_rope = random(batch, 1, length, config.kv_lora_rank), random(batch, 1, length, size)
    held = _as_cached(latent, key_rope)
    weight = layer.get_parameter("kv_b_proj.weight")

    def expanded():
        key, value = layer.expand_kv(latent, key_rope)
        return stock_sdpa_attention_forward(
            layer, torch.cat((query, query_rope), dim=-1), key, value, None, scaling=layer.scaling
        )

    return {
        "theirs": expanded,
        "ours": lambda: absorbed_attention_forward(query, query_rope, *held, weight, None, layer.scaling, fused=True),
    }


def _as_cached(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = KeyValueBuffer(keys[:, :, :-1], values[:, :, :-1], keys.shape[2])
    return buffer.append(keys[:, :, -1:], values[:, :, -1:])


def floor(kind: str, config: GQAConfig, batch: int, length: int, dtype: torch.dtype, machine: dict) -> float:
    """Milliseconds to read one layer's cache once, or to do what it takes: the longer."""
    attention, layer = ATTENTION_CLASSES[kind], config.per_layer_config[0]
    nbytes = batch * length * sum(attention.cache_sizes(layer)) * dtype.itemsize
    operations = [attention.multiplications(layer, 1, keys, absorbed=True) for keys in (0, 1)]
    per_key = operations[1] - operations[0]
    up_projection = 0
    if kind == "mla":
        up_projection = layer.num_attention_heads * layer.kv_lora_rank * (layer.qk_nope_head_dim + layer.v_head_dim)
    return floor_milliseconds(machine, dtype, nbytes, 2 * batch * (length * per_key + up_projection))


@torch.no_grad()
def attention_row(
    kind: str,
    sizes: Sizes,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    budget: float,
    machine: dict,
    heads: int | None = None,
) -> dict:
    """One cell: times of one layer's attention, their ratio, and our distance to the floor."""
    config = make_config(kind, sizes, heads)
    times = in_turn(attention_functions(kind, config, batch, length, dtype, device), device, budget)
    least = floor(kind, config, batch, length, dtype, machine)
    return {
        "kind": kind if heads is None else f"gqa-{heads}",
        "baseline": BASELINES[kind],
        "dtype": str(dtype)[6:],
        "batch": batch,
        "length": length,
        "ours_ms": milliseconds(times["ours"]),
        "theirs_ms": milliseconds(times["theirs"]),
        **ratio(times["theirs"], times["ours"]),
        "floor_ms": least,
        "ours_over_floor": milliseconds(times["ours"]) / least,
    }


def main(arguments: AttentionArguments, sizes: Sizes) -> None:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    machine = describe_machine(arguments.device, dtypes)
    print_machine(machine)
    rows: list[dict] = []
    cells = [("mha", None), ("gqa", None), ("gqa", 2), ("mqa", None), ("mla", None)]
    for batch in arguments.batch_sizes:
        for length in arguments.lengths:
            measured: dict[tuple[str, str], float] = {}
            for dtype in dtypes:
                for kind, heads in cells:
                    row = attention_row(
                        kind, sizes, batch, length, dtype, arguments.device, arguments.budget, machine, heads
                    )
                    measured[row["kind"], row["dtype"]] = row["ours_ms"]
                    row["over_mha"] = row["ours_ms"] / measured["mha", row["dtype"]]
                    row["over_float32"] = row["ours_ms"] / measured.get((row["kind"], "float32"), float("nan"))
                    rows.append(row)
    print_table("attention alone, one token, one layer, milliseconds", rows, COLUMNS)
    save(arguments.output, "attention", " ".join(sys.argv), machine, sizes=vars(sizes), rows=rows)


if __name__ == "__main__":
    main(*parse_arguments(AttentionArguments, Sizes))
