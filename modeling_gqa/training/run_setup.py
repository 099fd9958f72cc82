"""How a run begins, and how it is resumed.

A new run writes its recipe, its tokenizer and its tokens. A resumed one checks them and finds its checkpoint.
"""

import glob
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_token
from transformers import PreTrainedConfig

from ..checkpoints.files import local_folder
from ..common.errors import UserError
from ..common.files import is_in
from ..data.blocks import write_blocks
from ..data.source import Source, split_source
from ..data.tokenizer import check_tokenizer, load_tokenizer, train_tokenizer
from .console import say
from .folder.checkpoint import find_resumable
from .folder.listing import describe, read_object
from .folder.manifest import SAVED_MODEL, SAVED_RECIPE, checkpoints
from .folder.run_folder import RunFolder
from .recipe.pretraining import Recipe
from .recipe.saved import compare_recipes, save_recipe

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, on the main process.

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
        """Write recipe, tokenizer and tokens, and only then delete what an earlier run wrote in the folder.

        Raises:
            UserError: the folder holds files of the user's, or a run and the recipe does not say `overwrite`.
        """
        folder = self.folder
        folder.refuse_foreign()
        if folder.holds_run and not self.recipe.overwrite:
            raise UserError(f"{folder.path} already holds a run: --resume continues it, --overwrite replaces it")
        with folder.staging() as staged:
            self.write_tokens(staged)
            save_recipe(staged, self.values, self.config)
            folder.manifest.notes = {"models": self.fingerprints, "versions": VERSIONS}
            folder.remove_run()
            folder.place("data", "tokenizer", SAVED_MODEL, SAVED_RECIPE)

    def write_tokens(self, folder: Path) -> None:
        """Write the tokenizer and the tokens of the run to `folder`."""
        for note in self.source.notes():
            say(f"Text    {note}")
        split = split_source(self.source, self.recipe)
        if self.recipe.tokenizer:
            tokenizer = load_tokenizer(self.recipe.tokenizer)
        else:
            say(f"Training a byte-level BPE tokenizer on {self.source.name} ...")
            tokenizer = train_tokenizer(split.documents("train"), self.config.vocab_size)
        check_tokenizer(tokenizer, self.config)
        tokenizer.save_pretrained(folder / "tokenizer")
        batch = self.recipe.train_batch_size * self.recipe.world_size
        write_blocks(split, tokenizer, self.recipe, folder / "data", batch)

    def resume(self) -> tuple[Path | None, dict[str, Any]]:
        """Check that what the run reads is unchanged, and find the checkpoint to continue from.

        Returns:
            The checkpoint and its mark; `None` and an empty mark where no checkpoint had been saved.

        Raises:
            UserError: recipe, models, text or the finished model have changed, or no checkpoint is whole.
        """
        folder = self.folder
        compare_recipes(self.values, self.config)
        for role, then in folder.manifest.notes.get("models", {}).items():
            if self.fingerprints.get(role) != then:
                raise UserError(
                    f"the {role} has other weights than when the run in {folder.path} began: bring them back"
                )
        checkpoint, mark, damaged = find_resumable(folder.path, self.recipe.world_size, folder.manifest.files)
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
        if self.recipe.streaming and checkpoint and "stream" not in mark:
            check_earlier_stream(checkpoint)
        newer = [path.name for path in checkpoints(folder.path)]
        folder.refuse_foreign(newer[newer.index(checkpoint.name) + 1 :] if checkpoint else newer)
        versions = folder.manifest.notes.get("versions", VERSIONS)
        if changed := [f"{name} {versions.get(name)}" for name in VERSIONS if versions.get(name) != VERSIONS[name]]:
            say(f"The run began with {', '.join(changed)}: with other versions its numbers can differ in the last bits")
        self.restore_tokens()
        return checkpoint, mark

    def restore_tokens(self) -> None:
        """Check the run's tokens and tokenizer, and make missing ones again.

        Raises:
            UserError: tokens are missing or damaged, and the text gives other ones.
        """
        folder, files = self.folder, self.folder.manifest.files
        tokens = ["data/validation.npy", *(() if self.recipe.streaming else ("data/train.npy",))]
        needed = [folder.path / name for name in (*tokens, "tokenizer/tokenizer_config.json")]
        missing = next((f"{path} is missing" for path in needed if not path.is_file()), None)
        problem = missing or folder.changed("data", "tokenizer")
        if problem is None:
            # A run of a version without manifests has them from now on.
            unknown = [name for name in tokens if files.get(name) is None]
            files |= {name: describe(folder.path / name) for name in unknown}
            folder.manifest.save()
            return
        then = {name: files.get(name) for name in tokens}
        if None in then.values():
            raise UserError(f"{problem}, and the run did not note what its tokens were: bring it back")
        say(f"{problem}: making the tokens again")
        with folder.staging() as staged:
            try:
                self.write_tokens(staged)
            except UserError as error:
                raise UserError(f"{problem}, and the tokens cannot be made again: {error}") from error
            if any(describe(staged / name) != entry for name, entry in then.items()):
                raise UserError(
                    f"{problem}, and {self.source.name} does not give the tokens that the run was trained on: bring "
                    "back the file, or the text as it was"
                )
            folder.place("tokenizer", "data")


def check_upload(recipe: Recipe) -> None:
    """Raise `UserError` where the recipe uploads the result and there is no Hub token."""
    if recipe.push_to_hub and not (recipe.hub_token or get_token()):
        raise UserError("push_to_hub needs a Hub token: run `hf auth login` first, or set HF_TOKEN")


def check_overlap(recipe: Recipe) -> None:
    """Raise `UserError` where output_dir lies in a folder that the run reads, or that folder in output_dir."""
    output = Path(recipe.output_dir).resolve()
    for what, name in recipe.inputs():
        path = Path(name).expanduser()
        # A Hub name is no path here; of a pattern, the folder that it searches or the files that it matches are meant.
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


def check_earlier_stream(checkpoint: Path) -> None:
    """Raise `UserError` for a checkpoint in the second epoch of a stream without hashes.

    Versions that kept no hashes ended each epoch with a smaller batch, which cannot be repeated exactly.
    """
    epoch = (read_object(checkpoint / "trainer_state.json") or {}).get("epoch")
    if isinstance(epoch, int | float) and epoch > 1:
        raise UserError(
            f"{checkpoint} was written by an earlier version, which had begun to read its stream again (epoch "
            f"{epoch:.2f}): training cannot go on from there exactly; start again with --overwrite"
        )
    say(f"{checkpoint} was written by an earlier version: whether the stream has changed since is not checked")


def fingerprint(model: str) -> str:
    """Return a hash of a model's weights and configuration; `model` is a folder or Hub name."""
    folder = local_folder(model)
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return "-".join(describe(path)["sha256"][:16] for path in files)
