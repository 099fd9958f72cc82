"""Small random models with a tokenizer of bytes, and small files in the form of the yardsticks'."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_texts import in_order, sentence, tokenizer_of_bytes
from small_models import make_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {"vocab_size": 257, "max_position_embeddings": 512, "eos_token_id": 256, "bos_token_id": 256}


def learn_words(model: torch.nn.Module) -> None:
    """Train on words in their order, so that a model is right now and then."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(200):
        rows = [in_order(step + 4 * i, 20)[:64] for i in range(4)]
        ids = torch.tensor(tokenizer_of_bytes()(rows)["input_ids"])  # (4, 64)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.6:
            break
    model.eval()


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory) -> Path:
    """Folders `ours`, a GQA model of this package, and `llama`, one of transformers' own; they know the words."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 66,
        "intermediate_size": 58,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "head_dim": 12,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **SIZES, num_key_value_heads=2))
    for name, model in (("ours", make_model("gqa", **SIZES, initializer_range=0.02)), ("llama", llama)):
        learn_words(model)
        model.save_pretrained(root / name)
        tokenizer_of_bytes().save_pretrained(root / name)
    (root / "ours" / "README.md").write_text("---\nlicense: mit\ntags:\n- gqa\n---\n\n# Ours\n\nText.\n")
    return root


@pytest.fixture(scope="session")
def hellaswag() -> list[tuple[str, int, list[str]]]:
    """Context, index of the right ending, and endings whose lengths differ."""
    return [
        (f"Topic {i}: {sentence(i, 5)}.", i % 4, [sentence(10 * i + j, 1 + (i + 2 * j) % 5) + "." for j in range(4)])
        for i in range(12)
    ]


@pytest.fixture(scope="session")
def lambada() -> list[str]:
    return [in_order(i, 7) if i % 2 else sentence(i, 7) for i in range(12)]


@pytest.fixture(scope="session")
def pages() -> list[str]:
    """Articles of WikiText as its rows are: a heading, an empty row, paragraphs and a smaller heading."""
    return [
        f" = Title {i} = \n \n {sentence(i, 20)} @-@ {sentence(i + 9, 9)} . \n \n"
        f" = = Part = = \n \n {sentence(i, 12)} \n "
        for i in range(3)
    ]


@pytest.fixture(scope="session")
def problems() -> list[dict[str, str]]:
    """In HumanEval's form."""
    return [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def add{i}(a, b):\n",
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "entry_point": f"add{i}",
        }
        for i in range(3)
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory, hellaswag, lambada, pages, problems) -> Path:
    """The folder that `--data` names; WikiText's file has the line ends of Windows."""
    folder = tmp_path_factory.mktemp("data")
    lines = [line for context, right, endings in hellaswag for line in (context, str(right), *endings)]
    with bz2.open(folder / "hellaswag_val.txt.bz2", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    (folder / "lambada_openai_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lambada))
    rows = ["" if not row.strip() else row + "\n" for row in "\n".join([" ", *pages]).split("\n")]
    (folder / "wikitext2-raw-test.txt").write_bytes("\n\n".join(rows).replace("\n", "\r\n").encode())
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(problem) + "\n" for problem in problems))
    return folder
