"""Parameters, floating-point operations and cache bytes, counted layer by layer from a configuration."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..attention import Attention
from ..cache_formats import CacheQuantization
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES, LAYER_NORMS

POSITION_BYTES = 4  # of a token, in a quantized cache


class Layer(NamedTuple):
    """A layer that is counted.

    Args:
        config: its configuration.
        attention: its attention class.
        window: its sliding window in tokens; `None`: it sees all.
        quantization: how its cache is rounded; `None`: it is not, as in a layer with a window.
    """

    config: GQAConfig
    attention: type[Attention]
    window: int | None
    quantization: CacheQuantization | None

    @property
    def attention_parameters(self) -> int:
        return sum(self.attention.parameter_counts(self.config))

    @property
    def mlp_matrices(self) -> int:
        """Weights of the MLP that one token is multiplied by, which is also its multiply-adds per token."""
        return 3 * self.config.hidden_size * self.config.intermediate_size

    @property
    def mlp_parameters(self) -> int:
        """All of the MLP, with its biases."""
        biases = 2 * self.config.intermediate_size + self.config.hidden_size if self.config.mlp_bias else 0
        return self.mlp_matrices + biases

    @property
    def cached_numbers(self) -> int:
        """Numbers that one token takes in the cache."""
        return sum(self.attention.cache_sizes(self.config))

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in the cache."""
        if self.quantization is None:
            return self.cached_numbers * dtype.itemsize
        return self.attention.rounded_bytes(self.config, self.attention.cache_formats(self.config, self.quantization))

    def exact_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the first and last of `tokens` tokens that a quantized cache keeps as they are."""
        if self.quantization is None:
            return 0
        kept = self.quantization.exact_tokens + min(self.quantization.residual_length, tokens)
        return kept * self.cached_numbers * dtype.itemsize

    def visible_tokens(self, tokens: int) -> int:
        """How many of the last `tokens` tokens the layer sees."""
        return tokens if self.window is None else min(tokens, self.window)

    def flops(self, queries: int, keys: int, absorbed: bool = False) -> int:
        """FLOPs of one sequence; only decoding has fewer keys in a window, a prompt is masked."""
        seen = self.visible_tokens(keys) if queries == 1 else keys
        attention = self.attention.multiplications(self.config, queries, seen, absorbed)
        return 2 * (attention + queries * self.mlp_matrices)

    def masked_flops(self, tokens: int) -> int:
        """FLOPs of a prompt of one sequence on scores that the mask removes, which kernels may skip."""
        count = self.attention.multiplications  # linear in queries, in keys, and in pairs of them
        of_pairs = count(self.config, tokens, tokens) - count(self.config, tokens, 0) - count(self.config, 0, tokens)
        seen = self.visible_tokens(tokens)
        pairs = seen * tokens - seen * (seen - 1) // 2
        return 2 * (of_pairs - of_pairs // tokens**2 * pairs)


@dataclass(frozen=True)
class CostedModel:
    """A model whose costs are counted; nothing is built.

    Args:
        config: its configuration.
        name: by which it is shown.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        model = costs.CostedModel(GQAConfig(), name="the default")
        print(model.name, model.kind, costs.count_parameters(model))
        ```
    """

    config: GQAConfig
    name: str = "model"

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers; those that are alike are one object."""
        found: list[Layer] = []
        alike: dict[Any, Layer] = {}
        options = self.config.cache_quantization
        rounded = None if options is None else CacheQuantization.of(options).by_layer(self.config.num_hidden_layers)
        for index, (layer, kind) in enumerate(zip(self.config.per_layer_config, self.config.layer_types, strict=True)):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            fields = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
            own = None if rounded is None or window is not None else rounded[index]
            key = (repr(sorted(fields.items())), window, repr(own))
            attention = ATTENTION_CLASSES[layer.attention_kind]
            found.append(alike.setdefault(key, Layer(layer, attention, window, own)))
        return tuple(found)

    @property
    def kind(self) -> str:
        """The attention kind of all layers, "mixed" where they differ in it."""
        kinds = {layer.config.attention_kind for layer in self.layers}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @cached_property
    def _numbers(self) -> list[tuple[Layer, int]]:
        """Layers that are not alike, and how many there are of each."""
        alike = {id(layer): layer for layer in self.layers}
        return [(alike[key], number) for key, number in Counter(map(id, self.layers)).items()]

    def total(self, count: Callable[[Layer], Any]) -> Any:
        """Sum `count` over the layers."""
        return sum(number * count(layer) for layer, number in self._numbers)


def as_costed(model: GQAConfig | CostedModel) -> CostedModel:
    """Return a `CostedModel` of a configuration, and one as it is."""
    return model if isinstance(model, CostedModel) else CostedModel(model)


# -- parameters


def count_parameters(model: GQAConfig | CostedModel) -> int:
    """Number of parameters of `GQAForCausalLM(config)`, tied embeddings counted once.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.count_parameters(GQAConfig(attention_kind="mla")))
        ```
    """
    model = as_costed(model)
    layers = model.total(lambda layer: layer.attention_parameters + layer.mlp_parameters)
    return count_embeddings(model.config) + count_norms(model.config) + layers


def count_embeddings(config: GQAConfig) -> int:
    """Number of parameters of the embedding, and of the output head where that is not tied."""
    return (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size


def count_norms(config: GQAConfig) -> int:
    """Number of parameters of the norms before and after each attention and MLP, and of the final one."""
    in_layer = len(set(LAYER_NORMS[config.norm_position]) - {"no_norm"})
    return (in_layer * config.num_hidden_layers + 1) * config.hidden_size


def count_attention_parameters(model: GQAConfig | CostedModel) -> int:
    """Number of parameters in the attention of all layers; uptraining trains these.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        config = GQAConfig(attention_kind="mla")
        print(costs.count_attention_parameters(config) / costs.count_parameters(config))
        ```
    """
    return as_costed(model).total(lambda layer: layer.attention_parameters)


def decode_weights(model: GQAConfig | CostedModel, batch_size: int = 1) -> int:
    """Number of weights that a decoded token in each of `batch_size` sequences reads.

    These are all but the other tokens' rows of an embedding that is not the output head as well.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        for kind in ("gqa", "mla"):
            print(kind, costs.decode_weights(GQAConfig(attention_kind=kind)))
        ```
    """
    model = as_costed(model)
    config = model.config
    other_rows = 0 if config.tie_word_embeddings else max(0, config.vocab_size - batch_size) * config.hidden_size
    return count_parameters(model) - other_rows


# -- the cache


def cache_bytes_per_token(model: GQAConfig | CostedModel, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one more token of one sequence takes in the caches of all layers, while no window is full.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        for kind in ("mha", "gqa", "mqa", "mla"):
            print(kind, costs.cache_bytes_per_token(GQAConfig(attention_kind=kind)))
        ```
    """
    costed = as_costed(model)
    return costed.total(lambda layer: layer.token_bytes(dtype)) + _position_bytes(costed)


def _position_bytes(model: CostedModel) -> int:
    """Bytes of a token's position, 0 where no layer is rounded."""
    return POSITION_BYTES if any(layer.quantization is not None for layer in model.layers) else 0


def cache_bytes(
    model: GQAConfig | CostedModel, batch_size: int, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of the keys and values that a dynamic cache holds after `tokens` tokens of each of `batch_size` sequences.

    With `cache_quantization` these are the rounded numbers, their scales, the tokens that are kept as they are, and
    four bytes for the position of each token.

    transformers' `DynamicCache` stores these bytes and no more. The cache that the model and `generate` make has room
    for up to a quarter and 64 tokens more in each layer without a window. A layer with a window counts
    `sliding_window` tokens at most; after a longer prompt transformers keeps the prompt's storage until the first token
    is decoded.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.cache_bytes(GQAConfig(), batch_size=8, tokens=4096) / 2**20, "MiB")
        ```
    """
    costed = as_costed(model)
    layers = costed.total(
        lambda layer: layer.token_bytes(dtype) * layer.visible_tokens(tokens) + layer.exact_bytes(tokens, dtype)
    )
    return batch_size * (layers + _position_bytes(costed) * tokens)


# -- operations


def training_flops(model: GQAConfig | CostedModel, batch_size: int, sequence_length: int) -> float:
    """FLOPs of one training step: forward, and twice that backward (gradients of inputs and of weights).

    Args:
        model: a configuration, or a `CostedModel`.
        batch_size: number of sequences.
        sequence_length: tokens of each; logits are computed for all of them.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.training_flops(GQAConfig(), batch_size=8, sequence_length=1024) / 1e12, "TFLOP a step")
        ```
    """
    model = as_costed(model)
    forward = _layers_flops(model, sequence_length, sequence_length) + _head_flops(model, sequence_length)
    return float(batch_size * 3 * forward)


def prefill_flops(model: GQAConfig | CostedModel, batch_size: int, sequence_length: int) -> float:
    """FLOPs of one forward over `batch_size` prompts of `sequence_length` tokens, on an empty cache.

    Args:
        model: a configuration, or a `CostedModel`.
        batch_size: number of prompts.
        sequence_length: tokens of each prompt, of whose last one the logits are computed.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        print(costs.prefill_flops(GQAConfig(), batch_size=1, sequence_length=1024) / 1e9, "GFLOP")
        ```
    """
    model = as_costed(model)
    return float(batch_size * (_layers_flops(model, sequence_length, sequence_length) + _head_flops(model, 1)))


def decode_flops(model: GQAConfig | CostedModel, batch_size: int, cache_length: int, absorbed: bool = True) -> float:
    """FLOPs of decoding one token in each of `batch_size` sequences.

    Args:
        model: a configuration, or a `CostedModel`.
        batch_size: number of sequences.
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
    model = as_costed(model)
    return float(batch_size * (_layers_flops(model, 1, cache_length + 1, absorbed) + _head_flops(model, 1)))


def _layers_flops(model: CostedModel, queries: int, keys: int, absorbed: bool = False) -> int:
    return model.total(lambda layer: layer.flops(queries, keys, absorbed))


def _head_flops(model: CostedModel, positions: int) -> int:
    return 2 * positions * model.config.hidden_size * model.config.vocab_size
