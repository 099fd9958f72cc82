"""What each study has found: a table, a picture in the paper's form, and a paragraph with the paper's figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.tables import Table
from ...costs import cache_bytes_per_token
from ..shared.spread import Sample, Spread, agreement
from .points import Study, spread_of
from .recipe import Point, Student

LEAST_DIFFERENCE = 1.1  # times as long, below which times on a shared machine say nothing
NO_SPREAD = Spread(math.nan, 0)
EXACT = Spread(0.0, 1)  # of numbers that differ by no chance
GROUPS = "Number of key/value heads against time and quality"


@dataclass(frozen=True)
class Times:
    """How long a model with some number of key/value heads takes here.

    Args:
        token: milliseconds of a decoded token of all rows, in the middle of what a sample generates.
        sample: seconds of the samples of all rows: their prompts, and their new tokens at that time each.
    """

    token: float
    sample: float


@dataclass(frozen=True)
class Findings:
    """What a study has found.

    Args:
        title: of its report.
        table: its numbers.
        said: what came out, and what the paper has, a sentence each.
        numbers: the same for JSON.
    """

    title: str
    table: Table
    said: Sequence[str]
    numbers: dict[str, Any]


def named(study: Study, heads: int) -> str:
    return "MHA" if heads == study.config.num_attention_heads else "MQA" if heads == 1 else f"GQA-{heads}"


def shown(sample: Sample | None, spread: Spread = NO_SPREAD) -> str:
    """Return a mean, with the deviation over seeds where there is one."""
    if sample is None:
        return "failed"
    return f"{sample.mean:.4f}" + (f" ± {spread.deviation:.4f}" if spread.freedom and len(sample.values) > 1 else "")


def of_samples(study: Study) -> str:
    """Return how many samples there are at once."""
    return f"{study.recipe.rows:,} samples" if study.recipe.rows > 1 else "a sample"


def in_percent(share: float) -> str:
    return f"{100 * share:.3g}%"


# -- (a)


def conversion(study: Study) -> Findings:
    """Method of conversion against quality, before and after uptraining: the paper's figure 4."""
    methods = study.recipe.methods
    points = {method: Point(Student(1, method), study.recipe.share) for method in methods}
    before = {method: study.losses(point, method, "initial_validation_loss") for method, point in points.items()}
    after = {method: study.losses(point, method) for method, point in points.items()}
    seeds = spread_of(after.values())
    rows = [[method, shown(before[method]), shown(after[method], seeds)] for method in methods]
    header = [
        "conversion to MQA",
        "validation loss before",
        f"after {in_percent(study.recipe.share)} of the pretraining tokens",
    ]
    said = [
        "The GQA paper's figure 4 (2305.13245; T5 large to MQA, 5 %): the mean of the heads is best, then the first "
        "head, then random ones."
    ]
    # Before uptraining only random heads differ by seed: any difference counts.
    for when, found, spread in (("Before", before, EXACT), ("After", after, seeds)):
        ranked = sorted((x for x in found.values() if x), key=lambda sample: sample.mean)
        said.append(f"{when} uptraining: {', '.join(f'{x.name} {x.mean:.4f}' for x in ranked)}.")
        order = [sample for name in ("mean", "first", "random") if (sample := found.get(name))]
        if len(order) > 1:
            said[-1] += f" Of the paper's methods, {agreement(order, spread)}."
    numbers = {method: {"before": values(before[method]), "after": values(after[method])} for method in methods}
    return Findings("Method of conversion against quality", Table(header, rows), said, numbers)


# -- (b)


def uptraining(study: Study) -> Findings:
    """Share of the pretraining tokens against quality: the paper's figure 5."""
    curves = curves_of(study)
    shares = [0.0, *study.recipe.shares]
    spread = spread_of(sample for curve in curves.values() for share, sample in curve.items() if share)
    rows = [
        [in_percent(share), *(shown(curve.get(share), spread if share else NO_SPREAD) for curve in curves.values())]
        for share in shares
    ]
    said = [
        "The GQA paper's figure 5 (2305.13245; T5 XXL): after conversion alone GQA already works and MQA does not; "
        "both gain much from 5 % of the pretraining tokens, and less from 10 %."
    ]
    grouped, single = (curves[named(study, heads)] for heads in (study.heads, 1))
    if 0.0 in grouped and 0.0 in single and study.heads > 1:
        better = "agrees" if grouped[0.0].mean < single[0.0].mean else "does not agree"
        said.append(
            f"Here, after conversion alone: {grouped[0.0].name} {grouped[0.0].mean:.4f}, {single[0.0].name} "
            f"{single[0.0].mean:.4f} nats per token; the order {better}."
        )
    curves_to_heal = [grouped, single] if study.heads > 1 else [single]
    said += [sentence for curve in curves_to_heal if (sentence := returns(curve, spread))]
    source = curves[named(study, study.most_heads)]
    if 0.0 in source and max(source) > 0:
        most = max(source)
        said.append(
            f"The source itself goes from {source[0.0].mean:.4f} to {source[most].mean:.4f} by {in_percent(most)}, "
            "which the paper does not show: what the others gain beyond that is healing."
        )
    numbers = {name: {f"{x:g}": sample.values for x, sample in curve.items()} for name, curve in curves.items()}
    return Findings("Share of the pretraining tokens against quality", Table(["", *curves], rows), said, numbers)


def curves_of(study: Study) -> dict[str, dict[float, Sample]]:
    """Return losses by share of the source, GQA and MQA, by name."""
    heads = dict.fromkeys((study.most_heads, study.heads, 1))
    return {name: study.curve(number, name) for number in heads if (name := named(study, number))}


def returns(curve: Mapping[float, Sample], spread: Spread) -> str:
    """Return whether the first half of the longest training gained more than the second."""
    if len(curve) < 3 or 0.0 not in curve:
        return ""
    half, most = sorted(curve)[-2:]
    first, second = curve[0.0].mean - curve[half].mean, curve[half].mean - curve[most].mean
    diminishing = first / half > second / (most - half)
    verdict = f"returns {'diminish, as' if diminishing else 'do not diminish, unlike'} in the paper"
    if first <= (spread.margin(len(curve[half].values) ** -0.5) if spread.freedom else 0.0):
        verdict = "unlike in the paper, the first gain is none, or within the spread of the seeds"
    return (
        f"{curve[half].name} gains {first:.4f} from the first {in_percent(half)} and {second:.4f} from the next "
        f"{in_percent(most - half)}: {verdict}."
    )


# -- (c)


def groups(study: Study, times: Mapping[int, Times]) -> Findings:
    """Number of key/value heads against time and quality: the paper's figures 6 and 3."""
    samples = {
        heads: study.losses(Point(study.student(heads), study.recipe.share), named(study, heads)) for heads in times
    }
    table, numbers = groups_table(study, times, samples), numbers_of(study, times, samples)
    least, most, middle = 1, study.most_heads, study.heads
    said = [
        "The GQA paper's figure 6 (2305.13245; T5 XXL, prompts of 2,048 tokens and 512 new ones, on TPUs): from MQA to "
        "8 groups a sample takes little longer, and from there to 64 ever more. Its table 1: MHA 1.51 s, GQA-8 0.28 s, "
        "MQA 0.24 s a sample."
    ]
    if middle == least:
        return Findings(GROUPS, table, said, numbers)
    low, high = (times[heads].sample / times[least].sample for heads in (middle, most))
    alike = "as in the paper, the first step costs less" if low - 1 <= high - low else "unlike in the paper"
    if max(low, high) < LEAST_DIFFERENCE:
        alike = "too little to tell; larger models, longer samples or more of them at once have larger caches to read"
    said.append(
        f"Here {named(study, middle)} takes {low:.2f} times MQA's time and {named(study, most)} {high:.2f} times: "
        f"{alike}."
    )
    ends = [samples.get(heads) for heads in (most, middle, least)]
    if all(ends):
        said.append(kept(ends, times[most].sample / times[middle].sample, times[most].sample / times[least].sample))
        if not spread_of(samples.values()).differ(ends[0], ends[2]):
            said.append(f"The losses of {ends[0].name} and {ends[2].name} cannot be told apart by these seeds.")
    return Findings(GROUPS, table, said, numbers)


def groups_table(study: Study, times: Mapping[int, Times], samples: Mapping[int, Sample | None]) -> Table:
    spread = spread_of(samples.values())
    header = ["", "key/value heads", "cache, bytes per token", "ms a token", f"s for {of_samples(study)}"]
    header += [f"validation loss after {in_percent(study.recipe.share)}"]
    rows = [
        [
            named(study, heads),
            str(heads),
            f"{cache(study, heads):,}",
            f"{found.token:.2f}",
            f"{found.sample:.3f}",
            shown(samples[heads], spread),
        ]
        for heads, found in times.items()
    ]
    return Table(header, rows)


def numbers_of(study: Study, times: Mapping[int, Times], samples: Mapping[int, Sample | None]) -> dict[str, Any]:
    return {
        str(heads): {
            "cache_bytes_per_token": cache(study, heads),
            "token_milliseconds": found.token,
            "sample_seconds": found.sample,
            "losses": values(samples[heads]),
        }
        for heads, found in times.items()
    }


def values(sample: Sample | None) -> Sequence[float] | None:
    return sample.values if sample else None


def kept(ends: Sequence[Any], faster: float, fastest: float) -> str:
    """Return what GQA keeps of MHA's quality and has of MQA's speed, beside the paper's figures."""
    many, middle, one = ends
    lost = (middle.mean - many.mean) / (one.mean - many.mean) if one.mean != many.mean else 0.0
    return (
        "The paper's figure 3: GQA-8 loses 0.1 of the 0.6 points that MQA loses, at nearly its speed (5.4 and 6.3 "
        f"times MHA's). Here {middle.name} has {lost:.0%} of MQA's rise in loss ({middle.mean - many.mean:+.4f} of "
        f"{one.mean - many.mean:+.4f} nats per token), at {faster:.2f} times {many.name}'s speed; MQA has "
        f"{fastest:.2f}."
    )


def cache(study: Study, heads: int) -> int:
    return cache_bytes_per_token(study.config_with(heads))
