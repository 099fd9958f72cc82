"""A tokenizer as llama.cpp reads it from a GGUF file; one that llama.cpp would read otherwise is refused."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..common.errors import UserError, one_line

# What llama.cpp calls byte-level BPE.
MODEL = "gpt2"
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
# llama.cpp's names of pre-tokenizers, each with its steps in the tokenizers library. The pretraining script trains the
# first. tests/llama_cpp compares the tokens of each.
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [GPT2_STEP],
    "smollm": [{"type": "Digits", "individual_digits": True}, GPT2_STEP],
    "llama-bpe": [{**SPLIT, "pattern": {"Regex": LLAMA3_WORDS}}, BYTES_STEP],
}
# Those with which llama.cpp takes a word that is a token whole, also where no merges lead to it.
WHOLE_WORDS = ("llama-bpe",)
# Kinds of tokens, by the numbers that GGUF gives them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


class Vocabulary(NamedTuple):
    """A tokenizer's entries of a GGUF file.

    Args:
        pre_tokenizer: llama.cpp's name of what cuts a text into words.
        tokens: by their ids; ids without a token have a name that no text holds.
        kinds: of the tokens.
        merges: pairs of tokens, with a space between, first those that are merged first.
        special: token ids by their purpose (bos, eos, pad, unk).
        adds: whether a text gets a token of this purpose (bos, eos).
        chat_template: in Jinja; `None` where there is none.
    """

    pre_tokenizer: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    special: dict[str, int]
    adds: dict[str, bool]
    chat_template: str | list[dict[str, str]] | None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Return the tokenizer in the folder of a checkpoint.

    Args:
        folder: of the checkpoint.
        size: number of token ids that the model has.

    Raises:
        UserError: there is no tokenizer, or llama.cpp would split texts into other tokens.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # a missing file, a damaged file, no tokenizer.json: each has its own class
        raise UserError(
            f"a GGUF file needs the tokenizer of {folder}, which cannot be loaded: {one_line(error)[:200]}"
        ) from error
    model, ids = parts["model"], tokenizer.get_vocab()
    if reason := _why_not_byte_level(parts):
        raise _refused(folder, reason)
    name = _pre_tokenizer_name(parts)
    if name is None:
        raise _refused(folder, f"its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}")
    if tokenizer.eos_token_id is None:
        raise _refused(folder, "it has no end-of-text token (eos_token)")
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in ids.items():
        tokens[index], kinds[index] = token, NORMAL
    for added in parts["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = {purpose: getattr(tokenizer, f"{purpose}_token_id") for purpose in ("bos", "eos", "pad", "unk")}
    if special["bos"] is None:  # llama.cpp would take token 11 for it
        special["bos"] = special["eos"]
    special = {purpose: index for purpose, index in special.items() if index is not None}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": title, "template": text} for title, text in template.items()]
    return Vocabulary(name, tokens, kinds, merges, special, _additions(tokenizer, folder), template)


def _refused(folder: Path, reason: str) -> UserError:
    return UserError(
        f"llama.cpp would not tokenize as the tokenizer of {folder} does, because {reason}: export to a folder, and "
        "see whether llama.cpp's own converter knows this tokenizer"
    )


def _why_not_byte_level(parts: dict[str, Any]) -> str | None:
    """Return what of a tokenizer llama.cpp's byte-level BPE does not do."""
    model = parts["model"]
    if model["type"] != "BPE" or not set(ByteLevel.alphabet()) <= set(model["vocab"]):
        return "it is not byte-level BPE"
    if parts["normalizer"] is not None:
        return f"it normalizes texts ({parts['normalizer'].get('type')})"
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(field):
            return f"its model has {field}={model[field]!r}"
    for added in parts["added_tokens"]:
        for field in ("lstrip", "rstrip", "single_word"):
            if added[field]:
                return f"its token {added['content']!r} has {field}=True"
    return None


def _pre_tokenizer_name(parts: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer; `None` where it has none that is equal."""
    whole: dict[str, Any] = parts["pre_tokenizer"] or {}
    steps = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    # Offsets do not change the tokens.
    steps = [{field: value for field, value in step.items() if field != "trim_offsets"} for step in steps]
    takes_whole = bool(parts["model"].get("ignore_merges"))
    equal = (name for name, known in PRE_TOKENIZERS.items() if steps == known)
    return next((name for name in equal if takes_whole == (name in WHOLE_WORDS)), None)


def _additions(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, bool]:
    """Return whether the tokenizer puts its bos before a text and its eos behind one."""
    bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for before, behind in ((False, False), (True, False), (False, True), (True, True)):
        if full == bos * before + bare + eos * behind:
            return {"bos": before, "eos": behind}
    raise _refused(folder, "it puts other tokens than bos and eos around a text")
