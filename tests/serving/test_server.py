"""vLLM's OpenAI-compatible server answers for a pretrained and a converted model, tokenizers included."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import VARIABLES
from served import serving
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
    run("-m", "modeling_gqa_cli", "pretrain", "tiny", *OPTIONS, *data, *output)
    (folder / "run" / "final").rename(folder / "gqa")
    sizes = ["--attention-kind", "mla", "--kv-lora-rank", "48", "--qk-rope-head-dim", "16"]
    calibration = ["--text", folder / "text", "--calibration-tokens", "2048"]
    run("-m", "modeling_gqa_cli", "convert", folder / "gqa", folder / "mla", *sizes, *calibration)
    return folder


@pytest.fixture(scope="module", params=["gqa", "mla"])
def served(request, folder):
    """A client of a server of one model, and the model's folder."""
    model = folder / request.param
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    options = ["--dtype", "float32", "--enforce-eager"]
    variables = {**VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with serving([*command, *options], folder / f"{request.param}.log", variables) as (client, _):
        yield client, model


def expected(model: Path, prompt: str | list[dict[str, str]], new_tokens: int = 12) -> str:
    """The text that transformers generates greedily after a text, or after the messages of a chat."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True)
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = loaded.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_completions(served):
    client, model = served
    text = (model.parent / "text" / "0.txt").read_text()[:80]
    answer = client.completions.create(model=str(model), prompt=text, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected(model, text) != ""
    assert answer.usage.completion_tokens == 12


def test_chat_and_streamed_chat(served):
    """What follows the prompt of the pretrained tokenizer's chat template."""
    client, model = served
    texts = [(model.parent / "text" / f"{number}.txt").read_text()[:60] for number in range(2)]
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]
    request = {"model": str(model), "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**request).choices[0].message.content
    assert whole == expected(model, messages) != ""
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(parts) == whole and len(parts) > 3
