"""What is published names no folder, user or token of this machine: every byte is searched, archives unpacked."""

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

from broken_runs import LAST, write_texts

from modeling_gqa.conversion.job import Job
from training.uptrain import uptrain

TELL_TALE, TOKEN = "telltale", "hf_verysecrettoken"


def contents(name: str, data: bytes):
    """Yield `data`, and all that is packed inside it."""
    yield name, data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from contents(f"{name}:{member}", archive.read(member))
    elif data[:2] == b"\x1f\x8b":
        yield from contents(f"{name}:unpacked", gzip.decompress(data))
    elif tarfile.is_tarfile(io.BytesIO(data)):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for packed in archive.getmembers():
                if packed.isfile():
                    yield from contents(f"{name}:{packed.name}", archive.extractfile(packed).read())


def leaks(folder: Path, *words: str) -> list[str]:
    """Files below `folder` that hold one of `words`, in their names or their bytes."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        packed = contents(relative, path.read_bytes()) if path.is_file() else [(relative, b"")]
        for name, data in packed:
            found += [name for word in words if word in name or word.encode() in data.lower()]
            found += [name for word in words if word.encode("utf-16-le") in data.lower()]
    return found


def test_the_search_sees_into_archives(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", gzip.compress(b"x TellTale x" * 9))
    assert leaks(tmp_path, TELL_TALE) == ["a.zip:inside:unpacked"]
    assert leaks(tmp_path, TOKEN) == []


def test_nothing_leaks(start, tmp_path, monkeypatch, whole):
    home = tmp_path / TELL_TALE
    (home / "corpora").mkdir(parents=True)
    text = write_texts(home / "corpora" / "books")
    shutil.copytree(whole[1] / "tokenizer", home / "vocabulary")
    settings = home / "vocabulary" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"_name_or_path": f"{home}/vocabulary"}))
    (home / "model").mkdir()
    config = json.loads((whole[1] / "final" / "config.json").read_text())
    (home / "model" / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "auto_map"}))
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    named = {
        "tokenizer": str(home / "vocabulary"),
        "preset": str(home / "model"),
        "run_name": str(home / "named"),
        "hub_token": TOKEN,
        "model_overrides": None,
    }
    run = start(f"{TELL_TALE}/runs/mine", text=text, report_to="tensorboard", **named)
    assert leaks(run / "final", TELL_TALE, TOKEN) == []
    assert "books" in (run / "final" / "README.md").read_text()
    for checkpoint in run.glob("checkpoint-*"):
        assert leaks(checkpoint, TOKEN) == []
    assert leaks(run, TOKEN) == []

    job = Job(str(run / "final"), home / "converted", attention_kind="mqa", text=[text], calibration_tokens=256)
    job.evaluation_tokens = 256
    job.run(False, lambda description: iter)
    assert leaks(home / "converted", TELL_TALE, TOKEN) == []

    recipe = home / "uptrain.yaml"
    recipe.write_text(
        f"student: {home}/converted\nteacher: {run}/final\ndata_files: [{text}]\nmax_steps: {LAST}\n"
        "sequence_length: 32\nper_device_train_batch_size: 2\nmax_eval_blocks: 2\nvalidation_fraction: 0.2\n"
    )
    uptrain([str(recipe), "--output_dir", str(home / "uptrained")])
    assert leaks(home / "uptrained" / "final", TELL_TALE, TOKEN) == []
