"""The end of a run: its results and the Hub repository of its model are saved, loaded in a clean process, uploaded."""

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
from transformers import PreTrainedModel, SchedulerType

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import public_name

from .. import GQAConfig
from ..checkpoints.files import COMPANIONS, copy_files
from ..common import cards
from ..common.atomic import write_json
from ..common.batches import computing_dtype
from ..common.console import out, say
from ..common.progress import progress_bars
from ..conversion.targets import describe_layers
from ..costs.measuring import machine_name
from ..data.source import Source, Split, load_split
from ..data.tokenizer import ends_of_text, load_tokenizer
from ..evaluation.harness import Tasks, open_subject
from ..evaluation.results import CARD as CARD_FILE
from ..evaluation.results import card_entries, write_entries
from ..evaluation.results import results_table as scores_table
from .recipe import Recipe
from .results import RESULTS, Results, printed_lines, results_table
from .run_folder import SAVED_RECIPE, RunFolder
from .run_setup import OpenRun
from .trainer import PretrainTrainer

# Identifiers that the Hub's model card metadata knows; any other goes under `license: other`.
HUB_LICENSES = {"apache-2.0", "mit", "odc-by", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-sa-3.0", "unlicense"}

CARD = """# {title}

A {parameters:.1f}M-parameter decoder language model, {origin}, for Hugging Face
transformers. Its attention: {attention}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{repository}", trust_remote_code=True)
```

The model's code is in this repository, hence `trust_remote_code=True`; pin what you have read with `revision=`.

## Measured

{table}

Losses and KL divergences are means over every predicted token of {validation_blocks} sequences of {sequence_length}
tokens, from {held_out}. Utilisation is the model's FLOPs over the rate of the fastest matrix product
on the same device in the same precision.{serving}

## Training

- Text: {text}. Licence of the text: {text_license}.
- {steps} steps of {tokens_per_step:,} tokens on {device}, {precision}; {scheduler} schedule, peak learning rate
  {learning_rate}, weight decay {weight_decay}, seed {seed}.
{method}- transformers {transformers}, torch {torch}. The complete recipe is in `recipe.yaml`.

The model's code is licensed under Apache-2.0. This is a base model: it continues text and has not been made to follow
instructions; what it writes can be wrong, and repeats its training text's biases.
"""
HELD_OUT = "documents that were not trained on"
CUT = "the end of the training text, which is one document; what stands before was trained on"


def save_run(trainer: PretrainTrainer, run: OpenRun, results: Results) -> None:
    """Save the results, and publish the model; every process must call this function.

    Args:
        results: of the last weights; what is saved are those of `PretrainTrainer.outcome`.
    """
    results, weights = trainer.outcome(results)
    if run.folder is not None:
        recipe, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        final = run.folder.path / "final"
        with run.folder.staging() as staged:
            write_json(staged / RESULTS, results)
            if recipe.publish:
                save_repository(staged / "final", model, weights, recipe, results)
                split = load_split(run.source, run.folder.path / "data")
                write_run_card(staged / "final", recipe, model.config, split, results)
            run.folder.place(*(("final", RESULTS) if recipe.publish else (RESULTS,)))
        say("\n" + "\n".join(printed_lines(results)))
        if recipe.publish:
            say(f"\nSaved {final}. A clean process, without the package, loads it and writes:\n")
            say(load_in_clean_process(final, recipe.sample_prompt))
    if trainer.args.world_size > 1:
        torch.distributed.barrier()
    # The other processes end here: they would not wait for as long as the rest can take.
    if run.folder is not None:
        failed = None
        if run.tasks is not None:
            try:
                evaluate(run.folder, run.tasks, recipe, results)
            except Exception as error:  # the model is whole, and is uploaded all the same
                failed = error
        if run.upload is not None:
            say(f"\nUploaded: {upload(final, recipe, run.upload or None)}")
        if failed is not None:
            raise failed


def save_repository(
    folder: Path, model: PreTrainedModel, weights: dict[str, torch.Tensor], recipe: Recipe, results: Results
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
    ends = ends_of_text(load_tokenizer(str(Path(recipe.output_dir) / "tokenizer")), model.generation_config)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    dtype = recipe.saved_dtype(model)
    tied = model.all_tied_weights_keys  # which are saved once
    model.save_pretrained(folder, state_dict={name: x.to(dtype) for name, x in weights.items() if name not in tied})
    model.config.dtype = dtype  # `save_pretrained` writes the dtype of the model in memory
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    copy_files(Path(recipe.output_dir) / "tokenizer", folder, COMPANIONS)
    values = yaml.safe_load((Path(recipe.output_dir) / SAVED_RECIPE).read_text(encoding="utf-8"))
    (folder / SAVED_RECIPE).write_text(yaml.safe_dump(public_recipe(values)), encoding="utf-8")
    write_json(folder / RESULTS, results)
    recipe.copy_documents(folder)


def public_recipe(value: Any) -> Any:
    """Return a recipe, or a value in one, in which paths are replaced by their last parts."""
    if isinstance(value, dict):
        files = {"data_files": [Path(name).name for name in value["data_files"]]} if "data_files" in value else {}
        files |= {key: value[key] for key in ("sample_prompt",) if key in value}  # no path
        return {key: public_recipe(item) for key, item in value.items()} | files
    if isinstance(value, list):
        return [public_recipe(item) for item in value]
    return public_name(value) if isinstance(value, str) and value else value


def load_in_clean_process(folder: Path, prompt: str) -> str:
    """Load the repository in a process that cannot import the package, and return the text that the model writes."""
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("sample.py")), "--", str(folder.resolve()), prompt],
            env={**os.environ, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{folder} was saved, but does not load in a process without the package: {lines[-1]}")
    return process.stdout.rstrip("\n")


def evaluate(folder: RunFolder, tasks: Tasks, recipe: Recipe, results: Results) -> None:
    """Evaluate the saved model, print its scores, and write them into `results.json` and the model card."""
    final, title = folder.path / "final", repository_name(recipe).rpartition("/")[2]
    subject, device = open_subject(str(final)), str(recipe.device)
    say(f"\nEvaluating {final}: {', '.join(tasks.names)}")
    model: Any = subject.load(None, device)
    model.to(dtype=computing_dtype(model.dtype, device))
    with progress_bars() as show_progress:
        scores = tasks.run(model, subject, show_progress)
    out.print(scores_table(title, scores).to_rich(), "± is one standard error.", soft_wrap=False)
    results = results | {"evaluation": {name: result.to_dict() for name, result in scores.items()}}
    with folder.staging() as staged:
        copy_files(final, staged / "final", [CARD_FILE])
        write_entries(staged / "final", title, card_entries(scores, tasks.limit))
        for place in (staged, staged / "final"):
            write_json(place / RESULTS, results)
        folder.place(f"final/{CARD_FILE}", f"final/{RESULTS}", RESULTS)


def upload(folder: Path, recipe: Recipe, token: str | None) -> str:
    """Upload the repository, by a token or the one that this machine keeps, and return the address of the commit."""
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


# -- The card


def repository_name(recipe: Recipe) -> str:
    return recipe.hub_model_id or Path(recipe.output_dir).resolve().name


def write_run_card(folder: Path, recipe: Recipe, config: GQAConfig, split: Split, results: Results) -> None:
    """Write the `README.md` of a trained model; `split` says which text it was trained on, and what was held out."""
    text = CARD.format(
        title=repository_name(recipe).rpartition("/")[2],
        parameters=results["parameters"] / 1e6,
        origin=recipe.origin(results),
        attention=describe_layers(config),
        serving=cards.serving_note(config),
        method=recipe.method(),
        repository=repository_name(recipe),
        table=results_table(results).to_markdown(),
        validation_blocks=results["validation_blocks"],
        sequence_length=recipe.sequence_length,
        held_out=HELD_OUT if split.cut is None else CUT,
        text=split.source.name,
        text_license=split.source.license or "not stated; see the source",
        steps=results["steps"],
        tokens_per_step=results["tokens_per_step"],
        device=machine_name(str(recipe.device)),
        precision="bf16" if recipe.bf16 else "fp16" if recipe.fp16 else "fp32",
        scheduler=SchedulerType(recipe.lr_scheduler_type).value,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    metadata = run_metadata(recipe, config, split.source)
    if "evaluation" in results:  # of the same weights, before this session
        metadata |= cards.kept_metadata(Path(recipe.output_dir) / "final" / CARD_FILE, ["model-index"])
    cards.write_card(folder, metadata, text)


def run_metadata(recipe: Recipe, config: GQAConfig, source: Source) -> dict[str, Any]:
    """Return the card's metadata: those of every card, the text's, and those that the recipe's models bring along."""
    licence = (source.license or "unknown").lower()
    metadata = cards.card_metadata(config) | {"license": licence if licence in HUB_LICENSES else "other"}
    if metadata["license"] == "other":
        metadata["license_name"] = licence
    if recipe.dataset_name:
        metadata["datasets"] = [public_name(recipe.dataset_name)]
    kept = recipe.card_metadata()
    if "license" in kept:  # of the weights that this training began with, whatever the text's is
        metadata.pop("license_name", None)
    return metadata | kept
