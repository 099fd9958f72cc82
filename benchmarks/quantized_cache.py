"""What a model loses whose cache is quantized instead of converted, on the text that conversions are measured on.

    python -m benchmarks.quantized_cache
    python -m benchmarks.quantized_cache Qwen2.5-Coder-0.5B-Instruct --name quantized_qwen --evaluation-tokens 2048
    python -m benchmarks.quantized_cache --converted kept/FOLDER --label mla-1/2 --shares 0.266 0.141

"Ours" attends to what `cache_quantization` packs and gives back, with means measured on `TOKENS` tokens of other
text. "Coded" does too, with bases and bits that are chosen on that text for a share of the bytes. "Plain" is what is
done without these: each number is rounded between symmetric levels up to the largest of its head, or as vLLM's flags
round it. Nothing is packed for it. With `--converted` the cache of a conversion is rounded to fp8 and coded, for shares
of the source's bytes, and measured against the source. Rows that the file of results holds already stay.
`--polish` trains what is coded for the predictions of what it was coded from.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modeling_gqa import GQAConfig
from modeling_gqa.conversion import load_source
from modeling_gqa.conversion.engine_caches import TURBOQUANT, EngineCache, engine_caches
from modeling_gqa.conversion.quantizing import set_cache_constants, train_rounded, with_quantized_cache
from modeling_gqa.conversion.transform_coding import cache_codings, cache_means, choose_bits, intercepted
from modeling_gqa.costs import cache_bytes_per_token

from .measure import describe_machine
from .real import MODELS, SMOLLM2, real_model, real_text
from .real_conversion import EVALUATIONS, Bench
from .report import RESULTS, ResultRows, kebab_shown, print_machine, print_table

FORMATS: dict[str, Any] = {"fp8": "fp8", "int8": 8, "int6": 6, "int4": 4, "int3": 3, "int2": 2}  # `nbits`
GROUP = 64  # numbers that share a scale of 16 bits, or a head's where it has fewer
TINY = 6e-8  # about the least scale that float16 has, for numbers that are all zero
TOKENS = 16384
COLUMNS = {
    "cache": "", "method": "", "bytes": ",.0f", "share": ".3f", "kl": ".4f", "perplexity": ".2f", "kl_other": ".4f",
    "kl_code": ".4f", "top1": ".1%",
}  # fmt: skip


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `x` (..., D) as a plain cache of `bits` gives it back: levels at 0 and alike on both sides."""
    groups = x.unflatten(-1, (-1, min(GROUP, x.shape[-1])))
    largest = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(-1, keepdim=True) / largest).half().to(x.dtype).clamp(min=TINY)
    return ((groups / scale).round().clamp(-largest, largest) * scale).flatten(-2)


def in_levels(bits: int, index: int, pair: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a layer's keys and values become in a plain cache of `bits`."""
    return [rounded(x, bits) for x in pair]


def plain_caches(config: GQAConfig) -> dict[str, EngineCache]:
    """Return what is compared with, by name: vLLM's flags, and plain levels, which MLA's latent has none of."""
    caches = {cache.dtype: cache for cache in engine_caches(config, torch.bfloat16)}
    layers = config.per_layer_config
    if all(layer.attention_kind != "mla" for layer in layers):
        full = cache_bytes_per_token(config, torch.bfloat16)
        for name in (name for name in FORMATS if name.startswith("int")):
            bits = FORMATS[name]
            size = round(full * (bits + 16 / min(GROUP, layers[0].head_dim)) / 16)
            caches[name] = EngineCache(name, size, partial(in_levels, bits))
    return caches


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, print and write what the command line asks for; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2, help="a folder, a name on the Hub, or of `make real`")
    parser.add_argument("--name", default="quantized_cache", help="of the file of results in benchmarks/results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results, in place of --name")
    parser.add_argument("--text", type=Path, help="folder of the text; that of `make real` by default")
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block")
    formats = [*FORMATS, *TURBOQUANT]
    parser.add_argument("--formats", nargs="*", choices=formats, default=formats)
    parser.add_argument("--methods", nargs="*", choices=("plain", "ours"), default=["plain", "ours"])
    parser.add_argument("--shares", nargs="*", type=float, default=[0.266, 0.203, 0.141, 0.11], help='of "coded"')
    parser.add_argument("--polish", type=int, default=0, metavar="TOKENS", help='to train "coded" on')
    parser.add_argument("--converted", metavar="FOLDER", help="a conversion of the model, of which rows are made")
    parser.add_argument("--label", help="of the conversion in the rows")
    options = kebab_shown(parser).parse_args(arguments)
    folder = str(real_model(options.model)) if options.model in MODELS else options.model
    command = " ".join(["python -m benchmarks.quantized_cache", *(sys.argv[1:] if arguments is None else arguments)])
    machine = describe_machine("cpu", [torch.float32])
    print_machine(machine)
    file, text = options.json or RESULTS / f"{options.name}.json", options.text or real_text()
    settings: dict[str, Any] = {"model": Path(folder).name, "text": text.name, "tokens": TOKENS}
    settings |= {"evaluation_tokens": options.evaluation_tokens, "length": options.length}
    rows = ResultRows(file, ("cache", "method"), settings)
    bench = Bench(folder, text, TOKENS, options.evaluation_tokens, options.length)
    full = cache_bytes_per_token(bench.source.config, torch.bfloat16)
    bench.source.float()  # differences of 0.001 are lost in bfloat16
    coded, label = bench.source, ""
    if options.converted:
        coded, label = load_source(options.converted).eval().float(), f"{options.label or options.converted}, "
        options.formats = [name for name in options.formats if name == "fp8"]
        options.methods = ["plain"]
    plain = plain_caches(coded.config)
    means = cache_means(coded, bench.calibration)
    assert len(bench.states) == len(EVALUATIONS)  # computed with the whole cache

    def add(name: str, method: str, share: float, measured: dict[str, Any]) -> None:
        row = {"cache": name, "method": method, **measured, "bytes": share * full, "share": share}
        print("  ".join(f"{key} {format(row[key], form)}" for key, form in COLUMNS.items()), flush=True)
        rows.put(row, command, machine)

    if options.converted:
        share = cache_bytes_per_token(coded.config, torch.bfloat16) / full
        add(f"{label}16 bits", "converted", share, bench.measure(coded))
    for name in options.formats:
        if "ours" in options.methods and name in FORMATS:
            model: Any = with_quantized_cache(bench.source, {"nbits": FORMATS[name], "means": True})
            set_cache_constants(model, means)
            add(name, "ours", cache_bytes_per_token(model.config, torch.bfloat16) / full, bench.measure(model))
        if "plain" in options.methods and name in plain:
            method = "vLLM" if name in TURBOQUANT else "plain"
            with intercepted(coded, plain[name].change):
                add(f"{label}{name}", method, plain[name].bytes / full, bench.measure(coded))
    codings = cache_codings(coded, bench.calibration, means) if options.shares else []
    for share in options.shares:
        layers = choose_bits(coded, codings, int(share * full), torch.bfloat16)
        model = with_quantized_cache(coded, {"layers": layers, "means": True})
        set_cache_constants(model, means, codings)
        taken, method = cache_bytes_per_token(model.config, torch.bfloat16) / full, "coded"
        if options.polish:
            method = f"coded, {options.polish} tokens trained"
            print(train_rounded(coded, model, bench.polish_text, bench.selection, options.polish), flush=True)
        add(f"{label}bits by channel, {share:g}", method, taken, bench.measure(model))
    print_table(f"The cache of {Path(folder).name}, quantized", rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
