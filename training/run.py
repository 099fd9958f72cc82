"""A run's beginning: its folder prepared or opened again, its tokens made or compared, its checkpoint found."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, Trainer
from transformers.optimization import get_scheduler

from modeling_gqa.conversion.checkpoints.files import local_folder

from . import data, publish
from .checkpoint import find_resumable, what_is_kept
from .console import Interrupted, failed_to_write, is_main, say
from .listing import describe, read_object
from .recipe import SAVED_MODEL, SAVED_RECIPE, Recipe, RecipeError, compare_recipes, save_recipe
from .run_folder import RunFolder, checkpoints, refuse_overlap
from .stream import CheckedStream
from .tokenizer import check_tokenizer, load_tokenizer, train_tokenizer

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Run:
    """What a script trains on, where, and from which checkpoint.

    Attributes:
        folder: the open folder, of the main process; other processes have none.
        upload: a Hub token to upload the result with; "" for the one that `hf auth login` has saved; `None` for none.
    """

    source: data.Source
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: data.PackedBlocks
    folder: RunFolder | None
    checkpoint: Path | None
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
def open_run(
    recipe: Recipe, values: dict[str, Any], config: PreTrainedConfig, models: dict[str, str] | None = None
) -> Iterator[Run]:
    """On every process: prepare or reopen the run in `output_dir`, and hold it while it is used.

    Args:
        models: further models that the run reads, each a folder or Hub name; a resumption needs the same ones.

    Raises:
        RecipeError: what the user can put right, a full disk and Ctrl-C included.
    """
    publish.check_upload(recipe)
    # Trainer would upload at every save, and save the token; this script uploads the finished repository.
    upload = (recipe.hub_token or "") if recipe.push_to_hub else None
    recipe.push_to_hub, recipe.hub_token = False, None
    source = data.open_source(recipe)
    folder = RunFolder(recipe.output_dir) if is_main() else None
    checkpoint: Path | None = None
    mark: dict[str, Any] = {}
    try:
        if folder is not None:
            refuse_overlap(recipe)
            folder.open()
            fingerprints = {role: fingerprint(name) for role, name in (models or {}).items()}
            if recipe.resume:
                checkpoint, mark = resume(folder, recipe, values, config, source, fingerprints)
            else:
                begin(folder, recipe, values, config, source, fingerprints)
        if recipe.world_size > 1:
            checkpoint = from_main_process(checkpoint)
        yield Run(source, *load_run(recipe, source, mark), folder, checkpoint, upload)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {what_is_kept(recipe.output_dir)}") from None
    except Exception as error:
        reason = failed_to_write(error, Path(recipe.output_dir))
        if reason is None:
            raise
        raise RecipeError(f"{reason}; {what_is_kept(recipe.output_dir)}") from error
    finally:
        if folder is not None:
            folder.close()


def from_main_process(checkpoint: Path | None) -> Path | None:
    """Return what the main process has found, once it is ready; the others wait for it here."""
    found = [checkpoint]
    try:
        torch.distributed.broadcast_object_list(found)
    except RuntimeError as error:
        raise RecipeError("the main process has stopped; it says why") from error
    return found[0]


def begin(
    folder: RunFolder,
    recipe: Recipe,
    values: dict[str, Any],
    config: PreTrainedConfig,
    source: data.Source,
    fingerprints: dict[str, str],
) -> None:
    """Write recipe, tokenizer and tokens aside; only then does what an earlier run wrote make room for them."""
    folder.refuse_foreign()
    if folder.holds_run and not recipe.overwrite:
        raise RecipeError(f"{folder.path} already holds a run: --resume continues it, --overwrite replaces it")
    with folder.staging() as staged:
        prepare(staged, recipe, config, source)
        save_recipe(staged, values, config)
        folder.notes = {"models": fingerprints, "versions": VERSIONS}
        folder.remove_run()
        folder.place("data", "tokenizer", SAVED_MODEL, SAVED_RECIPE)


def prepare(folder: Path, recipe: Recipe, config: PreTrainedConfig, source: data.Source) -> None:
    """Write the tokenizer and the tokens of a run to `folder`."""
    for note in source.notes():
        say(f"Text    {note}")
    split = data.split_source(source, recipe)
    if recipe.tokenizer:
        tokenizer = load_tokenizer(recipe.tokenizer)
    else:
        say(f"Training a byte-level BPE tokenizer on {source.name} ...")
        tokenizer = train_tokenizer(split.documents("train"), config.vocab_size)
    check_tokenizer(tokenizer, config)
    tokenizer.save_pretrained(folder / "tokenizer")
    data.write_blocks(split, tokenizer, recipe, folder / "data")


def resume(
    folder: RunFolder,
    recipe: Recipe,
    values: dict[str, Any],
    config: PreTrainedConfig,
    source: data.Source,
    fingerprints: dict[str, str],
) -> tuple[Path | None, dict[str, Any]]:
    """Find the checkpoint to go on from, having made sure that all that the run reads is what it was.

    Returns:
        The checkpoint and its mark, or `None` and an empty one where none had been saved yet.
    """
    compare_recipes(values, config)
    for role, then in folder.notes.get("models", {}).items():
        if fingerprints.get(role) != then:
            raise RecipeError(f"the {role} has other weights than when the run in {folder.path} began: bring them back")
    checkpoint, mark, damaged = find_resumable(folder.path, recipe.world_size, folder.files)
    for problem in damaged:
        say(f"Passed over: {problem}")
    if checkpoint is None and (folder.path / "final").exists():
        raise RecipeError(f"{folder.path} holds a finished model and no checkpoint to resume: --overwrite starts again")
    if edited := folder.edited("final"):
        raise RecipeError(
            f"{edited} has changed since it was written, and --resume writes it again: move it away first"
        )
    if recipe.streaming and checkpoint and "stream" not in mark:
        check_earlier_stream(checkpoint)
    newer = [path.name for path in checkpoints(folder.path)]
    folder.refuse_foreign(newer[newer.index(checkpoint.name) + 1 :] if checkpoint else newer)
    versions = folder.notes.get("versions", VERSIONS)
    if changed := [f"{name} {versions.get(name)}" for name in VERSIONS if versions.get(name) != VERSIONS[name]]:
        say(f"The run began with {', '.join(changed)}: with other versions its numbers can differ in the last bits")
    restore_tokens(folder, recipe, config, source)
    return checkpoint, mark


def check_earlier_stream(checkpoint: Path) -> None:
    """Raise `RecipeError` in a second epoch of before streams had hashes: each then ended with a smaller batch."""
    epoch = (read_object(checkpoint / "trainer_state.json") or {}).get("epoch")
    if isinstance(epoch, int | float) and epoch > 1:
        raise RecipeError(
            f"{checkpoint} was written by an earlier version, which had begun to read its stream again (epoch "
            f"{epoch:.2f}): training cannot go on from there exactly; start again with --overwrite"
        )
    say(f"{checkpoint} was written by an earlier version: whether the stream has changed since is not checked")


def restore_tokens(folder: RunFolder, recipe: Recipe, config: PreTrainedConfig, source: data.Source) -> None:
    """Make sure of the run's tokens and tokenizer; what is missing is made again, and must come out the same."""
    tokens = ["data/validation.npy", *(() if recipe.streaming else ("data/train.npy",))]
    needed = [*tokens, "tokenizer/tokenizer_config.json"]
    missing = next((f"{folder.path / name} is missing" for name in needed if not (folder.path / name).is_file()), None)
    problem = missing or folder.changed("data", "tokenizer")
    if problem is None:
        # A run of before there were manifests has them from now on.
        folder.files |= {name: describe(folder.path / name) for name in tokens if folder.files.get(name) is None}
        folder.save()
        return
    then = {name: folder.files.get(name) for name in tokens}
    if None in then.values():
        raise RecipeError(f"{problem}, and the run did not note what its tokens were: bring it back")
    say(f"{problem}: making the tokens again")
    with folder.staging() as staged:
        try:
            prepare(staged, recipe, config, source)
        except RecipeError as error:
            raise RecipeError(f"{problem}, and the tokens cannot be made again: {error}") from error
        if any(describe(staged / name) != entry for name, entry in then.items()):
            raise RecipeError(
                f"{problem}, and {source.name} does not give the tokens that the run was trained on: bring back the "
                "file, or the text as it was"
            )
        folder.place("tokenizer", "data")


def fingerprint(model: str) -> str:
    """Name the weights and the configuration of a model by a hash of theirs."""
    folder = local_folder(model)
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return "-".join(describe(path)["sha256"][:16] for path in files)


def load_run(
    recipe: Recipe, source: data.Source, mark: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, Dataset, data.PackedBlocks]:
    """On every process: the tokenizer, and training and validation blocks."""
    folder = Path(recipe.output_dir)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    validation = data.load_blocks(folder / "data", "validation")
    if not recipe.streaming:
        return tokenizer, data.load_blocks(folder / "data", "train"), validation
    split = data.load_split(source, recipe, folder / "data")
    step = recipe.train_batch_size * recipe.world_size * recipe.gradient_accumulation_steps
    stream = CheckedStream(data.StreamedBlocks(split, tokenizer, recipe.sequence_length), kept=8 * step)
    stream.expected = mark.get("stream")
    return tokenizer, stream, validation


def check_training(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise `RecipeError` where model, optimizer or schedule could not be made when training begins."""
    kwargs = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    steps = max(recipe.max_steps, 1)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kwargs)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class([torch.zeros(1, 1, requires_grad=True)], **options)
        get_scheduler(
            recipe.lr_scheduler_type,
            optimizer,
            num_warmup_steps=recipe.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=recipe.lr_scheduler_kwargs or None,  # type: ignore[arg-type]
        )
    except Exception as error:  # each optimizer, schedule and attention implementation has its own classes
        raise RecipeError(f"this model cannot be trained as the recipe says: {error.__cause__ or error}") from error
