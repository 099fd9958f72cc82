"""From a script's arguments to its recipe: defaults, then a YAML file, then options; the later one wins."""

import json
import os
from argparse import SUPPRESS, Action
from collections.abc import Container
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser

from ...common.errors import UserError, did_you_mean
from .catalogue import find_recipe, public_name, recipe_names
from .pretraining import Recipe


class RecipeParser(HfArgumentParser):
    """The parser of a script's options: `--max-steps` is shown, and `--max_steps` is accepted as well.

    Args:
        recipe_class: `Recipe`, `UptrainRecipe` or `CompareRecipe`; each field is an option.
        prog: how the script was started, for the help.
    """

    def __init__(self, recipe_class: type[Recipe], prog: str) -> None:
        parsed: Any = recipe_class
        texts = {"description": recipe_class.__doc__, "epilog": recipe_class.writes}
        super().__init__(parsed, allow_abbrev=False, prog=prog, usage="%(prog)s RECIPE [--option value ...]", **texts)
        self.options: dict[str, Action] = dict(self._option_string_actions)
        for action in self._actions:
            # Help and errors show these; what is accepted stands in `_option_string_actions`.
            action.option_strings = [name for name in action.option_strings if "_" not in name]
            if action.dest in recipe_class.unused:
                action.help = SUPPRESS
        self.recipe_class = recipe_class
        self.defaults = vars(self.parse_known_args([])[0])  # the values of an empty command line
        names = ", ".join(recipe_names(recipe_class.script))
        self.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of {names}, or the path of a YAML file")

    def error(self, message: str) -> Any:
        # argparse would print every option that TrainingArguments has.
        raise UserError(message)


def load_recipe(
    argv: list[str], recipe_class: type[Any] = Recipe, prog: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Parse a script's arguments.

    Args:
        argv: a recipe's name or path, and options.
        recipe_class: `Recipe`, `UptrainRecipe` or `CompareRecipe`.
        prog: how the script was started, for help and errors; `python -m training.SCRIPT` if left out.

    Returns:
        The recipe, and its values by field, which `save_recipe` writes and `compare_recipes` reads.

    Raises:
        UserError: an unknown recipe, field or option, a value of the wrong type, or values that do not go together.

    Example:
        ```python
        from modeling_gqa.training.recipe.command_line import load_recipe

        recipe, values = load_recipe(["tiny", "--preset", "tiny-mla", "--max-steps", "100"])
        assert recipe.max_steps == values["max_steps"] == 100 and recipe.output_dir == "runs/tiny-mla"
        ```
    """
    parser = RecipeParser(recipe_class, prog or f"python -m training.{recipe_class.script}")
    argv = [as_declared(argument, parser.options) for argument in argv]
    values = read_values(argv, parser)
    try:
        for name, reason in recipe_class.unused.items():
            if values.get(name) != parser.defaults.get(name):
                raise ValueError(f"{name} has no effect here: {reason}")
        return recipe_class(**values), values
    except Exception as error:  # TrainingArguments reads files, asks packages and devices: each has its own classes
        raise UserError(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error


def read_values(argv: list[str], parser: RecipeParser) -> dict[str, Any]:
    """Return the value of every field: its option's in `argv`, else the YAML file's, else its default.

    An option of `argv` that sets the budget also replaces the YAML file's other way of setting it.
    """
    script, known = parser.recipe_class.script, recipe_names(parser.recipe_class.script)
    told = parser.parse_known_args(argv)[0]  # the command line alone
    name = told.recipe
    if name is None:
        raise UserError(f"no recipe given: {parser.prog} NAME, where NAME is {', '.join(known)}")
    path = find_recipe(name, script, parser.prog)
    # The recipe's values go in front of the command line's, so that types are checked alike and the latter win.
    namespace, unknown = parser.parse_known_args([*yaml_arguments(path, parser), *argv])
    if unknown:
        option = unknown[0].partition("=")[0]
        shown = [name for name in parser.options if "_" not in name]
        raise UserError(f"unknown option {option}{did_you_mean(option.replace('_', '-'), shown)}")
    values = {name: getattr(value, "value", value) for name, value in vars(namespace).items() if name != "recipe"}
    budgets = {way for way in parser.recipe_class.budgets if (values[way] or 0) > 0}
    if chosen := {way for way in budgets if (getattr(told, way) or 0) > 0}:
        values |= {way: parser.defaults[way] for way in budgets - chosen}
    output = values["output_dir"] or str(Path("runs") / path.stem)
    values["output_dir"] = os.path.expanduser(output.replace("{preset}", public_name(values.get("preset") or "")))
    return values


def yaml_arguments(path: Path, parser: RecipeParser) -> list[str]:
    """Turn a YAML recipe into arguments for `parser`; a null or a list becomes a default of the parser.

    Raises:
        UserError: the file is not `field: value` lines, or names an unknown field.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path} must hold `field: value` lines")
    known = {item.name for item in fields(parser.recipe_class) if item.init}
    hints = get_type_hints(parser.recipe_class)
    arguments = []
    for key, value in recipe.items():
        key = checkpointing_name(str(key).replace("-", "_"), known)
        if key not in known:
            raise UserError(f"{path}: unknown field {key}{did_you_mean(key, known)}")
        if value is None and parser.get_default(key) is not None:
            raise UserError(f"{path}: {key} has no value; give one, or leave the line out")
        option = parser.options[f"--{key}"]
        if value is None or (value is True and option.type is str and bool in get_args(hints[key])):
            parser.set_defaults(**{key: value})
        elif isinstance(value, list) and option.nargs == "+":
            # As arguments they would swallow a positional one behind them.
            parser.set_defaults(**{key: [str(item) for item in value]})
        elif isinstance(value, list):
            arguments.append(f"--{key}={','.join(map(str, value))}")
        else:
            arguments.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def checkpointing_name(key: str, known: Container[str]) -> str:
    """Return the name that this release of transformers has for activation checkpointing; any other key as it is."""
    new = key.replace("gradient_checkpointing", "activation_checkpointing")
    return new if new in known else key.replace("activation_checkpointing", "gradient_checkpointing")


def as_declared(argument: str, options: Container[str]) -> str:
    """Return an option as the parser declares it, with underscores; every other argument as it is."""
    name, equals, value = argument.partition("=")
    declared = checkpointing_name("--" + name[2:].replace("-", "_"), options)
    return f"{declared}{equals}{value}" if name.startswith("--") and declared in options else argument
