"""Train a model in its run's folder, measure it, save it as a Hub repository, print what came out."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_gqa.accounting import cache_bytes_per_token

from . import data, publish
from .baseline import bigram_loss
from .console import is_main, say
from .recipe import Recipe
from .run import Run
from .run_folder import RunFolder
from .trainer import PretrainTrainer


def train(trainer: PretrainTrainer, run: Run, name: str) -> None:
    """Train the model called `name`, from the last checkpoint where the recipe resumes; measure, save and upload it."""
    recipe: Recipe = trainer.args
    model: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)
    size = f"{len(run.train):,} blocks" if isinstance(run.train, data.PackedBlocks) else "a stream of blocks"
    attention = publish.describe_attention(model.config)
    say(f"Model   {name}: {model.num_parameters() / 1e6:.2f}M parameters, {attention}")
    say(f"Text    {run.source.name}; {size} of {recipe.sequence_length} tokens, {len(run.validation):,} for validation")
    say(f"Run     {recipe.output_dir}, on {recipe.world_size} x {recipe.device.type}")
    if recipe.resume:
        where = f"Resuming from {run.checkpoint}" if run.checkpoint else None
        say(where or "No checkpoint had been saved yet: starting from step 0")
    begin = time.perf_counter()
    trainer.run(run.checkpoint)
    if trainer.sigterm.stopped:
        say(f"Stopped by SIGTERM and saved at step {trainer.state.global_step}; --resume continues.")
        sys.exit(128 + 15)
    results = measure(trainer, time.perf_counter() - begin)
    weights = trainer.accelerator.get_state_dict(trainer.model)  # under FSDP every process takes part
    if run.folder is not None:
        finish(trainer, run, run.folder, results, weights)
    if recipe.world_size > 1:
        torch.distributed.barrier()


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
    if trainer.folder is not None:
        results["sealing_seconds"] = round(trainer.folder.sealing_seconds, 2)
    if recipe.bigram_baseline and isinstance(train, data.PackedBlocks) and is_main():
        results["bigram_loss"] = bigram_loss(train, validation, model.config.vocab_size)
    return results


def finish(
    trainer: PretrainTrainer,
    run: Run,
    folder: RunFolder,
    results: dict[str, Any],
    weights: dict[str, torch.Tensor],
) -> None:
    """On the main process: save the repository, load it as a stranger would, print, upload."""
    recipe, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    final = folder.path / "final"
    with folder.staging() as staged:
        (staged / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        publish.save_repository(staged / "final", model, weights, trainer.processing_class, recipe, results)
        publish.write_card(staged / "final", recipe, model.config, run.source, results)
        folder.place("final", "results.json")
    say(f"\ntraining took        {results['training_seconds']:.0f} s")
    say(f"of these             {results['sealing_seconds']:.1f} s to bring checkpoints to disk and hash them")
    for line in describe_results(results):
        say(line)
    say(f"\nSaved {final}. A fresh process, without the package, loads it and writes:\n")
    say(publish.load_as_stranger(final, recipe.sample_prompt))
    if run.upload is not None:
        say(f"\nUploaded: {publish.upload(final, recipe, run.upload or None)}")


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
