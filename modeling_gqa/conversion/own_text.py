"""Text that a model writes itself, for whoever has none to calibrate on (LLM-QAT, 2305.17888, section 3.1).

A model's own samples have the topics and the style of what it was trained on. As there, each document begins with a
random token, so that documents differ.
Shapes: B rows, T tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase, TopPLogitsWarper

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UsageError, UserError

from ..cache_layers import grow_in_place
from ..checkpoints.checkpoint import open_checkpoint
from ..common.atomic import write_text
from ..common.batches import computing_dtype, evaluating, usable_device
from ..common.progress import Progress, ShowProgress, no_progress
from ..data.tokenizer import load_tokenizer
from ..modeling_gqa import GQAForCausalLM
from .divergence import not_finite
from .text import text_length

# Each token is drawn from the likeliest, this many, and of these from the first that have this much probability
# together. With SmolLM2-135M on a CPU, sorting its whole vocabulary for the second would nearly double the time.
TOP_K, TOP_P = 1000, 0.95


def write_own_text(
    source: str,
    path: Path,
    *,
    tokens: int,
    sequence_length: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    force: bool = False,
    show_progress: ShowProgress = no_progress,
) -> tuple[int, int]:
    """Let a model write documents into the file `path`, one JSON object {"text": ...} a line.

    Args:
        source: folder of a checkpoint, GGUF file, or name on the Hub.
        path: the file NAME.jsonl, which is written whole or not at all.
        tokens: to write, rounded up to whole documents.
        sequence_length: tokens T of a document; `None`: 1024, or the model's positions.
        batch_size: documents B that are written at once.
        seed: of the tokens that are drawn.
        dtype: to compute in; `None`: the checkpoint's, or float32 on a CPU that is slow in it.
        device: such as "cpu" or "cuda:1"; `None`: "cuda" if there is one.
        force: whether a file at `path` is replaced.
        show_progress: returns, for a description, what wraps an iterable to show progress.

    Returns:
        The numbers of documents, and of tokens as the model drew them.

    Raises:
        UserError: the model, its tokenizer or an option cannot be used.
    """
    least = {"tokens": 1, "batch-size": 1, "sequence-length": 2, "seed": 0}
    for (name, smallest), value in zip(least.items(), (tokens, batch_size, sequence_length, seed), strict=True):
        if value is not None and not smallest <= value <= 10**9:
            raise UsageError(f"--{name}={value} must be from {smallest} to 10^9")
    if path.suffix != ".jsonl":
        raise UserError(f"{path} must be named NAME.jsonl: each line will be a document")
    if path.exists() and not (force and path.is_file()):
        raise UserError(
            f"{path} exists already: name another file{'' if path.is_dir() else ', or replace it by --force'}"
        )
    device = usable_device(device)
    checkpoint = open_checkpoint(source, dtype=dtype)
    length = text_length(declared.Text(sequence_length=sequence_length), checkpoint.config)
    tokenizer = load_tokenizer(checkpoint.folder)
    model: Any = checkpoint.load(dtype, device)
    if dtype is None:
        model.to(dtype=computing_dtype(model.dtype, device))
    path.parent.mkdir(parents=True, exist_ok=True)

    generator = torch.Generator(device).manual_seed(seed)
    first = first_tokens(tokenizer, model.config.vocab_size, math.ceil(tokens / length), seed).to(device)
    documents: list[str] = []
    batches = first.split(batch_size)
    for number, begun in enumerate(batches, 1):
        progress = show_progress(f"writing text, part {number} of {len(batches)}")
        rows = continued(model, begun, length, generator, progress)
        documents += tokenizer.batch_decode(rows, skip_special_tokens=True)
    write_text(path, "".join(json.dumps({"text": document}) + "\n" for document in documents))
    return len(first), len(first) * length


def first_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int, number: int, seed: int) -> torch.Tensor:
    """Return `number` random tokens that are no special tokens, from the first `vocabulary` of a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
    plain = sorted({*range(min(len(tokenizer), vocabulary))} - special)
    if not plain:
        raise UserError("the tokenizer has special tokens alone, and none to begin a text with")
    drawn = torch.randint(len(plain), (number,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(plain)[drawn]


@torch.no_grad()
def continued(
    model: GQAForCausalLM,
    first: torch.Tensor,
    length: int,
    generator: torch.Generator,
    progress: Progress = iter,
    top_p: float = TOP_P,
) -> torch.Tensor:
    """Return rows (B, `length`) of tokens, of which the model draws all but the first, with no end.

    Args:
        model: on the device of `first` and `generator`.
        first: (B,), the first token of each row.
        length: tokens T of a row.
        generator: of the draws.
        progress: wraps the loop over the tokens.
        top_p: of the `TOP_K` likeliest tokens, the first that have this much probability together are drawn from.

    Raises:
        UserError: logits are not finite.
    """
    rows, likely = first[:, None], TopPLogitsWarper(top_p)
    cache = grow_in_place(DynamicCache(config=model.config))
    with evaluating(model):
        for _ in progress(range(length - 1)):
            logits = model(rows[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1].float()  # (B, vocabulary)
            if not logits.isfinite().all():
                raise not_finite("the model's logits", model.dtype)
            logits, tokens = logits.topk(min(TOP_K, logits.shape[1]))  # (B, 1000) both
            drawn = torch.multinomial(likely(rows, logits).softmax(-1), 1, generator=generator)
            rows = torch.cat((rows, tokens.gather(1, drawn)), dim=1)
    return rows
