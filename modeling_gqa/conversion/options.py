"""The options of one conversion, and which of them go together."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .aside import refuse_overlap
from .convert import METHODS
from .errors import ConversionError
from .files import one_line
from .finding import find_files

SIZES = ("num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "cache_size", "cache_bytes")


@dataclass
class Options:
    """What to convert, to what, and on which text; the fields are the options of `modeling-gqa convert`.

    Raises:
        ConversionError: options that do not go together, or cannot work here.
    """

    source: str
    target: Path
    attention_kind: str
    num_key_value_heads: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    cache_size: int | None = None
    cache_bytes: int | None = None
    budget: int | None = None
    layers: list[int] | None = None
    method: str = "auto"
    regroup: bool | None = None
    refit: bool | None = None
    seed: int = 0
    text: list[Path] | None = None
    evaluation_text: list[Path] | None = None
    text_column: str = "text"
    calibration_tokens: int = 131072
    evaluation_tokens: int = 65536
    sequence_length: int | None = None
    batch_size: int = 4
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self):
        sizes = [option(name) for name in SIZES if getattr(self, name) is not None]
        if self.budget is not None and sizes:
            raise ConversionError(f"--budget chooses the sizes itself: leave {' and '.join(sizes)} out")
        if self.budget is not None and self.attention_kind not in ("gqa", "mla"):
            raise ConversionError(f"--budget has nothing to choose for {self.attention_kind}: give gqa or mla")
        if self.budget is not None and not self.text:
            raise ConversionError("--budget needs --text: without it no layer's loss is known")
        if self.refit and not self.text:
            raise ConversionError("--refit needs --text: the outputs are fitted on it")
        for name in ("budget", "cache_bytes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConversionError(f"{option(name)}={getattr(self, name)} must be positive")
        if not 0 <= self.seed < 2**63:
            raise ConversionError(f"--seed={self.seed} must be from 0 to 2**63 - 1")
        if self.cache_size is not None and self.cache_bytes is not None:
            raise ConversionError("--cache-size and --cache-bytes say the same: leave one out")
        if self.method not in METHODS:
            raise ConversionError(f"--method={self.method} is unknown: choose one of {', '.join(METHODS)}")
        if self.evaluation_text and not self.text:
            raise ConversionError("--evaluation-text needs --text to calibrate on")
        if self.is_local:
            refuse_overlap(Path(self.source), self.target)
        for path in (texts := [*(self.text or []), *(self.evaluation_text or [])]):
            refuse_overlap(path, self.target, "text")
        find_files(texts, self.text_column)
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ConversionError(f"--device={self.device} cannot be used: {one_line(error)}") from error

    @property
    def is_local(self) -> bool:
        return Path(self.source).exists()

    @property
    def splits(self) -> bool:
        """Whether R and P are chosen, by what each would lose on the text, instead of given."""
        chosen = self.attention_kind == "mla" and self.kv_lora_rank is None and self.qk_rope_head_dim is None
        return chosen and bool(self.text)

    def as_json(self) -> dict[str, Any]:
        """The options in types that JSON has; files and folders by their names, without this machine's paths."""
        options = {item.name: getattr(self, item.name) for item in fields(Options)}
        for name in ("text", "evaluation_text"):
            if options[name]:
                options[name] = [Path(path).absolute().name for path in options[name]]
        source = Path(self.source).resolve().name if self.is_local else self.source
        return options | {"source": source, "target": self.target.resolve().name}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
