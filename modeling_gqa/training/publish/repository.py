"""Save a trained model as a Hub repository, load that in a process without the package, and upload it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_gqa_cli.recipes import public_name

from ...checkpoints.files import PATH_FIELDS
from ...common.errors import UserError
from ...common.results import write_json
from ..folder.manifest import SAVED_RECIPE
from ..recipe.pretraining import Recipe
from ..results import RESULTS, Results
from .card import repository_name


def public_recipe(value: Any) -> Any:
    """Return a recipe, or a value in one, in which paths are replaced by their last parts."""
    if isinstance(value, dict):
        return {
            key: [Path(name).name for name in item] if key == "data_files" else public_recipe(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [public_recipe(item) for item in value]
    return public_name(value) if isinstance(value, str) and value else value


def save_repository(
    folder: Path,
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    results: Results,
) -> None:
    """Save a Hub repository: weights, configurations, code, tokenizer, recipe and results.

    Args:
        folder: is made; it must not exist.
        weights: the trained tensors by their names; under FSDP `model` holds only parts of them.
        results: is written to `results.json`.
    """
    # Trainer switches the cache off for training and would have that saved.
    model.config.use_cache = True
    model.generation_config.use_cache = True
    dtype = recipe.saved_dtype(model)
    tied = model.all_tied_weights_keys  # which are saved once
    model.save_pretrained(folder, state_dict={name: x.to(dtype) for name, x in weights.items() if name not in tied})
    model.config.dtype = dtype  # `save_pretrained` writes the dtype of the model in memory
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    hide_paths(folder / "tokenizer_config.json")
    values = yaml.safe_load((Path(recipe.output_dir) / SAVED_RECIPE).read_text(encoding="utf-8"))
    (folder / SAVED_RECIPE).write_text(yaml.safe_dump(public_recipe(values)), encoding="utf-8")
    write_json(folder / RESULTS, results)
    recipe.copy_documents(folder)


def hide_paths(path: Path) -> None:
    """Delete from a tokenizer's configuration the paths that its files had on this machine."""
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in values.items() if name not in PATH_FIELDS}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_as_stranger(folder: Path, prompt: str) -> str:
    """Load the repository in a process that cannot import the package, and return the text that the model writes.

    Raises:
        UserError: it does not load there.
    """
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("sample.py")), str(folder.resolve()), prompt],
            env={**os.environ, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{folder} was saved, but does not load in a process without the package: {lines[-1]}")
    return process.stdout.rstrip("\n")


def upload(folder: Path, recipe: Recipe, token: str | None) -> str:
    """Upload the repository and return the address of the commit.

    Args:
        token: of the Hub; `None` for the one that is saved on this machine.

    Raises:
        UserError: the upload failed; `folder` is complete.
    """
    api = HfApi(token=token)
    try:
        name = api.create_repo(repository_name(recipe), private=recipe.hub_private_repo, exist_ok=True).repo_id
        if recipe.hub_revision:
            api.create_branch(name, branch=recipe.hub_revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, revision=recipe.hub_revision, commit_message="Trained model"
        )
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{folder} is complete, but the upload failed: {error}") from error
    return str(commit.commit_url)
