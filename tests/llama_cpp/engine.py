"""llama.cpp's server in this process, by the package xllamacpp: a text's tokens, and the tokens it generates."""

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp


class Engine:
    """llama.cpp with a GGUF file, computing with a cache in float32."""

    def __init__(self, path: Path, length: int) -> None:
        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.port = str(path), length, 0
        options.n_parallel, options.warmup, options.fit_params = 1, False, False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(options)

    def ask(self, path: str, **body: Any) -> Any:
        request = Request(
            f"{self.server.listening_address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def tokenize(self, text: str) -> list[int]:
        return self.ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def generate(self, text: str, count: int) -> tuple[list[int], str]:
        """Return the greedy tokens after `text`, without the one that ends it, and their text."""
        options = {"n_predict": count, "temperature": 0, "samplers": ["top_k"], "top_k": 1, "return_tokens": True}
        answer = self.ask("completion", prompt=text, cache_prompt=False, **options)
        return answer["tokens"], answer["content"]
