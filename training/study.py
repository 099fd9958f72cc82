"""The GQA paper's studies (2305.13245) on a model of one's own.

    python -m training.study conversion study-quick [--option value ...]
    modeling-gqa study groups study-quick --source runs/mine/final --output-dir runs/studies

`conversion` compares ways to make one key/value head of many, before and after uptraining (figure 4); `uptraining`
trains GQA and MQA on shares of the pretraining tokens (figure 5); `groups` measures time and quality by the number of
key/value heads (figures 6 and 3). The three share a folder, and what they train. The same command goes on where it was
stopped.
"""

import sys

from modeling_gqa_cli.main import run_script


def study(argv: list[str], prog: str | None = None) -> None:
    """Run a study as a command line says; see the top of this file.

    Args:
        argv: the study, a recipe's name or path, and options.
        prog: how the script was started, for help and errors.

    Raises:
        UserError: an error that the user can correct.

    Example:
        ```python no-run
        # Needs a trained model, and trains for minutes.
        from modeling_gqa.scripts.study import study

        study(["uptraining", "study-quick", "--source", "runs/tiny-mha/final"])
        ```
    """
    # Imported here, and not by the file: help and wrong usage are then answered at once.
    from modeling_gqa.common.errors import UserError
    from modeling_gqa.training.recipe import load_recipe
    from modeling_gqa.training.shared.folder import begin, finish, with_runs
    from modeling_gqa.training.shared.runs import Runs
    from modeling_gqa.training.studies.recipe import STUDIES, StudyRecipe
    from modeling_gqa.training.studies.report import FREE, write_findings
    from modeling_gqa.training.studies.students import convert_students, open_study, values_of_runs

    command = prog or "python -m training.study"
    if not argv or argv[0] not in STUDIES:
        shown = f", not {argv[0]}" if argv and not argv[0].startswith("-") else ""
        if "--help" not in argv and "-h" not in argv:
            raise UserError(f"name a study first: {command} {{{','.join(STUDIES)}}} RECIPE{shown}")
        argv = ["STUDY", *argv]
    name, *rest = argv
    recipe, values = load_recipe(rest, StudyRecipe, f"{command} {name}")
    asked, source, tokenizer = open_study(name, recipe)
    runs = Runs(asked.folder, asked.needed, recipe.jobs, recipe.launcher)
    with runs.writing():
        begin(runs, "study", with_runs(values, values_of_runs(recipe)), FREE, lambda: None)
        convert_students(asked, runs, source, tokenizer)
        del source
        runs.run_all()
        finish(runs, asked.folder / f"{name}.md", lambda: write_findings(asked, runs))


if __name__ == "__main__":
    run_script("study", sys.argv[1:], "python -m training.study", study)
