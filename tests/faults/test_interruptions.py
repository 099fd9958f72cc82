"""Runs that are killed, interrupted, out of disk, or whose files are damaged: what is kept, and how they go on."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from broken_runs import Child, refused, snapshot, weights

from modeling_gqa.training.run_folder import find_resumable

HOW = ("missing", "empty", "cut", "zeroed", "flipped")


def damage(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "empty":
        data = bytearray()
    elif how == "cut":
        del data[draw.randrange(len(data)) :]
    elif how == "zeroed":
        data = bytearray(len(data))
    else:
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def test_a_run_killed_at_any_moment_goes_on_to_the_same_weights(whole, tmp_path, draw):
    begin = time.monotonic()
    assert Child(tmp_path / "timed", whole[0]).wait() == 0
    seconds, run, kills = time.monotonic() - begin, tmp_path / "run", 0
    for share in (0.5, 0.9, 0.9, 0.9):  # the first kill comes before a faster run would end
        child = Child(run, whole[0], *(["--resume"] if (run / "recipe.yaml").exists() else []))
        time.sleep(draw.uniform(0, share * seconds))
        child.kill(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
    child = Child(run, whole[0], *(["--resume"] if (run / "recipe.yaml").exists() else []))
    assert child.wait() == 0, child.said()
    assert weights(run) == weights(whole[1])
    assert kills and not (run / ".new").exists()
    assert set(json.loads((run / "manifest.json").read_text())["files"]) >= snapshot(run).keys()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(start, run, whole, draw, capsys):
    shutil.rmtree(run / "final")
    before = snapshot(run / "checkpoint-4")
    names = sorted(path.name for path in (run / "checkpoint-6").iterdir() if path.name != "complete.json")
    assert len(names) > 10
    name, how = draw.choice(names), draw.choice(HOW)
    damage(run / "checkpoint-6" / name, how, draw)
    start("run", "--resume", text=whole[0])
    printed = capsys.readouterr().out
    assert "Passed over: checkpoint-6 is damaged: " in printed and name in printed, (name, how)
    assert f"Resuming from {run}/checkpoint-4\n" in printed
    assert weights(run) == weights(whole[1]) and snapshot(run / "checkpoint-4") == before, (name, how)


def test_every_file_of_a_checkpoint_counts(run, draw):
    folder, listed = run / "checkpoint-6", json.loads((run / "manifest.json").read_text())["files"]
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for how in HOW:
            damage(path, how, draw)
            found, _, damaged = find_resumable(run, 1, listed)
            if path.name != "complete.json" or how in ("missing", "empty", "zeroed"):  # else it may be readable
                assert found == run / "checkpoint-4", (path, how)
                assert path.name in damaged[0] and "\n" not in damaged[0]
            path.write_bytes(content)
    assert find_resumable(run, 1, listed)[0] == folder
    (folder / "complete.json").unlink()
    assert find_resumable(run, 1)[1:] == (json.loads((run / "checkpoint-4/complete.json").read_text()), [])  # cut short


@pytest.mark.parametrize(
    ("old", "new"), [('"processes"', '"process"'), ('"files"', '"filez"'), ('.pt": "', '.pt": 1, "": "')]
)
def test_a_mark_with_other_words_is_damaged(run, old, new):
    mark = run / "checkpoint-6" / "complete.json"
    mark.write_text(mark.read_text().replace(old, new, 1))
    found, _, damaged = find_resumable(run, 1)
    assert found == run / "checkpoint-4" and damaged == [f"checkpoint-6 is damaged: {mark} cannot be read"]


def test_no_whole_checkpoint_is_a_refusal(start, run, whole):
    for path in run.glob("checkpoint-*/optimizer.pt"):
        path.unlink()
    before = snapshot(run)
    said = refused(lambda: start("run", "--resume", text=whole[0]), "no whole checkpoint is left")
    assert f"checkpoint-6 is damaged: {run}/checkpoint-6/optimizer.pt is missing" in said
    assert snapshot(run) == before


def test_a_full_disk_is_one_line_and_the_run_goes_on_afterwards(whole, tmp_path, draw):
    run = tmp_path / "run"
    largest = max(path.stat().st_size for path in whole[1].rglob("*") if path.is_file())
    child = Child(run, whole[0], limit=draw.randrange(100, largest))
    assert child.wait() == 1, child.said()
    said = child.one_line()
    assert "MiB are free" in said and ("is kept, and --resume" in said or "no checkpoint had been saved" in said), said
    if (run / "recipe.yaml").exists():
        child = Child(run, whole[0], "--resume")
    else:
        assert not run.exists() or not snapshot(run)
        child = Child(run, whole[0])
    assert child.wait() == 0, child.said()
    assert weights(run) == weights(whole[1])


@pytest.mark.parametrize("text", ["Training a byte-level", "step      3/6"])
def test_ctrl_c_is_one_line(whole, tmp_path, text):
    run = tmp_path / "run"
    child = Child(run, whole[0])
    child.wait_for(text)
    child.kill(signal.SIGINT)
    assert child.wait() == 130, child.said()
    kept = f"{run}/checkpoint-2 is kept, and --resume goes on from it" if "3/6" in text else "no checkpoint had been"
    assert child.one_line().startswith(f"error: interrupted; {kept}")
    child = Child(run, whole[0], *(["--resume"] if (run / "recipe.yaml").exists() else []))
    assert child.wait() == 0, child.said()
    assert weights(run) == weights(whole[1])


def test_a_folder_that_cannot_be_made_is_one_line(whole, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    child = Child(tmp_path / "link" / "run", whole[0], folder=tmp_path)
    assert child.wait() == 1 and child.one_line().startswith("error: Not a directory: "), child.said()
