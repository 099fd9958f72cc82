"""A study's report: Markdown, JSON and pictures."""

import json
from collections.abc import Callable
from dataclasses import asdict

from ...common.errors import UserError
from ...common.results import write_json
from ...costs.speeds import measure_speeds, where_measured
from ..console import say
from ..folder.listing import write_text
from ..recipe.objects import as_object
from ..shared.runs import Runs
from .findings import Findings, Times, conversion, groups, named, of_samples, uptraining
from .pictures import plot_conversion, plot_groups, plot_trade, plot_uptraining
from .points import Study
from .recipe import NEXT_TOKEN, StudyRecipe

# What may differ when a study goes on: none of it changes what a finished run has found.
FREE = {
    "methods", "shares", "share", "heads", "prompt_tokens", "new_tokens", "rows", "seeds", "jobs", "launcher",
    "output_dir",
}  # fmt: skip


def write_findings(study: Study, runs: Runs) -> None:
    """Write the report of a study, its numbers and its pictures."""
    machine = where_measured()
    study_of: dict[str, Callable[[], tuple[Findings, list[str]]]] = {
        "conversion": lambda: on_conversion(study),
        "uptraining": lambda: on_uptraining(study),
        "groups": lambda: on_groups(study),
    }
    findings, pictures = study_of[study.name]()
    failures = runs.failures()
    content = {"study": study.name, "recipe": asdict(study.recipe), "machine": machine, "failures": failures}
    content |= {"results": findings.numbers}
    write_json(study.folder / f"{study.name}.json", content)
    recipe = study.recipe
    lines = [f"# {findings.title}", "", " ".join(findings.said), "", findings.table.to_markdown(), ""]
    lines += [line for name in pictures for line in (f"![{findings.title.lower()}]({name})", "")]
    lines += [
        f"The source is {recipe.source}, pretrained on {study.pretraining_tokens:,} tokens. Losses are means over "
        f"{recipe.seeds} seeds, in nats per token of validation text; ± is the standard deviation of a run. Each run "
        f"trains by the recipe {recipe.uptraining}, {trained(recipe)}. Its learning rate was not swept here, and a "
        "small model does not say what a large one would do.",
        "",
    ]
    if study.name == "groups":
        lines += [
            f"Times: {of_samples(study)} at once, {recipe.prompt_tokens:,} tokens and {recipe.new_tokens:,} new ones "
            f"each, on {machine}, with random weights and the models in turn: the "
            "measured time of the prompts, one after another, and of the new tokens, as measured in their middle.",
            "",
        ]
    lines += [f"- {name} failed: {said}" for name, said in failures.items()]
    write_text(study.folder / f"{study.name}.md", "\n".join(lines).rstrip() + "\n")
    for sentence in findings.said:
        say(sentence)


def trained(recipe: StudyRecipe) -> str:
    """Return what the runs train, and on what."""
    options = as_object("options", recipe.options)
    told = f" (options: {json.dumps(options)})" if options else ""
    return f"{'as its options say' if NEXT_TOKEN.keys() & options else 'all parameters on the next token'}{told}"


def on_conversion(study: Study) -> tuple[Findings, list[str]]:
    plot_conversion(study, study.folder / "conversion.png")
    return conversion(study), ["conversion.png"]


def on_uptraining(study: Study) -> tuple[Findings, list[str]]:
    plot_uptraining(study, study.folder / "uptraining.png")
    return uptraining(study), ["uptraining.png"]


def on_groups(study: Study) -> tuple[Findings, list[str]]:
    times = measure(study)
    plot_groups(study, times, study.folder / "groups.png")
    plot_trade(study, times, study.folder / "trade.png")
    return groups(study, times), ["groups.png", "trade.png"]


def measure(study: Study) -> dict[int, Times]:
    """Return times by number of key/value heads, of models with random weights that take turns."""
    recipe = study.recipe
    names = {heads: named(study, heads) for heads in study.all_heads()}
    middle = recipe.prompt_tokens + recipe.new_tokens // 2
    say("Measuring speeds ...")
    configs = {name: study.config_with(heads) for heads, name in names.items()}
    try:
        speeds = measure_speeds(configs, [middle], recipe.prompt_tokens, recipe.rows)
    except UserError as error:
        raise UserError(f"{error}; runs are kept, and the same command measures again") from error
    found = {}
    for heads, name in names.items():
        token = speeds[name].decode_milliseconds[middle]
        prompt = recipe.rows * recipe.prompt_tokens / speeds[name].prompt_tokens_per_second
        found[heads] = Times(token, prompt + recipe.new_tokens * token / 1000)
    return found
