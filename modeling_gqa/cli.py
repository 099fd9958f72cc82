"""The command `modeling-gqa`: convert, import, export and inspect checkpoints.

modeling-gqa convert SOURCE TARGET --attention-kind mla --cache-size 128 --text corpus/
"""

import errno
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBars
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(
        f"error: modeling-gqa needs {missing.name}, which is not installed: pip install 'modeling_gqa[conversion]'"
    ) from None

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from . import __version__
from .command_line.training import add_training_commands
from .conversion.errors import ConversionError
from .conversion.exporting import export_checkpoint
from .conversion.importing import import_checkpoint
from .conversion.inspection import inspect_checkpoint
from .conversion.job import Job
from .conversion.report import describe_cost, layer_rows, runs, summary
from .conversion.types import Progress, Stage

Kind = Literal["mha", "mqa", "gqa", "mla"]
Method = Literal["auto", "lowrank", "procrustes", "mean", "first", "random"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
# Paths may hold brackets and colons.
out = Console(soft_wrap=False, markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)
LONGEST = 2000  # characters; a checkpoint chooses what its tensors are called
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"modeling_gqa {__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
        raise typer.Exit()


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Change the attention of a trained language model: between MHA, MQA, GQA and MLA, and to and from transformers'
    own classes.

    A SOURCE is a folder with a checkpoint in safetensors, or the name of a model on the Hub; it is only read, and no
    file outside it is. A TARGET is a folder that is written whole or not at all: beside it as `.TARGET.new-PID`, then
    renamed. What a killed command left there the next one to the same TARGET sweeps, and puts back what was moved.

    Refused: a TARGET that exists, without `--force`; with it, all but checkpoints and empty folders; one that another
    process is writing; one that is, holds or lies in the SOURCE or the text; the folder you are in.

    Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 129, 130 or 143 stopped by a signal.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.showwarning = lambda message, *_: err.print(f"warning: {message}", soft_wrap=True)


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of a checkpoint, or name of a model on the Hub.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write: a complete Hub repository.")]
FORCE = (
    "Delete the checkpoint at TARGET when the new one is complete. Refused where TARGET holds anything else: files or "
    "folders that checkpoints do not consist of, or no weights, or no config.json with a model_type."
)
Force = Annotated[bool, typer.Option("--force", help=FORCE)]


def parse_layers(text: str) -> list[int]:
    """`0,2-5` as `[0, 2, 3, 4, 5]`."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise typer.BadParameter(f"{part!r} is no layer and no range of layers such as 2-5")
        layers.update(range(first, last + 1))
    return sorted(layers)


def in_panel(panel: str) -> Callable[..., Any]:
    return partial(typer.Option, rich_help_panel=panel, show_default=False)


attention, method_panel, text_panel, running = map(
    in_panel, ("The new attention (sizes: one way of giving them)", "Method", "Text", "Running")
)


@app.command(
    epilog="""Examples:

- `modeling-gqa convert llama/ out/ --attention-kind gqa --num-key-value-heads 4 --text corpus/`
- `modeling-gqa convert llama/ out/ --attention-kind mla --cache-size 128 --text corpus/ --layers 4-27`
- `modeling-gqa convert llama/ out/ --attention-kind mla --budget 16384 --text a.jsonl --text b.parquet`
- `modeling-gqa convert mqa/ out/ --attention-kind mla` (exact)
"""
)
def convert(
    context: typer.Context,
    source: Source,
    target: Target,
    attention_kind: Annotated[Kind, attention(help="MHA, MQA, GQA or MLA.")],
    num_key_value_heads: Annotated[
        int | None, attention(help="GQA: number of key/value heads, a divisor of the query heads.")
    ] = None,
    kv_lora_rank: Annotated[int | None, attention(help="MLA: size R of the cached latent.")] = None,
    qk_rope_head_dim: Annotated[
        int | None, attention(help="MLA: size P of the cached rotary key; as large as R where left out.")
    ] = None,
    cache_size: Annotated[
        int | None, attention(help="MLA: R + P, the numbers cached per token and layer; shared by what is lost.")
    ] = None,
    cache_bytes: Annotated[
        int | None, attention(help="The same in bytes per token and layer, in the dtype of the result (--dtype).")
    ] = None,
    budget: Annotated[
        int | None,
        attention(
            help="Bytes cached per token by the whole model, in the dtype of the result: key/value heads (gqa) or R "
            "and P (mla) are chosen layer by layer, by what each layer would lose.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        attention(help="Change these layers alone, such as 0,2-5; the result is a mixed model. Default: all."),
    ] = None,
    method: Annotated[
        Method,
        method_panel(
            help="How several heads become one. auto tries settings of lowrank and procrustes and keeps what changes "
            "the predictions least (without --text it is lowrank); mean, first and random are the GQA paper's.",
            show_default=True,
        ),
    ] = "auto",
    regroup: Annotated[
        bool | None,
        method_panel(
            "--regroup/--no-regroup", help="Merge heads that are alike, or neighbours. Default: auto tries both."
        ),
    ] = None,
    refit: Annotated[
        bool | None,
        method_panel(
            "--refit/--no-refit",
            help="Fit the output projections to the source's outputs on the text: nearer at once, and with fewer heads "
            "harder to heal. Default: auto tries both.",
        ),
    ] = None,
    seed: Annotated[
        int, method_panel(help="For random, regrouping, and the order of the text.", show_default=True)
    ] = 0,
    text: Annotated[
        list[Path] | None,
        text_panel(
            help="File or folder of .txt, .md, .rst, .py, .jsonl or .parquet; may be repeated. Three disjoint parts "
            "calibrate, let auto choose, and measure. Without text the weights alone decide and nothing is measured.",
        ),
    ] = None,
    evaluation_text: Annotated[
        list[Path] | None, text_panel(help="Measure on this text instead of a part of --text; may be repeated.")
    ] = None,
    text_column: Annotated[str, text_panel(help="Column of .jsonl, .json and .parquet.", show_default=True)] = "text",
    calibration_tokens: Annotated[
        int,
        text_panel(
            min=1, help="A quarter as many again, at most 16,384, are for auto to choose by.", show_default=True
        ),
    ] = 131072,
    evaluation_tokens: Annotated[int, text_panel(min=1, help="Tokens to measure on.", show_default=True)] = 65536,
    sequence_length: Annotated[
        int | None, text_panel(min=2, help="Tokens of a block. Default: 2048, or what the model was made for.")
    ] = None,
    batch_size: Annotated[
        int, text_panel(min=1, max=1_000_000, help="Blocks computed at a time.", show_default=True)
    ] = 4,
    dtype: Annotated[
        Dtype, running(help="Of the result, and for computing; auto: the checkpoint's own.", show_default=True)
    ] = "auto",
    device: Annotated[str | None, running(help="cpu, cuda, cuda:1 ... Default: cuda where there is one.")] = None,
    dry_run: Annotated[
        bool,
        running("--dry-run", help="Check all but the weights, show what would be done, write nothing."),
    ] = False,
    force: Annotated[bool, running("--force", help=FORCE)] = False,
) -> None:
    """Give a trained model another attention, say what that cost, and save it as a Hub repository.

    Exact: a multiple of the key/value heads (GQA to MHA), MQA to MLA, MLA without a latent norm to MHA. Everything else
    is lossy, and a short training heals it. TARGET gets weights, configuration, code, tokenizer, a model card and the
    report `conversion.json`.
    """
    with user_errors(target):
        arguments = {name: value for name, value in context.params.items() if name not in ("force", "dry_run")}
        arguments["layers"] = None if layers is None else parse_layers(layers)
        job = Job(**arguments)
        if dry_run:
            plan = job.plan(force)
            show(plan)
            how = "exactly" if plan["exact"] else f"by {plan['method']}" + (", calibrated on the text" if text else "")
            out.print(f"Dry run: would convert {how}. Nothing was written.")
            return
        with progress_bars() as stage:
            report = job.run(force, stage)
        show(report)
        out.print(describe_cost(report))
        saved(target, "report in conversion.json, card in README.md")


@app.command("import")
def import_(source: Source, target: Target, force: Force = False) -> None:
    """Rewrite a Llama, Mistral, Qwen2, Qwen3, SmolLM2, dense DeepSeek or Youtu checkpoint as a GQA model, exactly.

    Weights are copied tensor by tensor, in their dtype; tokenizer and generation configuration are carried over.
    """
    with user_errors(target), progress_bars() as stage:
        config = import_checkpoint(source, target, force=force, progress=stage("importing tensors"))
    saved(target, f"{config.num_hidden_layers} layers")


@app.command()
def export(
    source: Source,
    target: Target,
    family: Annotated[
        str | None,
        typer.Option(help="llama, mistral, qwen2, qwen3 or deepseek_v3. Default: what fits.", show_default=False),
    ] = None,
    force: Force = False,
) -> None:
    """Rewrite a GQA model as transformers' own class, for tools that know only that.

    Refused with the reason where the class cannot express the model: mixed kinds, chosen frequencies, other biases.
    """
    with user_errors(target), progress_bars() as stage:
        config = export_checkpoint(source, target, family=family, force=force, progress=stage("exporting tensors"))
    saved(target, f"a {config.model_type} model")


@app.command()
def inspect(source: Source, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the attention of each layer, what it caches, and what it can become exactly, with loss, or not at all."""
    with user_errors():
        found = inspect_checkpoint(source)
        if as_json:
            print(json.dumps(found, indent=2), flush=True)
        else:
            show_inspection(found)


add_training_commands(app)


@contextmanager
def user_errors(target: Path | None = None) -> Iterator[None]:
    """What the user can put right or has asked for as one line on stderr; anything else is a defect, with traceback."""
    before = identity(target)

    def kept() -> str:
        how = "as it was" if identity(target) == before else "written and complete"
        return f": {target} is {how}, nothing half-written is left" if target else ""

    try:
        yield
    except (ConversionError, StrictDataclassError, SafetensorError) as error:
        # A field's own check is the cause of what the configuration class raises.
        stop(str(error.__cause__ if isinstance(error, StrictDataclassError) else error))
    except OSError as error:
        where = error.filename2 or error.filename  # of a copy, the one that is written
        said = ": ".join(str(part) for part in (where, error.strerror) if part) or str(error)
        stop(f"{said}{kept()}; make room and run the command again" if error.errno in FULL else said)
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith("Symlink loop"):  # as Python before 3.13 says of a path
            stop(str(error))
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        stop(f"there is not enough memory{kept()}; a smaller --batch-size may help: {str(error)[:200]}")
    except KeyboardInterrupt:
        stop(f"stopped by Ctrl-C{kept()}", 130)
    except SystemExit as error:  # by `main`'s handler of signals
        stop(f"stopped by a signal{kept()}", int(error.code or 0))


def identity(path: Path | None) -> tuple[int, int] | None:
    """Which folder lies at `path`: another one where it was replaced."""
    try:
        status = path.stat() if path else None
    except OSError:
        status = None
    return status and (status.st_dev, status.st_ino)


def stop(said: str, code: int = 1) -> NoReturn:
    typer.echo(f"error: {printable(' '.join(said.split()))[:LONGEST]}", err=True)
    raise typer.Exit(code) from None


def printable(text: str | Path) -> str:
    """Names may hold what a terminal takes for commands, or cannot show."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in str(text))


@contextmanager
def progress_bars() -> Iterator[Stage]:
    """Progress bars on stderr; gives a function from a description to what wraps an iterable."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = ProgressBars(*columns, console=err)

    def stage(description: str) -> Progress:
        progress.start()
        return partial(progress.track, description=description)

    try:
        yield stage
    finally:
        if progress.live.is_started:
            progress.stop()


def saved(target: Path, what: str) -> None:
    out.print(f"Saved {printable(target)}: {what}.", soft_wrap=True)


def show(report: dict[str, Any]) -> None:
    table = Table("", "before", "after")
    for cells in summary(report):
        table.add_row(*cells)
    layers = Table("layers", "attention", "error of its output", "loss")
    for row in layer_rows(report):
        layers.add_row(*row)
    out.print(layers, table)


def show_inspection(found: dict[str, Any]) -> None:
    family = "" if found["family"] == "gqa" else f", a {found['family']} model that can be imported"
    out.print(
        f"{printable(found['source'])}{family}: {found['parameters']:,} parameters, {found['dtype']}", soft_wrap=True
    )
    table = Table("layers", "attention", "window", "cache, bytes per token and layer")
    columns = ("attention", "sliding_window", "cache_bytes_per_token")
    for where, (what, window, size) in runs(tuple(layer[name] for name in columns) for layer in found["layers"]):
        table.add_row(where, what, "" if window is None else f"{window:,}", f"{size:,}")
    out.print(table, f"Cache of the whole model: {found['cache_bytes_per_token']:,} bytes per token.")
    can = found["conversions"]
    for title, kinds in (("Exactly", can["exact"]), ("With loss", can["lossy"])):
        listed = ", ".join(f"{name} ({size:,} bytes per token)" for name, size in kinds.items())
        out.print(f"{title}: {listed or 'nothing'}.", soft_wrap=True)
    reasons: dict[str, list[str]] = {}
    for name, reason in can["impossible"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        out.print(f"Not: {', '.join(names)}: {reason}.", soft_wrap=True)
    export = found["export"]
    how = f"to transformers' own class, as {export['family']}" if export["family"] else ""
    text = ": ".join(filter(None, (how, export["reason"])))
    out.print(f"Export: {text.rstrip('.')}.", soft_wrap=True)


def main() -> None:
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the second
            # So that what is half-written is removed.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()


if __name__ == "__main__":
    main()
