"""What uptraining brings back of a real model: its quality against the tokens that it is trained on.

    python -m benchmarks.uptraining --targets control mla-1/4 --tokens 40960 204800
    python -m benchmarks.uptraining --targets mla-1/2 --set learning_rate=0.0001
    python -m benchmarks.uptraining meta-llama/Llama-3.2-1B --name uptraining-1b --recipe uptrain-1b \
        --targets mla-512+64

Without a model it is SmolLM2-135M-Instruct, and the text is that of `benchmarks.real`. Each target of `--targets` is
converted as the row "default" of `benchmarks.real_conversion`, and uptrained by `training.uptrain` with `--recipe` on
`calibration.jsonl`. Every number of tokens is a run of its own, with a learning rate schedule of its own. Students
learn from the source's predictions (KL divergence) and the next token; the control is the source itself, trained on as
many tokens of the same text with the next-token loss. Rows have perplexity, KL(source || student) and the share of
equal most likely tokens on the test pages, on which nothing is chosen.

Conversions and runs lie in `--work`. Whatever is done already is not done again, and a run that was stopped resumes.
"""

import argparse
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from modeling_gqa.conversion import load_source
from modeling_gqa.training.trainer import NonFiniteLoss
from training.uptrain import uptrain

from .measure import describe_machine
from .real import cache_folder, real_model, real_text
from .real_conversion import Bench, Target, polished
from .report import RESULTS, ResultRows, kebab_shown, print_machine, print_table

CONTROL = "control"
TARGETS = (CONTROL, "mla-1/2", "mla-1/4")
COLUMNS = {
    "model": "", "tokens": ",", "perplexity": ".2f", "kl": ".3f", "top1": ".1%", "perplexity_other": ".2f",
    "kl_other": ".3f", "perplexity_code": ".2f", "kl_code": ".3f", "tokens_per_second": ".0f",
}  # fmt: skip


class Uptraining:
    """Models, runs and the rows of the results file, for a command line."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options, self.command = options, command
        self.source = Path(options.model or real_model())
        self.text = options.text or real_text()
        names = ("recipe", "calibration_tokens", "evaluation_tokens", "length", "train_length", "train_batch")
        settings = {"model": self.source.name, **{name: getattr(options, name) for name in names}}
        self.rows = ResultRows(options.json or RESULTS / f"{options.name}.json", ("model", "tokens"), settings)
        self.machine = describe_machine("cpu", [torch.float32, torch.bfloat16])
        print_machine(self.machine)

    @cached_property
    def bench(self) -> Bench:
        sizes = (self.options.calibration_tokens, self.options.evaluation_tokens, self.options.length)
        return Bench(str(self.source), self.text, *sizes)

    def student(self, target: Target | None) -> Path:
        """Return the folder of a conversion, or of a copy of the source for the control; made where there is none."""
        kind = f"{target.name.replace('/', '-')}-{self.options.calibration_tokens}" if target else CONTROL
        name = f"{self.source.name}-{kind}"
        folder = self.options.work / "converted" / name
        if not (folder / "config.json").is_file():
            partial = folder.with_name(f"{name}.partial")
            model = polished(self.bench, target) if target else load_source(self.source)
            model.save_pretrained(partial)
            AutoTokenizer.from_pretrained(self.source).save_pretrained(partial)
            partial.rename(folder)
        return folder

    def uptrain(self, student: Path, tokens: int) -> tuple[Path, dict]:
        """Train by the script, or go on with a run that was stopped; return the model's folder and its results."""
        options = self.options
        values: dict[str, Any] = {
            "student": student,
            "teacher": self.source,
            "data_files": self.text / "calibration.jsonl",
            "max_steps": max(1, round(tokens / (options.train_length * options.train_batch))),
            "sequence_length": options.train_length,
            "per_device_train_batch_size": options.train_batch,
            "max_eval_blocks": 1,  # what is uptrained is measured here
            "keep_best": False,
        }
        if student == self.student(None):
            values |= {"kl_weight": 0}
        values |= dict(pair.split("=", 1) for pair in options.set)
        digest = hashlib.sha256(repr((options.recipe, values)).encode()).hexdigest()
        output = options.work / "runs" / f"{student.name}-{tokens}-{digest[:8]}"
        if not (output / "final" / "config.json").is_file():
            values |= {"output_dir": output} | ({"resume": "true"} if output.is_dir() else {})
            print(f"training {output}", flush=True)
            with redirect_stdout(io.StringIO()):
                uptrain([options.recipe, *(f"--{name}={value}" for name, value in values.items())])
            for checkpoint in output.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        return output / "final", json.loads((output / "results.json").read_text(encoding="utf-8"))

    def add(self, key: dict[str, Any], measure: Callable[[], dict]) -> None:
        """Measure and write the row that has `key`, if it is missing; one of other settings is replaced."""
        if self.rows.has(key):
            return
        row = measure() | key
        shown = {name: form for name, form in COLUMNS.items() if row.get(name) is not None}
        print("  ".join(f"{name} {format(row[name], form)}" for name, form in shown.items()), flush=True)
        self.rows.put(row, self.command, self.machine)

    def measured(self, student: Path, tokens: int) -> dict:
        """Return what a model has on the test pages after a run of `tokens`; none of them: before any."""
        if not tokens:
            return self.bench.measure(load_source(student).eval())
        try:
            folder, results = self.uptrain(student, tokens)
        except NonFiniteLoss:
            return {"kl": None, "perplexity": None, "failed": "the loss is not finite"}
        seconds = results["training_seconds"]
        speed = {"seconds": seconds, "tokens_per_second": results["tokens_seen"] / seconds}
        return speed | self.bench.measure(load_source(folder).eval())

    def measure(self) -> None:
        """Measure each target before training, and after each number of tokens."""
        models = {target.name if target else CONTROL: self.student(target) for target in self.options.targets}
        for tokens in (0, *self.options.tokens):
            for name, folder in models.items():
                key = {"model": name, "tokens": tokens, "set": self.options.set if tokens else []}
                self.add(key, partial(self.measured, folder, tokens))


def parse_target(name: str) -> Target | None:
    """Return the target of a name; the control, which is not converted, has none."""
    return None if name == CONTROL else Target.parse(name)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, or a name on the Hub; SmolLM2-135M-Instruct by default")
    parser.add_argument("--name", default="uptraining", help="of the file of results in benchmarks/results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results, in place of --name")
    parser.add_argument("--text", type=Path, help="folder of the text; that of `make real` by default")
    parser.add_argument("--work", type=Path, default=cache_folder() / "uptraining", help="folder of the runs")
    parser.add_argument("--recipe", default="uptrain-smollm2", help="of training.uptrain")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other options of training.uptrain")
    parser.add_argument("--targets", type=parse_target, nargs="+", default=[*map(parse_target, TARGETS)])
    parser.add_argument("--tokens", type=int, nargs="*", default=[40960, 204800, 1024000], help="to train on")
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block, calibrating and measuring")
    parser.add_argument("--train-length", type=int, default=512, help="tokens of a block, training")
    parser.add_argument("--train-batch", type=int, default=2, help="blocks of a step")
    return kebab_shown(parser).parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict]:
    """Do, print and write what the command line asks for; returns all rows of the file."""
    command = " ".join(["python -m benchmarks.uptraining", *(sys.argv[1:] if arguments is None else arguments)])
    uptraining = Uptraining(parse(arguments), command)
    uptraining.measure()
    print_table(f"uptraining of {uptraining.source.name}", uptraining.rows, COLUMNS)
    print(f"rows are in {uptraining.rows.path}")
    return uptraining.rows


if __name__ == "__main__":
    main()
