"""Pretrain a language model from a recipe.

    python -m training.pretrain quickstart [--option value ...]
    torchrun --nproc_per_node 8 -m training.pretrain base-124m --preset base-124m-mla --gradient-accumulation-steps 2
    modeling-gqa pretrain tiny --preset tiny-mla --max-steps 600

The first two commands are for a checkout; installed, the module is `modeling_gqa.scripts.pretrain`. Every field of
`Recipe` and of transformers' `TrainingArguments` can be set in a recipe's YAML file (`max_steps: 600`) and on the
command line (`--max-steps 600`). `--help` shows them and ends with what a run writes, deletes and refuses.
"""

import sys

from modeling_gqa_cli.main import run_script


def pretrain(argv: list[str], prog: str | None = None) -> None:
    """Pretrain as a command line says; see the top of this file.

    Args:
        argv: a recipe's name or path, and options.
        prog: how the script was started, for help and errors.

    Raises:
        UserError: an error that the user can correct.
    """
    # Imported here, and not by the file: help and wrong usage are then answered at once.
    from transformers import set_seed

    from modeling_gqa.training.recipe import load_recipe
    from modeling_gqa.training.recipe_model import check_training, load_config, new_model, warn_of_weights
    from modeling_gqa.training.run_setup import announce, open_run
    from modeling_gqa.training.trainer import PretrainTrainer

    # Recipe and model configuration, checked before anything is written
    recipe, values = load_recipe(argv, prog=prog)
    config = load_config(recipe)
    if not recipe.resume:
        warn_of_weights(recipe)
    check_training(recipe, config)
    recipe.tokenizer = recipe.tokenizer or recipe.init_from
    if recipe.dry_run:
        from modeling_gqa.training.estimate import dry_run

        dry_run(recipe, new_model(recipe, config).to(recipe.device))
        return

    # Run folder, tokenizer and tokens; of a resumed run its checkpoint
    with open_run(recipe, values, config) as run:
        # Model
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(run.tokenizer, name))
        set_seed(recipe.seed)
        model = new_model(recipe, config)
        announce(run, recipe, model)

        # Training
        trainer = PretrainTrainer(model, recipe, **run.for_trainer)
        results = trainer.run(run.checkpoint)

        # results.json, and final/: a Hub repository
        from modeling_gqa.training.publish import save_run

        save_run(trainer, run, results)


if __name__ == "__main__":
    run_script("pretrain", sys.argv[1:], "python -m training.pretrain", pretrain)
