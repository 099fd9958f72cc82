"""Errors that a user can act on, in one line."""

import difflib
from collections.abc import Iterable
from typing import Any

LONGEST_LINE = 400  # characters
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
        from modeling_gqa.common.errors import UserError
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


def listed(items: Iterable[Any], word: str = "or") -> str:
    """Return `1, 2 or 3`, and `1` of one.

    Args:
        items: at least one; shown by `str`.
        word: before the last one.
    """
    *others, last = map(str, items)
    return f"{', '.join(others)} {word} {last}" if others else last
