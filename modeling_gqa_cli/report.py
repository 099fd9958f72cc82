"""The command `report`: what models cost, from their configurations alone."""

from pathlib import Path
from typing import Any

import torch

from modeling_gqa.common.atomic import to_json
from modeling_gqa.common.batches import usable_device
from modeling_gqa.common.console import out, printable, user_errors
from modeling_gqa.common.pictures import check_picture, save
from modeling_gqa.common.progress import progress_bars
from modeling_gqa.common.tables import Table
from modeling_gqa.costs import CostedModel, Machine
from modeling_gqa.costs import report as cost_report
from modeling_gqa.costs.comparison import plot_costs, sections
from modeling_gqa.costs.configurations import changed, find_model
from modeling_gqa.costs.measuring import measure_decoding, measure_machine

from .errors import UserError

GIB, GB, TERA = 2**30, 1e9, 1e12
MOST, LONGEST = 1e9, 2**31 - 1  # of GiB, GB/s and TFLOP/s, and of tokens and sequences
CONTEXTS = [1024, 8192, 32768]


def report(
    configs: list[str],
    context: list[int] | None,
    batch_size: list[int] | None,
    dtype: str,
    memory: float | None,
    bandwidth: float | None,
    rate: float | None,
    measure: bool,
    device: str | None,
    json: bool,
    plot: Path | None,
    **sizes: Any,
) -> None:
    """Show what models cost, from their configurations alone: parameters, FLOPs, cache, bytes read, and the bound on
    their speed.

    Nothing is downloaded but `config.json`, and nothing is built unless `measure` asks for it.
    """
    with user_errors(plot):
        if plot:
            check_picture(plot)
        contexts, rows = sorted(set(context or CONTEXTS)), sorted(set(batch_size or [1]))
        if not all(0 < number <= LONGEST for number in (*contexts, *rows)):
            raise UserError(f"--context and --batch-size must be from 1 to {LONGEST}")
        models, named = find_models(configs, {name: value for name, value in sizes.items() if value is not None})
        precision = getattr(torch, dtype, named or torch.bfloat16)
        if device and not measure:
            raise UserError("--device says what --measure measures: give both, or neither")
        where = usable_device(device) if measure else ""
        check_positive({"--memory": memory, "--bandwidth": bandwidth, "--rate": rate})
        machine = find_machine(bandwidth, rate, measure, where, precision)
        room = None if memory is None else memory * GIB
        asked: dict[str, Any] = {"contexts": contexts, "batch_sizes": rows, "dtype": precision}
        reports = [cost_report(model, **asked, memory=room, machine=machine) for model in models]
        measured = []
        if measure:
            with progress_bars() as show_progress:
                measured = measure_decoding(models, **asked, device=where, show_progress=show_progress)
        if plot:
            save(plot_costs(models, machine, max(rows), max(contexts), precision), plot)
        if json:
            print(to_json({"models": reports, "measured": measured}), end="", flush=True)
            return
        for section in sections(models, reports, measured):
            out.print(section.to_rich() if isinstance(section, Table) else f"{printable(section)}\n", soft_wrap=False)
        if plot:
            out.print(f"Wrote {printable(plot)}.", soft_wrap=True)


def find_models(sources: list[str], sizes: dict[str, Any]) -> tuple[list[CostedModel], torch.dtype | None]:
    """Return the models that the command line names, each under a name of its own, and the first one's dtype."""
    found = [find_model(source) for source in sources]
    models = [CostedModel(model.config, printable(model.name)) for model, _ in found]
    if sizes or not models:
        models.append(changed(models[0] if models else None, sizes))
    names: list[str] = []
    for index, model in enumerate(models):
        alike = sum(other.name == model.name for other in models) > 1
        name = f"{model.name} ({printable(sources[index])})" if alike and index < len(sources) else model.name
        again = sum(earlier == name or earlier.startswith(f"{name} no. ") for earlier in names)
        names.append(f"{name} no. {again + 1}" if again else name)
    models = [CostedModel(model.config, name) for model, name in zip(models, names, strict=True)]
    return models, found[0][1] if found else None


def check_positive(options: dict[str, float | None]) -> None:
    """Raise `UserError` for an option that is not more than 0, or larger than any machine."""
    for name, value in options.items():
        if value is not None and not 0 < value <= MOST:
            raise UserError(f"{name} {value:g} must be more than 0, and at most {MOST:g}")


def find_machine(
    bandwidth: float | None, rate: float | None, measure: bool, device: str, dtype: torch.dtype
) -> Machine | None:
    """Return the machine that the options describe, or this one; raises `UserError` for half of a description."""
    if measure:
        if bandwidth or rate:
            raise UserError("--measure measures bandwidth and rate: leave out --bandwidth and --rate")
        return measure_machine(device, dtype)
    if (bandwidth is None) != (rate is None):
        raise UserError("a bound needs both --bandwidth and --rate")
    return Machine(bandwidth * GB, rate * TERA) if bandwidth and rate else None
