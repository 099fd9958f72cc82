"""`modeling-gqa serve` and `modeling-gqa chat`: transformers' own commands, which find our classes."""

import signal

import typer

SUMMARIES = {
    "serve": "Serve a checkpoint by `transformers serve`, with an OpenAI-compatible API: `modeling-gqa serve DIR`. "
    "`serve --help` shows its options.",
    "chat": "Chat with a model that is served, by `transformers chat`: `modeling-gqa chat DIR [URL]`. "
    "`chat --help` shows its options.",
}


def run_served(name: str, arguments: list[str]) -> None:
    """Run `transformers NAME` with our classes among its own.

    Raises:
        typer.Exit: a package that the command needs is not installed.
    """
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

        transformers_app([name, *arguments], prog_name="modeling-gqa")
    except ImportError as error:
        typer.echo(f"error: modeling-gqa {name} needs more packages: {install_extra('serving')} ({error})", err=True)
        raise typer.Exit(1) from None
