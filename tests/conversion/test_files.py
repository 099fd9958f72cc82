"""Checkpoint folders are found and read, and nothing outside them is."""

import errno
import io
import json
import os
from functools import partial

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from modeling_gqa.checkpoints import checkpoint, files
from modeling_gqa.checkpoints.files import (
    check_companions,
    check_finite,
    check_tokenizer_files,
    copy_files,
    local_folder,
    open_tensors,
    read_json,
)
from modeling_gqa.costs import configurations
from modeling_gqa_cli.errors import UserError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_a_name_is_found_in_the_offline_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    assert local_folder("org/name").samefile(snapshot)
    with pytest.raises(UserError, match="org/other is no folder here, and no model of this name") as raised:
        local_folder("org/other")
    assert "\n" not in str(raised.value)


def test_what_is_fetched_from_the_hub(monkeypatch):
    """Safetensors, JSON, tokenizer, licence and card are downloaded, and no folder but that of chat templates."""
    wanted = [
        "config.json",
        "model-1.safetensors",
        "LICENSE.txt",
        "README.md",
        "additional_chat_templates/tool.v2.jinja",
    ]
    others = ["pytorch_model.bin", "onnx/config.json", "original/tokenizer.model", "model_fp16/model.safetensors"]

    def fetch(source, **patterns):
        return "+".join(filter_repo_objects(wanted + others, **patterns))

    monkeypatch.setattr(files, "snapshot_download", fetch)
    assert str(local_folder("org/name")) == "+".join(wanted)
    monkeypatch.setattr(checkpoint, "hf_hub_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    for function in (local_folder, partial(checkpoint.open_checkpoint, download=False)):
        with pytest.raises(UserError, match=r"test_files.py is a file: give the folder"):
            function(__file__)


MISSING = ["runs/mal", "runs/mla/finl", "./runs/ml", "/no/such/folder", "has space", "~/nothing", "runs/modl.gguf"]


@pytest.mark.parametrize("source", MISSING)
def test_a_missing_path_is_refused_without_asking_the_hub(source, tmp_path, monkeypatch):
    """Everywhere that a checkpoint or a configuration is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mla" / "final").mkdir(parents=True)
    for module, name in (
        (files, "snapshot_download"),
        (checkpoint, "hf_hub_download"),
        (configurations, "hf_hub_download"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the Hub was asked"))
    opened = [local_folder, checkpoint.open_checkpoint, partial(checkpoint.open_checkpoint, download=False)]
    for function in (*opened, configurations.find_model):
        with pytest.raises(UserError, match="does not exist"):
            function(source)


def test_what_may_be_a_name_on_the_hub_is_asked_for_there(tmp_path, monkeypatch):
    """Where no folder here is called like its owner; and where one is, once the Hub's cache holds it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(files, "snapshot_download", lambda source, **_: f"fetched {source}")
    for name in ("gpt2", "meta-llama/Llama-3.2-1B", "run-1/mla"):
        assert str(local_folder(name)) == f"fetched {name}"
    with pytest.raises(UserError, match="hf download runs/mla"):
        local_folder("runs/mla")
    cached = tmp_path / "hub" / "models--runs--mla"
    (cached / "snapshots" / "1").mkdir(parents=True)
    (cached / "snapshots" / "1" / "config.json").touch()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert str(local_folder("runs/mla")) == "fetched runs/mla"


# -- nothing outside the folder


@pytest.fixture
def cache(tmp_path):
    """A snapshot as the Hub's cache has it: links to blobs, in a folder that is itself reached by a link."""
    blobs = tmp_path / "disk" / "models--org--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "hub").symlink_to("disk")
    save_file(TENSORS, blobs / "12ab")
    (blobs / "34cd").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/12ab")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/34cd")
    return tmp_path / "hub" / "models--org--name" / "snapshots" / ("1" * 40)


def test_a_hub_caches_links_are_followed_to_its_blobs_and_no_further(cache, tmp_path):
    assert torch.equal(open_tensors(cache)["a"].load(), TENSORS["a"])
    check_companions(cache, vocab_size=1)
    (tmp_path / "copy").mkdir()
    copy_files(cache, tmp_path / "copy", ["*.json"])
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "copy" / "tokenizer.json").is_symlink()
    (tmp_path / "mine").write_text("secret")
    (cache / "LICENSE").symlink_to(tmp_path / "mine")
    for read in (lambda: check_companions(cache, 1), lambda: copy_files(cache, tmp_path / "copy", ["LICENSE*"])):
        with pytest.raises(UserError, match=f"LICENSE leads out of the checkpoint, to {tmp_path}/mine: put the"):
            read()
    assert not (tmp_path / "copy" / "LICENSE").exists()


def test_links_within_a_folder_are_its_own(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(TENSORS, tmp_path / "source" / "real")
    (tmp_path / "source" / "model.safetensors").symlink_to("real")
    (tmp_path / "link").symlink_to("source")
    assert open_tensors(tmp_path / "link").keys() == TENSORS.keys()


def test_paths_that_tokenizers_remember_are_not_copied(tmp_path):
    remembered = {"name_or_path": "/home/alice", "tokenizer_file": "/home/alice/tokenizer.json"}
    # Half a character is none that UTF-8 has.
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 7, "unk_token": "é", "x": "\ud800"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**remembered, **kept}))
    (tmp_path / "copy").mkdir()
    copy_files(tmp_path, tmp_path / "copy", ["*.json"])
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == kept


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "LICENSE"])
def test_what_may_not_be_read_is_said(name, tmp_path, monkeypatch):
    """Root may read all, so that the system's answer is given here."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / name).touch()
    opened = io.open

    def refuse(path, *arguments, **keywords):
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(io, "open", refuse)
    read = {"model.safetensors": open_tensors, "config.json": lambda folder: read_json(folder / name)}
    with pytest.raises(UserError, match=f"{name} cannot be read: permission denied"):
        read.get(name, lambda folder: check_companions(folder, 9))(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_sums_that_overflow_are_finite_all_the_same(dtype):
    """`check_finite` sums a tensor first; a sum that overflows is not taken for a damaged tensor."""
    largest = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    check_finite("w", largest)
    check_finite("w", torch.zeros(0, dtype=dtype))
    for value in (torch.nan, torch.inf, -torch.inf):
        for others in (largest, torch.zeros(3, 4, dtype=dtype)):
            tensor = others.clone()
            tensor[1, 2] = value
            with pytest.raises(UserError, match=f"^w holds {str(value).lstrip('-')} in {str(dtype)[6:]}: the"):
                check_finite("w", tensor)


# -- tensors


def write_shards(folder, weight_map: dict[str, str]):
    for filename in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in weight_map if weight_map[name] == filename}, folder / filename)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_described_and_read(sharded, tmp_path):
    """Shape, dtype and bytes are known from the header; `load` reads the tensor, of one file or of shards."""
    if sharded:
        write_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].shape == tuple(tensor.shape)
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].nbytes == tensor.nbytes
        assert torch.equal(tensors[name].load(), tensor)


def test_an_index_that_does_not_tell_the_truth_is_refused(tmp_path):
    """An index that names a tensor in a shard which does not hold it, or that is no JSON, is named."""
    write_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"c"'))
    with pytest.raises(UserError, match=r"says that model-1\.safetensors holds c, but it does not"):
        open_tensors(tmp_path)
    for content, message in (
        ("not json", "cannot be read"),
        ("{}", "is damaged"),
        ('{"weight_map": ["a"]}', "is damaged"),
    ):
        index.write_text(content)
        with pytest.raises(UserError, match=rf"index\.json {message}"):
            open_tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 60, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or damaged") as raised:
        open_tensors(tmp_path)
    assert "\n" not in str(raised.value)


# -- tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 9}}}),
        ("tokenizer.json", {"model": {"vocab": [["a", -1.0]] * 10}}),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<pad>"}]}),
        ("tokenizer.json", {"model": {"vocab": {"a": "0", "b": 9}}, "added_tokens": ["<pad>", {"id": None}]}),
        ("vocab.json", {"a": 0, "b": 9}),
        ("added_tokens.json", {"<pad>": 9}),
    ],
    ids=["vocabulary", "unigram", "added", "entries-without-an-id", "vocab-json", "added-json"],
)
def test_a_tokenizer_must_fit_the_embedding(name, content, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    check_tokenizer_files(tmp_path, vocab_size=10)
    with pytest.raises(UserError, match=f"does not match: {name} has the token id 9, but vocab_size=9"):
        check_tokenizer_files(tmp_path, vocab_size=9)
