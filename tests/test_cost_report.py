"""The command `modeling-gqa report`: what it finds, prints, measures and draws, and what it refuses."""

import json
import sys
from itertools import chain, cycle, pairwise, repeat

import command
import pytest
import torch
from small_models import MODELS, make_config, make_model
from transformers import Gemma3Config

from modeling_gqa import GQAConfig, costs
from modeling_gqa.common import console
from modeling_gqa.common.atomic import write_json
from modeling_gqa.common.pictures import COLORS
from modeling_gqa.common.tables import Table, in_bytes, with_prefix
from modeling_gqa.costs import CostedModel, Machine, measuring
from modeling_gqa.costs.comparison import plot_costs
from modeling_gqa.costs.configurations import find_model
from modeling_gqa.costs.measuring import machine_name, measure_decoding
from modeling_gqa.modeling_gqa import ATTENTION_CLASSES

MACHINE = ("--bandwidth", "3350", "--rate", "989")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setattr(console.out, "width", 200)


def call(*arguments):
    return command.call("report", *arguments)


def printed(*arguments) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def in_json(*arguments) -> dict:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments) -> str:
    result = call(*arguments)
    assert result.exit_code != 0, result.output
    return " ".join(result.output.split())


def test_json_is_the_report():
    """Everything that Python's `report` returns."""
    found = in_json("llama-3-8b", "tiny-mla", *MACHINE, "--memory", 80, "--context", 4096, "--batch-size", 4)
    machine = Machine(3350e9, 989e12)
    for name, shown in zip(("llama-3-8b", "tiny-mla"), found["models"], strict=True):
        options = {"contexts": [4096], "batch_sizes": [4], "memory": 80 * 2**30, "machine": machine}
        assert shown == json.loads(json.dumps(costs.report(find_model(name)[0], **options).to_dict()))
    assert found["measured"] == []


def test_options_make_one_more_configuration():
    """The first one with other sizes, or without any this package's default."""
    found = in_json("llama-3-8b", "--attention-kind", "mla", "--kv_lora_rank", 256, "--dtype", "float32")
    assert [model["name"] for model in found["models"]] == ["llama-3-8b", "llama-3-8b, mla"]
    assert [model["cache_bytes_per_token"] for model in found["models"]] == [4 * 32 * 2048, 4 * 32 * (256 + 64)]
    (alone,) = in_json("--hidden-size", 512, "--num-attention-heads", 8)["models"]
    config = GQAConfig(hidden_size=512, num_attention_heads=8)
    assert alone["name"] == "default, hidden_size=512, num_attention_heads=8"
    assert alone["parameters"] == costs.count_parameters(config)
    assert [model["name"] for model in in_json()["models"]] == ["default"]
    (kind,) = in_json("--hidden-size", 384, "--attention-kind", "mqa")["models"]
    assert (kind["name"], kind["layers"][0]["cached_numbers"]) == ("default, mqa", 2 * 384 // 12)


def test_models_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        make_config("gqa").save_pretrained(tmp_path / parent / "model")
    names = [model["name"] for model in in_json(tmp_path / "a" / "model", tmp_path / "b" / "model")["models"]]
    assert names == [f"model ({tmp_path / parent / 'model'})" for parent in ("a", "b")]
    again = [model["name"] for model in in_json("tiny-gqa", "tiny-gqa", "tiny-gqa")["models"]]
    assert again == ["tiny-gqa (tiny-gqa)", "tiny-gqa (tiny-gqa) no. 2", "tiny-gqa (tiny-gqa) no. 3"]


def test_names_are_printable(tmp_path):
    make_config("gqa").save_pretrained(tmp_path / "red\x1b[31m $\\frac$")
    said = printed(tmp_path / "red\x1b[31m $\\frac$", "--plot", tmp_path / "a.png", "--context", 9)
    assert "\x1b[31m" not in said
    assert "red\\x1b[31m" in said


def test_a_kind_replaces_those_of_all_layers():
    (_, mla) = in_json("tiny-mixed", "--attention-kind", "mla")["models"]
    assert {layer["attention_kind"] for layer in mla["layers"]} == {"mla"}


def test_sizes_of_a_cache_with_bits_by_layer_stay(tmp_path):
    """Its blocks of channels belong to them; other fields may change."""
    blocks = {"layers": [{"key_bits": [[64, 4]], "value_bits": [[64, 2]]}] * 2}
    make_model(
        "gqa", num_hidden_layers=2, head_dim=32, num_key_value_heads=2, cache_quantization=blocks
    ).config.save_pretrained(tmp_path)
    assert "bits for the layers of its cache" in refused(tmp_path, "--num-key-value-heads", 1)
    assert "bits for the layers of its cache" in refused(tmp_path, "--attention-kind", "mla")


def test_the_text_part_of_a_multimodal_model_is_reported(tmp_path):
    """A Gemma 3 that reads images, by its config.json alone."""
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    model, _ = find_model(str(tmp_path))
    assert model.config.hidden_size == 64 and model.config.num_hidden_layers == 2


def test_windows_and_room(tmp_path):
    """A window is shown, no context is too long for it, and a cache that does not fit is said to be too large."""
    make_config("gqa", sliding_window=5).save_pretrained(tmp_path / "window")
    said = printed(tmp_path / "window", "--context", 9, "--memory", 1)
    assert "window of 5" in said
    assert "any number" in said
    assert "too large" not in said
    assert "too large" in printed("tiny-mha", "--context", 10**6, "--memory", 0.5)
    assert "any number" not in printed("tiny-mla", "--memory", 10**9)


def test_dtype_is_the_first_configurations(tmp_path):
    make_config("gqa", dtype="float32").save_pretrained(tmp_path / "f32")
    assert [model["dtype"] for model in in_json(tmp_path / "f32", "tiny-mla")["models"]] == ["float32"] * 2
    assert in_json("tiny-mla", tmp_path / "f32")["models"][1]["dtype"] == "bfloat16"


def test_a_machines_name_has_its_instructions():
    """Which decide how long a conversion takes; a processor's name does not say them."""
    name = machine_name("cpu")
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next(line.split() for line in lines if line.startswith("flags"))
    assert ("AVX-512" in name) == ("avx512f" in flags and "amx_tile" not in flags)
    assert ("AMX" in name) == ("amx_tile" in flags) and name.endswith("thread" + "s" * (torch.get_num_threads() > 1))


def test_numbers_with_units():
    assert [with_prefix(x) for x in (0, 0.123, 9.999, 999, 999.9, 1000, 123_456, 8_030_261_248, 2e18)] == [
        "0", "0.12", "10", "999", "1 k", "1 k", "123 k", "8.03 G", "2,000 P",
    ]  # fmt: skip
    assert [in_bytes(x) for x in (0, 1023, 1024, 1536, 2**31, 5 * 2**50)] == [
        "0 B", "1,023 B", "1 KiB", "1.5 KiB", "2 GiB", "5,120 TiB",
    ]  # fmt: skip
    assert Table(["", "n"], [["a", "1"]]).to_markdown() == "|  | n |\n| --- | ---: |\n| a | 1 |"


# -- measuring


def test_measuring(monkeypatch, tmp_path):
    """Models are timed in turn; here their tokens take 1, 2 and 4 seconds, however long they do."""
    monkeypatch.setattr(measuring, "matmul_rate", lambda device, dtype: 1e9)
    monkeypatch.setattr(measuring, "read_bandwidth", lambda device: 1e9)
    took = chain.from_iterable(repeat(seconds, measuring.STEPS) for seconds in cycle((1.0, 2.0, 4.0)))
    monkeypatch.setattr(measuring, "seconds", lambda function, device: (function(), next(took))[1])
    sources = []
    for name in ("gqa", "mla", "mixed-window"):
        make_config(name).save_pretrained(tmp_path / name)
        sources.append(tmp_path / name)
    found = in_json(*sources, "--measure", "--device", "cpu", "--context", 9, "--context", 40, "--batch-size", 2)
    assert [(token["batch_size"], token["context"]) for token in found["measured"]] == [(2, 9), (2, 40)]
    for token in found["measured"]:
        assert token["milliseconds"] == {"gqa": 1000, "mla": 2000, "mixed-window": 4000}
        assert token["ratio"] == {"gqa": 1, "mla": 2, "mixed-window": 4}
    assert found["models"][0]["machine"]["bandwidth"] == 1e9
    assert "Measured here: milliseconds" in printed(*sources[:2], "--measure", "--context", 9)


def test_measured_tokens_follow_what_is_cached(model_name, monkeypatch):
    """Every timed token is decoded after the number of tokens that is asked for, in each round again."""
    model, lengths = CostedModel(make_config(model_name), model_name), []
    forward = measuring.GQAForCausalLM.forward

    def counted(self, ids, past_key_values, **kwargs):
        lengths.append(past_key_values.get_seq_length())
        return forward(self, ids, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(measuring.GQAForCausalLM, "forward", counted)
    show_progress = lambda description: lambda cells: cells  # noqa: E731
    measure_decoding([model], [11], [2], torch.float32, "cpu", show_progress, budget=0.0)
    turns = [lengths[start : start + measuring.STEPS] for start in range(0, len(lengths), measuring.STEPS)]
    assert len(turns) == 4
    windows = model.config.sliding_window is not None
    expected = [11 + turn * measuring.STEPS * windows for turn in range(4)]
    assert turns == [list(range(start, start + measuring.STEPS)) for start in expected]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_measured_tokens_over_a_cache_in_bases_of_its_layers(kind):
    """As `quantize-cache --cache-share` makes them; of grouped attention, one basis for all heads together."""
    config = make_config(kind)
    attention = ATTENTION_CLASSES[kind]
    bits = [
        {name: [[size, 4]] for name, size in zip(attention.bits_fields, attention.cache_sizes(layer), strict=True)}
        for layer in config.per_layer_config
    ]
    model = CostedModel(make_config(kind, cache_quantization={"layers": bits}), kind)
    (found,) = measure_decoding([model], [11], [2], torch.float32, "cpu", lambda name: lambda x: x, budget=0.0)
    assert found.context == 11 and found.milliseconds[kind] > 0


def test_the_rate_of_this_machine():
    """It is that of a product, and stops at sizes that take long."""
    rate = measuring.matmul_rate("cpu", torch.float32)
    matrix = torch.randn(256, 256)
    least = min(measuring.seconds(lambda: torch.nn.functional.linear(matrix, matrix), "cpu") for _ in range(5))
    assert rate >= 0.2 * 2 * 256**3 / least


# -- pictures


def test_picture_shows_cache_and_bound():
    """A line for each model, in its kind's colour, with its values, named at its end."""
    models = [CostedModel(make_config(name), name) for name in MODELS]
    machine = Machine(1e9, 1e12)
    figure = plot_costs(models, machine, 4, 300, torch.float32)
    cache, bound = figure.axes
    for axis, value in (
        (cache, lambda config: costs.cache_bytes(config, 4, 300, torch.float32) / 2**20),
        (bound, lambda config: 1000 * costs.decode_seconds(config, machine, 4, 300, torch.float32)),
    ):
        assert [line.get_ydata()[-1] for line in axis.lines] == [value(model.config) for model in models]
        assert sorted(text.get_text() for text in axis.texts) == sorted(model.name for model in models)
        assert all(line.get_xdata()[-1] == 300 for line in axis.lines)
        heights = sorted(text.xy[1] for text in axis.texts)
        assert all(after - before > 0.07 for before, after in pairwise(heights))
    colours = {model.name: line.get_color() for model, line in zip(models, cache.lines, strict=True)}
    assert colours["mla"] == COLORS["mla"]
    strokes = {(line.get_color(), line.get_linestyle()) for line in cache.lines[:4]}
    assert len(strokes) == 4
    figure.draw_without_rendering()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_plot(tmp_path, suffix):
    path = tmp_path / "new" / f"costs.{suffix}"
    assert f"Wrote {path}." in " ".join(printed("tiny-mla", "--plot", path, "--context", 1).split("\n"))
    assert path.stat().st_size > 1000


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "a picture needs matplotlib: pip install '.[plots]'" in refused("tiny-mla", "--plot", tmp_path / "a.png")


# -- wrong input

WRONG = {
    "name": (["llama-3-8"], "that can be read (did you mean llama-3-8b?)"),
    "half a machine": (["tiny-mla", "--rate", 1], "a bound needs both --bandwidth and --rate"),
    "no bandwidth": (["tiny-mla", "--rate", 1, "--bandwidth", 0], "--bandwidth 0 must be more than 0"),
    "no memory": (["tiny-mla", "--memory", -1], "--memory -1 must be more than 0"),
    "no number": (["tiny-mla", "--memory", "nan"], "--memory nan must be more than 0"),
    "too much": (["tiny-mla", "--memory", 1e308], "--memory 1e+308 must be more than 0, and at most 1e+09"),
    "too long": (["tiny-mla", "--context", "1" + 99 * "0"], "--context and --batch-size must be from 1 to 2147483647"),
    "empty": ([""], "a CONFIG is empty"),
    "two machines": (["tiny-mla", "--measure", "--rate", 1], "leave out --bandwidth and --rate"),
    "context": (["tiny-mla", "--context", 0], "--context and --batch-size must be from 1 to 2147483647"),
    "size": (
        ["tiny-gqa", "--num-key-value-heads", 3],
        "num_attention_heads=8 is not divisible by num_key_value_heads=3",
    ),
    "kind": (["tiny-gqa", "--attention-kind", "gqaa"], "--attention-kind: invalid choice: 'gqaa'"),
    "sizes of another kind": (["tiny-gqa", "--kv-lora-rank", 4], "kv_lora_rank=4 belongs to attention_kind='mla'"),
    "device alone": (["tiny-gqa", "--device", "cpu"], "--device says what --measure measures: give both"),
    "device": (["tiny-gqa", "--measure", "--device", "nowhere"], "--device=nowhere cannot be used"),
    "too large": (["llama-3-8b", "--measure", "--batch-size", 4000], "GiB of memory and"),
    "picture": (["tiny-gqa", "--plot", "costs.xyz"], "costs.xyz names no picture: let it end in .png, .svg, .pdf"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input(wrong, monkeypatch):
    arguments, said = WRONG[wrong]
    monkeypatch.setattr(measuring, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(measuring, "matmul_rate", lambda device, dtype: 1e9)
    message = refused(*arguments)
    assert said in message
    assert "Traceback" not in message


def test_results_are_strict_json(tmp_path):
    """What JSON does not have becomes null or text; a file is replaced whole."""
    results = {"loss": float("nan"), "rates": {1e-3: float("inf")}, "dtype": torch.float32, "many": (1, None, True)}
    expected = {"loss": None, "rates": {"0.001": None}, "dtype": "torch.float32", "many": [1, None, True]}
    path = tmp_path / "results.json"
    for value, found in (("old", "old"), (results, expected)):
        write_json(path, value)
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == found
    assert list(tmp_path.iterdir()) == [path]
