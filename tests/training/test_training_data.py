"""Sources, split, packing, tokenizer, baseline, and the errors that come before training."""

import json
import math
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from training_texts import MODEL, make_texts
from transformers import EvalPrediction

from training import data
from training.baseline import bigram_loss
from training.pretrain import pretrain
from training.recipe import Recipe, RecipeError
from training.tokenizer import train_tokenizer
from training.trainer import row_losses, sum_losses

TEXTS = make_texts(40)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def open_source(tmp_path, *files, **fields) -> data.Source:
    return data.open_source(Recipe(output_dir=str(tmp_path), data_files=[str(file) for file in files], **fields))


def texts(source: data.Source) -> list[str]:
    return ["".join(document.pieces()) for document in source.documents()]


def whole(documents: list) -> list[tuple]:
    """Documents none of which comes in pieces."""
    return [(document, True) for document in documents]


def write_rows(path: Path) -> Path:
    rows = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_standard_library_without_tests_and_packages(tmp_path):
    source = data.open_source(Recipe(output_dir=str(tmp_path)))
    documents = {document.path: text for document, text in zip(source.documents(), texts(source), strict=True)}
    assert source.license == "PSF-2.0"
    assert {"argparse.py", "asyncio/tasks.py"} <= set(documents)
    assert documents["argparse.py"] == (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    assert not [key for key in documents if "/test/" in f"/{key}" or "/tests/" in f"/{key}" or "-packages" in key]
    assert 5e6 < sum(map(len, documents.values())) < 30e6


def test_formats_hold_the_same_text(tmp_path, corpus):
    jsonl, parquet = write_rows(tmp_path / "rows.jsonl"), write_rows(tmp_path / "rows.parquet")
    sources = [open_source(tmp_path, *files) for files in ([corpus], [f"{corpus}/*.txt"], [jsonl], [parquet])]
    for source in sources:
        assert texts(source) == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_split_is_disjoint_complete_and_repeatable(tmp_path, corpus, streaming):
    fields = {"validation_fraction": 0.2, "streaming": streaming, "max_steps": 1}
    split = data.split_source(open_source(tmp_path, corpus), Recipe(output_dir=str(tmp_path), **fields))
    train, validation = list(split.documents("train")), list(split.documents("validation"))
    assert sorted(train + validation) == sorted(TEXTS) and not set(train) & set(validation)
    assert streaming or len(validation) == 8
    assert 2 <= len(validation) <= 16
    assert list(split.documents("validation")) == validation


def test_repeated_rows_fall_in_one_part(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 2))
    split = data.split_source(open_source(tmp_path, path), Recipe(output_dir=str(tmp_path), validation_fraction=0.3))
    assert not set(split.documents("train")) & set(split.documents("validation"))


def test_single_document_gives_its_end(tmp_path):
    (tmp_path / "one.txt").write_text("".join(TEXTS))
    split = data.split_source(open_source(tmp_path, tmp_path / "one.txt"), Recipe(output_dir=str(tmp_path)))
    (train,), (validation,) = split.documents("train"), split.documents("validation")
    assert train + validation == "".join(TEXTS)
    assert len(validation) == pytest.approx(0.05 * len("".join(TEXTS)), abs=1)


def test_packing_keeps_documents_apart():
    documents = [[10, 11, 0], [20, 0], [*range(30, 40), 0], [50, 51, 52, 53, 0]]
    blocks = list(data.pack(whole(documents), 7))
    assert len(blocks) == 3
    flat = [token for document in documents for token in document]
    assert np.concatenate([ids for ids, _ in blocks]).tolist() == flat[:21]
    assert blocks[0][1].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert blocks[1][1].tolist() == [0, 1, 2, 3, 4, 5, 6]  # a document goes on in a new block
    assert blocks[2][1].tolist() == [0, 1, 0, 1, 2, 3, 4]
    example = data.example(blocks[0])
    assert example["labels"].tolist() == [-100, 11, 0, -100, 0, -100, 31]
    assert example["input_ids"].tolist() == [10, 11, 0, 20, 0, 30, 31]


def test_packing_any_lengths():
    draw = np.random.default_rng(0)
    documents = [[n + 1] * int(size) for n, size in enumerate(draw.integers(1, 30, 50))]
    blocks = np.stack(list(data.pack(whole(documents), 16)))
    flat = np.concatenate(documents)
    assert blocks[:, 0].ravel().tolist() == flat[: blocks[:, 0].size].tolist()
    for ids, positions in blocks:
        # Within a block a position restarts exactly where the document changes.
        assert positions[0] == 0
        for (a, b), (p, q) in zip(pairwise(ids), pairwise(positions), strict=True):
            assert q == (p + 1 if a == b else 0)


def test_streamed_blocks_equal_stored_ones(tmp_path, corpus, tokenizer):
    recipe = Recipe(
        output_dir=str(tmp_path),
        streaming=True,
        max_steps=1,
        sequence_length=32,
        max_eval_blocks=3,
        validation_fraction=0.3,
    )
    split = data.split_source(open_source(tmp_path, corpus), recipe)
    streamed = list(data.StreamedBlocks(split, tokenizer, 32))
    stored = list(data.pack(data.tokenize(split.pieces("train"), tokenizer), 32))
    assert len(streamed) == len(stored) > 10
    assert torch.equal(streamed[7]["input_ids"], data.example(stored[7])["input_ids"])
    data.write_blocks(split, tokenizer, recipe, tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["split.json", "validation.npy"]


def test_validation_is_spread_over_all_documents(tmp_path, corpus, tokenizer):
    recipe = Recipe(output_dir=str(tmp_path), sequence_length=32, max_eval_blocks=6, validation_fraction=0.3)
    split = data.split_source(open_source(tmp_path, corpus), recipe)
    data.write_blocks(split, tokenizer, recipe, tmp_path / "data")
    blocks = data.load_blocks(tmp_path / "data", "validation")
    every = list(data.pack(data.tokenize(split.pieces("validation"), tokenizer), 32))
    assert len(blocks) == 6 < len(every)
    assert np.array_equal(blocks.blocks[-1], every[5 * len(every) // 6])


def test_tokenizer_is_lossless_and_repeatable(tokenizer):
    text = "def f(x):\n\treturn 'ß — 漢字 🙂'  # \x01\r\n    "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 300 and tokenizer.eos_token_id != tokenizer.pad_token_id
    assert train_tokenizer(TEXTS, 300).get_vocab() == tokenizer.get_vocab()
    documents = list(data.tokenize(whole(TEXTS), tokenizer))
    assert len(documents) == 40 and all(ids[-1] == tokenizer.eos_token_id and ends for ids, ends in documents)


def test_bigram_loss_by_counting():
    draw = np.random.default_rng(0)
    blocks = [np.stack([draw.integers(0, 5, (n, 8)), np.tile([0, 1, 2, 0, 1, 2, 3, 4], (n, 1))], 1) for n in (30, 9)]
    train, validation = (data.PackedBlocks(part) for part in blocks)

    def pairs(part):
        rows = (
            (a, b, p) for ids, positions in part.blocks for a, b, p in zip(ids, ids[1:], positions[1:], strict=False)
        )
        return [(int(a), int(b)) for a, b, p in rows if p]

    joint, context, unigram = (
        Counter(pairs(train)),
        Counter(a for a, _ in pairs(train)),
        Counter(b for _, b in pairs(train)),
    )
    assert sum(joint.values()) == 30 * 6  # two of eight tokens begin a document

    def loss(k):
        total = 0.0
        for a, b in pairs(validation):
            types = len({y for x, y in joint if x == a})
            weight = context[a] / (context[a] + k * types)
            smoothed = (unigram[b] + 1) / (sum(unigram.values()) + 6)
            total -= math.log(weight * joint[a, b] / context[a] + (1 - weight) * smoothed)
        return total / len(pairs(validation))

    assert bigram_loss(train, validation, 6) == pytest.approx(min(map(loss, (0.1, 0.2, 0.5, 1.0, 2.0, 5.0))), abs=1e-9)


def test_validation_loss_counts_every_token_alike():
    logits, labels = torch.randn(3, 7, 11), torch.randint(0, 11, (3, 7))
    labels[0, 2:] = -100
    measured = sum_losses(EvalPrediction(row_losses(logits, labels).numpy(), labels.numpy()))["token_loss"]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    assert measured == pytest.approx(expected.item(), abs=1e-6)


BAD_FILES = {
    "missing": (None, "nothing to read at"),
    "empty": (b"", "is empty"),
    "blank": (b" \n ", "holds no text"),
    "binary": (b"\x7fELF\0\xff\xfe", "is not UTF-8 text"),
    "short": (b"too little", "is too short"),
    "broken.jsonl": (b'{"text": "a"}\n{"text"', "line 2 is not JSON"),
    "column.jsonl": (b'{"content": "a"}', "no text in column 'text' (found: content)"),
    "list.jsonl": (b"[1, 2]", "no text in column 'text' (found: list)"),
    "broken.parquet": (b"PAR1 no", "is not a Parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_text_ends_in_one_line(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as error:
        pretrain(arguments(tmp_path, data_files=[str(tmp_path / name)]))
    assert message in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_tokenizer_must_fit(tmp_path, corpus, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fields = {"data_files": [str(corpus)], "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(RecipeError, match="300 tokens and the model's vocab_size is 290"):
        pretrain(arguments(tmp_path, **fields, model_overrides={**MODEL, "vocab_size": 290}))
    with pytest.raises(RecipeError, match="needs at least 258"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], model_overrides={**MODEL, "vocab_size": 200}))
    with pytest.raises(RecipeError, match="cannot load the tokenizer nowhere"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], tokenizer="nowhere"))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(RecipeError, match="no end-of-text token"):
        pretrain(arguments(tmp_path, **fields))


def test_hub_data_set_out_of_reach(tmp_path):
    with pytest.raises(RecipeError, match="cannot load the Hub data set nobody/nothing"):
        pretrain(arguments(tmp_path, dataset_name="nobody/nothing"))


def test_upload_needs_a_token(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("training.publish.get_token", lambda: None)
    with pytest.raises(RecipeError, match="hf auth login"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], push_to_hub=True))


def arguments(tmp_path: Path, **values) -> list[str]:
    path = tmp_path / "recipe.yaml"
    run = {"preset": "tiny-gqa", "output_dir": str(tmp_path / "run"), "sequence_length": 64, "max_steps": 1}
    path.write_text(yaml.safe_dump({**run, "model_overrides": {**MODEL, "num_hidden_layers": 1}, **values}))
    return [str(path)]
