"""A run from its folder to its results, the same for pretraining and uptraining."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .. import GQAForCausalLM
from ..common.errors import UserError
from ..common.results import write_json
from ..costs import cache_bytes_per_token
from ..data.blocks import CheckedStream, PackedBlocks, load_blocks, read_blocks
from ..data.source import Source, load_split, open_source
from ..data.tokenizer import load_tokenizer
from .bigram import bigram_loss
from .console import is_main, say
from .errors import Interrupted, failed_to_write
from .folder.checkpoint import what_is_kept
from .folder.listing import read_object
from .folder.run_folder import RunFolder
from .publish import card, repository
from .recipe.pretraining import Recipe
from .recipe.trackers import trackers_in
from .results import FORMAT_VERSION, RESULTS, TIMING, Results, printed_lines
from .run_setup import Beginning, check_overlap, check_upload, fingerprint
from .trainer.pretraining import PretrainTrainer


@dataclass(frozen=True)
class Run:
    """What a script trains on, where, and from which checkpoint.

    Attributes:
        source: the text.
        folder: the open folder, of the main process; other processes have none.
        checkpoint: the one to go on from; `None` for a start from step 0.
        seconds_before: seconds of training up to that checkpoint, in all sessions.
        upload: a Hub token to upload the result with; "" for the one that `hf auth login` has saved; `None` for none.
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: PackedBlocks
    folder: RunFolder | None
    checkpoint: Path | None
    seconds_before: float
    upload: str | None

    @property
    def for_trainer(self) -> dict[str, Any]:
        return {
            "train_dataset": self.train,
            "eval_dataset": self.validation,
            "processing_class": self.tokenizer,
            "folder": self.folder,
        }


@contextmanager
def open_run(recipe: Recipe, values: dict[str, Any], config: PreTrainedConfig) -> Iterator[Run]:
    """On every process: prepare or reopen the run in `output_dir`, and hold its lock while it is used.

    Args:
        values: what `load_recipe` returns beside the recipe, before `check_training`.
        config: the model's configuration.

    Raises:
        UserError: an error that the user can correct, a full disk and Ctrl-C included.
    """
    check_upload(recipe)
    values["warmup_steps"] = recipe.warmup_steps  # `check_training` may have shortened it
    # Trainer would upload at every save, and save the token; `finish` uploads the finished repository.
    upload = (recipe.hub_token or "") if recipe.push_to_hub else None
    recipe.push_to_hub, recipe.hub_token = False, None
    source = open_source(recipe, recipe.data_seed or recipe.seed)
    folder = RunFolder(recipe.output_dir) if is_main() else None
    checkpoint: Path | None = None
    mark: dict[str, Any] = {}
    try:
        if folder is not None:
            check_overlap(recipe)
            folder.open()
            fingerprints = {role: fingerprint(name) for role, name in recipe.models().items()}
            beginning = Beginning(folder, recipe, values, config, source, fingerprints)
            if recipe.resume:
                checkpoint, mark = beginning.resume()
            else:
                beginning.begin()
        if recipe.world_size > 1:
            checkpoint = from_main_process(checkpoint)
        with trackers_in(Path(recipe.output_dir)):
            yield Run(
                source, *load_text(recipe, source, mark), folder, checkpoint, mark.get("training_seconds", 0.0), upload
            )
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {what_is_kept(recipe.output_dir)}") from None
    except Exception as error:
        reason = failed_to_write(error, Path(recipe.output_dir))
        if reason is None:
            raise
        raise UserError(f"{reason}; {what_is_kept(recipe.output_dir)}") from error
    finally:
        if folder is not None:
            folder.close()


def from_main_process(checkpoint: Path | None) -> Path | None:
    """Wait until the main process has prepared the run, and return the checkpoint that it has found."""
    found = [checkpoint]
    try:
        torch.distributed.broadcast_object_list(found)
    except RuntimeError as error:
        raise UserError("the main process has stopped; it says why") from error
    return found[0]


def load_text(
    recipe: Recipe, source: Source, mark: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, Dataset, PackedBlocks]:
    """On every process: load the run's tokenizer, and its training and validation blocks."""
    folder = Path(recipe.output_dir)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    validation = load_blocks(folder / "data", "validation")
    if not recipe.streaming:
        return tokenizer, load_blocks(folder / "data", "train"), validation
    split = load_split(source, folder / "data")
    step = recipe.train_batch_size * recipe.world_size * recipe.gradient_accumulation_steps
    stream = CheckedStream(partial(read_blocks, split, tokenizer, recipe.sequence_length), kept=8 * step)
    stream.expected = mark.get("stream")
    return tokenizer, stream, validation


def train(trainer: PretrainTrainer, run: Run) -> None:
    """Train, from the last checkpoint where the recipe resumes; then measure the model, save and upload it."""
    recipe: Recipe = trainer.args
    model: GQAForCausalLM = trainer.accelerator.unwrap_model(trainer.model)
    size = f"{len(run.train):,} blocks" if isinstance(run.train, PackedBlocks) else "a stream of blocks"
    attention = card.describe_attention(model.config)
    say(f"Model   {recipe.model_name}: {model.num_parameters() / 1e6:.2f}M parameters, {attention}")
    say(f"Text    {run.source.name}; {size} of {recipe.sequence_length} tokens, {len(run.validation):,} for validation")
    say(f"Run     {recipe.output_dir}, on {recipe.world_size} x {recipe.device.type}")
    if recipe.resume:
        where = f"Resuming from {run.checkpoint}" if run.checkpoint else None
        say(where or "No checkpoint had been saved yet: starting from step 0")
    trainer.seconds_before = run.seconds_before
    trainer.run(run.checkpoint)
    seconds = trainer.training_seconds
    if trainer.sigterm.stopped:
        say(f"Stopped by SIGTERM and saved at step {trainer.state.global_step}; --resume continues.")
        sys.exit(128 + 15)
    results = gather_results(trainer, seconds)
    if run.checkpoint is not None and run.checkpoint.name == f"checkpoint-{results['steps']}":
        results |= earlier_timing(Path(recipe.output_dir), results["steps"])
    results, weights = trainer.outcome(results)
    if run.folder is not None:
        finish(trainer, run, run.folder, results, weights)
    if recipe.world_size > 1:
        torch.distributed.barrier()


def earlier_timing(folder: Path, steps: int) -> Results:
    """Return how long the training took that the run in `folder` had finished; nothing where that is not known."""
    earlier = read_object(folder / RESULTS) or {}
    known = earlier if earlier.get("steps") == steps else {}
    return cast(Results, {name: known[name] for name in TIMING if isinstance(known.get(name), int | float)})


def gather_results(trainer: PretrainTrainer, seconds: float) -> Results:
    """Return the numbers of the run with its last weights, which are evaluated unless the last step has been.

    Args:
        seconds: duration of the training, of all sessions.
    """
    recipe, model, state = trainer.args, trainer.accelerator.unwrap_model(trainer.model), trainer.state
    train, validation = trainer.train_dataset, trainer.eval_dataset
    done = [log for log in state.log_history if "eval_loss" in log and log["step"] == state.global_step]
    metrics = done[-1] if done else trainer.evaluate()
    results: Results = {
        "format_version": FORMAT_VERSION,
        "validation_loss": metrics["eval_loss"],
        "validation_perplexity": metrics["eval_perplexity"],
        "validation_blocks": len(validation),
        "steps": state.global_step,
        "tokens_seen": state.num_input_tokens_seen,
        "tokens_per_step": state.num_input_tokens_seen // max(state.global_step, 1),
        "training_seconds": round(seconds, 1),
        **trainer.throughput.rates(recipe.device, whole_run=True),  # type: ignore[typeddict-item]
        **trainer.further_results(metrics),
        "parameters": model.num_parameters(),
        "cache_bytes_per_token": cache_bytes_per_token(model.config, torch.float32),
        "processes": recipe.world_size,
    }
    if trainer.folder is not None:
        results["sealing_seconds"] = round(trainer.folder.sealing_seconds, 2)
    if recipe.bigram_baseline and isinstance(train, PackedBlocks) and is_main():
        results["bigram_loss"] = bigram_loss(train, validation, model.config.vocab_size)
    return results


def finish(
    trainer: PretrainTrainer, run: Run, folder: RunFolder, results: Results, weights: dict[str, torch.Tensor]
) -> None:
    """On the main process: save the results and the repository, load it in a fresh process, print, upload."""
    recipe, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    final = folder.path / "final"
    with folder.staging() as staged:
        write_json(staged / RESULTS, results)
        if recipe.publish:
            repository.save_repository(staged / "final", model, weights, trainer.processing_class, recipe, results)
            split = load_split(run.source, folder.path / "data")
            card.write_card(staged / "final", recipe, model.config, split, results)
        folder.place(*(("final", RESULTS) if recipe.publish else (RESULTS,)))
    say()
    for line in printed_lines(results):
        say(line)
    if not recipe.publish:
        return
    say(f"\nSaved {final}. A fresh process, without the package, loads it and writes:\n")
    say(repository.load_as_stranger(final, recipe.sample_prompt))
    if run.upload is not None:
        say(f"\nUploaded: {repository.upload(final, recipe, run.upload or None)}")
