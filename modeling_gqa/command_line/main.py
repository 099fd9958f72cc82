"""The command `modeling-gqa`: its commands, what all of them have in common, and how it ends.

modeling-gqa convert SOURCE TARGET --attention-kind mla --cache-size 128 --text corpus/
"""

import signal
import sys
import warnings
from typing import Annotated, Any

from ..common.errors import install_extra

try:
    import rich  # noqa: F401
    import typer
except ImportError as missing:
    raise SystemExit(
        f"error: modeling-gqa needs {missing.name}, which is not installed: {install_extra('conversion')}"
    ) from None

from transformers.utils import logging

from .. import __version__
from .console import err, printable
from .conversion import add_conversion_commands
from .delegated import add_delegated_commands
from .report import add_report_command
from .serving import SUMMARIES, run_served
from .training import SCRIPTS, run_script

# Wrong usage, of which a bad value is one kind; typer does not export the class.
UsageError: Any = typer.BadParameter.__base__


def kebab_case(name: str) -> str:
    return name.replace("_", "-")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    # `--cache_size` is read as `--cache-size`, which help shows; the commands inherit it.
    context_settings={"token_normalize_func": kebab_case},
)
add_conversion_commands(app)
add_report_command(app)
add_delegated_commands(app, SCRIPTS, run_script)
add_delegated_commands(app, SUMMARIES, run_served)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modeling-gqa {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Change the attention of a trained language model: between MHA, MQA, GQA and MLA, and to and from transformers'
    own classes.

    A SOURCE is a folder with a checkpoint in safetensors, a GGUF file, or the name of a model on the Hub. Commands
    change nothing in it and read no file outside it. A TARGET is the folder to write. A command writes
    `.TARGET.new-PID` beside it and renames that at the end, so TARGET is complete or untouched. If a command is killed,
    the next one with the same TARGET removes what it left, or puts back what it had moved.

    A TARGET that exists is refused; with `--force` a checkpoint or an empty folder is replaced, and nothing else. Also
    refused: a TARGET that another process is writing, that is, contains or lies in the SOURCE or the text, or that is
    the current folder.

    Options may be written `--cache-size` or `--cache_size`.

    Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 129, 130 or 143 stopped by a signal.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.showwarning = lambda message, *_: err.print(f"warning: {message}", soft_wrap=True)


def main() -> None:
    """Run the command that `sys.argv` holds; signals that end it let it remove what is half-written."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the second
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # the help
        else:
            said = error.format_message().replace("Value error, ", "")
            typer.echo(f"error: {printable(' '.join(said.split()))}", err=True)
        sys.exit(2)
    except typer.Abort:
        typer.echo("error: stopped by Ctrl-C", err=True)
        sys.exit(130)
