"""A decoder whose layers attend by MHA, MQA, GQA or MLA: the base model, the language model and three more heads.

Shapes: B batch, T tokens given, S cached and new tokens, P rotary size of a layer's heads.
"""

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .attention import Attention, GroupedAttention
from .attention_latent import LatentAttention
from .cache_formats import CACHE_BUFFERS
from .cache_layers import PADDING, GrowingLayer, PositionedCache, grow_in_place, rows_of
from .cache_quantized import GQAQuantizedCache, rounds_cache
from .compatibility import CACHE, attempt, can_return_tuple, optional
from .configuration_checks import changing_rope
from .configuration_gqa import GQAConfig
from .integrations import (
    PagedPositions,
    batching_options,
    divide_over_ranks,
    offer_name,
    offer_to_peft,
    paged_rows,
    parallel_styles,
    with_rows,
)
from .layers import (
    GQAMLP,
    ChunkedLossOutput,
    GQAHeadLinear,
    GQAKeyMean,
    GQARotaryEmbedding,
    GQAScaledEmbedding,
    GQAZeroCenteredRMSNorm,
    can_chunk_loss,
    chunked_causal_lm_loss,
    frequency_indices,
    multiplier,
    plane_angles,
    query_factors,
    refuse_without_tokens,
    rms_norm,
)
from .masks import causal_documents, flash_documents, model_masks

# The class that computes each attention kind; `attention.py` says how to add one.
ATTENTION_CLASSES: dict[str, type[Attention]] = {
    "mha": GroupedAttention,
    "mqa": GroupedAttention,
    "gqa": GroupedAttention,
    "mla": LatentAttention,
}

GradientCheckpointingLayer: Any = optional(
    "transformers.modeling_layers", "GradientCheckpointingLayer", nn.Module, "gradients are not checkpointed"
)
merge_with_config_defaults = optional(
    "transformers.utils.generic", "merge_with_config_defaults", lambda forward: forward, "is_causal=False is not known"
)
capture_outputs = optional(
    "transformers.utils.output_capturing", "capture_outputs", can_return_tuple, "hidden states and weights are not kept"
)


class MissingHead:
    """In place of a head of transformers that this release does not have."""

    def forward(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"transformers no longer has the head from which {type(self).__name__} is made")


GenericForSequenceClassification: Any = optional(
    "transformers.modeling_layers",
    "GenericForSequenceClassification",
    MissingHead,
    "GQAForSequenceClassification cannot be used",
)
GenericForTokenClassification: Any = optional(
    "transformers.modeling_layers",
    "GenericForTokenClassification",
    MissingHead,
    "GQAForTokenClassification cannot be used",
)
GenericForQuestionAnswering: Any = optional(
    "transformers.modeling_layers", "GenericForQuestionAnswering", MissingHead, "GQAForQuestionAnswering cannot be used"
)


# Names of a layer's norms before and after the attention, then before and after the MLP, by `norm_position`: those of
# Llama, OLMo 2 and Gemma 3.
LAYER_NORMS = {
    "before": ("input_layernorm", "no_norm", "post_attention_layernorm", "no_norm"),
    "after": ("no_norm", "post_attention_layernorm", "no_norm", "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


class GQADecoderLayer(GradientCheckpointingLayer):
    """Attention of the layer's kind, then a gated MLP, each added to its input, with norms where `norm_position` says.

    `attention_input`, `attention_output` and `mlp_output` are the layer in steps, for tools that change its attention.
    """

    def __init__(self, config: GQAConfig, layer_idx: int):
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        self.self_attn = ATTENTION_CLASSES[layer.attention_kind](config, layer_idx)
        self.mlp = GQAMLP(layer)
        self.norm_names = LAYER_NORMS[config.norm_position]
        for name in self.norm_names:
            self.add_module(name, nn.Identity() if name == "no_norm" else rms_norm(config, config.hidden_size))
        self.residual_multiplier = multiplier(config.residual_multiplier)

    def attention_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the attention reads of the stream `hidden_states` (B, T, hidden)."""
        return getattr(self, self.norm_names[0])(hidden_states)

    def attention_output(self, attended: torch.Tensor) -> torch.Tensor:
        """What is added to the stream for the output `attended` (B, T, hidden) of the attention."""
        return self.residual_multiplier(getattr(self, self.norm_names[1])(attended))

    def mlp_output(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the stream `hidden_states` (B, T, hidden), which is behind the attention."""
        before, after = self.norm_names[2:]
        return self.residual_multiplier(getattr(self, after)(self.mlp(getattr(self, before)(hidden_states))))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.attention_input(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = hidden_states + self.attention_output(attended)
        return hidden_states + self.mlp_output(hidden_states)


class GQAPreTrainedModel(PreTrainedModel):
    """Base class of the models: what transformers needs to know of the architecture.

    Args:
        config: the configuration; it is validated again, because attribute writes skip its checks.

    Raises:
        StrictDataclassError: the configuration cannot work.

    Example:
        ```python
        from modeling_gqa import GQAConfig, GQAForCausalLM, GQAPreTrainedModel

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        assert isinstance(GQAForCausalLM(config), GQAPreTrainedModel)
        ```
    """

    config: GQAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = GradientCheckpointingLayer is not nn.Module
    _no_split_modules = ["GQADecoderLayer"]
    # What a quantized cache uses, where the configuration that is given asks for none.
    _keys_to_ignore_on_load_unexpected = [rf"\.self_attn\.({'|'.join(CACHE_BUFFERS)})$"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": GQADecoderLayer, "attentions": Attention}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # FSDP2 derives a class of its own from a sharded model's; transformers saves the code of a class's module.
        if cls.__module__.startswith("torch."):
            cls.__module__ = __name__

    def __init__(self, config: GQAConfig, *args, **kwargs):
        # Attribute writes since the configuration was built have skipped its checks.
        config.validate()
        attempt("PEFT asks for target_modules", offer_to_peft, config.model_type)
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        # Buffers that are not in the checkpoint are uninitialised memory when a checkpoint has been loaded.
        if isinstance(module, Attention) and module.frequency_indices is not None:
            indices = frequency_indices(self.config.per_layer_config[module.layer_idx])
            module.frequency_indices.copy_(indices)
        if isinstance(module, Attention):
            for name, buffer in module.named_buffers(recurse=False):
                if name in CACHE_BUFFERS and not getattr(buffer, "_is_hf_initialized", False):
                    # A mean of zero, and bases that change nothing.
                    buffer.copy_(torch.eye(buffer.shape[-1]) if buffer.ndim == 3 else torch.zeros(1))
        # transformers guards these: a weight that has been loaded stays as it is.
        if isinstance(module, GQAKeyMean):
            nn.init.zeros_(module.bias)
        if isinstance(module, GQAHeadLinear):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, GQAZeroCenteredRMSNorm):
            nn.init.zeros_(module.weight)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh: Any) -> nn.Module:
        """Divide the model as transformers does, but attention layer by layer, which a plan of names cannot."""
        if mesh is not None:
            parallel_styles()  # known to transformers from now on
        plan, ranks = model._tp_plan, getattr(distributed_config, "tp_size", 1) or 1
        if mesh is None or ranks == 1 or isinstance(distributed_config.tp_plan, dict):
            return super().maybe_distribute_model(model, distributed_config, mesh)
        # transformers 5.23 has a class of its own for meshes; in 5.17 a mesh of one dimension has no name.
        of_ranks = mesh.get_mesh("tp") if hasattr(mesh, "get_mesh") else mesh["tp"] if mesh.ndim > 1 else mesh
        for module in model.modules():
            if isinstance(module, Attention):
                divide_over_ranks(module, of_ranks)
        model._tp_plan = {name: rule for name, rule in plan.items() if "self_attn" not in name}
        model = super().maybe_distribute_model(model, distributed_config, mesh)
        model._tp_plan = plan
        return model


class GQAModel(GQAPreTrainedModel):
    """Token embedding, decoder layers and final norm; returns hidden states.

    Args:
        config: the configuration; layers differ where its `per_layer_config` says so.

    Raises:
        StrictDataclassError: the configuration cannot work.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAModel

        config = GQAConfig(attention_kind="mla", hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        hidden_states = GQAModel(config)(torch.tensor([[1, 5, 7]])).last_hidden_state  # (1, 3, 64)
        ```
    """

    def __init__(self, config: GQAConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        embedding = GQAScaledEmbedding if config.scale_embeddings else nn.Embedding
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.embedding_multiplier = multiplier(config.embedding_multiplier)
        self.layers = nn.ModuleList(GQADecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = rms_norm(config, config.hidden_size)
        # Here and not behind `lm_head`, which engines and measurements call by themselves.
        self.logits_scaling = multiplier(1 / config.logits_scaling)
        # Kinds rotate heads of different sizes, so there is one embedding per size; layers choose from its frequencies.
        # Layers with a window may have their own.
        own = "_sliding" if config.sliding_rope_parameters is not None else ""
        self.rotary_sizes = [
            f"{layer.rotary_dim}{own if kind == 'sliding_attention' else ''}"
            for layer, kind in zip(config.per_layer_config, config.layer_types, strict=False)
        ]
        self.rotary_emb = nn.ModuleDict(
            {size: GQARotaryEmbedding(config, index) for index, size in enumerate(self.rotary_sizes)}
        )
        self.gradient_checkpointing = False
        self.post_init()
        plans: list[Any] = [layer.get_submodule("self_attn").tp_plan for layer in self.layers]
        # A rule is meant for the modules of that name in all layers.
        if all(plan == plans[0] for plan in plans):
            self._tp_plan.update({f"layers.*.self_attn.{name}": rule for name, rule in plans[0].items()})

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of a batch of tokens.

        Args:
            input_ids: token ids (B, T), or `inputs_embeds` (B, T, hidden) in their place.
            attention_mask: padding mask (B, S), 1 for tokens to attend to; or a finished mask (B, 1, T, S).
            position_ids: (B, T); without a cache, documents packed into a row begin where they restart.
            past_key_values: cache of earlier tokens; with `use_cache` one is made where it is `None`.

        Returns:
            Last hidden states (B, T, hidden) as `lm_head` takes them and the cache; where they are asked for all hidden
            states, and the weights.
        """
        if isinstance(kwargs.get("cache"), Cache):  # its name since transformers 5.24
            past_key_values = kwargs.pop("cache")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            refuse_without_tokens("input_ids", input_ids, self.config.bos_token_id)
            inputs_embeds = self.embed_tokens(input_ids)
        else:
            refuse_without_tokens("inputs_embeds", inputs_embeds, self.config.bos_token_id)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        made = self.new_cache() if use_cache and past_key_values is None else None
        paged = getattr(rows_of(kwargs.get("cache")), "positions", False)
        held = PagedPositions(inputs_embeds.dtype, kwargs) if paged else made
        # With the cache that was given: transformers looks for packed documents only where there is none.
        arguments = self.layer_arguments(inputs_embeds, attention_mask, position_ids, past_key_values, held)
        kwargs = flash_documents(self.config, inputs_embeds, attention_mask, past_key_values, position_ids) | kwargs
        past_key_values = past_key_values if made is None else made
        hidden_states = self.embedding_multiplier(inputs_embeds)
        for layer, own in zip(self.layers, arguments, strict=False):  # early exit runs fewer than all layers
            hidden_states = layer(hidden_states, past_key_values=past_key_values, use_cache=use_cache, **own, **kwargs)
        hidden_states = self.logits_scaling(self.norm(hidden_states))
        outputs: dict[str, Any] = {"last_hidden_state": hidden_states, CACHE: past_key_values}
        return BaseModelOutputWithPast(**outputs)

    def new_cache(self) -> DynamicCache:
        """The cache of a forward without one; where gradients are computed or a graph is exported it is not rounded."""
        if rounds_cache(self.config) and not torch.is_grad_enabled() and not torch.compiler.is_exporting():
            return GQAQuantizedCache(self.config)
        return self.growing(DynamicCache(config=self.config))

    def growing(self, cache: DynamicCache) -> DynamicCache:
        """Let a new, empty `cache` grow in place, and know positions where a key of all tokens asks for them."""
        positioned = self.keeps_key_mean and not torch.compiler.is_compiling()  # a trace keeps angles in the cache
        return PositionedCache(config=self.config, offloading=cache.offloading) if positioned else grow_in_place(cache)

    @property
    def keeps_key_mean(self) -> bool:
        """Whether a layer has a key that all tokens share."""
        return any(getattr(layer.get_submodule("self_attn"), "key_mean", None) is not None for layer in self.layers)

    def layer_arguments(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        made: Any = None,
    ) -> list[dict[str, Any]]:
        """Keyword arguments of each layer beside the states: its mask, its documents, what positions do to its heads.

        Arguments as in `forward`, and `made`, the new cache where none was given, or the positions in a paged one; only
        the shape, dtype and device of `inputs_embeds` are used.
        """
        restarts = position_ids
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past
            position_ids = position_ids.unsqueeze(0)  # (1, T)
        given = self.config, inputs_embeds, attention_mask, past_key_values, restarts
        masks, documents = model_masks(*given), causal_documents(*given)
        rotaries: dict[str, Any] = dict(self.rotary_emb.items())
        rotations = {size: rotary(inputs_embeds, position_ids) for size, rotary in rotaries.items()}
        factors = {
            size: query_factors(rotary.config.rope_parameters, position_ids, inputs_embeds.dtype)
            for size, rotary in rotaries.items()
        }
        kinds = zip(self.config.layer_types, self.rotary_sizes, strict=True)
        arguments = [
            {
                "attention_mask": masks[kind],
                "position_ids": position_ids,
                "position_embeddings": rotations[size],
                "query_factors": factors[size],
            }
            | ({} if documents[kind] is None else {"documents": documents[kind]})
            for kind, size in islice(kinds, self.config.num_hidden_layers)
        ]
        cache = made if past_key_values is None else past_key_values
        if isinstance(cache, PositionedCache | PagedPositions):
            if restarts is None and torch.is_tensor(attention_mask) and attention_mask.ndim == 2:
                attended = attention_mask[:, past : past + inputs_embeds.shape[1]]  # (B, T)
                position_ids = torch.where(attended.to(position_ids.device) > 0, position_ids, PADDING)
            self._add_held_tokens(arguments, cache, inputs_embeds, position_ids)
        return arguments

    def _add_held_tokens(
        self, arguments: list[dict], cache: Any, inputs_embeds: torch.Tensor, position_ids: torch.Tensor
    ) -> None:
        """Tell each layer where the tokens of the cache stand, those of `position_ids` (1 or B, T) included."""
        held = cache.hold(position_ids, inputs_embeds.shape[0])
        attentions: list[Any] = [layer.get_submodule("self_attn") for layer in self.layers]
        rotated = {}
        if changing_rope(self.config) is None and (
            self.keeps_key_mean or any(x.constants()[0] is not None for x in attentions)
        ):
            for size, rotary in self.rotary_emb.items():
                rotation = rotary(inputs_embeds, cache.held_positions)
                angles = plane_angles(*rotation) if self.keeps_key_mean else None
                rotated[size] = replace(held, position_embeddings=rotation, angles=angles)
        for own, size, kind in zip(arguments, self.rotary_sizes, self.config.layer_types, strict=False):
            if isinstance(cache, PositionedCache) or kind == "full_attention":  # a paged one has other tokens in others
                own["held_tokens"] = rotated.get(size, held)


class GQAForCausalLM(GQAPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head.

    A training step whose logits would be more than `logits_at_once` numbers computes its loss in chunks of tokens. At
    most `logits_at_once` logits exist at a time, and none are returned. Call the model with `output_logits=True`, or
    set `model.logits_at_once = None`, to get the logits of every step.

    Args:
        config: the configuration.

    Raises:
        StrictDataclassError: the configuration cannot work.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAForCausalLM

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = GQAForCausalLM(config)
        ids = torch.tensor([[1, 5, 7]])
        loss = model(ids, labels=ids).loss
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)  # (1, 7), or fewer where the text ends
        ```
    """

    logits_at_once: int | None = 2**25

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: GQAConfig):
        super().__init__(config)
        self.model = GQAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position; arguments of `GQAModel.forward`, and:

        Args:
            labels: (B, T) token ids, -100 where there is no loss; shifted here, so usually `input_ids` themselves.
            logits_to_keep: number of last positions whose logits are computed, 0 for all; or the positions, (n,).
            output_logits: return logits from large training steps too; see the class.

        Returns:
            Loss (mean over predicted tokens, or sum divided by `num_items_in_batch`), logits (B, n, vocabulary) and
            the model's outputs.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,  # whatever the configuration says; the decorator makes the tuple
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        logits = loss = None
        output_class = CausalLMOutputWithPast
        if labels is not None and not output_logits and self._chunks_loss(hidden_states):
            output_class = ChunkedLossOutput
            loss = chunked_causal_lm_loss(hidden_states, self.lm_head.weight, labels, self.logits_at_once, **kwargs)
        else:
            logits = self.lm_head(hidden_states)
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return output_class(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _chunks_loss(self, hidden_states: torch.Tensor) -> bool:
        tokens = hidden_states.shape[:-1].numel()
        large = self.logits_at_once is not None and tokens * self.vocab_size > self.logits_at_once
        return self.training and large and can_chunk_loss(self.lm_head, hidden_states, self.loss_function)

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **kwargs):
        """Prepare what transformers does, and the whole text anew where `longrope` goes from short to long frequencies.

        The cache holds keys of the short ones. transformers' Phi-3 computes them anew as well.

        Raises:
            ValueError: the text gets long, and `input_ids` are not all of it.
        """
        cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
        held = int(cache.get_seq_length()) if isinstance(cache, Cache) and self._longrope_lengths() else 0
        tokens = held + (kwargs.get("next_sequence_length") or input_ids.shape[1])
        if held and self._grows_long(held, tokens, mask):
            if input_ids.shape[1] < tokens:
                raise ValueError(
                    f"of {tokens} tokens input_ids are {input_ids.shape[1]}, and the cache has the others: beyond "
                    "original_max_position_embeddings rope_type='longrope' has other frequencies, so the cache is of "
                    "no more use. Give all tokens as input_ids, without prefill_chunk_size"
                )
            if all(isinstance(layer, GrowingLayer) for layer in cache.layers):
                cache.reset()
            else:
                kwargs[CACHE] = None  # the forward makes one
            kwargs["next_sequence_length"] = None
        return super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    def _grows_long(self, held: int, tokens: int, attention_mask: torch.Tensor | None) -> bool:
        """Whether `longrope` has its short frequencies for the first `held` of `tokens`, and its long ones for all."""
        shorts = self._longrope_lengths()
        if tokens <= min(shorts):
            return False
        if attention_mask is not None and attention_mask.ndim == 2:  # padding has no position
            held, tokens = (int(attention_mask[:, :length].sum(-1).max()) for length in (held, tokens))
        return any(held <= short < tokens for short in shorts)

    def _longrope_lengths(self) -> list[int]:
        """Tokens of the longest texts that `longrope` has its short frequencies for, where the model has it."""
        ropes = [rope for rope in (self.config.rope_parameters, self.config.sliding_rope_parameters) if rope]
        return [rope["original_max_position_embeddings"] for rope in ropes if rope["rope_type"] == "longrope"]

    def _prepare_model_inputs(self, *args, **kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        refuse_without_tokens(name, inputs, self.config.bos_token_id)
        return inputs, name, model_kwargs

    def _validate_model_kwargs(self, model_kwargs):
        # In 5.24 the cache is looked for in the signature of `prepare_inputs_for_generation`, which is ours.
        super()._validate_model_kwargs({name: x for name, x in model_kwargs.items() if name != CACHE})

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        given = model_kwargs.get(CACHE)
        asked, options = generation_config.cache_implementation, dict(generation_config.cache_config or {})
        configured = rounds_cache(self.config)
        rounded = asked == "quantized" or (asked is None and configured)
        own = rounded and given is None and options.pop("backend", "gqa") == "gqa"
        if own:
            generation_config.cache_implementation = None
        elif asked == "quantized" and any(layer.qk_rope_head_dim == 0 for layer in self.config.per_layer_config):
            raise ValueError(
                "transformers' own quantized caches hold no MLA layer without a rotary key (qk_rope_head_dim=0): leave "
                "'backend' out of cache_config"
            )
        try:
            result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        finally:
            generation_config.cache_implementation = asked
        made = model_kwargs.get(CACHE)
        if made is not given and type(made) is DynamicCache:
            if own or (configured and asked != "dynamic"):
                chosen = options if own and (options or not configured) else None
                new = GQAQuantizedCache(self.config, chosen, offloading=made.offloading)
            else:
                new = self.model.growing(made)
            if new is not made and generation_config.is_assistant:
                new.activate_past_recording()
            model_kwargs[CACHE] = new
        return result

    def _get_static_cache_init_shape(self):
        # transformers 5.17 asks the model's configuration for sizes that differ by layer in a mixed model; without a
        # shape the cache takes its own from the first keys and values.
        return super()._get_static_cache_init_shape() if self._caches_equal_heads else None

    @property
    def _caches_equal_heads(self) -> bool:
        """Whether all layers cache keys and values of the heads and the size that the configuration names."""
        layer = self.config.per_layer_config[0]
        shapes = ATTENTION_CLASSES[layer.attention_kind].cache_shapes(layer)
        return shapes == ((layer.num_key_value_heads, layer.head_dim),) * 2 and not self.config.is_heterogeneous

    def init_continuous_batching(self, generation_config=None, continuous_batching_config=None, **kwargs):
        """Return transformers' manager of continuous batching; its paged cache takes what the layers store.

        Arguments as for transformers' method of this name. `generate_batch` and the context manager end here too.
        """
        if changing := changing_rope(self.config):
            raise ValueError(
                f"continuous batching computes requests together, and rope_type={changing!r} has other frequencies for "
                "long texts than for short ones: use generate"
            )
        manager = getattr(self, "_cached_continuous_batching_manager", None)
        if manager is not None or (self._caches_equal_heads and not rounds_cache(self.config)):
            return super().init_continuous_batching(generation_config, continuous_batching_config, **kwargs)
        options = batching_options(continuous_batching_config, generation_config)
        manager = super().init_continuous_batching(generation_config, options, **kwargs)
        layers = self.config.per_layer_config
        at_peak = max(2 * layer.num_attention_heads * (layer.qk_head_dim or layer.head_dim) for layer in layers)
        return with_rows(manager, paged_rows(self.config, self.dtype), at_peak)


# transformers' generic heads build their base model through AutoModel, which asks for trust in remote code.


class GQAForSequenceClassification(GenericForSequenceClassification, GQAPreTrainedModel):
    """The decoder with a linear classifier on each row's last token.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAForSequenceClassification

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
        logits = GQAForSequenceClassification(config)(torch.tensor([[1, 5, 7]])).logits  # (1, 3)
        ```
    """

    def __init__(self, config: GQAConfig):
        GQAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GQAModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class GQAForTokenClassification(GenericForTokenClassification, GQAPreTrainedModel):
    """The decoder with a linear classifier on every token.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAForTokenClassification

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
        logits = GQAForTokenClassification(config)(torch.tensor([[1, 5, 7]])).logits  # (1, 3, 3)
        ```
    """

    def __init__(self, config: GQAConfig):
        GQAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GQAModel(config)
        dropout = getattr(config, "classifier_dropout", None)  # transformers' name
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class GQAForQuestionAnswering(GenericForQuestionAnswering, GQAPreTrainedModel):
    """The decoder with start and end scores of an answer span on every token.

    Example:
        ```python
        import torch
        from modeling_gqa import GQAConfig, GQAForQuestionAnswering

        config = GQAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        outputs = GQAForQuestionAnswering(config)(torch.tensor([[1, 5, 7]]))
        spans = outputs.start_logits, outputs.end_logits  # (1, 3) each
        ```
    """

    def __init__(self, config: GQAConfig):
        GQAPreTrainedModel.__init__(self, config)
        self.model = GQAModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


AUTO_CLASSES = {
    "AutoModel": GQAModel,
    "AutoModelForCausalLM": GQAForCausalLM,
    "AutoModelForSequenceClassification": GQAForSequenceClassification,
    "AutoModelForTokenClassification": GQAForTokenClassification,
    "AutoModelForQuestionAnswering": GQAForQuestionAnswering,
}
for _auto_class, _model_class in AUTO_CLASSES.items():
    attempt("a saved model brings no code", _model_class.register_for_auto_class, _auto_class)
    _lost = f"pipelines and label smoothing do not know {_model_class.__name__}"
    attempt(_lost, offer_name, GQAConfig.model_type, _auto_class, _model_class)
