"""GGUF files that are exported: read back by llama.cpp's package and by transformers' loader of them."""

import json
import resource
import shutil
import sys
import weakref
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from command import call
from stock_models import LINEAR, LLAMA3, LONGROPE, PARTIAL, SCALING, YARN, interleaved, randomise
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.checkpoints import gguf_writing
from modeling_gqa.checkpoints.gguf_vocabulary import LLAMA3_WORDS, read_vocabulary, split_otherwise
from modeling_gqa.conversion import UserError, export_checkpoint, import_checkpoint, load_source
from modeling_gqa.data.tokenizer import CHAT_TEMPLATE, train_tokenizer

SIZES = {
    "vocab_size": 307,
    "hidden_size": 66,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 40,
    "attention_kind": "gqa",
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
QWEN2 = {"query_bias": True, "key_value_bias": True, "output_bias": False, "hidden_size": 84}
# name -> (architecture, fields). transformers' loader computes all of these as llama.cpp does.
MODELS = {
    "gqa": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mha-tied": ("llama", {"attention_kind": "mha", "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "mqa": ("llama", {"attention_kind": "mqa", "num_key_value_heads": 1}),
    "scaled": ("llama", {"softmax_scale": 0.1}),
    "qwen2": ("qwen2", QWEN2),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 128}),
}
UNROTATED = {"rope_frequency_indices": [], "rope_frequency_dim": 14}
OLMO = {"norm_position": "after", "qk_norm": True, "qk_norm_span": "all_heads", "hidden_size": 84}
OLMO_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 10}
OLMO3 = OLMO | {
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": OLMO_YARN,
    "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
GEMMA = {
    "norm_position": "both",
    "qk_norm": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA3 = GEMMA | {
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": LINEAR,
    "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
MINISTRAL3 = {"rope_parameters": YARN | SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0}}
# Of these it leaves out something, so their tensors and entries are looked at.
UNREAD = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "granite": ("granite", {"residual_multiplier": 0.3, "logits_scaling": 3.0, "softmax_scale": 0.1}),
    "no-multiple": ("llama", {"hidden_size": 68}),  # of the heads: Mistral's class
    "phi3": ("phi3", {"hidden_size": 84, "rope_parameters": PARTIAL}),
    "granite4": ("granite", {"residual_multiplier": 0.3, "softmax_scale": 0.1, **UNROTATED}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "per_layer_config": {3: UNROTATED}}),
    "olmo2": ("olmo2", OLMO),
    "olmo3": ("olmo2", OLMO3),
    "gemma3": ("gemma3", GEMMA3),
    "ministral3": ("mistral3", MINISTRAL3),
}
TEXTS = [
    "Hello, world!  It's 12345 we'll don't 'S",
    "Ünïcödé façade é e\u0301 “…”\n\n\n  def f(x):\t\treturn x ** 2\r\n",
    "😶\u200d🌫️🚀 中文 и русский ไทย 1٣½ \u00a0\u3000x\u200b",
    "a<|endoftext|>b<|pad|> <|endoftext|> c ",
    " ",
    "",
]


def own_model(dtype=torch.float32, **fields) -> GQAForCausalLM:
    fields = {**SIZES, **fields}
    if "rope_parameters" in fields:
        fields["rope_parameters"] = dict(fields["rope_parameters"])
    model = GQAForCausalLM(GQAConfig(**fields)).eval()
    randomise(model)
    model.tie_weights()
    return model.to(dtype)


def write_own(folder: Path, tokenizer=None, **fields) -> GQAForCausalLM:
    """Save a model with a tokenizer of the pretraining script's."""
    model = own_model(**fields)
    model.save_pretrained(folder)
    (tokenizer or train_tokenizer(["the thing that they then thought 12 123"] * 9, 300)).save_pretrained(folder)
    return model


def read(path: Path) -> tuple[dict, dict]:
    """A file's entries and tensors, by llama.cpp's package."""
    reader = gguf.GGUFReader(path)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for item in reader.tensors:
        values = torch.from_numpy(numpy.copy(gguf.dequantize(item.data, item.tensor_type)))
        tensors[item.name] = (values.view(*reversed(item.shape.tolist())), item.tensor_type.name)
    return entries, tensors


def export(folder: Path, **fields) -> Path:
    """Save a model as `write_own` does and export it; returns the file."""
    write_own(folder / "ours", **fields)
    export_checkpoint(folder / "ours", folder / "model.gguf")
    return folder / "model.gguf"


def refuse(reason: str, folder: Path) -> None:
    """The model in `ours` is not exported, for a reason said in one line, and nothing is written."""
    with pytest.raises(UserError, match=reason) as raised:
        export_checkpoint(folder / "ours", folder / "model.gguf")
    assert "\n" not in str(raised.value)
    assert [path.name for path in folder.iterdir()] == ["ours"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# -- the model


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_model_and_tokenizer(name, tmp_path):
    architecture, fields = MODELS[name]
    ours = write_own(tmp_path / "ours", **fields)
    stock = export_checkpoint(tmp_path / "ours", tmp_path / "model.gguf")
    assert stock.model_type == architecture
    where = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "model.gguf"}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    assert type(model).__module__.startswith(f"transformers.models.{architecture}.")
    tokens = torch.randint(307, (3, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, ours(tokens).logits, atol=1e-4, rtol=1e-4)
    expected, found = AutoTokenizer.from_pretrained(tmp_path / "ours"), AutoTokenizer.from_pretrained(**where)
    for text in TEXTS:
        assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert (found.eos_token, found.pad_token, found.chat_template) == ("<|endoftext|>", "<|pad|>", CHAT_TEMPLATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*MODELS, *UNREAD])
def test_every_tensor_holds_the_same_bits(name, dtype, tmp_path):
    """Matrices keep their dtype, norms and biases are in float32; Llama's queries and keys have llama.cpp's order."""
    architecture, fields = {**MODELS, **UNREAD}[name]
    if name == "scaled":
        fields = {"softmax_scale": 14**-0.5 / 4}  # a power of two, which rounds nothing
    ours = write_own(tmp_path / "ours", dtype=dtype, **fields)
    stock = export_checkpoint(tmp_path / "ours", tmp_path / "model.gguf")
    export_checkpoint(tmp_path / "ours", tmp_path / "stock", engine="transformers")
    entries, tensors = read(tmp_path / "model.gguf")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=dtype)
    if name == "granite4":  # whose class stores matrices of the MLP as one, and llama.cpp does not
        stored = ours
    state = {name: tensor for name, tensor in stored.state_dict().items() if name not in stored.all_tied_weights_keys}
    assert entries["general.architecture"] == architecture
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], stock.num_hidden_layers)
    assert len(tensors) == len(state) + (name == "llama3")
    for stock_name, tensor in state.items():
        values, kind = tensors[names.get_name(stock_name, (".weight", ".bias"))]
        part = stock_name.split(".")[-2]
        if architecture == "gemma3" and "norm" in stock_name:
            tensor = tensor.float() + 1
        if architecture in ("llama", "granite", "smollm3", "mistral3") and part in ("q_proj", "k_proj"):
            heads = stock.num_attention_heads if part == "q_proj" else stock.num_key_value_heads
            tensor = interleaved(tensor, heads)
        assert torch.equal(values, tensor.float()), stock_name
        expected = torch.float32 if tensor.dim() == 1 else dtype
        assert kind == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[expected], stock_name


def test_the_entries_are_the_configurations(tmp_path):
    entries, tensors = read(export(tmp_path, rope_parameters=LINEAR))
    expected = {
        "context_length": 40,
        "embedding_length": 66,
        "block_count": 2,
        "feed_forward_length": 58,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 14,
        "attention.value_length": 14,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-3),
        "rope.dimension_count": 14,
        "rope.freq_base": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
        "vocab_size": 307,
    }
    own = {name.removeprefix("llama."): value for name, value in entries.items() if name.startswith("llama.")}
    assert own == expected
    assert tensors["blk.1.ffn_down.weight"][0].shape == (66, 58)


def test_the_entries_of_a_granite_are_its_multipliers(tmp_path):
    _, fields = UNREAD["granite"]
    entries, _ = read(export(tmp_path, embedding_multiplier=6.0, **fields))
    found = {name: entries[f"granite.{name}"] for name in ("embedding_scale", "residual_scale", "logit_scale")}
    assert found == pytest.approx({"embedding_scale": 6.0, "residual_scale": 0.3, "logit_scale": 3.0})
    assert entries["granite.attention.scale"] == pytest.approx(0.1)


# name -> entries beside those that each file has.
FURTHER = {
    "phi3": {"rope.dimension_count": 8},
    "granite4": {
        "rope.scaling.finetuned": False,
        "attention.scale": 0.1,
        "embedding_scale": 1.0,
        "residual_scale": 0.3,
        "logit_scale": 1.0,
    },
    "olmo2": {},
    "olmo3": {
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 500.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 10,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
    },
    "gemma3": {
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 50.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
    },
    "ministral3": {
        "attention.temperature_scale": 0.7,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 6,
        "rope.scaling.yarn_beta_fast": 1.0,
        "rope.scaling.yarn_beta_slow": 0.2,
        "rope.scaling.yarn_log_multiplier": 1.0,
    },
    "smollm3": {},
}


@pytest.mark.parametrize("name", FURTHER)
def test_the_entries_that_an_architecture_has_beside_llamas(name, tmp_path):
    architecture, fields = UNREAD[name]
    entries, _ = read(export(tmp_path, **fields))
    usual, _ = read(export(tmp_path / "llama"))
    usual = {entry.removeprefix("llama.") for entry in usual if entry.startswith("llama.")} - set(FURTHER[name])
    start = f"{architecture}."
    found = {entry.removeprefix(start): value for entry, value in entries.items() if entry.startswith(start)}
    assert set(found) == usual | set(FURTHER[name])
    assert {entry: found[entry] for entry in FURTHER[name]} == {
        entry: pytest.approx(value) if isinstance(value, float) else value for entry, value in FURTHER[name].items()
    }


def test_llama3s_frequencies_are_divided(tmp_path):
    factors, kind = read(export(tmp_path, rope_parameters=LLAMA3))[1]["rope_freqs.weight"]
    export_checkpoint(tmp_path / "ours", tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    default = 500.0 ** (-torch.arange(0, 14, 2) / 14)
    torch.testing.assert_close(default / factors, stock.model.rotary_emb.inv_freq)
    assert kind == "F32" and factors.unique().numel() > 2


def test_a_file_can_be_imported_again(tmp_path):
    model = write_own(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "model.gguf")
    import_checkpoint(tmp_path / "model.gguf", tmp_path / "again", dtype=torch.float32)
    again = GQAForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_transformers_reads_the_weights_of_a_gemma(tmp_path):
    """Its loader takes this size of heads, these layers with windows and their theta for those of every Gemma 3."""
    types = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    fields = GEMMA3 | {"num_hidden_layers": 7, "head_dim": 256, "layer_types": types}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    fields["sliding_rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    ours = write_own(tmp_path / "ours", **fields)
    export_checkpoint(tmp_path / "ours", tmp_path / "model.gguf")
    again = load_source(tmp_path / "model.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(307, (3, 40))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, ours(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["ab", "bcd"], "abcd"),  # transformers takes the first, llama.cpp the longest
        (["aba", "abac"], "ababac"),
        (["bcd", "ab"], "abcd"),
        (["abc", "bcd"], "abcd"),  # of equal length
        (["abcd", "cd"], None),
        (["  ", "   ", "    "], None),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], None),
    ],
)
def test_added_tokens_that_overlap_are_found(tokens, text):
    assert split_otherwise(tokens) == text


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    seen: list[weakref.ref] = []

    def look(name, tensor):
        assert not any(reference() is not None for reference in seen[:-1])
        seen.append(weakref.ref(tensor))

    monkeypatch.setattr(gguf_writing, "check_finite", look)
    path = export(tmp_path, dtype=torch.bfloat16)
    assert len(seen) == len(read(path)[1])


REFUSED = {
    "mla": (
        {
            "attention_kind": "mla",
            "num_key_value_heads": None,
            "head_dim": None,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 13,
        },
        "it exports to deepseek_v3, and only llama, mistral, ministral3, qwen2, qwen3, phi3, granite, smollm3, ",
    ),
    "mixed": ({"per_layer_config": {1: {"attention_kind": "mqa"}}}, "its layers differ in attention_kind"),
    "window": ({"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, r"its layers have windows"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu', and the architecture computes silu"),
    "norms-and-biases": ({"qk_norm": True, "attention_bias": True}, "architecture qwen3: it has biases"),
    "granite4-activation": ({**UNREAD["granite4"][1], "hidden_act": "gelu"}, "hidden_act='gelu'"),
    "phi3-window": (
        {"hidden_size": 84, "rope_parameters": PARTIAL, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
        "its layers have windows",
    ),
    "phi3-longrope": ({"hidden_size": 84, "rope_parameters": LONGROPE}, "rope_type='longrope' is not written"),
    "smollm3-second": ({"per_layer_config": {1: UNROTATED}}, r"every 4th one \(no_rope_layers\)"),
    "smollm3-biases": ({**UNREAD["smollm3"][1], "attention_bias": True}, "architecture smollm3: it has biases"),
    "smollm3-mlp-biases": ({**UNREAD["smollm3"][1], "mlp_bias": True}, "architecture smollm3: it has biases"),
    "olmo2-biases": ({**OLMO, "attention_bias": True}, "architecture olmo2: it has biases"),
    "olmo2-tied": ({**OLMO, "tie_word_embeddings": True}, "tie_word_embeddings"),
    "olmo2-head-dim": ({**OLMO, "head_dim": 16}, "head_dim=16 is not hidden_size / num_attention_heads"),
    "olmo2-beta": ({**OLMO, "rope_parameters": {**OLMO_YARN, "beta_fast": 8.0}}, r"beta_slow=\(8.0, 1\)"),
    "olmo2-factor": ({**OLMO, "rope_parameters": {**OLMO_YARN, "attention_factor": 1.0}}, "attention_factor"),
    "olmo3-types": ({**OLMO3, "layer_types": ["full_attention", *["sliding_attention"] * 2]}, "layer_types"),
    "olmo3-theta": (
        {**OLMO3, "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "window have another rope_theta",
    ),
    "gemma3-scaled-window": ({**GEMMA3, "sliding_rope_parameters": LINEAR}, "window have scaled frequencies"),
    "gemma3-scale": ({**GEMMA3, "softmax_scale": 0.25}, "softmax_scale=0.25, and the architecture takes 0.267"),
    "gemma3-biases": ({**GEMMA3, "attention_bias": True}, "architecture gemma3: it has biases"),
    "gemma3-silu": ({**GEMMA3, "hidden_act": "silu"}, "hidden_act='silu', and the architecture computes gelu_py"),
    "ministral3-window": (
        {**MINISTRAL3, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
        "its layers have windows",
    ),
    "ministral3-truncate": ({"rope_parameters": MINISTRAL3["rope_parameters"] | {"truncate": False}}, "truncate"),
    "ministral3-mscale": ({"rope_parameters": MINISTRAL3["rope_parameters"] | {"mscale": 0.7}}, "mscale"),
    "yarn": ({"rope_parameters": YARN}, "rope_type='yarn' is not written for llama"),
    "qwen-llama3": ({"qk_norm": True, "rope_parameters": LLAMA3}, "rope_type='llama3' is not written for qwen3"),
    "float64": ({"dtype": torch.float64}, "is stored in torch.float64, which llama.cpp has not: save it in float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(name, tmp_path):
    fields, reason = REFUSED[name]
    write_own(tmp_path / "ours", **fields)
    refuse(reason, tmp_path)


# -- the tokenizer


def byte_level(pre_tokenizer, normalizer=None, without: str = "", **fields) -> Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    vocabulary = {token: index + 2 for index, token in enumerate(alphabet)}
    model = models.BPE({"<|endoftext|>": 0, "<|pad|>": 1, **vocabulary, "ab": 258}, [("a", "b")], **fields)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def wrapped(tokenizer: Tokenizer, **options) -> PreTrainedTokenizerFast:
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **options})


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3_STEPS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def with_token(**options) -> PreTrainedTokenizerFast:
    tokenizer = wrapped(byte_level(GPT2))
    tokenizer.add_tokens([type(tokenizer._added_tokens_decoder[0])("<tool>", **options)])
    return tokenizer


def test_tokens_merges_and_special_tokens(tmp_path):
    entries, _ = read(export(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    own = {name.removeprefix("tokenizer."): value for name, value in entries.items() if name.startswith("tokenizer.")}
    assert (own["ggml.model"], own["ggml.pre"], own["chat_template"]) == ("gpt2", "gpt-2", CHAT_TEMPLATE)
    ids = tokenizer.get_vocab()
    assert own["ggml.tokens"][: len(ids)] == sorted(ids, key=ids.get)
    assert own["ggml.tokens"][len(ids) :] == [f"[PAD{index}]" for index in range(len(ids), 307)]
    assert own["ggml.token_type"] == [3, 3, 3, 3, *[1] * (len(ids) - 4), *[5] * (307 - len(ids))]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert own["ggml.merges"] == [" ".join(merge) for merge in merges] and len(merges) > 10
    assert [own[f"ggml.{name}_token_id"] for name in ("bos", "eos")] == [0, 0] and own["ggml.padding_token_id"] == 1
    assert (own["ggml.add_bos_token"], own["ggml.add_eos_token"]) == (False, False)


def test_llama3s_pre_tokenizer_is_known_and_other_tokens_are_kept(tmp_path):
    """A bos before each text, none of its own, a token of the user's, and two chat templates."""
    tokenizer = wrapped(byte_level(LLAMA3_STEPS, ignore_merges=True), bos_token="<|pad|>")
    tokenizer.chat_template = {"default": "{{ 1 }}", "tools": "{{ 2 }}"}
    tokenizer.add_tokens(["<tool>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|pad|> $A", special_tokens=[("<|pad|>", 1)]
    )
    write_own(tmp_path / "ours", tokenizer)
    found = read_vocabulary(tmp_path / "ours", 307)
    assert (found["tokenizer_pre"], found["add_bos_token"], found["add_eos_token"]) == ("llama-bpe", True, False)
    assert (found["token_list"][259], found["token_types"][259], found["bos_token_id"]) == ("<tool>", 4, 1)
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tools", "template": "{{ 2 }}"}]
    assert found["chat_template"] == templates
    write_own(tmp_path / "plain", wrapped(byte_level(GPT2)))
    plain = read_vocabulary(tmp_path / "plain", 307)
    assert {entry: value for entry, value in plain.items() if entry.endswith("_id")} == {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }


TOKENIZERS = {
    "digits": (
        lambda: wrapped(byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(False), GPT2]))),
        "its pre-tokenizer is none of gpt-2, smollm, llama-bpe, dbrx, qwen2: export to a folder",
    ),
    "prefix": (lambda: wrapped(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))), "its pre-tokenizer is"),
    "one-word": (lambda: wrapped(byte_level(pre_tokenizers.ByteLevel(False, use_regex=False))), "its pre-tokenizer is"),
    "whole-words": (lambda: wrapped(byte_level(GPT2, ignore_merges=True)), "its pre-tokenizer is none of"),
    "normalizer": (lambda: wrapped(byte_level(GPT2, normalizers.NFKC())), r"it normalizes texts \(NFKC\)"),
    "dropout": (lambda: wrapped(byte_level(GPT2, dropout=0.1)), "its model has dropout=0.1"),
    "suffix": (lambda: wrapped(byte_level(GPT2, end_of_word_suffix="x")), "its model has end_of_word_suffix='x'"),
    "strips": (lambda: with_token(lstrip=True), "its token '<tool>' has lstrip=True"),
    "no-eos": (lambda: wrapped(byte_level(GPT2), eos_token=None), "it has no end-of-text token"),
    "unknown-bytes": (lambda: wrapped(byte_level(GPT2, without="Ø", unk_token="<|pad|>")), "it is not byte-level BPE"),
    "no-bytes": (
        lambda: wrapped(Tokenizer(models.WordLevel({"<|endoftext|>": 0, "<|pad|>": 1}, "<|pad|>"))),
        "it is not byte-level BPE",
    ),
}


def test_a_tokenizer_that_composes_characters_is_written_with_a_warning(tmp_path):
    """llama.cpp does not compose them, which changes few texts."""
    write_own(tmp_path / "ours", wrapped(byte_level(GPT2, normalizers.NFC())))
    result = call("export", tmp_path / "ours", tmp_path / "model.gguf")
    assert result.exit_code == 0 and "composes characters (NFC)" in result.stderr, result.output
    assert (tmp_path / "model.gguf").is_file()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused(name, tmp_path):
    make, reason = TOKENIZERS[name]
    write_own(tmp_path / "ours", make())
    refuse(f"llama.cpp would not tokenize as .* because {reason}", tmp_path)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    own_model().save_pretrained(tmp_path / "ours")
    refuse("a GGUF file needs the tokenizer of .*ours, which cannot be loaded", tmp_path)


# -- the command, and the file


def test_the_command_writes_a_file_once(tmp_path):
    write_own(tmp_path / "ours")
    target = tmp_path / "made" / "model.GGUF"
    result = call("export", tmp_path / "ours", target)
    assert result.exit_code == 0 and "a llama model, for llama.cpp" in result.output, result.output
    assert "exists already" in call("export", tmp_path / "ours", target).stderr
    shutil.copy(target, tmp_path / "first")
    target.write_bytes(b"GGUF, an older one")
    assert call("export", tmp_path / "ours", target, "--force").exit_code == 0
    assert target.read_bytes() == (tmp_path / "first").read_bytes()
    target.write_text("my thesis")
    assert "is no GGUF file, which force" in call("export", tmp_path / "ours", target, "--force").stderr
    assert [path.name for path in target.parent.iterdir()] == ["model.GGUF"] and target.read_text() == "my thesis"


def test_a_full_disk_is_one_line(tmp_path):
    """A limit on the size of files stops the writing as a full disk does."""
    write_own(tmp_path / "ours")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        result = call("export", tmp_path / "ours", tmp_path / "model.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
    assert "No space left on device" in result.stderr and "make room" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    write_own(tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuse(r"needs gguf, which is not installed: pip install '\.\[conversion\]'", tmp_path)
