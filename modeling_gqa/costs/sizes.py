"""Parameters of a model and bytes of its cache, summed over its layers."""

import torch

from ..configuration_gqa import GQAConfig
from .layers import Model, as_model


def count_parameters(config: GQAConfig | Model) -> int:
    """Number of parameters of `GQAForCausalLM(config)`, tied embeddings counted once.

    Args:
        config: the configuration, or a `Model`; nothing is built.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.count_parameters(GQAConfig(attention_kind="mla")))
        ```
    """
    model = as_model(config)
    layers = model.total(lambda layer: layer.attention_parameters + layer.mlp_parameters)
    return count_embeddings(model.config) + count_norms(model.config) + layers


def count_embeddings(config: GQAConfig) -> int:
    """Number of parameters of the embedding, and of the output head where that is not tied."""
    return (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size


def count_norms(config: GQAConfig) -> int:
    """Number of parameters of the norms before each attention and MLP, and of the final one."""
    return (2 * config.num_hidden_layers + 1) * config.hidden_size


def count_attention_parameters(config: GQAConfig | Model) -> int:
    """Number of parameters in the attention of all layers of `GQAForCausalLM(config)`; uptraining trains these.

    Args:
        config: the configuration, or a `Model`; nothing is built.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        config = GQAConfig(attention_kind="mla")
        print(costs.count_attention_parameters(config) / costs.count_parameters(config))
        ```
    """
    return as_model(config).total(lambda layer: layer.attention_parameters)


def decode_weights(config: GQAConfig | Model, batch_size: int = 1) -> int:
    """Number of weights that decoding one token reads: all but the rows of other tokens in the embedding.

    At small batches and short caches, reading them is most of the time that a token takes.

    Args:
        config: the configuration, or a `Model`.
        batch_size: number of rows, of which each decodes a token. Of experts, those are counted that the tokens are
            expected to take together; see `Experts.read`.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        for kind in ("gqa", "mla"):
            print(kind, costs.decode_weights(GQAConfig(attention_kind=kind)))
        ```
    """
    model, config = as_model(config), as_model(config).config
    other_rows = 0 if config.tie_word_embeddings else max(0, config.vocab_size - batch_size) * config.hidden_size
    unread = model.total(lambda layer: layer.experts.stored - layer.experts.read(batch_size) if layer.experts else 0)
    return count_parameters(model) - other_rows - round(unread)


def cache_bytes_per_token(config: GQAConfig | Model, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one more token of one row takes in the caches of all layers, while no window is full.

    Args:
        config: the configuration, or a `Model`.
        dtype: of the cached numbers.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        for kind in ("mha", "gqa", "mqa", "mla"):
            print(kind, costs.cache_bytes_per_token(GQAConfig(attention_kind=kind)))
        ```
    """
    return cache_bytes(config, batch_size=1, tokens=1, dtype=dtype)


def cache_bytes(config: GQAConfig | Model, batch_size: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the keys and values that a dynamic cache holds after decoding up to `tokens` tokens a row.

    transformers' `DynamicCache` stores these bytes and no more. The cache that the model and `generate` make has room
    for up to a quarter and 64 tokens more in each layer without a window.

    A layer with a sliding window counts `sliding_window` tokens at most. After a prompt longer than that, transformers'
    sliding layer keeps the whole prompt's storage until the first token is decoded.

    Args:
        config: the configuration, or a `Model`.
        batch_size: number of rows.
        tokens: tokens of each row, the prompt's and the decoded.
        dtype: of the cached numbers.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.cache_bytes(GQAConfig(), batch_size=8, tokens=4096) / 2**20, "MiB")
        ```
    """
    numbers = as_model(config).total(lambda layer: layer.cached_numbers * layer.visible_tokens(tokens))
    return batch_size * numbers * dtype.itemsize
