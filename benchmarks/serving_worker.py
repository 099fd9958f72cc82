"""Serve one model in this process: a job is a line of JSON on standard input, its answer a line of standard output.

`benchmarks/serving.py` starts one for each system. The first answer says how many bytes a token takes in the cache and
how many tokens it has room for; each other one gives the seconds from the first request to the last token.
"""

import dataclasses
import json
import sys
import time
from typing import Any

import torch


def main() -> None:
    options = json.loads(sys.argv[1])
    engine = ENGINES[options["engine"]](options)
    answer(room=engine.room, bytes_per_token=engine.bytes_per_token)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = draw_prompts(options["vocab_size"], job["requests"], job["prompt_tokens"], job["seed"])
        begin = time.perf_counter()
        new = engine.serve(prompts, job["new_tokens"])
        seconds = time.perf_counter() - begin
        if any(len(tokens) != job["new_tokens"] for tokens in new):
            raise RuntimeError(f"asked for {job['new_tokens']} tokens, got {sorted({len(tokens) for tokens in new})}")
        answer(seconds=seconds)


def answer(**found) -> None:
    print("ANSWER", json.dumps(found), flush=True)


def draw_prompts(vocab_size: int, requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Random prompts, so that no two share a prefix."""
    return torch.randint(3, vocab_size, (requests, tokens), generator=torch.Generator().manual_seed(seed)).tolist()


class VLLM:
    """vLLM's engine in this process; `room` and `bytes_per_token` are what vLLM itself says."""

    def __init__(self, options: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(
            options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_tokens"],
            kv_cache_memory_bytes=options["cache_bytes"],
            max_num_seqs=options["requests"],
            max_num_batched_tokens=options["batch_tokens"],
            trust_remote_code=options["trust"],
            enforce_eager=options["eager"],
            skip_tokenizer_init=True,
        )
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.room = cache.num_gpu_blocks * cache.block_size
        layers = self.llm.collective_rpc("get_kv_cache_spec")[0].values()
        self.bytes_per_token = sum(layer.page_size_bytes // layer.block_size for layer in layers)

    def serve(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(inputs, sampling, use_tqdm=False)]


class Transformers:
    """transformers' `generate`, in batches of as many requests as the cache has room for."""

    def __init__(self, options: dict[str, Any]):
        from transformers import AutoModelForCausalLM

        import modeling_gqa  # noqa: F401
        from modeling_gqa.costs import cache_bytes_per_token

        dtype = getattr(torch, options["dtype"])
        self.model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
        self.options = options
        config: Any = self.model.config
        self.bytes_per_token = cache_bytes_per_token(config, dtype)
        self.room = options["cache_bytes"] // self.bytes_per_token

    def serve(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        at_once = self.room // self.options["max_tokens"]
        config = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        new: list[list[int]] = []
        for start in range(0, len(prompts), at_once):
            inputs = torch.tensor(prompts[start : start + at_once])
            found: Any = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **config)
            new += found[:, inputs.shape[1] :].tolist()
        return new


class ContinuousBatching(Transformers):
    """transformers' `generate_batch`, whose paged cache has the same bytes."""

    page = 32

    def serve(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        batching: dict[str, Any] = {
            "page_size" if "page_size" in names else "block_size": self.page,  # as the release says
            "num_blocks": self.room // self.page,
            "max_batch_tokens": self.options["batch_tokens"],
        }
        done = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**batching),
            progress_bar=False,
        )
        return [output.generated_tokens for output in done.values()]


ENGINES: dict[str, Any] = {"vllm": VLLM, "generate": Transformers, "generate_batch": ContinuousBatching}

if __name__ == "__main__":
    main()
