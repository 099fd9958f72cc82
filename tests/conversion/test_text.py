"""Text to batches: what is read, that parts share nothing, and what is refused."""

import json
from itertools import pairwise

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from modeling_gqa.conversion import UserError
from modeling_gqa.data import packing
from modeling_gqa.data.packing import read_batches
from modeling_gqa.data.reading import read_documents

LENGTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:not read .empty.")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every number below 5000, so that a test can read off where a token came from."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(5000)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def numbers(first: int, count: int) -> str:
    return " ".join(str(i) for i in range(first, first + count))


def read(paths, tokenizer, tokens=None, **options):
    tokens = tokens or {"calibration": 800, "selection": 200, "evaluation": 400}
    return read_batches(paths, tokenizer, tokens, sequence_length=LENGTH, batch_size=4, **options)


def tokens_of(batches) -> list[int]:
    return torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist()


@pytest.fixture
def corpus(tmp_path):
    """60 documents of 30 numbers each, 1000 to 2799, in every format."""
    folder = tmp_path / "corpus [1]"  # brackets mean something to globs
    (folder / "deep").mkdir(parents=True)
    docs = [numbers(1000 + 30 * i, 30) for i in range(60)]
    for i, name in enumerate([f"{i}.txt" for i in range(10)] + [f"deep/{i}.md" for i in range(5)] + ["a.py"]):
        (folder / name).write_text(docs[i])
    (folder / "rows [2].jsonl").write_text(
        "".join(json.dumps({"text": doc, "id": i}) + "\n" for i, doc in enumerate(docs[16:40]))
    )
    import datasets

    datasets.Dataset.from_dict({"id": list(range(20)), "text": docs[40:]}).to_parquet(folder / "rows.parquet")
    (folder / "ignored.bin").write_bytes(b"\0\xff")
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("")
    return folder


def test_every_format_is_read_once_and_parts_are_disjoint(corpus, tokenizer):
    parts = {
        name: tokens_of(batches)
        for name, batches in read(
            [corpus], tokenizer, {"calibration": 4000, "selection": 1000, "evaluation": 2000}
        ).items()
    }
    found = [token for tokens in parts.values() for token in tokens]
    assert len(found) == len(set(found))
    assert set(found) <= set(range(1000, 2800))
    assert len(found) > 1800 - 3 * LENGTH  # only incomplete last blocks are dropped
    for first, last in ((1000, 1480), (1480, 2200), (2200, 2800)):  # plain text, JSONL, Parquet
        assert sum(first <= token < last for token in found) > 0.95 * (last - first)
    # A text that is too short for all is shared out in proportion, by whole documents.
    assert [len(parts[name]) for name in parts] == pytest.approx([1800 * 4 / 7, 1800 / 7, 1800 * 2 / 7], abs=60)
    owners = {name: {(token - 1000) // 30 for token in tokens} for name, tokens in parts.items()}
    assert not owners["calibration"] & owners["evaluation"] and not owners["selection"] & owners["evaluation"]


def test_the_rest_gets_what_is_left(corpus, tokenizer):
    """The other parts are as they are without it. It stops at what it wants, and is empty where they take all."""
    tokens = {"calibration": 400, "evaluation": 200}
    alone, with_rest = (read([corpus], tokenizer, tokens, rest=("polish", wanted)) for wanted in (0, 320))
    rest = tokens_of(with_rest.pop("polish"))
    assert len(rest) == 320 and "polish" not in alone
    for name, batches in with_rest.items():
        assert tokens_of(batches) == tokens_of(alone[name])
        assert not {token for token in tokens_of(batches) if token >= 1000} & set(rest)  # a cut can halve a number
    assert read([corpus], tokenizer, {"calibration": 4000}, rest=("polish", 320))["polish"] == []


def test_positions_restart_at_documents_and_blocks(corpus, tokenizer):
    for batch in read([corpus], tokenizer)["calibration"]:
        for ids, positions in zip(*(batch[name].tolist() for name in ("input_ids", "position_ids")), strict=True):
            expected = [0]
            for before, after in pairwise(ids):
                expected.append(0 if (after - 1000) % 30 == 0 or after != before + 1 else expected[-1] + 1)
            assert positions == expected


def test_one_long_file_is_cut_into_disjoint_sections(tmp_path, tokenizer):
    (tmp_path / "book.txt").write_text(numbers(1000, 3000))
    parts = {name: tokens_of(batches) for name, batches in read([tmp_path], tokenizer).items()}
    found = [token for tokens in parts.values() for token in tokens if token >= 1000]  # a cut can halve a number
    assert len(found) == len(set(found))
    assert [len(tokens) for tokens in parts.values()] == [800, 200, 400]


@pytest.mark.parametrize("name", ["deep", "rows.parquet"])
def test_the_order_follows_from_the_seed(name, corpus, tokenizer):
    """Of files, and of the rows of one file."""
    first, again, other = (tokens_of(read([corpus / name], tokenizer, seed=s)["calibration"]) for s in (0, 0, 1))
    assert first == again != other


def test_repeated_documents_are_in_one_part(tmp_path, tokenizer):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(numbers(1000 + 20 * (i % 30), 20) + "\n" * (i // 30))
    parts = read([tmp_path], tokenizer)
    found = [token for batches in parts.values() for token in tokens_of(batches)]
    assert len(found) == len(set(found))


def test_evaluation_text_is_kept_apart(corpus, tmp_path, tokenizer):
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"body": numbers(i, 30)}) + "\n" for i in range(3000, 3600, 30)))
    for i in range(20):  # the same documents again, in calibration's folder
        (corpus / f"copy{i}.txt").write_text(numbers(3000 + 30 * i, 30))
    with pytest.raises(UserError, match=r"held-out.jsonl, line 1: no text in column 'text' \(found: body\)"):
        read([corpus], tokenizer, evaluation_paths=[held_out])
    held_out.write_text(held_out.read_text().replace("body", "text"))
    tokens = {"calibration": 4000, "selection": 1000, "evaluation": 400}
    parts = read([corpus], tokenizer, tokens, evaluation_paths=[held_out])
    assert min(tokens_of(parts["evaluation"])) >= 3000 and len(tokens_of(parts["evaluation"])) == 400
    # What the evaluation had no room for may serve calibration.
    assert not set(tokens_of(parts["calibration"]) + tokens_of(parts["selection"])) & set(
        tokens_of(parts["evaluation"])
    )


def test_reading_stops_when_the_parts_are_full(tmp_path, tokenizer, monkeypatch):
    for i in range(300):
        (tmp_path / f"{i:03}.txt").write_text(numbers(1 + 12 * i, 12))
    opened = []
    monkeypatch.setattr(
        packing, "read_documents", lambda path, *_, **__: (opened.append(path), read_documents(path, "text"))[1]
    )
    read([tmp_path], tokenizer)
    assert 1400 / 12 < len(opened) < 1400 / 12 + 6


def byte_level(special: str, first: str) -> PreTrainedTokenizerFast:
    """A byte for a token, `special` as end of text, and `first` before every text."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator([], trainers.BpeTrainer(special_tokens=[first, special], initial_alphabet=alphabet))
    words.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=first, eos_token=special)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def test_special_tokens_written_in_a_text_are_text(tmp_path):
    """The first token that a tokenizer adds stays, and so do words that were added to it."""
    tokenizer = byte_level("</s>", "<s>")
    (tmp_path / "a.txt").write_text("ab<s>cd</s>ef<tool>gh")
    (batch,) = read([tmp_path], tokenizer, {"evaluation": 16})["evaluation"]
    words = tokenizer.convert_ids_to_tokens(batch["input_ids"].flatten())
    assert words == ["<s>", *"ab<s>cd</s>ef", "<tool>", "g"]


def test_a_special_token_that_is_a_word_is_refused_in_text(tmp_path):
    """Of the vocabulary, so that the tokenizer finds it whatever it is told."""
    words = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0), ("▁", -1.0)], unk_id=0))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    (tmp_path / "a.txt").write_text("a b <unk> " * 20)
    assert tokenizer.eos_token_id not in tokens_of(read([tmp_path], tokenizer, {"evaluation": 16})["evaluation"])
    (tmp_path / "a.txt").write_text("a b </s> " * 20)
    with pytest.raises(UserError, match="the text holds '</s>', which this tokenizer takes for its special token"):
        read([tmp_path], tokenizer, {"evaluation": 16})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.txt is empty"),
        (b" \n\n", "too short: 0 tokens for calibration"),
        (b"1 2 3", "too short: 3 tokens for calibration, and a sequence has 8"),
    ],
)
def test_too_little_text_is_refused(content, message, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read([tmp_path / "a.txt"], tokenizer)
