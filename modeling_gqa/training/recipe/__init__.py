"""What a run is to do: its options, where they come from, and the model that they name."""

from typing import Any

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import read_values

from .pretraining import Recipe


def recipe_class(script: str) -> type[Any]:
    """Return the dataclass of the options of `pretrain` or `uptrain`."""
    if script == "pretrain":
        return Recipe
    from .uptraining import UptrainRecipe  # which needs what reads checkpoints

    return UptrainRecipe


def load_recipe(
    argv: list[str], recipe_class: type[Any] = Recipe, prog: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Parse a script's arguments.

    Args:
        argv: a recipe's name or path, and options.
        recipe_class: `Recipe`, `UptrainRecipe` or `CompareRecipe`.
        prog: how the script was started, for errors.

    Returns:
        The recipe, and its values by field, which `save_recipe` writes and `compare_recipes` reads.

    Raises:
        UserError: an unknown recipe, field or option, a value of the wrong type, or values that do not go together.

    Example:
        ```python
        from modeling_gqa.training.recipe import load_recipe

        recipe, values = load_recipe(["tiny", "--preset", "tiny-mla", "--max-steps", "100"])
        assert recipe.max_steps == values["max_steps"] == 100 and recipe.output_dir == "runs/tiny-mla"
        ```
    """
    values = read_values(argv, recipe_class, prog or f"modeling-gqa {recipe_class.script}")
    try:
        return recipe_class(**values), values
    except Exception as error:  # TrainingArguments reads files, asks packages and devices: each has its own classes
        raise UserError(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error
