"""Results as JSON: of reports, conversions, comparisons, studies, training and benchmarks."""

import json
import math
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from .atomic import write_text


def to_json(results: Any) -> str:
    """Return results as JSON that every program reads.

    Numbers that JSON does not have (nan and infinite ones) become null. Data classes become objects. Paths, dtypes and
    other values become their text.

    Args:
        results: dictionaries, data classes, lists, texts, numbers.

    Example:
        ```python
        from modeling_gqa.common.results import to_json

        assert to_json([1.5, float("nan")]) == "[\\n  1.5,\\n  null\\n]\\n"
        ```
    """
    return json.dumps(plain(results), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, results: Any) -> None:
    """Write results as JSON to a file, which is there whole or not at all, also where the process is killed."""
    write_text(path, to_json(results))


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
