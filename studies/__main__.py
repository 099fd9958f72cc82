"""The GQA paper's studies (2305.13245) on a model of one's own, from a checkout.

    python -m studies conversion study-quick [--option value ...]
    python -m studies groups study-quick --source runs/mine/final --output-dir runs/studies

`conversion` compares ways to make one key/value head of many, before and after uptraining (figure 4); `uptraining`
trains GQA and MQA on shares of the pretraining tokens (figure 5); `groups` measures time and quality by the number of
key/value heads (figures 6 and 3). The three share a folder and the runs in it. The same command continues what was
stopped.
"""

import sys
from functools import partial
from pathlib import Path

from modeling_gqa_cli.main import run_script

from .recipe import STUDIES, StudyRecipe


def study(name: str, argv: list[str], prog: str | None = None) -> None:
    """Run a study by a recipe's path, or its name in this folder, and options; raises `UserError`."""
    from modeling_gqa.training.comparison.runs import Runs
    from modeling_gqa.training.recipe import load_recipe

    from .report import FREE, write_report
    from .students import convert_students, open_study, values_of_runs

    recipe, values = load_recipe(with_path(argv), StudyRecipe, prog)
    asked, source, tokenizer = open_study(name, recipe)
    runs = Runs(asked.folder, asked.needed, recipe.jobs, recipe.launcher)
    with runs.writing():
        runs.begin("study", values, values_of_runs(recipe), FREE)
        convert_students(asked, runs, source, tokenizer)
        del source
        runs.run_all()
        runs.finish(asked.folder / f"{name}.md", lambda: write_report(asked, runs))


def with_path(argv: list[str]) -> list[str]:
    """Return arguments in which the name of a recipe of this folder is its path."""
    path = Path(__file__).parent / f"{argv[0]}.yaml" if argv else None
    return [str(path), *argv[1:]] if path and path.is_file() else argv


if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name not in STUDIES:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    run_script("study", with_path(rest), f"python -m studies {name}", partial(study, name), [StudyRecipe])
