"""What a script prints, and how it ends. Nothing here imports a library that is slow to import."""

import os
import sys
import time
from collections.abc import Callable

from .errors import RecipeError, missing_package


def is_main() -> bool:
    """Whether this is the process that writes and prints: the only one, or torchrun's number 0."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str = "") -> None:
    """Print a line, on the main process alone."""
    if is_main():
        print(message, flush=True)


def main(script: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a script, and turn errors that the user can correct into one line on stderr and an exit code.

    Args:
        script: `pretrain` or `uptrain`. It imports torch and transformers itself, so that Ctrl-C is answered during
            these seconds as well.
        argv: arguments of the script; those of this process if left out.
    """
    try:
        script(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # outside of a run, which turns it into `Interrupted`
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: where Ctrl-C has interrupted an import, Python would end by the signal and not by this code.
        os._exit(130)
    except RecipeError as error:
        stop(str(error), error.exit_code)
    except ImportError as error:
        if (message := missing_package(error)) is None:
            raise
        stop(message, 1)


def stop(message: str, code: int) -> None:
    """Print `error: MESSAGE` and end this process with the exit code `code`."""
    if not is_main():
        # This process mostly fails because the main process has failed, and torchrun ends it meanwhile.
        time.sleep(10)
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
