"""Models of every kind, in sizes that vLLM's attention on a CPU takes, and the programs that serve them.

vLLM sets its process up for one model, so each is served in a process of its own, which `worker.py` forks.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from modeling_gqa import GQAConfig, GQAForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 576,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = {"attention_kind": "gqa", "num_key_value_heads": 2}
MLA: dict[str, Any] = {
    "attention_kind": "mla",
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
ALL_HEADS = {"qk_norm": True, "qk_norm_span": "all_heads"}
LARGE = {"attention_kind": "mla", "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # 576 numbers, as in DeepSeek's models
UNROTATED: dict[str, Any] = {"rope_frequency_indices": [], "rope_frequency_dim": 64}
# Queries that are scaled by their position, from the 16th on.
SCALED = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
MULTIPLIERS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0}
GEMMA: dict[str, Any] = {
    **{"norm_position": "both", "qk_norm": True, "zero_centered_norms": True, "scale_embeddings": True},
    "hidden_act": "gelu_pytorch_tanh",
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "mha": {"attention_kind": "mha"},
    "mqa": {"attention_kind": "mqa"},
    "gqa": GQA,
    "gqa-norm-bias": {**GQA, "qk_norm": True, "attention_bias": True},
    "gqa-multipliers-tied": {**GQA, **MULTIPLIERS, "tie_word_embeddings": True},
    "mla-multipliers": {**MLA, **MULTIPLIERS},
    "gqa-scaled": {**GQA, "rope_parameters": SCALED},
    "mla-scaled": {**MLA, "rope_parameters": SCALED},
    "gqa-unrotated": {**GQA, "per_layer_config": {1: UNROTATED, 3: UNROTATED}},
    "mla-unrotated": {**MLA, "per_layer_config": {i: {**UNROTATED, "qk_rope_head_dim": 0} for i in (1, 3)}},
    "mla-all-unrotated": {**MLA, **UNROTATED, "qk_nope_head_dim": 64, "qk_rope_head_dim": 0, "latent_norm": False},
    "gqa-partial": {**GQA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "gqa-window-tied": {**GQA, "sliding_window": 16, "tie_word_embeddings": True},
    "grouped-mixed": {**GQA, "per_layer_config": {0: {"attention_kind": "mha"}, 2: {"attention_kind": "mqa"}}},
    "mla": MLA,
    "mla-576": LARGE,
    "mla-q-lora": {**MLA, "q_lora_rank": 96},
    "mla-key-mean": {
        **MLA,
        "latent_norm": False,
        "rope_interleave": False,
        "rope_frequency_dim": 64,
        "rope_frequency_indices": [index % 32 for index in range(20, 36)],
        "qk_nope_head_dim": 64,
        "key_mean": True,
    },
    "mla-qk-norm": {**MLA, "qk_norm": True, "qk_norm_head_dim": 64, "qk_norm_key_value_heads": 2},
    "mla-window": {**MLA, "sliding_window": 16},
    "gqa-olmo": {**GQA, **ALL_HEADS, **WINDOWS, "norm_position": "after"},
    "gqa-gemma": {**GQA, **GEMMA, **WINDOWS},
    "mla-gemma": {**MLA, **GEMMA, "qk_norm_head_dim": 64, "qk_norm_key_value_heads": 2},
    "mla-olmo": {
        **MLA,
        **ALL_HEADS,
        "norm_position": "both",
        "qk_norm_head_dim": 64,
        "qk_norm_key_value_heads": 2,
    },
    "mla-ranks": {
        **MLA,
        "latent_norm": False,
        "per_layer_config": {0: {"kv_lora_rank": 64}, 2: {"kv_lora_rank": 200, "qk_rope_head_dim": 16}},
    },
    "all-mixed": {
        **GQA,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "per_layer_config": {0: LARGE, 2: {"attention_kind": "mha"}, 3: MLA},
    },
}
TIMEOUT = 200
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",  # so that two requests of different lengths attend in one product
    "OMP_WAIT_POLICY": "passive",  # threads that spin take the cores that other test processes and ranks need
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def save_model(name: str, directory: Path, **overrides) -> Path:
    """Save the model `name` of `MODELS` with seeded weights in `directory`."""
    torch.manual_seed(0)
    model = GQAForCausalLM(GQAConfig(**{**SIZES, **MODELS[name], **overrides}))
    for key, parameter in model.named_parameters():
        # Zeros, as they begin: a mean key, and norms that multiply by 1 + weight.
        if key.endswith("key_mean.bias") or (model.config.zero_centered_norms and parameter.ndim == 1):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model.save_pretrained(directory)
    return directory


def draw_prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def generate(directory: Path, prompts: list[list[int]], new_tokens: int, loader=GQAForCausalLM) -> list[list[int]]:
    """Tokens that transformers generates greedily in float32, prompt by prompt; `loader` is the model's class."""
    model: Any = loader.from_pretrained(directory, dtype=torch.float32)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


class Worker:
    """The program `worker.py`, which serves one model after the other."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.program = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "worker.py"],
            env={**os.environ, **VARIABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # so that what a job has started can be ended with it
        )

    def printed(self, job: dict[str, Any]) -> str:
        """What the job prints.

        Raises:
            TimeoutError: it took longer than `TIMEOUT` seconds; it and the program are ended.
        """
        start = self.log.seek(0, os.SEEK_END)
        self.program.stdin.write(json.dumps(job) + "\n")
        self.program.stdin.flush()
        if not select.select([self.program.stdout], [], [], TIMEOUT)[0]:
            os.killpg(self.program.pid, signal.SIGKILL)
            running.cache_clear()
            raise TimeoutError(f"no answer in {TIMEOUT} s: {job}")
        if self.program.stdout.readline() != "END\n":
            running.cache_clear()
        self.log.seek(start)
        return self.log.read()


@cache
def running() -> Worker:
    """The worker of this process, which ends with it."""
    return Worker()


def serve(directory: Path, prompts: list[list[int]], new_tokens: int = 0, variables=None, **options) -> dict[str, Any]:
    """What vLLM answers: see `worker.py`; `variables` are of the environment, `options` of vLLM's `LLM`.

    Raises:
        RuntimeError: it printed no answer; the message is the end of what it printed.
    """
    job = {"model": str(directory), "prompts": prompts, "new_tokens": new_tokens, "options": options}
    return find_answer(running().printed(job | {"variables": variables or {}}))


def answer_of(program: str, *arguments: str) -> dict[str, Any]:
    """What a program of this folder prints behind `ANSWER`.

    Raises:
        RuntimeError: it printed no answer; the message is the end of what it printed.
    """
    ran = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *arguments],
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return find_answer(ran.stdout + ran.stderr)


def find_answer(printed: str) -> dict[str, Any]:
    answer = [line for line in printed.splitlines() if line.startswith("ANSWER ")]
    if not answer:
        raise RuntimeError(printed[-6000:])
    return json.loads(answer[0].removeprefix("ANSWER "))
