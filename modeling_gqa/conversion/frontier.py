"""What a checkpoint's cache may be rounded to and what each choice loses: the command `modeling-gqa frontier`.

Nothing is trained or written but a picture. The choices are flags of engines and of this package, and bits by layer and
channel (`transform_coding.py`) for several sizes. Conversions of the checkpoint may stand beside it, as they are and
rounded in the same ways.
Shapes: B rows, G heads, T tokens, D size of a head.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.options import spelled

from ..cache_formats import CacheQuantization
from ..cache_quantized import rounds_cache
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..common.batches import Batch, computing_dtype, evaluating, first_batches, usable_device
from ..common.pictures import COLORS, LONGEST_NAME, check_picture, new_figure, save, tidy
from ..common.progress import ShowProgress, no_progress
from ..common.tables import Table, share
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token
from ..modeling_gqa import GQAForCausalLM
from .divergence import compare_predictions, predicted_states
from .engine_caches import FLAG, TURBOQUANT, engine_caches
from .quantizing import (
    CODING_TOKENS,
    PARTS,
    check_rounded,
    set_cache_constants,
    with_quantized_cache,
)
from .text import check_text, read_text
from .transform_coding import Coding, cache_codings, cache_means, choose_bits, intercepted

SHARES = (0.4, 0.25, 0.2, 0.15, 0.1)
MEASURED = ("kl", "perplexity_after", "top1_agreement")
CODED = "bits by channel"


@dataclass
class FrontierJob(declared.Running, declared.Text, declared.Frontier):
    """A checkpoint and what of it is compared; each field is an option of `modeling-gqa frontier`.

    Raises:
        UserError: an option cannot be used.
    """

    source: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            raise UserError("frontier needs --text: what a cache loses depends on it")
        check_text(self)
        for number in self.shares or ():
            if not 0 < number < 1:
                raise UserError(f"--shares {number:g} must be between 0 and 1")
        if not self.loss > 0:
            raise UserError(f"--loss={self.loss} must be positive")
        if self.picture is not None:
            check_picture(self.picture)
        self.device = usable_device(self.device)

    def run(self, show_progress: ShowProgress = no_progress) -> dict[str, Any]:
        """Measure every choice.

        Returns:
            `source`, `dtype`, `bytes` per token of the cache as it is, `perplexity`, `tokens` measured on, `loss` that
            is allowed, and `choices`, largest first: `name`, `command` that makes it (`None` for a conversion as it
            is), `bytes`, `share`, `kl`, `perplexity_after`, `top1_agreement`. `smallest` is the name of the smallest
            choice within the loss, `None` where none is.

        Raises:
            UserError: the checkpoint or the text cannot be used.
        """
        dtype = getattr(torch, self.dtype, None)
        checkpoint = open_checkpoint(self.source, ignore_fields=self.ignore_field or (), dtype=dtype)
        check_rounded(self, checkpoint.config, CacheQuantization.exact_tokens)
        conversions = {folder: self.conversion(folder, checkpoint.config) for folder in self.converted or ()}
        batches = read_text(self, checkpoint, PARTS)
        model, stored = self.loaded(checkpoint)
        full = cache_bytes_per_token(model.config, stored)
        with evaluating(model):
            states = {number: predicted_states(model, batch) for number, batch in enumerate(batches["evaluation"])}
        found: list[dict[str, Any]] = []

        def add(name: str, command: str | None, size: int, other: GQAForCausalLM) -> dict[str, Any]:
            progress = show_progress(f"measuring {name}")
            measured = compare_predictions(model, other, batches["evaluation"], progress, states)
            choice = {"name": name, "command": command, "bytes": size, "share": size / full}
            found.append(choice | {key: measured[key] for key in MEASURED})
            return measured

        def compare(folder: str, each: GQAForCausalLM, own: torch.dtype) -> None:
            for name, flag, quantized in self.choices(folder, each, batches["calibration"], full, own, show_progress):
                add(name, self.command(folder, flag), cache_bytes_per_token(quantized.config, own), quantized)

        for cache in engine_caches(model.config, stored):
            with intercepted(model, cache.change):
                measured = add(f"{cache.dtype} of vLLM", FLAG.format(self.source, cache.dtype), cache.bytes, model)
        compare("", model, stored)
        for folder, opened in conversions.items():
            other, own = self.loaded(opened, model.dtype)
            add(folder, None, cache_bytes_per_token(other.config, own), other)
            if not rounds_cache(other.config):
                compare(folder, other, own)
            del other  # before there is another one
        found.sort(key=lambda choice: (-choice["bytes"], -choice["kl"]))
        within = [choice["name"] for choice in found if choice["kl"] <= self.loss]
        report = {
            "source": self.source,
            "dtype": str(stored).removeprefix("torch."),
            "bytes": full,
            "perplexity": measured["perplexity_before"],
            "tokens": measured["tokens"],
            "loss": self.loss,
            "choices": found,
            "smallest": within[-1] if within else None,
        }
        if self.picture is not None:
            draw(report, self.picture)
        return report

    def loaded(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> tuple[Any, torch.dtype]:
        """Load a model, to compute in `dtype`; also returns the dtype that it is stored in."""
        stored = getattr(torch, self.dtype, checkpoint.dtype)
        model: Any = checkpoint.load(stored, self.device).eval()
        return model.to(dtype=dtype or computing_dtype(stored, self.device)), stored

    def conversion(self, folder: str, source: GQAConfig) -> Checkpoint:
        """Open a conversion, whose cache may be quantized; raises `UserError` where it cannot be one of the source."""
        checkpoint = open_checkpoint(folder, quantized_cache=True)
        check_rounded(self, checkpoint.config, CacheQuantization.exact_tokens)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if (there := getattr(checkpoint.config, name)) != (wanted := getattr(source, name)):
                raise UserError(f"{folder} is no conversion of {self.source}: its {name} is {there}, not {wanted}")
        return checkpoint

    def choices(
        self,
        folder: str,
        model: GQAForCausalLM,
        text: Sequence[Batch],
        full: int,
        stored: torch.dtype,
        show_progress: ShowProgress,
    ) -> Iterator[tuple[str, str, GQAForCausalLM]]:
        """Yield name, flag and model for each way to round the cache of the source (""), or of the conversion `folder`.

        `full` are the bytes of the source's cache, of which the sizes are shares. Sizes that the model cannot have are
        left out, unless they were asked for of the source.
        """
        means = cache_means(model, text, progress=show_progress("measuring means"))
        some = first_batches(text, CODING_TOKENS)
        codings = cache_codings(model, some, means, progress=show_progress("measuring what matters"))
        own, prefix = cache_bytes_per_token(model.config, stored), f"{folder}, " if folder else ""
        coded: dict[str, tuple[str, Any]] = {}
        for number in self.shares or SHARES:
            budget = int(number * full)
            if budget >= own:
                continue
            try:
                layers = choose_bits(model, codings, budget, stored)
            except UserError:
                if self.shares and not folder:
                    raise
                continue
            if all(layers != others for _, others in coded.values()):
                # Of the conversion's own bytes, and no less than the budget.
                coded[f"{number:g}"] = f"{(budget + 0.5) / own:.9g}" if folder else f"{number:g}", layers

        def rounded(options: dict[str, Any], codings: Sequence[tuple[Coding, Coding]] = ()) -> GQAForCausalLM:
            quantized = with_quantized_cache(model, options | {"means": True})
            set_cache_constants(quantized, means, codings, stored)
            return quantized

        for bits in (8, 4):
            yield f"{prefix}{bits} bits", f"--nbits {bits}", rounded({"nbits": bits})
        for name, (part, layers) in coded.items():
            yield f"{prefix}{CODED}, {name}", f"--cache-share {part}", rounded({"layers": layers}, codings)

    def command(self, folder: str, flag: str) -> str:
        """The command that makes a choice of the source or a conversion, with the options that were given."""
        given: list[str] = []
        for item in (*fields(declared.Text), *fields(declared.Running)):
            value = getattr(self, item.name)
            left_out = ("device", *["ignore_field"] * bool(folder))
            if item.name not in left_out and value not in (None, item.default):
                given += [spelled(item.name), *map(str, value if isinstance(value, list) else [value])]
        return shlex.join(["modeling-gqa", "quantize-cache", folder or self.source, "TARGET", *flag.split(), *given])


def frontier_table(report: dict[str, Any]) -> Table:
    """The choices of `FrontierJob.run` as a table."""
    header = ["cache", "bytes per token", "share", "KL in nats", "perplexity", "same top token"]
    rows = [["as it is", f"{report['bytes']:,}", "100%", "0", f"{report['perplexity']:.2f}", "100%"]]
    for x in report["choices"]:
        size, lost = f"{x['bytes']:,}", f"{x['kl']:.4f}"
        row = [x["name"], size, share(x["bytes"], report["bytes"]), lost, f"{x['perplexity_after']:.2f}"]
        rows.append([*row, f"{x['top1_agreement']:.1%}"])
    return Table(header, rows)


def recommendation(report: dict[str, Any]) -> str:
    """The smallest cache within the loss that was allowed, the command that makes it, and what was not measured."""
    chosen = next((x for x in report["choices"] if x["name"] == report["smallest"]), None)
    if chosen is None:
        return f"No choice loses at most {report['loss']:g} nats: allow more by --loss, or keep the cache as it is."
    size = share(chosen["bytes"], report["bytes"])
    emulated = (
        "\nvLLM has TurboQuant on GPUs alone. Its loss was measured here by rounding in the same way, not by vLLM."
        if chosen["name"].removesuffix(" of vLLM") in TURBOQUANT
        else ""
    )
    return (
        f"The smallest cache that loses at most {report['loss']:g} nats takes {size} of the bytes: "
        f"{chosen['command'] or chosen['name']}{emulated}"
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Save a picture of the choices: share of the bytes against KL, both by powers of ten."""
    figure = new_figure(figsize=(6.5, 4))
    axis = figure.add_subplot(xscale="log", yscale="log")
    lines: dict[str, list[dict[str, Any]]] = {}  # bits by channel, of the source and of each conversion
    for choice in report["choices"]:
        before, coded, _ = choice["name"].partition(CODED)
        if coded:
            lines.setdefault(before.removesuffix(", "), []).append(choice)
            continue
        axis.plot(choice["share"], choice["kl"], color="#555555", marker="o")
        place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "#555555", "parse_math": False}
        axis.annotate(shortened(choice["name"]), (choice["share"], choice["kl"]), (6, 4), **place)
    for (before, some), color in zip(lines.items(), cycle(COLORS.values())):
        name = f"{CODED} of {shortened(before)}" if before else CODED
        axis.plot([x["share"] for x in some], [x["kl"] for x in some], color=color, marker="o", label=name)
    for text in axis.legend(frameon=False, fontsize=8, loc="lower left").get_texts():
        text.set_parse_math(False)
    ticks = [0.05, 0.1, 0.15, 0.2, 0.25, 0.4, 0.5]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlabel="bytes of the cache, of the source's", ylabel="KL to the source in nats")
    tidy(axis)
    save(figure, path)


def shortened(name: str) -> str:
    """A choice's name without the folders above a conversion, to be written beside a point."""
    folder, comma, rest = name.rpartition(", ")
    name = f"{Path(folder).name}{comma}{rest}" if comma else Path(name).name or name
    return name if len(name) <= LONGEST_NAME else f"...{name[-LONGEST_NAME:]}"
