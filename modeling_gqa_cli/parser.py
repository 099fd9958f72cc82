"""The parser of every command: transformers' `HfArgumentParser`, with help that fits a screen.

It reads transformers' `TrainingArguments`, whose types only it knows, and dataclasses of ours alike.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from .errors import UsageError, did_you_mean

METAVARS = {int: "N", float: "X", Path: "PATH"}


def option(help: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that is an option; `more` goes to argparse."""
    return field(default=default, metadata={"help": help, **more})


class Help(argparse.HelpFormatter):
    """Shows `--max-steps N`, where `--max_steps` is read as well, and only `--no-publish` of a switch that is on."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=35)

    def add_argument(self, action: argparse.Action) -> None:
        if not (action.default is True and action.nargs == "?"):
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        if action.nargs in (0, "?"):
            return names
        values = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        shown = action.metavar or values or METAVARS.get(action.type, "TEXT")  # type: ignore[call-overload]
        return f"{names} {shown}{' ...' if action.nargs == '+' else ''}"


class Parser(HfArgumentParser):
    """A command's parser.

    Args:
        groups: dataclasses, each field an option; their `_argument_group_name` is the heading in help.
        usage: the line that help begins with, behind the program's name.
        description: what the command does.
        epilog: what help ends with.
    """

    def __init__(self, groups: Iterable[Any], prog: str, usage: str, description: str, epilog: str = "") -> None:
        texts: Any = {"description": description, "epilog": epilog, "usage": f"{prog} {usage}"}
        super().__init__(groups, prog=prog, allow_abbrev=False, add_help=False, formatter_class=Help, **texts)

    def error(self, message: str) -> NoReturn:
        # argparse names an option in each of its spellings: `argument --max_steps/--max-steps: ...`.
        message = re.sub(r"--\w+/(--[\w-]+)(/--[\w-]+)*", r"\1", message)
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: list[str]) -> dict[str, Any]:
        """Return the value of every option; raises `UsageError`."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self.refuse(unknown[0], vars(namespace))
        return vars(namespace)

    def refuse(self, argument: str, known: Iterable[str]) -> NoReturn:
        """Raise `UsageError` for an argument that is no option of a field in `known`."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            raise UsageError(f"unexpected argument {name}; usage: {self.usage}")
        options = [f"--{field.replace('_', '-')}" for field in known]
        raise UsageError(f"unknown option {name}{did_you_mean(name.replace('_', '-'), options)}")
