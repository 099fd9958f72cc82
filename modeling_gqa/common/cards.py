"""What the model cards of conversions and of trainings have in common."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import yaml_dump
from yaml import YAMLError

from modeling_gqa_cli.errors import INSTALL
from modeling_gqa_cli.paths import within
from modeling_gqa_vllm.kernels import stored

from ..configuration_gqa import GQAConfig
from .atomic import write_text

# Entries of a source's card that hold for the weights made from it, too.
KEPT_METADATA = ("license", "license_name", "license_link", "language", "datasets")
WITH_PLUGIN = """
vLLM 0.32 or 0.33 caches the latent of this model's MLA where the package is installed beside it ({install}):
{latent} a token and layer{largest}. """
ALIKE = "Without the package, `--trust-remote-code` serves the model with expanded keys and values: {expanded}."
REFUSED = "Without the package vLLM does not serve it, because {reason}."


def card_metadata(config: GQAConfig) -> dict[str, Any]:
    """Return the metadata that every card of a model has; its kinds of attention are tags."""
    kinds = {layer.attention_kind for layer in config.per_layer_config}
    tags = ["modeling_gqa", "kv-cache", *sorted(kinds)]
    return {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}


def base_metadata(name: str | None) -> dict[str, Any]:
    """Return the metadata of weights that are made from those of the model `name` on the Hub; none without a name."""
    # Of the Hub's relations (adapter, finetune, merge, quantized) this one holds for changed weights of full precision.
    return {"base_model": name, "base_model_relation": "finetune"} if name else {}


def kept_metadata(card: Path | None, names: Collection[str] = KEPT_METADATA) -> dict[str, Any]:
    """Return the entries `names` in a source's card; none where it has no card, or a malformed one."""
    try:
        found = metadata_load(within(card.parent, card)) if card and card.is_file() else None
    except (ValueError, YAMLError, OSError, RecursionError):
        found = None
    return {name: found[name] for name in names if name in found} if found else {}


def made_from(source: str, card: Path | None, config: GQAConfig) -> tuple[str, dict[str, Any]]:
    """Return what a card calls the source of a model, a name on the Hub or a folder's alone, and the metadata."""
    path = Path(source)
    base = base_metadata(None if path.exists() else source)
    # A card is for others: no path of this machine.
    return f"`{path.resolve().name if path.exists() else path}`", card_metadata(config) | kept_metadata(card) | base


def serving_note(config: GQAConfig) -> str:
    """Return what a card says of MLA in vLLM, which caches it in two ways; "" where no layer is MLA."""
    layers = [layer for layer in config.per_layer_config if layer.attention_kind == "mla"]
    if not layers:
        return ""
    layer, largest = layers[0], " at most" if config.is_heterogeneous else ""
    numbers = max(own.kv_lora_rank + own.qk_rope_head_dim for own in map(stored, layers))
    # vLLM pads values to the size of the keys.
    expanded = 2 * layer.num_attention_heads * layer.qk_head_dim
    reasons = {
        "its layers differ": config.is_heterogeneous,
        "it keeps the mean of its keys beside the cache": bool(layer.key_mean),
        "its values are larger than its keys": layer.v_head_dim > layer.qk_head_dim,
    }
    note = WITH_PLUGIN.format(install=INSTALL.format(extras=""), latent=in_bfloat16(numbers), largest=largest)
    for reason, holds in reasons.items():
        if holds:
            return "\n" + note + REFUSED.format(reason=reason)
    return "\n" + note + ALIKE.format(expanded=in_bfloat16(expanded))


def in_bfloat16(numbers: int) -> str:
    """Return the size of so many numbers in words."""
    return f"{2 * numbers:,} bytes in bfloat16 ({numbers:,} numbers)"


def write_card(folder: Path, metadata: dict[str, Any], text: str) -> None:
    """Write the `README.md` of a Hub repository: metadata, then the text in markdown."""
    write_text(folder / "README.md", f"---\n{yaml_dump(metadata, sort_keys=False)}---\n\n{text}")
