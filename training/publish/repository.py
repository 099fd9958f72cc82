"""Save a trained model as a Hub repository, load that without the package, and upload it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, SchedulerType

from modeling_gqa.common.cards import NO_LATENT_NORM
from modeling_gqa.conversion.checkpoints.files import PATH_FIELDS

from .catalogue import public_name
from .data import Source
from .errors import RecipeError
from .recipe import Recipe
from .results import RESULTS, Results, table_rows
from .saved_recipe import SAVED_RECIPE

# Identifiers that the Hub's model card metadata knows; any other goes under `license: other`.
HUB_LICENSES = {"apache-2.0", "mit", "odc-by", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-sa-3.0", "unlicense"}

CARD = """---
{metadata}---

# {title}

A {parameters:.1f}M-parameter decoder language model, {origin}, for Hugging Face
transformers. Its attention: {attention}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{repository}", trust_remote_code=True)
```

The model's code is in this repository, hence `trust_remote_code=True`; pin what you have read with `revision=`.

## Measured

| | |
|---|---|
{table}

The loss is the mean over every predicted token of {validation_blocks} blocks of {sequence_length} tokens, from
documents that were not trained on.{notes}

## Training

- Text: {text}. Licence of the text: {text_license}.
- {steps} steps of {tokens_per_step:,} tokens on {device}, {precision}; {scheduler} schedule, peak learning rate
  {learning_rate}, weight decay {weight_decay}, seed {seed}.
{method}- transformers {transformers}, torch {torch}. The complete recipe is in `recipe.yaml`.

The model's code is licensed under Apache-2.0. This is a base model: it continues text and has not been made to follow
instructions; what it writes can be wrong, and repeats its training text's biases.
"""

UTILISATION = """ Utilisation is the model's FLOPs over the rate of a large matrix product, measured
on the same device in the same precision when training began."""
KL = """ The KL divergence is the teacher's next-token distribution from the
model's, averaged over the same tokens."""


def repository_name(recipe: Recipe) -> str:
    return recipe.hub_model_id or Path(recipe.output_dir).resolve().name


def describe_attention(config: PreTrainedConfig) -> str:
    """Return for instance `gqa (8 query heads, 2 key/value heads)`; of a mixed model the kinds, layer by layer."""
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    if len({layer.attention_kind for layer in layers}) > 1:
        return "by layer, " + ", ".join(layer.attention_kind for layer in layers)
    first = layers[0]
    if first.attention_kind == "mla":
        return f"mla ({first.num_attention_heads} query heads, a latent of {first.kv_lora_rank})"
    return (
        f"{first.attention_kind} ({first.num_attention_heads} query heads, {first.num_key_value_heads} key/value heads)"
    )


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


def write_card(folder: Path, recipe: Recipe, config: PreTrainedConfig, source: Source, results: Results) -> None:
    """Write the model card, with the numbers that were measured in this run."""
    text_license = source.license or "not stated; see the source"
    kinds = {config.per_layer_config[i].attention_kind for i in range(config.num_hidden_layers)}
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": sorted({"gqa", *kinds}),
        "license": (source.license or "").lower() if (source.license or "").lower() in HUB_LICENSES else "other",
    }
    if metadata["license"] == "other":
        metadata["license_name"] = (source.license or "unknown").lower()
    if recipe.dataset_name:
        metadata["datasets"] = [public_name(recipe.dataset_name)]
    kept = recipe.card_metadata()
    if "license" in kept:  # of the weights that this training began with, whatever the text's is
        metadata.pop("license_name", None)
    metadata |= kept
    notes = (KL if "kl" in results else "") + (UTILISATION if "mfu" in results else "")
    if any(layer.latent_norm is False for layer in config.per_layer_config):
        notes += f"\n{NO_LATENT_NORM}"
    card = CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=repository_name(recipe).rpartition("/")[2],
        parameters=results["parameters"] / 1e6,
        origin=recipe.origin(results),
        attention=describe_attention(config),
        notes=notes,
        method=recipe.method(),
        repository=repository_name(recipe),
        table="\n".join(table_rows(results)),
        validation_blocks=results["validation_blocks"],
        sequence_length=recipe.sequence_length,
        text=source.name,
        text_license=text_license,
        steps=results["steps"],
        tokens_per_step=results["tokens_per_step"],
        device=torch.cuda.get_device_name()
        if recipe.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        precision="bf16" if recipe.bf16 else "fp16" if recipe.fp16 else "fp32",
        scheduler=SchedulerType(recipe.lr_scheduler_type).value,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


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
        weights: the trained tensors by their names, which under FSDP are not those of `model`.
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
    (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    recipe.copy_documents(folder)


def hide_paths(path: Path) -> None:
    """Delete from a tokenizer's configuration the paths that its files had on this machine."""
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in values.items() if name not in PATH_FIELDS}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_as_stranger(folder: Path, prompt: str) -> str:
    """Load the repository in a process that cannot import the package, and return the text that the model writes.

    Raises:
        RecipeError: it does not load there.
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
        raise RecipeError(f"{folder} was saved, but does not load in a process without the package: {lines[-1]}")
    return process.stdout.rstrip("\n")


def upload(folder: Path, recipe: Recipe, token: str | None) -> str:
    """Upload the repository and return the address of the commit.

    Args:
        token: of the Hub; `None` for the one that is saved on this machine.

    Raises:
        RecipeError: the upload failed; `folder` is complete.
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
        raise RecipeError(f"{folder} is complete, but the upload failed: {error}") from error
    return str(commit.commit_url)
