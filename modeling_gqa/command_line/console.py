"""What all commands print: errors in one line, progress bars, and names that a terminal can show."""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars
from safetensors import SafetensorError

from ..common.errors import UserError
from ..common.progress import Progress, ShowProgress, followed, progress_lines
from ..conversion.layer_store import layers_folder

# Paths may hold brackets and colons, so markup and emoji are off.
out = Console(soft_wrap=False, markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)
LONGEST = 2000  # characters of an error, which may quote names from a checkpoint
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def user_errors(target: Path | None = None) -> Iterator[None]:
    """Show errors that a user can act on, and interruptions, as one line on stderr.

    Any other exception is a defect of this package and keeps its traceback.

    Args:
        target: what the command writes; a line about an interruption or a full disk says what became of it.
    """
    before = identity(target)

    def kept() -> str:
        how = "as it was" if identity(target) == before else "written and complete"
        layers = target is not None and layers_folder(target).exists()
        going_on = "; the layers that are finished are kept, and the same command goes on from them" if layers else ""
        return f": {target} is {how}, nothing half-written is left{going_on}" if target else ""

    try:
        yield
    except (UserError, StrictDataclassError, SafetensorError) as error:
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
        stop(f"there is not enough memory{kept()}; a smaller --batch-size or --device cpu may help: {str(error)[:200]}")
    except KeyboardInterrupt:
        stop(f"stopped by Ctrl-C{kept()}", 130)
    except SystemExit as error:  # raised by `main`'s handler of signals
        stop(f"stopped by a signal{kept()}", int(error.code or 0))


def identity(path: Path | None) -> tuple[int, int] | None:
    """Return what tells the folder at `path` from another one that has replaced it; `None` where there is none."""
    try:
        status = path.stat() if path else None
    except OSError:
        status = None
    return status and (status.st_dev, status.st_ino)


def stop(said: str, code: int = 1) -> NoReturn:
    """Print an error and end the command with an exit code."""
    typer.echo(f"error: {printable(' '.join(said.split()))[:LONGEST]}", err=True)
    raise typer.Exit(code) from None


def printable(text: str | Path) -> str:
    """Return `text` with escapes for characters that a terminal takes for commands or cannot show."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in str(text))


@contextmanager
def progress_bars() -> Iterator[ShowProgress]:
    """Show progress on stderr, in bars where it is a terminal and else in a line every half minute.

    Yields:
        A function from a description to what wraps an iterable.
    """
    if not err.is_terminal:
        yield progress_lines(lambda line: err.print(line, soft_wrap=True))
        return
    before, after = (TextColumn(f"{{task.fields[{name}]}}") for name in ("steps", "left"))
    progress = ProgressBars(
        TextColumn("{task.description}"), BarColumn(), before, TimeElapsedColumn(), after, console=err
    )

    def bar(description: str, items: Iterable) -> Iterator:
        task = progress.add_task(description, total=None, steps="", left="")
        number = 0
        for item, step in followed(items):
            steps = f"{step.number}/{step.total}" if step.total else f"{step.number}"
            whole = 1 if step.total else None
            progress.update(task, total=whole, completed=step.share, refresh=True, steps=steps, left=step.left)
            yield item
            number = step.number + 1
        progress.update(task, total=1, completed=1, steps=f"{number}/{number}", left="")

    def show_progress(description: str) -> Progress:
        progress.start()
        return partial(bar, description)

    try:
        yield show_progress
    finally:
        if progress.live.is_started:
            progress.stop()


def saved(target: Path, what: str) -> None:
    out.print(f"Saved {printable(target)}: {what}.", soft_wrap=True)
