"""What the training tests share: a small text and a tiny model."""

import random

# Every attention kind takes part, and dropout draws random numbers.
MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Documents of a language with some structure, each different from the others."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 6))) for _ in range(60)]
    return [
        f"document {number}\n" + " ".join(draw.choices(words, weights=range(1, 61), k=200)) for number in range(count)
    ]
