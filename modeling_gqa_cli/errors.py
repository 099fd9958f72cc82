"""Errors that a user can act on, in one line, and how they are printed."""

import difflib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

LONGEST_LINE = 400  # characters of an exception's message
LONGEST = 2000  # characters of an error, which may quote names from a checkpoint
# Packages that only extras install, by the names they are imported by: the extra, and the name on the index.
PACKAGES = {
    "accelerate": ("training", "accelerate"),
    "datasets": ("training", "datasets"),
    "filelock": ("conversion", "filelock"),
    "lm_eval": ("evaluation", "lm_eval"),
    "matplotlib": ("plots", "matplotlib"),
    "rich": ("conversion", "rich"),
    "scipy": ("training", "scipy"),
    "yaml": ("training", "PyYAML"),
    "fastapi": ("serving", "fastapi"),
    "openai": ("serving", "openai"),
    "uvicorn": ("serving", "uvicorn"),
}
# How the package is installed, with extras in brackets or none. No package index has it, and whoever registered its
# name on one could run code on the machines of those who install it by name: once it is published somewhere, that
# address stands here.
INSTALL = "pip install '.{extras}' in a checkout of modeling_gqa"


class UserError(ValueError):
    """Raised for what a user can correct: a file, text, field, size, recipe or option.

    The commands print its message in one line, without a traceback.

    Args:
        message: says what is wrong and what to do; line breaks become spaces.

    Example:
        ```python
        from modeling_gqa import GQAConfig
        from modeling_gqa_cli.errors import UserError
        from modeling_gqa.conversion import target_config

        try:
            target_config(GQAConfig(num_attention_heads=8), "gqa", num_key_value_heads=3)
        except UserError as error:
            print(error)  # num_key_value_heads=3 does not divide the 8 query heads: choose one of 1, 2, 4, 8
        ```
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).split()))


class UsageError(UserError):
    """Wrong usage: an unknown option, a value of the wrong type, or a recipe that is not there."""

    exit_code = 2


def install_extra(extra: str) -> str:
    """Return the words that say how the package is installed with the packages of an extra."""
    return INSTALL.format(extras=f"[{extra}]")


def one_line(error: BaseException) -> str:
    """Return the message of an exception, or of its cause, without line breaks and cut after `LONGEST_LINE`."""
    said = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return said if len(said) <= LONGEST_LINE else said[:LONGEST_LINE] + " ..."


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the X of `words` nearest to `word`; "" where none is near."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def listed(items: Iterable[Any]) -> str:
    """Return `1, 2 or 3`, and `1` of one, of at least one item."""
    *others, last = map(str, items)
    return f"{', '.join(others)} or {last}" if others else last


def printable(text: str | Path) -> str:
    """Return `text` with escapes for characters that a terminal takes for commands or cannot show."""
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in str(text))


def is_main() -> bool:
    """Return whether this process writes and prints: a single process does, of torchrun's the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def stop(message: str, code: int = 1) -> NoReturn:
    """Print `error: MESSAGE` in one line on stderr, and end this process with an exit code."""
    if not is_main():
        # This process mostly fails because the main process has failed, and torchrun ends it meanwhile.
        time.sleep(10)
    print(f"error: {printable(' '.join(message.split()))[:LONGEST]}", file=sys.stderr, flush=True)
    sys.exit(code)


def missing_package(error: BaseException | None) -> str | None:
    """Return the command that installs a package that is missing; `None` for any other failed import."""
    while error is not None:  # transformers raises an error of its own from that of the import
        found = PACKAGES.get((getattr(error, "name", None) or "").partition(".")[0])
        if found and isinstance(error, ModuleNotFoundError):
            return f"this needs {found[1]}, which is not installed: {install_extra(found[0])}"
        error = error.__cause__
    return None
