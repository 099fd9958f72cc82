"""The layers of a configuration, as sizes and operations are counted over them."""

from collections.abc import Iterator

from ..attention import Attention
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES


def iterate_layers(config: GQAConfig) -> Iterator[tuple[GQAConfig, type[Attention], int | None]]:
    """Each layer's configuration, attention class and sliding window in tokens (`None`: it sees all)."""
    for layer, layer_type in zip(config.per_layer_config, config.layer_types, strict=True):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        yield layer, ATTENTION_CLASSES[layer.attention_kind], window


def visible_tokens(tokens: int, window: int | None) -> int:
    """How many of the last `tokens` tokens a layer with this `window` sees."""
    return tokens if window is None else min(tokens, window)


def mlp_matrices(layer: GQAConfig) -> int:
    """Weights of the gated MLP's three matrices, which is also its multiply-adds per token."""
    return 3 * layer.hidden_size * layer.intermediate_size
