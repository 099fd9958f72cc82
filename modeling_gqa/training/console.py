"""What a script prints, and how it ends. Nothing here imports a library that is slow to import."""

import os
import re
import sys
import time
from collections.abc import Callable

from ..common.errors import UserError
from .errors import missing_package


def is_main() -> bool:
    """Return whether this process writes and prints: a single process does, of torchrun's the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str = "") -> None:
    """Print a line, on the main process alone."""
    if is_main():
        print(message, flush=True)


def warn(message: str) -> None:
    """Print `warning: MESSAGE` on stderr, on the main process alone."""
    if is_main():
        print(f"warning: {message}", file=sys.stderr, flush=True)


def main(script: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a script, and turn errors that the user can correct into one line on stderr and an exit code.

    Args:
        script: `pretrain` or `uptrain`. It imports torch and transformers itself, so that Ctrl-C is answered during
            these seconds as well.
        argv: arguments of the script; those of this process if left out.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        script(argv)
    except KeyboardInterrupt:  # outside of a run, which turns it into `Interrupted`
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: where Ctrl-C has interrupted an import, Python would end by the signal and not by this code.
        os._exit(130)
    except UserError as error:
        stop(name_options(str(error), argv), error.exit_code)
    except ImportError as error:
        if (message := missing_package(error)) is None:
            raise
        stop(message, 1)


def name_options(message: str, argv: list[str]) -> str:
    """Return a message in which a field that `argv` sets is named as its option: `--max-steps`, not `max_steps`.

    Fields that a YAML file sets keep the names that they have there.

    Example:
        ```python
        from modeling_gqa.training.console import name_options

        said = name_options("max_steps is -1 and num_train_epochs is 0", ["tiny", "--max-steps=-1"])
        assert said == "--max-steps is -1 and num_train_epochs is 0"
        ```
    """
    given = {argument.partition("=")[0].replace("-", "_") for argument in argv if argument.startswith("--")}
    return re.sub(
        r"(?<![\w./-])[a-z0-9]+(_[a-z0-9]+)+\b",
        lambda field: "--" + field[0].replace("_", "-") if f"__{field[0]}" in given else field[0],
        message,
    )


def stop(message: str, code: int) -> None:
    """Print `error: MESSAGE` and end this process with the exit code `code`."""
    if not is_main():
        # This process mostly fails because the main process has failed, and torchrun ends it meanwhile.
        time.sleep(10)
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
