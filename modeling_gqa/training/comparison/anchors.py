"""What others have published on the same question, each figure beside what came out here."""

import math
from collections.abc import Iterable

from ...common.errors import listed
from ..shared.spread import agreement
from .outcome import Entry, Outcome
from .plan import usable

NEAR = 1.25  # times as large, at most, a cache that counts as equal
HEADS = ("mha", "gqa", "mqa")


def anchors(outcome: Outcome) -> list[str]:
    """Return a sentence for each published figure whose kinds the comparison has, and whether it agrees."""
    return [said for said in (slope(outcome), latent(outcome), heads(outcome), latent_and_heads(outcome)) if said]


def slope(outcome: Outcome) -> str:
    """Marin's slope, beside the least-squares line of the loss over the logarithm of the cache of MHA, GQA and MQA."""
    found = of_kinds(outcome, HEADS)
    several = len({entry.cache_bytes_per_token for entry in found}) > 1
    if not several or math.isnan(outcome.bits_per_byte(outcome.spread.deviation)):
        return ""
    weights = [len(usable(entry.losses)) for entry in found]
    xs = [-math.log2(entry.cache_bytes_per_token) for entry in found]  # halvings
    centre = sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
    moment = sum(w * (x - centre) ** 2 for w, x in zip(weights, xs, strict=True))
    scaled = [w * (x - centre) * entry.loss for w, x, entry in zip(weights, xs, found, strict=True)]
    rise = outcome.bits_per_byte(sum(scaled) / moment)
    spread = outcome.bits_per_byte(outcome.spread.margin(1 / math.sqrt(moment)))
    verdict = "the sign cannot be told from the seeds' spread"
    if abs(rise) > spread:
        verdict = "the sign agrees" if rise > 0 else "the sign does not agree"
    return (
        "Marin's controlled runs (marin-community issue 4371, models with experts): each halving of the key/value "
        f"heads costs about 0.003 bits per byte. Here: {rise:+.4f} +- {spread:.4f} ({names(found)}); {verdict}."
    )


def latent(outcome: Outcome) -> str:
    """Marin's losses and rates of GQA and MLA, beside a pair of equal cache."""
    pairs = [
        (one, other)
        for one in of_kinds(outcome, ("gqa", "mqa"))
        for other in of_kinds(outcome, ("mla",))
        if 1 / NEAR <= one.cache_bytes_per_token / other.cache_bytes_per_token <= NEAR
    ]
    if not pairs:
        return ""
    grouped, mla = pairs[0]
    alike = "equal" if grouped.cache_bytes_per_token == mla.cache_bytes_per_token else "similar"
    ratio = f"MLA's best rate is {mla.rate / grouped.rate:.2f} of the other's" if mla.rate and grouped.rate else ""
    return (
        "Marin's sweep of rates (issue 7381, width 1,024, loss on Paloma): GQA 3.1492, MLA 3.1559, and MLA's best rate "
        f"is 0.95 of GQA's. Here, with {alike} caches: {losses([grouped, mla])}, and "
        f"{ratio}; {ordered(outcome, [grouped, mla])}."
    )


def heads(outcome: Outcome) -> str:
    """The GQA paper's order of MHA, GQA and MQA."""
    found = one_of_each(outcome, HEADS)
    if len(found) < 2:
        return ""
    return (
        "The GQA paper's table 1 (2305.13245, T5-XXL after uptraining, mean score of its tasks): MHA 47.2, GQA with 8 "
        f"heads 47.1, MQA 46.6. Here: {losses(found)}; {ordered(outcome, found)}."
    )


def latent_and_heads(outcome: Outcome) -> str:
    """DeepSeek-V2's order of MLA, MHA, GQA and MQA."""
    found = one_of_each(outcome, ("mla", *HEADS))
    if len(found) < 2 or found[0].kind != "mla":
        return ""
    return (
        "DeepSeek-V2's tables 8 and 9 (2405.04434, MMLU): MHA 45.2, GQA with 8 heads 41.2, MQA 37.9 with 7B "
        f"parameters; MLA 59.0, MHA 57.5 in its large MoE. Here: {losses(found)}; {ordered(outcome, found)}."
    )


def ordered(outcome: Outcome, order: Iterable[Entry]) -> str:
    """Return whether the losses rise in a published order."""
    return agreement([entry.sample for entry in order], outcome.spread)


def of_kinds(outcome: Outcome, kinds: Iterable[str]) -> list[Entry]:
    """Return the models of these kinds that have a loss, kind by kind."""
    return [entry for kind in kinds for entry in outcome.finished if entry.kind == kind]


def one_of_each(outcome: Outcome, kinds: Iterable[str]) -> list[Entry]:
    """Return of each kind the model with the lowest loss."""
    return [found[0] for kind in kinds if (found := of_kinds(outcome, [kind]))]


def names(entries: Iterable[Entry]) -> str:
    return listed((entry.name for entry in entries), "and")


def losses(entries: Iterable[Entry]) -> str:
    return ", ".join(f"{entry.name} {entry.loss:.4f}" for entry in entries)
