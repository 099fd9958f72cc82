"""Imported models compute what their sources compute, and what cannot be imported is refused by name."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stock_models import (
    MODELS,
    batch,
    close,
    logits,
    own_model,
    stock_config,
    stock_model,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints import checkpoint
from modeling_gqa.checkpoints.checkpoint import load_source, open_checkpoint
from modeling_gqa.checkpoints.families import FAMILIES, import_config
from modeling_gqa.checkpoints.files import LazyTensor, open_tensors
from modeling_gqa.checkpoints.writing import import_checkpoint
from modeling_gqa_cli.errors import UserError

pytestmark = pytest.mark.compat

SHARD = 40_000  # bytes, so that each model has several


@pytest.fixture
def saved(tmp_path):
    """Function that saves a small stock model, by name, as a sharded checkpoint and returns the folder."""

    def save(name: str = "llama", **config_fields) -> Path:
        folder = tmp_path / "source"
        model = stock_model(stock_config(name, **config_fields))
        model.to(getattr(torch, str(model.config.dtype).removeprefix("torch.")))
        model.save_pretrained(folder, max_shard_size=SHARD)
        return folder

    return save


# -- the same function


def test_every_family_has_a_model():
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_the_sources(name, saved, tmp_path):
    source = saved(name)
    assert len(list(source.glob("*.safetensors"))) > 2
    stock = AutoModelForCausalLM.from_pretrained(source)
    config = import_checkpoint(source, tmp_path / "target", max_shard_size=SHARD)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert type(model) is GQAForCausalLM
    assert model.config.attention_kind == config.attention_kind
    assert close(logits(model), logits(stock))
    inputs = batch()
    expected = stock.generate(**inputs, max_new_tokens=9, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=9, do_sample=False), expected)
    assert len(set(expected[:, -9:].flatten().tolist())) > 3  # not one token over and over


def test_repository_is_as_complete_as_a_saved_model(saved, tmp_path):
    source = saved()
    own_model(stock_model(stock_config("llama"))).save_pretrained(tmp_path / "expected")
    import_checkpoint(source, tmp_path / "target")
    names = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in (tmp_path / "target").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "target" / name).read_text() == (tmp_path / "expected" / name).read_text(), name


def test_tokenizer_generation_config_and_licence_come_along(saved, tmp_path):
    source = saved()
    write_tokenizer(source, largest_id=102)
    (source / "LICENSE").write_text("free")
    (source / "README.md").write_text("a card of the source")
    GenerationConfig(eos_token_id=[2, 5], temperature=0.7, do_sample=True).save_pretrained(source)
    import_checkpoint(source, tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE", "generation_config.json"):
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "target" / "README.md").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "target", trust_remote_code=True)("w102")["input_ids"] == [102]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "target").generation_config.eos_token_id == [2, 5]


def test_several_chat_templates_come_along(saved, tmp_path):
    source = saved()
    write_tokenizer(source, largest_id=102)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    tokenizer.save_pretrained(source)
    assert (source / "additional_chat_templates" / "tool_use.jinja").is_file()
    import_checkpoint(source, tmp_path / "target")
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == tokenizer.chat_template


def test_fields_of_smollm2_and_of_early_llamas_are_understood():
    assert import_config(stock_config("llama", pad_token_id=-1)).pad_token_id is None
    stock = stock_config(
        "llama",
        is_llama_config=True,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        torch_dtype="bfloat16",
        **{"transformers.js_config": {"dtype": "q4"}},
    )
    assert import_config(stock).rope_parameters == {"rope_theta": 100000, "rope_type": "default"}


def test_fields_of_granite_4_are_understood():
    stock = stock_config("granite4-biases-tied", normalization_function="rmsnorm", init_method="mup")
    config = import_config(stock)
    assert config.intermediate_size == stock.shared_intermediate_size and config.rope_frequency_indices is None
    unread = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
    unrotated = import_config(stock_config("granite4-unrotated", rope_parameters=unread))
    assert unrotated.rope_frequency_indices == [] and unrotated.rope_parameters["rope_type"] == "default"
    with pytest.raises(UserError, match="normalization_function='layernorm' is not supported"):
        import_config(stock_config("granite4-unrotated", normalization_function="layernorm"))


# -- the files


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("llama4_text", "layers without positions and mixture-of-experts layers"),
        ("gpt_oss", "attention sinks"),
        ("gemma2", "soft-caps its attention scores and logits"),
        ("gqa", "a modeling_gqa model already"),
        ("bert", ": these can be imported"),
    ],
)
def test_other_families_are_refused_by_name(model_type, reason, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    with pytest.raises(
        UserError,
        match=f"model_type='{model_type}' is not supported.*{reason}.*qwen2, qwen3, phi3, .*, olmo2, olmo3",
    ):
        import_config(config)
    config.save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match=reason):
        import_checkpoint(tmp_path / "source", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def rewrite(source: Path, change):
    """Change a single-file checkpoint's tensors by a function of their dict."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, source / "model.safetensors")


def edit_json(path: Path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_tokenizer(folder: Path, largest_id: int):
    vocabulary = {f"w{index}": index for index in range(largest_id)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    added = {"id": largest_id, "content": f"w{largest_id}", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": [added]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def drop(name):
    return lambda source: rewrite(source, lambda tensors: tensors.pop(name))


def add(name, tensor):
    return lambda source: rewrite(source, lambda tensors: tensors.update({name: tensor}))


def truncate(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def point_to_missing_file(source):
    names = dict.fromkeys(load_file(source / "model.safetensors"), "model-00001-of-00002.safetensors")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def point_to(name):
    def change(source):
        names = dict.fromkeys(load_file(source / "model.safetensors"), name)
        (source / "model.safetensors").rename(source.parent / "secrets" / "other.safetensors")
        (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return change


def link(name):
    """As a downloaded archive could, to a file that is not its own."""

    def change(source):
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to("../secrets/secret.jinja")

    return change


def untie(source):
    edit_json(source / "config.json", tie_word_embeddings=True)


BROKEN = {
    "no-config": (lambda source: (source / "config.json").unlink(), "has no config.json"),
    "damaged-config": (lambda source: (source / "config.json").write_text("{"), "config.json cannot be read"),
    "listed-config": (lambda source: (source / "config.json").write_text("[]"), "does not hold a JSON object"),
    "wrong-type": (lambda source: edit_json(source / "config.json", hidden_size="many"), "is not valid: .*hidden_size"),
    "unknown-field": (lambda source: edit_json(source / "config.json", alibi=True), "alibi=True is not a field"),
    "no-model-type": (lambda source: (source / "config.json").write_text("{}"), "model_type=None is not supported"),
    "no-weights": (lambda source: (source / "model.safetensors").unlink(), "has no safetensors weights"),
    "pickled-weights": (only_pickle, "no safetensors weights .* are converted first, with"),
    "truncated": (truncate, "model.safetensors is truncated or damaged"),
    "missing-shard": (point_to_missing_file, "names model-00001-of-00002.safetensors, which is missing"),
    "missing-tensor": (drop("model.layers.1.mlp.up_proj.weight"), "no tensor model.layers.1.mlp.up_proj.weight"),
    "missing-head": (drop("lm_head.weight"), "no tensor lm_head.weight"),
    "unknown-tensor": (add("model.layers.0.self_attn.sinks", torch.ones(6)), "a tensor model.layers.0.self_attn.sinks"),
    "a-layer-too-many": (add("model.layers.3.mlp.up_proj.weight", torch.ones(2, 2)), "a tensor model.layers.3.mlp"),
    "classifier": (add("score.weight", torch.ones(2, 66)), "a tensor score.weight"),
    "wrong-shape": (add("model.norm.weight", torch.ones(65)), r"model.norm.weight has the shape \[65\].* \[66\]"),
    "quantized": (add("model.norm.weight", torch.ones(66).to(torch.int8)), "model.norm.weight .* stored as I8"),
    "tied-but-different": (untie, "lm_head.weight differs from model.embed_tokens.weight"),
    "tied-but-larger": (
        lambda source: (untie(source), add("lm_head.weight", torch.ones(104, 66))(source)),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "no-tensors": (lambda source: rewrite(source, lambda tensors: tensors.clear()), "the weights have no tensor model"),
    "large-tokenizer": (lambda source: write_tokenizer(source, 103), "tokenizer does not match: .*token id 103, but"),
    "no-heads": (lambda source: edit_json(source / "config.json", num_attention_heads=0), "config.json is not valid: "),
    "listed-type": (
        lambda source: edit_json(source / "config.json", model_type=["llama"]),
        r"model_type=\['llama'\]",
    ),
    "nested": (lambda source: (source / "config.json").write_text('{"a":' * 100_000), "config.json cannot be read: "),
    "adapter": (
        lambda source: (source / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "has an adapter .*: merge it",
    ),
    "other-weights": (
        lambda source: edit_json(source / "config.json", transformers_weights="other.safetensors"),
        "config.json names other weights",
    ),
    "nan": (add("model.norm.weight", torch.full((66,), torch.nan)), r"model\.norm\.weight holds nan in float32"),
    "inf": (add("model.norm.weight", torch.full((66,), -torch.inf)), r"model\.norm\.weight holds inf in float32"),
    "index-out": (point_to("../other.safetensors"), "other.safetensors leads out of the checkpoint, to /"),
    "index-absolute": (point_to("/etc/passwd"), "/etc/passwd leads out of the checkpoint"),
    "index-nul": (point_to("a\0b"), "cannot be read: embedded null byte"),
    "linked-weights": (link("model.safetensors"), "model.safetensors leads out of the checkpoint, to .*secret"),
    "linked-config": (link("config.json"), "config.json leads out of the checkpoint, to .*secret"),
    "linked-licence": (link("LICENSE"), "LICENSE leads out of the checkpoint, to .*secret"),
    "linked-folder": (
        lambda source: (source / "additional_chat_templates").symlink_to("../secrets"),
        "secret.jinja leads out of the checkpoint",
    ),
    "listed-generation": (
        lambda source: (source / "generation_config.json").write_text("[]"),
        "generation_config.json does not hold a JSON object",
    ),
    "pad-outside": (
        lambda source: edit_json(source / "config.json", pad_token_id=200),
        r"cannot be imported: pad_token_id=200 is not in the v",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_source_is_one_line_and_leaves_the_target_alone(damage, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    stock_model(stock_config("llama")).save_pretrained(source)
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "old"}')
    (target / "model.safetensors").write_text("kept")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "secret.jinja").write_text("secret")
    change, message = BROKEN[damage]
    change(source)
    with pytest.raises(UserError, match=message) as raised:
        import_checkpoint(source, target, force=True)
    assert "\n" not in str(raised.value)
    if damage not in (
        "large-tokenizer",
        "linked-licence",
        "linked-folder",
        "listed-generation",
    ):  # which a model in memory does not have
        with pytest.raises(UserError, match=message):
            load_source(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secrets", "source", "target"]
    assert (target / "model.safetensors").read_text() == "kept"


def test_a_failure_while_writing_leaves_the_target_alone(saved, tmp_path):
    source, target = saved(), tmp_path / "target"

    def progress(names):
        for index, name in enumerate(names):
            if index == 20:
                assert len(list(tmp_path.glob(".target.new-*/*.safetensors"))) > 0  # some is written
                raise KeyboardInterrupt
            yield name

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(source, target, progress=progress, max_shard_size=SHARD)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", ["source", "."])
def test_a_target_that_is_or_holds_the_source_is_refused(target, saved, tmp_path):
    source = saved()
    with pytest.raises(UserError, match="is the source, or holds it"):
        import_checkpoint(source, tmp_path / target, force=True)
    assert (source / "config.json").exists()


@pytest.mark.parametrize("stored", ["both", "head-only"])
def test_tied_embeddings_may_be_stored_under_either_name(stored, tmp_path):
    source = tmp_path / "source"
    model = stock_model(stock_config("llama-mha-tied"))
    model.save_pretrained(source)
    head = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    add("lm_head.weight", head)(source)
    if stored == "head-only":
        drop("model.embed_tokens.weight")(source)
    import_checkpoint(source, tmp_path / "target")
    assert "lm_head.weight" not in open_tensors(tmp_path / "target")
    for imported in (AutoModelForCausalLM.from_pretrained(tmp_path / "target"), load_source(source)):
        assert imported.lm_head.weight is imported.model.embed_tokens.weight
        assert close(logits(imported), logits(model))


def test_what_is_computed_or_for_speculative_decoding_is_left_out(tmp_path):
    source = tmp_path / "source"
    model = stock_model(stock_config("deepseek-v3", num_mtp_layers=1))
    model.save_pretrained(source)
    add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(3))(source)
    add("model.layers.3.eh_proj.weight", torch.ones(4, 4))(source)
    import_checkpoint(source, tmp_path / "target")
    assert open_tensors(tmp_path / "target").keys() == dict(model.named_parameters()).keys()
    assert close(logits(load_source(source)), logits(model))
    assert open_checkpoint(source, download=False).family == "deepseek_v3"
    add("model.layers.4.eh_proj.weight", torch.ones(4, 4))(source)
    with pytest.raises(UserError, match=r"model\.layers\.4\.eh_proj"):
        import_checkpoint(source, tmp_path / "again")


def test_a_shard_at_a_time_is_in_memory(saved, tmp_path, monkeypatch):
    source = saved("mistral-full")
    alive, most = [0], [0]

    def counted(folder):
        def load(tensor):
            loaded = tensor.load().clone()
            alive[0] += loaded.nbytes
            most[0] = max(most[0], alive[0])
            weakref.finalize(loaded, lambda size=loaded.nbytes: alive.__setitem__(0, alive[0] - size))
            return loaded

        return {
            name: LazyTensor(tensor.shape, tensor.dtype, lambda tensor=tensor: load(tensor))
            for name, tensor in open_tensors(folder).items()
        }

    monkeypatch.setattr(checkpoint, "open_tensors", counted)
    seen: list[str] = []
    progress = lambda names: (seen.append(name) or name for name in names)  # noqa: E731
    import_checkpoint(source, tmp_path / "target", max_shard_size=SHARD, progress=progress)
    assert sorted(seen) == sorted(open_tensors(tmp_path / "target"))
    total = sum(tensor.nbytes for tensor in open_tensors(source).values())
    assert 0 < most[0] <= 2 * SHARD < total / 3
    assert alive[0] == 0


# -- in memory


@pytest.mark.parametrize("name", ["mistral-window", "qwen2", "deepseek-v2"])
def test_load_source_is_the_source(name, saved, tmp_path):
    source = saved(name)
    model = load_source(source)
    assert type(model) is GQAForCausalLM and not model.training
    expected = logits(AutoModelForCausalLM.from_pretrained(source))
    assert close(logits(model), expected)
    model.save_pretrained(tmp_path / "own")
    assert close(logits(load_source(str(tmp_path / "own"), dtype=torch.float32, device="cpu")), expected)
    assert load_source(source, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_load_source_keeps_the_dtype_and_refuses_an_incomplete_model_of_ours(saved, tmp_path):
    source = saved(dtype="bfloat16")
    assert load_source(source).dtype == torch.bfloat16
    import_checkpoint(source, tmp_path / "own")
    drop("model.norm.weight")(tmp_path / "own")
    with pytest.raises(UserError, match=r"no tensor model\.norm\.weight"):
        load_source(tmp_path / "own")
    shutil.rmtree(source)
    with pytest.raises(UserError, match="does not exist"):
        load_source(source)
