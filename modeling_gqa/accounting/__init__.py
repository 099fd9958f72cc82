"""Parameters, floating-point operations and cache bytes of a model, predicted from its configuration alone.

What differs by attention kind stands in the attention classes; here it is summed over the layers, mixed or not.

FLOPs are those of matrix products, 2 per multiply-add, as `torch.utils.flop_counter` counts them. Norms, rotary
embedding, softmax, activations, additions, the loss and the embedding lookup are ignored. So is what masks save: each
query is counted against every key that the layer is handed, T x T in training (the convention of PaLM, 2204.02311,
appendix B), although kernels may skip what a causal mask or a window hides. Head sizes padded for a kernel count
unpadded.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES


def count_parameters(config: GQAConfig) -> int:
    """Number of parameters of `GQAForCausalLM(config)`, tied embeddings counted once."""
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    total = embeddings + config.hidden_size  # final norm
    for layer, attention, _ in _layers(config):
        mlp_biases = 2 * layer.intermediate_size + layer.hidden_size if layer.mlp_bias else 0
        block_norms = 2 * layer.hidden_size
        total += sum(attention.parameter_counts(layer)) + _mlp_matrices(layer) + mlp_biases + block_norms
    return total


def training_flops(
    config: GQAConfig, batch_size: int, sequence_length: int, gradient_checkpointing: bool = False
) -> float:
    """FLOPs of one training step: forward, and twice that backward (gradients of inputs and of weights).

    Args:
        sequence_length: tokens of each of the `batch_size` rows; logits are computed for all of them.
        gradient_checkpointing: count the decoder layers' second forward too, as hardware utilisation does and model
            utilisation does not. Without reentry, transformers' default, it stops short of each `down_proj`.
    """
    layers = _layers_flops(config, sequence_length, sequence_length)
    total = 3 * (layers + _head_flops(config, sequence_length))
    if gradient_checkpointing:
        down = sum(layer.hidden_size * layer.intermediate_size for layer in config.per_layer_config)
        total += layers - 2 * sequence_length * down
    return float(batch_size * total)


def prefill_flops(
    config: GQAConfig, batch_size: int, sequence_length: int, logits_to_keep: int = 1, absorbed: bool = False
) -> float:
    """FLOPs of one forward over `batch_size` prompts of `sequence_length` tokens, on an empty cache.

    Args:
        logits_to_keep: positions of each prompt whose logits are computed, 0 for all; `generate` needs 1.
        absorbed: MLA attends over the latent. Off by default because prompts usually expand; a masked prompt (eager
            attention, padding) is absorbed in layers with 2 R <= N + V.
    """
    layers = _layers_flops(config, sequence_length, sequence_length, absorbed)
    return float(batch_size * (layers + _head_flops(config, min(logits_to_keep or sequence_length, sequence_length))))


def decode_flops(config: GQAConfig, batch_size: int, cache_length: int, absorbed: bool = True) -> float:
    """FLOPs of decoding one token in each of `batch_size` rows.

    Args:
        cache_length: tokens seen before; the new one attends to them (to the window's last ones) and to itself.
        absorbed: MLA attends over the latent, as a plain `kv_b_proj` allows; else it rebuilds all keys and values.
    """
    return float(batch_size * (_layers_flops(config, 1, cache_length + 1, absorbed) + _head_flops(config, 1)))


def cache_bytes_per_token(config: GQAConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one more token of one row takes in the caches of all layers, while no window is full."""
    return cache_bytes(config, batch_size=1, tokens=1, dtype=dtype)


def cache_bytes(config: GQAConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the keys and values that a dynamic cache holds after decoding up to `tokens` tokens a row.

    transformers' `DynamicCache` stores just these; the cache that the model and `generate` make keeps room for up to a
    quarter and 64 tokens more in each layer without a window.

    A layer with a sliding window holds at most that many tokens. (transformers' sliding layer shows its last
    `sliding_window - 1`, a view of storage with the newest attended to; after a long prompt, until the first decoded
    token, that storage still is the whole prompt's.)
    """
    sizes = (
        sum(attention.cache_sizes(layer)) * _visible(tokens, window) for layer, attention, window in _layers(config)
    )
    return batch_size * sum(sizes) * dtype.itemsize


def _layers(config: GQAConfig) -> Iterator[tuple[GQAConfig, Any, int | None]]:
    """Each layer's configuration, attention class and sliding window in tokens (`None`: it sees all)."""
    for layer, layer_type in zip(config.per_layer_config, config.layer_types, strict=True):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        yield layer, ATTENTION_CLASSES[layer.attention_kind], window


def _visible(tokens: int, window: int | None) -> int:
    return tokens if window is None else min(tokens, window)


def _mlp_matrices(layer: GQAConfig) -> int:
    """Weights of the gated MLP's three matrices, which is also its multiply-adds per token."""
    return 3 * layer.hidden_size * layer.intermediate_size


def _layers_flops(config: GQAConfig, queries: int, keys: int, absorbed: bool = False) -> int:
    """FLOPs of all decoder layers for one row; only decoding has fewer keys in a window, a prompt is masked."""
    multiplications = 0
    for layer, attention, window in _layers(config):
        seen = _visible(keys, window) if queries == 1 else keys
        multiplications += attention.multiplications(layer, queries, seen, absorbed) + queries * _mlp_matrices(layer)
    return 2 * multiplications


def _head_flops(config: GQAConfig, positions: int) -> int:
    return 2 * positions * config.hidden_size * config.vocab_size
