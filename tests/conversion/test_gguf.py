"""GGUF files as sources: written here with llama.cpp's own package, from transformers' models of the same weights."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from command import call
from stock_models import GROUPED, SIZES, close, interleaved, logits, stock_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from modeling_gqa.checkpoints.checkpoint import open_checkpoint
from modeling_gqa.checkpoints.gguf import GGUFFile
from modeling_gqa.conversion import UserError, import_checkpoint, load_source

FIELDS = {**SIZES, "vocab_size": 290, "hidden_size": 96, "intermediate_size": 64, "pad_token_id": None}
MODELS = {
    "llama": {**FIELDS, **GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen2": {**FIELDS, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3": {**FIELDS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    # What the format does not say is the class's default: heads of 256 and their scale, and every sixth layer.
    "gemma3": {
        **FIELDS,
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 7},
        "sliding_window": 5,
    },
}


def make_stock(family: str):
    fields = {**MODELS[family]}
    if "rope_parameters" in fields:
        fields["rope_parameters"] = dict(fields["rope_parameters"])
    return stock_model(CONFIG_MAPPING["gemma3_text" if family == "gemma3" else family](**fields))


def write_gguf(path: Path, stock, entries=None, tensors=None, quantized: bool = False, tokenizer: bool = True) -> Path:
    """Write `stock` as llama.cpp's converter does; `entries` and `tensors` come on top."""
    config = stock.config
    architecture = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "gemma3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if tokenizer:
        alphabet = sorted(ByteLevel.alphabet())
        # transformers' tokenizer of Qwen2 adds these three wherever they are missing.
        tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
        tokens += ["ab", "cd", *(f"<{number}>" for number in range(config.vocab_size - len(tokens) - 2))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3, *([1] * (len(tokens) - 3))])
        writer.add_token_merges(["a b", "c d"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    for name, value in (entries or {}).items():
        write: Any = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        write(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    stored = {name: tensor for name, tensor in stock.state_dict().items() if name not in stock.all_tied_weights_keys}
    for name, tensor in stored.items():
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        if architecture == "gemma3" and "norm" in name:
            tensor = tensor + 1
        array, kind = tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0
        name = names.get_name(name, (".weight", ".bias"))
        if quantized and array.ndim == 2 and array.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", MODELS)
def test_the_model_computes_what_the_stock_model_does(family, tmp_path):
    stock = make_stock(family)
    path = write_gguf(tmp_path / "model.gguf", stock)
    model = load_source(path, dtype=torch.float32)
    assert close(logits(model, vocabulary=290), logits(stock, vocabulary=290))
    assert model.config.model_type == "gqa" and model.dtype == torch.float32
    assert load_source(path).dtype == torch.bfloat16


def test_quantized_weights_are_unpacked(tmp_path):
    """Rounded to eight bits, the weights are those that llama.cpp's package unpacks."""
    stock = make_stock("llama")
    plain = write_gguf(tmp_path / "plain.gguf", stock)
    path = write_gguf(tmp_path / "model.GGUF", stock, quantized=True)
    assert path.stat().st_size < plain.stat().st_size / 2
    weight = load_source(path, dtype=torch.float32).model.layers[1].mlp.up_proj.weight
    (packed,) = (item for item in gguf.GGUFReader(path).tensors if item.name == "blk.1.ffn_up.weight")
    assert torch.equal(weight, torch.from_numpy(numpy.copy(gguf.dequantize(packed.data, packed.tensor_type))))
    assert not torch.equal(weight, stock.model.layers[1].mlp.up_proj.weight)
    assert close(weight, stock.model.layers[1].mlp.up_proj.weight, 0.01)


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_import_writes_weights_and_tokenizer(dtype, expected, tmp_path):
    stock = make_stock("qwen2")
    source = write_gguf(tmp_path / "model.gguf", stock)
    result = call("import", source, tmp_path / "ours", *(["--dtype", dtype] if dtype else []))
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert model.dtype == expected
    stored = stock.to(expected).state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc")["input_ids"])[-2:] == ["ab", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "ours"]


def test_convert_and_inspect(tmp_path, monkeypatch):
    stock = make_stock("llama")
    source = write_gguf(tmp_path / "model.gguf", stock)
    with monkeypatch.context() as patch:  # it takes most of the time, and inspect says nothing of it
        patch.setattr(GGUFFile, "write_tokenizer", lambda self: pytest.fail("a tokenizer was made"))
        found = json.loads(call("inspect", source, "--json").stdout)
    assert (found["source"], found["family"], found["dtype"]) == ("model.gguf", "llama", "bfloat16")
    assert found["parameters"] == stock.num_parameters()
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "abcd {row**9} efgh"}}\n' for row in range(200)))
    options = ["--text", tmp_path / "text.jsonl", "--sequence-length", 16, "--calibration-tokens", 640]
    options += ["--evaluation-tokens", 160, "--method", "lowrank", "--dtype", "float32"]
    target = ("--attention-kind", "gqa", "--num-key-value-heads", 1)
    result = call("convert", source, tmp_path / "dry", *target, *options, "--dry-run")
    assert "Dry run" in result.stdout, result.output
    result = call("convert", source, tmp_path / "mqa", *target, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "mqa" / "conversion.json").read_text())
    assert report["source"] == "model.gguf" and report["dtype"] == "float32" and report["kl"] > 0
    expected = stock(torch.arange(40).view(2, 20)).logits
    assert close(load_source(source, torch.float32)(torch.arange(40).view(2, 20)).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "mqa")("ab")["input_ids"]


def test_the_unpacked_model_is_in_memory_once(tmp_path, monkeypatch):
    """The model holds the tensors that were unpacked, no copies."""
    path = write_gguf(tmp_path / "model.gguf", make_stock("llama"))
    unpacked, unpack = {}, GGUFFile.unpack
    monkeypatch.setattr(GGUFFile, "unpack", lambda self: unpacked.update(unpack(self)) or unpacked)
    state = load_source(path).state_dict()
    assert state.keys() == unpacked.keys()
    assert all(state[name].data_ptr() == unpacked[name].data_ptr() for name in state)


def test_the_tokenizers_folder_goes_with_the_checkpoint(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", make_stock("llama")))
    folder = checkpoint.folder
    assert (folder / "tokenizer.json").is_file() and folder != tmp_path
    del checkpoint
    assert not folder.exists()


def test_a_file_without_a_tokenizer_is_imported_without_one(tmp_path):
    """And without a progress bar, which is switched off in tests."""
    source = write_gguf(tmp_path / "model.gguf", make_stock("llama"), tokenizer=False)
    result = call("import", source, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("token*"))
    assert "quantizing" not in result.stderr and "it/s" not in result.stderr


REFUSED = {
    "scaled-frequencies": (
        {"tensors": {"rope_freqs.weight": numpy.ones(7, numpy.float32)}},
        "a tensor rope_freqs.weight, which the configuration has no place for",
    ),
    "odd-name": (
        {"tensors": {"blk.5.weight": numpy.ones(7, numpy.float32)}},
        "a tensor blk.5.weight, which the configuration has no place for",
    ),
    "bias": (
        {"tensors": {"blk.0.attn_q.bias": numpy.ones(84, numpy.float32)}},
        "a tensor blk.0.attn_q.bias, which",
    ),
    "scaling": (
        {"entries": {"llama.rope.scaling.type": "yarn"}},
        "llama.rope.scaling.type='yarn', which .*safetensors",
    ),
    "experts": ({"entries": {"llama.expert_count": 8}}, "llama.expert_count=8, which transformers' loader"),
    "not-causal": ({"entries": {"llama.attention.causal": False}}, "llama.attention.causal=False, which"),
    "head": ({"entries": {"llama.attention.key_length": 16}}, "llama.attention.key_length=16, which"),
    "parts": ({"entries": {"split.count": 3}}, "is one of 3 parts: merge them"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformers_does_not_read_is_refused(what, tmp_path):
    options, message = REFUSED[what]
    path = write_gguf(tmp_path / "model.gguf", make_stock("llama"), **options)
    with pytest.raises(UserError, match=message) as raised:
        load_source(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 128}, "gemma3.attention.key_length=128, of which transformers' loader"),
        ({"sliding_window": None}, "gemma3.attention.sliding_window=None, of which"),
    ],
    ids=["head-dim", "no-window"],
)
def test_what_the_loader_would_take_for_another_gemma_is_refused(fields, message, tmp_path):
    stock = make_stock("gemma3")
    for name, value in fields.items():
        setattr(stock.config, name, value)
    with pytest.raises(UserError, match=message):
        load_source(write_gguf(tmp_path / "model.gguf", stock))


def test_an_entry_can_be_ignored(tmp_path):
    stock = make_stock("llama")
    path = write_gguf(tmp_path / "model.gguf", stock, {"llama.rope.scaling.finetuned": True, "llama.some.thing": 7})
    assert "error: " in call("inspect", path).stderr
    assert call("inspect", path, "--ignore-field", "llama.some.thing").exit_code == 0
    model = load_source(path, torch.float32, ignore_fields=["llama.some.thing"])
    assert close(logits(model, vocabulary=290), logits(stock, vocabulary=290))
    with pytest.raises(UserError, match=r"no field llama.other to ignore"):
        load_source(path, ignore_fields=["llama.some.thing", "llama.other"])


def architecture(name, layers=3):
    def damage(path):
        writer = gguf.GGUFWriter(path, name)
        writer.add_block_count(layers)
        if layers != 3:
            writer.add_head_count_kv(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

    return damage


def keep(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


DAMAGED = {
    "empty": (lambda path: path.write_bytes(b""), "is damaged, or no GGUF file"),
    "text": (lambda path: path.write_text("nothing of this kind" * 40), "is damaged, or no GGUF file"),
    "half": (keep(0.5), "is damaged, or no GGUF file"),
    "nearly-whole": (keep(0.99), "is damaged, or no GGUF file"),
    "header-only": (keep(0.01), "is damaged, or no GGUF file"),
    "missing": (lambda path: path.unlink(), "model.gguf does not exist"),
    "other-architecture": (architecture("bloom"), "model_type='bloom' is not supported: these can be imported"),
    "known-reason": (architecture("gemma2"), "'gemma2' is not supported, because it soft-caps"),
    "not-by-gguf": (architecture("mistral"), "architecture 'mistral': of GGUF files these can be imported: llama"),
    "no-entries": (architecture("llama"), "has no llama.attention.head_count_kv"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_line(damage, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_stock("llama"))
    change, message = DAMAGED[damage]
    change(path)
    for command in (("inspect", path), ("import", path, tmp_path / "ours")):
        result = call(*command)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
    with pytest.raises(UserError, match=message):
        open_checkpoint(path)
    assert not (tmp_path / "ours").exists()


def test_what_is_said_of_a_folder_and_of_missing_packages(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", make_stock("llama"))
    with pytest.raises(UserError, match=r"but a GGUF file: give the file itself, .*model.gguf"):
        load_source(tmp_path)
    make_stock("llama").save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "model.safetensors").unlink()
    shutil.copy(path, tmp_path / "stock")
    with pytest.raises(UserError, match=r"of a GGUF file give the file itself"):
        load_source(tmp_path / "stock")
    with pytest.raises(UserError, match=r"is the source, or holds it|lies in the source"):
        import_checkpoint(path, tmp_path)
    make_stock("llama").save_pretrained(tmp_path / "whole")
    with pytest.raises(UserError, match="no GGUF file, and its weights keep their own dtype"):
        import_checkpoint(tmp_path / "whole", tmp_path / "ours", dtype=torch.float32)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs gguf, which is not installed: pip install '\.\[conversion\]'"):
        load_source(path)
