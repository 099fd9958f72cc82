"""What is written to a finished configuration, or given when a stored one is loaded, takes effect or is refused."""

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_models import KIND_SIZES, make_batch, make_config, make_model
from transformers.configuration_utils import PreTrainedConfig

from modeling_gqa import GQAConfig, GQAForCausalLM

pytestmark = pytest.mark.compat

# Nothing in a forward pass of training follows from these.
INERT = {"use_cache", "cache_quantization", "format_version", "eos_token_id", "bos_token_id"}
MLA_ROPE = {"qk_rope_head_dim": 8, "head_dim": 8, "qk_head_dim": 18}
# field -> the model, and other values that must change it when they are written to its finished configuration
WRITES = {
    "vocab_size": ("gqa", {"vocab_size": 99}),
    "hidden_size": ("gqa", {"hidden_size": 60}),
    "intermediate_size": ("gqa", {"intermediate_size": 33}),
    "num_hidden_layers": ("gqa", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "attention_kind": ("mha", {"attention_kind": "gqa", "num_key_value_heads": 2}),
    "num_attention_heads": ("gqa", {"num_attention_heads": 4}),
    "num_key_value_heads": ("gqa", {"num_key_value_heads": 3}),
    "head_dim": ("gqa", {"head_dim": 10}),
    "q_lora_rank": ("mla", {"q_lora_rank": 5}),
    "kv_lora_rank": ("mla", {"kv_lora_rank": 5}),
    "qk_nope_head_dim": ("mla", {"qk_nope_head_dim": 5, "qk_head_dim": 11}),
    "qk_rope_head_dim": ("mla", MLA_ROPE),
    "v_head_dim": ("mla", {"v_head_dim": 5}),
    "qk_head_dim": ("mla", MLA_ROPE),
    "rope_interleave": ("mla", {"rope_interleave": False}),
    "latent_norm": ("mla", {"latent_norm": False}),
    "attention_bias": ("gqa", {"attention_bias": True}),
    "query_bias": ("gqa", {"query_bias": True}),
    "key_value_bias": ("mla", {"key_value_bias": True}),
    "output_bias": ("mqa", {"output_bias": True}),
    "attention_dropout": ("gqa", {"attention_dropout": 0.5}),
    "qk_norm": ("mha", {"qk_norm": True}),
    "qk_norm_head_dim": ("mla-qk-norm", {"qk_norm_head_dim": 9}),
    "qk_norm_key_value_heads": ("mla-qk-norm", {"qk_norm_key_value_heads": 3}),
    "qk_norm_span": ("gqa", {"qk_norm": True, "qk_norm_span": "all_heads"}),
    "norm_position": ("gqa", {"norm_position": "after"}),
    "zero_centered_norms": ("mla", {"zero_centered_norms": True}),
    "scale_embeddings": ("gqa", {"scale_embeddings": True}),
    "sliding_rope_parameters": (
        "mixed-window",
        {"sliding_rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    ),
    "softmax_scale": ("gqa", {"softmax_scale": 3.0}),
    "rope_frequency_indices": ("gqa", {"rope_frequency_indices": [0, 1], "rope_frequency_dim": 14}),
    "rope_frequency_dim": ("mla", {"rope_frequency_indices": [0, 3, 3], "rope_frequency_dim": 8}),
    "key_mean": ("mla", {"key_mean": True}),
    "embedding_multiplier": ("gqa", {"embedding_multiplier": 3}),
    "residual_multiplier": ("mla", {"residual_multiplier": 0.5}),
    "logits_scaling": ("gqa", {"logits_scaling": 2.0}),
    "sliding_window": ("gqa", {"sliding_window": 3}),
    "layer_types": ("mixed-window", {"layer_types": ["sliding_attention"] * 3}),
    "hidden_act": ("gqa", {"hidden_act": "relu"}),
    "mlp_bias": ("gqa", {"mlp_bias": True}),
    "max_position_embeddings": ("dynamic", {"max_position_embeddings": 4}),
    "rope_parameters": ("gqa", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
    "initializer_range": ("gqa", {"initializer_range": 0.1}),
    "rms_norm_eps": ("gqa", {"rms_norm_eps": 0.5}),
    "pad_token_id": ("gqa", {"pad_token_id": 5}),
    "tie_word_embeddings": ("gqa", {"tie_word_embeddings": True}),
}


def config_of(model: str) -> GQAConfig:
    if model == "dynamic":
        return make_config("gqa", rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    return make_config(model)


def traces(config) -> tuple[dict, torch.Tensor, int | None]:
    """What can be seen of a model built from `config`: parameter shapes, an answer in training, the padding row."""
    torch.manual_seed(0)
    model = GQAForCausalLM(config).train()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(0.7)  # as training begins, all norms multiply by one
    batch = {name: value % config.vocab_size for name, value in make_batch().items()}
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    return shapes, model(**batch).logits, model.model.padding_idx


def test_every_field_of_ours_is_written():
    """A new field must be entered in `WRITES` or `INERT`, so that the next test covers it."""
    own = {field.name for field in fields(GQAConfig)} - {field.name for field in fields(PreTrainedConfig)}
    assert own == WRITES.keys() | INERT


@pytest.mark.parametrize("field", WRITES)
def test_a_written_field_reaches_the_model(field):
    """Writing a field changes the modules, the logits or the masks of the model that is built from it."""
    model, values = WRITES[field]
    config = config_of(model)
    before = traces(config)
    for name, value in values.items():
        setattr(config, name, value)
    after = traces(config)
    same = before[0] == after[0] and torch.equal(before[1], after[1]) and before[2] == after[2]
    assert not same, f"{field} was written and changed nothing"


@pytest.mark.parametrize(("window", "types"), [(4, "sliding_attention"), (None, "full_attention")])
def test_a_written_window_reaches_all_layers_where_they_are_alike(window, types):
    config = make_config("gqa", sliding_window=None if window else 4)
    config.sliding_window = window
    assert config.layer_types == [types] * 3
    other = make_config("mixed-window")
    other.sliding_window = 7
    assert other.layer_types == make_config("mixed-window").layer_types
    other.sliding_window = None
    with pytest.raises(StrictDataclassError, match="sliding_window is None: set it in tokens"):
        GQAForCausalLM(other)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize(("before", "after"), [(4, None), (4, 30), (None, 4)])
def test_a_window_written_to_a_models_configuration_is_that_of_every_backend(kind, backend, before, after):
    model, other = (make_model(kind, sliding_window=window) for window in (before, after))
    model.config.sliding_window = after
    for one in (model, other):
        one.set_attn_implementation(backend)
    batch = make_batch(length=11)
    torch.testing.assert_close(model(**batch).logits, other(**batch).logits, atol=1e-5, rtol=1e-5)


# model -> what is written, and the refusal at once
AT_ONCE = {
    "theta": ("gqa", "rope_theta", 1e6, r"rope_theta=1000000.0 would change nothing here: write it to rope_parameters"),
    "partial": ("gqa", "partial_rotary_factor", 0.5, r"partial_rotary_factor=0.5 would change nothing here"),
    "scaling": ("gqa", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, r"rope_scaling=.*write it to rope_para"),
    "a layer's": ("mixed", "attention_kind", "mqa", r"attention_kind='mqa' would not reach all layers.*per_layer"),
    "misspelled": ("gqa", "num_key_value_head", 2, r"no field 'num_key_value_head', did you mean 'num_key_val"),
    "nan": ("gqa", "rms_norm_eps", float("nan"), r"rms_norm_eps=nan must lie between"),
    "layers": ("gqa", "num_hidden_layers", 10**9, r"num_hidden_layers=1000000000 must lie between 1 and 65536"),
    "dtype": ("gqa", "dtype", "float33", r"dtype='float33' is no dtype of weights: choose one of torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_write_that_cannot_work_is_refused_at_once(name):
    model, field, value, message = AT_ONCE[name]
    config = make_config(model)
    before = config.to_dict()
    with pytest.raises(ValueError, match=message) as error:
        setattr(config, field, value)
    assert "\n" not in str(error.value)
    assert config.to_dict() == before


@pytest.mark.parametrize("model", ["gqa", "mixed"])
def test_a_layers_configuration_is_read_and_its_copies_are_written(model):
    """A write to one layer's configuration would be lost, so it raises; a copy is an ordinary configuration."""
    config = make_config(model)
    before = config.to_dict()
    for layer in (config.per_layer_config[1], *config.per_layer_config, *config.per_layer_config[0:2]):
        with pytest.raises(ValueError, match=r"head_dim=8 written to a layer's .*: assign config.per_layer_config = "):
            layer.head_dim = 8
        with pytest.raises(ValueError, match=r"sliding_window=512 written to a layer's"):
            layer.sliding_window = 512
        for duplicate in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert duplicate == layer
            duplicate.head_dim = 8
            assert (type(duplicate), duplicate.head_dim) == (GQAConfig, 8)
    assert config.to_dict() == before
    assert config.per_layer_config["full_attention" if model == "gqa" else 0].head_dim == (14 if model == "gqa" else 6)


# -- None, and contradictions, for a stored configuration


@pytest.mark.parametrize("name", KIND_SIZES["mla"])
def test_a_latent_size_cannot_follow_from_a_head_size_that_is_gone(name, tmp_path):
    """A finished MLA configuration stores no head size, so `None` for a latent size needs head_dim beside it."""
    make_config("mla").save_pretrained(tmp_path)
    message = f"{name}=None cannot be derived, .*: give {name}, or head_dim as well"
    with pytest.raises(ValueError, match=message) as error:
        GQAConfig.from_pretrained(tmp_path, **{name: None})
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"layer 1: {message}"):
        make_config("mla", per_layer_config={1: {name: None}})
    again = GQAConfig.from_pretrained(tmp_path, **{name: None, "head_dim": 14})
    assert getattr(again, name) == {"kv_lora_rank": 56, "qk_rope_head_dim": 6}.get(name, 14)
    of_hidden = GQAConfig.from_pretrained(tmp_path, **{name: None, "head_dim": None})
    assert getattr(of_hidden, name) == {"kv_lora_rank": 44, "qk_rope_head_dim": 4}.get(name, 11)  # d = 66 / 6


@pytest.mark.parametrize(
    ("model", "given", "derived"),
    [
        ("gqa", {"head_dim": None, "hidden_size": 48, "num_key_value_heads": 2}, {"head_dim": 8}),
        ("mha", {"num_key_value_heads": None}, {"num_key_value_heads": 6}),
        ("mla-q-lora", {"q_lora_rank": None}, {"q_lora_rank": None}),
        ("mla", {"qk_head_dim": None}, {"qk_head_dim": 16}),
        ("mla", {"rope_interleave": None, "latent_norm": None}, {"rope_interleave": True, "latent_norm": True}),
        ("gqa", {"layer_types": None, "sliding_window": 5}, {"layer_types": ["sliding_attention"] * 3}),
        ("gqa", {"rope_parameters": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ],
    ids=str,
)
def test_none_derives_as_a_new_configuration_does(model, given, derived, tmp_path):
    """`None` given to `from_pretrained` means "derive", as in the constructor."""
    make_config(model).save_pretrained(tmp_path)
    config = GQAConfig.from_pretrained(tmp_path, **given)
    assert {name: getattr(config, name) for name in derived} == derived


def test_scaling_given_at_loading_keeps_the_other_rotary_parameters(tmp_path):
    make_config("gqa", rope_theta=5e5).save_pretrained(tmp_path)
    config = GQAConfig.from_pretrained(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_two_values_for_one_rotary_parameter_are_refused():
    with pytest.raises(
        ValueError, match=r"rope_theta=1000000.0 contradicts rope_parameters\['rope_theta'\]=10.0: give"
    ):
        make_config("gqa", rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 10.0})


def test_the_stored_dtype_is_kept_where_auto_is_asked_for(tmp_path):
    make_model("gqa").bfloat16().save_pretrained(tmp_path)
    assert GQAConfig.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert GQAForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
