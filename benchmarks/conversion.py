"""What conversions lose and what uptraining brings back, on the model that the tiny-mha recipe pretrains.

    python -m training.pretrain tiny --preset tiny-mha
    python -m benchmarks.conversion

The twin whose queries and keys have a norm on each head is converted to MLA alone, and nothing is uptrained:

    python -m training.pretrain tiny --preset tiny-mha --model_overrides '{"qk_norm": true}' \\
        --output_dir runs/tiny-mha-norms
    python -m benchmarks.conversion --run runs/tiny-mha-norms --calibration-blocks 256 --name conversion_norms

KL(source || converted) and perplexity are of validation text, which neither calibration nor the choice of settings has
seen. "random" is averaged over three seeds; so are methods that calibrate, over three draws of the calibration text.
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import allocate, compare_predictions, convert_model, target_config
from modeling_gqa.conversion.divergence import predicted_states
from modeling_gqa.conversion.sequential import assemble
from modeling_gqa.conversion.targets import configuration, layer_fields
from modeling_gqa.costs import cache_bytes_per_token
from training.uptrain import uptrain as run_uptrain

from .conversion_baselines import convert_baseline, mean_key, real_rotation
from .layerwise import collect
from .measure import describe_machine
from .report import kebab_shown, print_machine, print_table, save

COLUMNS = {"target": "", "method": "", "bytes": "", "kl": ".3f", "perplexity": ".2f", "top1": ".3f", "seconds": ".0f"}
UPTRAINING = {
    "target": "",
    "method": "",
    "bytes": "",
    "alpha": ".2f",
    "start": ".2f",
    "uptrained": ".2f",
    "closed": ".1%",
    "kl": ".3f",
}


class Bench:
    """The source, its text, and what has been measured."""

    def __init__(self, run: Path, calibration_blocks: int, seeds: int) -> None:
        self.run, self.seeds, self.blocks = run, range(seeds), calibration_blocks
        self.source = GQAForCausalLM.from_pretrained(run / "final").eval()
        self.train = np.load(run / "data" / "train.npy", mmap_mode="r")
        self.evaluation = self.batches(np.load(run / "data" / "validation.npy", mmap_mode="r"))
        self.states = {i: predicted_states(self.source, batch) for i, batch in enumerate(self.evaluation)}
        self.perplexity = self.measure(self.source)["perplexity_before"]
        self.rows: list[dict] = []

    @staticmethod
    def batches(blocks: np.ndarray, size: int = 32) -> list[dict[str, torch.Tensor]]:
        tensors = torch.from_numpy(np.asarray(blocks).astype(np.int64)).split(size)  # each (B, 2, T)
        return [{"input_ids": batch[:, 0], "position_ids": batch[:, 1]} for batch in tensors]

    def text(self, seed: int) -> tuple[list, list]:
        """Calibration and selection: training blocks drawn with `seed`, disjoint."""
        order = np.random.default_rng(seed).permutation(len(self.train))
        drawn = self.train[np.sort(order[: self.blocks])], self.train[np.sort(order[self.blocks :][: self.blocks // 2])]
        return self.batches(drawn[0]), self.batches(drawn[1])

    def measure(self, model) -> dict:
        return compare_predictions(self.source, model, self.evaluation, source_states=self.states)

    def add(self, target: str, method: str, models: list, seconds: float, **more) -> dict:
        """Measure `models`, which differ by seed, and note their mean."""
        measured = [self.measure(model) for model in models]
        keys = {"kl": "kl", "perplexity": "perplexity_after", "top1": "top1_agreement"}
        means = {name: statistics.fmean(result[key] for result in measured) for name, key in keys.items()}
        size = cache_bytes_per_token(models[0].config, torch.float32)
        row = {
            "target": target,
            "method": method,
            "bytes": size,
            **means,
            "seeds": len(models),
            "seconds": seconds,
            **more,
        }
        self.rows.append(row)
        print(f"{target:10} {method:34} KL {row['kl']:.3f}  perplexity {row['perplexity']:.2f}", flush=True)
        return row

    def convert(self, target: str, config, method: str, seeds: range, **keywords):
        """Convert with every seed and note the result; returns the first model."""
        begin, models, reports = time.perf_counter(), [], []
        for seed in seeds:
            calibration, selection = self.text(seed)
            if keywords.get("calibrated") is False:
                calibration = selection = None
            passed = {name: value for name, value in keywords.items() if name != "calibrated"}
            model, report = convert_model(
                self.source, config, calibration, selection=selection, method=method, seed=seed, **passed
            )
            models.append(model)
            reports.append(report)
        name = " ".join([method, *(key for key in ("regroup", "refit") if keywords.get(key))])
        name += " (weights only)" if keywords.get("calibrated") is False else ""
        name += " (closed form)" if keywords.get("refit") is False else ""
        seconds = (time.perf_counter() - begin) / len(models)
        self.add(target, name, models, seconds, setting=reports[0]["setting"], candidates=reports[0]["candidates"])
        return models[0]


def fewer_heads(bench: Bench) -> dict[str, GQAForCausalLM]:
    """Every method at every number of key/value heads; returns the models to uptrain."""
    heads, kept = bench.source.config.num_attention_heads, {}
    for number in (heads // 2, heads // 4, 1):
        target = f"gqa-{number}" if number > 1 else "mqa"
        config = target_config(bench.source.config, target[:3], num_key_value_heads=number if number > 1 else None)
        for method in ("mean", "first"):
            bench.convert(target, config, method, range(1))
        bench.convert(target, config, "random", bench.seeds)
        bench.convert(target, config, "procrustes", bench.seeds)
        bench.convert(target, config, "lowrank", range(1), calibrated=False, regroup=number > 1)
        kept[target] = bench.convert(target, config, "lowrank", bench.seeds, regroup=number > 1)
        bench.convert(target, config, "auto", range(1))
    return kept


def to_mla(bench: Bench) -> dict[str, GQAForCausalLM]:
    """MLA at a quarter and an eighth of the cache, against both baselines; returns the models to uptrain."""
    layer, kept = bench.source.config.per_layer_config[0], {}
    present = 2 * layer.num_key_value_heads * layer.head_dim
    calibration, _ = bench.text(0)
    seen = dict(collect(bench.source, calibration))
    for share in (4, 8):
        size, target = present // share, f"mla-1/{share}"
        for find, rope in ((mean_key, layer.head_dim), (real_rotation, size // 2)):
            config = target_config(bench.source.config, "mla", kv_lora_rank=size - rope, qk_rope_head_dim=rope)
            fields, states = layer_fields(config), {}
            for index in range(len(fields)):
                states[index], found = convert_baseline(bench.source, index, find, seen[index], size - rope, rope)
                states[index] = {name: tensor.float().contiguous() for name, tensor in states[index].items()}
                fields[index] |= found
            bench.add(
                target,
                f"{find.__name__} (baseline)",
                [assemble(bench.source, configuration(config, fields), states)],
                0,
            )
        config = target_config(bench.source.config, "mla", cache_size=size)
        bench.convert(target, config, "lowrank", range(1), calibrated=False)
        kept[target] = bench.convert(target, config, "lowrank", bench.seeds, divide_cache=True)
        bench.convert(target, config, "auto", range(1), divide_cache=True)
    return kept


def behind_norms(bench: Bench) -> None:
    """MLA at a half, a quarter and an eighth of the cache of a model with norms: in closed form, and by default."""
    layer = bench.source.config.per_layer_config[0]
    for share in (2, 4, 8):
        size = 2 * layer.num_key_value_heads * layer.head_dim // share
        config = target_config(bench.source.config, "mla", cache_size=size)
        for options in ({"refit": False, "refine": 0}, {}):
            bench.convert(f"mla-1/{share}", config, "lowrank", bench.seeds, divide_cache=True, **options)


def under_budget(bench: Bench) -> None:
    """The same caches with sizes by layer."""
    calibration, _ = bench.text(0)
    whole = cache_bytes_per_token(bench.source.config, torch.float32)
    for kind, share in (("gqa", 2), ("gqa", 4), ("mla", 4), ("mla", 8)):
        config = allocate(bench.source, kind, whole // share, calibration, dtype=torch.float32)
        bench.convert(f"{kind}-1/{share}", config, "lowrank", range(1), regroup=kind == "gqa")
        bench.rows[-1]["method"] += ", sizes by layer"


def uptrain_models(bench: Bench, models: dict[str, GQAForCausalLM], folder: Path) -> list[dict]:
    """Uptrain each model, and the source as the control, by the uptrain-tiny recipe."""
    rows, source = [], bench.perplexity
    tokenizer = AutoTokenizer.from_pretrained(bench.run / "final")
    for target, model in {"control": bench.source, **models}.items():
        student = folder / target.replace("/", "-")
        model.save_pretrained(student)
        tokenizer.save_pretrained(student)
        start = bench.perplexity if model is bench.source else bench.measure(model)["perplexity_after"]
        for alpha in (0.05, 0.1) if target in ("control", "gqa-2") else (0.05,):
            saved = uptrain(bench, student, folder, alpha, target == "control")
            uptrained = GQAForCausalLM.from_pretrained(saved).eval()
            after = bench.measure(uptrained)
            gap = start - source
            rows.append(
                {
                    "target": target,
                    "method": "next-token loss alone" if target == "control" else "lowrank, uptrained",
                    "bytes": cache_bytes_per_token(model.config, torch.float32),
                    "alpha": alpha,
                    "start": start,
                    "uptrained": after["perplexity_after"],
                    "closed": (start - after["perplexity_after"]) / gap if gap else None,
                    "kl": after["kl"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def uptrain(bench: Bench, student: Path, folder: Path, alpha: float, alone: bool) -> Path:
    """Run the script here on `alpha` of the source's pretraining tokens and return the uptrained model's folder."""
    output = folder / f"{student.name}-{alpha}"
    options = {"student": student, "teacher": bench.run / "final", "output_dir": output, "pretraining_fraction": alpha}
    if alone:
        tokens = json.loads((bench.run / "final" / "results.json").read_text(encoding="utf-8"))["tokens_seen"]
        options |= {"teacher": "none", "pretraining_tokens": tokens, "trainable": "all", "learning_rate": 1e-3}
    options |= {"max_eval_blocks": 1, "keep_best": False}  # what is uptrained is measured here
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        run_uptrain(["configuration/recipes/uptrain-tiny.yaml", *arguments])
    return output / "final"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/tiny-mha"), help="a finished run of training.pretrain")
    parser.add_argument("--calibration-blocks", "--calibration_blocks", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="benchmarks/results")
    parser.add_argument("--name", default="conversion", help="of the file of results")
    arguments = kebab_shown(parser).parse_args()
    if not (arguments.run / "final").is_dir():
        sys.exit(f"no model in {arguments.run}/final: python -m training.pretrain tiny --preset tiny-mha")
    machine, begin = describe_machine("cpu", [torch.float32]), time.perf_counter()
    print_machine(machine)
    bench = Bench(arguments.run, arguments.calibration_blocks, arguments.seeds)
    source = bench.measure(bench.source)
    print(f"source: perplexity {source['perplexity_before']:.2f} on {source['tokens']:,} tokens")
    uptraining: list[dict] = []
    if bench.source.config.qk_norm:
        behind_norms(bench)
    else:
        models = fewer_heads(bench) | to_mla(bench)
        under_budget(bench)
        with tempfile.TemporaryDirectory() as folder:
            names = ("gqa-2", "mqa", "mla-1/8")
            wanted: dict[str, GQAForCausalLM] = {name: models[name] for name in names if name in models}
            uptraining = uptrain_models(bench, wanted, Path(folder))
    print_table("Conversions, before any training", bench.rows, COLUMNS)
    if uptraining:
        print_table("Uptraining", uptraining, UPTRAINING)
    minutes = (time.perf_counter() - begin) / 60
    print(f"{minutes:.1f} minutes")
    save(
        arguments.output,
        arguments.name,
        " ".join(["python -m benchmarks.conversion", *sys.argv[1:]]),
        machine,
        source=source,
        conversions=bench.rows,
        uptraining=uptraining,
        minutes=minutes,
    )


if __name__ == "__main__":
    main()
