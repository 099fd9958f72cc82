"""The folder of a comparison: which recipe it holds, its tokenizer, its log of losses, and its report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import AutoTokenizer

from ...common.errors import UserError
from ...common.results import write_json
from ...costs import cache_bytes_per_token, count_parameters, training_flops
from ...costs.speeds import Speed, measure_speeds, where_measured
from ...data.blocks import load_blocks
from ...data.source import open_source, split_source
from ...data.tokenizer import train_tokenizer
from ..console import say
from ..folder.listing import read_object, write_text
from ..folder.manifest import checkpoints
from ..recipe.trackers import trackers_in
from ..results import RESULTS
from ..shared.runs import Runs
from .outcome import Outcome, describe
from .pictures import Points, plot_comparison
from .plan import Comparison, Plan, Trial
from .recipe import CompareRecipe
from .words import conclusion, steps, write_report

REPORT = "report.md"
# What may differ when a comparison goes on: none of it changes what a finished run has found.
FREE = {"learning_rates", "seeds", "jobs", "launcher", "contexts", "report_to", "output_dir"}


def write_tokenizer(comparison: Comparison) -> None:
    """Train the tokenizer that all runs share, unless the recipe names one."""
    recipe = comparison.pretraining
    if recipe.tokenizer:
        return
    source = open_source(recipe, recipe.data_seed or recipe.seed)
    say(f"Training a byte-level BPE tokenizer on {source.name} ...")
    documents = split_source(source, recipe).documents("train")
    tokenizer = train_tokenizer(documents, comparison.candidates[0].config.vocab_size)
    tokenizer.save_pretrained(comparison.folder / "tokenizer")


def write_outcome(comparison: Comparison, runs: Runs) -> None:
    """Measure speeds, and tell the trackers and write `comparison.json`, `report.md` and the pictures."""
    recipe, pretraining, folder = comparison.recipe, comparison.pretraining, comparison.folder
    candidates, plans = comparison.candidates, comparison.plans(runs.ended())
    rows, tokens = pretraining.per_device_train_batch_size, pretraining.sequence_length
    say("Measuring speeds ...")
    configs = {candidate.name: candidate.config for candidate in candidates}
    machine = where_measured()
    measured = (
        f"Speeds: {machine}, random weights, the models in turn; decoding of one row, a prompt of "
        f"{max(recipe.contexts):,} tokens, training of {rows:,} x {tokens:,} tokens without the optimizer."
    )
    try:
        speeds = measure_speeds(configs, recipe.contexts, max(recipe.contexts), training_block=(rows, tokens))
    except UserError as error:  # too little memory for all models at once, for one
        speeds, measured = {}, f"There are no speeds: {error}."
        say(measured)
    entries = [
        describe(
            candidate,
            found,
            flops_per_token=training_flops(candidate.config, 1, tokens) / tokens,
            parameters=count_parameters(candidate.config),
            cache=cache_bytes_per_token(candidate.config),
            speed=speeds.get(candidate.name, Speed()),
        )
        for candidate, found in zip(candidates, plans, strict=True)
    ]
    outcome = Outcome(entries, bytes_per_token(folder))
    same_text = f"{on_tokens(runs)}: {open_source(pretraining).name}, blocks of {tokens:,} tokens."
    content = {"recipe": asdict(recipe), "machine": machine, "failures": runs.failures(), **outcome.to_dict()}
    write_json(folder / "comparison.json", content)
    plot_comparison(outcome, curves(folder, plans), folder)
    write_text(folder / REPORT, write_report(recipe, outcome, measured, same_text, runs.failures()))
    for sentence in (*conclusion(outcome), *steps(outcome)):
        say(sentence)
    track(recipe, outcome)


def on_tokens(runs: Runs) -> str:
    """Return whether all runs that have finished were trained on as many tokens, as their results say."""
    seen = sorted({(read_object(path) or {}).get("tokens_seen", 0) for path in runs.folder.glob(f"runs/*/{RESULTS}")})
    if len(seen) > 1:
        return (
            f"Runs were NOT trained on as many tokens each ({seen[0]:,} to {seen[-1]:,}), as where a launcher with "
            "other processes goes on; their losses cannot be compared"
        )
    return "All models are trained on the same tokens in the same order"


def bytes_per_token(folder: Path) -> float:
    """Return how many bytes of text a token of the validation blocks stands for; nan without a run."""
    run = next((path.parent for path in sorted(folder.glob(f"runs/*/{RESULTS}"))), None)
    if run is None:
        return math.nan
    ids = load_blocks(run / "data", "validation").blocks[:, 0]
    texts = AutoTokenizer.from_pretrained(run / "tokenizer").batch_decode(ids, skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts) / ids.size


def curves(folder: Path, plans: Sequence[Plan]) -> Mapping[str, Points]:
    """Return tokens and training loss of the first run of each model at its best rate."""
    found = {}
    for known in plans:
        trials = [Trial(known.candidate, known.rate, seed) for seed in known.seeds] if known.rate else []
        for trial in trials[:1]:
            last = checkpoints(folder / "runs" / trial.name)[-1:]
            history = (read_object(last[0] / "trainer_state.json") or {}).get("log_history", []) if last else []
            found[known.candidate] = [
                (log["tokens_seen"], log["loss"]) for log in history if {"loss", "tokens_seen"} <= log.keys()
            ]
    return found


def track(recipe: CompareRecipe, outcome: Outcome) -> None:
    """Write the outcome to the trackers that the recipe names."""
    if not recipe.report_to:
        return
    from accelerate import Accelerator

    accelerator = Accelerator(log_with=list(recipe.report_to), project_dir=str(recipe.output_dir))
    plain = {name: value for name, value in asdict(recipe).items() if isinstance(value, str | int | float)}
    with trackers_in(Path(str(recipe.output_dir))):
        accelerator.init_trackers("comparison", config=plain)
    for entry in outcome.finished:
        numbers = {
            "loss": entry.loss,
            "cache_bytes_per_token": entry.cache_bytes_per_token,
            "parameters": entry.parameters,
            "learning_rate": entry.rate,
        }
        accelerator.log({f"{entry.name}/{name}": value for name, value in numbers.items()})
    accelerator.end_training()
