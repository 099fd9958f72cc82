"""Conversions that are killed, stopped, starved of disk, fed damaged files, or run twice at once.

After each the target is as it was or whole, the source is untouched, and the message is one line. Commands run in forks
of this process, which has the libraries imported.
"""

import errno
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_gqa.conversion import load_source
from modeling_gqa_cli import main as command

FORK = multiprocessing.get_context("fork")
# What changes files, as Python announces it before it is done.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
TOKENS = ("--sequence-length", 16, "--calibration-tokens", 640, "--evaluation-tokens", 160)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A model of ours, the same as Llama, and a text."""
    root = tmp_path_factory.mktemp("sources")
    words = {f"w{index}": index for index in range(101)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make_model("gqa").save_pretrained(root / "gqa")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "gqa")
    assert call("export", root / "gqa", root / "llama") == (0, [])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 101, (60, 20), generator=generator).tolist()
    (root / "text.txt").write_text("\n".join(" ".join(f"w{index}" for index in row) for row in ids))
    return root


def call(*arguments, fault=None) -> tuple[int | None, list[str]]:
    """Exit code (`None`: killed) and lines on stderr, but for progress bars, of a command in a fork."""
    process, pipe = begin(*arguments, fault=fault)
    return finish(process, pipe)


def begin(*arguments, fault=None):
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=([str(x) for x in arguments], there, fault), daemon=True)
    process.start()
    there.close()
    return process, here


def finish(process, pipe) -> tuple[int | None, list[str]]:
    try:
        code, said = pipe.recv()
    except EOFError:
        code, said = None, ""
    process.join()
    return code, [line for line in said.splitlines() if line.strip() and not re.search(r" \d+/\d+ +[-:\d]+$", line)]


def run(arguments: list[str], pipe, fault) -> None:
    sys.argv = ["modeling-gqa", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    errors = sys.stderr
    if fault:
        fault()
    code: Any = 0
    try:
        command.main()
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        code = "a defect"
        traceback.print_exc()
    errors.flush()
    pipe.send((code, errors.buffer.getvalue().decode()))
    os._exit(0)


def at_event(folder: Path, number: int, act, only=EVENTS):
    """A fault that calls `act(count)`, with 1, 2 and so on, before each event in `folder` from `number` on."""
    seen, acted = [0], [0]

    def hook(event, arguments):
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            seen[0] += 1
            if (
                seen[0] > number
                and event in only
                and (event != "open" or arguments[2] & os.O_ACCMODE or only is EVENTS)
            ):
                acted[0] += 1
                act(acted[0])

    return lambda: sys.addaudithook(hook)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Place:
    """A command with its source and target, and what both held before."""

    def __init__(self, draw, sources: Path, folder: Path):
        self.name, self.existing = draw.choice(["import", "export", "convert", "measured"]), draw.random() < 0.6
        self.results, self.source = folder / "results", folder / "source"
        self.target = self.results / "target"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sources / ("llama" if self.name == "import" else "gqa"), self.source)
        self.results.mkdir()
        if self.existing:
            shutil.copytree(sources / "gqa", self.target)
            (self.target / "LICENSE").write_text("old")
        self.before, self.source_before = contents(self.target), contents(self.source)
        options = {
            "convert": ("--attention-kind", "mha"),
            "measured": ("--attention-kind", "mqa", "--text", sources / "text.txt", *TOKENS, "--method", "mean"),
        }.get(self.name, ())
        name = self.name if self.name in ("import", "export") else "convert"
        self.command = (name, self.source, self.target, *options, "--force")

    def is_as_it_was(self) -> bool:
        return self.target.exists() == self.existing and contents(self.target) == self.before

    def check(self, code: int | None, lines: list[str], codes=(0, 1)) -> None:
        """That the target is written, or as it was and one line says why; and that all else is as it was."""
        said = f"{self.name}, existing={self.existing}, exit code {code}: {lines}"
        assert code in codes, said
        assert contents(self.source) == self.source_before, said
        assert lines == [] if code == 0 else len(lines) == 1 and lines[0].startswith("error: "), said
        # An empty lock is left where a signal comes while it is made; finished layers, where a command can go on.
        allowed = {"target", *([] if code in (0, 1) else [".target.lock"])}
        if code != 0 and self.name in ("convert", "measured"):
            allowed.add(".target.layers")
        assert {path.name for path in self.results.iterdir()} <= allowed, said
        if code == 1:
            assert self.is_as_it_was(), said
        elif not self.is_as_it_was():
            self.check_whole()

    def check_whole(self) -> None:
        assert not (self.target / "LICENSE").exists()
        model_type = json.loads((self.target / "config.json").read_text())["model_type"]
        assert model_type == ("llama" if self.name == "export" else "gqa")
        load_source(self.target)

    def check_killed(self, code: int | None, lines: list[str]) -> None:
        """That nothing is lost, and that the next command needs no help."""
        assert contents(self.source) == self.source_before
        kept = [path for path in self.results.glob("*target*") if contents(path) == self.before]
        if self.target.exists() and not self.is_as_it_was():
            self.check_whole()
        else:
            assert kept or not self.existing, list(self.results.iterdir())
        self.check(*call(*self.command), codes=(0,))


TOTALS: dict[tuple[str, bool], int] = {}


def draw_event(draw, sources: Path, folder: Path) -> tuple[Place, int]:
    """A command, and the number of one of its changes of files: half of the time one of the last, when it renames."""
    place = Place(draw, sources, folder)
    if (place.name, place.existing) not in TOTALS:
        counted = FORK.Value("i", 0)
        fault = at_event(place.results, 0, lambda count: setattr(counted, "value", count))
        place.check(*call(*place.command, fault=fault), codes=(0,))
        TOTALS[place.name, place.existing] = counted.value
        restore(place)
    total = TOTALS[place.name, place.existing]
    return place, draw.choice([draw.randrange(total), draw.randrange(total * 3 // 4, total)])


def restore(place: Place) -> None:
    shutil.rmtree(place.target)
    for name, content in place.before.items():
        (place.target / name).parent.mkdir(parents=True, exist_ok=True)
        (place.target / name).write_bytes(content)


def send(number: int):
    return lambda count: os.kill(os.getpid(), number) if count == 1 else None


@pytest.mark.parametrize("turn", range(3))
def test_killed_before_a_file_is_changed(turn, draw, sources, tmp_path):
    place, number = draw_event(draw, sources, tmp_path / "SPOT")
    place.check_killed(*call(*place.command, fault=at_event(place.results, number, send(signal.SIGKILL))))


def test_killed_when_the_layers_are_no_longer_needed(sources, tmp_path):
    """The target stands before its layers are deleted, and what is left of them does not disturb the next command."""
    target = tmp_path / "target"
    command = ("convert", sources / "gqa", target, "--attention-kind", "mqa", "--method", "mean")
    fault = at_event(
        tmp_path / ".target.layers", 0, lambda count: count == 2 and send(signal.SIGKILL)(1), {"os.remove"}
    )
    assert call(*command, fault=fault)[0] is None
    assert load_source(target).config.attention_kind == "mqa" and (tmp_path / ".target.layers").exists()
    assert call(*command, "--force") == (0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_killed_at_any_moment(draw, sources, tmp_path):
    """By a clock that also ticks inside the libraries."""

    def fault():
        signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal is not handled

    seconds = draw.uniform(0.001, 0.4)
    place = Place(draw, sources, tmp_path / "SPOT")
    place.check_killed(*call(*place.command, fault=fault))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_stopped(name, draw, sources, tmp_path):
    number = getattr(signal, name)
    place, event = draw_event(draw, sources, tmp_path / "SPOT")
    code, lines = call(*place.command, fault=at_event(place.results, event, send(number)))
    place.check(code, lines, codes=(128 + number,))
    assert str(place.target) in lines[0]
    how = "as it was" if place.is_as_it_was() else "written and complete"
    assert f"{place.target} is {how}, nothing half-written is left" in lines[0]


def test_a_disk_that_is_full_from_some_file_on(draw, sources, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place, event = draw_event(draw, sources, tmp_path / "SPOT")
    code, lines = call(*place.command, fault=at_event(place.results, event, full, {"open", "os.mkdir"}))
    place.check(code, lines)
    assert code == 0 or "No space left on device" in lines[0] or "no space left on device" in lines[0], lines


def test_a_disk_that_is_full_within_a_file(draw, sources, tmp_path):
    """Whoever writes it: Python, safetensors or torch; those of temporary files too."""
    place = Place(draw, sources, tmp_path / "SPOT")
    size = draw.choice([draw.randrange(300), draw.randrange(60_000), draw.randrange(400_000)])
    code, lines = call(*place.command, fault=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    place.check(code, lines)
    assert code == 0 or "File too large" in lines[0] or "file too large" in lines[0], (size, lines)


@pytest.mark.parametrize("turn", range(4))
def test_a_damaged_source(turn, draw, sources, tmp_path):
    place = Place(draw, sources, tmp_path / "SPOT")
    path = draw.choice(sorted(path for path in place.source.iterdir() if path.suffix != ".py"))
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    kind = draw.choice(["cut", "flip", "zero", "remove"])
    if kind == "cut":
        del content[start:]
    elif kind == "flip":
        content[start] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        length = min(len(content) - start, draw.choice([1, 8, 4096]))
        content[start : start + length] = bytes(length)
    path.unlink()
    if kind != "remove":
        path.write_bytes(content)
    place.source_before = contents(place.source)
    place.check(*call(*place.command))


def test_two_at_once(draw, sources, tmp_path):
    place = Place(draw, sources, tmp_path / "SPOT")
    started = [begin(*place.command) for _ in range(draw.choice([2, 3]))]
    results = [finish(*pair) for pair in started]
    assert 0 in [code for code, _ in results], results
    for code, lines in results:
        assert code == 0 or (len(lines) == 1 and f"is writing {place.target} now" in lines[0]), results
    place.check(0, [])
    assert not place.is_as_it_was()
