"""`modeling-gqa serve` and `modeling-gqa chat`: transformers' own commands, which find our classes."""

import signal
import time
from typing import Any

from modeling_gqa.common.console import stop


def serve(name: str, arguments: list[str]) -> None:
    """Run `transformers NAME`, which is `serve` or `chat`, with our classes among its own.

    The process ends where a package is not installed, the model is not there, or a chat's server does not answer.
    """
    import transformers

    # A server has nothing to clean up, and its threads would outlive an exception.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

    from modeling_gqa.modeling_gqa import AUTO_CLASSES

    from .errors import install_extra, one_line

    # `transformers serve` looks a model's class up by its name among these.
    for model_class in AUTO_CLASSES.values():
        setattr(transformers, model_class.__name__, model_class)
    try:
        from fastapi import HTTPException
        from transformers.cli import chat
        from transformers.cli.serving import model_manager
        from transformers.cli.transformers import app as transformers_app

        model_manager.ModelManager = served_models(model_manager.ModelManager)  # type: ignore[misc]
        try:
            transformers_app([name, *arguments], prog_name="modeling-gqa")
        except HTTPException as error:  # of the model that the server should begin with
            stop(error.detail)
        except (chat.httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
            if name == "serve":
                raise
            # There is no server, it has stopped, or it says what is wrong.
            stop(f"the chat has ended: {one_line(error)}; modeling-gqa serve DIR starts a server")
    except ImportError as error:
        stop(f"modeling-gqa {name} needs more packages: {install_extra('serving')} ({error})")


def served_models(manager: Any) -> Any:
    """Return a class like transformers' of a server's models, which says what it lacks and lists what it serves."""
    from fastapi import HTTPException
    from huggingface_hub.errors import CacheNotFound

    from .errors import one_line

    started = int(time.time())

    class ServedModels(manager):
        def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().load_model_and_processor(model_id_and_revision, *args, **kwargs)
            except OSError as error:  # there is no such model
                raise HTTPException(404, f"cannot load {model_id_and_revision}: {one_line(error)}") from None

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
            try:
                cached = manager.get_gen_models(cache_dir)
            except CacheNotFound:  # where nothing was fetched from the Hub so far
                cached = []
            names = [self.force_model] if self.force_model else []
            names += [name.removesuffix("@main") for name in list(self.loaded_models)]
            listed = {model["id"] for model in cached}
            own = [name for name in dict.fromkeys(names) if name not in listed]
            return [{"id": name, "object": "model", "owned_by": "", "created": started} for name in own] + cached

    return ServedModels
