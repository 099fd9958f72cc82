"""`modeling-gqa serve` and `chat`: transformers' commands, through the openai client, for every kind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import CacheNotFound
from openai import NotFoundError
from served import serving
from small_models import MODELS, SIZES, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from modeling_gqa import GQAForCausalLM
from modeling_gqa_cli.serving import served_models

COMMAND = [sys.executable, "-m", "modeling_gqa_cli"]
BATCHING = ["--continuous-batching", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "64"]
TEXT = "w31 w7 w60 w15 w92"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # of a model that knows no roles


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A checkpoint of every small model, with a tokenizer of a word for each token, so that any tokens are text."""
    folder = tmp_path_factory.mktemp("served")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", chat_template=TEMPLATE)
    for name in MODELS:
        make_model(name).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module", params=["plain", "batched"])
def client(request, checkpoints):
    """A client of one server, which loads each model when it is asked for it."""
    options = BATCHING if request.param == "batched" else []
    command = [*COMMAND, "serve", "--device", "cpu", *options]
    log = checkpoints / f"{request.param}.log"
    # As where nothing was ever fetched from the Hub.
    variables = {"OMP_NUM_THREADS": "1", "HF_HOME": str(checkpoints / "no-cache")}
    with serving(command, log, variables) as (client, server):
        yield client
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == -signal.SIGINT and "Traceback" not in log.read_text()


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_answers(name, client, checkpoints):
    """Chat, streamed chat and completions, with the tokens of `generate`."""
    directory = checkpoints / name
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = GQAForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": TEXT}]
    inputs = tokenizer(f"{TEXT}\n", return_tensors="pt", return_token_type_ids=False)
    new = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    request = {"model": str(directory), "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **request)
    assert answer.choices[0].message.content == expected != ""
    stream = client.chat.completions.create(messages=messages, stream=True, **request)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == expected
    assert client.completions.create(prompt=f"{TEXT}\n", **request).choices[0].text == expected
    assert str(directory) in [model.id for model in client.models.list()]


def test_chat_asks_the_server(client, checkpoints):
    """`chat` speaks with the server until it is told to stop."""
    ran = subprocess.run(
        [*COMMAND, "chat", checkpoints / "gqa", str(client.base_url).removesuffix("/v1/"), "max_new_tokens=4"],
        env={**os.environ, "HF_HUB_OFFLINE": "0"},  # offline, the Hub's client speaks with no server
        # N: do not go on behind the limit of tokens. An answer is drawn and may end before: then N is the next message,
        # and the first !exit says no.
        input=f"{TEXT}\nN\n!exit\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and "tokens in" in ran.stdout, ran.stdout + ran.stderr


def test_a_model_that_is_not_there_is_not_found(client, checkpoints):
    for name in (f"{checkpoints}/gqqa", "org/nothing"):
        with pytest.raises(NotFoundError) as raised:
            client.completions.create(model=name, prompt=TEXT)
        assert name in raised.value.response.json()["detail"]


def test_the_model_that_a_server_begins_with_is_listed(monkeypatch):
    class Manager:
        force_model, loaded_models = "runs/mla", {"runs/mla@main": None, "org/name@v2": None}

        @staticmethod
        def get_gen_models(cache_dir=None):
            raise CacheNotFound("", cache_dir="")

    models = served_models(Manager)()
    assert [model["id"] for model in models.get_gen_models()] == ["runs/mla", "org/name@v2"]
    cached = {"id": "runs/mla", "object": "model", "owned_by": "runs", "created": 1}
    monkeypatch.setattr(Manager, "get_gen_models", staticmethod(lambda cache_dir=None: [cached]))
    assert [(model["id"], model["owned_by"]) for model in models.get_gen_models()] == [
        ("org/name@v2", ""),
        ("runs/mla", "runs"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "{folder}/gqqa"], "{folder}/gqqa does not exist"),
        (["chat", "{folder}/gqa"], "modeling-gqa serve"),
        (["chat", "{folder}/gqa", "http://127.0.0.1:9"], "refused"),
    ],
)
def test_no_model_or_no_server_is_one_line(arguments, said, checkpoints):
    ran = subprocess.run(
        [*COMMAND, *(argument.format(folder=checkpoints) for argument in arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
        input="w3\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert ran.returncode == 1 and "Traceback" not in ran.stderr and len(errors) == 1, ran.stderr
    assert said.format(folder=checkpoints) in errors[0]


def test_without_the_packages_they_are_named():
    code = "import sys; sys.modules['uvicorn'] = None; from modeling_gqa_cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and "pip install '.[serving]'" in ran.stderr and "Traceback" not in ran.stderr
