"""Milliseconds per token over a quantized cache, against the same model with a cache of its own dtype.

    python -m benchmarks.quantized_decode --cells 1x4096 8x8192

A cell is B x S: B sequences of S tokens. Weights and cached numbers are random; of the time of a token they decide
nothing. "Coded" is a cache with bases, and the bits of `CODED`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from modeling_gqa import GQAForCausalLM, GQAQuantizedCache
from modeling_gqa.cache_layers import grow_in_place
from modeling_gqa.costs.measuring import fill_cache
from modeling_gqa.modeling_gqa import ATTENTION_CLASSES

from .measure import describe_machine, in_turn, milliseconds, ratio
from .models import Sizes, make_config
from .report import kebab_shown, print_machine, print_table, save

COLUMNS = {
    "kind": "", "batch": "", "length": "", "cache": "", "ms": ".1f", "ratio": ".2f", "ratio_low": ".2f",
    "ratio_high": ".2f", "bytes_per_token": ",",
}  # fmt: skip
FORMATS = (8, 6, 4, 3, 2, "fp8")
CODED = {6: 1 / 8, 4: 1 / 4, 3: 3 / 8, 2: 1 / 4}  # shares of the channels by bits, about those of a fifth of the bytes


def coded_layers(config: Any) -> list[dict[str, list]]:
    """`cache_quantization["layers"]` with the bits of `CODED`."""
    return [
        {
            name: [[round(share * size), bits] for bits, share in CODED.items()]
            for name, size in zip(kind.bits_fields, kind.cache_sizes(layer), strict=True)
        }
        for layer, kind in ((layer, ATTENTION_CLASSES[layer.attention_kind]) for layer in config.per_layer_config)
    ]


@torch.no_grad()
def measure(kind: str, batch: int, length: int, sizes: Sizes, dtype: torch.dtype, device: str, budget: float) -> list:
    """Rows of one cell: the cache of the model's own dtype, and one of each format."""
    with torch.device(device):
        config = make_config(kind, sizes)
        config.cache_quantization = {"layers": coded_layers(config)}
        model = GQAForCausalLM(config).to(dtype).eval()  # type: ignore[arg-type]
    caches: dict[str, Any] = {"own": grow_in_place(DynamicCache(config=model.config))}
    caches |= {str(bits): GQAQuantizedCache(model.config, {"nbits": bits}) for bits in FORMATS}
    caches["coded"] = GQAQuantizedCache(model.config)
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    steps: dict[str, Callable[[], object]] = {
        name: partial(model, token, past_key_values=fill_cache(cache, config, batch, length, dtype, device))
        for name, cache in caches.items()
    }
    times = in_turn(steps, device, budget)
    rows = []
    for name, cache in caches.items():
        held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        row: dict[str, Any] = {"kind": kind, "dtype": str(dtype)[6:], "batch": batch, "length": length, "cache": name}
        row |= {"ms": milliseconds(times[name]), "bytes_per_token": held // (batch * cache.layers[0].keys.shape[2])}
        rows.append(row | ratio(times[name], times["own"]))
    return rows


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, print and write what the command line asks for; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["mla", "gqa"])
    parser.add_argument("--cells", nargs="+", default=["1x4096", "8x8192"], help="such as 8x8192")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of a cell")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="benchmarks/results", help="directory of the JSON")
    options = kebab_shown(parser).parse_args(arguments)
    dtype, sizes = getattr(torch, options.dtype), Sizes(num_hidden_layers=options.layers)
    machine = describe_machine(options.device, [dtype])
    print_machine(machine)
    rows: list[dict] = []
    for kind in options.kinds:
        for cell in options.cells:
            batch, length = map(int, cell.split("x"))
            rows += measure(kind, batch, length, sizes, dtype, options.device, options.budget)
    print_table("Decoding over a quantized cache (ratio: times as long as over one of the dtype)", rows, COLUMNS)
    save(options.output, "quantized_decode", "python -m benchmarks.quantized_decode", machine, rows=rows)
    return rows


if __name__ == "__main__":
    main()
