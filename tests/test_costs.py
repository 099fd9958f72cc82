"""What models cost, against transformers' own models, figures that were published, and every number tried."""

import json
from pathlib import Path

import pytest
import torch
from small_models import make_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from modeling_gqa import GQAConfig, costs
from modeling_gqa.costs import CostedModel, Machine, report
from modeling_gqa.costs.configurations import PRESETS, changed, find_model
from modeling_gqa.layers import key_mean_size
from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.paths import CONFIGURATION

PUBLISHED = sorted(path.parent.name for path in (CONFIGURATION / "published").glob("*/config.json"))
# Parameters as the models' cards and papers count them, to the digit.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name):
    """They are those of transformers' own model, and those that its authors count."""
    fields = json.loads(PRESETS[name].read_text())
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields["model_type"]].from_dict(fields))
    assert report(find_model(name)[0]).parameters == stock.num_parameters() == PARAMETERS[name]


def test_table_of_caches():
    """DeepSeek-V2's table 1 (2405.04434): numbers per token of MHA, GQA, MQA and MLA, by its symbols."""
    heads, size, layers, groups = 128, 128, 60, 8
    latent, rope = 4 * size, size // 2
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 5120, "head_dim": size}
    table = {
        "mha": 2 * heads * size * layers,
        "gqa": 2 * groups * size * layers,
        "mqa": 2 * size * layers,
        "mla": (latent + rope) * layers,
    }
    for kind, numbers in table.items():
        given = {"num_key_value_heads": groups} if kind == "gqa" else {}
        config = GQAConfig(**shape, attention_kind=kind, **given)
        assert report(config).cache_bytes_per_token == 2 * numbers
    assert table["mla"] == 4.5 * size * layers  # "equal to GQA with only 2.25 groups"


def test_totals_are_sums_of_layers(model_name):
    config = make_config(model_name)
    found = report(config, contexts=[7, 31], batch_sizes=[1, 3])
    layers = found.layers
    assert found.attention_parameters == sum(layer.attention_parameters for layer in layers)
    assert found.mlp_parameters == sum(layer.mlp_parameters for layer in layers)
    parts = (found.attention_parameters, found.mlp_parameters, found.embedding_parameters, found.norm_parameters)
    assert found.parameters == sum(parts) == costs.count_parameters(config)
    head = 2 * config.hidden_size * config.vocab_size
    for cost in found.contexts:
        rows, tokens = cost.batch_size, cost.context
        for name, positions in {"training_flops": 3 * tokens, "prefill_flops": 1, "decode_flops": 1}.items():
            of_layers = sum(getattr(layer, name)[tokens] for layer in layers)
            assert getattr(cost, name) == rows * (of_layers + positions * head)
        assert cost.intensity == cost.decode_flops / cost.decode_bytes


def test_bound():
    """The longer of reading weights and cache and of computing, with the weights read once for all rows."""
    config = make_config("mla")
    weights, cache = costs.decode_weights(config), costs.cache_bytes(config, 4, 50, torch.float32)
    flops = costs.decode_flops(config, 4, 50)
    nbytes = (weights + (0 if config.tie_word_embeddings else 3 * config.hidden_size)) * 4 + cache
    slow_reading, slow_computing = Machine(bandwidth=10.0, rate=1e18), Machine(bandwidth=1e18, rate=10.0)
    for machine, seconds in ((slow_reading, nbytes / 10), (slow_computing, flops / 10)):
        assert costs.decode_seconds(config, machine, 4, 50, torch.float32) == pytest.approx(seconds)
        cost = report(config, contexts=[50], batch_sizes=[4], dtype=torch.float32, machine=machine).contexts[0]
        assert cost.decode_seconds == pytest.approx(seconds)
    slow = report(config, contexts=[2], dtype=torch.float32, machine=slow_reading).contexts[0]
    prompt_weights = costs.decode_weights(config, 2) * 4
    assert (slow.prefill_seconds, slow.training_seconds) == (prompt_weights / 10, 2 * prompt_weights / 10)


def test_bounds_count_no_hidden_scores(model_name):
    """A prompt's and a step's bounds are those of each token attending to what the mask lets it see."""
    config, tokens, machine = make_config(model_name), 23, Machine(bandwidth=1e18, rate=10.0)
    cost = report(config, contexts=[tokens], batch_sizes=[2], machine=machine).contexts[0]
    head, hidden = 2 * config.hidden_size * config.vocab_size, 0
    for layer in CostedModel(config).layers:
        pair = 2 * layer.config.num_attention_heads * 2 * layer.config.head_dim
        if layer.config.attention_kind == "mla":
            size = layer.config.qk_head_dim + layer.config.v_head_dim + key_mean_size(layer.config)
            pair = 2 * layer.config.num_attention_heads * size
        seen = sum(min(token, layer.window or tokens) for token in range(1, tokens + 1))
        hidden += pair * (tokens**2 - seen)
    assert hidden > 0
    of_layers = sum(layer.flops(tokens, tokens) for layer in CostedModel(config).layers)
    assert cost.prefill_seconds == pytest.approx(2 * (of_layers - hidden + head) / 10)
    assert cost.training_seconds == pytest.approx(6 * (of_layers - hidden + tokens * head) / 10)


@pytest.mark.parametrize("name", ["gqa", "mla", "mixed-window"])
def test_memory(name):
    """One more token, or one more row, does not fit."""
    config, weights = make_config(name), costs.count_parameters(make_config(name)) * 2
    for memory in (weights - 1, weights, weights + 5_000, weights + 50_001, weights + 10**7):
        fits = lambda rows, tokens, memory=memory: weights + costs.cache_bytes(config, rows, tokens) <= memory  # noqa: E731
        longest = costs.longest_context(config, memory, 3)
        assert longest is None or (not fits(3, longest + 1) and (longest == 0 or fits(3, longest)))
        shown = report(config, contexts=[9], batch_sizes=[3], memory=memory).contexts[0]
        assert shown.fits == fits(3, 9)
        batch = costs.largest_batch(config, memory, 9)
        assert not fits(batch + 1, 9) and (batch == 0 or fits(batch, 9))


def test_memory_of_windows_is_bounded():
    config = make_config("gqa", sliding_window=5)
    most = costs.count_parameters(config) * 2 + costs.cache_bytes(config, 2, 10**6)
    assert costs.longest_context(config, most, 2) is None
    assert costs.longest_context(config, most - 1, 2) == 4


# -- configurations by name


def test_configurations_that_are_found(tmp_path, monkeypatch):
    """A preset, a folder, a file, and a model on the Hub, whose fields that cost nothing are not looked at."""
    assert find_model("tiny-mla")[0].config.attention_kind == "mla"
    fields = json.loads(PRESETS["llama-3-8b"].read_text())
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(fields | {"no_rope_layers": [1] * 32, "quantization_config": {"quant_method": "fp8"}})
    )
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    monkeypatch.setattr("modeling_gqa.costs.configurations.hf_hub_download", lambda name, file: folder / file)
    for source in (str(folder), str(folder / "config.json"), "org/name"):
        model, dtype = find_model(source)
        assert costs.count_parameters(model) == PARAMETERS["llama-3-8b"]
        assert dtype == torch.bfloat16
    assert model.name == "org/name"


def test_configurations_that_are_refused(tmp_path):
    for content, said in {
        '{"model_type": "gemma2"}': "soft-caps",
        '{"model_type": []}': "not supported",
        "{": "cannot be read",
        '{"model_type": "llama", "hidden_size": "wide"}': "not valid",
        '{"model_type": "llama", "num_hidden_layers": 1000000000}': "num_hidden_layers=1000000000",
    }.items():
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(UserError, match=said):
            find_model(str(path))
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_model(str(Path(__file__).parent))
    with pytest.raises(UserError, match="did you mean llama-3-8b"):
        find_model("llama-3-8")


def test_changed():
    """Sizes that follow from a changed field are derived anew."""
    model = changed(find_model("llama-3-8b")[0], {"attention_kind": "mla"})
    assert (model.config.kv_lora_rank, model.config.qk_rope_head_dim) == (512, 64)
    assert model.name == "llama-3-8b, mla"
    with pytest.raises(UserError, match="not divisible"):
        changed(model, {"attention_kind": "gqa", "num_key_value_heads": 7})


def test_report_refuses_numbers_below_one():
    with pytest.raises(ValueError, match="contexts must be at least 1"):
        report(GQAConfig(), contexts=[0])
