"""How a run begins: its folder is opened, its text tokenized; or its checkpoint found, and what it reads checked."""

import glob
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from accelerate.utils import broadcast_object_list
from huggingface_hub import get_token
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainerState

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.paths import is_in

from ..common.atomic import read_object
from ..common.batches import computing_dtype
from ..common.console import Interrupted, failed_to_write, is_main, say, warn
from ..common.progress import progress_bars
from ..common.tables import with_prefix
from ..conversion.targets import describe_layers
from ..data.blocks import CheckedStream, PackedBlocks, check_blocks, load_blocks, read_blocks, write_blocks
from ..data.source import Source, Split, load_split, open_source, split_source
from ..data.tokenizer import check_tokenizer, load_tokenizer, train_tokenizer
from .estimate import describe_length
from .kept import make_once
from .recipe import FREE_ON_RESUME, LENGTHS, Recipe, trackers_in
from .run_folder import (
    SAVED_MODEL,
    SAVED_RECIPE,
    RunFolder,
    checkpoints,
    file_names,
    find_resumable,
    sha256_of,
    what_is_kept,
)

if TYPE_CHECKING:
    from ..evaluation.harness import Tasks

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class OpenRun:
    """What a script trains on, where, and from which checkpoint.

    Attributes:
        source: the text.
        folder: the open folder, of the main process; other processes have none.
        checkpoint: the one to continue from; `None` for a start from step 0.
        seconds_before: seconds of training up to that checkpoint, in all sessions.
        upload: a Hub token to upload the result with; "" for the one that `hf auth login` has saved; `None` for none.
        tasks: what the main process evaluates at the end; `None` for nothing.
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: PackedBlocks
    folder: RunFolder | None
    checkpoint: Path | None
    seconds_before: float
    upload: str | None
    tasks: "Tasks | None"

    @property
    def for_trainer(self) -> dict[str, Any]:
        return {
            "train_dataset": self.train,
            "eval_dataset": self.validation,
            "processing_class": self.tokenizer,
            "folder": self.folder,
            "seconds_before": self.seconds_before,
        }


@contextmanager
def open_run(recipe: Recipe, values: dict[str, Any], config: PreTrainedConfig) -> Iterator[OpenRun]:
    """On every process: prepare or reopen the run in `output_dir`, and hold its lock while it is used.

    Args:
        values: what `load_recipe` returns beside the recipe, before `check_training`.
        config: the model's configuration.

    Raises:
        UserError: an error that the user can correct, a full disk and Ctrl-C included.
    """
    if recipe.push_to_hub and not (recipe.hub_token or get_token()):
        raise UserError("push_to_hub needs a Hub token: run `hf auth login` first, or set HF_TOKEN")
    # Trainer would upload at every save, and save the token; `save_run` uploads the finished repository.
    upload = (recipe.hub_token or "") if recipe.push_to_hub else None
    recipe.push_to_hub, recipe.hub_token = False, None
    source, output = open_source(recipe, recipe.order_seed), Path(recipe.output_dir)
    folder = RunFolder(output) if is_main() else None
    checkpoint: Path | None = None
    mark: dict[str, Any] = {}
    tasks = None
    try:
        if folder is not None:
            check_overlap(recipe)
            tasks = find_evaluation(recipe) if recipe.evaluates else None
            folder.open()
            fingerprints = {role: fingerprint(name) for role, name in recipe.models().items()}
            setup = RunSetup(folder, recipe, values, config, source, fingerprints)
            if recipe.resume:
                checkpoint, mark = setup.resume()
            else:
                setup.begin()
        checkpoint = from_main(checkpoint)  # waits until the run is prepared
        recipe.warmup_steps = from_main(recipe.warmup_steps)
        with trackers_in(output):
            text, seconds = load_text(recipe, source, mark), mark.get("training_seconds", 0.0)
            yield OpenRun(source, *text, folder, checkpoint, seconds, upload, tasks)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {what_is_kept(output)}") from None
    except Exception as error:
        reason = failed_to_write(error, output)
        if reason is None:
            raise
        raise UserError(f"{reason}; {what_is_kept(output)}") from error
    finally:
        if folder is not None:
            folder.close()


def find_evaluation(recipe: Recipe) -> "Tasks":
    """Return what is evaluated after training, with its data; windows of WikiText-2 are as long as training sequences.

    Raises:
        UserError: a task is unknown, or its data cannot be had.
    """
    from ..evaluation.harness import find_tasks  # most runs evaluate nothing

    folder = Path(recipe.eval_data).expanduser() if recipe.eval_data else None
    sizes: Any = {"batch_size": recipe.per_device_eval_batch_size, "sequence_length": recipe.sequence_length}
    try:
        return find_tasks(recipe.eval_tasks or None, folder, limit=recipe.eval_limit, **sizes)
    except UserError as error:  # in the words of the command `evaluate`
        raise UserError(re.sub("--(data|tasks)", r"--eval-\1", str(error))) from error


def from_main(value: Any) -> Any:
    """Return the main process's value on every process; raises `UserError` where that process has stopped."""
    try:
        return broadcast_object_list([value])[0]
    except RuntimeError as error:
        raise UserError("the main process has stopped; it says why") from error


def announce(run: OpenRun, recipe: Recipe, model: Any) -> None:
    """Print the model, the text, the folder, and where training begins."""
    size = f"{len(run.train):,} sequences" if isinstance(run.train, PackedBlocks) else "a stream of sequences"
    attention = describe_layers(model.config)
    say(f"Model   {recipe.model_name}: {model.num_parameters() / 1e6:.2f}M parameters, {attention}")
    say(f"Text    {run.source.name}; {size} of {recipe.sequence_length} tokens, {len(run.validation):,} for validation")
    if recipe.script == "pretrain":
        say(f"Length  {describe_length(recipe, model, recipe.max_steps)}")
        if isinstance(run.train, PackedBlocks):
            tokens = len(run.train) * recipe.sequence_length / recipe.updates(len(run.train))
            if tokens < 0.95 * recipe.tokens_per_step:
                warn(
                    f"the text ends within a step, which is then smaller: steps have {tokens:,.0f} tokens on average, "
                    f"so the run trains on {with_prefix(tokens * recipe.max_steps)} tokens"
                )
    say(f"Run     {recipe.output_dir}, on {recipe.world_size} x {recipe.device.type}")
    if recipe.world_size == 1 < (gpus := torch.cuda.device_count()):
        command = f"torchrun --nproc_per_node {gpus} -m modeling_gqa.scripts.{recipe.script}"
        say(f"This process drives one of {gpus} GPUs; {command} drives all")
    if recipe.bf16 and computing_dtype(torch.bfloat16, recipe.device.type) != torch.bfloat16:
        warn("this CPU multiplies bfloat16 many times slower than float32: --bf16 false is faster")
    if recipe.resume:
        where = f"Resuming from {run.checkpoint}" if run.checkpoint else None
        say(where or "No checkpoint had been saved yet: starting from step 0")


def load_text(
    recipe: Recipe, source: Source, mark: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, Dataset, PackedBlocks]:
    """On every process: load the run's tokenizer, and its training and validation blocks."""
    folder = Path(recipe.output_dir)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    validation = load_blocks(folder / "data", "validation")
    if not recipe.streaming:
        train = load_blocks(folder / "data", "train")
        recipe.set_epochs(len(train))
        return tokenizer, train, validation
    split = load_split(source, folder / "data")
    step = recipe.train_batch_size * recipe.world_size * recipe.gradient_accumulation_steps
    stream = CheckedStream(partial(read_blocks, split, tokenizer, recipe.sequence_length), kept=8 * step)
    stream.expected = mark.get("stream")
    return tokenizer, stream, validation


@dataclass(frozen=True)
class RunSetup:
    """How a run begins or is resumed, on the main process.

    Args:
        folder: the open folder of the run.
        values: what `load_recipe` returns beside the recipe.
        config: the model's configuration.
        source: the text.
        fingerprints: hashes of the models that the run reads, by their roles; a resumption needs the same ones.
    """

    folder: RunFolder
    recipe: Recipe
    values: dict[str, Any]
    config: PreTrainedConfig
    source: Source
    fingerprints: dict[str, str]

    def begin(self) -> None:
        """Write recipe, tokenizer and tokens, and only then delete what an earlier run wrote in the folder."""
        folder = self.folder
        folder.refuse_foreign()
        if folder.holds_run and not self.recipe.overwrite:
            raise UserError(f"{folder.path} already holds a run: --resume continues it, --overwrite replaces it")
        with folder.staging() as staged:
            self.write_tokens(staged)
            save_recipe(staged, self.values, self.config)
            folder.notes = {"models": self.fingerprints, "versions": VERSIONS}
            folder.remove_run()
            folder.place("data", "tokenizer", SAVED_MODEL, SAVED_RECIPE)

    def write_tokens(self, folder: Path) -> None:
        """Write the tokenizer and the tokens of the run to `folder`."""
        for note in self.source.notes():
            say(f"Text    {note}")
        recipe, source = self.recipe, self.source
        split, text = cache(lambda: split_source(source, recipe)), text_of(source, recipe)
        if recipe.tokenizer:
            tokenizer = load_tokenizer(recipe.tokenizer)
            check_tokenizer(tokenizer, self.config)
            tokenizer.save_pretrained(folder / "tokenizer")
        else:
            write_tokenizer(folder / "tokenizer", text, split, self.config.vocab_size)
            tokenizer = load_tokenizer(folder / "tokenizer")
            check_tokenizer(tokenizer, self.config)

        def write(data: Path) -> None:
            with progress_bars() as progress:
                write_blocks(split(), tokenizer, recipe, data, progress)

        rest = [tokenizer_state(folder / "tokenizer"), recipe.sequence_length, recipe.max_eval_blocks]
        make_once("Tokens", folder / "data", text and [text, *rest], write)
        check_blocks(folder / "data", recipe, source.name, recipe.train_batch_size * recipe.world_size)

    def resume(self) -> tuple[Path | None, dict[str, Any]]:
        """Check that what the run reads is unchanged, and find the checkpoint to continue from.

        Returns:
            The checkpoint and its mark; `None` and an empty mark where no checkpoint had been saved.

        Raises:
            UserError: recipe, models, text or the finished model have changed, or no checkpoint is whole; or the run
                cannot get another length.
        """
        folder = self.folder
        changed_length = compare_recipes(self.values, self.config)
        for role, then in folder.notes.get("models", {}).items():
            if self.fingerprints.get(role) != then:
                raise UserError(
                    f"the {role} has other weights than when the run in {folder.path} began: bring them back"
                )
        checkpoint, mark, damaged = find_resumable(folder.path, self.recipe.world_size, folder.files)
        for problem in damaged:
            say(f"Passed over: {problem}")
        if checkpoint is None and (folder.path / "final").exists():
            raise UserError(
                f"{folder.path} holds a finished model and no checkpoint to resume: --overwrite starts again"
            )
        if edited := folder.edited("final"):
            raise UserError(
                f"{edited} has changed since it was written, and --resume writes it again: move it away first"
            )
        newer = [path.name for path in checkpoints(folder.path)]
        folder.refuse_foreign(newer[newer.index(checkpoint.name) + 1 :] if checkpoint else newer)
        versions = folder.notes.get("versions", VERSIONS)
        if changed := [f"{name} {versions.get(name)}" for name in VERSIONS if versions.get(name) != VERSIONS[name]]:
            say(f"The run began with {', '.join(changed)}: with other versions its numbers can differ in the last bits")
        self.restore_tokens()
        if checkpoint:
            # A share of a longer run would be more of them.
            self.recipe.warmup_steps = mark.get("warmup_steps", self.recipe.warmup_steps)
        if changed_length:
            self.change_length(checkpoint)
        return checkpoint, mark

    def change_length(self, checkpoint: Path | None) -> None:
        """Save the recipe of a run that goes on from `checkpoint` for another number of steps."""
        if not self.recipe.streaming:
            self.recipe.set_epochs(len(load_blocks(self.folder.path / "data", "train")))
        if checkpoint:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            then, now, run = state.max_steps, self.recipe.max_steps, f"the run in {self.folder.path}"
            if then != now and now <= state.global_step:
                raise UserError(f"{run} has taken {state.global_step:,} steps, and {now:,} are asked for: give it more")
            if then != now and (reason := self.recipe.bound_to_length()):
                raise UserError(f"{run} has another length ({then:,} steps then, {now:,} now): {reason}")
        with self.folder.staging() as staged:
            save_recipe(staged, self.values | {"resume": False}, self.config)
            self.folder.place(SAVED_MODEL, SAVED_RECIPE)

    def restore_tokens(self) -> None:
        """Check the run's tokens and tokenizer, and make missing or damaged ones again: they must come out the same."""
        folder, files = self.folder, self.folder.files
        tokens = ["data/validation.npy", *(() if self.recipe.streaming else ("data/train.npy",))]
        needed = [folder.path / name for name in (*tokens, "tokenizer/tokenizer_config.json")]
        missing = next((f"{path} is missing" for path in needed if not path.is_file()), None)
        problem = missing or folder.changed("data", "tokenizer")
        if problem is None:
            return
        say(f"{problem}: making the tokens again")
        with folder.staging() as staged:
            try:
                self.write_tokens(staged)
            except UserError as error:
                raise UserError(f"{problem}, and the tokens cannot be made again: {error}") from error
            if any(sha256_of(staged / name) != files.get(name) for name in tokens):
                raise UserError(
                    f"{problem}, and {self.source.name} does not give the tokens that the run was trained on: bring "
                    "back the file, or the text as it was"
                )
            folder.place("tokenizer", "data")


def text_of(source: Source, recipe: Recipe) -> Any:
    """Return what the text and its split depend on, as JSON has it; `None` where that is not known."""
    state = source.state()
    return state and [state, recipe.text_column, recipe.validation_fraction, recipe.streaming]


def tokenizer_state(folder: Path) -> list[Any]:
    """Return what tells a saved tokenizer from others, as JSON has it; where it was loaded from does not count."""
    config = "tokenizer_config.json"
    values = read_object(folder / config) or {}
    values |= dict.fromkeys(("is_local", "local_files_only"))
    return [values, {name: sha256_of(folder / name) for name in file_names(folder) if name != config}]


def write_tokenizer(folder: Path, text: Any, split: Callable[[], Split], vocab_size: int) -> None:
    """Write a tokenizer that is trained on the text for training; `text` is what `text_of` returns for it."""

    def write(folder: Path) -> None:
        found = split()
        say(f"Training a byte-level BPE tokenizer on {found.source.name} ...")
        train_tokenizer(found.documents("train"), vocab_size).save_pretrained(folder)

    make_once("Tokenizer", folder, text and [text, vocab_size], write)


def check_overlap(recipe: Recipe) -> None:
    """Raise `UserError` where output_dir lies in a folder that the run reads, or that folder in output_dir."""
    output = Path(recipe.output_dir).resolve()
    for what, name in recipe.inputs():
        path = Path(name).expanduser()
        # A Hub name is no path here; a pattern stands for the folder that it searches, or the files that it matches.
        matched = [] if os.path.exists(path) else glob.glob(str(path), recursive=True)
        paths = [Path(found) for found in matched if os.path.isfile(found)] if matched else [path]
        if "**" in path.parts:
            paths.append(Path(*path.parts[: path.parts.index("**")]))
        for path in (path.resolve() for path in paths):
            if is_in(output, path) or is_in(path, output):
                raise UserError(
                    f"output_dir {recipe.output_dir} overlaps the {what} {name}: neither may lie in the other; choose "
                    "another output_dir"
                )


def fingerprint(model: str) -> str:
    """Return a hash of a model's weights and configuration; `model` is a folder or Hub name."""
    from ..checkpoints.files import local_folder  # uptraining alone reads models

    folder = local_folder(model)
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return "-".join(sha256_of(path)[:16] for path in files)


# -- The recipe that a folder keeps


def save_recipe(folder: Path, values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Write `recipe.yaml` and `model.json`: every option of a run but tokens of the Hub, and the configuration."""
    kept = {name: value for name, value in values.items() if name not in ("hub_token", "local_rank")}
    (folder / SAVED_RECIPE).write_text(yaml.safe_dump(kept), encoding="utf-8")
    (folder / SAVED_MODEL).write_text(config.to_json_string(use_diff=False), encoding="utf-8")


def compare_recipes(values: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Raise `UserError` where the run in `output_dir` has other options or another model; it names them.

    Options in `FREE_ON_RESUME` and `LENGTHS` may differ. Returns whether the latter do.
    """
    folder = Path(values["output_dir"])
    if not (folder / SAVED_RECIPE).is_file() or not (folder / SAVED_MODEL).is_file():
        raise UserError(f"nothing to resume in {folder}: it holds no {SAVED_RECIPE}")
    try:
        saved = dict(yaml.safe_load((folder / SAVED_RECIPE).read_text(encoding="utf-8")))
        model = dict(json.loads((folder / SAVED_MODEL).read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / SAVED_RECIPE} or {SAVED_MODEL} is damaged: {error}") from error
    ours = json.loads(config.to_json_string(use_diff=False))
    pairs = [(key, saved.get(key, value), value) for key, value in values.items() if key not in FREE_ON_RESUME]
    compared = sorted({*model, *ours} - {"transformers_version", "_name_or_path"})
    pairs += [(f"model {key}", model.get(key), ours.get(key)) for key in compared]
    differing = {key: f"{key} ({then!r} then, {now!r} now)" for key, then, now in pairs if then != now}
    if differing.keys() - LENGTHS:
        raise UserError(
            f"the run in {folder} has another recipe: {', '.join(differing.values())}; resume with the earlier values, "
            "or leave --resume out and give a new --output-dir"
        )
    return bool(differing)
