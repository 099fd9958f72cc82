"""vLLM's OpenAI-compatible server answers for a pretrained and a converted model, tokenizers included."""

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import VARIABLES
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
# On a CPU vLLM takes heads of 32 numbers and more.
OPTIONS = ["--preset", "tiny-gqa", "--model-overrides", '{"num_attention_heads": 4}', "--max-steps", "80"]


def run(*command: str | Path) -> None:
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`gqa` pretrained on words for some seconds, and `mla` converted from it."""
    folder = tmp_path_factory.mktemp("server")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(60)]
    (folder / "text").mkdir()
    for number in range(40):
        text = " ".join(draw.choices(words, weights=range(1, 61), k=400))
        (folder / "text" / f"{number}.txt").write_text(text)
    data, output = ["--data-files", folder / "text"], ["--output-dir", folder / "run"]
    run("-m", "modeling_gqa.command_line", "pretrain", "tiny", *OPTIONS, *data, *output)
    (folder / "run" / "final").rename(folder / "gqa")
    sizes = ["--attention-kind", "mla", "--kv-lora-rank", "48", "--qk-rope-head-dim", "16"]
    calibration = ["--text", folder / "text", "--calibration-tokens", "2048"]
    run("-m", "modeling_gqa.command_line", "convert", folder / "gqa", folder / "mla", *sizes, *calibration)
    return folder


@pytest.fixture(scope="module", params=["gqa", "mla"])
def served(request, folder):
    """A client of a server of one model, and the model's folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = folder / request.param
    options = ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / f"{request.param}.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options],
        env={**os.environ, **VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        for _ in range(120):
            assert server.poll() is None, Path(log.name).read_text()[-6000:]
            try:
                client.models.list()
                break
            except Exception:
                time.sleep(1)
        yield client, model
    finally:
        server.terminate()
        server.wait(30)


def expected(model: Path, text: str, new_tokens: int = 12) -> str:
    """The text that transformers generates greedily after `text`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    ids = loaded.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_completions(served):
    client, model = served
    text = (model.parent / "text" / "0.txt").read_text()[:80]
    answer = client.completions.create(model=str(model), prompt=text, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected(model, text) != ""
    assert answer.usage.completion_tokens == 12


def test_chat_and_streamed_chat(served):
    """The pretrained tokenizer's chat template sets the texts of the messages under each other."""
    client, model = served
    texts = [(model.parent / "text" / f"{number}.txt").read_text()[:60] for number in range(2)]
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]
    request = {"model": str(model), "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**request).choices[0].message.content
    assert whole == expected(model, "".join(f"{text}\n" for text in texts)) != ""
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(parts) == whole and len(parts) > 3
