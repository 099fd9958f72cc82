"""The recipe that a run's folder keeps, by which a resumption knows that it is the same run."""

import json
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedConfig

from ...common.errors import UserError
from ..folder.manifest import SAVED_MODEL, SAVED_RECIPE
from .fields import FREE_ON_RESUME


def save_recipe(folder: Path, values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Write `recipe.yaml` and `model.json`: every option of a run, and the model's configuration.

    Args:
        folder: an existing folder.
        values: what `load_recipe` returns beside the recipe; tokens of the Hub are left out.
    """
    kept = {name: value for name, value in values.items() if name not in ("hub_token", "local_rank")}
    (folder / SAVED_RECIPE).write_text(yaml.safe_dump(kept), encoding="utf-8")
    (folder / SAVED_MODEL).write_text(config.to_json_string(use_diff=False), encoding="utf-8")


def compare_recipes(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise `UserError` where the run in `output_dir` has other options or another model; it names them.

    Options in `FREE_ON_RESUME` may differ.
    """
    folder = Path(values["output_dir"])
    if not (folder / SAVED_RECIPE).is_file() or not (folder / SAVED_MODEL).is_file():
        raise UserError(f"nothing to resume in {folder}: it holds no {SAVED_RECIPE}")
    try:
        saved = dict(yaml.safe_load((folder / SAVED_RECIPE).read_text(encoding="utf-8")))
        model = dict(json.loads((folder / SAVED_MODEL).read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / SAVED_RECIPE} or {SAVED_MODEL} is damaged: {error}") from error
    ours = json.loads(config.to_json_string(use_diff=False))
    pairs = [(key, saved.get(key, value), value) for key, value in values.items() if key not in FREE_ON_RESUME]
    pairs += [
        (f"model {key}", model.get(key), ours.get(key)) for key in sorted({*model, *ours} - {"transformers_version"})
    ]
    changed = [f"{key} ({then!r} then, {now!r} now)" for key, then, now in pairs if then != now]
    if changed:
        raise UserError(
            f"the run in {folder} has another recipe: {', '.join(changed)}; resume with the earlier values, or leave "
            "--resume out and give a new --output-dir"
        )
