"""Parameters of a model and bytes of its cache, summed over its layers."""

import torch

from ..configuration_gqa import GQAConfig
from .layers import iterate_layers, mlp_matrices, visible_tokens


def count_parameters(config: GQAConfig) -> int:
    """Number of parameters of `GQAForCausalLM(config)`, tied embeddings counted once.

    Args:
        config: the configuration; nothing is built.

    Example:
        ```python
        from modeling_gqa import GQAConfig, accounting

        print(accounting.count_parameters(GQAConfig(attention_kind="mla")))
        ```
    """
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    total = embeddings + config.hidden_size  # final norm
    for layer, attention, _ in iterate_layers(config):
        mlp_biases = 2 * layer.intermediate_size + layer.hidden_size if layer.mlp_bias else 0
        block_norms = 2 * layer.hidden_size
        total += sum(attention.parameter_counts(layer)) + mlp_matrices(layer) + mlp_biases + block_norms
    return total


def count_attention_parameters(config: GQAConfig) -> int:
    """Number of parameters in the attention of all layers of `GQAForCausalLM(config)`; uptraining trains these.

    Args:
        config: the configuration; nothing is built.

    Example:
        ```python
        from modeling_gqa import GQAConfig, accounting

        config = GQAConfig(attention_kind="mla")
        print(accounting.count_attention_parameters(config) / accounting.count_parameters(config))
        ```
    """
    return sum(sum(attention.parameter_counts(layer)) for layer, attention, _ in iterate_layers(config))


def decode_weights(config: GQAConfig) -> int:
    """Number of weights that decoding one token reads: all but the rows of other tokens in the embedding.

    At small batches and short caches, reading them is most of the time that a token takes.

    Args:
        config: the configuration.

    Example:
        ```python
        from modeling_gqa import GQAConfig, accounting

        for kind in ("gqa", "mla"):
            print(kind, accounting.decode_weights(GQAConfig(attention_kind=kind)))
        ```
    """
    other_rows = config.vocab_size - 1
    return count_parameters(config) - (0 if config.tie_word_embeddings else other_rows * config.hidden_size)


def cache_bytes_per_token(config: GQAConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one more token of one row takes in the caches of all layers, while no window is full.

    Args:
        config: the configuration.
        dtype: of the cached numbers.

    Example:
        ```python
        from modeling_gqa import GQAConfig, accounting

        for kind in ("mha", "gqa", "mqa", "mla"):
            print(kind, accounting.cache_bytes_per_token(GQAConfig(attention_kind=kind)))
        ```
    """
    return cache_bytes(config, batch_size=1, tokens=1, dtype=dtype)


def cache_bytes(config: GQAConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the keys and values that a dynamic cache holds after decoding up to `tokens` tokens a row.

    transformers' `DynamicCache` stores these bytes and no more. The cache that the model and `generate` make has room
    for up to a quarter and 64 tokens more in each layer without a window.

    A layer with a sliding window counts `sliding_window` tokens at most. After a prompt longer than that, transformers'
    sliding layer keeps the whole prompt's storage until the first token is decoded.

    Args:
        config: the configuration.
        batch_size: number of rows.
        tokens: tokens of each row, the prompt's and the decoded.
        dtype: of the cached numbers.

    Example:
        ```python
        from modeling_gqa import GQAConfig, accounting

        print(accounting.cache_bytes(GQAConfig(), batch_size=8, tokens=4096) / 2**20, "MiB")
        ```
    """
    numbers = 0
    for layer, attention, window in iterate_layers(config):
        numbers += sum(attention.cache_sizes(layer)) * visible_tokens(tokens, window)
    return batch_size * numbers * dtype.itemsize
