"""The tokenizer: the one that the recipe names, or byte-level BPE trained on the run's own text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from modeling_gqa_cli.errors import UserError, one_line
from modeling_gqa_cli.paths import refuse_missing

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
# Around the messages of a chat. Pretraining never sees them: they are there for finetuning on chats.
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# More text than this hardly changes the merges; the rest of a bigger corpus is not read.
TRAINING_CHARACTERS = 100_000_000
# Bytes after which a word is cut while the tokenizer is trained: the time grows with the square of a word's length, and
# Base64 has no spaces. No token is longer.
LONGEST_WORD = 256
# ChatML, with the marks by which TRL's `assistant_only_loss` finds what the assistant writes. Servers pass a message's
# text as a list of parts as well.
CHAT_TEMPLATE = r"""{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if content is not string -%}
{%- if not content or content is not iterable or content | rejectattr('type', 'equalto', 'text') | list -%}
{{- raise_exception('the content of a message must be a text, or a list of parts of the type text') -}}
{%- endif -%}
{%- set content = content | map(attribute='text') | join -%}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- content + '<|im_end|>' -}}
{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, special tokens included.

    Raises `UserError` where `vocab_size` is smaller than the number of bytes and special tokens.
    """
    special = [END_OF_TEXT, PAD, TURN, END_OF_TURN]
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(special)
    if vocab_size < smallest:
        raise UserError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_characters(texts, TRAINING_CHARACTERS), trainer)
    tokenizer.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def ends_of_text(tokenizer: PreTrainedTokenizerBase, known: GenerationConfig | None = None) -> list[int]:
    """Return the tokens at which generation stops: those that are `known`, the end of a text, and that of a turn.

    The latter is left out where the tokenizer has none.
    """
    before = getattr(known, "eos_token_id", None)
    ends = [*(before if isinstance(before, list) else [before]), tokenizer.eos_token_id]
    ends.append(tokenizer.get_vocab().get(END_OF_TURN))
    return list(dict.fromkeys(token for token in ends if token is not None))


def first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer by Hub name or path, without code of its own; raises `UserError`."""
    try:
        refuse_missing(name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a wrong name, no network and a broken file each have their own class
        raise UserError(f"cannot load the tokenizer {name}: {one_line(error)}") from error


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens, counting those that have no text between the first and the last."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise `UserError` where the tokenizer does not fit the model."""
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {size} tokens and the model's vocab_size is {config.vocab_size};"
            f" set --model-overrides '{{\"vocab_size\": {size}}}'"
        )
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token (eos_token), and documents must end with one")
