"""Save a trained model as a Hub repository, load it as a stranger would, and upload it."""

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
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, SchedulerType

from modeling_gqa.common.cards import NO_LATENT_NORM, kept_metadata
from modeling_gqa.conversion.checkpoints.checkpoint import open_checkpoint
from modeling_gqa.conversion.checkpoints.files import LICENCES, PATH_FIELDS, copy_files, local_folder
from modeling_gqa.conversion.command.report import REPORT_NAME

from .data import Source
from .recipe import Recipe, RecipeError, public_name
from .uptrain_recipe import UptrainRecipe

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
LABELS = {
    "validation_loss": ("Validation loss, nats per token", "{:.4f}"),
    "validation_perplexity": ("Validation perplexity", "{:.2f}"),
    "initial_validation_loss": ("Validation loss before uptraining", "{:.4f}"),
    "initial_validation_perplexity": ("Validation perplexity before uptraining", "{:.2f}"),
    "teacher_validation_loss": ("Validation loss of the teacher", "{:.4f}"),
    "teacher_validation_perplexity": ("Validation perplexity of the teacher", "{:.2f}"),
    "gap_closed": ("Share of the perplexity between teacher and conversion that uptraining closed", "{:.1%}"),
    "kl": ("KL divergence from the teacher, nats per token", "{:.4f}"),
    "initial_kl": ("KL divergence from the teacher before uptraining", "{:.4f}"),
    "bigram_loss": ("Interpolated bigram model on the same tokens, nats per token", "{:.4f}"),
    "tokens_seen": ("Tokens seen", "{:,}"),
    "tokens_per_second": ("Training speed, tokens per second", "{:,.0f}"),
    "mfu": ("Model FLOPs utilisation", "{:.0%}"),
    "cache_bytes_per_token": ("Cache, bytes per token (float32)", "{:,}"),
}


def check_upload(recipe: Recipe) -> None:
    """Raise `RecipeError` where an upload was asked for that cannot succeed."""
    if recipe.push_to_hub and not (recipe.hub_token or get_token()):
        raise RecipeError("push_to_hub needs a Hub token: run `hf auth login` first, or set HF_TOKEN")


def repository_name(recipe: Recipe) -> str:
    return recipe.hub_model_id or Path(recipe.output_dir).resolve().name


def describe_attention(config: PreTrainedConfig) -> str:
    """For instance `gqa (8 query heads, 2 key/value heads)`; a mixed model's layers one by one."""
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
    """Return a recipe, or a value in one, with files and folders by their names alone."""
    if isinstance(value, dict):
        return {
            key: [Path(name).name for name in item] if key == "data_files" else public_recipe(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [public_recipe(item) for item in value]
    return public_name(value) if isinstance(value, str) and value else value


def describe_origin(recipe: Recipe, results: dict[str, Any]) -> str:
    if not isinstance(recipe, UptrainRecipe):
        return "pretrained from scratch with `modeling_gqa`"
    student = public_name(recipe.student)
    source = f", a conversion of `{public_name(recipe.teacher)}`," if recipe.teacher else ""
    return f"`{student}`{source} uptrained with `modeling_gqa` on {results['tokens_seen']:,} tokens"


def describe_method(recipe: Recipe) -> str:
    """The lines on what uptraining did, for the card's section on training."""
    if not isinstance(recipe, UptrainRecipe):
        return ""
    parts = "the attention parameters" if recipe.trainable == "attention" else "all parameters"
    if recipe.teacher is None:
        return f"- Next-token loss, of {parts}.\n"
    return (
        f"- {recipe.layerwise_fraction:.0%} of the steps regress each layer's attention output on the teacher's, for\n"
        f"  the teacher's input; the rest train {parts} with {recipe.kl_weight:g} times the KL divergence from the\n"
        f"  teacher at temperature {recipe.temperature:g} and {1 - recipe.kl_weight:g} times the next-token loss.\n"
    )


def write_card(folder: Path, recipe: Recipe, config: PreTrainedConfig, source: Source, results: dict[str, Any]) -> None:
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
    if isinstance(recipe, UptrainRecipe):
        kept = kept_metadata(local_folder(recipe.student) / "README.md")
        if "license" in kept:  # of the weights that this training began with, whatever the text's is
            metadata.pop("license_name", None)
        metadata |= kept
        if recipe.teacher and not Path(recipe.teacher).is_dir():
            metadata["base_model"] = recipe.teacher
    table = "\n".join(
        f"| {name} | {form.format(results[key])} |" for key, (name, form) in LABELS.items() if key in results
    )
    notes = (KL if "kl" in results else "") + (UTILISATION if "mfu" in results else "")
    if any(layer.latent_norm is False for layer in config.per_layer_config):
        notes += f"\n{NO_LATENT_NORM}"
    card = CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=repository_name(recipe).rpartition("/")[2],
        parameters=results["parameters"] / 1e6,
        origin=describe_origin(recipe, results),
        attention=describe_attention(config),
        notes=notes,
        method=describe_method(recipe),
        repository=repository_name(recipe),
        table=table,
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
    results: dict[str, Any],
) -> None:
    """Save what `from_pretrained` needs: weights, configurations, code and tokenizer; of a student in its own dtype,
    whatever it was trained in, and with its licence."""
    # Trainer switches the cache off for training and would have that saved.
    model.config.use_cache = True
    model.generation_config.use_cache = True
    dtype = open_checkpoint(recipe.student, download=False).dtype if isinstance(recipe, UptrainRecipe) else model.dtype
    tied = model.all_tied_weights_keys  # which are saved once
    model.save_pretrained(folder, state_dict={name: x.to(dtype) for name, x in weights.items() if name not in tied})
    model.config.dtype = dtype  # `save_pretrained` writes the dtype of the model in memory
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    hide_paths(folder / "tokenizer_config.json")
    values = yaml.safe_load((Path(recipe.output_dir) / "recipe.yaml").read_text(encoding="utf-8"))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(public_recipe(values)), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if isinstance(recipe, UptrainRecipe):
        copy_files(local_folder(recipe.student), folder, (*LICENCES, REPORT_NAME))


def hide_paths(path: Path) -> None:
    """Take out of a tokenizer's configuration where its files once lay."""
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in values.items() if name not in PATH_FIELDS}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_as_stranger(folder: Path, prompt: str) -> str:
    """Load the repository in a process that cannot import the package; return the text that it generates."""
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
    """Upload the repository and return its address; without a token, with the one that is saved on this machine."""
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
