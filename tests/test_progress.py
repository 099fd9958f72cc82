"""Progress of long loops: bars on a terminal, a line every half minute elsewhere."""

import sys
import time

import pytest
from rich.console import Console
from small_models import make_model

from modeling_gqa.common import console, progress
from modeling_gqa.common.progress import BySize, duration, progress_bars
from modeling_gqa.conversion import export_checkpoint, import_checkpoint


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves forward."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def loop(clock, show_progress, steps: int, seconds: float, description: str = "converting layers"):
    for _ in show_progress(description)(range(steps)):
        clock[0] += seconds


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_every_half_minute(clock, capsys):
    with progress_bars() as show_progress:
        loop(clock, show_progress, 10, 2.0, "reading")
        assert lines(capsys) == []
        loop(clock, show_progress, 30, 4.0)
    said = [(3, 32, "2 min"), (11, 64, "76 s"), (19, 96, "44 s"), (27, 128, "12 s")]
    assert lines(capsys) == [
        f"converting layers: {done} of 30, {took} s, about {left} left" for done, took, left in said
    ]


def test_every_item_is_yielded_and_iterators_have_no_total(clock, capsys):
    seen = []
    with progress_bars() as show_progress:
        for item in show_progress("measuring")(iter("abc")):
            clock[0] += 31
            seen.append(item)
    assert seen == list("abc") and lines(capsys) == ["measuring: 1, 31 s", "measuring: 2, 62 s"]


def test_bars_only_on_a_terminal(clock, monkeypatch, capsys):
    with progress_bars() as show_progress:
        loop(clock, show_progress, 3, 20.0)
    assert lines(capsys) == ["converting layers: 2 of 3, 40 s"]
    monkeypatch.setattr(console, "err", Console(file=sys.stderr, force_terminal=True, width=80))
    with progress_bars() as show_progress:
        loop(clock, show_progress, 5, 20.0)
    said = capsys.readouterr().err
    assert "\u2501" in said and " left" in said and "5 of 5" in said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (9000, "2.5 h")]
)
def test_times_are_short(seconds, said):
    assert duration(seconds) == said


def test_what_is_left_is_the_loops_own(clock, capsys):
    """A slow loop before it says nothing of this one."""
    with progress_bars() as show_progress:
        loop(clock, show_progress, 1, 1000.0, "loading")
        loop(clock, show_progress, 5, 50.0)
    expected = [*(f"{done} of 5, {1000 + 50 * done} s" for done in range(3)), "3 of 5, 1150 s, about 2 min left"]
    expected.append("4 of 5, 1200 s, about 50 s left")
    assert lines(capsys) == [f"converting layers: {line}" for line in expected]


def test_what_is_left_goes_by_sizes_and_not_by_the_first_step(clock, capsys, monkeypatch):
    """A file is unpacked at its first tensor, and large tensors come before small ones."""
    monkeypatch.setattr(progress, "BETWEEN_LINES", 0)
    sizes = [100, 400, 200, 100, 100, 50, 50]  # bytes
    seconds = [3600.0, *(size / 10 for size in sizes[1:])]
    names = BySize("abcdefg", sizes)
    assert names == list("abcdefg")
    with progress_bars() as show_progress:
        for name in show_progress("importing tensors")(names):
            clock[0] += seconds[names.index(name)]
    left = ["", "", "", "30 s", "20 s", "10 s", "5 s"]
    assert [line.partition("about ")[2].removesuffix(" left") for line in lines(capsys)] == left


def test_tensors_are_written_by_their_bytes(tmp_path):
    """What the loop over a checkpoint's tensors is given has their sizes."""
    model = make_model("gqa")
    model.save_pretrained(tmp_path / "ours")
    seen: list[BySize] = []
    export_checkpoint(tmp_path / "ours", tmp_path / "stock", progress=lambda items: seen.append(items) or items)
    import_checkpoint(tmp_path / "stock", tmp_path / "again", progress=lambda items: seen.append(items) or items)
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    for names in seen:
        assert names and dict(zip(names, names.sizes, strict=True)) == {name: sizes[name] for name in names}
