"""The commands `convert`, `import`, `export`, `inspect`, `quantize-cache`, `frontier` and `write-text`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modeling_gqa.common.atomic import to_json
from modeling_gqa.common.console import err, out, printable, saved, user_errors
from modeling_gqa.common.progress import progress_bars
from modeling_gqa.common.tables import Table, cached, runs, share


def convert(target: str, dry_run: bool, force: bool, **options: Any) -> None:
    """Give a trained model another attention, measure what that cost, and save it as a Hub repository."""
    from modeling_gqa.conversion.job import Job
    from modeling_gqa.conversion.layer_store import layers_folder
    from modeling_gqa.conversion.report import advice, cost_table, warning

    path = Path(target)
    with user_errors(path, layers_folder):
        job = Job(target=path, **options)

        def say(line: str) -> None:
            out.print(line, soft_wrap=True)

        if dry_run:
            plan = job.plan(force, say)
            show(plan)
            how = "exactly" if plan["exact"] else f"by {plan['method']}"
            if said := advice(plan):
                say(f"Note: {said}.")
            out.print(f"Dry run: would convert {how}. Nothing was written.")
            return
        with progress_bars() as show_progress:
            report = job.run(force, show_progress, say)
        show(report)
        out.print(cost_table(report).to_rich())
        if said := warning(report):
            say(f"Warning: {said}.")
        if said := advice(report):
            say(f"Note: {said}.")
        saved(path, "report in conversion.json, card in README.md")


def import_(source: str, target: str, dtype: str | None, ignore_field: Sequence[str] | None, force: bool) -> None:
    """Rewrite a stock checkpoint as one of this package, which computes the same function."""
    from modeling_gqa.checkpoints.writing import import_checkpoint

    with user_errors(Path(target)), progress_bars() as show_progress:
        config = import_checkpoint(
            source,
            Path(target),
            force=force,
            progress=show_progress("importing tensors"),
            ignore_fields=ignore_field or (),
            dtype=getattr(torch, dtype) if dtype else None,
        )
        saved(Path(target), f"{config.num_hidden_layers} layers")


def export(source: str, target: str, family: str | None, engine: str | None, force: bool) -> None:
    """Rewrite a checkpoint of this package as one of transformers' own classes, or as a GGUF file."""
    from modeling_gqa.checkpoints.exporting import export_checkpoint
    from modeling_gqa.checkpoints.files import is_gguf

    with user_errors(Path(target)), progress_bars() as show_progress:
        progress = show_progress("exporting tensors")
        config = export_checkpoint(source, Path(target), family=family, engine=engine, force=force, progress=progress)
        saved(Path(target), f"a {config.model_type} model{', for llama.cpp' if is_gguf(Path(target)) else ''}")


def inspect(source: str, ignore_field: Sequence[str] | None, json: bool) -> None:
    """Show each layer's attention and cache, and which conversions are exact, lossy or impossible."""
    from modeling_gqa.conversion.inspection import inspect_checkpoint

    with user_errors():
        with err.status(f"reading {printable(source)}"):  # on a terminal alone
            found = inspect_checkpoint(source, ignore_field or ())
        if json:
            print(to_json(found), end="", flush=True)
        else:
            show_inspection(found)


def quantize_cache(target: str, force: bool, **options: Any) -> None:
    """Save a model whose cache `generate` rounds, and measure what that costs."""
    from modeling_gqa.conversion.quantizing import CacheJob, describe_training, losses_table

    path = Path(target)
    with user_errors(path), progress_bars() as show_progress:
        report = CacheJob(target=path, **options).run(force, show_progress)
        before, after = (report[f"cache_bytes_per_token_{when}"] for when in ("before", "after"))
        out.print(f"Cache per token: {after:,} bytes in place of {before:,} ({share(after, before)}).", soft_wrap=True)
        if "kl" in report:
            out.print(losses_table(report).to_rich(), describe_training(report), soft_wrap=True)
        saved(path, "card in README.md")


def frontier(source: str, json: bool, **options: Any) -> None:
    """Show what smaller caches lose."""
    from modeling_gqa.conversion.frontier import FrontierJob, frontier_table, recommendation

    with user_errors(options["picture"]), progress_bars() as show_progress:
        report = FrontierJob(source=source, **options).run(show_progress)
        if json:
            print(to_json(report), end="", flush=True)
        else:
            out.print(frontier_table(report).to_rich(), recommendation(report), soft_wrap=True)
        if options["picture"] is not None:
            err.print(f"saved {printable(options['picture'])}")


def write_text(source: str, file: str, dtype: str, force: bool, **options: Any) -> None:
    """Let a model write text to calibrate on into a JSONL file."""
    from modeling_gqa.conversion.own_text import write_own_text

    path = Path(file)
    with user_errors(path), progress_bars() as show_progress:
        precision = getattr(torch, dtype, None)
        documents, tokens = write_own_text(
            source, path, dtype=precision, force=force, show_progress=show_progress, **options
        )
        out.print(f"Wrote {printable(path)}: {documents} documents, {tokens:,} tokens.", soft_wrap=True)


def show(report: Any) -> None:
    from modeling_gqa.conversion.report import layers_table, summary

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
    if any(layer["sliding_window"] for layer in found["layers"]):
        mean, tokens = (found[name] for name in ("mean_cache_bytes_per_token", "max_position_embeddings"))
        out.print(f"After {tokens:,} tokens, of which a window keeps its last: {mean:,} bytes per token.")
    if found["cache_quantization"] is not None:
        out.print("generate keeps less, because it rounds this model's cache (cache_quantization in config.json).")
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
