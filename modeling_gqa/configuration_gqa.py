"""Configuration of a decoder language model whose attention is MHA, MQA, GQA or MLA, layer by layer."""

import copy
from dataclasses import fields
from typing import Any, ClassVar

import transformers
from packaging.version import Version

if Version(transformers.__version__).release < (5, 17):
    raise ImportError(
        f"this model's code needs transformers>=5.17,<6 and found {transformers.__version__}: "
        "run `pip install -U 'transformers>=5.17,<6'`"
    )

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_checks import LATENT_FIELDS, check_frequencies, check_grouped, check_latent, check_sizes, suggestion

FORMAT_VERSION = 2  # 2: softmax_scale, rope_frequency_indices, rope_frequency_dim

# A change of one of these makes a layer derive its sizes anew.
SIZE_FIELDS = ("attention_kind", "num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm", *LATENT_FIELDS)
# What a conversion leaves behind; nothing follows from them, and another attention kind does not keep them.
CONVERSION_FIELDS = ("softmax_scale", "rope_frequency_indices", "rope_frequency_dim")
PER_LAYER_FIELDS = (
    *SIZE_FIELDS,
    *CONVERSION_FIELDS,
    "attention_bias",
    "query_bias",
    "key_value_bias",
    "output_bias",
    "attention_dropout",
    "intermediate_size",
    "mlp_bias",
)
# Keywords that are no fields and that transformers turns into fields.
FOLDED_KEYWORDS = ("per_layer_config", "rope_theta", "partial_rotary_factor", "rope_scaling")


@strict
class GQAConfig(PreTrainedConfig):
    r"""Configuration of a GQA model; fields not named here have Llama's names and meaning.

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
            MLA: size of the latent (4 d), of the unrotated and rotated part of a key (d, d/2) and of a value (d).
        q_lora_rank (`int`, *optional*): MLA: rank of the query projection; `None` for a plain `q_proj`.
        qk_head_dim (`int`, *optional*): MLA: `qk_nope_head_dim + qk_rope_head_dim`; derived.
        rope_interleave (`bool`, *optional*): MLA: rotary pairs are neighbours (`True`) or half a head apart.
        latent_norm (`bool`, *optional*): MLA: RMSNorm on the latents (`True`); a converted model has none.
        attention_bias (`bool`, defaults to `False`):
            Bias of the query, key/value and output projections; `query_bias`, `key_value_bias` and `output_bias`
            set one apart. In MLA they belong to `q_proj` (or `q_a_proj`), `kv_a_proj_with_mqa` and `o_proj`.
        qk_norm (`bool`, defaults to `False`): RMSNorm on each head of queries and keys, as in Qwen3; not with MLA.
        softmax_scale (`float`, *optional*):
            Factor of the scores before the softmax; `head_dim ** -0.5` (MLA: `qk_head_dim ** -0.5`, times DeepSeek's
            YaRN correction) where left out. A converted model keeps its source's.
        rope_frequency_indices (`list[int]`, *optional*):
            Which of the frequencies of a head of `rope_frequency_dim` dimensions each rotary plane turns with, repeats
            allowed: P / 2 of them in MLA, elsewhere at most d / 2, and dimensions beyond are not rotated.
        sliding_window (`int`, *optional*):
            Window in tokens of the layers that `layer_types` calls `"sliding_attention"`; all where it is left out.
        rope_parameters (`dict`, *optional*):
            `rope_type`, `rope_theta` and the type's own keys; `partial_rotary_factor` rotates part of each head.
        per_layer_config (`dict[int, dict]`, *optional*):
            What differs by layer: `{0: {"attention_kind": "mla", "kv_lora_rank": 128}}`. What follows is derived.
        format_version (`int`): version of these fields, stored so that old checkpoints keep loading.

    Raises:
        ValueError: a layer's sizes cannot be derived, or (as huggingface_hub's `StrictDataclassError`, with the
            `ValueError` as cause) a field's type, value or combination cannot work.
    """

    model_type = "gqa"
    keys_to_ignore_at_inference = ["past_key_values"]
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}
    # An absent key would mean "derive" before saving and "the global value" after loading.
    serialize_explicit_per_layer_config = True
    base_model_tp_plan: ClassVar = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
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
    softmax_scale: float | None = None
    rope_frequency_indices: list[int] | None = None
    rope_frequency_dim: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        self._refuse_misspelled(kwargs)
        if self.rope_parameters is not None:
            self.rope_parameters = copy.deepcopy(self.rope_parameters)  # transformers completes it in place
        if self.layer_types is None:
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers
        self.layer_types = list(self.layer_types)
        self._derive_sizes()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build from `config_dict`; keywords that are fields of ours count as written in it, so all is derived anew."""
        cls._refuse_misspelled(kwargs)
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        overrides = {name: kwargs.pop(name) for name in (*own, *FOLDED_KEYWORDS) if name in kwargs}
        return super().from_dict(_overridden(config_dict, overrides), **kwargs)

    @property
    def per_layer_config(self):
        """Configuration of each layer; assign `{layer index: {field: value}}` to make layers differ."""
        return PreTrainedConfig.per_layer_config.fget(self)

    @per_layer_config.setter
    def per_layer_config(self, overrides: dict[int | str, dict[str, Any]] | None):
        if overrides is not None:
            if not isinstance(overrides, dict) or not all(isinstance(layer, dict) for layer in overrides.values()):
                raise ValueError(f"per_layer_config={overrides!r} must be {{layer index: {{field: value}}}}")
            overrides = {index: self._resolve_layer(index, layer) for index, layer in overrides.items()}
        PreTrainedConfig.per_layer_config.fset(self, overrides)  # type: ignore[attr-defined]

    @property
    def rotary_dim(self) -> int:
        """Size of the head whose rotary frequencies a layer uses, before `partial_rotary_factor`."""
        return self.head_dim if self.rope_frequency_dim is None else self.rope_frequency_dim

    @property
    def projection_biases(self) -> tuple[bool, bool, bool]:
        """Whether the query, key/value and output projections of a layer have a bias."""
        single = (self.query_bias, self.key_value_bias, self.output_bias)
        query, key_value, output = (self.attention_bias if bias is None else bias for bias in single)
        return query, key_value, output

    # -- what follows from what is given; no checks, `validate_*` sees the result

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
        self.latent_norm = True if self.latent_norm is None else self.latent_norm

    def _resolve_layer(self, index: int | str, overrides: dict[str, Any]) -> dict[str, Any]:
        """One layer's overrides, completed by every size that follows from them."""
        if not str(index).isdecimal():
            raise ValueError(f"per_layer_config has the key {index!r}: keys are layer indices, counted from 0")
        for name in overrides:
            if name not in PER_LAYER_FIELDS:
                raise ValueError(
                    f"per_layer_config[{index}] sets {name!r}, which cannot differ by layer"
                    f"{suggestion(name, PER_LAYER_FIELDS)}. These can: {', '.join(PER_LAYER_FIELDS)}"
                )
        if overrides.keys().isdisjoint(SIZE_FIELDS):
            return overrides
        layer = copy.copy(self)
        layer.__dict__.pop("_heterogeneity_spec", None)
        for name in derived_anew(layer.attention_kind, overrides):
            setattr(layer, name, type(self).__dataclass_fields__[name].default)
        for name, value in overrides.items():
            setattr(layer, name, value)
        layer._derive_sizes()
        return {**overrides, **{name: getattr(layer, name) for name in (*SIZE_FIELDS, *CONVERSION_FIELDS)}}

    # -- checks; the model's constructor runs them again through `validate`

    @classmethod
    def _refuse_misspelled(cls, kwargs: dict[str, Any]):
        known = {field.name for field in fields(cls)} | set(FOLDED_KEYWORDS)
        for name in kwargs:
            if name not in known and not hasattr(cls, name):
                hint = suggestion(name, known)
                if hint:
                    raise ValueError(f"GQAConfig has no field {name!r}{hint}")

    def validate_architecture(self):
        """Check what all layers share."""
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} is newer than this code reads ({FORMAT_VERSION}): "
                "update modeling_gqa, or load with trust_remote_code=True to use the checkpoint's own code"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is unknown: choose one of {', '.join(sorted(ACT2FN))}")
        if self.initializer_range < 0:
            raise ValueError(f"initializer_range={self.initializer_range} must not be negative")
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"layer_types has {unknown}: use 'full_attention' or 'sliding_attention'")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but sliding_window is None: set it in tokens")
        if self.sliding_window == 1:
            raise ValueError("sliding_window=1 lets a token see itself alone, which caches cannot hold: set 2 or more")

    def validate_rope(self):
        """Check the rotary parameters, which all layers share, before transformers' own checks read them."""
        rope = self.rope_parameters or {}
        if rope.get("rope_type", "default") not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_parameters['rope_type']={rope.get('rope_type')!r} is unknown: "
                f"choose one of {', '.join(['default', *sorted(ROPE_INIT_FUNCTIONS)])}"
            )
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError("rope_parameters by layer type is not supported: give one set for all layers")
        if not rope.get("rope_theta", 1.0) > 0:
            raise ValueError(f"rope_parameters['rope_theta']={rope['rope_theta']} must be positive")
        if self.is_heterogeneous and rope.get("rope_type") == "longrope":
            raise ValueError(
                "rope_parameters['rope_type']='longrope' lists a factor per rotary dimension and cannot serve the "
                "layers of a mixed model (per_layer_config): use 'yarn', 'llama3', 'dynamic' or 'linear'"
            )
        super().validate_rope()

    def validate_layers(self):
        """Check each layer's attention."""
        for index, layer in enumerate(self.per_layer_config if self.is_heterogeneous else [self]):
            where = f"layer {index}: " if self.is_heterogeneous else ""
            check_kind = check_latent if layer.attention_kind == "mla" else check_grouped
            for check in (check_sizes, check_kind, check_frequencies):
                try:
                    check(layer)
                except ValueError as error:
                    raise ValueError(f"{where}{error}") from None


def _overridden(stored: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with fields replaced, less what was stored but follows from them."""
    rope_parameters = overrides.get("rope_parameters", stored.get("rope_parameters"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in overrides and rope_parameters is not None:
            rope_parameters = overrides["rope_parameters"] = {**rope_parameters, name: overrides.pop(name)}
    by_layer = {} if "per_layer_config" in overrides else stored.get("per_layer_config") or {}
    for name in overrides.keys() & {name for layer in by_layer.values() for name in layer}:
        raise ValueError(
            f"{name}={overrides[name]!r} would reach no layer, because this configuration's per_layer_config sets "
            f"{name} layer by layer: give per_layer_config as well (None for equal layers)"
        )
    stale: set[str] = set()
    if not overrides.keys().isdisjoint(SIZE_FIELDS):
        stale |= derived_anew(stored.get("attention_kind", GQAConfig.attention_kind), overrides)
    same_type = len(set(stored.get("layer_types") or [])) == 1
    if same_type and not overrides.keys().isdisjoint(("sliding_window", "num_hidden_layers")):
        stale.add("layer_types")
    return {**{name: value for name, value in stored.items() if name not in stale}, **overrides}


def derived_anew(kind: str, overrides: dict[str, Any]) -> set[str]:
    """The size fields that follow from `overrides` instead of being kept from a configuration of `kind`."""
    new_kind = overrides.get("attention_kind", kind)
    names = {"qk_head_dim"}
    if (new_kind, kind) != ("gqa", "gqa"):
        names.add("num_key_value_heads")
    if new_kind != kind and "mla" in (new_kind, kind):
        names |= {*LATENT_FIELDS, *CONVERSION_FIELDS, "qk_norm" if new_kind == "mla" else "head_dim"}
    elif new_kind == "mla" and "head_dim" in overrides:
        names |= {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    return names - overrides.keys()


GQAConfig.register_for_auto_class()
