"""The commands `convert`, `import`, `export` and `inspect`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from ..checkpoints.exporting import export_checkpoint
from ..checkpoints.gguf import is_gguf
from ..checkpoints.importing import import_checkpoint
from ..common.results import to_json
from ..common.tables import Table, cached, share
from ..conversion.command.inspection import inspect_checkpoint
from ..conversion.command.job import Job
from ..conversion.command.options import IGNORE_FIELD, Source, Target, with_options
from ..conversion.command.report import Report, describe_cost, layers_table, runs, summary, warning
from .console import err, out, printable, progress_bars, saved, user_errors

FORCE = (
    "Replace the checkpoint at TARGET once the new one is complete. Refused if TARGET is no checkpoint (weights, and a "
    "config.json with a model_type), or holds any file or folder that does not belong to one."
)
IgnoreField = Annotated[list[str] | None, typer.Option("--ignore-field", help=IGNORE_FIELD, show_default=False)]
Force = Annotated[bool, typer.Option("--force", help=FORCE)]
ExportTarget = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder to write: a complete Hub repository. Or a file NAME.gguf.")
]
Unpacked = Literal["float32", "bfloat16", "float16"]
EXAMPLES = """Examples:

- `modeling-gqa convert llama/ out/ --attention-kind gqa --num-key-value-heads 4 --text corpus/`
- `modeling-gqa convert llama/ out/ --attention-kind mla --cache-size 128 --text corpus/ --layers 4-27`
- `modeling-gqa convert llama/ out/ --attention-kind mla --budget 16384 --text a.jsonl --text b.parquet`
- `modeling-gqa convert mqa/ out/ --attention-kind mla` (exact)
"""


def add_conversion_commands(app: typer.Typer) -> None:
    """Add the commands of this file to a command line."""
    app.command(epilog=EXAMPLES)(convert)
    app.command("import")(import_)
    app.command()(export)
    app.command()(inspect)


@with_options
def convert(
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel="Running",
            help="Check everything but the weights, show what would be done, and write nothing.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", rich_help_panel="Running", help=FORCE)] = False,
    **options: Any,
) -> None:
    """Give a trained model another attention, measure what that cost, and save it as a Hub repository.

    Three conversions are exact: to a multiple of the key/value heads (such as GQA to MHA), to MLA that caches as much
    as the source, and from MLA without a latent norm to MHA. All others are lossy; heal the result with
    `modeling-gqa uptrain`. TARGET gets weights, configuration, code, tokenizer, a model card and the report
    `conversion.json`.
    """
    target = options["target"]
    with user_errors(target):
        job = Job(**options)
        if dry_run:
            plan = job.plan(force)
            show(plan)
            how = f"by {plan['method']}" + (", calibrated on the text" if job.text else "")
            for line in (job.describe_memory(), *plan["serving"]):
                out.print(line, soft_wrap=True)
            out.print(f"Dry run: would convert {'exactly' if plan['exact'] else how}. Nothing was written.")
            return
        printed: list[str] = []

        def say(line: str) -> None:
            printed.append(line)
            out.print(line, soft_wrap=True)

        with progress_bars() as show_progress:
            report = job.run(force, show_progress, say)
        show(report)
        for line in report["serving"]:
            if line not in printed:  # of sizes and frequencies that were chosen while converting
                say(line)
        out.print(describe_cost(report))
        if said := warning(report):
            out.print(f"Warning: {said}.", soft_wrap=True)
        saved(target, "report in conversion.json, card in README.md")


def import_(
    source: Source,
    target: Target,
    dtype: Annotated[
        Unpacked | None,
        typer.Option(
            help="Dtype that a .gguf file is unpacked to. Default: bfloat16, which is finer than quantized weights "
            "are. Refused for other sources, which keep theirs.",
            show_default=False,
        ),
    ] = None,
    ignore_field: IgnoreField = None,
    force: Force = False,
) -> None:
    """Rewrite a Llama, Mistral, Qwen2, Qwen3, SmolLM2, dense DeepSeek or Youtu checkpoint as one of this package.

    The result computes the same function. Weights are copied tensor by tensor in their dtype; the tokenizer and the
    generation configuration are copied too. Of a GGUF file (Llama's, Qwen2's and Qwen3's architectures) the weights are
    unpacked, and the tokenizer is made from its metadata.
    """
    with user_errors(target), progress_bars() as show_progress:
        config = import_checkpoint(
            source,
            target,
            force=force,
            progress=show_progress("importing tensors"),
            ignore_fields=ignore_field or (),
            dtype=getattr(torch, dtype) if dtype else None,
        )
    saved(target, f"{config.num_hidden_layers} layers")


def export(
    source: Source,
    target: ExportTarget,
    family: Annotated[
        str | None,
        typer.Option(
            help="llama, mistral, qwen2, qwen3 or deepseek_v3. Default: the first that fits.", show_default=False
        ),
    ] = None,
    engine: Annotated[
        Literal["transformers"] | None,
        typer.Option(
            "--for",
            help="Export also a model that vLLM or SGLang would compute wrongly by classes of their own, such as one "
            "with biases that they drop; the card says which. Default: refused, with the reason.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Rewrite a checkpoint of this package as one of transformers' own classes, such as Llama's.

    A TARGET that ends in .gguf is written as a GGUF file for llama.cpp, with the tokenizer. Refused, with the reason,
    if no class can express the model: for instance if its layers differ in kind.
    """
    with user_errors(target), progress_bars() as show_progress:
        progress = show_progress("exporting tensors")
        config = export_checkpoint(source, target, family=family, engine=engine, force=force, progress=progress)
    saved(target, f"a {config.model_type} model{', for llama.cpp' if is_gguf(target) else ''}")


def inspect(
    source: Source,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ignore_field: IgnoreField = None,
) -> None:
    """Show each layer's attention and cache, and which conversions are exact, lossy or impossible."""
    with user_errors():
        with err.status(f"reading {printable(source)}"):  # on a terminal alone
            found = inspect_checkpoint(source, ignore_field or ())
        if as_json:
            print(to_json(found), end="", flush=True)
        else:
            show_inspection(found)


def show(report: Report) -> None:
    layers = layers_table(report)
    rows = [(where, *row) for where, row in runs(row[1:] for row in layers.rows)]
    header = ["layers", "attention", "error of its output", "loss"]
    out.print(replace(layers, header=header, rows=rows).to_rich(), summary(report).to_rich())


def show_inspection(found: dict[str, Any]) -> None:
    family = "" if found["family"] == "gqa" else f", a {found['family']} model that can be imported"
    out.print(
        f"{printable(found['source'])}{family}: {found['parameters']:,} parameters, {found['dtype']}", soft_wrap=True
    )
    columns = ("attention", "sliding_window", "cache_bytes_per_token")
    itemsize, whole = getattr(torch, found["dtype"]).itemsize, found["cache_bytes_per_token"]
    rows = [
        (where, what, "" if window is None else f"{window:,}", cached(size, itemsize))
        for where, (what, window, size) in runs(tuple(layer[name] for name in columns) for layer in found["layers"])
    ]
    table = Table(["layers", "attention", "window", "bytes (numbers) per token"], rows, words=2)
    out.print(table.to_rich(), f"Cache of the whole model per token: {whole:,} bytes ({whole // itemsize:,} numbers).")
    can = found["conversions"]
    rows = [
        (name, how, cached(size, itemsize), share(size, whole))
        for how, kinds in (("exactly", can["exact"]), ("with loss", can["lossy"]))
        for name, size in kinds.items()
    ]
    header = ["can become", "", "bytes (numbers) per token", "of the source's"]
    out.print(Table(header, rows, words=2).to_rich() if rows else "It can become no other kind.")
    reasons: dict[str, list[str]] = {}
    for name, reason in can["impossible"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        out.print(f"Not: {', '.join(names)}: {reason}.", soft_wrap=True)
    export = found["export"]
    how = f"to transformers' own class, as {export['family']}" if export["family"] else ""
    text = ": ".join(filter(None, (how, export["reason"])))
    out.print(f"Export: {text.rstrip('.')}.", soft_wrap=True)
    for line in found["vllm"]:
        out.print(line, soft_wrap=True)
