"""Checkpoint folders are found and read, and nothing outside them is."""

import json

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from modeling_gqa.conversion import files
from modeling_gqa.conversion.errors import ConversionError
from modeling_gqa.conversion.files import (
    check_tokenizer,
    local_folder,
    open_tensors,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_a_folder_is_itself(tmp_path):
    assert local_folder(tmp_path) == tmp_path
    assert local_folder(str(tmp_path)) == tmp_path


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
    with pytest.raises(ConversionError, match="org/other is no folder here, and no model of this name") as raised:
        local_folder("org/other")
    assert "\n" not in str(raised.value)


def test_what_is_fetched_from_the_hub(monkeypatch):
    wanted = ["config.json", "model-1.safetensors", "LICENSE.txt", "additional_chat_templates/tool.v2.jinja"]
    others = ["pytorch_model.bin", "onnx/config.json", "original/tokenizer.model", "model_fp16/model.safetensors"]

    def fetch(source, **patterns):
        return "+".join(filter_repo_objects(wanted + others, **patterns))

    monkeypatch.setattr(files, "snapshot_download", fetch)
    assert str(local_folder("org/name")) == "+".join(wanted)


@pytest.mark.parametrize("source", ["no/such/folder", "/no/such/folder", "../name", "has space"])
def test_what_is_neither_folder_nor_name_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConversionError, match="does not exist: give the folder of a checkpoint"):
        local_folder(source)


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "weights").touch()
    with pytest.raises(ConversionError, match="weights is a file: give the folder"):
        local_folder(tmp_path / "weights")


# -- tensors


def write_shards(folder, weight_map: dict[str, str]):
    for filename in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in weight_map if weight_map[name] == filename}, folder / filename)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_described_and_read(sharded, tmp_path):
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
    write_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"c"'))
    with pytest.raises(ConversionError, match=r"says that model-1\.safetensors holds c, but it does not"):
        open_tensors(tmp_path)
    index.write_text("not json")
    with pytest.raises(ConversionError, match=r"index\.json cannot be read"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_is_refused(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=r"index\.json is damaged, .*: weight_map does not give each tensor"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(ConversionError, match=r"model\.safetensors is truncated or damaged") as raised:
        open_tensors(tmp_path)
    assert "\n" not in str(raised.value)


# -- tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 9}}}),
        ("tokenizer.json", {"model": {"vocab": [["a", -1.0]] * 10}}),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<pad>"}]}),
        ("vocab.json", {"a": 0, "b": 9}),
        ("added_tokens.json", {"<pad>": 9}),
    ],
    ids=["vocabulary", "unigram", "added", "vocab-json", "added-json"],
)
def test_a_tokenizer_must_fit_the_embedding(name, content, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    check_tokenizer(tmp_path, vocab_size=10)
    with pytest.raises(ConversionError, match=f"does not match: {name} has the token id 9, but vocab_size=9"):
        check_tokenizer(tmp_path, vocab_size=9)


@pytest.mark.parametrize(
    "content",
    [
        {"added_tokens": ["<pad>", {"content": "<s>"}, {"id": None}, {"id": 9}]},
        {"model": "BPE", "added_tokens": [{"id": 9}]},
        {"model": {"vocab": 7}, "added_tokens": [{"id": 9}]},
        {"model": {"vocab": {"a": "0", "b": 9}}, "added_tokens": 7},
    ],
)
def test_entries_without_an_id_are_passed_over(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer(tmp_path, vocab_size=10)
    with pytest.raises(ConversionError, match="has the token id 9, but vocab_size=9"):
        check_tokenizer(tmp_path, vocab_size=9)


def test_a_model_without_tokenizer_is_fine(tmp_path):
    check_tokenizer(tmp_path, vocab_size=1)
