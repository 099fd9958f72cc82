"""The recipes and model presets that come with this package, found by their names or by a path."""

import os
from pathlib import Path

from ...common.errors import UserError, did_you_mean
from ...common.files import CONFIGURATION


def recipe_names(script: str = "pretrain") -> list[str]:
    """Return the names of the packaged recipes for `pretrain`, `uptrain`, `compare` or `study`, sorted.

    Example:
        ```python
        from modeling_gqa.training.recipe.catalogue import recipe_names

        assert recipe_names("pretrain") == ["base-124m", "quickstart", "tiny"]
        ```
    """
    names = sorted(path.stem for path in (CONFIGURATION / "recipes").glob("*.yaml"))
    prefixes = {"uptrain": "uptrain-", "compare": "compare-", "study": "study-"}
    if script in prefixes:
        return [name for name in names if name.startswith(prefixes[script])]
    return [name for name in names if not name.startswith(tuple(prefixes.values()))]


def preset_names() -> list[str]:
    """Return the names of the packaged model presets, sorted."""
    return sorted(path.parent.name for path in (CONFIGURATION / "models").glob("*/config.json"))


def find_recipe(name: str, script: str, command: str) -> Path:
    """Return the YAML file of a recipe.

    Args:
        name: name of a packaged recipe, such as `tiny`, or the path of a file. A packaged recipe comes first; write
            `./tiny` for a file of that name.
        script: `pretrain`, `uptrain`, `compare` or `study`.
        command: how the script was started, for the error messages.

    Raises:
        UserError: there is no such recipe, or it is one for the other script.
    """
    names = recipe_names(script)
    if name in names:
        return CONFIGURATION / "recipes" / f"{name}.yaml"
    path = Path(name)
    if path.is_file():
        return path
    # Recipes of earlier releases, one for each preset.
    family = path.stem.rpartition("-")[0]
    if family in names and path.stem in preset_names():
        raise UserError(f"there is no recipe {name} any more; the same run is: {command} {family} --preset {path.stem}")
    for other in sorted({"pretrain", "uptrain", "compare", "study"} - {script}):
        if path.stem in recipe_names(other):
            start, name = command.partition(script)[0], "study conversion" if other == "study" else other
            raise UserError(f"{path.stem} is a recipe for {other}: {start}{name} {path.stem}")
    hint = did_you_mean(path.stem, names) or f"; there are {', '.join(names)}, and paths of YAML files"
    raise UserError(f"no recipe at {name}{hint}")


def preset_folder(preset: str) -> Path:
    """Return the folder of a preset: a packaged one for its name, any other for its path."""
    folder = CONFIGURATION / "models" / preset
    return folder if preset and folder.is_dir() else Path(preset)


def public_name(name: str) -> str:
    """Return the name of a model, tokenizer or data set as others may read it: of a path, the last part alone."""
    path = os.path.abspath(os.path.expanduser(name))
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.lexists(path)
    return os.path.basename(path) if is_path else name
