"""A tokenizer as the entries of a GGUF file; those with which llama.cpp would split texts otherwise are refused."""

import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from modeling_gqa_cli.errors import UserError, one_line

from ..common.console import warn

# What a word is to Llama 3: at most three digits, and line ends go with what is before them.
LLAMA3_WORDS = "|".join(
    (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
GPT2_STEP = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES_STEP = {**GPT2_STEP, "use_regex": False}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
NFC = {"type": "NFC"}  # the normalizer of Qwen's tokenizers, which changes few texts
# llama.cpp's names of pre-tokenizers, each with its steps in the tokenizers library, and whether a word that is a token
# is taken whole, also where no merges lead to it. The pretraining script trains the first. tests/llama_cpp compares the
# tokens of each.
PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([GPT2_STEP], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, GPT2_STEP], False),
    "llama-bpe": ([{**SPLIT, "pattern": {"Regex": LLAMA3_WORDS}}, BYTES_STEP], True),
    "dbrx": ([{**SPLIT, "pattern": {"Regex": LLAMA3_WORDS}}, BYTES_STEP], False),
    "qwen2": ([{**SPLIT, "pattern": {"Regex": LLAMA3_WORDS.replace("{1,3}", "")}}, BYTES_STEP], False),
}
# Kinds of tokens, by the numbers that GGUF gives them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def read_vocabulary(folder: Path, size: int) -> dict[str, Any]:
    """Return the tokenizer of a checkpoint's folder, as entries by the names of `GGUFWriter`'s methods without "add_".

    Raises `UserError` where there is no tokenizer, or llama.cpp would split texts into other tokens; warns of a
    tokenizer that composes characters (NFC), which changes few texts.

    Args:
        folder: of the checkpoint.
        size: number of token ids that the model has; those without a token get a name that no text holds.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # a missing file, a damaged file, no tokenizer.json: each has its own class
        raise UserError(
            f"a GGUF file needs the tokenizer of {folder}, which cannot be loaded: {one_line(error)[:200]}"
        ) from error
    name, adds = _pre_tokenizer_name(parts), _additions(tokenizer)
    reason = _why_not_byte_level(parts)
    if reason is None and name is None:
        reason = f"its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}"
    elif reason is None and tokenizer.eos_token_id is None:
        reason = "it has no end-of-text token (eos_token)"
    elif reason is None and adds is None:
        reason = "it puts other tokens than bos and eos around a text"
    if reason or name is None or adds is None:
        raise UserError(
            f"llama.cpp would not tokenize as the tokenizer of {folder} does, because {reason}: export to a folder, "
            "and see whether llama.cpp's own converter knows this tokenizer"
        )
    if parts["normalizer"] == NFC:
        warn(
            "the tokenizer composes characters (NFC), and llama.cpp does not: a text with decomposed ones, as some of "
            "macOS's file names, gets other tokens there"
        )
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in tokenizer.get_vocab().items():
        tokens[index], kinds[index] = token, NORMAL
    for added in parts["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": title, "template": text} for title, text in template.items()]
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    entries = {
        "tokenizer_model": "gpt2",  # which means byte-level BPE
        "tokenizer_pre": name,
        "token_list": tokens,
        "token_types": kinds,
        "token_merges": merges,
        "bos_token_id": bos,  # without one llama.cpp would take token 11 for it
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "unk_token_id": tokenizer.unk_token_id,
        "add_bos_token": adds["bos"],
        "add_eos_token": adds["eos"],
        "chat_template": template or None,
    }
    return {entry: value for entry, value in entries.items() if value is not None}


def _why_not_byte_level(parts: dict[str, Any]) -> str | None:
    """Return what of a tokenizer llama.cpp's byte-level BPE does not do."""
    model = parts["model"]
    # Both leave out bytes that have no token, unless the tokenizer has one for what it does not know.
    if model["type"] != "BPE" or (model["unk_token"] and not set(ByteLevel.alphabet()) <= set(model["vocab"])):
        return "it is not byte-level BPE"
    if parts["normalizer"] not in (None, NFC):
        return f"it normalizes texts ({parts['normalizer'].get('type')})"
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(field):
            return f"its model has {field}={model[field]!r}"
    for added in parts["added_tokens"]:
        for field in ("lstrip", "rstrip", "single_word"):
            if added[field]:
                return f"its token {added['content']!r} has {field}=True"
    if not model["merges"]:
        return "it has no merges"
    if text := split_otherwise([added["content"] for added in parts["added_tokens"]]):
        return f"{text!r} holds two of its added tokens that overlap, of which llama.cpp takes the longer one"
    return None


def split_otherwise(tokens: list[str]) -> str | None:
    """Return a text in which the first of two `tokens` that overlap is not the longest; `None` where there is none.

    transformers takes the first in a text, and the longest of those that begin there; llama.cpp the longest of all.
    """
    begun: dict[str, list[str]] = {}  # tokens by what they begin with
    for token in tokens:
        for end in range(1, len(token)):
            begun.setdefault(token[:end], []).append(token)
    for token in tokens:
        for start in range(1, len(token)):
            for other in begun.get(token[start:], ()):
                text = token[:start] + other
                longer = any(text.startswith(x) for x in tokens if len(x) > len(token))
                if other != token and len(other) >= len(token) and not longer:
                    return text
    return None


def _pre_tokenizer_name(parts: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer; `None` where it has none that is equal."""
    whole: dict[str, Any] = parts["pre_tokenizer"] or {}
    steps = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    # Offsets do not change the tokens.
    steps = [{field: value for field, value in step.items() if field != "trim_offsets"} for step in steps]
    found = (steps, bool(parts["model"].get("ignore_merges")))
    return next((name for name, known in PRE_TOKENIZERS.items() if found == known), None)


def _additions(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool] | None:
    """Return whether the tokenizer puts its bos before a text and its eos behind one; `None` where it puts others."""
    bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for before, behind in ((False, False), (True, False), (False, True), (True, True)):
        if full == bos * before + bare + eos * behind:
            return {"bos": before, "eos": behind}
    return None
