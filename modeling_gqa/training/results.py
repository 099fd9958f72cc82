"""`results.json`: what a run's folder and its model repository say about the trained model."""

from collections.abc import Iterator
from typing import TypedDict

from ..common.tables import Table

RESULTS, FORMAT_VERSION = "results.json", 1
# What a resumption that has nothing left to train keeps as it was.
TIMING = ("training_seconds", "sealing_seconds", "tokens_per_second", "mfu")


class Results(TypedDict, total=False):
    """The numbers of a finished run; a field that was not measured is left out.

    Losses and KL divergences are means over every predicted token of the validation blocks, in nats per token; a
    perplexity is the exponential of such a loss.

    Attributes:
        format_version: 1. Files without it were written before there was one and have the same fields.
        validation_loss: next-token loss of the trained model, in nats per token.
        validation_perplexity: its exponential.
        validation_blocks: number of blocks of `sequence_length` tokens that were measured on.
        steps: number of optimizer steps.
        tokens_seen: number of tokens trained on, of all processes and all resumptions.
        tokens_per_step: number of tokens in one optimizer step.
        training_seconds: seconds of training that led to the result, of all sessions: a resumed run adds those up to
            the checkpoint it goes on from, unless an earlier version wrote that. A resumption that trains nothing keeps
            the earlier value, and those of the other timings.
        tokens_per_second: training speed of all processes together in the last session, without evaluation, saving and
            the first step.
        mfu: model FLOPs utilisation, a fraction of what a large matrix product reaches on the same devices.
        initial_validation_loss: uptraining: the student's loss before training, in nats per token.
        initial_validation_perplexity: its exponential.
        teacher_validation_loss: uptraining: the teacher's loss, in nats per token.
        teacher_validation_perplexity: its exponential.
        kl: uptraining: KL(teacher || student) after training, in nats per token.
        initial_kl: the same before training.
        result_step: uptraining: the step whose weights are the result, where the last weights were worse than those
            before training; 0 for the student as it was. The losses and `kl` are those of this step.
        last_kl: uptraining: KL after the last step, where its weights are not the result.
        last_validation_loss: the same for the loss, where no KL is trained on.
        gap_closed: uptraining: fraction of the perplexity between teacher and student that training removed.
        parameters: number of parameters.
        cache_bytes_per_token: bytes that the whole model caches for a token, in float32.
        processes: number of processes that trained.
        sealing_seconds: seconds of the last session that went into writing checkpoints to disk and hashing them.
        bigram_loss: loss of an interpolated bigram model on the same tokens, in nats per token.
    """

    format_version: int
    validation_loss: float
    validation_perplexity: float
    validation_blocks: int
    steps: int
    tokens_seen: int
    tokens_per_step: int
    training_seconds: float
    tokens_per_second: float
    mfu: float
    initial_validation_loss: float
    initial_validation_perplexity: float
    teacher_validation_loss: float
    teacher_validation_perplexity: float
    kl: float
    initial_kl: float
    result_step: int
    last_kl: float
    last_validation_loss: float
    gap_closed: float
    parameters: int
    cache_bytes_per_token: int
    processes: int
    sealing_seconds: float
    bigram_loss: float


# Rows of the card's table: what a number is, and how it is written.
LABELS = {
    "validation_loss": ("Validation loss, nats per token", "{:.4f}"),
    "validation_perplexity": ("Validation perplexity", "{:.2f}"),
    "initial_validation_loss": ("Validation loss before uptraining", "{:.4f}"),
    "initial_validation_perplexity": ("Validation perplexity before uptraining", "{:.2f}"),
    "teacher_validation_loss": ("Validation loss of the teacher", "{:.4f}"),
    "teacher_validation_perplexity": ("Validation perplexity of the teacher", "{:.2f}"),
    "gap_closed": ("Share of the perplexity between teacher and conversion that uptraining closed", "{:.1%}"),
    "kl": ("KL divergence from the teacher, nats per token", "{:.4f}"),
    "initial_kl": ("KL divergence from the teacher before uptraining", "{:.4f}"),
    "result_step": ("Step whose weights these are, since the last ones were worse than those before training", "{:,}"),
    "last_kl": ("KL divergence after the last step", "{:.4f}"),
    "last_validation_loss": ("Validation loss after the last step", "{:.4f}"),
    "bigram_loss": ("Interpolated bigram model on the same tokens, nats per token", "{:.4f}"),
    "tokens_seen": ("Tokens seen", "{:,}"),
    "tokens_per_second": ("Training speed, tokens per second", "{:,.0f}"),
    "mfu": ("Model FLOPs utilisation", "{:.0%}"),
    "cache_bytes_per_token": ("Cache, bytes per token (float32)", "{:,}"),
}


def results_table(results: Results) -> Table:
    """Return what the card says of a model."""
    rows = [
        (label, form.format(results[name]))  # type: ignore[literal-required]
        for name, (label, form) in LABELS.items()
        if name in results
    ]
    return Table(["", ""], rows)


def printed_lines(results: Results) -> Iterator[str]:
    """Yield the lines that a script prints when training has ended."""
    yield f"training took        {results['training_seconds']:.0f} s"
    yield f"of the last session  {results['sealing_seconds']:.1f} s to write checkpoints to disk and hash them"
    for name, key in (
        ("validation loss", "validation"),
        ("before uptraining", "initial_validation"),
        ("teacher's", "teacher_validation"),
    ):
        if f"{key}_loss" in results:
            loss, perplexity = results[f"{key}_loss"], results[f"{key}_perplexity"]  # type: ignore[literal-required]
            yield f"{name:<19}  {loss:.4f}  (perplexity {perplexity:.2f})"
    if "kl" in results:
        yield f"{'KL to the teacher':<19}  {results['kl']:.4f}  (before {results['initial_kl']:.4f})"
    if "gap_closed" in results:
        yield f"{'gap closed':<19}  {results['gap_closed']:.1%}  of the perplexity between teacher and conversion"
    if "bigram_loss" in results:
        gap = results["bigram_loss"] - results["validation_loss"]
        yield f"bigram model's loss  {results['bigram_loss']:.4f}  on the same tokens; ours is {gap:.2f} nats below"
