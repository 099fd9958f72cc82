"""Random configurations: sound ones of every sort, wrong ones, and what each of them must come to."""

import copy
import tempfile
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import strategies as st

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, GQAForCausalLM

BIASES = ("query_bias", "key_value_bias", "output_bias", "attention_bias", "mlp_bias")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
KEYWORDS = ("rope_theta", "partial_rotary_factor", "rope_scaling", "per_layer_config", "num_labels", "torch_dtype")
# What a field of another type or magnitude may hold. The large numbers fit no model, so that none is built by mistake.
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 10**9, 10**12, 2**63, 10**400, 0.0, 0.5, -0.5, 1.0, 1.5, 1e-30, 1e30,
    float("nan"), float("inf"), -float("inf"), "", "x", "4", "None", "a\nb", "float33", "nn", "int8", "gqa", "mla",
    [], [0], [1, 10**6], ["x"], [None], [float("nan")], {}, {"a": 1}, {5: 6}, {0: {5: 6}}, {"0": {"head_dim": 3}},
    (1, 2), {"rope_type": "yarn"}, {"rope_type": "linear", "factor": None}, torch.float32, torch.int8,
)  # fmt: skip


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def some(**choices: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    """A few of these fields."""
    return st.fixed_dictionaries({}, optional=choices)


@st.composite
def attentions(draw, heads: int, rotary: int | None = None) -> dict[str, Any]:
    """The fields of a layer's attention, with heads (in MLA rotary keys) of `rotary` dimensions where that is given."""
    kind = draw(st.sampled_from(sorted(ATTENTION_CLASSES)))
    size = rotary or 2 * draw(st.integers(2, 9))
    layer: dict[str, Any] = {"attention_kind": kind, "head_dim": size}
    if kind == "gqa":
        layer["num_key_value_heads"] = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    if kind == "mla":
        layer |= draw(some(kv_lora_rank=st.integers(1, 9), q_lora_rank=st.integers(1, 9), v_head_dim=st.integers(1, 9),
                           qk_nope_head_dim=st.integers(0, 9), rope_interleave=st.booleans(),
                           latent_norm=st.booleans()))  # fmt: skip
        layer["qk_rope_head_dim"] = size
        if draw(st.booleans()):
            layer |= {"qk_norm": True, "latent_norm": False, "q_lora_rank": None}
            layer |= {"qk_norm_head_dim": draw(st.integers(1, 9)), "qk_norm_key_value_heads": draw(st.integers(1, 4))}
    else:
        layer |= draw(some(qk_norm=st.booleans()))
    layer |= draw(some(softmax_scale=numbers(0.01, 1.0), attention_dropout=numbers(0.0, 0.5) | st.just(0)))
    return layer | draw(some(**dict.fromkeys(BIASES, st.booleans()), intermediate_size=st.integers(1, 40)))


def with_frequencies(draw, layer: dict[str, Any]) -> dict[str, Any]:
    """`layer`, turning with chosen frequencies of a head of another size."""
    size = 2 * draw(st.integers(2, 9))
    most = layer["head_dim"] // 2
    least = most if layer["attention_kind"] == "mla" else 0
    indices = draw(st.lists(st.integers(0, size // 2 - 1), min_size=least, max_size=most))
    return layer | {"rope_frequency_indices": indices, "rope_frequency_dim": size}


@st.composite
def ropes(draw, planes: int, mixed: bool) -> dict[str, Any]:
    kind = draw(st.sampled_from([kind for kind in ROPE_TYPES if not (mixed and kind == "longrope")]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(numbers(2.0, 1e7))}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = draw(numbers(1.0, 40.0))
    if kind in ("yarn", "longrope", "llama3"):
        rope |= draw(some(original_max_position_embeddings=st.integers(2, 64)))
    if kind == "yarn":
        rope |= draw(some(beta_fast=numbers(8.0, 40.0), beta_slow=numbers(0.5, 4.0), mscale=numbers(0.0, 2.0),
                          mscale_all_dim=numbers(0.0, 2.0), attention_factor=st.none() | numbers(0.5, 2.0),
                          truncate=st.booleans()))  # fmt: skip
    if kind == "longrope":
        factors = st.lists(numbers(0.5, 8.0), min_size=planes, max_size=planes)
        rope |= {"short_factor": draw(factors), "long_factor": draw(factors)}
        rope |= draw(some(factor=numbers(1.0, 8.0)))
    if kind == "llama3":
        low = draw(numbers(0.5, 2.0))
        rope |= {"low_freq_factor": low, "high_freq_factor": low + draw(numbers(0.5, 4.0))}
    return rope


@st.composite
def sound(draw) -> dict[str, Any]:
    """A configuration that works."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    given: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 60)),
        "hidden_size": draw(st.integers(2, 30)),
        "intermediate_size": draw(st.integers(1, 40)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": draw(st.integers(2, 64)),
        **draw(attentions(heads)),
    }
    given |= draw(
        some(
            tie_word_embeddings=st.booleans(),
            use_cache=st.booleans(),
            initializer_range=numbers(0.0, 0.5),
            rms_norm_eps=numbers(1e-8, 1e-3),
            embedding_multiplier=numbers(0.1, 12.0) | st.just(3),
            residual_multiplier=numbers(0.1, 2.0),
            logits_scaling=numbers(0.5, 16.0),
            hidden_act=st.sampled_from(["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
            pad_token_id=st.none() | st.integers(0, 4),
            bos_token_id=st.none() | st.integers(0, 4),
            eos_token_id=st.none() | st.integers(0, 4) | st.lists(st.integers(0, 4), min_size=1, max_size=3),
            dtype=st.sampled_from(["float32", "bfloat16", torch.float64, torch.bfloat16]),
        )
    )
    if draw(st.booleans()):
        given["sliding_window"] = draw(st.integers(2, 9))
        types = st.sampled_from(["full_attention", "sliding_attention"])
        given["layer_types"] = draw(st.none() | st.lists(types, min_size=layers, max_size=layers))
    by_layer = {}
    if layers > 1 and draw(st.booleans()):
        by_layer = draw(st.dictionaries(st.integers(0, layers - 1), attentions(heads), max_size=layers))
    if given["attention_kind"] == "mla" and given.get("qk_norm"):  # which layers that do not name it inherit
        for layer in by_layer.values():
            if layer["attention_kind"] == "mla" and not layer.get("qk_norm"):
                layer.pop("latent_norm", None)
                layer.pop("q_lora_rank", None)
    frequencies = draw(st.booleans()) and draw(st.booleans())
    if frequencies:
        given = with_frequencies(draw, given)
        # A layer of another head size would need other frequencies.
        by_layer = {index: with_frequencies(draw, layer) for index, layer in by_layer.items()}
    planes = given.get("rope_frequency_dim", given["head_dim"]) // 2
    rope = draw(st.none() | ropes(planes, bool(by_layer)))
    kinds = {given["attention_kind"], *(layer["attention_kind"] for layer in by_layer.values())}
    if rope and "mla" not in kinds and not frequencies and rope["rope_type"] in ("default", "linear", "yarn", "llama3"):
        sizes = [given["head_dim"], *(layer["head_dim"] for layer in by_layer.values())]
        halves = all(size % 4 == 0 for size in sizes)  # half of each head is an even number of dimensions
        rope |= draw(some(partial_rotary_factor=st.sampled_from([1.0, 0.5] if halves else [1.0, 1])))
    if rope:
        given["rope_parameters"] = rope
    if by_layer:
        given["per_layer_config"] = by_layer
    return given


FIELDS = sorted({field.name for field in fields(GQAConfig)} | set(KEYWORDS))


@st.composite
def spoilt(draw) -> tuple[dict[str, Any], dict[str, Any], str, Any]:
    """A sound configuration, the change of one of its fields to hold an odd value, where that stands, and the value."""
    given = draw(sound())
    rope, by_layer = given.get("rope_parameters"), given.get("per_layer_config")
    place = draw(st.sampled_from(["field", "field", "rope_parameters", "per_layer_config"]))
    odd = copy.deepcopy(draw(st.sampled_from(ODD)))
    if place == "rope_parameters" and rope:
        name = draw(st.sampled_from([*rope, "partial_rotary_factor", "factor", "original_max_position_embeddings"]))
        return given, {place: {**rope, name: odd}}, name, odd
    if place == "per_layer_config" and by_layer:
        index = draw(st.sampled_from(sorted(by_layer)))
        name = draw(st.sampled_from([*by_layer[index], "kv_lora_rank", "qk_norm"]))
        return given, {place: {**by_layer, index: {**by_layer[index], name: odd}}}, name, odd
    name = draw(st.sampled_from(FIELDS))
    return given, {name: odd}, name, odd


# -- the ways in which a value reaches a configuration


def by_constructor(given: dict[str, Any], change: dict[str, Any]) -> GQAConfig:
    return GQAConfig(**{**given, **change})


def by_attribute(given: dict[str, Any], change: dict[str, Any]) -> GQAConfig:
    config = GQAConfig(**given)
    for name, value in change.items():
        setattr(config, name, value)
    return config


def by_keyword(given: dict[str, Any], change: dict[str, Any]) -> GQAConfig:
    with tempfile.TemporaryDirectory() as folder:
        GQAConfig(**given).save_pretrained(folder)
        return GQAConfig.from_pretrained(folder, **change)


ARRIVALS = {"constructor": by_constructor, "attribute": by_attribute, "keyword": by_keyword}


# -- what must come of it


def refusal(error: Exception) -> str:
    """What an error says to the user: huggingface_hub's own names the check and has ours as its cause."""
    return str(error.__cause__ or error) if isinstance(error, StrictDataclassError) else str(error)


def built(config: GQAConfig) -> GQAForCausalLM:
    """The model of a configuration, in the configuration's dtype, with seeded weights."""
    torch.manual_seed(0)
    return GQAForCausalLM._from_config(config)


def lives(model: GQAForCausalLM):
    """Train a step, generate, save, reload: all finite, and the reloaded model is the same."""
    vocabulary = model.config.vocab_size
    prompt = torch.arange(14).view(2, 7) % vocabulary
    model.train()
    loss = model(prompt, labels=prompt, return_dict=True).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert loss.isfinite(), f"loss {loss}"
    assert gradients, "no gradients"
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), f"the gradient of {name} is not finite"
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.eval()
    with torch.no_grad():
        logits = model(prompt, return_dict=True).logits
    assert logits.isfinite().all(), "logits are not finite"
    generate: Any = model.generate  # type: ignore[misc]
    tokens = generate(prompt[:1], max_new_tokens=4, do_sample=False, return_dict_in_generate=False)
    assert tokens[0, :7].tolist() == prompt[0].tolist()
    assert 7 < tokens.shape[1] <= 11
    assert (tokens < vocabulary).all()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = GQAForCausalLM.from_pretrained(folder)
    assert again.dtype == model.dtype
    # Copied, because some CPUs round otherwise where memory is not aligned, as that of loaded weights can be.
    aligned = copy.deepcopy(again)
    with torch.no_grad():
        assert torch.equal(aligned(prompt, return_dict=True).logits, logits), "the reloaded model answers otherwise"
    assert layers_of(again.config) == layers_of(model.config)


def layers_of(config) -> list[dict[str, Any]]:
    """Every field of every layer, less what saving writes and what is transformers' alone."""
    written = {"architectures", "dtype", "transformers_version", "id2label", "label2id"}
    names = {field.name for field in fields(GQAConfig)} - written
    return [{name: getattr(layer, name) for name in names} for layer in config.per_layer_config]
