"""`modeling-gqa serve` and `modeling-gqa chat`: transformers' own commands, which find our classes."""

import signal
from collections.abc import Callable

import typer

SUMMARIES = {
    "serve": "Serve a checkpoint by `transformers serve`, with an OpenAI-compatible API: `modeling-gqa serve DIR`. "
    "`serve --help` shows its options.",
    "chat": "Chat with a model that is served, by `transformers chat`: `modeling-gqa chat DIR [URL]`. "
    "`chat --help` shows its options.",
}


def add_serving_commands(app: typer.Typer) -> None:
    """Add `serve` and `chat` to a command line; their arguments are parsed by transformers.

    Example:
        ```python
        import typer

        from modeling_gqa.command_line.serving import add_serving_commands

        app = typer.Typer()
        add_serving_commands(app)
        assert [command.name for command in app.registered_commands] == ["serve", "chat"]
        ```
    """
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name, summary in SUMMARIES.items():
        app.command(name, help=summary, add_help_option=False, context_settings=settings)(serving_command(name))


def serving_command(name: str) -> Callable[[typer.Context], None]:
    """Return the command that runs `transformers NAME`."""

    def run(context: typer.Context) -> None:
        import transformers

        # A server has nothing to clean up, and its threads would outlive an exception.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

        from ..common.errors import install_extra
        from ..modeling_gqa import AUTO_CLASSES

        # `transformers serve` looks a model's class up by its name among these.
        for model_class in AUTO_CLASSES.values():
            setattr(transformers, model_class.__name__, model_class)
        try:
            from transformers.cli.transformers import app as transformers_app

            transformers_app([name, *context.args], prog_name="modeling-gqa")
        except ImportError as error:
            typer.echo(
                f"error: modeling-gqa {name} needs more packages: {install_extra('serving')} ({error})", err=True
            )
            raise typer.Exit(1) from None

    return run
