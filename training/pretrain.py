"""Pretrain a language model from a recipe.

    python -m training.pretrain configuration/recipes/quickstart.yaml [--field value ...]
    torchrun --nproc_per_node 8 -m training.pretrain configuration/recipes/base-124m-gqa.yaml

Every field of `training.recipe.Recipe` and of transformers' `TrainingArguments` can be set in the recipe and on the
command line. The run is kept in `output_dir` (runs/NAME): recipe.yaml, tokenizer/, data/, checkpoint-*/, results.json,
and final/, a complete Hub repository. `--resume` continues a run that was stopped.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from modeling_gqa.accounting import cache_bytes_per_token

from . import data, publish
from .baseline import bigram_loss
from .recipe import Recipe, RecipeError, compare_recipes, load_config, load_recipe, save_recipe
from .tokenizer import check_tokenizer, load_tokenizer, train_tokenizer
from .trainer import NonFiniteLoss, PretrainTrainer, checkpoints, find_resumable, remove_checkpoints


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(message: str = "") -> None:
    if is_main():
        print(message, flush=True)


def prepare_run(recipe: Recipe, values: dict[str, Any], config: PreTrainedConfig, source: data.Source) -> None:
    """On the main process, before any other goes on: recipe, tokenizer and tokens, on disk in `output_dir`."""
    folder = Path(recipe.output_dir)
    if recipe.resume:
        compare_recipes(values, config)
        remove_checkpoints(folder, only_incomplete=True)
    elif checkpoints(folder) and not recipe.overwrite:
        raise RecipeError(f"{folder} already holds a run: --resume continues it, --overwrite replaces it")
    if recipe.resume and (folder / "data" / "validation.npy").is_file():
        # The run's own tokens, even if the files that they came from have changed.
        return
    split = data.split_source(source, recipe)
    if recipe.tokenizer:
        tokenizer = load_tokenizer(recipe.tokenizer)
    else:
        say(f"Training a byte-level BPE tokenizer on {source.name} ...")
        tokenizer = train_tokenizer(split.documents("train"), config.vocab_size)
    check_tokenizer(tokenizer, config)
    remove_checkpoints(folder, only_incomplete=False)
    for stale in ("data", "tokenizer", "final"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    save_recipe(values, config)
    tokenizer.save_pretrained(folder / "tokenizer")
    data.write_blocks(split, tokenizer, recipe, folder / "data")


def load_run(recipe: Recipe, source: data.Source) -> tuple[PreTrainedTokenizerBase, Dataset, data.PackedBlocks]:
    """On every process: the tokenizer, and training and validation blocks."""
    folder = Path(recipe.output_dir)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    validation = data.load_blocks(folder / "data", "validation")
    if recipe.streaming:
        split = data.split_source(source, recipe)
        return tokenizer, data.StreamedBlocks(split, tokenizer, recipe.sequence_length), validation
    return tokenizer, data.load_blocks(folder / "data", "train"), validation


class Run(NamedTuple):
    """What a script trains on, and whether the result is uploaded."""

    source: data.Source
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: data.PackedBlocks
    push_to_hub: bool

    @property
    def for_trainer(self) -> dict[str, Any]:
        return {"train_dataset": self.train, "eval_dataset": self.validation, "processing_class": self.tokenizer}


def open_run(recipe: Recipe, values: dict[str, Any], config: PreTrainedConfig) -> Run:
    """On every process: prepare or reopen the run in `output_dir`; raises `RecipeError`."""
    publish.check_upload(recipe)
    # Trainer would upload at every save; this script uploads the finished repository.
    push_to_hub, recipe.push_to_hub = recipe.push_to_hub, False
    source = data.open_source(recipe)
    if is_main():
        prepare_run(recipe, values, config, source)
    if recipe.world_size > 1:
        torch.distributed.barrier()
    return Run(source, *load_run(recipe, source), push_to_hub)


def measure(trainer: PretrainTrainer, seconds: float) -> dict[str, Any]:
    """Evaluate the final weights, unless that has just been done, and gather the run's numbers."""
    recipe, model, state = trainer.args, trainer.accelerator.unwrap_model(trainer.model), trainer.state
    train, validation = trainer.train_dataset, trainer.eval_dataset
    done = [log for log in state.log_history if "eval_loss" in log and log["step"] == state.global_step]
    metrics = done[-1] if done else trainer.evaluate()
    results = {
        "validation_loss": metrics["eval_loss"],
        "validation_perplexity": metrics["eval_perplexity"],
        "validation_blocks": len(validation),
        "steps": state.global_step,
        "tokens_seen": state.num_input_tokens_seen,
        "tokens_per_step": state.num_input_tokens_seen // max(state.global_step, 1),
        "training_seconds": round(seconds, 1),
        **trainer.throughput.rates(recipe.device, whole_run=True),
        **trainer.further_results(metrics),
        "parameters": model.num_parameters(),
        "cache_bytes_per_token": cache_bytes_per_token(model.config, torch.float32),
        "processes": recipe.world_size,
    }
    if recipe.bigram_baseline and isinstance(train, data.PackedBlocks) and is_main():
        results["bigram_loss"] = bigram_loss(train, validation, model.config.vocab_size)
    return results


def finish(
    trainer: PretrainTrainer,
    source: data.Source,
    results: dict[str, Any],
    weights: dict[str, torch.Tensor],
    push_to_hub: bool,
) -> None:
    """On the main process: save the repository, load it as a stranger would, print, upload."""
    recipe, model, folder = trainer.args, trainer.accelerator.unwrap_model(trainer.model), Path(trainer.args.output_dir)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    publish.save_repository(folder / "final", model, weights, trainer.processing_class, recipe, results)
    publish.write_card(folder / "final", recipe, model.config, source, results)
    say(f"\ntraining took        {results['training_seconds']:.0f} s")
    for line in describe_results(results):
        say(line)
    say(f"\nSaved {folder / 'final'}. A fresh process, without the package, loads it and writes:\n")
    say(publish.load_as_stranger(folder / "final", recipe.sample_prompt))
    if push_to_hub:
        say(f"\nUploaded: {publish.upload(folder / 'final', recipe)}")


def describe_results(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that are printed at the end."""
    for name, key in (
        ("validation loss", "validation"),
        ("before uptraining", "initial_validation"),
        ("teacher's", "teacher_validation"),
    ):
        if f"{key}_loss" in results:
            yield f"{name:<19}  {results[f'{key}_loss']:.4f}  (perplexity {results[f'{key}_perplexity']:.2f})"
    if "kl" in results:
        yield f"{'KL to the teacher':<19}  {results['kl']:.4f}  (before {results['initial_kl']:.4f})"
    if "gap_closed" in results:
        yield f"{'gap closed':<19}  {results['gap_closed']:.1%}  of the perplexity between teacher and conversion"
    if "bigram_loss" in results:
        gap = results["bigram_loss"] - results["validation_loss"]
        yield f"bigram model's loss  {results['bigram_loss']:.4f}  on the same tokens; ours is {gap:.2f} nats below"


def pretrain(argv: list[str]) -> None:
    recipe, values = load_recipe(argv)
    config = load_config(recipe)
    run = open_run(recipe, values, config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(run.tokenizer, name))
    set_seed(recipe.seed)
    kwargs = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    model = AutoModelForCausalLM.from_config(config, **kwargs)
    train(PretrainTrainer(model, recipe, **run.for_trainer), run, recipe.preset)


def train(trainer: PretrainTrainer, run: Run, name: str) -> None:
    """Train the model called `name`, from the last checkpoint where the recipe resumes; measure, save and upload it."""
    recipe: Recipe = trainer.args
    model: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)
    checkpoint = find_resumable(recipe) if recipe.resume else None
    size = f"{len(run.train):,} blocks" if isinstance(run.train, data.PackedBlocks) else "a stream of blocks"
    attention = publish.describe_attention(model.config)
    say(f"Model   {name}: {model.num_parameters() / 1e6:.2f}M parameters, {attention}")
    say(f"Text    {run.source.name}; {size} of {recipe.sequence_length} tokens, {len(run.validation):,} for validation")
    say(f"Run     {recipe.output_dir}, on {recipe.world_size} x {recipe.device.type}")
    if recipe.resume:
        say(f"Resuming from {checkpoint}" if checkpoint else "No checkpoint had been saved yet: starting from step 0")
    begin = time.perf_counter()
    trainer.run(checkpoint)
    if trainer.sigterm.stopped:
        say(f"Stopped by SIGTERM and saved at step {trainer.state.global_step}; --resume continues.")
        sys.exit(128 + 15)
    results = measure(trainer, time.perf_counter() - begin)
    weights = trainer.accelerator.get_state_dict(trainer.model)  # under FSDP every process takes part
    if is_main():
        finish(trainer, run.source, results, weights, run.push_to_hub)
    if recipe.world_size > 1:
        torch.distributed.barrier()


def main(script: Callable[[list[str]], None] = pretrain) -> None:
    logging.disable_progress_bar()  # of weights being written; training has its own
    try:
        script(sys.argv[1:])
    except (RecipeError, NonFiniteLoss) as error:
        if not is_main():
            # It mostly fails as the main process does, or because that did, and torchrun ends it meanwhile.
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
