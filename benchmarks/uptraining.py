"""What uptraining brings back of a real model: a sweep of settings, and a curve of quality against tokens.

    python -m benchmarks.uptraining                 # both parts
    python -m benchmarks.uptraining --sweep
    python -m benchmarks.uptraining --curve --targets mla-1/4 --tokens 40960 204800
    python -m benchmarks.uptraining meta-llama/Llama-3.2-1B --name uptraining-1b --recipe uptrain-1b \
        --targets mla-512+64

Without a model it is SmolLM2-135M-Instruct, and the text is that of `benchmarks.real`. Each target of `--targets` is
converted as the row "untrained" of `benchmarks.real_conversion`, and uptrained by `training.uptrain` with `--recipe` on
`calibration.jsonl`. Every number of tokens is a run of its own, with a learning rate schedule of its own. Students
learn from the source's predictions (KL divergence) and the next token; the control is the source itself, trained on as
many tokens of the same text with the next-token loss.

The sweep trains the last target on `--sweep-tokens`: learning rates first, then shares of stage 1, then all parameters
in place of the attention's. What it finds is kept for the other targets and the control, of which it sweeps the
learning rates alone. It chooses on `tuning.jsonl`, a student by KL and the control by perplexity. The curve reports
perplexity, KL(source || student) and the share of equal most likely tokens on the test pages, on which nothing is
chosen, and what each model answers to one question.

Conversions and runs lie in `--work`. Whatever is done already is not done again, and a run that was stopped resumes.
"""

import argparse
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
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
from .real_conversion import EVALUATIONS, Bench, Target, ours
from .report import RESULTS, kebab_shown, print_machine, print_table, write

LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
SHARES = (0.25, 0.0, 0.5)  # of the steps that stage 1 takes; the sweep of learning rates has the first
WORTH = 0.99  # all parameters, which take more time and memory, are chosen where KL is at most this share
QUESTION = "What is the difference between a list and a tuple in Python?"
ANSWER_TOKENS = 60
CONTROL = "control"
SWEEP = {"model": "", "learning_rate": ".0e", "layerwise_fraction": ".2f", "trainable": "", "kl": ".3f",
         "perplexity": ".2f", "top1": ".1%", "tokens_per_second": ".0f"}  # fmt: skip
CURVE = {"model": "", "tokens": ",", "perplexity": ".2f", "kl": ".3f", "top1": ".1%", "perplexity_other": ".2f",
         "kl_other": ".3f", "perplexity_code": ".2f", "kl_code": ".3f", "tokens_per_second": ".0f"}  # fmt: skip


class Uptraining:
    """Models, runs and the rows of the results file, for a command line."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options, self.command = options, command
        self.source = Path(options.model or real_model())
        self.text = options.text or real_text()
        self.path = options.json or RESULTS / f"{options.name}.json"
        names = ("recipe", "calibration_tokens", "evaluation_tokens", "length", "train_length", "train_batch", "set")
        self.settings = {"model": self.source.name, **{name: getattr(options, name) for name in names}}
        self.rows: dict[str, list[dict]] = {"sweep": [], "curve": []}
        if self.path.is_file():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["settings"] != self.settings:
                sys.exit(f"{self.path} holds rows of {stored['settings']}, not of {self.settings}: name another file")
            self.rows = {part: stored[part] for part in self.rows}
        self.machine = describe_machine("cpu", [torch.float32, torch.bfloat16])
        print_machine(self.machine)

    def bench(self, evaluations: dict[str, str]) -> Bench:
        sizes = (self.options.calibration_tokens, self.options.evaluation_tokens, self.options.length)
        return Bench(str(self.source), self.text, *sizes, evaluations=evaluations)

    @cached_property
    def test(self) -> Bench:
        return self.bench(EVALUATIONS)

    @cached_property
    def tuning(self) -> Bench:
        return self.bench({"": "tuning"})

    def student(self, target: Target | None) -> Path:
        """Return the folder of a conversion, or of a copy of the source for the control; made where there is none."""
        kind = f"{target.name.replace('/', '-')}-{self.options.calibration_tokens}" if target else CONTROL
        name = f"{self.source.name}-{kind}"
        folder = self.options.work / "converted" / name
        if not (folder / "config.json").is_file():
            partial = folder.with_name(f"{name}.partial")
            model = ours(self.test, target) if target else load_source(self.source)
            model.save_pretrained(partial)
            AutoTokenizer.from_pretrained(self.source).save_pretrained(partial)
            partial.rename(folder)
        return folder

    def uptrain(self, student: Path, tokens: int, setting: dict[str, Any]) -> tuple[Path, dict]:
        """Train by the script, or go on with a run that was stopped; return the model's folder and its results."""
        options = self.options
        values = setting | {
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
            values |= {"layerwise_fraction": 0, "kl_weight": 0}
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

    def add(self, part: str, key: dict[str, Any], measure: Callable[[], dict]) -> dict:
        """Return the row of `part` that has `key`; one that is missing is measured and written."""
        for row in self.rows[part]:
            if key.items() <= row.items():
                return row
        row = measure() | key
        shown = {name: form for name, form in (SWEEP | CURVE).items() if row.get(name) is not None}
        print("  ".join(f"{name} {format(row[name], form)}" for name, form in shown.items()), flush=True)
        if part == "curve":  # which has one row for a model and its tokens; another setting replaces it
            self.rows[part] = [x for x in self.rows[part] if any(x[name] != row[name] for name in ("model", "tokens"))]
        self.rows[part].append(row)
        write(self.path, self.command, self.machine, settings=self.settings, **self.rows)
        return row

    def trained(self, part: str, model: str, student: Path, tokens: int, setting: dict[str, Any]) -> dict:
        """Return the row of a model that is trained: on the tuning pages for the sweep, else on the test pages."""

        def measure() -> dict:
            try:
                folder, results = self.uptrain(student, tokens, setting)
            except NonFiniteLoss:
                return {"kl": None, "perplexity": None, "failed": "the loss is not finite"}
            row = {"seconds": results["training_seconds"]}
            row["tokens_per_second"] = results["tokens_seen"] / row["seconds"]
            uptrained = load_source(folder).eval()
            if part == "curve":
                return row | self.test.measure(uptrained) | {"answer": self.answer(uptrained)}
            row |= self.tuning.measure(uptrained)
            shutil.rmtree(folder.parent)
            return row

        return self.add(part, {"model": model, "tokens": tokens, **setting}, measure)

    def answer(self, model: Any) -> str:
        """Return what the model answers to `QUESTION`: the likeliest tokens, as they come out."""
        tokenizer: Any = AutoTokenizer.from_pretrained(self.source)
        turns = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    # -- the two parts

    def sweep(self) -> dict[str, dict[str, Any]]:
        """Return the best settings by model."""
        *others, target = self.options.targets
        models: dict[str, Callable[[], Path]] = {x.name: partial(self.student, x) for x in self.options.targets}
        models[CONTROL] = partial(self.student, None)

        def best(model: str, settings: Iterator[dict[str, Any]], measure: str = "kl") -> tuple[float, dict[str, Any]]:
            folder, tokens = models[model](), self.options.sweep_tokens
            rows = [(self.trained("sweep", model, folder, tokens, setting)[measure], setting) for setting in settings]
            trained = [(loss, setting) for loss, setting in rows if loss is not None]
            if not trained:
                sys.exit("no setting of the sweep trains: give lower --learning-rates")
            return min(trained, key=lambda pair: pair[0])

        def rates(setting: dict[str, Any]) -> Iterator[dict[str, Any]]:
            return ({**setting, "learning_rate": rate} for rate in self.options.learning_rates)

        _, found = best(target.name, rates({"layerwise_fraction": SHARES[0], "trainable": "attention"}))
        kl, found = best(target.name, ({**found, "layerwise_fraction": share} for share in SHARES))
        kl_of_all, everything = best(target.name, rates({**found, "trainable": "all"}))
        if kl_of_all <= WORTH * kl:
            found = everything
        settings = {x.name: best(x.name, rates(found))[1] for x in others}
        alone = rates({"trainable": found["trainable"]})
        return settings | {target.name: found, CONTROL: best(CONTROL, alone, "perplexity")[1]}

    def curve(self, settings: dict[str, dict[str, Any]]) -> None:
        """Measure the source and each conversion before training, and after each number of tokens."""
        models = {CONTROL: self.student(None), **{target.name: self.student(target) for target in self.options.targets}}
        for name, folder in models.items():

            def untrained(folder: Path = folder) -> dict:
                model = load_source(folder).eval()
                return self.test.measure(model) | {"answer": self.answer(model)}

            self.add("curve", {"model": name, "tokens": 0}, untrained)
        for tokens in self.options.tokens:
            for name, folder in models.items():
                self.trained("curve", name, folder, tokens, settings.get(name, {}))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, or a name on the Hub; SmolLM2-135M-Instruct by default")
    parser.add_argument("--name", default="uptraining", help="of the file of results in benchmarks/results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file of results, in place of --name")
    parser.add_argument("--text", type=Path, help="folder of the text; that of `make real` by default")
    parser.add_argument("--work", type=Path, default=cache_folder() / "uptraining", help="folder of the runs")
    parser.add_argument("--sweep", action="store_true", help="this part")
    parser.add_argument("--curve", action="store_true", help="this part, with the sweep's best settings")
    parser.add_argument("--recipe", default="uptrain-smollm2", help="of training.uptrain")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other options of training.uptrain")
    parser.add_argument("--targets", type=Target.parse, nargs="+", default=[*map(Target.parse, ("mla-1/2", "mla-1/4"))])
    parser.add_argument("--tokens", type=int, nargs="*", default=[40960, 204800, 1024000], help="points of the curve")
    parser.add_argument("--sweep-tokens", type=int, default=40960)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block, calibrating and measuring")
    parser.add_argument("--train-length", type=int, default=512, help="tokens of a block, training")
    parser.add_argument("--train-batch", type=int, default=2, help="blocks of a step")
    return kebab_shown(parser).parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, list[dict]]:
    """Do, print and write what the command line asks for; returns all rows of the file."""
    both = not (options := parse(arguments)).sweep and not options.curve
    command = " ".join(["python -m benchmarks.uptraining", *(sys.argv[1:] if arguments is None else arguments)])
    uptraining = Uptraining(options, command)
    # Without a sweep the recipe's own settings are used.
    swept = options.sweep or both or uptraining.rows["sweep"]
    settings: dict[str, dict[str, Any]] = uptraining.sweep() if swept else {}
    if options.curve or both:
        uptraining.curve(settings)
    for part, columns in (("sweep", SWEEP), ("curve", CURVE)):
        if uptraining.rows[part]:
            print_table(f"{part} of {uptraining.source.name}", uptraining.rows[part], columns)
    print(f"best: {settings}\nrows are in {uptraining.path}")
    return uptraining.rows


if __name__ == "__main__":
    main()
