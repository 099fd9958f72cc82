"""What a comparison is going to take: length, memory and time of the runs, by some timed steps of each model."""

import math
from typing import Any

from ...common.console import say
from ...common.progress import duration
from ...common.tables import Table, in_bytes
from ..estimate import measure
from ..recipe_model import new_model
from .plan import Comparison
from .runs import gpu_of

HEADER = ["model", "steps of a run", "tokens of a run", "seconds of a step", "memory", "time of a run"]


def dry_run(comparison: Comparison) -> None:
    """Print what a run of each model takes, and all that are planned together, by steps on random tokens."""
    recipe, pretraining = comparison.recipe, comparison.pretraining
    runs = len(recipe.learning_rates) + recipe.seeds  # of each model
    rows, total = [], 0.0
    for candidate in comparison.candidates:
        model: Any = new_model(pretraining, candidate.config)
        (seconds, memory), steps = measure(pretraining, model.to(pretraining.device)), pretraining.max_steps
        del model  # before there is another one
        length = (f"{steps:,}", f"{steps * pretraining.tokens_per_step:,}") if steps > 0 else ("-", "-")
        step, time = "more memory than is free", "-"
        if seconds is not None:
            step, time = f"{seconds:.2g}", duration(steps * seconds) if steps > 0 else "-"
        total += runs * steps * (seconds or math.nan)
        rows.append([candidate.name, *length, step, in_bytes(sum(memory.values())), time])
    say(f"{Table(HEADER, rows).to_markdown()}\n")
    at_once = len({gpu_of(worker) for worker in range(recipe.jobs)})  # without a GPU for each they share the cores
    if math.isnan(total):
        say("Time    not measured: a step of one of the models needs more memory than is free")
    elif total > 0:
        say(f"Time    about {duration(total / at_once)} of training for {runs * len(rows)} runs, {at_once} at a time")
    else:
        say("Time    the text says how many steps there are")
    say("Dry run: nothing was written, and no text was read.")
