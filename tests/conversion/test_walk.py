"""How far a reader of one conversion has to walk: the files that it enters, and the switches between them."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from small_models import make_model

from modeling_gqa import conversion
from modeling_gqa.conversion.command.job import Job

FOLDER = str(Path(conversion.__file__).parent)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
CASES = {
    "gqa": ({"attention_kind": "gqa", "num_key_value_heads": 2}, 13, 120),
    "mla": ({"attention_kind": "mla", "cache_size": 24}, 12, 80),
    "mha": ({"attention_kind": "mha"}, 11, 60),
}


@pytest.mark.parametrize(("options", "files", "switches"), CASES.values(), ids=CASES)
def test_a_conversion_enters_few_files(options, files, switches, tmp_path):
    """A switch is a call in `conversion/` of a function in another file than that of the call before it.

    A model of two layers is converted without text. The bounds are what was measured, rounded up: where one is exceeded
    a function has moved away from its callers.
    """
    model = make_model("gqa", **SIZES)
    model.save_pretrained(tmp_path / "source")
    entered: list[str] = []

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
    assert len(set(entered)) <= files
    assert sum(a != b for a, b in pairwise(entered)) <= switches
