"""JSON objects in options, and options as arguments."""

import json
from typing import Any


def as_object(name: str, value: dict | str | None) -> dict[str, Any]:
    """Return a JSON object that is given as such or as text; raises `ValueError`."""
    try:
        found = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError as error:
        raise ValueError(f"{name} is no JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be a JSON object, not {found!r}")
    return found


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Return options of pretraining as arguments.

    Example:
        ```python
        from modeling_gqa.training.recipe.objects import as_arguments

        assert as_arguments({"max_steps": 5, "data_files": ["a", "b"]}) == ["--max_steps=5", "--data_files", "a", "b"]
        ```
    """
    arguments: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments
