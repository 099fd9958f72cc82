"""Progress of long loops: bars on a terminal, a line every half minute elsewhere."""

import sys
import time

import pytest
from rich.console import Console

from modeling_gqa.command_line import console
from modeling_gqa.common.progress import duration, progress_lines


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves forward."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def loop(clock, show_progress, steps: int, seconds: float, description: str = "converting layers"):
    for _ in show_progress(description)(range(steps)):
        clock[0] += seconds


def test_a_line_every_half_minute(clock):
    lines: list[str] = []
    show_progress = progress_lines(lines.append)
    loop(clock, show_progress, 10, 2.0, "reading")
    assert lines == []
    loop(clock, show_progress, 30, 4.0)
    said = [(3, 32, "2 min"), (11, 64, "76 s"), (19, 96, "44 s"), (27, 128, "12 s")]
    assert lines == [f"converting layers: {done} of 30, {took} s, about {left} left" for done, took, left in said]


def test_every_item_is_yielded_and_iterators_have_no_total(clock):
    lines: list[str] = []
    seen = []
    for item in progress_lines(lines.append)("measuring")(iter("abc")):
        clock[0] += 31
        seen.append(item)
    assert seen == list("abc") and lines == ["measuring: 1, 31 s", "measuring: 2, 62 s"]


def test_bars_only_on_a_terminal(clock, monkeypatch, capsys):
    with console.progress_bars() as show_progress:
        loop(clock, show_progress, 3, 20.0)
    assert capsys.readouterr().err == "converting layers: 2 of 3, 40 s, about 20 s left\n"
    monkeypatch.setattr(console, "err", Console(file=sys.stderr, force_terminal=True, width=80))
    with console.progress_bars() as show_progress:
        loop(clock, show_progress, 3, 20.0)
    said = capsys.readouterr().err
    assert "\u2501" in said and " left" in said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (9000, "2.5 h")]
)
def test_times_are_short(seconds, said):
    assert duration(seconds) == said


def test_what_is_left_is_the_loops_own(clock):
    """A slow loop before it says nothing of this one."""
    lines: list[str] = []
    show_progress = progress_lines(lines.append)
    loop(clock, show_progress, 1, 1000.0, "loading")
    loop(clock, show_progress, 3, 50.0)
    expected = ["0 of 3, 1000 s", "1 of 3, 1050 s, about 2 min left", "2 of 3, 1100 s, about 50 s left"]
    assert lines == [f"converting layers: {line}" for line in expected]
