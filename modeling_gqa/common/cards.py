"""What the model cards of conversions and of trainings have in common."""

from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import yaml_dump
from yaml import YAMLError

from ..configuration_gqa import GQAConfig
from .files import within, write_text

# Entries of a source's card that hold for the weights made from it, too.
KEPT_METADATA = ("license", "license_name", "license_link", "language", "datasets")
NO_LATENT_NORM = """
vLLM does not recognise this model's MLA: it tells MLA by an RMSNorm after `kv_a_proj_with_mqa`, which a converted model
does not have (no linear map can match it), so it serves the model as plain attention and caches all keys and values."""


def card_metadata(config: GQAConfig) -> dict[str, Any]:
    """Return the metadata that every card of a model has; its kinds of attention are tags."""
    kinds = {layer.attention_kind for layer in config.per_layer_config}
    return {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": sorted({"gqa", *kinds})}


def kept_metadata(card: Path | None) -> dict[str, Any]:
    """Return the entries of `KEPT_METADATA` in a source's card; none where it has no card, or a malformed one."""
    try:
        found = metadata_load(within(card.parent, card)) if card and card.is_file() else None
    except (ValueError, YAMLError, OSError, RecursionError):
        found = None
    return {name: found[name] for name in KEPT_METADATA if name in found} if found else {}


def latent_norm_note(config: GQAConfig) -> str:
    """Return what a card says of MLA layers without a latent norm; "" where there are none."""
    return f"\n{NO_LATENT_NORM}" if any(layer.latent_norm is False for layer in config.per_layer_config) else ""


def write_card(folder: Path, metadata: dict[str, Any], text: str) -> None:
    """Write the `README.md` of a Hub repository: metadata, then the text in markdown."""
    write_text(folder / "README.md", f"---\n{yaml_dump(metadata, sort_keys=False)}---\n\n{text}")
