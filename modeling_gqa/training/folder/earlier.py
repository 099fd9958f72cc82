"""The files that runs of versions without a manifest wrote, known by their names."""

from fnmatch import fnmatch
from pathlib import Path

import yaml

import modeling_gqa

TOKENIZER = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
# The model's code in repositories of version 0.1.0; later versions have other files.
CODE = (
    "attention*.py", "cache_layers.py", "configuration_*.py", "layers.py", "loss.py", "masks.py", "modeling_gqa.py",
    "rotary.py",
)  # fmt: skip
MODEL = (
    *TOKENIZER, "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    *CODE, *(path.name for path in Path(modeling_gqa.__file__).parent.glob("*.py")),
)  # fmt: skip
EARLIER_FILES = {
    "data": ("train.npy", "validation.npy", "split.json", "*.tmp.npy"),
    "tokenizer": TOKENIZER,
    "final": (
        *MODEL, "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*", "conversion.json", "recipe.yaml", "results.json",
    ),
    "checkpoint": (
        *MODEL, "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "trainer_state.json", "training_args.bin",
        "optimizer_*/*", "pytorch_model_fsdp*", "pytorch_model_fsdp_*/*", "complete.json", "complete.tmp",
    ),
}  # fmt: skip


def is_recipe(path: Path) -> bool:
    """Return whether a run saved this recipe: then it holds every option, and these three among them."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(content, dict) and {"data_files", "sequence_length", "max_steps"} <= content.keys()


def is_earlier(name: str) -> bool:
    """Return whether runs of versions without a manifest wrote files at `name`, a path relative to the run's folder."""
    top, *parts = name.split("/")
    patterns = (pattern.split("/") for pattern in EARLIER_FILES.get(top.partition("-")[0], ()))
    return any(len(parts) == len(pattern) and all(map(fnmatch, parts, pattern)) for pattern in patterns)
