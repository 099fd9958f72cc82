"""What a script prints, and how it ends where something is wrong: in one line."""

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from .recipe import RecipeError

# How tokenizers, safetensors and torch report that a file could not be written, each with a class of its own.
WRITE_FAILURES = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error")


class Interrupted(RecipeError):
    """The user has pressed Ctrl-C; the message says what is kept."""

    exit_code = 130


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(message: str = "") -> None:
    if is_main():
        print(message, flush=True)


def failed_to_write(error: Exception, folder: Path) -> str | None:
    """Say in one line what the operating system refused; `None` for any other error."""
    said = " ".join(str(error).split())
    if isinstance(error, OSError):
        reason = f"{error.strerror or said}" + (f": {error.filename}" if error.filename else "")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return reason
    elif WRITE_FAILURES.search(said):
        reason = f"a file could not be written: {said[:200]}"
    else:
        return None
    while not folder.exists():
        folder = folder.parent
    return f"{reason} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder})"


def main(script: Callable[[list[str]], None]) -> None:
    """Run a script; what the user can put right is one line on stderr and an exit code other than 0."""
    logging.disable_progress_bar()  # of weights being written; training has its own
    try:
        script(sys.argv[1:])
    except (RecipeError, KeyboardInterrupt) as error:
        if not is_main():
            # It mostly fails as the main process does, or because that did, and torchrun ends it meanwhile.
            time.sleep(10)
        print(f"error: {error if isinstance(error, RecipeError) else 'interrupted'}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 130))
