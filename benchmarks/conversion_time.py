"""How long the conversion of a model of a billion parameters takes, with random weights in the shape of Llama 3.2 1B.

python -m benchmarks.conversion_time
"""

import argparse
import sys
import time
from typing import Any

import torch
from transformers import set_seed

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.conversion import convert_model, target_config

from .measure import describe_machine, peak_bytes, reset_peak
from .report import print_machine, print_table, save

SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}
TARGETS: dict[str, dict[str, Any]] = {
    "GQA-8 to GQA-4": {"attention_kind": "gqa", "num_key_value_heads": 4},
    "GQA-8 to MLA, a quarter": {"attention_kind": "mla", "cache_size": 256},
}
COLUMNS = {
    "target": "",
    "method": "",
    "calibration_tokens": ",",
    "minutes": ".1f",
    "gib_of_new_attention": ".1f",
    "gib_beside_source_and_result": ".1f",
}


def new_bytes(source: GQAForCausalLM, result: GQAForCausalLM) -> int:
    """Bytes of the result's parameters that it does not share with the source."""
    shared = {parameter.data_ptr() for parameter in source.parameters()}
    return sum(x.nbytes for x in result.parameters() if x.data_ptr() not in shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, default=8, help="batches of calibration text; a quarter selects")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch; the command's default")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row; the command's default")
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    parser.add_argument("--methods", nargs="+", default=["lowrank", "auto"])
    parser.add_argument("--output", default="benchmarks/results")
    arguments = parser.parse_args()
    machine = describe_machine(arguments.device, [torch.float32, torch.bfloat16])
    print_machine(machine)
    set_seed(0)
    with torch.device(arguments.device):
        model = GQAForCausalLM(GQAConfig(**SHAPE)).to(getattr(torch, arguments.dtype)).eval()
    shape = (arguments.batches, arguments.rows, arguments.tokens)
    text = [{"input_ids": ids} for ids in torch.randint(SHAPE["vocab_size"], shape)]
    print(f"{model.num_parameters() / 1e9:.2f}B parameters, {arguments.dtype}")
    rows = []
    for target in arguments.targets:
        for method in arguments.methods:
            held, begin = reset_peak(arguments.device), time.perf_counter()
            shared: dict[str, Any] = {"divide_cache": True, "share_weights": True}  # as the command does
            wanted = target_config(model.config, **TARGETS[target])
            result, _ = convert_model(model, wanted, text, method=method, **shared)
            minutes, peak = (time.perf_counter() - begin) / 60, peak_bytes(arguments.device) - held
            row = {"target": target, "method": method, "calibration_tokens": text[0]["input_ids"].numel() * len(text)}
            row |= {"minutes": minutes, "gib_of_new_attention": new_bytes(model, result) / 2**30}
            rows.append(row | {"gib_beside_source_and_result": peak / 2**30 - row["gib_of_new_attention"]})
            print(rows[-1], flush=True)
    print_table("Time of a conversion", rows, COLUMNS)
    command = " ".join(["python -m benchmarks.conversion_time", *sys.argv[1:]])
    save(arguments.output, "conversion_time", command, machine, rows=rows)


if __name__ == "__main__":
    main()
