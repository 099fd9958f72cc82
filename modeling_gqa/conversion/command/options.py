"""The options of one conversion, declared once: names, types, defaults and help, and which of them fit together.

Only this folder and `command_line/` import typer.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ...checkpoints.aside import refuse_overlap
from ...common.device import usable_device
from ...common.errors import UserError
from ...data.reading import find_files

Kind = Literal["mha", "mqa", "gqa", "mla"]
Method = Literal["lowrank", "auto", "procrustes", "mean", "first", "random"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["vllm"]
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="Folder of a checkpoint, a .gguf file, or name of a model on the Hub."),
]
IGNORE_FIELD = (
    "Name of a field of SOURCE's configuration that is refused as unknown, and that does not change what the model "
    "computes; may be repeated."
)
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write: a complete Hub repository.")]

SIZES = ("num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "cache_size", "cache_bytes")


class Layers(list[int]):
    """Indices of layers, in order and each once."""


def parse_layers(text: str) -> Layers:
    """Read `0,2-5` as `[0, 2, 3, 4, 5]`; raises `typer.BadParameter`."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise typer.BadParameter(f"{part!r} is no layer and no range of layers such as 2-5")
        layers.update(range(first, last + 1))
    return Layers(sorted(layers))


def _in_panel(panel: str) -> Callable[..., Any]:
    return partial(typer.Option, rich_help_panel=panel, show_default=False)


_attention = _in_panel("The new attention (give its sizes in one way)")
_method = _in_panel("Method")
_text = _in_panel("Text")
_running = _in_panel("Running")


@dataclass
class Options:
    """What to convert, to what, and on which text; each field is an option of `modeling-gqa convert` of its name.

    Raises:
        UserError: options do not fit together, or cannot work on this machine.
    """

    source: Source
    target: Target
    attention_kind: Annotated[Kind, _attention(help="Attention of the result.")]
    num_key_value_heads: Annotated[
        int | None, _attention(help="GQA: number of key/value heads, a divisor of the query heads.")
    ] = None
    kv_lora_rank: Annotated[int | None, _attention(help="MLA: size R of the cached latent.")] = None
    qk_rope_head_dim: Annotated[
        int | None, _attention(help="MLA: size P of the cached rotary key, even. Default: R, rounded down.")
    ] = None
    cache_size: Annotated[
        int | None,
        _attention(
            help="MLA: R + P, the numbers cached per token and layer. With --text, each layer divides it between R and "
            "P so that it loses least; without, about equally."
        ),
    ] = None
    cache_bytes: Annotated[
        int | None, _attention(help="--cache-size in bytes per token and layer, in the dtype of the result (--dtype).")
    ] = None
    budget: Annotated[
        int | None,
        _attention(
            help="Bytes cached per token by the whole model, in the dtype of the result. The key/value heads (gqa) or "
            "R and P (mla) of each layer are chosen so that little is lost; needs --text."
        ),
    ] = None
    layers: Annotated[
        Layers | None,
        _attention(
            parser=parse_layers,
            metavar="LAYERS",
            help="Indices of the layers to change, such as 0,2-5; the others keep their attention. Default: all.",
        ),
    ] = None
    engine: Annotated[
        Engine | None,
        _attention(
            "--for",
            help="Engine that is to serve the result. A --cache-size becomes R and P that the engine's fast kernels "
            "take, where the model is large enough. Sizes given as R and P are kept.",
        ),
    ] = None
    method: Annotated[
        Method,
        _method(
            help="How several key/value heads are merged into one, or into MLA's latent. lowrank keeps what matters "
            "most for the layer's output. auto tries settings of lowrank and procrustes and keeps the one that changes "
            "the predictions least; it needs --text and several times as long. mean, first and random are the methods "
            "of the GQA paper.",
            show_default=True,
        ),
    ] = "lowrank"
    regroup: Annotated[
        bool | None,
        _method(
            "--regroup/--no-regroup",
            help="Choose which heads to merge, so that least is lost, instead of merging neighbours. Default: "
            "--regroup with lowrank and procrustes; auto tries both.",
        ),
    ] = None
    refit: Annotated[
        bool | None,
        _method(
            "--refit/--no-refit",
            help="Fit each layer's output projection on the text, to bring the states back to the source's before the "
            "next layer is converted, where that lowers the error on a quarter of the text that is held out. "
            "Default: --refit with lowrank, auto and procrustes where there is --text.",
        ),
    ] = None
    refine: Annotated[
        int | None,
        _method(
            min=0,
            help="Passes over the calibration text in which each layer's new attention is trained by gradient steps, "
            "before that fit. They are kept where they lower the error on a quarter of the text that is held out. "
            "More can come nearer to the source and take longer. Default: 1 where outputs are fitted, else 0.",
        ),
    ] = None
    seed: Annotated[
        int, _method(help="Seed of --method random, regrouping and the text's order.", show_default=True)
    ] = 0
    text: Annotated[
        list[Path] | None,
        _text(
            help="File or folder of .txt, .md, .rst, .py, .json, .jsonl or .parquet; may be repeated. It is divided "
            "into three disjoint parts: to calibrate on, to choose settings on, and to measure on. Without text, only "
            "the weights are used, and nothing is measured."
        ),
    ] = None
    evaluation_text: Annotated[
        list[Path] | None, _text(help="Measure on this text instead of a part of --text; may be repeated.")
    ] = None
    text_column: Annotated[
        str, _text(help="Column of .jsonl, .json and .parquet that holds the text.", show_default=True)
    ] = "text"
    calibration_tokens: Annotated[
        int,
        _text(
            min=1,
            help="Tokens to calibrate on. --method auto compares settings on a quarter as many more, at most 16,384.",
            show_default=True,
        ),
    ] = 32768
    evaluation_tokens: Annotated[int, _text(min=1, help="Tokens to measure on.", show_default=True)] = 16384
    sequence_length: Annotated[
        int | None, _text(min=2, help="Tokens of a block. Default: 1024, or max_position_embeddings if that is less.")
    ] = None
    batch_size: Annotated[
        int, _text(min=1, max=1_000_000, help="Blocks in a batch; fewer need less memory.", show_default=True)
    ] = 4
    dtype: Annotated[
        Dtype,
        _running(
            help="Dtype of the result and of the model's computation; auto: the checkpoint's. A .gguf file is unpacked "
            "to it; auto is then bfloat16, which is finer than quantized weights are.",
            show_default=True,
        ),
    ] = "auto"
    ignore_field: Annotated[list[str] | None, _running(help=IGNORE_FIELD)] = None
    device: Annotated[
        str | None, _running(help="Device to compute on, such as cpu or cuda:1. Default: cuda if there is one.")
    ] = None

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
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed={self.seed} must be from 0 to 2**63 - 1")
        if self.cache_size is not None and self.cache_bytes is not None:
            raise UserError("--cache-size and --cache-bytes say the same: leave one out")
        if self.method not in Method.__args__:  # type: ignore[attr-defined]
            known = ", ".join(Method.__args__)  # type: ignore[attr-defined]
            raise UserError(f"--method={self.method} is unknown: choose one of {known}")
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


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in `**options` the fields of `Options` as parameters, ahead of its own."""
    hints = get_type_hints(Options, include_extras=True)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            item.name,
            keyword_only,
            annotation=hints[item.name],
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
        )
        for item in fields(Options)
    ]
    own = [x for x in inspect.signature(command).parameters.values() if x.kind != inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*parameters, *(parameter.replace(kind=keyword_only) for parameter in own)]
    )
    return command


def spelled(name: str) -> str:
    """Return a field's name as the command line shows it."""
    return "--" + name.replace("_", "-")
