"""The loss of an interpolated bigram model, which only counts pairs of tokens: a baseline on the same text."""

import numpy as np

from ..data.blocks import PackedBlocks


def pairs(data: PackedBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs (previous token, next token) that a language model predicts in these blocks."""
    ids, positions = data.blocks[:, 0].astype(np.int64), data.blocks[:, 1]  # (blocks, L)
    predicted = positions[:, 1:] > 0
    return ids[:, :-1][predicted], ids[:, 1:][predicted]


def bigram_loss(train: PackedBlocks, validation: PackedBlocks, vocab_size: int) -> float:
    """Return the validation loss in nats per token of p(b|a) = w count(ab)/count(a) + (1 - w) p(b).

    The weight is Witten and Bell's, w = n / (n + k types), with n the count of a and types the number of different
    tokens seen after it. k is the one of six values with the smallest loss on the validation text. Every count in p(b)
    is larger by one.

    Args:
        train: the blocks to count in.
        validation: the blocks to measure on.
        vocab_size: number of tokens in the vocabulary.

    Example:
        ```python
        import numpy as np

        from modeling_gqa.training.bigram import bigram_loss
        from modeling_gqa.data.blocks import PackedBlocks

        ids, positions = np.tile([0, 1], (4, 4)), np.tile(np.arange(8), (4, 1))  # (blocks, L)
        blocks = PackedBlocks(np.stack([ids, positions], axis=1))
        assert bigram_loss(blocks, blocks, vocab_size=2) < 0.1  # 0 and 1 in turn are easy to predict
        ```
    """
    previous, following = pairs(train)
    unigram = np.bincount(following, minlength=vocab_size) + 1.0
    unigram /= unigram.sum()
    context = np.bincount(previous, minlength=vocab_size)
    seen, counts = np.unique(previous * vocab_size + following, return_counts=True)
    types = np.bincount(seen // vocab_size, minlength=vocab_size)

    a, b = pairs(validation)
    wanted = a * vocab_size + b
    where = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    joint = np.where(seen[where] == wanted, counts[where], 0)
    losses = []
    for k in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        # count(ab)/count(a) * n/(n + k types) = count(ab)/(n + k types); after an unseen context it is p(b).
        mass = np.maximum(context[a] + k * types[a], 1e-9)
        losses.append(-np.log(joint / mass + np.where(context[a] > 0, k * types[a] / mass, 1.0) * unigram[b]).mean())
    return float(min(losses))
