"""What is written of an evaluation: the card keeps the rest, and no failure damages a file."""

import errno
import json

import numpy as np
import pytest
from huggingface_hub import ModelCard, metadata_load

from modeling_gqa.common import atomic
from modeling_gqa.evaluation import results as module
from modeling_gqa.evaluation.results import (
    Score,
    TaskResult,
    card_entries,
    compare,
    number,
    read_card,
    results_table,
    to_json_dict,
    write_entries,
)
from modeling_gqa_cli.errors import UserError

DATASET = {"type": "Rowan/hellaswag", "config": None, "split": "validation"}
TEXT = "# Ours\n\nText with --- and\r\na line end of Windows.\n"


def result(value: float, keys=("a", "b"), stderr: float | None = 0.1, shares=(0.25, -0.25)) -> TaskResult:
    own = None if shares is None else np.array(shares)
    return TaskResult({"acc": Score(value, stderr, True, own)}, 2, keys, DATASET)


@pytest.fixture
def folder(tmp_path):
    theirs = [
        {
            "name": "ours",
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"name": "arc", "type": "allenai/ai2_arc"},
                    "metrics": [{"type": "acc", "value": 0.3}],
                }
            ],
        }
    ]
    front = f"---\nlicense: mit\nmodel-index: {json.dumps(theirs)}\ntags:\n- gqa\n---\n\n"
    (tmp_path / "README.md").write_bytes((front + TEXT).encode())
    return tmp_path


def test_a_card_keeps_all_else(folder):
    write_entries(folder, "ours", card_entries({"hellaswag": result(0.5)}, 300))
    write_entries(folder, "ours", card_entries({"hellaswag": result(0.75)}, None))
    written = (folder / "README.md").read_bytes().decode()
    assert written.endswith(TEXT) and "license: mit" in written
    data = ModelCard.load(folder / "README.md").data  # as the Hub reads it
    assert data.license == "mit" and data.tags == ["gqa"]
    by_name = {entry.dataset_name: entry for entry in data.eval_results}
    assert set(by_name) == {"arc", "hellaswag"} and by_name["arc"].metric_value == 0.3
    entry = by_name["hellaswag"]
    assert (entry.metric_type, entry.metric_value, entry.dataset_type) == ("acc", 0.75, "Rowan/hellaswag")
    assert entry.dataset_args == {"num_few_shot": 0} and "0.1000" in entry.metric_name


def test_a_card_is_made_where_there_is_none(tmp_path):
    write_entries(tmp_path, "ours", card_entries({"hellaswag": result(0.5)}, 7))
    (index,) = metadata_load(tmp_path / "README.md")["model-index"]
    assert index["name"] == "ours" and index["results"][0]["dataset"]["args"] == {"num_few_shot": 0, "limit": 7}


@pytest.mark.parametrize("front", ["[unclosed", "- a\n- b", "model-index: 3", "model-index: [{}]", "model-index: [3]"])
def test_a_malformed_card_is_refused_and_kept(front, tmp_path):
    before = f"---\n{front}\n---\n{TEXT}".encode()
    (tmp_path / "README.md").write_bytes(before)
    for step in (read_card, lambda folder: write_entries(folder, "ours", [])):
        with pytest.raises(UserError):
            step(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == before


@pytest.mark.parametrize("at", ["metadata_save", "sync_path"])
def test_a_full_disk_leaves_the_card_as_it_was(at, folder, monkeypatch):
    before = (folder / "README.md").read_bytes()

    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module if at == "metadata_save" else atomic, at, full)
    with pytest.raises(OSError, match="No space"):
        write_entries(folder, "ours", card_entries({"hellaswag": result(0.5)}, None))
    assert (folder / "README.md").read_bytes() == before and len(list(folder.iterdir())) == 1


def test_differences_are_paired_only_on_the_same_items():
    ours = {"hellaswag": result(0.5)}
    for theirs, paired, stderr in (
        (result(0.25, shares=(0.25, -0.25)), True, 0.0),
        (result(0.25, keys=("a", "c")), False, 0.1 * 2**0.5),
        (result(0.25, shares=None), False, 0.1 * 2**0.5),
        (result(0.25, shares=None, stderr=None), False, None),
    ):
        row = compare(ours, {"hellaswag": theirs})["hellaswag"]["acc"]
        assert (row["difference"], row["paired"]) == (0.25, paired) and row["stderr"] == pytest.approx(stderr)
    assert compare(ours, {"lambada": result(0.5)}) == {}


def test_table_and_json_hold_both_models():
    ours, theirs = {"hellaswag": result(0.5)}, {"hellaswag": result(0.75, keys=("a", "c"))}
    (alone,), (row,) = results_table("a", ours).rows, results_table("a", ours, "b", theirs).rows
    assert alone == ["hellaswag", "acc", "2", "0.5000 ± 0.1000"]
    assert row[:5] == [*alone, "0.7500 ± 0.1000"] and row[5].startswith("-0.2500 ± 0.1414 (")
    found = json.loads(atomic.to_json(to_json_dict({"name": "a"}, {"name": "b"}, ours, theirs)))
    assert found["checkpoint"]["tasks"]["hellaswag"]["scores"]["acc"]["value"] == 0.5
    assert found["against"]["name"] == "b" and found["comparison"]["hellaswag"]["acc"]["difference"] == -0.25
    alone = to_json_dict({"name": "a"}, None, ours, {})
    assert alone["against"] is None and alone["comparison"] is None


def test_numbers_in_the_table_have_the_digits_that_count():
    assert [number(x) for x in (0.45331, 43.6623, 1899.5, 1.2345e6)] == ["0.4533", "43.66", "1,899.50", "1.23e+06"]
    assert number(0.01, "+") == "+0.0100" and number(-12.345, "+") == "-12.35"
