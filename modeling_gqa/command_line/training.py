"""`modeling-gqa pretrain`, `uptrain` and `compare`: the scripts of `modeling_gqa.training` and their options."""

from transformers.utils import logging

SCRIPTS = {
    "pretrain": "Train a new model from a RECIPE: tiny, base-124m, quickstart, or a YAML file. `pretrain --help` shows "
    "its options.",
    "uptrain": "Heal a converted model from a RECIPE: uptrain-tiny, uptrain-smollm2, uptrain-1b, or a YAML file. "
    "`uptrain --help` shows its options.",
    "compare": "Train models that differ in their attention alone, and compare them, from a RECIPE: compare-quick, "
    "compare-tiny, or a YAML file. `compare --help` shows its options.",
}


def run_script(name: str, arguments: list[str]) -> None:
    """Run the script `name`, which parses the arguments itself."""
    # The scripts import packages that only the extra `training` installs; `main` says which one is missing.
    from ..training.console import main

    def script(argv: list[str]) -> None:
        from ..training.compare import compare
        from ..training.pretrain import pretrain
        from ..training.uptrain import uptrain

        {"pretrain": pretrain, "uptrain": uptrain, "compare": compare}[name](argv, f"modeling-gqa {name}")

    logging.set_verbosity_warning()  # the other commands show only errors
    main(script, arguments)
