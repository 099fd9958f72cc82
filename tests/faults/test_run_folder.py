"""A run's folder: what is refused, what is deleted, who may write, what a resumption needs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from broken_runs import ROOT, refused, snapshot, weights, write_texts

from modeling_gqa.common.console import Interrupted
from modeling_gqa.training.run_folder import RunFolder
from modeling_gqa.training.trainer import PretrainTrainer

# -- what is not a run's


@pytest.mark.parametrize(
    "name", ["data/thesis.txt", "tokenizer/mine.json", "final/thesis.docx", "checkpoint-2/notes", "recipe.yaml", "data"]
)
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["plain", "overwrite"])
def test_the_users_files_under_our_names_are_refused(start, tmp_path, name, overwrite):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    refused(lambda: start("run", *overwrite), str(path), kept=tmp_path / "run")
    assert {item.name for item in (tmp_path / "run").iterdir()} == {name.split("/")[0]}


def test_a_manifest_of_somebody_else_is_refused(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text('{"name": "my web application"}')
    refused(lambda: start("run"), "manifest.json is not the list of files that runs write")
    assert (tmp_path / "run" / "manifest.json").read_text() == '{"name": "my web application"}'
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_a_folder_in_which_nothing_was_written_disappears(start, tmp_path):
    refused(lambda: start("deep/er/run", "--data_files", str(tmp_path / "absent")), "nothing to read")
    assert not (tmp_path / "deep").exists()


def test_a_list_that_cannot_be_written_leaves_nothing_aside(run, monkeypatch):
    def full(*descriptor):
        raise OSError(28, "No space left on device")

    before = {path.name for path in run.iterdir()}
    folder = RunFolder(run)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.open()
    folder.close()
    assert {path.name for path in run.iterdir()} == before | {".run.lock"}


def test_other_files_stay_beside_a_run(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    run = start("run")
    start("run", "--overwrite")
    assert (run / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["final/thesis.docx", "checkpoint-4/notes.txt", "data/extra/corpus.txt"])
def test_overwrite_keeps_what_was_added_to_a_run(start, run, name):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("years of work")
    refused(lambda: start("run", "--overwrite"), name.split("/")[-1], kept=run)


def test_a_link_in_the_place_of_a_folder_is_not_followed(start, run, tmp_path):
    shutil.move(run / "final", tmp_path / "elsewhere")
    (run / "final").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    refused(lambda: start("run", "--overwrite"), "final is not what a run wrote")
    folder = RunFolder(run)
    folder.open()
    folder.remove_run()
    folder.close()
    assert snapshot(tmp_path / "elsewhere") == before


def test_a_manifest_names_nothing_outside_its_folder(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    manifest = json.loads((run / "manifest.json").read_text())
    for name in ("../thesis.txt", str(tmp_path / "thesis.txt"), "final/../../thesis.txt", "thesis.txt"):
        manifest["files"][name] = None
    (run / "manifest.json").write_text(json.dumps(manifest | {"writing": "../run"}))
    (run / "thesis.txt").write_text("more work")
    folder = RunFolder(run)
    folder.open()
    folder.remove_run()
    folder.close()
    assert (tmp_path / "thesis.txt").exists() and (run / "thesis.txt").exists() and not (run / "final").exists()


def test_a_folder_that_overlaps_what_is_read_is_refused(start, tmp_path, run, monkeypatch):
    text = write_texts(tmp_path / "texts" / "corpus")
    before = snapshot(tmp_path)
    for options in (
        ("texts",),  # holds the text
        ("texts/corpus",),
        ("texts/corpus/run",),
        ("texts/corpus/run", "--data_files", f"{text}/**/*.txt"),
        ("texts/corpus", "--data_files", f"{text}/*.txt"),
        ("run", "--tokenizer", str(run / "tokenizer"), "--overwrite"),
        ("run/tokenizer/run", "--tokenizer", str(run / "tokenizer")),
        ("run", "--preset", str(run / "final"), "--overwrite"),
    ):
        monkeypatch.chdir(tmp_path)
        refused(lambda options=options: start(*options, text=text), "overlaps the (text|tokenizer|preset)")
        assert snapshot(tmp_path).items() >= before.items()
    # A pattern that does not search below leaves the folder beside its files alone.
    start("texts/run", "--data_files", f"{text}/*.txt", max_steps=1)


# -- what is deleted, and when


def test_what_fails_deletes_nothing(start, run, tmp_path):
    before = snapshot(run)
    short = tmp_path / "short"
    short.mkdir()
    (short / "a.txt").write_text("a few words")
    for options in (
        ("--seed", "-1"),
        ("--learning_rate", "nan"),
        ("--data_files", str(short)),
        ("--data_files", str(tmp_path / "absent")),
        ("--tokenizer", str(tmp_path / "absent")),
        ("--preset", "tiny-absent"),
        ("--attn_implementation", "absent"),
        ("--report_to", "absent"),
        ("--lr_scheduler_kwargs", '{"absent": 1}'),
        ("--sequence_length", "65"),
    ):
        refused(lambda options=options: start("run", "--overwrite", *options), ".")
        assert snapshot(run) == before, options


@pytest.mark.parametrize("gone", [("checkpoint-2", "checkpoint-4", "checkpoint-6"), ("final", "recipe.yaml")])
def test_what_is_left_of_a_run_is_a_run(start, run, gone):
    for name in gone:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    refused(lambda: start("run"), "already holds a run", kept=run)


@pytest.mark.parametrize(
    "change",
    [{"notes": []}, {"notes": {"models": [1]}}, {"files": []}, {"files": {"data/train.npy": 3}}],
    ids=str,
)
def test_a_damaged_manifest_is_one_line(start, run, whole, change):
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"writer": "me"} | change))
    refused(lambda: start("run", "--resume", text=whole[0]), "manifest.json is not the list", kept=run)


def test_only_folders_that_are_written_file_by_file_are_swept(run):
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"writing": "final"}))
    before = snapshot(run)
    folder = RunFolder(run)
    folder.open()
    folder.close()
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["a" * 300, "a\udcff", "a\nb"], ids=ascii)
def test_a_name_that_no_folder_can_have_is_one_line(start, whole, name):
    refused(lambda: start(name, text=whole[0]), "name")


def test_the_home_folder_may_be_written_as_a_tilde(start, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    start("other", "--output_dir=~/run", "--max_steps", "2")
    start("other", "--output_dir=~/run", "--max_steps", "2", "--resume")
    assert (tmp_path / "run" / "final").is_dir() and not (tmp_path / "other").exists()


def test_overwrite_leaves_nothing_of_the_old_run(start, run, whole):
    start("run", "--overwrite", "--max_steps", "2", text=whole[0])
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    listed = json.loads((run / "manifest.json").read_text())["files"]
    assert set(listed) == snapshot(run).keys()


# -- one writer


def test_a_second_writer_is_told_of_the_first(start, run, whole):
    code = (
        "from modeling_gqa.training.run_folder import RunFolder\n"
        f"folder = RunFolder({str(run)!r})\nfolder.open()\nprint('open', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "open\n"
        before = snapshot(run)
        for options in ((), ("--overwrite",), ("--resume",)):
            refused(
                lambda options=options: start("run", *options, text=whole[0]), f"process {first.pid} on .* is writing"
            )
        assert snapshot(run) == before
        first.kill()
    start("run", "--resume", text=whole[0])


# -- resumption


def test_a_resumed_run_ends_as_if_nothing_had_happened(start, stopped, whole):
    assert weights(start("run", "--resume", text=whole[0])) == weights(whole[1])


def test_evaluation_may_be_changed_on_resume(start, stopped, whole):
    options = ("--resume", "--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "1")
    assert weights(start("run", *options, text=whole[0])) == weights(whole[1])


def test_resume_needs_no_text_where_it_has_the_tokens(start, stopped, whole, tmp_path):
    text = tmp_path / "copy"
    shutil.copytree(whole[0], text)
    run = start("moved", "--max_steps", "2", text=text)
    shutil.rmtree(text)
    text.write_text("no folder any more")
    start("moved", "--resume", "--max_steps", "2", text=text)
    assert (run / "final").exists()


@pytest.mark.parametrize("name", ["data", "tokenizer", "data/train.npy", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_lost_tokens_are_made_again_the_same(start, stopped, whole, name, how):
    path = stopped / name
    if how == "missing":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        path = path if path.is_file() else next(path.iterdir())
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert weights(start("run", "--resume", text=whole[0])) == weights(whole[1])


def test_lost_tokens_of_a_changed_text_are_refused(start, tmp_path):
    run = start("run")
    shutil.rmtree(run / "data")
    before = snapshot(run)
    for path in (tmp_path / "text").iterdir():
        path.write_text(path.read_text() + " more")
    refused(lambda: start("run", "--resume"), "does not give the tokens that the run was trained on")
    shutil.rmtree(tmp_path / "text")
    (tmp_path / "text").write_text("")
    refused(lambda: start("run", "--resume"), "cannot be made again")
    assert snapshot(run) == before


def test_resume_without_a_checkpoint_keeps_the_finished_model(start, run, whole):
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path)
    refused(lambda: start("run", "--resume", text=whole[0]), "finished model and no checkpoint", kept=run)


def test_resume_of_a_finished_run_keeps_what_was_added(start, run, whole):
    (run / "final" / "model.gguf").write_text("converted by hand")
    start("run", "--resume", text=whole[0])
    assert (run / "final" / "model.gguf").exists() and weights(run) == weights(whole[1])


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_resume_keeps_what_was_edited_in_a_finished_model(start, run, whole, name):
    (run / "final" / name).write_text("years of work")
    refused(lambda: start("run", "--resume", text=whole[0]), f"final/{name} has changed since it was written", kept=run)


def test_a_final_model_that_was_being_replaced_is_not_edited(run, monkeypatch):
    folder = RunFolder(run)
    folder.open()
    replace = os.replace

    def interrupted(source, target):
        if "final" in Path(target).parts:
            raise KeyboardInterrupt
        replace(source, target)

    with folder.staging() as staged:
        shutil.copytree(run / "final", staged / "final")
        (staged / "final" / "README.md").write_text("another card")
        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.place("final")
        monkeypatch.undo()
    folder.close()
    folder = RunFolder(run)
    folder.open()
    assert folder.edited("final") is None
    (run / "final" / "README.md").write_text("years of work")
    assert folder.edited("final") == run / "final" / "README.md"
    folder.close()


def test_a_run_may_stand_beside_files_that_a_pattern_gives(start, tmp_path):
    write_texts(tmp_path / "text")
    options = ("--max_steps", "2", "--data_files", str(tmp_path / "text" / "*"))
    start("text/run", *options)
    start("text/run", *options, "--resume")


def test_a_changed_stream_is_refused(start, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} {'word ' * 40}"}) + "\n" for number in range(8))
    )
    streaming = {"streaming": True, "tokenizer": None, "validation_fraction": 0.3}
    whole = start("whole", **streaming)
    run = start("run", **streaming)
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "final")
    start("run", "--resume", **streaming)
    assert weights(run) == weights(whole)
    shutil.rmtree(run / "checkpoint-6")
    rows = (tmp_path / "text" / "rows.jsonl").read_text()
    (tmp_path / "text" / "rows.jsonl").write_text(rows.replace("word", "verb"))
    refused(lambda: start("run", "--resume", **streaming), "the stream has changed", kept=run)


# -- what is left in the process


def test_training_that_fails_gives_sigterm_back(start, monkeypatch):
    """Whoever trains from Python can end the process afterwards."""
    before = signal.getsignal(signal.SIGTERM)

    def fail(*_, **__):
        assert signal.getsignal(signal.SIGTERM) != before
        raise KeyboardInterrupt

    monkeypatch.setattr(PretrainTrainer, "training_step", fail)
    with pytest.raises(Interrupted):
        start("run")
    assert signal.getsignal(signal.SIGTERM) == before
