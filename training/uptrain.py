"""Uptrain a converted model: train back what the conversion lost.

    python -m training.uptrain uptrain-tiny --student runs/converted [--option value ...]
    modeling-gqa uptrain uptrain-1b --student runs/converted --teacher meta-llama/Llama-3.2-1B --data-files corpus/

The *student* is the converted model, the *teacher* the model that it was converted from. The
student's attention is trained on the KL divergence from the teacher's predictions and on the next-token loss. With
`--teacher-logits` these predictions are read from a folder.

`--help` shows every option and ends with what a run writes, deletes and refuses. Text, run folder, `--resume` and the
result are as in pretraining.
"""

import sys

from modeling_gqa_cli.main import run_script


def uptrain(argv: list[str], prog: str | None = None) -> None:
    """Uptrain as a command line says; see the top of this file.

    Args:
        argv: a recipe's name or path, and options.
        prog: how the script was started, for help and errors.

    Raises:
        UserError: an error that the user can correct.
    """
    # Imported here, and not by the file: help and wrong usage are then answered at once.
    from transformers import set_seed

    from modeling_gqa.training.distillation import check_tokenizers, load_pair
    from modeling_gqa.training.recipe import load_recipe
    from modeling_gqa.training.recipe_model import check_length, check_training, warn_of_weights
    from modeling_gqa.training.run_setup import announce, open_run
    from modeling_gqa.training.teacher_logits import with_teacher_logits
    from modeling_gqa.training.uptraining import UptrainRecipe, UptrainTrainer

    # Recipe and models, checked before anything is written
    recipe, values = load_recipe(argv, UptrainRecipe, prog)
    student, teacher = load_pair(recipe)
    check_tokenizers(recipe, student.config)
    check_length(recipe, student.config)
    check_training(recipe, student.config)
    if not recipe.resume:
        warn_of_weights(recipe)
    recipe.tokenizer = recipe.tokenizer or recipe.student

    # Run folder, tokenizer and tokens; of a resumed run its checkpoint
    with open_run(recipe, values, student.config) as run:
        announce(run, recipe, student)
        if recipe.teacher_logits:
            run = with_teacher_logits(run, recipe, student.config.vocab_size)

        # Training
        set_seed(recipe.seed)
        trainer = UptrainTrainer(student, recipe, teacher, **run.for_trainer)
        results = trainer.run(run.checkpoint)

        # results.json, and final/: a Hub repository
        from modeling_gqa.training.publish import save_run

        save_run(trainer, run, results)


if __name__ == "__main__":
    run_script("uptrain", sys.argv[1:], "python -m training.uptrain", uptrain)
