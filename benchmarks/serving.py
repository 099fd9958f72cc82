"""Requests and tokens per second of each way to serve MLA, beside models whose cache is as large and larger.

    .venv-serving/bin/python -m benchmarks.serving

Needs vLLM: `make serve-test` makes the environment. Each system is a process that has its model loaded and a cache of
the same bytes; they get the same number of requests in turn, all at once, and only one works at a time. The models have
random weights: MLA, the MHA source that it is a conversion of by its sizes, and GQA that caches as many bytes per token
as MLA, exported to Llama's class.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import export_checkpoint
from modeling_gqa.costs import count_parameters, decode_flops, prefill_flops

from .measure import describe_machine
from .models import Sizes, make_config
from .report import parse_arguments, print_machine, print_table, save

WITHOUT_PLUGIN = {"VLLM_PLUGINS": "", "VLLM_MLA_DISABLE": "1"}
# Name: model, engine, variables of the environment.
SYSTEMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "MLA, vLLM": ("mla", "vllm", {}),
    "Llama of equal cache, vLLM": ("gqa-llama", "vllm", {}),
    "GQA of equal cache, vLLM": ("gqa", "vllm", {}),
    "MLA expanded, vLLM": ("mla", "vllm", WITHOUT_PLUGIN),
    "MHA source as Llama, vLLM": ("mha-llama", "vllm", {}),
    "MLA, generate_batch": ("mla", "generate_batch", {}),
    "MLA, generate": ("mla", "generate", {}),
}
BASELINE = "Llama of equal cache, vLLM"
COLUMNS = {
    "system": "",
    "requests": "",
    "bytes_per_token": ",",
    "fit": "",
    "seconds": ".1f",
    "requests_per_second": ".3f",
    "tokens_per_second": ".1f",
    "ratio": ".2f",
    "ratio_low": ".2f",
    "ratio_high": ".2f",
    "prompts_seconds": ".2f",
    "prompts_ratio": ".2f",
    "gflop": ",.0f",
}


@dataclass
class ServingSizes(Sizes):
    """Sizes of every model; GQA has as many key/value heads as cache what MLA does."""

    vocab_size: int = 65536
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 9
    num_attention_heads: int = 12
    kv_lora_rank: int = 224
    qk_rope_head_dim: int = 32


@dataclass
class ServingArguments:
    """What is asked of each system."""

    systems: list[str] = field(default_factory=lambda: list(SYSTEMS), metadata={"help": "names of systems"})
    requests: list[int] = field(default_factory=lambda: [1, 8, 32, 128], metadata={"help": "requests at once"})
    rounds: list[int] = field(default_factory=lambda: [5, 3, 2, 1], metadata={"help": "rounds of each of them"})
    prompt_tokens: int = 512
    new_tokens: int = 128
    cache_gib: float = field(default=1.0, metadata={"help": "cache of each system, in GiB"})
    batch_tokens: int = field(default=2048, metadata={"help": "tokens that an engine forwards at a time"})
    eager: bool = field(default=False, metadata={"help": "vLLM without torch.compile"})
    dtype: str = "float32"
    output: str = field(default="benchmarks/results", metadata={"help": "directory of the JSON"})


class Worker:
    """A process that serves one system; what it prints goes to a file of its own."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any], variables: dict[str, str]):
        self.name, self.log = name, folder / f"{name}.log"
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_worker", json.dumps(options)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        self.room = self.bytes_per_token = 0

    def start(self) -> None:
        """Wait until the model is loaded and a first short request is answered."""
        cache = self.answer()
        self.room, self.bytes_per_token = cache["room"], cache["bytes_per_token"]
        warm = self.seconds(requests=1, prompt_tokens=8, new_tokens=2, seed=0)
        print(f"{self.name}: room for {self.room} tokens, first request {warm:.1f} s", flush=True)

    def seconds(self, **job) -> float:
        """Seconds that the job takes."""
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self.answer()["seconds"]

    def answer(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"{self.name} ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def make_models(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Save the models with seeded weights, and return each one's configuration."""
    numbers = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    heads, rest = divmod(numbers, 2 * sizes.head_dim)
    if rest:
        raise SystemExit(f"R + P = {numbers} must be a multiple of {2 * sizes.head_dim}, what a key/value head caches")
    configs = {"mla": make_config("mla", sizes), "gqa": make_config("gqa", sizes, heads)}
    configs["mha"] = make_config("mha", sizes)
    for name, config in list(configs.items()):
        torch.manual_seed(0)
        config.tie_word_embeddings = True
        GQAForCausalLM(config).save_pretrained(folder / name)
        if name != "mla":
            export_checkpoint(folder / name, folder / f"{name}-llama")
            configs[f"{name}-llama"] = config
    return configs


def gflop(config, arguments: ServingArguments, requests: int) -> float:
    """What the requests take: their prompts, and each new token after the first from a cache of mean length."""
    length = arguments.prompt_tokens + arguments.new_tokens // 2
    decoded = (arguments.new_tokens - 1) * decode_flops(config, requests, length)
    return (prefill_flops(config, requests, arguments.prompt_tokens) + decoded) / 1e9


def measure(workers: dict[str, Worker], arguments: ServingArguments, requests: int, rounds: int) -> dict[str, Any]:
    """Seconds of each system: of whole requests in each round, and of their prompts alone, of up to 8 requests."""
    found: dict[str, Any] = {name: {"whole": []} for name in workers}
    job = {"requests": requests, "prompt_tokens": arguments.prompt_tokens}
    for seed in range(rounds):
        for name, worker in workers.items():
            seconds = worker.seconds(**job, seed=1000 * requests + seed, new_tokens=arguments.new_tokens)
            found[name]["whole"].append(seconds)
            print(f"{requests} requests, {name}: {seconds:.1f} s", flush=True)
    for name, worker in workers.items():
        few = min(requests, 8)
        found[name]["prompts"] = worker.seconds(**job | {"requests": few}, seed=1000 * requests + rounds, new_tokens=1)
    return found


def make_row(name: str, config, worker: Worker, times: dict, found: dict, arguments: ServingArguments, requests: int):
    """One row: rates, and how many times as fast as the baseline; above 1 is faster."""
    seconds = statistics.median(times["whole"])
    row = {
        "system": name,
        "requests": requests,
        "rounds": len(times["whole"]),
        "bytes_per_token": worker.bytes_per_token,
        "parameters": count_parameters(config),
        "room": worker.room,
        "fit": worker.room // (arguments.prompt_tokens + arguments.new_tokens),
        "seconds": seconds,
        "requests_per_second": requests / seconds,
        "tokens_per_second": requests * arguments.new_tokens / seconds,
        "prompts_seconds": times["prompts"],
        "gflop": gflop(config, arguments, requests),
    }
    if BASELINE in found:
        theirs = found[BASELINE]
        ratios = [their / our for their, our in zip(theirs["whole"], times["whole"], strict=True)]
        row |= {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
        row["prompts_ratio"] = theirs["prompts"] / times["prompts"]
    return row


def main(arguments: ServingArguments, sizes: ServingSizes) -> None:
    machine = describe_machine("cpu", [getattr(torch, arguments.dtype)])
    print_machine(machine)
    unknown = set(arguments.systems) - set(SYSTEMS)
    if unknown:
        raise SystemExit(f"no system is called {', '.join(sorted(unknown))}: choose of {'; '.join(SYSTEMS)}")
    rows, workers = [], {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        configs = make_models(sizes, folder)
        options = {
            "vocab_size": sizes.vocab_size,
            "dtype": arguments.dtype,
            "max_tokens": arguments.prompt_tokens + arguments.new_tokens,
            "cache_bytes": int(arguments.cache_gib * 2**30),
            "requests": max(arguments.requests),
            "batch_tokens": arguments.batch_tokens,
            "eager": arguments.eager,
        }
        try:
            for name in arguments.systems:
                model, engine, variables = SYSTEMS[name]
                options |= {"model": str(folder / model), "engine": engine, "trust": variables is WITHOUT_PLUGIN}
                workers[name] = Worker(name, folder, options, variables)
            for worker in workers.values():
                worker.start()
            for requests, rounds in zip(arguments.requests, arguments.rounds, strict=True):
                found = measure(workers, arguments, requests, rounds)
                for name, times in found.items():
                    config = configs[SYSTEMS[name][0]]
                    rows.append(make_row(name, config, workers[name], times, found, arguments, requests))
                save(arguments.output, "serving", " ".join(sys.argv), machine, sizes=vars(sizes), rows=rows)
        finally:
            for worker in workers.values():
                worker.stop()
    print_table(f"{arguments.prompt_tokens} + {arguments.new_tokens} tokens a request", rows, COLUMNS)


if __name__ == "__main__":
    main(*parse_arguments(ServingArguments, ServingSizes))
