"""Exported GGUF files in llama.cpp: the tokens of our tokenizers, and the greedy tokens of `generate`."""

import inspect
import json
import random
import shutil
import tokenize as some_source
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Engine
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.real import QWEN, SMOLLM2, cache_folder
from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.checkpoints.gguf_vocabulary import LLAMA3_WORDS, PRE_TOKENIZERS
from modeling_gqa.conversion import export_checkpoint, load_source
from modeling_gqa.data.tokenizer import END_OF_TEXT, PAD, ends_of_text, train_tokenizer

VOCABULARY, NEW_TOKENS = 1200, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY + 5,  # some ids without a token
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GQA = {"attention_kind": "gqa", "num_key_value_heads": 2}
ROPE = {"rope_theta": 10000.0}
MULTIPLIERS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
UNROTATED = {"rope_frequency_indices": [], "rope_frequency_dim": 32}
OLMO = {"norm_position": "after", "qk_norm": True, "qk_norm_span": "all_heads"}
GEMMA = {
    "norm_position": "both",
    "qk_norm": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
EVERY_SECOND = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, **ROPE}
USUAL = {"beta_fast": 32.0, "beta_slow": 1.0}
YARN["original_max_position_embeddings"] = 16
SCALING = {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 16}
MODELS = {
    "gqa": GQA,
    "mha-tied": {"attention_kind": "mha", "tie_word_embeddings": True},
    "mqa": {"attention_kind": "mqa", "num_key_value_heads": 1},
    "quickstart-heads": {**GQA, "num_attention_heads": 8, "head_dim": 16},
    "biases": {**GQA, "attention_bias": True, "mlp_bias": True},
    "scaled": {**GQA, "softmax_scale": 0.1},
    "linear": {**GQA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, **ROPE}},
    "llama3": {**GQA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0, **ROPE, **LLAMA3}},
    "no-multiple": {**GQA, "hidden_size": 130},  # of the heads: Mistral's class
    "qwen2": {**GQA, "query_bias": True, "key_value_bias": True, "output_bias": False},
    "qwen3": {**GQA, "qk_norm": True, "head_dim": 40},
    "granite": {**GQA, **MULTIPLIERS, "softmax_scale": 0.1},
    "granite-biases": {**GQA, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    "granite4": {**GQA, **MULTIPLIERS, "softmax_scale": 0.1, **UNROTATED},
    "phi3": {**GQA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75, **ROPE}},
    "smollm3": {**GQA, "num_hidden_layers": 5, "per_layer_config": {3: UNROTATED}},
    "smollm3-tied-head-dim": {
        **GQA,
        **{"num_hidden_layers": 4, "head_dim": 40, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, **ROPE},
        "per_layer_config": {3: UNROTATED},
    },
    "olmo2": {**GQA, **OLMO},
    "olmo2-yarn": {**GQA, **OLMO, "rope_parameters": YARN | USUAL},
    "olmo3": {
        **GQA,
        **OLMO,
        **{"num_hidden_layers": 5, "sliding_window": 7},
        "layer_types": EVERY_SECOND,
        "rope_parameters": YARN | USUAL,
        "sliding_rope_parameters": {"rope_type": "default", **ROPE},
    },
    "olmo3-windows": {**GQA, **OLMO, "sliding_window": 7, "layer_types": ["sliding_attention"] * 3},
    "gemma3": {
        **GQA,
        **GEMMA,
        **{"num_hidden_layers": 5, "head_dim": 40, "sliding_window": 7, "layer_types": EVERY_SECOND},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        "sliding_rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
    "gemma3-windows": {**GQA, **GEMMA, "sliding_window": 7, "layer_types": ["sliding_attention"] * 3},
    "gemma3-full-untied": {**GQA, **GEMMA, "tie_word_embeddings": False},
    "ministral3": {**GQA, "rope_parameters": YARN | SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "ministral3-yarn": {**GQA, "rope_parameters": YARN | SCALING},
    "ministral3-linear": {**GQA, "rope_parameters": SCALING | {"rope_type": "linear", "factor": 3.0, **ROPE}},
    "ministral3-default": {**GQA, "head_dim": 40, "rope_parameters": {"rope_type": "default", **ROPE, **SCALING}},
}
PROMPTS = ["import os\n\n\ndef", "class Foo:\n    def __init__(self", "for i in range(", "The", "if __name__ =="]
TEXTS = [
    "Hello, world!",
    "  a   b    c\t\td \n\n\n e\n",
    "Ünïcödé façade — naïve… “quotes” é e\u0301",
    "I've we'll they're she'd I'm don't 'S 'Ll'RE",
    "12345 3.14159 1,000,000 x1y22z333 ²³ ½ Ⅷ ٣",
    "😶\u200d🌫️🚀🚀 ✅ 🧑🏽\u200d💻",
    "中文 и русский ไทย العربية देवनागरी ǅ ß ﬁ",
    "<|endoftext|>a<|pad|>b <|endoftext|> c",
    "\u00a0\u2003\u3000\u200b \u1680 \u202f\ufeff",
    "a\r\n\r\nb\x0b\x0c\x85\u2028x \n\x00\x01\x7f",
    " ",
    "\n",
    "a ",
    "x" * 300 + " " * 300 + "y",
    "'''```\"\"\"!!??--== _snake_case__ \ud7ff\ufffd\U0010ffff",
]


def source_texts() -> list[str]:
    return [inspect.getsource(module) for module in (some_source, inspect, json, random, shutil)]


def gpt2() -> PreTrainedTokenizerFast:
    return train_tokenizer(source_texts(), VOCABULARY)


def trained(steps: list, *, before: str = "", without: str = "", **options) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with these steps of pre-tokenization.

    `before` is the token before each text; `without` are bytes that have no token, by their characters in tokens.
    """
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    training: dict[str, Any] = {
        "special_tokens": [END_OF_TEXT, PAD],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator(source_texts(), trainers.BpeTrainer(vocab_size=VOCABULARY, **training))
    if before:
        tokenizer.post_processor = processors.TemplateProcessing(f"{before} $A", special_tokens=[(before, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=before or END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD
    )


def smollm() -> PreTrainedTokenizerFast:
    """As SmolLM2's: each digit is a word, and some bytes have no token, here those that begin Arabic letters."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = trained(steps, without="ØÙ")
    assert not {"Ø", "Ù"} & set(tokenizer.get_vocab())
    return tokenizer


def by_words(words: str, **options: Any) -> PreTrainedTokenizerFast:
    """As GPT-4's and later ones: words by an expression."""
    split = pre_tokenizers.Split(Regex(words), "isolated")
    return trained([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)], **options)


TOKENIZERS = {
    "gpt-2": gpt2,
    "smollm": smollm,
    # Whole words first, and a token before each text.
    "llama-bpe": partial(by_words, LLAMA3_WORDS, before=PAD, ignore_merges=True),
    "dbrx": partial(by_words, LLAMA3_WORDS),
    "qwen2": partial(by_words, LLAMA3_WORDS.replace("{1,3}", "")),
}


def random_text(draw: random.Random) -> str:
    """Letters, spaces and line ends, and characters of all scripts."""
    blocks = ((0xA0, 0x24F), (0x370, 0x6FF), (0x2000, 0x2FFF), (0x3000, 0x9FFF), (0x1F300, 0x1F6FF))
    kinds = (lambda: draw.choice(" \n\t\r'"), lambda: chr(draw.randint(*draw.choice(blocks))))
    return "".join(draw.choice((*kinds, lambda: chr(draw.randint(32, 126))))() for _ in range(40))


def exported(folder: Path, tokenizer: PreTrainedTokenizerFast, **fields) -> Engine:
    torch.manual_seed(4)  # by which no two tokens are equally likely
    model = GQAForCausalLM(GQAConfig(**{**SIZES, **fields}))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0 if "bias" in name else 1.0, 0.3)
    model.save_pretrained(folder / "ours")
    tokenizer.save_pretrained(folder / "ours")
    export_checkpoint(folder / "ours", folder / "model.gguf")
    return Engine(folder / "model.gguf", SIZES["max_position_embeddings"])


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_texts_are_split_into_the_same_tokens(name, tmp_path):
    engine = exported(tmp_path, TOKENIZERS[name](), **GQA)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    draw = random.Random(0)
    for text in [*TEXTS, *source_texts()[:1], *(random_text(draw) for _ in range(300))]:
        assert engine.tokenize(text) == tokenizer(text)["input_ids"], ascii(text)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_generate(name, tmp_path):
    engine = exported(tmp_path, gpt2(), **MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    lengths = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ends = ends_of_text(tokenizer)
        rows = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=ends)
        expected = rows[0, inputs["input_ids"].shape[1] :].tolist()
        tokens, text = engine.generate(prompt, NEW_TOKENS)
        assert [token for token in tokens if token not in ends] == [token for token in expected if token not in ends]
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
        lengths.append(len(expected))
    assert max(lengths) == NEW_TOKENS


@pytest.mark.real
@pytest.mark.parametrize("name", [SMOLLM2, QWEN])
def test_a_real_model_with_its_tokenizer_generates_the_same(name, tmp_path):
    """As its own attention: SmolLM2's vocabulary leaves out bytes, and Qwen's tokenizer composes characters."""
    source = cache_folder() / name
    if not (source / "config.json").is_file():
        pytest.skip("needs make real")
    model = load_source(source, dtype=torch.float32).eval()  # llama.cpp rounds what it multiplies by bfloat16
    model.save_pretrained(tmp_path / "ours")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "model.gguf")
    engine = Engine(tmp_path / "model.gguf", 512)
    tokenizer, draw = AutoTokenizer.from_pretrained(tmp_path / "ours"), random.Random(1)
    controls = "".join(map(chr, range(1, 32)))
    for text in [*TEXTS, controls, *(random_text(draw) for _ in range(100))]:
        text = unicodedata.normalize("NFC", text)
        assert engine.tokenize(text) == tokenizer(text)["input_ids"], ascii(text)
    prompt = "The difference between a list and a tuple in Python is that"
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    rows = model.generate(**inputs, max_new_tokens=16, do_sample=False, repetition_penalty=1.0)
    expected = rows[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(expected) == 16 and engine.generate(prompt, 16) == (expected, tokenizer.decode(expected))
