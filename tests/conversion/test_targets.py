"""Target configurations: sizes that follow, what is refused, and sizes by layer within a budget."""

from typing import ClassVar

import pytest
import torch
from attention_oracle import CALIBRATION, PARTIAL, random_model
from small_models import make_config, make_model
from transformers import LlamaConfig

from modeling_gqa import ATTENTION_CLASSES, GQAConfig, configuration_checks
from modeling_gqa.attention import GroupedAttention
from modeling_gqa.conversion import UserError, allocate, convert_model, export_config, import_config, target_config
from modeling_gqa.conversion.inspection import inspect_checkpoint
from modeling_gqa.conversion.layers.heads import read_heads
from modeling_gqa.conversion.targets import describe_layers, exact_latent_sizes, lossy_layers
from modeling_gqa.costs import cache_bytes_per_token


def sizes(config) -> list[tuple[str, int, int | None, int | None]]:
    return [
        (layer.attention_kind, layer.num_key_value_heads, layer.kv_lora_rank, layer.qk_rope_head_dim)
        for layer in config.per_layer_config
    ]


# name -> (model, its fields, kind, arguments, sizes of the layers)
TARGETS = {
    "mqa": ("gqa", {}, "mqa", {}, [("mqa", 1, None, None)] * 3),
    "two-layers": (
        "mha",
        {},
        "gqa",
        {"num_key_value_heads": 3, "layers": [2, 0]},
        [("gqa", 3, None, None), ("mha", 6, None, None), ("gqa", 3, None, None)],
    ),
    "no-layer": ("gqa", {}, "mqa", {"layers": []}, [("gqa", 2, None, None)] * 3),
    "from-mla": ("mixed", {}, "mha", {}, [("mha", 6, None, None)] * 3),
    "exact-mla-of-mqa": ("mqa", {}, "mla", {}, [("mla", 6, 14, 14)] * 3),
    "exact-mla-of-mqa-partial": ("mqa", {"rope_parameters": PARTIAL}, "mla", {}, [("mla", 6, 20, 8)] * 3),
    "cache-shared-equally": ("mha", {}, "mla", {"cache_size": 40}, [("mla", 6, 20, 20)] * 3),
    "cache-odd": ("mha", {}, "mla", {"cache_size": 23}, [("mla", 6, 13, 10)] * 3),
    "cache-least": ("mha", {}, "mla", {"cache_size": 3}, [("mla", 6, 1, 2)] * 3),
    "cache-beyond-all-rotation": ("gqa", {}, "mla", {"cache_size": 70}, [("mla", 6, 28, 28)] * 3),
    "cache-of-layers-that-differ": (
        "gqa",
        {"per_layer_config": {"1": {"attention_kind": "mha"}}},
        "mla",
        {"cache_size": 60},
        [("mla", 6, 28, 28), ("mla", 6, 30, 30), ("mla", 6, 28, 28)],
    ),
    "cache-partial": ("gqa", {"rope_parameters": PARTIAL}, "mla", {"cache_size": 40}, [("mla", 6, 24, 16)] * 3),
    "rotary-as-large-as-the-latent": ("mha", {}, "mla", {"kv_lora_rank": 31}, [("mla", 6, 31, 30)] * 3),
    "both": ("mha", {}, "mla", {"kv_lora_rank": 31, "qk_rope_head_dim": 4}, [("mla", 6, 31, 4)] * 3),
}


@pytest.mark.parametrize("name", TARGETS)
def test_sizes_follow(name):
    """R, P, heads and kinds of each layer follow from the arguments, and nothing else changes."""
    model, fields, kind, arguments, expected = TARGETS[name]
    source = make_config(model, **fields)
    before = source.to_dict()
    config = target_config(source, kind, **arguments)
    assert sizes(config) == expected and source.to_dict() == before
    for layer, own in zip(config.per_layer_config, source.per_layer_config, strict=True):
        if layer.attention_kind == "mla":
            assert layer.latent_norm is False and layer.rope_interleave is False and layer.v_head_dim == 14
            rotary = 8 if "rope_parameters" in fields else 14
            complete = layer.qk_rope_head_dim == rotary * own.num_key_value_heads
            assert layer.qk_nope_head_dim == (14 - rotary if complete else 14)
    kept = ("hidden_size", "intermediate_size", "vocab_size", "layer_types", "num_attention_heads", "eos_token_id")
    assert all(getattr(config, name) == getattr(source, name) for name in kept)


def test_a_head_of_mla_has_room_for_key_and_value():
    """As MHA, an MLA head has the larger of its key and value sizes, rounded up to even."""
    for value, size in ((13, 16), (20, 20), (17, 18)):
        config = target_config(make_config("mla", v_head_dim=value), "mha")
        assert config.head_dim == size and config.kv_lora_rank is None


def test_partly_rotated_layers_beside_mla_say_what_they_rotate():
    """Layers that stay grouped name the frequencies that they rotate with."""
    config = target_config(make_config("gqa", rope_parameters=PARTIAL), "mla", cache_size=20, layers=[1])
    for index in (0, 2):
        layer = config.per_layer_config[index]
        assert (layer.rope_frequency_indices, layer.rope_frequency_dim) == ([0, 1, 2, 3], 8)


PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
REFUSED = {
    "kind": ("gqa", {}, "xyz", {}, "attention_kind='xyz' is unknown: choose one of mha, mqa, gqa, mla"),
    "no-heads": ("mha", {}, "gqa", {}, "num_key_value_heads must be given for gqa"),
    "heads-of-mqa": (
        "gqa",
        {},
        "mqa",
        {"num_key_value_heads": 2},
        "num_key_value_heads=2 contradicts mqa, which has 1",
    ),
    "indivisible": (
        "mha",
        {},
        "gqa",
        {"num_key_value_heads": 4},
        "num_key_value_heads=4 does not divide the 6 query heads: choose one of 1, 2, 3, 6",
    ),
    "more-heads-with-loss": (
        "gqa",
        {},
        "gqa",
        {"num_key_value_heads": 3},
        "num_key_value_heads=3 loses something in layer 0 and caches more than its 2: choose a multiple of 2, or fewer",
    ),
    "no-head": ("mha", {}, "gqa", {"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
    "negative-rank": ("mha", {}, "mla", {"kv_lora_rank": -2}, "kv_lora_rank=-2 must be at least 1"),
    "rank-of-gqa": ("mha", {}, "mqa", {"kv_lora_rank": 8}, "kv_lora_rank=8 belongs to MLA, and the target is mqa"),
    "heads-of-mla": (
        "mha",
        {},
        "mla",
        {"num_key_value_heads": 2, "cache_size": 8},
        "num_key_value_heads=2 belongs to GQA, and the target is mla",
    ),
    "layer": ("gqa", {}, "mqa", {"layers": [0, 3]}, "layers has 3, but the model's 3 layers are 0 to 2"),
    "no-sizes": ("gqa", {}, "mla", {}, r"mla needs kv_lora_rank \(and qk_rope_head_dim\), or cache_size"),
    "twice": (
        "gqa",
        {},
        "mla",
        {"cache_size": 20, "kv_lora_rank": 10},
        "cache_size=20 and the sizes it is made of are both given: leave one out",
    ),
    "no-room": ("gqa", {}, "mla", {"cache_size": 2}, "cache_size=2 leaves no room for a latent and a rotary key: 3 is"),
    "odd": (
        "gqa",
        {},
        "mla",
        {"kv_lora_rank": 8, "qk_rope_head_dim": 7},
        "qk_rope_head_dim=7 must be even and at most 28",
    ),
    "rotary": (
        "gqa",
        {"rope_parameters": PARTIAL},
        "mla",
        {"kv_lora_rank": 8, "qk_rope_head_dim": 18},
        "qk_rope_head_dim=18 must be even and at most 16, the rotary dimensions of layer 0's 2 key/value heads",
    ),
    "qk-norm": (
        "mla-qk-norm",
        {},
        "mla",
        {"cache_size": 8},
        r"layer 0 is MLA with an RMSNorm on each head \(qk_norm=True\), with which no conversion begins",
    ),
    "proportional": ("mqa", {"rope_parameters": PROPORTIONAL}, "mla", {}, "rope_type 'proportional' spreads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_targets_are_refused(name):
    """Each impossible target is refused in one line that names the field and its value."""
    model, fields, kind, arguments, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        target_config(make_config(model, **fields), kind, **arguments)
    assert "\n" not in str(error.value)


def test_mla_of_the_same_sizes_is_the_same():
    """Converting to the present sizes is refused as changing nothing."""
    converted, _ = convert_model(
        random_model("gqa"), target_config(make_config("gqa"), "mla", kv_lora_rank=20, qk_rope_head_dim=8)
    )
    same = target_config(converted.config, "mla", kv_lora_rank=20, qk_rope_head_dim=8)
    with pytest.raises(UserError, match="nothing to convert"):
        convert_model(converted, same)


def test_the_target_of_a_stock_configuration_is_that_of_the_imported_one():
    stock = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    assert target_config(stock, "mqa").to_dict() == target_config(import_config(stock), "mqa").to_dict()


# -- a kind that conversions do not know


class TiedAttention(GroupedAttention):
    """A new kind as `docs/adding-a-kind.md` adds one, here computed as MHA."""

    kinds: ClassVar[tuple[str, ...]] = ("tied",)


@pytest.fixture
def tied(monkeypatch, tmp_path):
    """A saved model whose layer 1 has a kind that conversions do not know; layers 0 and 2 are MHA."""
    monkeypatch.setitem(ATTENTION_CLASSES, "tied", TiedAttention)
    monkeypatch.setattr(configuration_checks, "ATTENTION_KINDS", tuple(ATTENTION_CLASSES))
    model = make_model("mha", per_layer_config={1: {"attention_kind": "tied", "num_key_value_heads": 6}})
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_a_layer_of_an_unknown_kind_is_refused_by_name(tied):
    """Whatever would read or write the layer says its index and kind; the other layers convert as ever."""
    model, folder = tied
    said = "layer 1 has attention_kind='tied', which conversions do not know: they know mha, mqa, gqa, mla"
    budget = cache_bytes_per_token(model.config) // 2
    for kind, sizes in (("mqa", {}), ("mla", {"cache_size": 24})):
        with pytest.raises(UserError, match=said):
            target_config(model.config, kind, **sizes)
    for refused in (
        lambda: convert_model(model, make_config("mha")),
        lambda: allocate(model, "gqa", budget, CALIBRATION),
        lambda: read_heads(model, 1),
    ):
        with pytest.raises(UserError, match=said):
            refused()
    found = inspect_checkpoint(folder)["conversions"]
    assert not found["exact"] and not found["lossy"] and set(found["impossible"].values()) == {said}
    with pytest.raises(UserError, match="attention_kind='tied' is unknown: choose one of mha, mqa, gqa, mla"):
        target_config(model.config, "tied")
    converted, done = convert_model(model, target_config(model.config, "mqa", layers=[0, 2]))
    assert [layer["to"][:4] for layer in done["layers"]] == ["mqa,", "tied", "mqa,"] and not done["exact"]
    kept = [
        [tensor for name, tensor in each.state_dict().items() if ".layers.1." in name] for each in (model, converted)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_a_model_of_an_unknown_kind_is_not_exported_as_another(monkeypatch):
    """Its layers have the sizes of Llama's, and compute something else."""
    monkeypatch.setitem(ATTENTION_CLASSES, "tied", TiedAttention)
    monkeypatch.setattr(configuration_checks, "ATTENTION_KINDS", tuple(ATTENTION_CLASSES))
    with pytest.raises(UserError, match=r"llama and mistral .* gemma3_text: attention_kind='tied' is not"):
        export_config(make_config("mha", attention_kind="tied", num_key_value_heads=6))


def test_the_largest_latent_is_the_one_that_the_error_names():
    """One more number than that is refused, and the error says what the most is; a cache grows to the exact one."""
    config = GQAConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, attention_kind="mqa")
    with pytest.raises(UserError, match=r"choose at most 64$"):
        target_config(config, "mla", kv_lora_rank=65)
    assert target_config(config, "mla", kv_lora_rank=64).per_layer_config[0].kv_lora_rank == 64
    layer = target_config(config, "mla", cache_size=81).per_layer_config[0]
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == exact_latent_sizes(config.per_layer_config[0]) == (16, 16)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 26}, {"partial_rotary_factor": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["mha", "gqa", "mqa"])
def test_exact_latent_sizes_are_the_least(kind, sizes):
    """With these sizes MLA is exact, and with a latent of one number less it is not."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": sizes.get("partial_rotary_factor", 1.0)}
    fields = {name: value for name, value in sizes.items() if name == "hidden_size"}
    config = make_config(kind, head_dim=8, **fields, rope_parameters=rope)
    rank, rotary = exact_latent_sizes(config.per_layer_config[0])
    target = target_config(config, "mla", kv_lora_rank=rank, qk_rope_head_dim=rotary)
    assert lossy_layers(config, target) == []
    assert rank + rotary <= 2 * config.num_key_value_heads * config.head_dim
    less = target_config(config, "mla", kv_lora_rank=rank - 1, qk_rope_head_dim=rotary)
    assert lossy_layers(config, less) == list(range(config.num_hidden_layers))


def test_layers_of_many_sizes_are_described_by_kind():
    sizes = {index: {"attention_kind": "mla", "kv_lora_rank": 8 + index} for index in range(5)}
    assert "; layers 4: mla, " in describe_layers(
        make_config("gqa", num_hidden_layers=5, per_layer_config={4: sizes[4]})
    )
    mixed = make_config("gqa", num_hidden_layers=6, per_layer_config=sizes)
    assert describe_layers(mixed) == "5 x mla, 1 x gqa, sizes differ by layer"
