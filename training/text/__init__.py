"""From text to packed blocks of tokens: its source, its split, its tokenizer and its blocks."""
