"""Sources, split, packing, tokenizer, baseline, and the errors that come before training."""

import json
import math
import shutil
import sysconfig
import threading
from collections import Counter
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from training_texts import MODEL, make_texts
from transformers import EvalPrediction, PreTrainedTokenizerFast

from modeling_gqa import GQAConfig
from modeling_gqa.checkpoints.gguf_vocabulary import LLAMA3_WORDS
from modeling_gqa.data import blocks as data_blocks
from modeling_gqa.data import packing, reading
from modeling_gqa.data.blocks import (
    PackedBlocks,
    example,
    load_blocks,
    read_blocks,
    save_blocks,
    tokenize,
    write_blocks,
)
from modeling_gqa.data.packing import pack
from modeling_gqa.data.source import BOUNDARY, Source, cut_text, load_split, open_source, split_source
from modeling_gqa.data.tokenizer import LONGEST_WORD, check_tokenizer, train_tokenizer
from modeling_gqa.training.recipe import Recipe
from modeling_gqa.training.results import bigram_loss, bytes_per_token
from modeling_gqa.training.trainer import losses_of_sequences, mean_losses
from modeling_gqa_cli.errors import UserError
from training.pretrain import pretrain

TEXTS = make_texts(40)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def source_of(tmp_path, *files, **fields) -> Source:
    return open_source(Recipe(output_dir=str(tmp_path), data_files=[str(file) for file in files], **fields))


def texts(source: Source) -> list[str]:
    return ["".join(document()) for document in source.documents()]


def whole(documents: list) -> list[tuple]:
    """Documents none of which comes in pieces."""
    return [(document, True) for document in documents]


def test_standard_library_without_tests_and_packages(tmp_path):
    source = open_source(Recipe(output_dir=str(tmp_path)))
    found, library = set(texts(source)), Path(sysconfig.get_path("stdlib"))
    assert source.license == "PSF-2.0"
    for name, wanted in {"argparse.py": True, "asyncio/tasks.py": True, "test/test_argparse.py": False}.items():
        path = library / name
        assert not path.exists() or (path.read_text(encoding="utf-8") in found) == wanted
    assert 5e6 < sum(map(len, found)) < 30e6


@pytest.mark.parametrize("streaming", [False, True])
def test_split_is_disjoint_complete_and_repeatable(tmp_path, corpus, streaming):
    fields = {"validation_fraction": 0.2, "streaming": streaming, "max_steps": 1}
    split = split_source(source_of(tmp_path, corpus), Recipe(output_dir=str(tmp_path), **fields))
    train, validation = list(split.documents("train")), list(split.documents("validation"))
    assert sorted(train + validation) == sorted(TEXTS) and not set(train) & set(validation)
    assert streaming or len(validation) == 8
    assert 2 <= len(validation) <= 16
    assert list(split.documents("validation")) == validation


@pytest.mark.parametrize("streaming", [False, True])
def test_split_follows_the_content(tmp_path, corpus, streaming, monkeypatch):
    """Not how the path is written, nor where the file lies; equal files are on one side."""
    (tmp_path / "link").symlink_to(corpus)
    shutil.copytree(corpus, tmp_path / "copy")
    (tmp_path / "copy" / "again.txt").write_text(TEXTS[0])
    (tmp_path / "copy" / "rows.jsonl").write_text(json.dumps({"text": TEXTS[1]}))
    assert texts(source_of(tmp_path, f"{corpus}/*.txt")) == texts(source_of(tmp_path, corpus)) == TEXTS
    monkeypatch.chdir(corpus.parent)
    relative, dotted = Path(corpus.name), f"{corpus.name}/../{corpus.name}/*.txt"
    recipe = Recipe(output_dir=str(tmp_path), validation_fraction=0.3, streaming=streaming, max_steps=1)
    held_out = []
    for path in (corpus, relative, dotted, tmp_path / "link", tmp_path / "copy"):
        split = split_source(source_of(tmp_path, path), recipe)
        held_out.append(set(split.documents("validation")))
        assert not held_out[-1] & set(split.documents("train"))
    assert all(texts == held_out[0] for texts in held_out) and 0 < len(held_out[0]) < 40


def test_split_is_recorded(tmp_path, corpus, tokenizer):
    recipe = Recipe(output_dir=str(tmp_path), validation_fraction=0.3, sequence_length=32, streaming=True, max_steps=1)
    source = source_of(tmp_path, corpus)
    split = split_source(source, recipe)
    write_blocks(split, tokenizer, recipe, tmp_path / "data")
    assert load_split(source, tmp_path / "data") == split
    for damage in (b"", b"{}", b"[]", b'{"threshold": "moon", "cut": null}', b"\xff"):
        (tmp_path / "data" / "split.json").write_bytes(damage)
        with pytest.raises(UserError, match=r"split.json does not say which documents are held out"):
            load_split(source, tmp_path / "data")


@pytest.mark.parametrize("streaming", [False, True])
def test_single_document_gives_its_end(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 1000)  # the cut lies within a piece
    for name in ("one.txt", "two.txt"):  # equal, so one document
        (tmp_path / name).write_text("".join(TEXTS))
    recipe = Recipe(output_dir=str(tmp_path), streaming=streaming, max_steps=1)
    split = split_source(source_of(tmp_path, tmp_path), recipe)
    train, validation = ("".join(split.documents(part)) for part in ("train", "validation"))
    text = "".join(TEXTS)
    assert train == text[: len(train) // 2] * 2 and validation == text[-(len(validation) // 2) :] * 2
    assert len(train) + len(validation) == 2 * len(text)
    assert len(validation) == pytest.approx(0.1 * len(text), abs=2)


PARTS = [
    "a",
    "b\u00e9",
    " ",
    " ",
    "  ",
    "1",
    "_",
    ".",
    "'s",
    "<|",
    "\n",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\u3000",
    "漢",
    "\U0001f642",
]
WORDS = st.lists(st.sampled_from(PARTS), max_size=100).map("".join)


@settings(max_examples=200)
@given(text=WORDS, length=st.integers(1, 20), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_tokens_of_pieces_are_those_of_the_whole(tokenizers, text, length, sizes):
    """Wherever a text has a boundary, and however it was read."""
    pieces, read = [], 0
    for size in cycle(sizes):
        pieces.append(text[read : read + size])
        read += size
        if read >= len(text):
            break
    cut = list(cut_text(pieces, length))
    assert "".join(piece for piece, _ in cut) == text and cut == list(cut_text([text], length))
    assert [ends for _, ends in cut] == [False] * (len(cut) - 1) + [True]
    at = 0
    for piece, _ in cut[:-1]:
        assert length <= len(piece) <= 2 * length
        at += len(piece)
        if len(piece) == length and not BOUNDARY.match(text, at):
            assume(False)  # no boundary within reach: a word is cut
    for tokenizer in tokenizers:
        # Tokens do not reach beyond a word, so equal words would do; but these are only the words that we know of.
        words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        found = [word for piece, _ in cut for word, _ in words(piece)]
        assert found == [word for word, _ in words(text)]
        tokens = [ids for ids, _ in tokenize(cut, tokenizer)]
        assert list(chain.from_iterable(tokens)) == [
            *tokenizer(text, split_special_tokens=True)["input_ids"],
            tokenizer.eos_token_id,
        ]


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    """Ours, and one that cuts words as Llama 3, Qwen and GPT-4 do."""
    other = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    many = ["\n\n  \n   a.\n\n.\n   .. 11 111 '\t\n  \r\n\r\n aé ab 漢漢 \u3000 " * 20]
    other.train_from_iterator(
        many, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>"])
    )
    return train_tokenizer([*TEXTS, *many], 600), PreTrainedTokenizerFast(tokenizer_object=other, eos_token="</s>")


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1), max_size=20),
    length=st.integers(1, 20),
    chunk=st.integers(1, 50),
)
def test_packing_documents_in_any_pieces(documents, length, chunk):
    pieces = [(ids, ids is document[-1]) for document in documents for ids in document]
    flat = [(token, n) for document in documents for n, token in enumerate(chain.from_iterable(document))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PACKED_AT_ONCE", chunk)
        blocks = list(pack(pieces, length))
    assert len(blocks) == len(flat) // length
    for number, (ids, positions) in enumerate(blocks):
        mine = flat[number * length : (number + 1) * length]
        assert ids.tolist() == [token for token, _ in mine]
        assert positions.tolist() == [min(n, place) for place, (_, n) in enumerate(mine)]


def test_special_tokens_written_in_a_text_are_text(tokenizer):
    text = "a<|endoftext|>b <|pad|>"
    ((ids, _),) = tokenize([(text, True)], tokenizer)
    assert ids[-1] == tokenizer.eos_token_id and not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids[:-1])
    assert tokenizer.decode(ids[:-1]) == text
    # Nor are they more than text to what the tokenizer is trained on.
    learned = train_tokenizer(["<|endoftext|>\n" * 500], 300)
    ((ids, _),) = tokenize([("endoftext", True)], learned)
    assert len(ids) == 2 and learned.convert_ids_to_tokens(ids)[0] == "endoftext"


def test_a_word_without_end_is_cut_for_the_training_of_the_tokenizer():
    vocabulary = train_tokenizer(["a" * 2000, " " * 2000], 400).get_vocab()
    assert max(map(len, vocabulary)) == LONGEST_WORD
    whole = train_tokenizer(TEXTS, 300).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in whole.pre_tokenize_str("a" * 2000)] == ["a" * 2000]  # for training alone


def test_blocks_written_as_they_come_are_what_numpy_saves(tmp_path):
    blocks = np.random.default_rng(0).integers(0, 99, (1234, 2, 7), dtype=np.int32)
    for count in (1, 1234):
        assert save_blocks(tmp_path / "ours.npy", iter(blocks[:count]), 7) == count
        np.save(tmp_path / "numpy.npy", blocks[:count])
        assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_one_empty_file_of_a_folder_is_named_and_skipped(tmp_path, corpus):
    shutil.copytree(corpus, tmp_path / "text")
    (tmp_path / "text" / "empty.txt").write_text("")
    for path in (tmp_path / "text", f"{tmp_path}/text/*.txt"):
        source = source_of(tmp_path, path)
        assert texts(source) == TEXTS and source.notes() == [f"not read (empty), 1: {tmp_path}/text/empty.txt"]
    source = source_of(tmp_path, f"{tmp_path}/text/e*.txt")
    with pytest.raises(UserError, match=r"nothing to read at .*e\*.txt \(not read \(empty\), 1: "):
        texts(source)


def test_the_first_token_of_a_document_has_no_label():
    (block,) = pack(whole([[10, 11, 0], [20, 0], [30, 31]]), 7)
    first = example(block)
    assert first["labels"].tolist() == [-100, 11, 0, -100, 0, -100, 31]
    assert first["input_ids"].tolist() == [10, 11, 0, 20, 0, 30, 31]


def test_streamed_blocks_equal_stored_ones(tmp_path, corpus, tokenizer):
    recipe = Recipe(
        output_dir=str(tmp_path),
        streaming=True,
        max_steps=1,
        sequence_length=32,
        max_eval_blocks=3,
        validation_fraction=0.3,
    )
    split = split_source(source_of(tmp_path, corpus), recipe)
    streamed = list(read_blocks(split, tokenizer, 32))
    stored = list(pack(tokenize(split.pieces("train"), tokenizer), 32))
    assert len(streamed) == len(stored) > 10
    assert torch.equal(streamed[7]["input_ids"], example(stored[7])["input_ids"])
    write_blocks(split, tokenizer, recipe, tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["split.json", "validation.npy"]


def test_the_next_batch_is_tokenized_while_one_is_used(tokenizer, monkeypatch):
    monkeypatch.setattr(data_blocks, "BATCH", 1)
    read = threading.Event()

    def pieces():
        yield "one", True
        read.set()
        yield "two", True
        raise UserError("the text ends here")

    found = tokenize(pieces(), tokenizer)
    assert tokenizer.decode(next(found)[0][:-1]) == "one" and read.wait(60)
    assert tokenizer.decode(next(found)[0][:-1]) == "two"
    with pytest.raises(UserError, match="the text ends here"):
        next(found)


@pytest.mark.parametrize("documents", [TEXTS, TEXTS[:1] * 2], ids=["many", "one twice"])
def test_progress_counts_the_characters_of_each_part(tmp_path, tokenizer, documents, monkeypatch):
    monkeypatch.setattr(data_blocks, "BATCH", 10)
    for number, text in enumerate(documents):
        (tmp_path / f"{number:02}.txt").write_text(text)
    recipe = Recipe(output_dir=str(tmp_path), sequence_length=8, validation_fraction=0.3)
    split = split_source(source_of(tmp_path, tmp_path), recipe)
    assert split.characters == {part: sum(map(len, split.documents(part))) for part in ("train", "validation")}
    steps = {}

    def progress(description):
        def shown(items):
            steps[description] = [len(items)]
            for item in items:
                steps[description].append(sum(len(text) for text, _ in item))
                yield item

        return shown

    write_blocks(split, tokenizer, recipe, tmp_path / "data", progress)
    for part, (total, *characters) in zip(("train", "validation"), steps.values(), strict=True):
        assert sum(characters) == split.characters[part] and len(characters) <= total == -(-sum(characters) // 10)


def test_validation_is_spread_over_all_documents(tmp_path, corpus, tokenizer):
    recipe = Recipe(output_dir=str(tmp_path), sequence_length=32, max_eval_blocks=6, validation_fraction=0.3)
    split = split_source(source_of(tmp_path, corpus), recipe)
    write_blocks(split, tokenizer, recipe, tmp_path / "data")
    blocks = load_blocks(tmp_path / "data", "validation")
    every = list(pack(tokenize(split.pieces("validation"), tokenizer), 32))
    assert len(blocks) == 6 < len(every)
    assert np.array_equal(blocks.blocks[-1], every[5 * len(every) // 6])


def test_tokenizer_is_lossless_and_repeatable(tokenizer):
    text = "def f(x):\n\treturn 'ß — 漢字 🙂'  # \x01\r\n    "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 300 and tokenizer.eos_token_id != tokenizer.pad_token_id
    assert train_tokenizer(TEXTS, 300).get_vocab() == tokenizer.get_vocab()
    documents = list(tokenize(whole(TEXTS), tokenizer))
    assert len(documents) == 40 and all(ids[-1] == tokenizer.eos_token_id and ends for ids, ends in documents)


def test_bytes_per_token_are_not_known_of_text_that_the_tokenizer_does_not_know():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "alpha": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]")
    for ids, expected in (([2, 2, 1, 2], (len("alpha alpha alpha")) / 4), ([2, 0, 1, 2], None), ([1, 1, 1, 1], None)):
        blocks = PackedBlocks(np.array([[ids, [0, 1, 2, 0]]], dtype=np.int32))
        assert bytes_per_token(blocks, tokenizer) == expected
    tokenizer.unk_token = "</s>"  # as GPT-2's, which stands for no text that is not known
    assert bytes_per_token(PackedBlocks(np.array([[[2, 1], [0, 1]]], dtype=np.int32)), tokenizer) == len("alpha") / 2


def test_bigram_loss_by_counting():
    draw = np.random.default_rng(0)
    blocks = [np.stack([draw.integers(0, 5, (n, 8)), np.tile([0, 1, 2, 0, 1, 2, 3, 4], (n, 1))], 1) for n in (30, 9)]
    train, validation = (PackedBlocks(part) for part in blocks)

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
    measured = mean_losses(EvalPrediction(losses_of_sequences(logits, labels).numpy(), labels.numpy()))["token_loss"]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    assert measured == pytest.approx(expected.item(), abs=1e-6)


BAD_FILES = {
    "missing": (None, "nothing to read at"),
    "blank": (b" \n ", "holds no text"),
    "short": (b"too little", "is too short"),
    "long" * 100: (None, "nothing to read at"),
    "number.jsonl": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
    "column.jsonl": (b'{"content": "a"}', "no text in column 'text' (found: content); set text_column"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_text_ends_in_one_line(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        pretrain(arguments(tmp_path, data_files=[str(tmp_path / name)]))
    assert message in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_tokenizer_must_fit(tmp_path, corpus, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fields = {"data_files": [str(corpus)], "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(UserError, match="300 tokens and the model's vocab_size is 290"):
        pretrain(arguments(tmp_path, **fields, model_overrides={**MODEL, "vocab_size": 290}))
    with pytest.raises(UserError, match="needs at least 260"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], model_overrides={**MODEL, "vocab_size": 200}))
    with pytest.raises(UserError, match="cannot load the tokenizer nowhere"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], tokenizer="nowhere"))
    words = models.WordLevel({"[UNK]": 0, "</s>": 1, "alpha": 2, "of": 305}, unk_token="[UNK]")
    gaps = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>", unk_token="[UNK]")
    with pytest.raises(UserError, match="has 306 tokens and the model's vocab_size is 300"):
        check_tokenizer(gaps, GQAConfig(vocab_size=300))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="no end-of-text token"):
        pretrain(arguments(tmp_path, **fields))


def test_hub_data_set_out_of_reach(tmp_path):
    with pytest.raises(UserError, match="cannot read the Hub data set nobody/nothing"):
        pretrain(arguments(tmp_path, dataset_name="nobody/nothing"))


def test_upload_needs_a_token(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("modeling_gqa.training.run_setup.get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login"):
        pretrain(arguments(tmp_path, data_files=[str(corpus)], push_to_hub=True))


def arguments(tmp_path: Path, **values) -> list[str]:
    path = tmp_path / "recipe.yaml"
    run = {"preset": "tiny-gqa", "output_dir": str(tmp_path / "run"), "sequence_length": 64, "max_steps": 1}
    path.write_text(yaml.safe_dump({**run, "model_overrides": {**MODEL, "num_hidden_layers": 1}, **values}))
    return [str(path)]
