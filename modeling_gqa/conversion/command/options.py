"""The options of one conversion, and which of them fit together."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UsageError

from ...checkpoints.aside import refuse_overlap
from ...common.device import usable_device
from ...common.errors import UserError
from ...data.reading import find_files
from ..convert import METHODS

SIZES = declared.SIZES
LEAST = {"refine": 0, "calibration_tokens": 1, "evaluation_tokens": 1, "sequence_length": 2, "batch_size": 1}


@dataclass
class Options(declared.Running, declared.Text, declared.HowToConvert, declared.NewAttention, declared.Files):
    """What to convert, to what, and on which text; each field is an option of `modeling-gqa convert` of its name.

    Raises:
        UserError: options do not fit together, or cannot work on this machine.
    """

    layers: list[int] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._check_sizes_and_method()
        if self.is_local:
            refuse_overlap(Path(self.source), self.target)
        texts = [*(self.text or []), *(self.evaluation_text or [])]
        for path in texts:
            refuse_overlap(path, self.target, "text")
        if texts:
            find_files(texts, self.text_column)
        self.device = usable_device(self.device)

    def _check_sizes_and_method(self) -> None:
        sizes = [spelled(name) for name in SIZES if getattr(self, name) is not None]
        if self.budget is not None and sizes:
            raise UserError(f"--budget chooses the sizes itself: leave {' and '.join(sizes)} out")
        if self.budget is not None and self.attention_kind not in ("gqa", "mla"):
            raise UserError(f"--budget has nothing to choose for {self.attention_kind}: give gqa or mla")
        if self.budget is not None and not self.text:
            raise UserError("--budget needs --text: without it no layer's loss is known")
        for name in ("refit", "refine"):
            if getattr(self, name) and not self.text:
                raise UserError(f"{spelled(name)} needs --text: the layers are fitted on it")
        for name in ("budget", "cache_bytes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise UserError(f"{spelled(name)}={getattr(self, name)} must be positive")
        for name, least in LEAST.items():
            if getattr(self, name) is not None and not least <= getattr(self, name) <= 10**9:
                raise UsageError(f"{spelled(name)}={getattr(self, name)} must be from {least} to 10^9")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed={self.seed} must be from 0 to 2**63 - 1")
        if self.cache_size is not None and self.cache_bytes is not None:
            raise UserError("--cache-size and --cache-bytes say the same: leave one out")
        if self.method not in METHODS:
            raise UserError(f"--method={self.method} is unknown: choose one of {', '.join(METHODS)}")
        if self.evaluation_text and not self.text:
            raise UserError("--evaluation-text needs --text to calibrate on")

    @property
    def is_local(self) -> bool:
        """Whether the source is a path on this machine, and no name on the Hub."""
        return Path(self.source).exists()

    @property
    def shares_cache(self) -> bool:
        """Whether the conversion divides the cache between R and P; they may be given, and a budget chooses them."""
        given = (self.kv_lora_rank, self.qk_rope_head_dim, self.budget) != (None, None, None)
        return self.attention_kind == "mla" and not given and bool(self.text)

    def as_json(self) -> dict[str, Any]:
        """Return the options in types that JSON has; files and folders by their names, without this machine's paths."""
        options = {item.name: getattr(self, item.name) for item in fields(Options)}
        for name in ("text", "evaluation_text"):
            options[name] = [Path(path).absolute().name for path in options[name] or ()]
        source = Path(self.source).resolve().name if self.is_local else self.source
        return options | {"source": source, "target": self.target.resolve().name}


def spelled(name: str) -> str:
    """Return a field's name as the command line shows it."""
    return "--" + name.replace("_", "-")
