"""Serve models by vLLM: a job as a line of JSON on standard input, `END` on standard output when it is done.

vLLM sets its process up for one model, so each job runs in a process of its own. That process is forked from this one,
which has imported vLLM and nothing of ours: importing takes ten seconds, more than serving a small model. What a job
prints goes to standard error, and its answer behind `ANSWER`.

The answer holds each prompt's tokens, the number of its tokens that were found in the cache, the log-probability of
each prompt token after the first (where `prompt_logprobs` is asked for), and each layer's cache: the class of vLLM's
specification and the bytes of a token.
"""

import gc
import json
import multiprocessing
import os
import sys
from typing import Any

# Imported here for the processes that are forked.
import compressed_tensors.compressors  # noqa: F401
import vllm.model_executor.models.transformers
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    # A job that turned remote code or the plugin off would find the classes here.
    assert "modeling_gqa" not in sys.modules
    gc.collect()
    gc.freeze()  # vLLM collects several times, and would look through all modules each time
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = fork.Process(target=serve, args=[json.loads(line)])
        process.start()
        process.join()
        print("END", flush=True)


def serve(job: dict[str, Any]) -> None:
    os.dup2(2, 1)
    os.environ.update(job["variables"])
    options = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
    options |= job["options"]
    adapter = options.pop("adapter", None)
    scored = options.pop("prompt_logprobs", None)
    batches = [[prompt] for prompt in job["prompts"]] if options.pop("one_by_one", False) else [job["prompts"]]
    model = LLM(job["model"], **options)
    tokens = job["new_tokens"]
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max(tokens, 1),
        min_tokens=max(tokens, 1),
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=scored,
    )
    outputs = [
        output
        for batch in batches
        for output in model.generate(
            [{"prompt_token_ids": prompt} for prompt in batch],
            sampling,
            use_tqdm=False,
            lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
        )
    ]
    caches = model.collective_rpc("get_kv_cache_spec")
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "caches": [
            {name: [type(spec).__name__, spec.page_size_bytes / spec.block_size] for name, spec in rank.items()}
            for rank in caches
        ],
    }
    if scored is not None:
        answer["logprobs"] = [
            [place[token].logprob for place, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
            for output, prompt in zip(outputs, job["prompts"], strict=True)
        ]
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
