"""Commands whose arguments another parser reads."""

from collections.abc import Callable

import typer


def add_delegated_commands(app: typer.Typer, summaries: dict[str, str], run: Callable[[str, list[str]], None]) -> None:
    """Add a command of each name in `summaries`, which calls `run(name, arguments)` with all that follows the name.

    Example:
        ```python
        import typer

        from modeling_gqa.command_line.delegated import add_delegated_commands

        app = typer.Typer()
        add_delegated_commands(app, {"greet": "Greet."}, lambda name, arguments: print(name, *arguments))
        assert [command.name for command in app.registered_commands] == ["greet"]
        ```
    """
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name, summary in summaries.items():
        app.command(name, help=summary, add_help_option=False, context_settings=settings)(_command(run, name))


def _command(run: Callable[[str, list[str]], None], name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        run(name, context.args)

    return command
