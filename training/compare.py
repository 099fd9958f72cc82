"""Compare attention kinds: models that differ in it alone, trained on the same text.

    python -m training.compare compare-quick [--option value ...]
    modeling-gqa compare compare-tiny --seeds 5 --output-dir runs/kinds

The first command is for a checkout; installed, the module is `modeling_gqa.scripts.compare`. Every field of
`CompareRecipe` can be set in a recipe's YAML file (`seeds: 3`) and on the command line (`--seeds 3`). The same command
goes on where it was stopped. Launched several times, on machines that share the folder too, it divides the runs.
"""

import sys

from modeling_gqa_cli.main import run_script


def compare(argv: list[str], prog: str | None = None) -> None:
    """Compare attention kinds as a command line says; see the top of this file.

    Args:
        argv: a recipe's name or path, and options.
        prog: how the script was started, for help and errors.

    Raises:
        UserError: an error that the user can correct.
    """
    # Imported here, and not by the file: help and wrong usage are then answered at once.
    from modeling_gqa.common.console import say
    from modeling_gqa.training.comparison.models import MATCHED, CompareRecipe, candidates_of, sizes_table
    from modeling_gqa.training.comparison.plan import Comparison
    from modeling_gqa.training.comparison.report import REPORT, write_outcome
    from modeling_gqa.training.comparison.runs import Runs
    from modeling_gqa.training.recipe import load_recipe

    # The models, and the runs of each: a sweep of learning rates, then seeds at the best
    recipe, values = load_recipe(argv, CompareRecipe, prog)
    candidates, pretraining, values_of_runs = candidates_of(recipe)
    comparison = Comparison(recipe, pretraining, candidates)
    say(f"{MATCHED[recipe.match]}\n\n{sizes_table(candidates, pretraining.sequence_length).to_markdown()}\n")
    say(f"{comparison.planned()}\n")
    if recipe.dry_run:
        from modeling_gqa.training.comparison.estimate import dry_run

        dry_run(comparison)
        return

    # Runs that are left are trained here or by other launches; the last to end writes the report
    runs = Runs(comparison)
    with runs.writing():
        runs.begin(values, values_of_runs)
        runs.run_all()
        runs.finish(comparison.folder / REPORT, lambda: write_outcome(comparison, runs))


if __name__ == "__main__":
    run_script("compare", sys.argv[1:], "python -m training.compare", compare)
