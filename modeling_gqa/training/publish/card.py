"""The model card of a trained model, with the numbers of its run."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import SchedulerType

from modeling_gqa_cli.recipes import public_name

from ... import GQAConfig
from ...common import cards
from ...costs.measuring import machine_name
from ...data.source import Source, Split
from ..recipe.pretraining import Recipe
from ..results import Results, results_table

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

The loss is the mean over every predicted token of {validation_blocks} blocks of {sequence_length} tokens, from
{held_out}.{notes}

## Training

- Text: {text}. Licence of the text: {text_license}.
- {steps} steps of {tokens_per_step:,} tokens on {device}, {precision}; {scheduler} schedule, peak learning rate
  {learning_rate}, weight decay {weight_decay}, seed {seed}.
{method}- transformers {transformers}, torch {torch}. The complete recipe is in `recipe.yaml`.

The model's code is licensed under Apache-2.0. This is a base model: it continues text and has not been made to follow
instructions; what it writes can be wrong, and repeats its training text's biases.
"""

# What the validation text is.
HELD_OUT = "documents that were not trained on"
CUT = "the end of the training text, which is one document; what stands before was trained on"
UTILISATION = """ Utilisation is the model's FLOPs over the rate of a large matrix product, measured
on the same device in the same precision when training began."""
KL = """ The KL divergence is the teacher's next-token distribution from the
model's, averaged over the same tokens."""


def repository_name(recipe: Recipe) -> str:
    return recipe.hub_model_id or Path(recipe.output_dir).resolve().name


def describe_attention(config: GQAConfig) -> str:
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


def write_card(folder: Path, recipe: Recipe, config: GQAConfig, split: Split, results: Results) -> None:
    """Write the `README.md` of a trained model.

    Args:
        folder: the repository; it exists.
        config: the model's configuration.
        split: the text that the model was trained on, and which of it was held out.
        results: the numbers that were measured in this run.
    """
    notes = (KL if "kl" in results else "") + (UTILISATION if "mfu" in results else "")
    text = CARD.format(
        title=repository_name(recipe).rpartition("/")[2],
        parameters=results["parameters"] / 1e6,
        origin=recipe.origin(results),
        attention=describe_attention(config),
        notes=notes + cards.serving_note(config),
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
    cards.write_card(folder, card_metadata(recipe, config, split.source), text)


def card_metadata(recipe: Recipe, config: GQAConfig, source: Source) -> dict[str, Any]:
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
