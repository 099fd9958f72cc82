"""Configuration of a decoder language model whose attention is MHA, MQA, GQA or MLA, layer by layer."""

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from .compatibility import attempt, warn_of_other_releases

warn_of_other_releases()  # before the imports that an old one lacks

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .cache_formats import CacheQuantization
from .configuration_checks import (
    CHOICES,
    GEMMA,
    MULTIPLIERS,
    NORMED_FIELDS,
    QUERY_SCALING,
    check_frequencies,
    check_grouped,
    check_latent,
    check_layer_sizes,
    check_rope,
    check_rotary,
    check_sliding_rope,
    check_token_ids,
    check_value,
    shown,
    suggestion,
)
from .configuration_overrides import (
    CONVERSION_FIELDS,
    FOLDED_KEYWORDS,
    ROPE_KEYWORDS,
    SIZE_FIELDS,
    check_overrides,
    derived_anew,
    layer_type,
    merged_rope,
    overridden,
)

# 2: softmax_scale, rope_frequency_indices, rope_frequency_dim. 3: MLA with qk_norm. 4: multipliers, norm_position,
# qk_norm_span, sliding_rope_parameters, zero_centered_norms, scale_embeddings, key_mean, layers without rotation, and
# llama_4_scaling_beta of rotary parameters.
# Earlier code would compute 3 and 4 wrongly or refuse them; others are written as version 2, which it reads.
FORMAT_VERSION = 4
# transformers' property of configurations by layer; without it only models whose layers are alike can be built.
BY_LAYER: Any = getattr(PreTrainedConfig, "per_layer_config", None)


@strict
class GQAConfig(PreTrainedConfig):
    r"""Configuration of a model whose layers attend by MHA, MQA, GQA or MLA; other fields are Llama's.

    Args:
        attention_kind (`str`, defaults to `"gqa"`):
            `"mha"` (one key/value head per query head), `"mqa"` (one in all), `"gqa"` (any divisor of the query heads;
            Ainslie et al., 2305.13245) or `"mla"` (keys and values rebuilt from a cached low-rank latent; DeepSeek-V2,
            2405.04434, section 2.1).
        num_key_value_heads (`int`, *optional*):
            Follows from the kind for MHA, MQA and MLA; for GQA a quarter of the query heads where left out.
        head_dim (`int`, *optional*):
            Head size d, `hidden_size / num_attention_heads` where left out. For MLA the size from which omitted latent
            sizes follow; it then becomes `qk_rope_head_dim`, as in DeepSeek's configuration.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim (`int`, *optional*):
            MLA: size of the latent (4 d), of the unrotated and rotated part of a key (d, d/2) and of a value (d). In a
            layer that rotates nothing the rotated part is 0.
        q_lora_rank (`int`, *optional*): MLA: rank of the query projection; `None` for a plain `q_proj`.
        qk_head_dim (`int`, *optional*): MLA: `qk_nope_head_dim + qk_rope_head_dim`; derived.
        rope_interleave (`bool`, *optional*): MLA: rotary pairs are neighbours (`True`) or half a head apart.
        latent_norm (`bool`, *optional*): MLA: RMSNorm on the latents (`True`); a converted model has none.
        attention_bias (`bool`, defaults to `False`):
            Bias of the query, key/value and output projections; `query_bias`, `key_value_bias` and `output_bias`
            set one apart. In MLA they belong to `q_proj` (or `q_a_proj`), `kv_a_proj_with_mqa` and `o_proj`, with
            `qk_norm` to `q_proj`, `k_proj` and `v_proj`, and `o_proj`.
        qk_norm (`bool`, defaults to `False`):
            RMSNorm on each head of queries and keys, as in Qwen3. In MLA the latent is then taken from normed keys and
            from values, without `latent_norm` and `q_lora_rank`; a conversion of Qwen3 makes such layers.
        qk_norm_span (`str`, defaults to `"head"`):
            What `qk_norm` takes the mean square over: one `"head"`, as Qwen3, or `"all_heads"` of the queries, and of
            the keys, as OLMo 2 (2501.00656).
        qk_norm_head_dim, qk_norm_key_value_heads (`int`, *optional*):
            MLA with `qk_norm`: size of the heads that are normed, and number of those of keys and values.
        softmax_scale (`float`, *optional*):
            Factor of the scores before the softmax; `head_dim ** -0.5` (MLA: `qk_head_dim ** -0.5`, times DeepSeek's
            YaRN correction) where left out. A converted model keeps its source's.
        rope_frequency_indices (`list[int]`, *optional*):
            Index of each rotary plane's frequency among those of a head of `rope_frequency_dim` dimensions; indices may
            repeat. MLA has P / 2 planes, other kinds at most d / 2; dimensions without a plane are not rotated. A layer
            with `[]` rotates nothing, as every fourth of SmolLM3 does (RNoPE; 2501.18795).
        key_mean (`bool`, defaults to `False`):
            MLA: adds the scores of a key that all tokens share before rotation, one for each head, of which nothing is
            cached. Conversions keep the mean key of the source in it. It needs N of at least `rope_frequency_dim`.
        embedding_multiplier, residual_multiplier (`float`, defaults to 1.0):
            Factor of the embeddings, also of `inputs_embeds`; and of what attention and MLP add to the residual stream.
            Granite's fields, for scales as in muP (2203.03466); its `attention_multiplier` is `softmax_scale` here.
        logits_scaling (`float`, defaults to 1.0):
            Divisor of the logits, as in Granite. The base model divides its last hidden states by it.
        norm_position (`str`, defaults to `"before"`):
            Where a layer has RMSNorms: `"before"` attention and MLP, as Llama, `"after"` them, on what they add to the
            stream, as OLMo 2 (2501.00656), or `"both"`, as Gemma 3 (2503.19786).
        zero_centered_norms (`bool`, defaults to `False`):
            RMSNorms multiply by 1 + weight, in at least float32, as in Gemma 3; their weights begin at zero.
        scale_embeddings (`bool`, defaults to `False`):
            Embeddings of tokens are multiplied by `hidden_size ** 0.5`, which is rounded to their dtype, as in Gemma 3.
            `inputs_embeds` are not.
        sliding_window (`int`, *optional*):
            Window in tokens of the layers that `layer_types` calls `"sliding_attention"`; all where it is left out.
        rope_parameters (`dict`, *optional*):
            `rope_type`, `rope_theta` and the type's own keys; `partial_rotary_factor` rotates part of each head.
            `llama_4_scaling_beta` multiplies the whole query of the token at position p by
            1 + beta ln(1 + floor(p / `original_max_position_embeddings`)), under every `rope_type`, as in Ministral 3.
        sliding_rope_parameters (`dict`, *optional*):
            `rope_parameters` of the layers that `layer_types` calls `"sliding_attention"`, where they have others than
            the rest, as in OLMo 3.
        cache_quantization (`dict`, *optional*):
            Lets `generate` round what it caches to a few bits: `{"nbits": 4}`, or `{}` for the defaults of
            `CacheQuantization` (`cache_formats.py`). The weights stay as they are.
        per_layer_config (`dict[int, dict]`, *optional*):
            What differs by layer: `{0: {"attention_kind": "mla", "kv_lora_rank": 128}}`. What follows is derived.
        format_version (`int`): version of these fields, stored so that old checkpoints keep loading.

    Raises:
        ValueError: a layer's sizes cannot be derived, or (as huggingface_hub's `StrictDataclassError`, with the
            `ValueError` as cause) a field's type, value or combination cannot work.

    Example:
        ```python
        from modeling_gqa import GQAConfig

        first = {"attention_kind": "mla", "kv_lora_rank": 128}
        config = GQAConfig(num_hidden_layers=4, attention_kind="gqa", per_layer_config={0: first})
        print([layer.attention_kind for layer in config.per_layer_config])  # ['mla', 'gqa', 'gqa', 'gqa']
        ```
    """

    model_type = "gqa"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    # The last is left by Ministral 3, whose class does not read it.
    ignore_keys_at_rope_validation = {"partial_rotary_factor", QUERY_SCALING, "max_position_embeddings"}
    # An absent key would mean "derive" before saving and "the global value" after loading.
    serialize_explicit_per_layer_config = True
    base_model_tp_plan: ClassVar = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "embedding_multiplier": (["inputs_embeds"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
        "logits_scaling": (["hidden_states"], ["hidden_states"]),
    }
    # The generated comparison reads per-layer attributes, which raises in a mixed model.
    __eq__ = PreTrainedConfig.__eq__

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    attention_kind: str = "gqa"
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_head_dim: int | None = None
    rope_interleave: bool | None = None
    latent_norm: bool | None = None
    attention_bias: bool = False
    query_bias: bool | None = None
    key_value_bias: bool | None = None
    output_bias: bool | None = None
    attention_dropout: float | int = 0.0
    qk_norm: bool = False
    qk_norm_head_dim: int | None = None
    qk_norm_key_value_heads: int | None = None
    qk_norm_span: str = "head"
    norm_position: str = "before"
    zero_centered_norms: bool = False
    softmax_scale: float | None = None
    rope_frequency_indices: list[int] | None = None
    rope_frequency_dim: int | None = None
    key_mean: bool = False
    scale_embeddings: bool = False
    embedding_multiplier: float | int = 1.0
    residual_multiplier: float | int = 1.0
    logits_scaling: float | int = 1.0
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    sliding_rope_parameters: dict | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    cache_quantization: dict | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    format_version: int = 2

    def __post_init__(self, **kwargs):
        self._refuse_misspelled(kwargs)
        for name, value in kwargs.items():
            check_value(name, value)
        if self.rope_parameters is not None:
            self.rope_parameters = copy.deepcopy(self.rope_parameters)  # transformers completes it in place
            self.rope_parameters = merged_rope(self.rope_parameters, kwargs)
        self.sliding_rope_parameters = copy.deepcopy(self.sliding_rope_parameters)
        if self.layer_types is None:
            self.layer_types = [layer_type(self.sliding_window)] * self.num_hidden_layers
        self.layer_types = list(self.layer_types)
        self._derive_sizes()
        self._raise_format_version(self.__dict__)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build from `config_dict`, where keywords that are fields replace entries before sizes are derived."""
        cls._refuse_misspelled(kwargs)
        if kwargs.get("dtype") == "auto":  # asks for the stored dtype
            del kwargs["dtype"]
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        overrides = {name: kwargs.pop(name) for name in (*own, *FOLDED_KEYWORDS) if name in kwargs}
        return super().from_dict(overridden(config_dict, overrides), **kwargs)

    def __setattr__(self, name: str, value: Any):
        """Set a field, or refuse a value that no configuration can have and a write that would change nothing."""
        written = self.__dict__  # looked up once, because transformers' lookup is slow
        spec = written.get("_heterogeneity_spec")
        if spec is not None and name in spec.per_layer_attributes:
            raise ValueError(
                f"{name}={shown(value)} would not reach all layers, because {name} differs by layer: assign "
                f"per_layer_config = {{layer index: {{{name!r}: value}}}} (None makes layers equal)"
            )
        if name in (*ROPE_KEYWORDS, "rope_scaling"):
            if (self.rope_parameters or {}).get(name) == value:
                return
            raise ValueError(f"{name}={shown(value)} would change nothing here: write it to rope_parameters instead")
        if not name.startswith("_") and name not in written:
            self._refuse_misspelled({name: value})
        check_value(name, value)
        super().__setattr__(name, value)
        self._raise_format_version({name: value})
        if name == "sliding_window" and len(set(written.get("layer_types") or ())) == 1:
            self.layer_types = [layer_type(value)] * len(self.layer_types)

    @property
    def per_layer_config(self) -> Sequence["GQALayerConfig"]:
        """Configuration of each layer, to be read; assign `{layer index: {field: value}}` to make layers differ."""
        return _Layers([self] * self.num_hidden_layers if BY_LAYER is None else BY_LAYER.fget(self))

    @per_layer_config.setter
    def per_layer_config(self, overrides: dict[int | str, dict[str, Any]] | None):
        if overrides is not None:
            check_overrides(overrides, self.num_hidden_layers)
            overrides = {index: self._resolve_layer(index, layer) for index, layer in overrides.items()}
            for layer in overrides.values():
                self._raise_format_version(layer)
        if BY_LAYER is not None:
            BY_LAYER.fset(self, overrides)
        elif overrides:
            raise ValueError(
                "per_layer_config makes layers differ, which this release of transformers cannot: install another"
            )

    @property
    def is_heterogeneous(self) -> bool:
        """Whether layers differ."""
        return BY_LAYER is not None and super().is_heterogeneous

    @property
    def rotary_dim(self) -> int:
        """Size of the head whose rotary frequencies a layer uses, before `partial_rotary_factor`."""
        return self.head_dim if self.rope_frequency_dim is None else self.rope_frequency_dim

    @property
    def norms_all_heads(self) -> bool:
        """Whether a layer norms all heads of its queries, and of its keys, at once."""
        return self.qk_norm and self.qk_norm_span == "all_heads"

    @property
    def projection_biases(self) -> tuple[bool, bool, bool]:
        """Whether the query, key/value and output projections of a layer have a bias."""
        single = (self.query_bias, self.key_value_bias, self.output_bias)
        query, key_value, output = (self.attention_bias if bias is None else bias for bias in single)
        return query, key_value, output

    # -- derived fields; `validate_*` checks them afterwards

    def _derive_sizes(self):
        """Fill in the attention sizes that were left out, of a model or of one layer."""
        heads = self.num_attention_heads
        head_dim = self.head_dim
        if head_dim is None and heads > 0 and self.hidden_size % heads == 0:
            head_dim = self.hidden_size // heads
        if self.attention_kind == "mla":
            self._derive_latent_sizes(head_dim)
        else:
            self.head_dim = head_dim
        if self.num_key_value_heads is None:
            quarter = heads // 4 if heads % 4 == 0 else None
            self.num_key_value_heads = {"mha": heads, "mla": heads, "mqa": 1, "gqa": quarter}.get(self.attention_kind)

    def _derive_latent_sizes(self, head_dim: int | None):
        """DeepSeek-V2's proportions of the head size (2405.04434, section 3.1.2): R = 4 d, N = V = d, P = d / 2."""
        if head_dim is not None:
            proportions = {
                "kv_lora_rank": 4 * head_dim,
                "qk_nope_head_dim": head_dim,
                "v_head_dim": head_dim,
                "qk_rope_head_dim": max(2, head_dim // 4 * 2),
            }
            for name, size in proportions.items():
                if getattr(self, name) is None:
                    setattr(self, name, size)
        self.head_dim = self.qk_rope_head_dim
        if self.qk_head_dim is None and self.qk_rope_head_dim is not None and self.qk_nope_head_dim is not None:
            self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.rope_interleave = True if self.rope_interleave is None else self.rope_interleave
        self.latent_norm = not self.qk_norm if self.latent_norm is None else self.latent_norm

    def _raise_format_version(self, written: dict[str, Any]):
        """Let `format_version` be the first that has the fields `written`."""
        needed = 3 if any(written.get(name) is not None for name in NORMED_FIELDS) else 2
        usual = dict.fromkeys(MULTIPLIERS, 1) | {name: ways[0] for name, ways in CHOICES.items()}
        usual |= {"sliding_rope_parameters": None, "key_mean": False, **dict.fromkeys(GEMMA, False)}
        newer = any(written.get(name, value) != value for name, value in usual.items())
        ropes = (written.get(name) for name in ("rope_parameters", "sliding_rope_parameters"))
        newer |= any(rope and rope.get(QUERY_SCALING) for rope in ropes)
        needed = 4 if newer or written.get("rope_frequency_indices") == [] else needed
        if self.format_version < needed:
            self.format_version = needed

    def _resolve_layer(self, index: int | str, overrides: dict[str, Any]) -> dict[str, Any]:
        """One layer's overrides, completed by every size that follows from them."""
        layer = copy.copy(self)
        layer.__dict__.pop("_heterogeneity_spec", None)
        newer = (*NORMED_FIELDS, "key_mean")
        of_all = {name: getattr(layer, name) for name in newer}
        sized = not overrides.keys().isdisjoint(SIZE_FIELDS)
        try:
            for name in derived_anew(layer.attention_kind, overrides) if sized else ():
                setattr(layer, name, type(self).__dataclass_fields__[name].default)
            for name, value in overrides.items():
                setattr(layer, name, value)
        except (ValueError, StrictDataclassError) as error:
            raise ValueError(f"layer {index}: {error.__cause__ or error}") from None
        if not sized:
            return overrides
        layer._derive_sizes()
        resolved = {name: getattr(layer, name) for name in (*SIZE_FIELDS, *CONVERSION_FIELDS)}
        # Earlier code does not know these, and reads other models where they are left out.
        same = [name for name in newer if not resolved[name] and not of_all[name]]
        return {**overrides, **{name: value for name, value in resolved.items() if name not in same}}

    # -- checks; the model's constructor runs them again through `validate`

    @classmethod
    def _refuse_misspelled(cls, kwargs: dict[str, Any]):
        for name in kwargs:
            # Fields have defaults, which are attributes of the class.
            if not hasattr(cls, name) and name not in FOLDED_KEYWORDS:
                hint = suggestion(name, {field.name for field in fields(cls)} | set(FOLDED_KEYWORDS))
                if hint:
                    raise ValueError(f"GQAConfig has no field {name!r}{hint}")

    def validate_architecture(self):
        """Check what all layers share."""
        self._raise_format_version(self.__dict__)  # rotary parameters are written in place
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} is newer than this code reads ({FORMAT_VERSION}): "
                "update modeling_gqa, or load with trust_remote_code=True to use the checkpoint's own code"
            )
        if self.cache_quantization is not None:
            CacheQuantization.of(self.cache_quantization).by_layer(self.num_hidden_layers)
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown: choose one of {', '.join(sorted(ACT2FN))}")
        check_rope(self.rope_parameters)
        if self.layer_types is None:
            raise ValueError(
                "layer_types=None is no longer derived: name each layer's, or build the configuration anew"
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"layer_types has {unknown}: use 'full_attention' or 'sliding_attention'")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but sliding_window is None: set it in tokens")
        check_sliding_rope(self)
        if self.sliding_window == 1:
            raise ValueError("sliding_window=1 lets a token see itself alone, which caches cannot hold: set 2 or more")

    def validate_rope(self):
        """Check the rotary parameters as transformers does; factors by frequency fit a layer, see `check_rotary`."""
        if (self.rope_parameters or {}).get("rope_type") != "longrope":
            super().validate_rope()

    def validate_token_ids(self):
        """Check that the special tokens are in the vocabulary."""
        check_token_ids(self)

    def validate_layers(self):
        """Check each layer's attention."""
        if self.qk_norm_span != "head" and not any(layer.qk_norm for layer in self.per_layer_config):
            raise ValueError(
                f"qk_norm_span={self.qk_norm_span!r} belongs to qk_norm=True, and no layer has it: leave it out"
            )
        differ = self.is_heterogeneous or self.sliding_rope_parameters is not None
        for index, layer in enumerate(self.per_layer_config if differ else [self]):
            where = f"layer {index}: " if differ else ""
            check_kind = check_latent if layer.attention_kind == "mla" else check_grouped
            for check in (check_layer_sizes, check_kind, check_frequencies, check_rotary):
                try:
                    check(layer)
                except ValueError as error:
                    raise ValueError(f"{where}{error}") from None

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save the configuration, with the code of the models and every Auto class that it serves.

        Weights that are copied beside it make a complete repository.
        """
        # transformers copies each file whose relative import it finds in the text of this one.
        from .modeling_gqa import AUTO_CLASSES

        # transformers would name the saved class alone, and keep references to the repository this was loaded from.
        self.auto_map = {
            "AutoConfig": "configuration_gqa.GQAConfig",
            **{auto_class: f"modeling_gqa.{cls.__name__}" for auto_class, cls in AUTO_CLASSES.items()},
        }
        return super().save_pretrained(save_directory, *args, **kwargs)


class GQALayerConfig(GQAConfig):
    """One layer's configuration, as `GQAConfig.per_layer_config` gives it: read-only, while its copies are not."""

    __eq__ = PreTrainedConfig.__eq__

    def __setattr__(self, name: str, value: Any):
        raise ValueError(
            f"{name}={shown(value)} written to a layer's configuration would change nothing: assign "
            f"config.per_layer_config = {{layer index: {{{name!r}: {shown(value)}}}}}"
        )

    def __reduce__(self):
        return GQAConfig.__new__, (GQAConfig,), self.__dict__


class _Layers(Sequence):
    """The layers' configurations, made by transformers at each access, as `GQALayerConfig`, which refuses writes."""

    def __init__(self, layers):
        self._layers = layers

    def __len__(self):
        return len(self._layers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        layer = GQALayerConfig.__new__(GQALayerConfig)
        layer.__dict__.update(self._layers[index].__dict__)
        kind = index if isinstance(index, str) else layer.layer_types[index]
        if layer.sliding_rope_parameters is not None and kind == "sliding_attention":
            layer.__dict__["rope_parameters"] = layer.sliding_rope_parameters
        return layer


attempt("a saved configuration brings no code", GQAConfig.register_for_auto_class)
