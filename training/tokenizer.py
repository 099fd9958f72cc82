"""The tokenizer: the one that the recipe names, or byte-level BPE trained on the run's own text."""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .errors import RecipeError

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
# Merges settle long before this; a bigger corpus is read up to here.
TRAINING_CHARACTERS = 100_000_000
# Bytes after which training cuts a word: its time grows with the square of a word's length, and Base64 has no spaces.
# Tokens are shorter than this.
LONGEST_WORD = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE of at most `vocab_size` tokens, special ones included; raises `RecipeError`."""
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 2
    if vocab_size < smallest:
        raise RecipeError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_characters(texts, TRAINING_CHARACTERS), trainer)
    tokenizer.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD, padding_side="left"
    )


def first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by Hub name or path; raises `RecipeError`."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a wrong name, no network and a broken file each have their own class
        raise RecipeError(f"cannot load the tokenizer {name}: {' '.join(str(error).split())}") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise `RecipeError` where the tokenizer does not fit the model."""
    if len(tokenizer) > config.vocab_size:
        raise RecipeError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's vocab_size is {config.vocab_size};"
            f" set --model-overrides '{{\"vocab_size\": {len(tokenizer)}}}'"
        )
    if tokenizer.eos_token_id is None:
        raise RecipeError("the tokenizer has no end-of-text token (eos_token), and documents must end with one")
