"""How far a reader of one conversion has to walk: the files that it enters, and the switches between them."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_gqa import conversion
from modeling_gqa.conversion.command.job import Job

FOLDER = str(Path(conversion.__file__).parent)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
GQA: dict[str, Any] = {"attention_kind": "gqa", "num_key_value_heads": 2}
MLA: dict[str, Any] = {"attention_kind": "mla", "cache_size": 24}
TEXT: dict[str, Any] = {"method": "lowrank", "calibration_tokens": 2048, "evaluation_tokens": 512, "batch_size": 64}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "gqa": (GQA, 22, 205),
    "mla": (MLA, 22, 180),
    "mha": ({"attention_kind": "mha"}, 20, 145),
    "gqa-text": ({**GQA, **TEXT}, 30, 325),
    "mla-text": ({**MLA, **TEXT}, 30, 490),
}


def save_source(folder: Path) -> None:
    """Save a model of two layers with a tokenizer that has a token for each number below 101."""
    make_model("gqa", **SIZES).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(101)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.mark.parametrize(("options", "files", "switches"), CASES.values(), ids=CASES)
def test_a_conversion_enters_few_files(options, files, switches, tmp_path):
    """A switch is a call in `conversion/` of a function in another file than that of the call before it.

    A model of two layers is converted without text, and with text of one batch: with more, the same steps come again.
    Text takes eight more files, which read it, pack it, send it through the layers, fit these, and measure on it.
    MLA tries three or more sizes in each layer.
    The bounds are what was measured, rounded up: where one is exceeded a function has moved away from its callers.
    """
    save_source(tmp_path / "source")
    if "method" in options:
        numbers = torch.randint(3, 101, (300, 30), generator=torch.Generator().manual_seed(0))
        (tmp_path / "text.txt").write_text("\n".join(" ".join(map(str, row.tolist())) for row in numbers))
        options = {**options, "text": [tmp_path / "text.txt"], "sequence_length": 64}
    entered = []

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if name.startswith(FOLDER):
            entered.append(name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        Job(source=str(tmp_path / "source"), target=tmp_path / "out", device="cpu", **options).run(
            False, lambda _: iter
        )
    finally:
        sys.settrace(before)
    found = (len(set(entered)), sum(a != b for a, b in pairwise(entered)))
    assert found[0] <= files and found[1] <= switches, found
