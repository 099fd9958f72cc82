"""Progress of long loops: bars on a terminal, a line every half minute elsewhere."""

import sys
import time

import pytest
from rich.console import Console

from modeling_gqa.command_line import console
from modeling_gqa.common.progress import progress_lines


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
    said = [(3, 32), (11, 64), (19, 96), (27, 128)]
    assert lines == [f"converting layers: {done} of 30, {seconds} s" for done, seconds in said]


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
    assert capsys.readouterr().err == "converting layers: 2 of 3, 40 s\n"
    monkeypatch.setattr(console, "err", Console(file=sys.stderr, force_terminal=True, width=80))
    with console.progress_bars() as show_progress:
        loop(clock, show_progress, 3, 20.0)
    assert "\u2501" in capsys.readouterr().err
