"""The text that a conversion, or the rounding of a cache, is calibrated, judged and measured on."""

from collections.abc import Sequence
from pathlib import Path

from modeling_gqa_cli import options as declared
from modeling_gqa_cli.errors import UsageError, UserError
from modeling_gqa_cli.options import spelled

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.writing import refuse_overlap
from ..common.batches import Batch
from ..configuration_gqa import GQAConfig
from ..data.packing import read_batches
from ..data.reading import find_files
from ..data.tokenizer import load_tokenizer
from .convert import SELECTION_TOKENS

LONGEST_SEQUENCE = 1024  # tokens, where --sequence-length is left out
SELECTION_SHARE = 4  # what judges has a quarter of the tokens that calibrate
LEAST = {
    "refine": 0,
    "polish": 0,
    "calibration_tokens": 1,
    "evaluation_tokens": 1,
    "sequence_length": 2,
    "batch_size": 1,
}


def check_text(options: declared.Text, target: Path | None = None) -> None:
    """Raise `UserError` for text that cannot be read or lies in `target`, and for numbers that cannot be."""
    for name, least in LEAST.items():
        value = getattr(options, name, None)
        if value is not None and not least <= value <= 10**9:
            raise UsageError(f"{spelled(name)}={value} must be from {least} to 10^9")
    if options.evaluation_text and not options.text:
        raise UserError("--evaluation-text needs --text to calibrate on")
    texts = [*(options.text or []), *(options.evaluation_text or [])]
    for path in texts if target else ():
        refuse_overlap(path, target, "text")
    if texts:
        find_files(texts, options.text_column)


def text_length(options: declared.Text, config: GQAConfig) -> int:
    """Return how many tokens a sequence of text has; raises `UserError` for more than the model has positions."""
    longest = config.max_position_embeddings
    length = options.sequence_length or min(LONGEST_SEQUENCE, longest)
    if length > longest:
        raise UserError(f"--sequence-length={length} is more than max_position_embeddings={longest}")
    return length


def read_text(
    options: declared.Text, checkpoint: Checkpoint, parts: Sequence[str], polish: int = 0, seed: int = 0
) -> dict[str, list[Batch]]:
    """Return parts of the text, in blocks for a model from `checkpoint`.

    `parts`: some of "calibration", "selection", which judges, and "evaluation". "polish" is what the text has beyond
    them, up to `polish` tokens.
    """
    tokens = {
        "calibration": options.calibration_tokens,
        "selection": min(options.calibration_tokens // SELECTION_SHARE, SELECTION_TOKENS),
        "evaluation": options.evaluation_tokens,
    }
    return read_batches(
        options.text or (),
        load_tokenizer(checkpoint.folder),
        {name: tokens[name] for name in parts},
        rest=("polish", polish),
        sequence_length=text_length(options, checkpoint.config),
        batch_size=options.batch_size,
        evaluation_paths=options.evaluation_text or (),
        text_column=options.text_column,
        seed=seed,
    )
