"""What a model costs, in one report: parameters, operations, cache and bytes read, by layer and in all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..configuration_gqa import GQAConfig
from .bounds import Machine, decode_bytes, largest_batch, longest_context
from .counts import (
    CostedModel,
    Layer,
    as_costed,
    cache_bytes,
    cache_bytes_per_token,
    count_attention_parameters,
    count_embeddings,
    count_norms,
    count_parameters,
    decode_flops,
    decode_weights,
    prefill_flops,
    training_flops,
)


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer; FLOPs are of one sequence, by its number of tokens.

    Args:
        layer: its index.
        attention_kind: "mha", "mqa", "gqa" or "mla".
        window: tokens that it sees; `None`: all.
        cached_numbers: that one token takes in its cache.
        attention_parameters: of its attention, with biases and norms.
        mlp_parameters: of its MLP.
        training_flops: of a step of training.
        prefill_flops: of a prompt.
        decode_flops: of one decoded token, after so many; MLA attends over its latent.
        decode_flops_expanded: the same where MLA rebuilds keys and values at every token.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        layer = costs.report(GQAConfig(), contexts=[4096]).layers[0]
        print(layer.attention_kind, layer.attention_parameters, layer.decode_flops[4096])
        ```
    """

    layer: int
    attention_kind: str
    window: int | None
    cached_numbers: int
    attention_parameters: int
    mlp_parameters: int
    training_flops: dict[int, int]
    prefill_flops: dict[int, int]
    decode_flops: dict[int, int]
    decode_flops_expanded: dict[int, int]


@dataclass(frozen=True)
class ContextCost:
    """Costs of a model at one number of sequences and tokens.

    Args:
        batch_size: number of sequences.
        context: tokens of each sequence: trained on, read as a prompt, or cached when a token is decoded.
        training_flops: of a step of training.
        prefill_flops: of the prompts; the logits of each one's last token are computed.
        decode_flops: of one decoded token in each sequence; MLA attends over its latent.
        decode_flops_expanded: the same where MLA rebuilds keys and values at every token.
        cache_bytes: of all sequences.
        decode_bytes: read by one decoded token in each sequence: the cache, and the weights once.
        intensity: `decode_flops` for each of `decode_bytes`.
        decode_seconds: least time of one decoded token in each sequence; `None` without a machine.
        prefill_seconds: least time of reading the prompts, where a kernel skips the scores that the mask hides;
            `None` without a machine.
        training_seconds: the same of a step of training, which reads the weights forward and backward.
        fits: whether weights and cache fit the memory; `None` without one.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        for cost in costs.report(GQAConfig(), contexts=[1024, 8192]).contexts:
            print(cost.context, cost.cache_bytes, cost.decode_bytes, cost.intensity)
        ```
    """

    batch_size: int
    context: int
    training_flops: float
    prefill_flops: float
    decode_flops: float
    decode_flops_expanded: float
    cache_bytes: int
    decode_bytes: int
    intensity: float
    decode_seconds: float | None
    prefill_seconds: float | None
    training_seconds: float | None
    fits: bool | None


@dataclass(frozen=True)
class CostReport:
    """What a model costs; `report` makes it.

    Args:
        name: of the model.
        dtype: of weights and cache, such as "bfloat16".
        parameters: of the model, tied embeddings counted once.
        attention_parameters: of the attention of all layers.
        mlp_parameters: of the MLPs of all layers.
        embedding_parameters: of the embedding, and of the output head where that is not tied.
        norm_parameters: of the norms before attention and MLP, and of the final one.
        weight_bytes: of all parameters.
        cache_bytes_per_token: of one sequence, in all layers, while no window is full.
        layers: costs of each layer.
        contexts: costs of the model at each number of sequences and tokens that was asked for.
        longest_context: by number of sequences, the tokens of each that fit the memory; `None`: no limit.
        largest_batch: by tokens of each, the number of sequences that fit the memory.
        memory: in bytes; `None` if none was given, and the two before are empty.
        machine: what the bounds are for; `None` if none was given.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        found = costs.report(GQAConfig())
        print(found.parameters, found.cache_bytes_per_token, found.to_dict()["layers"][0])
        ```
    """

    name: str
    dtype: str
    parameters: int
    attention_parameters: int
    mlp_parameters: int
    embedding_parameters: int
    norm_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    layers: tuple[LayerCost, ...]
    contexts: tuple[ContextCost, ...]
    longest_context: dict[int, int | None]
    largest_batch: dict[int, int]
    memory: float | None
    machine: Machine | None

    def to_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON has."""
        return asdict(self)


def report(
    model: GQAConfig | CostedModel,
    *,
    contexts: Sequence[int] = (1024, 8192, 32768),
    batch_sizes: Sequence[int] = (1,),
    dtype: torch.dtype = torch.bfloat16,
    memory: float | None = None,
    machine: Machine | None = None,
) -> CostReport:
    """Return what a model costs, from its configuration alone.

    Args:
        model: a configuration, or a `CostedModel`, which has a name.
        contexts: numbers of tokens of each sequence.
        batch_sizes: numbers of sequences.
        dtype: of weights and cache.
        memory: bytes for weights and cache.
        machine: whose bounds are wanted.

    Raises:
        ValueError: a number of tokens or sequences is less than 1.

    Example:
        ```python
        from modeling_gqa import GQAConfig, costs

        found = costs.report(GQAConfig(attention_kind="mla"), contexts=[4096], memory=2**30)
        print(found.parameters, found.contexts[0].cache_bytes, found.longest_context[1])
        ```
    """
    for name, numbers in (("contexts", contexts), ("batch_sizes", batch_sizes)):
        if min(numbers, default=1) < 1:
            raise ValueError(f"{name} must be at least 1, and one is {min(numbers)}")
    model = as_costed(model)
    parameters = count_parameters(model)
    return CostReport(
        name=model.name,
        dtype=str(dtype).removeprefix("torch."),
        parameters=parameters,
        attention_parameters=count_attention_parameters(model),
        mlp_parameters=model.total(lambda layer: layer.mlp_parameters),
        embedding_parameters=count_embeddings(model.config),
        norm_parameters=count_norms(model.config),
        weight_bytes=parameters * dtype.itemsize,
        cache_bytes_per_token=cache_bytes_per_token(model, dtype),
        layers=tuple(layer_cost(index, layer, contexts) for index, layer in enumerate(model.layers)),
        contexts=tuple(
            context_cost(model, rows, tokens, dtype, memory, machine) for rows in batch_sizes for tokens in contexts
        ),
        longest_context={rows: longest_context(model, memory, rows, dtype) for rows in batch_sizes if memory},
        largest_batch={tokens: largest_batch(model, memory, tokens, dtype) for tokens in contexts if memory},
        memory=memory,
        machine=machine,
    )


def layer_cost(index: int, layer: Layer, contexts: Sequence[int]) -> LayerCost:
    """Costs of one layer for sequences of so many tokens."""
    return LayerCost(
        layer=index,
        attention_kind=layer.config.attention_kind,
        window=layer.window,
        cached_numbers=layer.cached_numbers,
        attention_parameters=layer.attention_parameters,
        mlp_parameters=layer.mlp_parameters,
        training_flops={tokens: 3 * layer.flops(tokens, tokens) for tokens in contexts},
        prefill_flops={tokens: layer.flops(tokens, tokens) for tokens in contexts},
        decode_flops={tokens: layer.flops(1, tokens + 1, absorbed=True) for tokens in contexts},
        decode_flops_expanded={tokens: layer.flops(1, tokens + 1) for tokens in contexts},
    )


def context_cost(
    model: CostedModel, rows: int, tokens: int, dtype: torch.dtype, memory: float | None, machine: Machine | None
) -> ContextCost:
    """Costs of a model at one number of sequences and tokens."""
    training, prefill = training_flops(model, rows, tokens), prefill_flops(model, rows, tokens)
    decode = decode_flops(model, rows, tokens)
    weights, cache = count_parameters(model) * dtype.itemsize, cache_bytes(model, rows, tokens, dtype)
    read = decode_bytes(model, rows, tokens, dtype)
    hidden = rows * model.total(lambda layer: layer.masked_flops(tokens))
    prompt_weights = decode_weights(model, rows * tokens) * dtype.itemsize
    return ContextCost(
        batch_size=rows,
        context=tokens,
        training_flops=training,
        prefill_flops=prefill,
        decode_flops=decode,
        decode_flops_expanded=decode_flops(model, rows, tokens, absorbed=False),
        cache_bytes=cache,
        decode_bytes=read,
        intensity=decode / read,
        decode_seconds=machine.seconds(read, decode) if machine else None,
        prefill_seconds=machine.seconds(prompt_weights, prefill - hidden) if machine else None,
        training_seconds=machine.seconds(2 * prompt_weights, training - 3 * hidden) if machine else None,
        fits=None if memory is None else weights + cache <= memory,
    )
