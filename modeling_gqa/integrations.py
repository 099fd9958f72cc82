"""What other tools need of these models: tensor parallelism, continuous batching, PEFT, tables of names.

Loading and generating need nothing of it. What a tool does not promise is imported in the function that uses it, so
that a release that has changed it breaks that tool alone.

transformers sizes a paged cache by one number of key/value heads and one head size for all layers. The cache only
stores: it writes and reads what a layer gives it. So the numbers of each layer are laid out as rows of one width, and a
row is what transformers takes for a layer: a key of one head with half of the row's numbers, and a value with the other
half. A view of the model's configuration tells transformers of these rows while it makes the cache. Where numbers are
rounded, rows hold their bytes. Layers that need to know where the tokens stand read it from one row more.

Shapes: B batch, G key/value heads, D and V sizes of a key and of a value, S tokens held and T new tokens. In a paged
cache B is 1, T counts the new tokens of all requests, and S those held and new.
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import distributed, nn

from .attention import SHARED_BY_RANKS, SPLIT_BY_HEADS
from .cache_formats import CACHE_BUFFERS, CacheQuantization
from .cache_layers import HeldTokens, rows_of
from .cache_quantized import formats_by_layer, rounds_cache
from .compatibility import logger
from .layers import key_mean_size

# What PEFT adapts by default: queries, and values or MLA's latent; a layer has some of these. An adapter of `kv_b_proj`
# would keep MLA from attending over its latent.
ADAPTED_MODULES = ["q_proj", "v_proj", "q_b_proj", "kv_a_proj_with_mqa"]
# Where transformers' own tools look the names of classes up: `Trainer` shifts labels under label smoothing, pipelines,
# model cards and `transformers serve` tell the task. Registering with an Auto class does not fill these.
NAME_TABLES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
# A layer takes at most this number of rows of a paged cache.
MOST_ROWS = 4
# A row is written and read by itself. One more for each layer must save this share of the cache to be worth it.
COST_OF_A_ROW = 0.02


def offer_name(model_type: str, auto_class: str, model_class: type) -> None:
    """Tell transformers' tools the name of the class that `auto_class` builds for models of `model_type`."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    getattr(tables, NAME_TABLES[auto_class])[model_type] = model_class.__name__


def offer_to_peft(model_type: str) -> None:
    """Tell PEFT, if it is imported, what to adapt by default, where of Llama it adapts queries and values."""
    constants = sys.modules.get("peft.utils.constants")
    for table in list(vars(constants).values()) if constants else ():
        if isinstance(table, dict) and table.get("llama") == ["q_proj", "v_proj"]:
            table.setdefault(model_type, ADAPTED_MODULES)


class SumGradient(torch.autograd.Function):
    """The input as it is, with its gradient summed over a process group."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # reduced in place, where others may read it
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


@cache
def parallel_styles() -> tuple[Any, type]:
    """transformers' table of rules of tensor parallelism, with ours in it, and the class `SharedByRanks`."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, TensorParallelLayer

    class SharedByRanks(TensorParallelLayer):
        """Rule of tensor parallelism: each rank computes the whole output and uses it for its own query heads.

        Args:
            start: where the part begins whose gradient is summed here; that of what comes before is summed later on.
            heads: equal parts of the output, of which a rank uses one.
        """

        def __init__(self, start: int = 0, heads: int = 1):
            self.start, self.heads = start, heads

        def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: Any) -> torch.Tensor:
            summed = output[..., self.start :]
            if summed.requires_grad:
                summed = SumGradient.apply(summed, mesh.get_group())
            if self.start:
                return torch.cat((output[..., : self.start], summed), dim=-1)
            return summed.chunk(self.heads, dim=-1)[mesh.get_local_rank() * self.heads // mesh.size()]

    class SplitByHeads(ColwiseParallel):
        """Rule of tensor parallelism: a map by head, of which each rank has those of its own heads."""

        def should_use_local_tensors(self, module: nn.Module) -> bool:
            return True

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            return TensorParallelLayer.install_forward(self, module, mesh)

        def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: Any) -> tuple[Any, Any]:
            return args, kwargs  # which have the rank's heads alone

        def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: Any) -> torch.Tensor:
            return output

    ALL_PARALLEL_STYLES.register(SHARED_BY_RANKS, SharedByRanks())  # type: ignore[arg-type]
    ALL_PARALLEL_STYLES.register(SPLIT_BY_HEADS, SplitByHeads())  # type: ignore[arg-type]
    return ALL_PARALLEL_STYLES, SharedByRanks


def divide_over_ranks(attention: Any, mesh: Any) -> None:
    """Give each rank of a mesh its query heads of a layer, and the keys and values that these read.

    Raises:
        ValueError: the heads do not divide over the ranks.
    """
    if not attention.tp_plan:
        return
    styles, shared_by_ranks = parallel_styles()
    ranks, heads = mesh.size(), attention.shared_heads
    layer = attention.config.per_layer_config[attention.layer_idx]
    refuse_uneven(attention.layer_idx, layer.num_attention_heads, heads, ranks)
    if heads is not None and any(name in CACHE_BUFFERS for name, _ in attention.named_buffers(recurse=False)):
        raise ValueError(
            "means and bases of a quantized cache are not divided over ranks: load with cache_quantization=None"
        )
    for name, rule in attention.tp_plan.items():
        module, style = attention.get_submodule(name), styles[rule]
        if name == "kv_a_proj_with_mqa":
            style = shared_by_ranks(start=layer.kv_lora_rank)
        elif heads is not None and heads < ranks and name in ("k_proj", "v_proj"):
            style = shared_by_ranks(heads=heads)
        for parameter in list(module._parameters):
            style.shard_param(module, parameter, mesh)
        style.install_forward(module, mesh)
    if heads is not None:
        attention.num_key_value_groups = layer.num_attention_heads // max(heads, ranks)


def refuse_uneven(index: int, heads: int, key_value_heads: int | None, ranks: int) -> None:
    """Raise `ValueError` where the heads of layer `index` do not divide over the ranks; of MLA only query heads do."""
    if heads % ranks:
        raise ValueError(f"layer {index} has {heads} query heads, which do not divide over {ranks} ranks")
    if key_value_heads is not None and key_value_heads % ranks and ranks % key_value_heads:
        raise ValueError(
            f"layer {index} has {key_value_heads} key/value heads: neither they nor the {ranks} ranks are a multiple "
            "of the other"
        )


@cache
def indexed_by_group() -> bool:
    """Whether transformers makes indices for each layer of a group, as 5.17 does, and not for each type of layers."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    return "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters


@dataclass(frozen=True)
class Rows:
    """How the layers' numbers lie in a paged cache.

    Args:
        width: numbers of a row, even.
        counts: rows of each layer, and of the positions where they are kept.
        positions: whether the tokens' positions are kept, for the layers without a window.
        formats: of rounded numbers, those of each layer; `None` for layers that are not rounded.
    """

    width: int
    counts: tuple[int, ...]
    positions: bool = False
    formats: tuple[Any, ...] | None = None

    def first(self, layer_idx: int) -> int:
        """Return the place of the layer's first row among all rows."""
        return sum(self.counts[:layer_idx])


def paged_rows(config: Any, dtype: torch.dtype) -> Rows:
    """Return the rows of a paged cache in `dtype` for the layers of a `GQAConfig`."""
    from .modeling_gqa import ATTENTION_CLASSES  # which imports this file

    layers = [(ATTENTION_CLASSES[layer.attention_kind], layer) for layer in config.per_layer_config]
    numbers = [sum(kind.cache_sizes(layer)) for kind, layer in layers]
    whole = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    for index, (_, layer) in enumerate(layers):  # a layer with a window keeps the angles of a key that all tokens share
        numbers[index] += 0 if index in whole else key_mean_size(layer)
    formats = None
    if rounds_cache(config) and whole:
        options = CacheQuantization.of(config.cache_quantization)
        if options.exact_tokens or options.residual_length:
            logger.warning_once("continuous batching rounds all tokens, whatever exact_tokens and residual_length say")
        formats = tuple(own if index in whole else None for index, own in enumerate(formats_by_layer(config, options)))
        for index in whole:
            kind, layer = layers[index]
            numbers[index] = -(-kind.rounded_bytes(layer, formats[index]) // dtype.itemsize)
    if not (formats or any(layers[index][1].key_mean for index in whole)):
        return choose_rows(numbers)
    positions = -(-torch.int32.itemsize // dtype.itemsize)
    return replace(choose_rows([*numbers, positions]), positions=True, formats=formats)


def choose_rows(numbers: Sequence[int]) -> Rows:
    """Return the rows that take least for layers that store `numbers` per token."""

    def of(width: int) -> Rows:
        return Rows(width, tuple(-(-n // width) for n in numbers))

    def cost(rows: Rows) -> float:
        total = sum(rows.counts)
        return rows.width * total * (1 + COST_OF_A_ROW * (total / len(rows.counts) - 1))

    widest = max(numbers) + max(numbers) % 2
    if indexed_by_group():  # where another number of rows would change the groups
        return of(widest)
    narrowest = -(-widest // MOST_ROWS)
    return min(map(of, range(widest, narrowest + narrowest % 2 - 1, -2)), key=cost)


class PagedView:
    """A model's configuration as the paged cache is to see it; all else is read from the configuration itself.

    Args:
        config: the configuration.
        rows: of the model's layers.
        at_peak: numbers per token of the context that a layer's attention holds at most while it computes.
    """

    def __init__(self, config: Any, rows: Rows, at_peak: int):
        self.config, self.rows = config, rows
        self.num_hidden_layers = sum(rows.counts)
        types = zip([*config.layer_types, *["full_attention"] * rows.positions], rows.counts, strict=True)
        self.layer_types = [kind for kind, count in types for _ in range(count)]
        self.num_key_value_heads, self.head_dim = 1, rows.width // 2
        # transformers plans for keys and values that are repeated to this number of heads.
        self.num_attention_heads = -(-at_peak // rows.width)

    def get_text_config(self, *args: Any, **kwargs: Any) -> "PagedView":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


class ViewedModel:
    """A model with another configuration."""

    def __init__(self, model: nn.Module, config: PagedView):
        self.model, self.config = model, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def with_rows(manager: Any, rows: Rows, at_peak: int) -> Any:
    """Let a `ContinuousBatchingManager` make its cache of `rows`; `at_peak` as for `PagedView`."""
    if str(manager.model.config._attn_implementation).startswith("paged|flash"):
        manager.model.set_attn_implementation("paged|sdpa")  # 5.17 prefers flash, which there updates the cache itself
    create = manager._create_batch_processor  # which is called in the manager's own thread, or by its warm-up

    def create_batch_processor() -> Any:
        model = manager.model
        manager.model = ViewedModel(model, PagedView(model.config, rows, at_peak))
        try:
            return create()
        finally:
            manager.model = model

    manager._create_batch_processor = create_batch_processor
    return manager


def update_paged(
    layer_idx: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any], rounded: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Store the keys (1, G, T, D) and values (1, G, T, V) of new tokens in the cache in `kwargs`.

    Args:
        rounded: a `QuantizedLayer` that rounds them, and gets the bytes of all tokens as its own.

    Returns:
        Keys (1, G, S, D) and values (1, G, S, V) of all tokens, or their bytes, and the keyword arguments without the
        cache.
    """
    cache = kwargs["cache"]
    rows, dtype = rows_of(cache), key.dtype
    if rows is None:
        return update_row(cache, layer_idx, key, value, kwargs)
    if rounded is not None:
        key, value = rounded.pack(key, value)
    new = torch.cat([x.transpose(1, 2).flatten(2) for x in (key, value)], dim=-1)  # (1, T, n)
    held, rest = update_rows(cache, layer_idx, new, dtype, kwargs)
    sizes = [x.shape[1] * x.shape[3] for x in (key, value)]
    pair = held[..., : sum(sizes)].split(sizes, dim=-1)  # (1, S, G D), (1, S, G V)
    key, value = (
        x.unflatten(-1, (new.shape[1], -1)).transpose(1, 2) for x, new in zip(pair, (key, value), strict=True)
    )
    if rounded is not None:
        rounded.keys, rounded.values, rounded.is_initialized = key, value, True
    return key, value, rest


def update_rows(
    cache: Any, layer_idx: int, new: torch.Tensor, dtype: torch.dtype, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Store what a layer has of new tokens, (1, T, n), and return that of all, (1, S, n or more).

    What is not of the cache's `dtype`, such as bytes, is stored as it is.
    """
    rows, own = rows_of(cache), new.dtype
    missing = rows.counts[layer_idx] * rows.width * dtype.itemsize // own.itemsize - new.shape[-1]
    new = nn.functional.pad(new, (0, missing)) if missing else new.contiguous()
    halves: list[torch.Tensor] = []  # (1, 1, S, width / 2) each
    rest = kwargs
    for number, row in enumerate(new.view(dtype).unsqueeze(1).split(rows.width, dim=-1)):
        first, second = row.chunk(2, dim=-1)
        first, second, rest = update_row(cache, rows.first(layer_idx) + number, first, second, kwargs)
        halves += first, second
    return torch.cat(halves, dim=-1).squeeze(1).view(own), rest


class PagedPositions:
    """The positions of all tokens in a paged cache that has a row for them.

    Args:
        dtype: of the cache.
        kwargs: the keyword arguments of the model's forward.
    """

    def __init__(self, dtype: torch.dtype, kwargs: dict[str, Any]):
        self.dtype, self.kwargs, self.rows = dtype, kwargs, rows_of(kwargs["cache"])

    def hold(self, position_ids: torch.Tensor, rows: int) -> HeldTokens:
        """Add the positions (1, T) of tokens that the layers are about to hold."""
        new = position_ids.int().unsqueeze(-1)  # (1, T, 1)
        last = len(self.rows.counts) - 1
        held, _ = update_rows(self.kwargs["cache"], last, new, self.dtype, self.kwargs)
        self.held_positions = held[..., 0]  # (1, S)
        return HeldTokens(formats=self.rows.formats)


def update_row(
    cache: Any, index: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Update one of the layers that `cache` has; arguments and results as for `update_paged`."""
    rest = {name: x for name, x in kwargs.items() if name != "cache"}
    if not indexed_by_group():
        return *cache.update(key, value, index, rest), rest
    held = cache.update(key, value, index, kwargs["read_index"], kwargs["write_index"])  # (S, G, size) each
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in held)
    return key, value, rest


def batching_options(given: Any, generation_config: Any) -> Any:
    """Return the `ContinuousBatchingConfig` to use: nothing but the layers reads a cache of rows.

    Args:
        given: what the caller gave, if anything; it is not changed.
        generation_config: may hold one as well.
    """
    from transformers import ContinuousBatchingConfig

    given = given or getattr(generation_config, "continuous_batching_config", None)
    options = copy(given) if given else ContinuousBatchingConfig()
    options.max_blocks_per_request = 0
    if hasattr(options, "auto_switch_to_flash"):
        options.auto_switch_to_flash = False
    return options
