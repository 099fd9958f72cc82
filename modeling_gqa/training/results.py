"""`results.json`, which a run's folder and its model repository hold, and the loss of a bigram model."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..common.tables import Table
from ..data.blocks import PackedBlocks

RESULTS, FORMAT_VERSION = "results.json", 1
NON_FINITE = "non-finite"  # what a run says that has diverged
# What a resumption that has nothing left to train keeps as it was.
KEPT = ("training_seconds", "sealing_seconds", "tokens_per_second", "mfu", "evaluation")
# The numbers of a finished run, which docs/pretraining.md explains; what was not measured is left out.
Results = dict[str, Any]

# What is printed and stands on the card: what a number is, and how it is written.
LABELS = {
    "validation_loss": ("Validation loss, nats per token", "{:.4f}"),
    "validation_bits_per_byte": ("Validation loss, bits per byte", "{:.4f}"),
    "validation_perplexity": ("Validation perplexity", "{:.2f}"),
    "initial_validation_loss": ("Validation loss before uptraining", "{:.4f}"),
    "initial_validation_perplexity": ("Validation perplexity before uptraining", "{:.2f}"),
    "teacher_validation_loss": ("Validation loss of the teacher", "{:.4f}"),
    "teacher_validation_perplexity": ("Validation perplexity of the teacher", "{:.2f}"),
    "gap_closed": ("Share of the perplexity between teacher and conversion that uptraining closed", "{:.1%}"),
    "kl": ("KL divergence from the teacher, nats per token", "{:.4f}"),
    "initial_kl": ("KL divergence from the teacher before uptraining", "{:.4f}"),
    "kl_top_k": ("Most likely tokens that the KL divergences are over; all others count as one", "{:,}"),
    "result_step": ("Step whose weights these are; the last ones were worse than those before training", "{:,}"),
    "stopped_step": ("Step at which training stopped, since the KL divergence stayed above that before", "{:,}"),
    "last_kl": ("KL divergence after the last step", "{:.4f}"),
    "last_validation_loss": ("Validation loss after the last step", "{:.4f}"),
    "bigram_loss": ("Interpolated bigram model on the same tokens, nats per token", "{:.4f}"),
    "tokens_seen": ("Tokens seen", "{:,}"),
    "tokens_per_second": ("Training speed, tokens per second", "{:,.0f}"),
    "mfu": ("Model FLOPs utilisation", "{:.0%}"),
    "cache_bytes_per_token": ("Cache, bytes per token (float32)", "{:,}"),
}
PRINTED = {
    "training_seconds": ("Training, seconds", "{:.0f}"),
    "sealing_seconds": ("Writing and hashing checkpoints in the last session, seconds", "{:.1f}"),
}


def results_table(results: Results, labels: dict[str, tuple[str, str]] = LABELS) -> Table:
    """Return the results that have a label."""
    return Table(["", ""], [(label, form.format(results[x])) for x, (label, form) in labels.items() if x in results])


def printed_lines(results: Results) -> list[str]:
    """Return the lines that a script prints when training has ended."""
    rows = results_table(results, PRINTED | LABELS).rows
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]


def bytes_per_token(data: PackedBlocks, tokenizer: PreTrainedTokenizerBase) -> float | None:
    """Return how many bytes of text a token of these sequences stands for; one that ends a text stands for none.

    `None` where the tokenizer did not know some of the text, or the sequences hold none.
    """
    ids, unknown = data.blocks[:, 0], tokenizer.unk_token_id
    if unknown not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id) and (ids == unknown).any():
        return None
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # A character that is cut at an end of a sequence is decoded as several others.
    return sum(len(text.strip("\ufffd").encode()) for text in texts) / ids.size or None


def bigram_loss(train: PackedBlocks, validation: PackedBlocks, vocab_size: int) -> float:
    """Return the validation loss of a bigram model, in nats per token: p(b|a) = w count(ab)/count(a) + (1 - w) p(b).

    The weight is Witten and Bell's, w = n / (n + k types), with n the count of a and types the number of different
    tokens seen after it. k is the one of six values with the smallest loss on the validation text. Every count in p(b)
    is larger by one.
    """
    previous, following = token_pairs(train)
    unigram = np.bincount(following, minlength=vocab_size) + 1.0
    unigram /= unigram.sum()
    context = np.bincount(previous, minlength=vocab_size)
    seen, counts = np.unique(previous * vocab_size + following, return_counts=True)
    types = np.bincount(seen // vocab_size, minlength=vocab_size)

    a, b = token_pairs(validation)
    wanted = a * vocab_size + b
    where = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    joint = np.where(seen[where] == wanted, counts[where], 0)
    losses = []
    for k in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        # count(ab)/count(a) * n/(n + k types) = count(ab)/(n + k types); after an unseen context it is p(b).
        mass = np.maximum(context[a] + k * types[a], 1e-9)
        losses.append(-np.log(joint / mass + np.where(context[a] > 0, k * types[a] / mass, 1.0) * unigram[b]).mean())
    return float(min(losses))


def token_pairs(data: PackedBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs (previous token, next token) that a language model predicts in these sequences."""
    ids, positions = data.blocks[:, 0].astype(np.int64), data.blocks[:, 1]  # (blocks, L)
    predicted = positions[:, 1:] > 0
    return ids[:, :-1][predicted], ids[:, 1:][predicted]
