"""Floating-point operations of training, prefill and decoding, summed over the layers."""

from ..configuration_gqa import GQAConfig
from .layers import Model, as_model


def training_flops(
    config: GQAConfig | Model, batch_size: int, sequence_length: int, gradient_checkpointing: bool = False
) -> float:
    """FLOPs of one training step: forward, and twice that backward (gradients of inputs and of weights).

    Args:
        config: the configuration, or a `Model`.
        batch_size: number of rows.
        sequence_length: tokens of each row; logits are computed for all of them.
        gradient_checkpointing: count the decoder layers' second forward too, as hardware utilisation does and model
            utilisation does not. Without reentry, transformers' default, it stops short of each `down_proj`.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.training_flops(GQAConfig(), batch_size=8, sequence_length=1024) / 1e12, "TFLOP a step")
        ```
    """
    model, config = as_model(config), as_model(config).config
    layers = _layers_flops(model, sequence_length, sequence_length)
    total = 3 * (layers + _head_flops(config, sequence_length))
    if gradient_checkpointing:
        down = model.total(lambda layer: layer.mlp_matrices // 3)
        total += layers - 2 * sequence_length * down
    return float(batch_size * total)


def prefill_flops(
    config: GQAConfig | Model, batch_size: int, sequence_length: int, logits_to_keep: int = 1, absorbed: bool = False
) -> float:
    """FLOPs of one forward over `batch_size` prompts of `sequence_length` tokens, on an empty cache.

    Args:
        config: the configuration, or a `Model`.
        batch_size: number of prompts.
        sequence_length: tokens of each prompt.
        logits_to_keep: positions of each prompt whose logits are computed, 0 for all; `generate` needs 1.
        absorbed: MLA attends over the latent. Off by default because prompts usually expand; a masked prompt (eager
            attention, padding) is absorbed in layers with 2 R <= N + V.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.prefill_flops(GQAConfig(), batch_size=1, sequence_length=1024) / 1e9, "GFLOP")
        ```
    """
    model, positions = as_model(config), min(logits_to_keep or sequence_length, sequence_length)
    layers = _layers_flops(model, sequence_length, sequence_length, absorbed)
    return float(batch_size * (layers + _head_flops(model.config, positions)))


def decode_flops(config: GQAConfig | Model, batch_size: int, cache_length: int, absorbed: bool = True) -> float:
    """FLOPs of decoding one token in each of `batch_size` rows.

    Args:
        config: the configuration, or a `Model`.
        batch_size: number of rows.
        cache_length: tokens seen before; the new one attends to them (to the window's last ones) and to itself.
        absorbed: MLA attends over the latent, as a plain `kv_b_proj` allows; else it rebuilds all keys and values.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        config = GQAConfig(attention_kind="mla")
        for absorbed in (True, False):
            print(absorbed, costs.decode_flops(config, batch_size=1, cache_length=2048, absorbed=absorbed))
        ```
    """
    model = as_model(config)
    return float(batch_size * (_layers_flops(model, 1, cache_length + 1, absorbed) + _head_flops(model.config, 1)))


def _layers_flops(model: Model, queries: int, keys: int, absorbed: bool = False) -> int:
    """FLOPs of all decoder layers for one row."""
    return model.total(lambda layer: layer.flops(queries, keys, absorbed))


def _head_flops(config: GQAConfig, positions: int) -> int:
    return 2 * positions * config.hidden_size * config.vocab_size
