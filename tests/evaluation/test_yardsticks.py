"""Files of the yardsticks, and perplexity against a plain loop in float64."""

import bz2
import math

import pytest
import torch
from byte_texts import END, tokenizer_of_bytes
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from modeling_gqa import GQAForCausalLM
from modeling_gqa.evaluation.results import perplexity_score
from modeling_gqa.evaluation.yardsticks import FILES, read_documents, read_text, token_windows, window_losses
from modeling_gqa_cli.errors import UserError


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_perplexity_is_that_of_a_plain_loop_in_float64(name, models_folder, data):
    """Token by token over the windows of a text whose rest is left out, by softmax and log."""
    model = AutoModelForCausalLM.from_pretrained(models_folder / name, dtype=torch.float32)
    assert isinstance(model, GQAForCausalLM) == (name == "ours")
    windows = token_windows(tokenizer_of_bytes(), read_text("wikitext2", data), 37)
    raw = (data / FILES["wikitext2"]).read_bytes().replace(b"\r\n", b"\n")
    assert len(windows) == len(raw) // 37 > 10
    loss, count, _ = 0.0, 0, model.double()
    with torch.no_grad():
        for window in windows:
            probabilities = torch.softmax(model(window[None]).logits[0], dim=-1)  # (T, V)
            for at in range(36):
                loss -= math.log(probabilities[at, window[at + 1]].item())
                count += 1
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        found = perplexity_score(window_losses(model.to(dtype).train(), windows))
        assert model.training and math.isclose(found.value, math.exp(loss / count), rel_tol=tolerance)


def test_a_beginning_is_there_only_if_the_tokenizer_adds_one(data):
    tokenizer, text = tokenizer_of_bytes(), "abcdefgh"
    without = token_windows(tokenizer, text, 4)
    assert tokenizer.decode(without.flatten()) == text
    adds = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = adds
    begun = token_windows(tokenizer, text, 4)
    assert begun[0, 0] == tokenizer.eos_token_id and begun.flatten()[1:].tolist() == without.flatten()[:-1].tolist()
    with pytest.raises(UserError):
        token_windows(tokenizer, text, 10)


def test_documents_are_those_of_the_files(data, pages, hellaswag, lambada, problems):
    assert [found["page"] for found in read_documents("wikitext2", data)] == pages
    assert read_documents("lambada", data) == [{"text": text} for text in lambada]
    found = read_documents("hellaswag", data)
    assert [(item["query"], item["label"], item["choices"]) for item in found] == hellaswag
    assert [item["task_id"] for item in read_documents("humaneval", data)] == [x["task_id"] for x in problems]


@pytest.mark.parametrize(
    ("context", "query"),
    [
        ("Roof: A man sits. he", "Roof: A man sits. He"),
        ("Roof: A man sits. the child and Tom", "Roof: A man sits. The child and tom"),  # as str.capitalize does
        ("Roof: A man sits on a roof.", "Roof: A man sits on a roof."),
        ("Roof: a man sits", "Roof: a man sits"),
    ],
)
def test_the_sentence_that_endings_continue_begins_with_a_capital(context, query, tmp_path):
    (tmp_path / FILES["hellaswag"]).write_bytes(bz2.compress("\n".join([context, "0", *"abcd", ""]).encode()))
    assert read_documents("hellaswag", tmp_path)[0]["query"] == query


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lambada", b""), ("lambada", b"{}\n"), ("lambada", b"no JSON\n"), ("lambada", b"[1]\n"),
        ("lambada", b"\xff\n"), ("hellaswag", b"no bz2"), ("hellaswag", bz2.compress(b"a\nb\n")),
        ("hellaswag", bz2.compress(b"a\n7\nb\nc\nd\ne\n")),
        ("hellaswag", bz2.compress(b"a\n1\nb\nc\nd\ne\n" * 999)[:40]), ("humaneval", b"no gzip"), ("wikitext2", b""),
        ("lambada", None), ("humaneval", None),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(name, content, tmp_path):
    path = tmp_path / FILES[name]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_documents(name, tmp_path)
    assert str(path) in str(raised.value)
