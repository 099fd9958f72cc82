"""The model on vLLM's transformers backend: vLLM's attention for each layer, and the division over ranks."""

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    vllm_attention_forward,
    vllm_mla_attention_forward,
)
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from modeling_gqa import GQAConfig
from modeling_gqa.attention_latent import PLUGIN, LatentAttention
from modeling_gqa.cache_formats import CACHE_BUFFERS
from modeling_gqa.configuration_checks import CHANGING
from modeling_gqa.integrations import refuse_uneven
from modeling_gqa.layers import GQAHeadLinear, GQAKeyMean

from .cpu import FP8, LatentCPUBackend
from .kernels import NO_ROTARY_KEY, PROMPT_SIZES, reads_prompts, stored

# Of MLA; what is not named is the same on each rank.
LATENT_STYLES = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
GROUPED_STYLES = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


def attention_forward(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    """Attend by the layer `module.attn`; arguments as transformers gives them.

    Of MLA `key` (B, 1, T, R) is the latent and `value` (B, 1, T, P) the rotary key.
    """
    if not isinstance(module.attn, MLAAttention):
        return vllm_attention_forward(module, query, key, value, *args, **kwargs)
    if not value.shape[-1]:
        query, value = (nn.functional.pad(x, (0, NO_ROTARY_KEY)) for x in (query, value))
    return vllm_mla_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(PLUGIN, attention_forward)


def take_any_shape(quant_method: Any) -> None:
    """Give a layer's quantized product tokens in one row each: vLLM's int8 kernel for AMX takes (tokens, features)."""
    product = quant_method.apply

    def apply(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(layer, x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])  # x (1, T, features)

    quant_method.apply = apply


class KeyValueLinear(ReplicatedLinear):
    """Projection to the key/value heads of a rank where there are fewer heads than ranks, so that some share one.

    Args:
        linear: the projection to all heads.
        size: D, numbers of a head.
        rank, ranks: this rank and their number, a multiple of the number of heads.
    """

    def __init__(self, linear: nn.Linear, size: int, rank: int, ranks: int, **options):
        self.head = rank * (linear.out_features // size) // ranks
        super().__init__(linear.in_features, size, bias=linear.bias is not None, return_bias=False, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Load the rank's head of `loaded_weight`, which has all."""
        size = self.output_size
        super().weight_loader(param, loaded_weight.narrow(0, self.head * size, size))


class GQAForCausalLM(TransformersForCausalLM):
    """The language model as vLLM serves it.

    Raises:
        ValueError: the query heads of a layer, or its key/value heads, do not divide over the ranks, or a norm is over
            all heads and there are several ranks.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all but what belongs to a quantized cache, which vLLM's cache does not use."""
        return super().load_weights((name, x) for name, x in weights if name.split(".")[-1] not in CACHE_BUFFERS)

    def recursive_replace(self):
        """Replace the projections of attention by vLLM's, divided by heads, and let vLLM replace the rest."""
        self._refuse_changing_rope()
        if not self.pp_group.is_first_rank:  # vLLM keeps what is before the layers where embeddings are tied
            self.model.embedding_multiplier = nn.Identity()
        for index, layer in enumerate(self.model.layers):
            if not isinstance(layer, PPMissingLayer):
                sizes = self.config.per_layer_config[index]
                shared = layer.self_attn.shared_heads
                if sizes.norms_all_heads and self.tp_group.world_size > 1:
                    raise ValueError(
                        f"layer {index} has qk_norm_span='all_heads', a norm over all heads, of which each of the "
                        f"{self.tp_group.world_size} ranks has some: serve it with tensor_parallel_size=1"
                    )
                refuse_uneven(index, sizes.num_attention_heads, shared, self.tp_group.world_size)
                self._divide(layer.self_attn, sizes, f"model.layers.{index}.self_attn")
        super().recursive_replace()
        if current_platform.is_cpu():
            for module in self.model.modules():
                if isinstance(module, LinearBase) and not isinstance(module.quant_method, UnquantizedLinearMethod):
                    take_any_shape(module.quant_method)
        if self.vllm_config.lora_config is not None:
            # Attention over the latent reads this projection's weight, so an adapter of it would do nothing: vLLM
            # refuses adapters of modules that it takes for a fusion of none.
            self.packed_modules_mapping["kv_b_proj"] = []

    def _refuse_changing_rope(self) -> None:
        """Raise `ValueError` where requests could be so long that the frequencies of those beside them change."""
        config, longest = self.config, self.vllm_config.model_config.max_model_len
        for rope in (config.rope_parameters, config.sliding_rope_parameters):
            if rope and (kind := rope["rope_type"]) in CHANGING:
                dynamic = kind == "dynamic"
                most = config.max_position_embeddings if dynamic else rope["original_max_position_embeddings"]
                if longest > most:
                    raise ValueError(
                        f"vLLM computes requests together, and rope_type={kind!r} has other frequencies for texts of "
                        f"more than {most} tokens: serve it with max_model_len={most} at most, and not {longest}"
                    )

    def _divide(self, attention: nn.Module, sizes: GQAConfig, prefix: str) -> None:
        latent = isinstance(attention, LatentAttention)
        ranks, heads = self.tp_group.world_size, sizes.num_key_value_heads
        for name, linear in list(attention.named_children()):
            where = maybe_prefix(prefix, name)
            if isinstance(linear, (GQAHeadLinear, GQAKeyMean)):
                for key, whole in list(linear.named_parameters()):
                    rows, *columns = whole.shape
                    part = nn.Parameter(torch.empty(rows // ranks, *columns, device=self.device_config.device))
                    set_weight_attrs(part, {"weight_loader": sharded_weight_loader(0)})
                    setattr(linear, key, part)
            elif isinstance(linear, nn.Linear):
                if not latent and name in ("k_proj", "v_proj") and heads < ranks:
                    rank = get_tensor_model_parallel_rank()
                    new = KeyValueLinear(
                        linear, sizes.head_dim, rank, ranks, quant_config=self.quant_config, prefix=where
                    )
                else:
                    style = (LATENT_STYLES if latent else GROUPED_STYLES).get(name, "replicate")
                    new = replace_linear_class(linear, style, self.quant_config, prefix=where)
                setattr(attention, name, new)

    def _create_attention_instances(self, prefix: str = ""):
        """Give each layer of this rank one of vLLM's attention layers, which says what it caches."""
        self.text_config._attn_implementation = PLUGIN
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer, PPMissingLayer):
                continue
            attention: Any = layer.self_attn
            sizes, window = self.config.per_layer_config[index], attention.sliding_window
            options = {
                "num_heads": sizes.num_attention_heads // self.tp_group.world_size,
                "scale": attention.scaling,
                "cache_config": self.cache_config,
                "quant_config": self.quant_config,
                "prefix": maybe_prefix(prefix, f"model.layers.{index}.self_attn.attn"),
            }
            if isinstance(attention, LatentAttention):
                attention.attn = latent_attention(attention, stored(sizes), window, index, **options)
                # vLLM takes the latent in place of keys and the rotary key in place of values.
                layer.self_attn.expand_kv = lambda latent, key_rope: (latent, key_rope)
            else:
                attention.attn = Attention(
                    head_size=sizes.head_dim,
                    num_kv_heads=max(1, sizes.num_key_value_heads // self.tp_group.world_size),
                    per_layer_sliding_window=window,
                    **options,
                )


def latent_attention(attention: Any, sizes: GQAConfig, window: int | None, index: int, **options) -> MLAAttention:
    """Return vLLM's attention over the latent for a layer, whose `sizes` are as `stored` returns them.

    Raises:
        ValueError: the layer has a sliding window, which only the CPU's backend has; or there a quantized `kv_b_proj`,
            or a cache in another dtype than the model's or float8_e4m3fn.
    """
    on_cpu, up_projection, config = current_platform.is_cpu(), attention.kv_b_proj, get_current_vllm_config()
    if window is not None and not on_cpu:
        raise ValueError(
            f"layer {index} is MLA with a sliding window, for which vLLM has no kernel on this device: serve the model "
            "by transformers (modeling-gqa serve)"
        )
    if on_cpu:
        cached, dtype = config.cache_config.cache_dtype, config.model_config.dtype
        if cached not in FP8 and kv_cache_dtype_str_to_dtype(cached, config.model_config) != dtype:
            raise ValueError(
                f"kv_cache_dtype={cached!r}: attention over the latent on a CPU reads a cache of the model's dtype, "
                f"{dtype}, or 'fp8', and no other"
            )
    if on_cpu and not isinstance(up_projection.quant_method, UnquantizedLinearMethod):
        raise ValueError(
            "attention over the latent reads the weight of kv_b_proj, which vLLM does not give back once it is "
            "quantized for a CPU: quantize the checkpoint without it "
            "(llm-compressor: ignore=['lm_head', 're:.*kv_b_proj'])"
        )
    up_projection.return_bias = True  # as MLAAttention calls it
    heads = (sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim)
    prompts = None  # vLLM chooses
    if current_platform.is_cuda() and heads not in PROMPT_SIZES and reads_prompts(*heads):
        from .prompts import PaddedFlashAttention  # which takes a GPU's build

        prompts = PaddedFlashAttention
    with set_current_vllm_config(of_layer(config, sizes)):
        return MLAAttention(
            qk_nope_head_dim=sizes.qk_nope_head_dim,
            qk_rope_head_dim=sizes.qk_rope_head_dim,
            v_head_dim=sizes.v_head_dim,
            q_lora_rank=sizes.q_lora_rank,
            kv_lora_rank=sizes.kv_lora_rank,
            kv_b_proj=up_projection,
            sliding_window=window,
            attn_backend=LatentCPUBackend if on_cpu else None,
            prefill_backend_cls=prompts,
            **options,
        )


def of_layer(config: VllmConfig, sizes: GQAConfig) -> VllmConfig:
    """Return `config` with a layer's sizes in place of the model's, of which vLLM's layer chooses its kernels."""
    config = copy(config)
    config.model_config = copy(config.model_config)
    config.model_config.hf_text_config = sizes
    return config
