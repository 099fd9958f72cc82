"""A checkpoint whose cache is quantized: the command `modeling-gqa quantize-cache`.

The weights stay as they are, unless the attention is trained with its cache rounded (`--polish`). Means of what is
cached are measured on text and saved beside them, because numbers around zero take fewer bits, and where a size is
asked for also bases (`transform_coding.py`).
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UsageError, UserError
from modeling_gqa_cli.options import spelled

from ..cache_formats import BASES, CacheQuantization
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.writing import check_target, new_checkpoint, refuse_overlap, write_model
from ..common import cards
from ..common.batches import Batch, computing_dtype, first_batches, usable_device
from ..common.progress import ShowProgress, no_progress
from ..common.tables import Table, share
from ..configuration_gqa import GQAConfig
from ..costs import cache_bytes_per_token
from ..modeling_gqa import GQAForCausalLM
from .divergence import compare_predictions
from .report import RUNS, losses
from .text import check_text, read_text, text_length
from .transform_coding import Coding, cache_codings, cache_means, choose_bits, folded

PARTS = ("calibration", "selection", "evaluation")  # always the same, so that what is measured on is, too
CODING_TOKENS = 16384  # of the text on which the bases are found; each takes as long as three in a forward pass

CARD = """# {title}

{source} with a quantized cache: `generate` keeps {after:,} bytes per token where it kept {before:,} ({share}).
{weights}

```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
```

{measured}

The cache is as `cache_quantization` in `config.json` says. Set it to `None` for an unrounded one. vLLM and other
engines do not read it.

{runs}
"""
UNTRAINED = "The weights are the source's."
TRAINED = (
    "Its attention was trained on {tokens:,} tokens for the source's predictions, with the cache rounded as it is "
    "used; the other weights are the source's."
)


@dataclass
class CacheJob(declared.Running, declared.Text, declared.WhatToRound, declared.Files):
    """A checkpoint to write with a quantized cache; each field is an option of `modeling-gqa quantize-cache`.

    Raises:
        UserError: an option cannot be used.
    """

    def __post_init__(self) -> None:
        if Path(self.source).exists():
            refuse_overlap(Path(self.source), self.target)
        check_text(self, self.target)
        self.device = usable_device(self.device)
        self.quantization()

    def quantization(self) -> dict[str, Any]:
        """Return `cache_quantization` of the result; raises `UsageError`."""
        given = {name: getattr(self, name) for name in CacheQuantization.__dataclass_fields__ if hasattr(self, name)}
        if self.cache_share is not None:
            said = [spelled(name) for name in ("nbits", *BASES, "q_group_size") if given[name] is not None]
            if said:
                raise UserError(f"--cache-share chooses bits and blocks itself: leave {' and '.join(said)} out")
            if not self.text:
                raise UserError("--cache-share needs --text: without it nobody knows where bits matter")
            if not 0 < self.cache_share < 1:
                raise UserError(f"--cache-share={self.cache_share} must be between 0 and 1")
        if self.polish and not self.text:
            raise UserError("--polish needs --text to train on")
        options = {
            name: int(value) if isinstance(value, str) and value.isdecimal() else value
            for name, value in given.items()
            if value is not None
        }
        try:
            CacheQuantization.of(options)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return options | ({"means": True} if self.text else {})

    def run(self, force: bool, show_progress: ShowProgress = no_progress) -> dict[str, Any]:
        """Measure, and write the checkpoint, as a whole or not at all.

        Args:
            force: whether a checkpoint at the target is replaced.
            show_progress: returns, for a description, what wraps an iterable to show progress.

        Returns:
            Bytes per token before and after, and with text what `compare_predictions` returns.

        Raises:
            UserError: the checkpoint, the text or the options cannot be used.
        """
        check_target(self.target.resolve(), force)
        dtype = getattr(torch, self.dtype, None)
        with new_checkpoint(self.target, force, ExitStack()) as aside:
            checkpoint = open_checkpoint(self.source, ignore_fields=self.ignore_field or (), dtype=dtype)
            refuse_overlap(checkpoint.folder, self.target)
            self.check_layers(checkpoint.config)
            batches = read_text(self, checkpoint, PARTS, self.polish) if self.text else {}
            model: Any = checkpoint.load(dtype or checkpoint.dtype, self.device).eval()
            stored = model.dtype
            model.to(dtype=computing_dtype(stored, self.device))
            quantized: Any
            if batches:
                full = cache_bytes_per_token(model.config, stored)
                budget = int(self.cache_share * full) if self.cache_share else None
                text = batches["calibration"]
                quantized = with_cache_of(model, text, self.quantization(), budget, stored, show_progress)
            else:
                quantized = with_quantized_cache(model, self.quantization())
            report: dict[str, Any] = {
                f"cache_bytes_per_token_{when}": cache_bytes_per_token(each.config, stored)
                for when, each in {"before": model, "after": quantized}.items()
            }
            if self.polish:
                text = [*batches.get("polish", ()), *batches["calibration"]]
                judges = batches["selection"]
                report["polish"] = train_rounded(model, quantized, text, judges, self.polish, stored, show_progress)
            if batches:
                report |= compare_predictions(model, quantized, batches["evaluation"], show_progress("measuring"))
            quantized.to(dtype=stored)
            write_model(aside, quantized, checkpoint.folder, show_progress("saving"))
            self.write_card(aside, report, quantized.config, checkpoint.folder / "README.md")
        return report

    def check_layers(self, config: GQAConfig) -> None:
        """Raise `UserError` where the options name bits of what no layer caches, or no layer's cache is rounded."""
        check_rounded(self, config, self.exact_tokens)
        kinds = [layer.attention_kind == "mla" for layer in config.per_layer_config]
        for names, there, what in (
            (("latent_bits", "rope_bits"), any(kinds), "MLA"),
            (("key_bits", "value_bits"), not all(kinds), "MHA, MQA or GQA"),
        ):
            for name in names:
                if getattr(self, name) is not None and not there:
                    raise UserError(f"{spelled(name)} is for {what}, which no layer of the model has")

    def write_card(self, folder: Path, report: dict[str, Any], config: GQAConfig, source_card: Path) -> None:
        source, metadata = cards.made_from(self.source, source_card, config)
        before, after = (report[f"cache_bytes_per_token_{when}"] for when in ("before", "after"))
        text = CARD.format(
            title=self.target.resolve().name,
            source=source,
            before=before,
            after=after,
            share=share(after, before),
            weights=describe_training(report),
            measured=losses_table(report).to_markdown() if "kl" in report else "What that loses was not measured.",
            runs=RUNS,
        )
        cards.write_card(folder, metadata, text)


def check_rounded(options: declared.Text, config: GQAConfig, exact_tokens: int) -> None:
    """Raise `UserError` for a model of which no layer's cache is rounded, and for text without tokens that are."""
    if set(config.layer_types) == {"sliding_attention"}:
        raise UserError("each layer has a sliding window, and only caches that hold all tokens are quantized")
    if options.text and (length := text_length(options, config)) <= exact_tokens:
        raise UserError(
            f"sequences of {length} tokens have none beyond the first {exact_tokens}, which are not rounded: give a "
            "longer --sequence-length"
        )


def describe_training(report: dict[str, Any]) -> str:
    """Return what was done to the weights, in a sentence."""
    done = report.get("polish")
    return TRAINED.format(**done) if done and done["learning_rate"] is not None else UNTRAINED


def losses_table(report: dict[str, Any]) -> Table:
    """Return what was measured on held-out text."""
    header = [f"on {report['tokens']:,} held-out tokens", "source", "quantized"]
    return Table(header, [row[: len(header)] for row in losses(report)])


def with_quantized_cache(model: GQAForCausalLM, options: dict[str, Any]) -> GQAForCausalLM:
    """Return a model of the same weights, shared, with `cache_quantization` as `options` say."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    quantized = copy.deepcopy(model, shared)
    quantized.config.cache_quantization = options
    return quantized


def with_cache_of(
    model: GQAForCausalLM,
    text: Sequence[Batch],
    options: dict[str, Any],
    budget: int | None,
    stored: torch.dtype,
    show_progress: ShowProgress = no_progress,
) -> GQAForCausalLM:
    """Return a model of the same weights, shared, with a quantized cache whose constants are measured on text.

    Args:
        model: it is not changed.
        text: batches to measure on.
        options: fields of `cache_quantization`.
        budget: bytes per token for which bits are chosen by layer and channel; `None`: `options` have the bits.
        stored: the dtype that it will be saved in, where it computes in another.
        show_progress: returns, for a description, what wraps an iterable to show progress.
    """
    exact, codings = options.get("exact_tokens", CacheQuantization.exact_tokens), list[tuple[Coding, Coding]]()
    means = cache_means(model, text, exact, show_progress("measuring means"))
    if budget is not None:
        some = first_batches(text, CODING_TOKENS)
        codings = cache_codings(model, some, means, exact, show_progress("measuring what matters"))
        options = options | {"layers": choose_bits(model, codings, budget, stored)}
    quantized = with_quantized_cache(model, options | {"means": True})
    set_cache_constants(quantized, means, codings, stored)
    return quantized


@torch.no_grad()
def set_cache_constants(
    quantized: GQAForCausalLM,
    means: Sequence[torch.Tensor],
    codings: Sequence[tuple[Coding, Coding]] = (),
    stored: torch.dtype | None = None,
) -> None:
    """Give the layers of a model their means and, where `cache_quantization` has blocks for them, their bases.

    Args:
        quantized: a model as `with_quantized_cache` returns it.
        means: as `cache_means` returns them.
        codings: as `cache_codings` returns them, for options with "layers".
        stored: the dtype that the model will be saved in, where it computes in another; constants are rounded to it.
    """
    stored = stored or quantized.dtype
    blocks = quantized.config.cache_quantization.get("layers") or [None] * len(means)
    for index, (layer, mean) in enumerate(zip(quantized.model.layers, means, strict=True)):
        attention: Any = layer.self_attn
        buffers = {"cache_mean": mean}
        own = blocks[index] or {}
        for place, name in enumerate(attention.bits_fields):
            if not own.get(name):  # MLA may have no rotary key
                continue
            encoder = folded(codings[index][place], own[name]).to(stored)
            # The inverse of the encoder that is stored, not of the one that was found.
            buffers[BASES[name]] = torch.stack((encoder, encoder.double().inverse().to(stored)))
        for name, buffer in buffers.items():
            attention.register_buffer(name, buffer.to(stored).to(quantized.device, quantized.dtype))


def train_rounded(
    model: GQAForCausalLM,
    quantized: GQAForCausalLM,
    text: Sequence[Batch],
    judges: Sequence[Batch],
    tokens: int,
    stored: torch.dtype | None = None,
    show_progress: ShowProgress = no_progress,
) -> dict[str, Any] | None:
    """Train the attention of a model with its cache rounded, in place, for the predictions of `model`.

    Args:
        model: the source; it is not changed.
        quantized: it as `with_quantized_cache` returns it, with its constants; its attention gets weights of its own.
        text, judges, tokens, show_progress: as for `polish.polish`, whose result is returned.
        stored: the dtype that it will be saved in, where it computes in another; weights are judged and left so.
    """
    from .polish import polish

    layers: Any = quantized.model.layers
    rounded = [index for index, layer in enumerate(layers) if layer.self_attn.sliding_window is None]
    before = {index: layers[index].self_attn for index in rounded}
    for index, attention in before.items():
        layers[index].self_attn = copy.deepcopy(attention, {id(quantized.config): quantized.config})
    stored = None if stored == quantized.dtype else stored
    text = first_batches(text, tokens)
    done = polish(model, quantized, text, judges, rounded, tokens, show_progress, stored=stored)
    for index, attention in before.items():
        if done is None or done["learning_rate"] is None:  # biases were moved, and moved back
            layers[index].self_attn = attention
        elif stored:
            with torch.no_grad():
                for parameter in layers[index].self_attn.parameters():
                    parameter.copy_(parameter.to(stored))
    return done
