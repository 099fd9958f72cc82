"""`modeling-gqa pretrain` and `modeling-gqa uptrain`: the scripts of `modeling_gqa.training` and their options."""

import os
import sys
from collections.abc import Callable

import typer
from transformers.utils import logging

SCRIPTS = {
    "pretrain": "Train a new model from a RECIPE: tiny, base-124m, quickstart, or a YAML file. `pretrain --help` shows "
    "its options.",
    "uptrain": "Heal a converted model from a RECIPE: uptrain-tiny, uptrain-1b, or a YAML file. `uptrain --help` shows "
    "its options.",
}


def add_training_commands(app: typer.Typer) -> None:
    """Add `pretrain` and `uptrain` to a command line; their arguments are parsed by the scripts.

    Example:
        ```python
        import typer

        from modeling_gqa.command_line.training import add_training_commands

        app = typer.Typer()
        add_training_commands(app)
        assert [command.name for command in app.registered_commands] == ["pretrain", "uptrain"]
        ```
    """
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name, summary in SCRIPTS.items():
        app.command(name, help=summary, add_help_option=False, context_settings=settings)(training_command(name))


def training_command(name: str) -> Callable[[typer.Context], None]:
    """Return the command that runs the script `name`."""

    def script(argv: list[str]) -> None:
        from ..training.command_line import load_recipe
        from ..training.pretrain import pretrain
        from ..training.recipe import Recipe
        from ..training.uptrain import uptrain
        from ..training.uptrain_recipe import UptrainRecipe

        prog = f"modeling-gqa {name}"
        if "OMP_WAIT_POLICY" not in os.environ:
            load_recipe(argv, UptrainRecipe if name == "uptrain" else Recipe, prog)  # errors come before the restart
            restart_with_passive_threads()
        (uptrain if name == "uptrain" else pretrain)(argv, prog)

    def run(context: typer.Context) -> None:
        # The scripts import packages that only the extra `training` installs; `main` says which one is missing.
        from ..training.console import main

        logging.set_verbosity_warning()  # the other commands show only errors
        main(script, context.args)

    return run


def restart_with_passive_threads() -> None:
    """Start this command again with OMP_WAIT_POLICY=PASSIVE.

    OpenMP reads the variable when torch is imported, which has happened. Threads that wait actively make training on
    two cores four times slower while another program runs.
    """
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
