"""The KL divergence of a teacher's and a student's predictions as a loss to train on.

Both models' logits are compared in float32, of a part of the tokens at a time. The backward pass computes each part
again, so that one part at a time is in memory.
Shapes: B batch, T tokens, n tokens of a part, E hidden size, V vocabulary, k most likely tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import kl_div, pad
from torch.utils.checkpoint import checkpoint

from .divergence import log_softmax

# Number of the teacher's logits, and of float32 copies of the student's, that are in memory at a time.
LOGITS_AT_ONCE = 2**25


def prediction_losses(
    logits: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_head: torch.nn.Module,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Return three sums over the predicted tokens: next-token loss, KL(teacher || student), and the teacher's loss.

    Args:
        logits: the student's (B, T, V).
        teacher_states: (B, T, E), of which `teacher_head` makes logits, a part of the tokens at a time.
        labels: (B, T), shifted here; -100 at the start of a document, which the text before does not predict.
    """

    def sums(logits: torch.Tensor, states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = teacher_head(states)
        ours, theirs = log_softmax(logits), log_softmax(teacher)  # (n, V)
        losses = [-x.gather(1, target.clamp(min=0)[:, None])[:, 0] for x in (ours, theirs)]
        kl = kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
        return torch.stack([losses[0], kl, losses[1]])[:, target >= 0].sum(-1)

    return in_parts(sums, logits, teacher_states, next_tokens(labels))


def top_prediction_losses(
    logits: torch.Tensor,
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    rest: torch.Tensor,
    target_log_probs: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Return the sums of `prediction_losses`, the KL being over the teacher's top k tokens and all others as one.

    To take tokens together never raises a KL divergence, so this one is a lower bound of that over all tokens.

    Args:
        logits: the student's (B, T, V).
        ids: (B, T, k), the teacher's most likely tokens.
        log_probs: (B, T, k), their log-probabilities l.
        rest: (B, T), log sum exp(l) over all other tokens; -inf where there are none.
        target_log_probs: (B, T), the teacher's log-probability of the next token.
        labels: as for `prediction_losses`.
    """

    def sums(logits: torch.Tensor, ids: torch.Tensor, theirs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        student = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (n, V)
        loss = student.logsumexp(-1) - student.gather(1, target.clamp(min=0)[:, None])[:, 0]
        # Of the others themselves: where the k tokens have nearly all of the probability, nothing is left of 1 - sum q.
        others = student.scatter(1, ids, torch.finfo(student.dtype).min).logsumexp(-1, keepdim=True)
        ours = torch.cat([student.gather(1, ids), others], dim=-1).log_softmax(-1)  # (n, k + 1)
        # A bucket of probability 0 adds 0, where the product would be nan.
        kl = torch.where(theirs > -torch.inf, theirs.exp() * (theirs - ours), 0.0).sum(-1)
        return torch.stack([loss, kl])[:, target >= 0].sum(-1)

    # By this softmax the probabilities sum to 1, however `log_probs` were rounded.
    buckets = log_softmax(torch.cat([log_probs, rest[..., None]], dim=-1))  # (B, T, k + 1)
    targets = next_tokens(labels)
    found = in_parts(sums, logits, ids, buckets, targets)
    return torch.cat([found, -target_log_probs[targets >= 0].sum()[None]])


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return what each token of (B, T) predicts; -100 where nothing is predicted."""
    return pad(labels[:, 1:], (0, 1), value=-100)


def tokens_at_once(device: torch.device, vocab_size: int) -> int:
    """Return the number of tokens whose logits are in float32 at a time."""
    # On a CPU, parts that stay in its caches take half the time.
    return max(1, LOGITS_AT_ONCE // (4 if device.type == "cpu" else 1) // vocab_size)


def in_parts(sums: Callable[..., torch.Tensor], logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return `sums` of tensors (B, T, ...), added up over parts of the tokens, (n, ...) each."""
    size = tokens_at_once(logits.device, logits.shape[-1])
    parts = zip(*(x.flatten(0, 1).split(size) for x in (logits, *others)), strict=True)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(sums, *part, **options) for part in parts]).sum(0)
