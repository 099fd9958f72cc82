"""`modeling-gqa pretrain`, `uptrain`, `compare`, `study`: the scripts of `modeling_gqa.training` and their options."""

from transformers.utils import logging

SCRIPTS = {
    "pretrain": "Train a new model from a RECIPE: tiny, base-124m, quickstart, or a YAML file. `pretrain --help` shows "
    "its options.",
    "uptrain": "Heal a converted model from a RECIPE: uptrain-tiny, uptrain-smollm2, uptrain-1b, or a YAML file. "
    "`uptrain --help` shows its options.",
    "compare": "Train models that differ in their attention alone, and compare them, from a RECIPE: compare-quick, "
    "compare-tiny, or a YAML file. `compare --help` shows its options.",
    "study": "The GQA paper's studies {conversion,uptraining,groups} of a model of yours, from a RECIPE: study-quick, "
    "or a YAML file. `study --help` shows its options.",
}


def run_script(name: str, arguments: list[str]) -> None:
    """Run the script `name`, which parses the arguments itself."""
    # The scripts import packages that only the extra `training` installs; `main` says which one is missing.
    from ..training.console import main

    def script(argv: list[str]) -> None:
        from ..scripts.compare import compare
        from ..scripts.pretrain import pretrain
        from ..scripts.study import study
        from ..scripts.uptrain import uptrain

        scripts = {"pretrain": pretrain, "uptrain": uptrain, "compare": compare, "study": study}
        scripts[name](argv, f"modeling-gqa {name}")

    logging.set_verbosity_warning()  # the other commands show only errors
    main(script, arguments)
