"""What a model loses whose cache is quantized instead of converted, on the text that conversions are measured on.

    python -m benchmarks.quantized_cache
    python -m benchmarks.quantized_cache Qwen2.5-Coder-0.5B-Instruct --name quantized_qwen --evaluation-tokens 4096

Nothing is packed: each key and value is rounded to what its cache would hold, and attended to. "Plain" has symmetric
levels up to the largest number of a token and head; fp8 is float8_e4m3fn with a scale of 1, vLLM's default.
"Well" takes the keys' mean before rotation and the values' mean out, which stay exact (the score of a constant key
depends on the distance alone), mixes each head's numbers by a Hadamard matrix, chooses each group's scale by the
squared error and keeps the first four tokens as they are, which hold the attention sinks (StreamingLLM, 2309.17453).
Shapes: B rows, G key/value heads, T tokens, D head size.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.linalg import hadamard
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from modeling_gqa import GQAForCausalLM
from modeling_gqa.attention import rotate
from modeling_gqa.common.batches import Batch, evaluating, hooks
from modeling_gqa.costs import cache_bytes_per_token

from .measure import describe_machine
from .real import MODELS, SMOLLM2, real_model, real_text
from .real_conversion import EVALUATIONS, Bench
from .report import RESULTS, kebab_shown, print_machine, print_table, write

FORMATS = {"fp8": 8, "int8": 8, "int4": 4, "int3": 3, "int2": 2}  # bits of a number
GROUP = 64  # numbers that share a scale of 16 bits, or a head's where it has fewer
EXACT_TOKENS = 4
TINY = 6e-8  # about the least scale that float16 has, for numbers that are all zero
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # shares of the largest number at which the outermost level may lie
MEAN_TOKENS = 8192
COLUMNS = {
    "cache": "", "method": "", "bytes": ",.0f", "share": ".3f", "kl": ".4f", "perplexity": ".2f", "kl_other": ".4f",
    "kl_code": ".4f", "top1": ".1%",
}  # fmt: skip


def rounded(x: torch.Tensor, name: str, well: bool) -> torch.Tensor:
    """Return `x` (..., D) as a cache of the format `name` gives it back.

    The levels of "well" are 2^bits at half steps, so that each serves; "plain" has 0 and as many on both sides.
    """
    if name == "fp8":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    groups = x.unflatten(-1, (-1, min(GROUP, x.shape[-1])))
    most = groups.abs().amax(-1, keepdim=True)
    if not well:
        largest = 2 ** (FORMATS[name] - 1) - 1
        scale = (most / largest).half().to(x.dtype).clamp(min=TINY)
        return ((groups / scale).round().clamp(-largest, largest) * scale).flatten(-2)
    largest, best, least = 2 ** (FORMATS[name] - 1) - 0.5, groups, torch.full_like(most, torch.inf)
    for clip in CLIPS:
        scale = (clip * most / largest).half().to(x.dtype).clamp(min=TINY)
        found = ((groups / scale - 0.5).round() + 0.5).clamp(-largest, largest) * scale
        error = (found - groups).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best.flatten(-2)


def cached(x: torch.Tensor, mean: torch.Tensor, name: str, well: bool) -> torch.Tensor:
    """Return keys or values `x` (B, G, T, D) as the cache gives them back; `mean` (B or 1, G, T or 1, D) is exact."""
    if not well:
        return rounded(x, name, well)
    mixed = torch.from_numpy(hadamard(x.shape[-1])).to(x) * x.shape[-1] ** -0.5  # symmetric, its own inverse
    found = rounded((x - mean) @ mixed, name, well) @ mixed + mean
    return torch.cat((x[..., :EXACT_TOKENS, :], found[..., EXACT_TOKENS:, :]), dim=-2)


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *, name: str, well: bool, **options: Any) -> Any:
    """Attend by `sdpa` to rotated keys and values as the cache gives them back."""
    key_mean, value_mean = (x.unflatten(-1, (1, key.shape[1], 1, -1)) for x in module.cached_means)
    key = cached(key, rotate(key_mean, *module.seen_positions), name, well)
    return sdpa_attention_forward(module, query, key, cached(value, value_mean, name, well), mask, **options)


@contextmanager
def quantized(model: GQAForCausalLM, name: str, well: bool, means: Sequence[Any]) -> Iterator[GQAForCausalLM]:
    """Let `model` attend to a quantized cache meanwhile; `means` as `mean_keys_and_values` returns them."""

    def before(module: Any, arguments: Any, options: dict) -> None:
        module.seen_positions = options["position_embeddings"]

    attentions = [layer.self_attn for layer in model.model.layers]
    for attention, mean in zip(attentions, means, strict=True):
        attention.cached_means = mean
    AttentionInterface.register("quantized", partial(attend, name=name, well=well))
    AttentionMaskInterface.register("quantized", sdpa_mask)
    old = model.config._attn_implementation
    model.set_attn_implementation("quantized")
    try:
        with hooks(*(attention.register_forward_pre_hook(before, with_kwargs=True) for attention in attentions)):
            yield model
    finally:
        model.set_attn_implementation(old)


@torch.no_grad()
def mean_keys_and_values(model: GQAForCausalLM, batches: Sequence[Batch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's mean key before rotation and mean value (G D) over `MEAN_TOKENS` tokens of text."""
    sums = [[torch.zeros(()), torch.zeros(())] for _ in model.model.layers]
    seen = 0

    def add(sums: list[torch.Tensor], place: int, module: Any, arguments: Any, output: torch.Tensor) -> None:
        sums[place] = sums[place] + output.float().sum((0, 1))

    projections = [(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in model.model.layers]
    added = [
        projection.register_forward_hook(partial(add, own, place))
        for own, pair in zip(sums, projections, strict=True)
        for place, projection in enumerate(pair)
    ]
    with evaluating(model), hooks(*added):
        for batch in batches:
            model.model(**batch, use_cache=False)
            seen += batch["input_ids"].numel()
            if seen >= MEAN_TOKENS:
                break
    return [(key / seen, value / seen) for key, value in sums]


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, print and write what the command line asks for; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2, help="a folder, a name on the Hub, or of `make real`")
    parser.add_argument("--name", default="quantized_cache", help="of the file of results in benchmarks/results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results, in place of --name")
    parser.add_argument("--text", type=Path, help="folder of the text; that of `make real` by default")
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = kebab_shown(parser).parse_args(arguments)
    folder = str(real_model(options.model)) if options.model in MODELS else options.model
    command = " ".join(["python -m benchmarks.quantized_cache", *(sys.argv[1:] if arguments is None else arguments)])
    machine = describe_machine("cpu", [torch.float32])
    print_machine(machine)
    bench = Bench(folder, options.text or real_text(), MEAN_TOKENS, options.evaluation_tokens, options.length)
    full = cache_bytes_per_token(bench.source.config, torch.bfloat16)
    if any(layer.attention_kind == "mla" or layer.qk_norm for layer in bench.source.config.per_layer_config):
        raise SystemExit("the source must have MHA, MQA or GQA without qk_norm: means are taken before rotation")
    bench.source.float()  # differences of 0.001 are lost in bfloat16
    means, rows = mean_keys_and_values(bench.source, bench.calibration), []
    assert len(bench.states) == len(EVALUATIONS)  # computed with the whole cache
    for name in options.formats:
        for well in (False, True) if name != "fp8" else (False,):
            with quantized(bench.source, name, well, means) as model:
                measured = bench.measure(model)
            head_dim = bench.source.config.per_layer_config[0].head_dim
            share = (FORMATS[name] + (0 if name == "fp8" else 16 / min(GROUP, head_dim))) / 16
            row = {"cache": name, "method": "well" if well else "plain", **measured, "bytes": share * full}
            rows.append(row | {"share": share})
            shown = (f"{key} {format(rows[-1][key], form)}" for key, form in COLUMNS.items())
            print("  ".join(shown), flush=True)
            settings = {"model": Path(folder).name, "evaluation_tokens": options.evaluation_tokens}
            write(options.json or RESULTS / f"{options.name}.json", command, machine, settings=settings, rows=rows)
    print_table(f"The cache of {Path(folder).name}, quantized", rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
