"""A target is replaced whole or not at all, by one process at a time, and only where it is a checkpoint or new."""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from modeling_gqa.checkpoints.gguf_writing import new_gguf
from modeling_gqa.checkpoints.writing import check_target, new_checkpoint, refuse_overlap, why_kept
from modeling_gqa.common.atomic import read_object, replacing, write_text
from modeling_gqa_cli.errors import UserError


def checkpoint(folder, content="old"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_text(content)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def refused(match, target, force=False):
    with pytest.raises(UserError, match=match), new_checkpoint(target, force):
        pytest.fail("entered")


OLD = ["config.json", "model.safetensors"]


def test_a_target_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "made" / "on" / "the" / "way"
    with new_checkpoint(target, force=False) as aside:
        assert aside.parent == target.parent
        (aside / "new").touch()
        assert not target.exists()
    assert names(target) == ["new"]
    assert names(target.parent) == ["way"]


def test_an_existing_target_needs_force_and_is_replaced_at_the_end(tmp_path):
    target = checkpoint(tmp_path / "target")
    refused(r"target exists already: .*\(--force\)", target, force=False)
    with new_checkpoint(target, force=True) as aside:
        (aside / "new").touch()
        assert names(target) == OLD
    assert names(target) == ["new"]
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_nothing_behind(existing, error, tmp_path):
    target = tmp_path / "made" / "target"
    if existing:
        checkpoint(target)

    def fail():
        with new_checkpoint(target, force=True) as aside:
            (aside / "half").touch()
            raise error

    with pytest.raises(error):
        fail()
    if existing:
        assert names(target) == OLD
        assert names(target.parent) == ["target"]
    else:
        assert names(tmp_path) == []


@pytest.mark.parametrize(("kind", "force"), [("folder", False), ("file", True)])
def test_a_target_that_appears_meanwhile_is_kept(kind, force, tmp_path):
    """The target is checked again at the end: what someone else wrote there meanwhile is not replaced."""
    target = tmp_path / "target"
    kept = target / "precious" if kind == "folder" else target

    def write():
        with new_checkpoint(target, force) as aside:
            (aside / "new").touch()
            kept.parent.mkdir(exist_ok=True)
            kept.write_text("kept")

    with pytest.raises(UserError, match="target exists already" if kind == "folder" else "target is a file"):
        write()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("target", ["a/b", "a", "a/b/../b", "link"])
def test_a_target_around_what_is_read_is_refused(target, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    with pytest.raises(UserError, match="is the text, or holds it"):
        refuse_overlap(tmp_path / "a" / "b", tmp_path / target, "text")
    refuse_overlap(tmp_path / "a" / "b", tmp_path / "a" / "c")


@pytest.mark.parametrize("target", ["a/b", "a/b/c", "link/b"])
def test_a_target_in_what_is_read_is_refused(target, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(UserError, match="lies in the source"):
        refuse_overlap(tmp_path / "a", tmp_path / target)


# -- what force replaces


def test_what_our_commands_and_the_hub_keep_in_a_checkpoint_is_replaced(tmp_path):
    """`--force` may delete every file that this package, transformers or the Hub puts into a checkpoint."""
    folder = checkpoint(tmp_path / "target")
    (folder / "additional_chat_templates").mkdir()
    for name in (
        "README.md", "LICENSE.txt", ".gitattributes", "conversion.json", "generation_config.json", "vocab.json",
        "tokenizer.model", "tokenizer_config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin.index.json",
        "model.safetensors.index.json", "additional_chat_templates/tool_use.jinja", "rotary.py",
    ):  # fmt: skip
        (folder / name).touch()
    (folder / "modeling_own.py").write_text("import torch\nfrom .layers import Norm\n")
    (folder / "layers.py").write_text("from .rotary import rotate\n")
    assert why_kept(folder) is None
    (tmp_path / "empty").mkdir()
    assert why_kept(tmp_path / "empty") is None


FOREIGN = [
    "thesis.docx", ".git/HEAD", "data/a.txt", "checkpoint-500/model.safetensors", "train.py", "vocab_of_mine.txt",
    "optimizer.pt", "training_args.bin", "recipe.yaml", "notes/README.md", "additional_chat_templates/mine.txt",
    "additional_chat_templates/deep/a.jinja", "vocab.txt/mine", "readme.md.bak", "layers.py",
    "model-backup.safetensors", "model2.safetensors", "pytorch_model_old.bin",
]  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_part_of_a_checkpoint_is_kept(name, tmp_path):
    target = checkpoint(tmp_path / "target")
    (target / name).parent.mkdir(exist_ok=True, parents=True)
    (target / name).write_text("mine")
    first = name if name.startswith("additional") else name.split("/")[0]
    first = "additional_chat_templates/deep" if "deep" in name else first
    refused(rf"holds other things than a checkpoint \({first}\)", target, True)
    assert (target / name).read_text() == "mine"
    assert names(tmp_path) == ["target"]


def test_links_are_kept_but_for_those_to_files(tmp_path):
    """Deleting one deletes no file; what a link to a folder or to nothing is for is not known."""
    target = checkpoint(tmp_path / "target")
    (tmp_path / "blob").touch()
    (target / "model-00002-of-00002.safetensors").symlink_to("../blob")
    assert why_kept(target) is None
    for link, to in (("additional_chat_templates", ".."), ("vocab.txt", "nowhere")):
        (target / link).symlink_to(to)
        assert why_kept(target) == f"holds other things than a checkpoint ({link})"
        (target / link).unlink()


@pytest.mark.parametrize(
    "config", [None, "", "[]", "{}", '{"model_type": 3}', "[" * 100_000], ids=lambda text: str(text)[:20]
)
def test_a_folder_with_a_config_is_no_checkpoint_yet(config, tmp_path):
    """Without a config.json that names a model_type, `--force` deletes nothing."""
    folder = checkpoint(tmp_path / "target")
    (folder / "config.json").write_text(config or "")
    if config is None:
        (folder / "config.json").unlink()
    assert why_kept(folder).startswith("is no checkpoint")


def test_what_cannot_be_replaced_is_kept(tmp_path, monkeypatch):
    """A checkpoint without weights, a file, the folder one is in, one that holds it, and a mount point."""
    target = checkpoint(tmp_path / "target")
    (target / "inner").mkdir()
    for folder in (target, target / "inner"):
        monkeypatch.chdir(folder)
        refused("is the folder you are in, or holds it", target, True)
    monkeypatch.chdir(tmp_path)
    (target / "inner").rmdir()
    refused("target/model.safetensors is a file", target / "model.safetensors", True)
    (target / "model.safetensors").unlink()
    assert why_kept(target).startswith("is no checkpoint")
    mount = next(path for path in map(Path, ("/proc", "/dev")) if os.path.ismount(path))
    with pytest.raises(UserError, match=r"^/(dev|proc) is a mount point"):
        check_target(mount, True)


def test_a_link_to_a_checkpoint_stays_and_the_checkpoint_is_replaced(tmp_path):
    target = checkpoint(tmp_path / "disk" / "target")
    (tmp_path / "link").symlink_to("disk/target")
    with new_checkpoint(tmp_path / "link", force=True) as aside:
        assert aside.parent == target.parent
        (aside / "new").touch()
    assert (tmp_path / "link").is_symlink() and names(target) == ["new"] and names(target.parent) == ["target"]


# -- killed processes, and living ones

FORK = multiprocessing.get_context("fork")  # what is imported here is imported there


def write_and_wait(target, pipe):
    with new_checkpoint(target, force=True) as folder:
        (folder / "half").touch()
        pipe.send(folder)
        time.sleep(600)


@pytest.fixture
def writer(tmp_path):
    """A living process that writes `target`, and the folder in which it does."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=write_and_wait, args=(tmp_path / "target", there), daemon=True)
    process.start()
    yield process, here.recv()
    process.kill()
    process.join()


def test_one_process_at_a_time_and_what_a_dead_one_leaves_is_swept(writer, tmp_path):
    """A second writer is refused while the first lives; once that is killed, its half-written folder is removed."""
    process, folder = writer
    target = checkpoint(tmp_path / "target")
    before = names(tmp_path)
    refused(f"process {process.pid} is writing {target} now", target, force=True)
    assert names(tmp_path) == before and (folder / "half").exists()  # the other's are left alone
    process.kill()
    process.join()
    assert names(tmp_path) == before
    with new_checkpoint(target, force=True) as aside:
        assert not (folder / "half").exists()
        (aside / "new").touch()
    assert names(tmp_path) == ["target"] and names(target) == ["new"]


def test_two_writers_in_one_process(tmp_path):
    """The lock also holds within a process, for one target, and not for another."""
    with new_checkpoint(tmp_path / "target"):
        refused(f"process {os.getpid()} is writing", tmp_path / "target")
        with new_checkpoint(tmp_path / "other"):
            pass
    assert names(tmp_path) == ["other", "target"]


def left_by_kill(tmp_path, *roles):
    (tmp_path / ".target.lock").touch()
    for role in roles:
        checkpoint(tmp_path / f".target.{role}-12ab", content=role)


def weights(tmp_path):
    return (tmp_path / "target" / "model.safetensors").read_text()


@pytest.mark.parametrize("found", ["old", "new"])
def test_what_a_kill_left_is_put_back_or_swept(found, tmp_path):
    """Killed between the two renames the old checkpoint comes back; killed after them it is deleted."""
    left_by_kill(tmp_path, "old", *(["new"] if found == "old" else []))
    if found == "new":
        checkpoint(tmp_path / "target", content="new")
    refused("target exists already", tmp_path / "target")
    assert names(tmp_path) == ["target"] and weights(tmp_path) == found


def test_what_was_moved_away_is_kept_where_something_else_took_its_place(tmp_path):
    """If the target is neither the old nor the new checkpoint, nothing is deleted and the user decides."""
    left_by_kill(tmp_path, "old", "new")
    checkpoint(tmp_path / "target", content="someone's")
    before = names(tmp_path)
    refused(r"\.target\.old-12ab is what a killed command had moved", tmp_path / "target", force=True)
    assert names(tmp_path) == before and weights(tmp_path) == "someone's"


@pytest.mark.parametrize("name", [".target.new-thesis", ".target.new-12ab.txt", ".target2.new-12", ".xtarget.old-12"])
def test_only_names_of_ours_are_swept(name, tmp_path):
    """Files, and folders whose names only resemble those of a writer, are not removed."""
    (tmp_path / name).mkdir()
    (tmp_path / ".target.new-12").write_text("a file is none of ours")
    with new_checkpoint(tmp_path / "target"):
        pass
    assert names(tmp_path) == sorted([name, ".target.new-12", "target"])


def test_the_users_folders_and_locks_are_kept_whatever_their_names(tmp_path):
    for name in (".target.new-2024", ".target.old-2023"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").touch()
    before = names(tmp_path)
    with new_checkpoint(tmp_path / "target"):
        pass
    assert names(tmp_path) == sorted([*before, "target"])
    (tmp_path / ".other.lock").write_text("mine")
    refused(r"\.other\.lock is no lock of ours", tmp_path / "other")
    assert (tmp_path / ".other.lock").read_text() == "mine"


@pytest.mark.parametrize("step", range(4))
def test_stopped_between_any_two_renames(step, tmp_path, monkeypatch):
    """Each rename is interrupted before it is done, and after: the target is old or new, and nothing else is left."""
    target = checkpoint(tmp_path / "target")
    rename, count = Path.replace, [0]

    def interrupted(path, to):
        number, after = divmod(step, 2)
        count[0] += 1
        if count[0] - 1 != number:
            return rename(path, to)
        if after:
            rename(path, to)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), new_checkpoint(target, force=True) as aside:
        (aside / "new").touch()
    assert names(tmp_path) == ["target"] and names(target) == (["new"] if step == 3 else OLD)


@pytest.mark.parametrize("name", ["rmtree", "unlink"])
def test_stopped_while_cleaning_up(name, tmp_path, monkeypatch):
    """Ctrl-C during the cleaning up does not cut it short."""
    owner, function = (shutil, "rmtree") if name == "rmtree" else (Path, "unlink")
    clean, count = getattr(owner, function), [0]

    def interrupted(*arguments, **keywords):
        count[0] += 1
        if count[0] == 1:
            raise KeyboardInterrupt
        return clean(*arguments, **keywords)

    monkeypatch.setattr(owner, function, interrupted)
    checkpoint(tmp_path / "target")
    with pytest.raises(KeyboardInterrupt), new_checkpoint(tmp_path / "target", force=True) as aside:
        (aside / "new").touch()
    assert names(tmp_path) == ["target"] and names(tmp_path / "target") == ["new"]


@pytest.mark.parametrize(
    ("target", "message"), [("file/target", "/file is a file"), ("long" * 70, "file name too long")]
)
def test_what_cannot_be_written_is_said(target, message, tmp_path):
    (tmp_path / "file").touch()
    refused(f"cannot be written: .*{message}", tmp_path / target)
    assert names(tmp_path) == ["file"]


def as_another_user(function, *arguments):
    """What a function raises where file permissions count, as they do not for root."""

    def call(pipe):
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(error)

    here, there = FORK.Pipe()
    process = FORK.Process(target=call, args=(there,), daemon=True)
    process.start()
    answer = here.recv()
    process.join()
    return answer


def write(target):
    with new_checkpoint(target, force=True):
        pytest.fail("entered")


def test_a_folder_that_cannot_be_written_to_is_said():
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name)
        checkpoint(folder / "target")
        folder.chmod(0o555)
        said = as_another_user(write, folder / "target")
        folder.chmod(0o755)
        assert isinstance(said, UserError) and str(said) == f"{folder}/target cannot be written: permission denied"
        assert names(folder) == ["target"]


# -- a file


def test_an_existing_file_needs_force_and_to_be_of_its_kind(tmp_path):
    target = tmp_path / "made" / "model.gguf"
    with new_gguf(target) as path:
        path.write_bytes(b"GGUF old")
        assert not target.exists()
    with pytest.raises(UserError, match=r"exists already: .*\(--force\)"), new_gguf(target):
        pytest.fail("entered")
    with new_gguf(target, force=True) as path:
        path.write_bytes(b"GGUF new")
        assert target.read_bytes() == b"GGUF old"
    assert target.read_bytes() == b"GGUF new"
    target.write_bytes(b"mine")
    with pytest.raises(UserError, match="is no GGUF file"), new_gguf(target, force=True):
        pytest.fail("entered")
    target.unlink()
    target.mkdir()
    with pytest.raises(UserError, match="is a folder"), new_gguf(target, force=True):
        pytest.fail("entered")
    assert names(target.parent) == ["model.gguf"]


@pytest.mark.parametrize("step", ["writing", "before", "after"])
def test_a_failure_leaves_the_file_old_or_new(step, tmp_path, monkeypatch):
    target, replace = tmp_path / "model.gguf", Path.replace
    target.write_bytes(b"GGUF old")

    def failing(path, to):
        if step == "after":
            replace(path, to)
        raise KeyboardInterrupt

    def write():
        with new_gguf(target, force=True) as path:
            path.write_bytes(b"GGUF new")
            if step == "writing":
                raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert target.read_bytes() == (b"GGUF new" if step == "after" else b"GGUF old")
    assert names(tmp_path) == ["model.gguf"]


def test_one_file_is_old_or_new(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, '{"name": "\udcff"}')
    assert read_object(path) == {"name": "\udcff"}
    with pytest.raises(FileNotFoundError), replacing(path) as part:
        part.with_name("c.json").rename(part)
    write_text(tmp_path / "b.json", "{}")
    assert names(tmp_path) == ["a.json", "b.json"] and path.read_text().startswith("{")
    assert read_object(tmp_path / "b.json") == {} and read_object(tmp_path / "c.json") is None
