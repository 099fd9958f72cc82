"""The command `evaluate`: trained models on lm-eval's tasks and on yardsticks from files."""

import gc
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from modeling_gqa.common.atomic import write_json
from modeling_gqa.common.batches import computing_dtype, usable_device
from modeling_gqa.common.console import err, out, printable, user_errors
from modeling_gqa.common.progress import progress_bars
from modeling_gqa.costs.measuring import machine_name

from .errors import UserError


def evaluate(
    checkpoint: str,
    against: str | None,
    tasks: list[str] | None,
    data: Path | None,
    limit: int | None,
    batch_size: int,
    sequence_length: int,
    run_code: bool,
    dtype: str,
    device: str | None,
    json: Path | None,
    card: bool,
) -> None:
    """Evaluate a checkpoint, and another one on the same items, and print, save and publish the scores."""
    command = {name: value for name, value in locals().items() if value is not None}
    with user_errors(json):
        from modeling_gqa.evaluation.harness import find_tasks, open_subject
        from modeling_gqa.evaluation.results import card_entries, read_card, results_table, to_json_dict, write_entries

        for name, number, least in (
            ("limit", limit, 1), ("batch-size", batch_size, 1), ("sequence-length", sequence_length, 2)
        ):  # fmt: skip
            if number is not None and number < least:
                raise UserError(f"--{name} {number} must be at least {least}")
        where = usable_device(device)
        if json and json.is_dir():
            raise UserError(f"--json {json} is a folder: name a file in it")
        if card:
            if not Path(checkpoint).is_dir():
                raise UserError(f"--card writes into the folder of a checkpoint, and {checkpoint} is none")
            read_card(Path(checkpoint))
        precision = getattr(torch, dtype, None)
        options: dict[str, Any] = {"limit": limit, "batch_size": batch_size, "sequence_length": sequence_length}
        found = find_tasks(tasks, data, run_code=run_code, **options)
        subjects = [open_subject(source, precision) for source in filter(None, (checkpoint, against))]
        if json:
            json.parent.mkdir(parents=True, exist_ok=True)
        for path in (json and json.parent, card and Path(checkpoint)):
            if path and not os.access(path, os.W_OK):
                raise UserError(f"{path} cannot be written")
        for subject in subjects if found.text else ():
            if subject.longest and sequence_length > subject.longest:
                raise UserError(f"--sequence-length {sequence_length}: {subject.name} has {subject.longest} positions")
        results, about = [], []
        for subject in subjects:
            start = time.perf_counter()
            err.print(f"{printable(subject.name)}: {', '.join(found.names)}", soft_wrap=True)
            model = subject.load(precision, where)
            if precision is None:
                model.to(dtype=computing_dtype(model.dtype, where))  # type: ignore[call-arg]
            with progress_bars() as show_progress:
                results.append(found.run(model, subject, show_progress))
            kind = str(model.dtype).removeprefix("torch.")
            said: dict[str, Any] = {"name": subject.name, "class": type(model).__name__, "dtype": kind}
            seconds = round(time.perf_counter() - start, 3)
            about.append(said | {"parameters": model.num_parameters(), "seconds": seconds})
            del model  # one at a time is in memory
            gc.collect()
        theirs = results[1] if against else {}
        names = [subject.name for subject in subjects]
        if len(set(names)) < len(names):
            names = [printable(source) for source in (checkpoint, against)]
        table = results_table(names[0], results[0], names[1] if against else None, theirs)
        out.print(table.to_rich(), "± is one standard error.", soft_wrap=False)
        if json:
            report = to_json_dict(about[0], about[1] if against else None, results[0], theirs)
            packages = {"modeling_gqa": version("modeling_gqa"), "lm_eval": version("lm_eval")}
            packages |= {"transformers": transformers.__version__, "torch": torch.__version__}
            report |= {"command": command, "machine": machine_name(where)}
            write_json(json, report | {"versions": packages | {"python": platform.python_version()}})
            out.print(f"Wrote {printable(json)}.", soft_wrap=True)
        if card:
            folder = Path(checkpoint)
            write_entries(folder, folder.resolve().name, card_entries(results[0], limit))
            out.print(f"Wrote the scores into {printable(folder / 'README.md')}.", soft_wrap=True)
