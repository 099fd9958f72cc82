"""What conversions of a real model lose: ours, and TransMLA and MHA2MLA on the same text with as many tokens.

    python -m benchmarks.real_conversion
    python -m benchmarks.real_conversion Qwen2.5-Coder-0.5B-Instruct --name real_conversion_qwen --tokens 16384
    python -m benchmarks.real_conversion meta-llama/Llama-3.2-1B --name llama-3.2-1b --targets mla-512+64
    python -m benchmarks.real_conversion --targets mla-1/4 --methods transmla mha2mla
    python -m benchmarks.real_conversion --work kept/ --targets mla-1/4 --methods untrained default

Without a model it is SmolLM2-135M-Instruct. `benchmarks.real` builds it, Qwen2.5-Coder-0.5B-Instruct and the text where
they are missing. A run may do a part: rows that FILE holds already stay, and a row done again replaces the old one.
KL(source || converted) and perplexity are of text that neither calibration nor the choice of constants has seen: other
pages of the books that calibration reads, another book, and source code.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from modeling_gqa import GQAForCausalLM
from modeling_gqa.common.batches import Batch, computing_dtype, evaluating, first_batches, usable_device
from modeling_gqa.conversion import allocate, compare_predictions, convert_model, load_source, target_config
from modeling_gqa.conversion.convert import SELECTION_TOKENS
from modeling_gqa.conversion.divergence import predicted_states
from modeling_gqa.conversion.job import POLISH_TIMES
from modeling_gqa.conversion.polish import polish
from modeling_gqa.conversion.text import SELECTION_SHARE
from modeling_gqa.costs import cache_bytes_per_token
from modeling_gqa.data.packing import read_batches
from modeling_gqa_cli.errors import UserError

from .layerwise import refit_outputs
from .measure import describe_machine
from .peers import mha2mla, transmla
from .real import MODELS, SMOLLM2, real_model, real_text
from .report import RESULTS, ResultRows, kebab_shown, print_machine, print_table

TARGETS = ("mla-1/2", "mla-1/4", "mla-1/8", "mqa")
# Files of the text that is measured on; the columns of the first have no suffix.
EVALUATIONS = {"": "test", "_other": "test-other", "_code": "test-code"}
COLUMNS = {
    "target": "", "method": "", "bytes": ",", "kl": ".3f", "perplexity": ".2f", "kl_other": ".3f",
    "perplexity_other": ".2f", "kl_code": ".3f", "perplexity_code": ".2f", "top1": ".1%", "seconds": ".0f",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A cache to convert to: "mqa", "mla-1/4" for a quarter of the source's, or "mla-64+32" for R + P.

    Args:
        name: as it is given.
        share: of the source's numbers per token and layer, for MLA.
        sizes: R and P, for MLA.
    """

    name: str
    share: Fraction | None = None
    sizes: tuple[int, int] | None = None

    @classmethod
    def parse(cls, name: str) -> "Target":
        if match := re.fullmatch(r"mla-(\d+/\d+)", name):
            return cls(name, share=Fraction(match[1]))
        if match := re.fullmatch(r"mla-(\d+)\+(\d+)", name):
            return cls(name, sizes=(int(match[1]), int(match[2])))
        if name != "mqa":
            raise argparse.ArgumentTypeError(f"{name!r} is none of mqa, mla-1/4 or another share, and mla-R+P")
        return cls(name)


class Bench:
    """The source, its text, and what has been measured.

    Args:
        folder: of the source, or its name on the Hub.
        text: folder of the text, with the files that `benchmarks.real` names.
        tokens: to calibrate on.
        evaluation_tokens: to measure on, of each file.
        length: tokens of a block.
        batch_size: blocks of a batch.
        evaluations: files of the text that is measured on, by suffix of their columns.
        dtype: to compute in; `None` for what the command takes.
        device: to compute on.
        own_text: JSONL file of text that the source wrote, for the row "own text"; `None`: there is none.
        work: folder where conversions are kept, also that of "untrained" which "default" trains; `None`: none.
    """

    def __init__(
        self,
        folder: str,
        text: Path,
        tokens: int,
        evaluation_tokens: int,
        length: int = 1024,
        batch_size: int = 4,
        evaluations: Mapping[str, str] = EVALUATIONS,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        own_text: Path | None = None,
        work: Path | None = None,
    ) -> None:
        source = load_source(folder).eval()
        self.source = source.to(device, dtype or computing_dtype(source.dtype, device))  # type: ignore[arg-type]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.work, self.name = work, f"{Path(folder).name}-{tokens}-{length}-{str(self.source.dtype)[6:]}"
        packed: dict[str, Any] = {"tokenizer": self.tokenizer, "sequence_length": length, "batch_size": batch_size}
        wanted = {"calibration": tokens, "selection": min(tokens // SELECTION_SHARE, SELECTION_TOKENS)}
        polished_tokens = tokens * POLISH_TIMES
        found = read_batches([text / "calibration.jsonl"], tokens=wanted, rest=("polish", polished_tokens), **packed)
        self.calibration, self.selection = found["calibration"], found["selection"]
        self.polish_text = first_batches([*found["polish"], *self.calibration], polished_tokens)
        self.polished_tokens, self.own_text = polished_tokens, []
        if own_text:
            self.own_text = read_batches([own_text], **packed, tokens={"calibration": tokens})["calibration"]
        packed["tokens"] = {"evaluation": evaluation_tokens}
        self.evaluations = {
            key: read_batches([text / f"{name}.jsonl"], **packed)["evaluation"] for key, name in evaluations.items()
        }

    @cached_property
    def states(self) -> dict[str, dict[int, torch.Tensor]]:
        """The source's last hidden states by text and number of the batch."""
        with evaluating(self.source):
            return {
                key: {number: predicted_states(self.source, batch) for number, batch in enumerate(batches)}
                for key, batches in self.evaluations.items()
            }

    def measure(self, converted: GQAForCausalLM) -> dict:
        """Return the columns that are measured, and the source's perplexities."""
        row: dict[str, Any] = {}
        for key, batches in self.evaluations.items():
            found = compare_predictions(self.source, converted, batches, source_states=self.states[key])
            row |= {f"kl{key}": found["kl"], f"perplexity{key}": found["perplexity_after"]}
            row |= {f"source_perplexity{key}": found["perplexity_before"]}
            if not key:
                row |= {"top1": found["top1_agreement"], "tokens": found["tokens"]}
        return {"bytes": cache_bytes_per_token(converted.config, torch.bfloat16), **row}

    def kept(self, target: Target, row: str) -> Path | None:
        """Return the folder where the conversion of a row is kept."""
        names = self.name, target.name.replace("/", "-"), row.replace(", ", "-").replace(" ", "-")
        return self.work and self.work / "-".join(names)

    def keep(self, target: Target, row: str, converted: GQAForCausalLM) -> None:
        """Save a conversion, with the tokenizer, where there is a folder for it; it is there as a whole or not."""
        if folder := self.kept(target, row):
            aside = folder.with_name(f"{folder.name}.partial")
            converted.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)

    # -- sizes

    def cache_size(self, target: Target) -> int:
        """The numbers that a token takes in a layer of the target."""
        layer = self.source.config.per_layer_config[0]
        if target.sizes:
            return sum(target.sizes)
        return int(
            2 * layer.head_dim * layer.num_key_value_heads * (target.share or Fraction(1, layer.num_key_value_heads))
        )

    def transmla_sizes(self, target: Target) -> tuple[int, int, int]:
        """R, P and FreqFold for TransMLA: P is D by a power of two, as its code has it, and a third of the cache."""
        head_dim, size = self.source.config.per_layer_config[0].head_dim, self.cache_size(target)
        rope = head_dim
        while 3 * rope > size and rope > 2:
            rope //= 2
        rank, rope = target.sizes or (size - rope, rope)
        return rank, rope, max(4, head_dim // rope)

    def mha2mla_sizes(self, target: Target) -> tuple[int, int]:
        """R and P for MHA2MLA: an eighth of each head's dimensions stays rotated, as in its paper."""
        layer, size = self.source.config.per_layer_config[0], self.cache_size(target)
        rope = max(layer.head_dim // 16, 1) * 2 * layer.num_key_value_heads
        return size - rope, rope


# -- a method each: the converted model, or `None` where the target is not for it


def ours(
    bench: Bench, target: Target, text: list[Batch] | None = None, by_layer: bool = False, **options: Any
) -> GQAForCausalLM:
    """What the command makes with `--polish 0`, or `convert_model` with `options`, on `text` or what calibrates.

    `by_layer`: with `--budget`, of as many bytes as all layers of the target take.
    """
    config, divides = bench.source.config, by_layer or not (target.sizes or target.name == "mqa")
    if by_layer:
        budget = cache_bytes_per_token(config, torch.bfloat16) * (target.share or Fraction(1))
        wanted = allocate(bench.source, "mla", int(budget), bench.calibration, dtype=torch.bfloat16)
    elif target.name == "mqa":
        wanted = target_config(config, "mqa")
    elif target.sizes:
        wanted = target_config(config, "mla", kv_lora_rank=target.sizes[0], qk_rope_head_dim=target.sizes[1])
    else:
        wanted = target_config(config, "mla", cache_size=bench.cache_size(target))
    options = {"divide_cache": divides, **options}
    return convert_model(bench.source, wanted, text or bench.calibration, **options)[0]


def untrained(bench: Bench, target: Target, **options: Any) -> GQAForCausalLM | None:
    """What the command makes with `--polish 0`, read from `Bench.kept` where it is; `options` as for `ours`."""
    by_layer = options.get("by_layer", False)
    if (by_layer and not target.share) or (target.name == "mqa" and options):  # MQA has neither sizes nor a mean
        return None
    row = "untrained" + ", no key mean" * (not options.get("key_mean", True)) + ", sizes by layer" * by_layer
    folder = bench.kept(target, row)
    if folder and (folder / "config.json").is_file():
        return load_source(str(folder)).eval().to(bench.source.device)  # type: ignore[arg-type]
    converted = ours(bench, target, **options)
    bench.keep(target, row, converted)
    return converted


def polished(bench: Bench, target: Target, **options: Any) -> GQAForCausalLM | None:
    """What the command makes; seconds are those of the training at the end alone where `Bench.kept` has the rest."""
    if (converted := untrained(bench, target, **options)) is None:
        return None
    layers, text = range(len(converted.model.layers)), (bench.polish_text, bench.selection)
    print(polish(bench.source, converted, *text, layers, bench.polished_tokens), flush=True)
    return converted


def on_own_text(bench: Bench, target: Target) -> GQAForCausalLM | None:
    """Calibrated on what the source wrote (`modeling-gqa write-text`), without training at the end."""
    return ours(bench, target, bench.own_text) if bench.own_text else None


def by_transmla(bench: Bench, target: Target, refit: bool = False) -> GQAForCausalLM | None:
    if target.name == "mqa":
        return None
    converted = transmla(bench.source, bench.calibration, *bench.transmla_sizes(target))
    if refit:
        refit_outputs(bench.source, converted, bench.calibration)
    return converted


def by_mha2mla(bench: Bench, target: Target) -> GQAForCausalLM | None:
    if target.name == "mqa":
        return None
    return mha2mla(bench.source, bench.calibration, *bench.mha2mla_sizes(target))


METHODS: dict[str, Callable[[Bench, Target], GQAForCausalLM | None]] = {
    "default": polished,
    "untrained": untrained,
    "no key mean": partial(polished, key_mean=False),
    "untrained, no key mean": partial(untrained, key_mean=False),
    "sizes by layer": partial(polished, by_layer=True),
    "untrained, sizes by layer": partial(untrained, by_layer=True),
    "own text": on_own_text,
    "transmla": by_transmla,
    "transmla, our refit": partial(by_transmla, refit=True),
    "mha2mla": by_mha2mla,
}


# -- the run


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a name on the Hub, or one that `make real` builds")
    parser.add_argument("--name", default="real_conversion", help="of the file of results in benchmarks/results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results, in place of --name")
    parser.add_argument("--text", type=Path, help="folder of the text; that of `make real` by default")
    parser.add_argument("--tokens", type=int, default=32768, help="to calibrate on")
    parser.add_argument("--evaluation-tokens", "--evaluation_tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=4, help="blocks of a batch")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in; the command's by default")
    parser.add_argument("--device", default=usable_device(None), help="to compute on; cuda by default if there is one")
    parser.add_argument(
        "--own-text", type=Path, metavar="FILE", help="text that the model wrote, for the row of that name"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps what is converted")
    parser.add_argument("--targets", type=Target.parse, nargs="+", default=[Target.parse(name) for name in TARGETS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    return kebab_shown(parser).parse_args(arguments)


def measured_row(bench: Bench, target: Target, method: str) -> dict | None:
    """Convert, measure, print and return a row; `None` where there is nothing to convert."""
    begin = time.perf_counter()
    try:
        converted = METHODS[method](bench, target)
    except UserError as error:
        print(f"{target.name:10} {method:20} {error}", flush=True)
        return None
    if converted is None:
        return None
    seconds = time.perf_counter() - begin
    bench.keep(target, method, converted)
    row = {"target": target.name, "method": method, **bench.measure(converted), "seconds": seconds}
    shown = (f"{key} {format(row[key], form)}" for key, form in COLUMNS.items() if form)
    print(f"{target.name:10} {method:20} {'  '.join(shown)}", flush=True)
    return row


def place(row: dict) -> tuple:
    """Return by what rows are sorted: the order of `TARGETS` and `METHODS`."""
    order = {name: number for number, name in enumerate((*TARGETS, *METHODS))}
    return order.get(row["target"], len(order)), row["target"], order.get(row["method"], len(order))


def show(name: str, rows: list[dict]) -> None:
    """Print the source's perplexities and the table."""
    if rows:
        before = ", ".join(f"{rows[-1][f'source_perplexity{key}']:.2f} on {text}" for key, text in EVALUATIONS.items())
        print(f"source: perplexity {before}")
        print_table(f"Conversions of {name}", rows, COLUMNS)


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, print and write what the command line asks for; returns all rows of the file."""
    options = parse(arguments)
    path = options.json or RESULTS / f"{options.name}.json"
    built = options.model is None or options.model in MODELS
    folder = str(real_model(options.model or SMOLLM2)) if built else options.model
    text = options.text or real_text()
    name = Path(folder).name
    settings = {"model": name, "tokens": options.tokens, "evaluation_tokens": options.evaluation_tokens}
    settings["length"] = options.length
    dtype = getattr(torch, options.dtype) if options.dtype else None
    rows = ResultRows(path, ("target", "method"), settings, place)
    sizes = (options.tokens, options.evaluation_tokens, options.length, options.batch_size)
    bench = Bench(
        folder, text, *sizes, dtype=dtype, device=options.device, own_text=options.own_text, work=options.work
    )
    machine = describe_machine(options.device, [bench.source.dtype])
    print_machine(machine)
    command = " ".join(["python -m benchmarks.real_conversion", *(sys.argv[1:] if arguments is None else arguments)])
    for target in options.targets:
        for method in options.methods:
            if row := measured_row(bench, target, method):
                rows.put(row | {"dtype": str(bench.source.dtype)[6:]}, command, machine)
    show(name, rows)
    print(f"rows are in {path}")
    return rows


if __name__ == "__main__":
    main()
