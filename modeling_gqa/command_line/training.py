"""`modeling-gqa pretrain` and `modeling-gqa uptrain`: the scripts of `modeling_gqa.training` and their options."""

from collections.abc import Callable

import typer
from transformers.utils import logging

SCRIPTS = {
    "pretrain": "Train a new model from a RECIPE: tiny, base-124m, quickstart, or a YAML file. `pretrain --help` shows "
    "its options.",
    "uptrain": "Heal a converted model from a RECIPE: uptrain-tiny, uptrain-smollm2, uptrain-1b, or a YAML file. "
    "`uptrain --help` shows its options.",
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
        from ..training.pretrain import pretrain
        from ..training.uptrain import uptrain

        (uptrain if name == "uptrain" else pretrain)(argv, f"modeling-gqa {name}")

    def run(context: typer.Context) -> None:
        # The scripts import packages that only the extra `training` installs; `main` says which one is missing.
        from ..training.console import main

        logging.set_verbosity_warning()  # the other commands show only errors
        main(script, context.args)

    return run
