"""Pretrain a language model from a recipe.

    python -m training.pretrain configuration/recipes/quickstart.yaml [--field value ...]
    torchrun --nproc_per_node 8 -m training.pretrain configuration/recipes/base-124m-gqa.yaml

Every field of `training.recipe.Recipe` and of transformers' `TrainingArguments` can be set in the recipe and on the
command line. `--help` ends with what a run writes, deletes and refuses.
"""

from transformers import AutoModelForCausalLM, set_seed

from .console import main
from .recipe import load_config, load_recipe
from .results import train
from .run import check_training, open_run
from .trainer import PretrainTrainer


def pretrain(argv: list[str]) -> None:
    recipe, values = load_recipe(argv)
    config = load_config(recipe)
    check_training(recipe, config)
    with open_run(recipe, values, config) as run:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(run.tokenizer, name))
        set_seed(recipe.seed)
        kwargs = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
        model = AutoModelForCausalLM.from_config(config, **kwargs)
        train(PretrainTrainer(model, recipe, **run.for_trainer), run, recipe.preset)


if __name__ == "__main__":
    main(pretrain)
