"""What all commands print: lines, and errors in one line."""

import errno
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from safetensors import SafetensorError
from transformers.utils import logging

from modeling_gqa_cli.errors import UserError, is_main, missing_package, printable, stop

__all__ = ["Interrupted", "err", "is_main", "out", "printable", "say", "stop", "user_errors", "warn"]


class Screen(Console):
    """A console whose reader may leave, as `head` does: the rest is not printed, and the command goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


# Paths may hold brackets and colons, so markup and emoji are off.
out = Screen(soft_wrap=False, markup=False, emoji=False)
err = Screen(stderr=True, markup=False, emoji=False)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How tokenizers, safetensors and torch report that a file could not be written; each has an exception class of its own.
WRITE_FAILURES = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error")


class Interrupted(UserError):
    """The user has pressed Ctrl-C; the message says what is kept."""

    exit_code = 130


def say(message: str = "") -> None:
    """Print a line, on the main process alone."""
    if is_main():
        print(message, flush=True)


def warn(message: str) -> None:
    """Print `warning: MESSAGE` on stderr, on the main process alone."""
    if is_main():
        print(f"warning: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


@contextmanager
def user_errors(
    target: Path | None = None, layers: Callable[[Path], Path] | None = None, argv: Sequence[str] = ()
) -> Iterator[None]:
    """Show errors that a user can act on, interruptions and signals as one line on stderr, and end the process.

    Any other exception is a defect of this package and keeps its traceback.

    Args:
        target: what the command writes; a line about an interruption or a full disk says what became of it.
        layers: returns for `target` the folder of finished layers, which the same command goes on from.
        argv: arguments in which options were given: an error names them as they are written there.
    """
    before = identity(target)

    def kept() -> str:
        how = "as it was" if identity(target) == before else "written and complete"
        going_on = (
            "; the same command goes on from the finished layers"
            if target and layers and layers(target).exists()
            else ""
        )
        return f": {target} is {how}, nothing half-written is left{going_on}" if target else ""

    try:
        yield
    except (UserError, StrictDataclassError, SafetensorError) as error:
        # A field's own check is the cause of what the configuration class raises.
        said = str(error.__cause__ if isinstance(error, StrictDataclassError) else error)
        stop(name_options(said, argv), getattr(error, "exit_code", 1))
    except ImportError as error:
        if (said := missing_package(error)) is None:
            raise
        stop(said)
    except BrokenPipeError:  # which `main` answers
        raise
    except OSError as error:
        where = error.filename2 or error.filename  # of a copy, the one that is written
        said = ": ".join(str(part) for part in (where, error.strerror) if part) or str(error)
        stop(f"{said}{kept()}; make room and run the command again" if error.errno in FULL else said)
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith("Symlink loop"):  # as Python before 3.13 says of a path
            stop(str(error))
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        smaller = "--per-device-train-batch-size or --sequence-length" if argv else "--batch-size or --device cpu"
        stop(f"there is not enough memory{kept()}; a smaller {smaller} may help: {str(error)[:200]}")
    except KeyboardInterrupt:
        stop(f"stopped by Ctrl-C{kept()}", 130)
    except SystemExit as error:
        if argv:  # a script, which says so itself
            raise
        stop(f"stopped by a signal{kept()}", int(error.code or 0))


def quiet() -> None:
    """Let signals end the process by an exception, warnings be one line, and transformers print only errors."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the second
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def identity(path: Path | None) -> tuple[int, int] | None:
    """Return what tells the folder at `path` from another one that has replaced it; `None` where there is none."""
    try:
        status = path.stat() if path else None
    except OSError:
        status = None
    return status and (status.st_dev, status.st_ino)


def name_options(message: str, argv: Sequence[str]) -> str:
    """Return a message in which a field that `argv` sets is named as its option: `--max-steps`, not `max_steps`."""
    given = {argument.partition("=")[0].replace("-", "_") for argument in argv if argument.startswith("--")}
    return re.sub(
        r"(?<![\w./-])[a-z0-9]+(_[a-z0-9]+)+\b|^[a-z]+\b",
        lambda field: "--" + field[0].replace("_", "-") if f"__{field[0]}" in given else field[0],
        message,
    )


def failed_to_write(error: Exception, folder: Path) -> str | None:
    """Return what the operating system refused to write below `folder`, in one line; `None` for any other error."""
    said = " ".join(str(error).split())
    if isinstance(error, OSError):
        reason = f"{error.strerror or said}" + (f": {error.filename}" if error.filename else "")
        if error.errno not in FULL:
            return reason
    elif WRITE_FAILURES.search(said):
        reason = f"a file could not be written: {said[:200]}"
    else:
        return None
    while not folder.exists():
        folder = folder.parent
    return f"{reason} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder})"


def saved(target: Path, what: str) -> None:
    out.print(f"Saved {printable(target)}: {what}.", soft_wrap=True)
