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

    Example:
        ```python no-run
        # Trains for an hour.
        from modeling_gqa.scripts.compare import compare

        compare(["compare-quick", "--seeds", "3", "--output-dir", "runs/kinds"])
        ```
    """
    # Imported here, and not by the file: help and wrong usage are then answered at once.
    from modeling_gqa.training.comparison.candidates import candidates_of, pretraining_of, sizes_table
    from modeling_gqa.training.comparison.folder import FREE, REPORT, write_outcome, write_tokenizer
    from modeling_gqa.training.comparison.plan import Comparison
    from modeling_gqa.training.comparison.recipe import CompareRecipe
    from modeling_gqa.training.comparison.words import MATCHED, planned
    from modeling_gqa.training.console import say
    from modeling_gqa.training.recipe import load_recipe
    from modeling_gqa.training.shared.folder import begin, finish, with_runs
    from modeling_gqa.training.shared.runs import Runs

    recipe, values = load_recipe(argv, CompareRecipe, prog)
    candidates, pretraining = candidates_of(recipe)
    say(f"{MATCHED[recipe.match]}:\n\n{sizes_table(candidates, pretraining.sequence_length).to_markdown()}\n")
    comparison = Comparison(recipe, pretraining, candidates)
    runs = Runs(comparison.folder, comparison.needed, recipe.jobs, recipe.launcher, comparison.later)
    say(f"{planned(recipe, pretraining, len(candidates))}\n")
    with runs.writing():
        told = with_runs(values, pretraining_of(recipe)[1])
        begin(runs, "comparison", told, FREE, lambda: write_tokenizer(comparison))
        runs.run_all()
        finish(runs, comparison.folder / REPORT, lambda: write_outcome(comparison, runs))


if __name__ == "__main__":
    run_script("compare", sys.argv[1:], "python -m training.compare", compare)
