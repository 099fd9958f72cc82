"""The folder that launches share: whose it is, which recipe it holds, and one report of all."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ...common.console import say
from ...common.errors import UserError
from ...common.pictures import new_figure
from ..folder.listing import read_object, write_text
from ..recipe import FREE_ON_RESUME
from .runs import Runs

RECIPE = "recipe.json"


def begin(runs: Runs, what: str, values: dict[str, Any], free: Collection[str], prepare: Callable[[], None]) -> None:
    """Open a folder for a launch: prepare an empty one, or check that it holds the same recipe.

    Args:
        runs: in the folder.
        what: the folder holds, such as "comparison".
        values: of the recipe.
        free: fields that may differ when a launch goes on.
        prepare: writes what all runs need; called by one launch, before the recipe is written.

    Raises:
        UserError: the folder holds something else, or another recipe; or matplotlib is not installed.
    """
    check_pictures()
    folder = runs.folder
    present = set(os.listdir(folder)) if folder.is_dir() else set()
    ours = {f".{RECIPE}.tmp", "claims", "tokenizer", "students"} if "claims" in present else set()
    if RECIPE not in present and (foreign := sorted(present - ours)):
        raise UserError(f"{folder} holds {foreign[0]} and no {what}: choose another --output-dir")
    with runs.claim("begin").acquire(timeout=-1):
        saved = read_object(folder / RECIPE)
        if saved is None:
            if (folder / RECIPE).exists():
                raise UserError(f"{folder / RECIPE} is damaged, or of no {what}: choose another --output-dir")
            prepare()
            write_text(folder / RECIPE, json.dumps(values, indent=1) + "\n")
            return
    changed = [
        f"{name} ({saved.get(name)!r} then, {value!r} now)"
        for name, value in json.loads(json.dumps(values)).items()
        if name not in free and saved.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{folder} holds a {what} with another recipe: {', '.join(changed)}; go on with the earlier values, or "
            "choose another --output-dir"
        )


def with_runs(values: dict[str, Any], of_runs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, and as `runs.FIELD` those of the recipe of its runs that have to stay the same."""
    return values | {f"runs.{name}": value for name, value in of_runs.items() if name not in FREE_ON_RESUME}


def check_pictures() -> None:
    """Raise `UserError` where the report's pictures could not be drawn in the end."""
    try:
        new_figure()
    except UserError as error:
        raise UserError(str(error)) from error


def finish(runs: Runs, report: Path, write: Callable[[], None]) -> None:
    """Write a report, unless another launch has written it while this one waited; raise `UserError` for failures."""
    before = report.stat().st_mtime_ns if report.exists() else 0
    with runs.claim(f"report-{report.stem}").acquire(timeout=-1):
        if not report.exists() or report.stat().st_mtime_ns == before:
            write()
    say(f"\nThe report is {report}.")
    if failures := runs.failures():
        raise UserError(f"{len(failures)} runs failed, which {report} names; the same command tries them again")
