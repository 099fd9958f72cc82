"""The layers of a model, as sizes and operations are counted over them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..attention import Attention
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import ATTENTION_CLASSES
from .experts import Experts


class Layer(NamedTuple):
    """A layer that is counted.

    Args:
        config: its configuration.
        attention: its attention class.
        window: its sliding window in tokens; `None`: it sees all.
        experts: what stands in place of its gated MLP, if anything does.
    """

    config: GQAConfig
    attention: type[Attention]
    window: int | None
    experts: Experts | None

    @property
    def attention_parameters(self) -> int:
        return sum(self.attention.parameter_counts(self.config))

    @property
    def mlp_matrices(self) -> int:
        """Weights of the MLP that one token is multiplied by, which is also its multiply-adds per token."""
        return self.experts.per_token if self.experts else 3 * self.config.hidden_size * self.config.intermediate_size

    @property
    def mlp_parameters(self) -> int:
        """All of the MLP, with its biases."""
        if self.experts:
            return self.experts.stored
        biases = 2 * self.config.intermediate_size + self.config.hidden_size if self.config.mlp_bias else 0
        return self.mlp_matrices + biases

    @property
    def cached_numbers(self) -> int:
        """Numbers that one token takes in the cache."""
        return sum(self.attention.cache_sizes(self.config))

    def visible_tokens(self, tokens: int) -> int:
        """How many of the last `tokens` tokens the layer sees."""
        return tokens if self.window is None else min(tokens, self.window)

    def flops(self, queries: int, keys: int, absorbed: bool = False) -> int:
        """FLOPs of one row; only decoding has fewer keys in a window, a prompt is masked."""
        seen = self.visible_tokens(keys) if queries == 1 else keys
        attention = self.attention.multiplications(self.config, queries, seen, absorbed)
        return 2 * (attention + queries * self.mlp_matrices)

    def hidden_flops(self, tokens: int) -> int:
        """FLOPs of a prompt of one row on scores that the mask hides, which kernels may skip."""
        count = self.attention.multiplications  # linear in queries, in keys, and in pairs of them
        of_pairs = count(self.config, tokens, tokens) - count(self.config, tokens, 0) - count(self.config, 0, tokens)
        seen = self.visible_tokens(tokens)
        pairs = seen * tokens - seen * (seen - 1) // 2
        return 2 * (of_pairs - of_pairs // tokens**2 * pairs)


@dataclass(frozen=True)
class Model:
    """A model whose costs are counted; nothing is built.

    Args:
        config: its configuration.
        name: by which it is shown.
        experts: by index of a layer, the experts that stand in place of its MLP.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        experts = costs.Experts(number=8, chosen=2, size=2**20, shared=0)
        model = costs.Model(GQAConfig(), experts={11: experts})
        print(costs.count_parameters(model), costs.count_parameters(model.config))
        ```
    """

    config: GQAConfig
    name: str = "model"
    experts: Mapping[int, Experts] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers; those that are alike are one object."""
        found: list[Layer] = []
        alike: dict[Any, Layer] = {}
        for index, (layer, kind) in enumerate(zip(self.config.per_layer_config, self.config.layer_types, strict=True)):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            experts = self.experts.get(index)
            fields = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
            key = (repr(sorted(fields.items())), window, experts)
            found.append(alike.setdefault(key, Layer(layer, ATTENTION_CLASSES[layer.attention_kind], window, experts)))
        return tuple(found)

    @cached_property
    def _numbers(self) -> list[tuple[Layer, int]]:
        """Layers that are not alike, and how many there are of each."""
        alike = {id(layer): layer for layer in self.layers}
        return [(alike[key], number) for key, number in Counter(map(id, self.layers)).items()]

    def total(self, count: Callable[[Layer], Any]) -> Any:
        """Sum `count` over the layers."""
        return sum(number * count(layer) for layer, number in self._numbers)


def as_model(model: GQAConfig | Model) -> Model:
    """Return a `Model`, of a configuration the one without experts."""
    return model if isinstance(model, Model) else Model(model)
