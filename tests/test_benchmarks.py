"""The benchmarks run, on sizes at which their times mean nothing, and write what the README shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import (
    decode,
    measure,
    mixed_text,
    models,
    optimizers,
    prefill,
    quantized_cache,
    quantized_decode,
    real_conversion,
    report,
    training,
    uptraining,
)
from modeling_gqa.training import publish

SMALL = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
}
MACHINE = {"read_gb_s": 10.0, "matmul_gflop_s": {"float32": 100.0, "bfloat16": 100.0}}


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch):
    """The machine's rates take seconds to measure."""
    described = MACHINE | {"machine": "any", "torch": torch.__version__, "load_before": 0.0}
    for module in (
        decode,
        optimizers,
        uptraining,
        prefill,
        quantized_cache,
        quantized_decode,
        real_conversion,
        training,
    ):
        monkeypatch.setattr(module, "describe_machine", lambda device, dtypes: described)


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def assert_times(rows: list[dict], prefix: str = "") -> None:
    assert rows
    for row in rows:
        assert row[f"{prefix}ours_ms"] > 0 and row[f"{prefix}theirs_ms"] > 0 and row["floor_ms"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_decode(tmp_path):
    arguments = decode.DecodeArguments(
        lengths=[5, 9], batch_sizes=[1, 2], key_value_heads=[1, 4], budget=0.01, device="cpu", output=str(tmp_path)
    )
    decode.main(arguments, models.Sizes(**SMALL))
    results = read(tmp_path / "decode.json")
    assert len(results["rows"]) == 2 * 4 * 2 * 2
    assert_times(results["rows"] + results["by_heads"])
    assert {row["kind"] for row in results["memory"]} == {"mha", "gqa", "mqa", "mla"}
    assert all(1 <= row["over_theoretical"] <= 1.3 for row in results["memory"])


def test_prefill(tmp_path):
    arguments = prefill.PrefillArguments(
        lengths=[16], dtypes=["float32"], budget=0.01, device="cpu", output=str(tmp_path)
    )
    prefill.main(arguments, prefill.PrefillSizes(**SMALL))
    rows = read(tmp_path / "prefill.json")["rows"]
    assert_times(rows)
    assert [row["padding"] for row in rows] == ["none", "left"] * 4


def test_training(tmp_path):
    arguments = training.TrainingArguments(kinds=["gqa"], length=32, budget=0.01, device="cpu", output=str(tmp_path))
    training.main(arguments, training.TrainingSizes(**SMALL))
    (row,) = rows = read(tmp_path / "training.json")["rows"]
    assert_times(rows)
    assert row["ours_mib"] > 0 and row["theirs_mib"] > 0


@pytest.mark.parametrize("kind", models.BASELINES)
@torch.no_grad()
def test_both_sides_are_the_same_model(kind):
    ours, theirs = models.make_pair(kind, models.Sizes(**SMALL), torch.float32, "cpu")
    ids = torch.randint(101, (2, 7))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_llama(tmp_path) -> Path:
    """A folder with a Llama, a token for each of a hundred numbers, and in `text` the files that are measured on."""
    torch.manual_seed(0)
    words = Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(101)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes: dict[str, Any] = {k: SMALL[k] for k in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "Llama-3.2-1B")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "Llama-3.2-1B")
    generator = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for name in ("calibration", "tuning", "test", "test-other", "test-code"):
        rows = [" ".join(map(str, row)) for row in generator.integers(100, size=(24, 40))]
        content = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (tmp_path / "text" / f"{name}.jsonl").write_text(content, encoding="utf-8")
    return tmp_path


def test_real_conversion(small_llama):
    """Each method at each target on a small random model; parts are put together, and others' rows refused."""
    path, sizes = small_llama / "found.json", ["--tokens", "512", "--evaluation-tokens", "128", "--length", "32"]
    common = [str(small_llama / "Llama-3.2-1B"), "--text", str(small_llama / "text"), "--json", str(path), *sizes]
    own = ["--own-text", str(small_llama / "text" / "tuning.jsonl")]
    first = real_conversion.main([*common, *own, "--targets", "mla-1/2", "mqa"])
    assert [(row["target"], row["method"]) for row in first] == [
        *(("mla-1/2", name) for name in real_conversion.METHODS),
        *(("mqa", name) for name in ("default", "untrained", "own text")),
    ]
    targets = ["--targets", "mla-1/8", "mla-24+8", "mla-1/2"]
    rows = real_conversion.main([*common, *targets, "--methods", "mha2mla", "transmla"])
    assert rows == read(path)["rows"] and len(rows) == len(first) + 4
    source = 2 * 2 * 16 * 2 * 2  # bytes in bfloat16 of keys and values of two heads in two layers
    shares = {"mla-1/2": 2, "mla-1/8": 8, "mla-24+8": 2, "mqa": 2}
    for row in rows:
        assert row["bytes"] == source / shares[row["target"]]
        assert row["kl"] > 0 and row["kl_code"] > 0 and row["perplexity_other"] > 1 and row["seconds"] > 0
    kl = {(row["target"], row["method"]): row["kl"] for row in rows}
    assert kl["mla-1/2", "transmla"] == kl["mla-24+8", "transmla"]  # the same sizes
    assert kl["mla-1/2", "own text"] != kl["mla-1/2", "untrained"]
    with pytest.raises(SystemExit, match="name another file"):
        real_conversion.main([*common, "--length", "16"])


def test_quantized_cache(small_llama):
    """Fewer bits lose more; ours loses less; bytes count a scale of 16 bits for 16 numbers, ours also positions."""
    path, sizes = small_llama / "found.json", ["--evaluation-tokens", "128", "--length", "32"]
    folders = [str(small_llama / "Llama-3.2-1B"), "--text", str(small_llama / "text"), "--json", str(path)]
    first = quantized_cache.main([*folders, *sizes, "--formats", "int8", "--shares"])
    rows = quantized_cache.main([*folders, *sizes, "--shares", "0.4", "0.3"])
    assert rows == read(path)["rows"] and [row["cache"] for row in first] == ["int8"] * 2
    found = {(row["cache"], row["method"]): row for row in rows}
    kl = {key: row["kl"] for key, row in found.items()}
    assert len(kl) == 14  # without TurboQuant, which rounds neither of two layers
    assert 0 < kl["int8", "ours"] < kl["int4", "ours"] < kl["int3", "ours"] < kl["int2", "ours"]
    assert all(kl[name, "ours"] < kl[name, "plain"] for name in ("int8", "int4", "int3", "int2"))
    assert kl["bits by channel, 0.4", "coded"] < kl["bits by channel, 0.3", "coded"] < kl["int3", "ours"]
    assert 0.25 < found["bits by channel, 0.3", "coded"]["share"] <= 0.3
    shares = {name: found[name, "plain"]["share"] for name in ("fp8", "int8", "int6", "int4", "int3", "int2")}
    assert list(shares.values()) == [0.5, 9 / 16, 7 / 16, 5 / 16, 4 / 16, 3 / 16]
    assert found["fp8", "plain"]["bytes"] == 2 * 2 * 16 * 2 * 2 / 2  # half of bfloat16's
    assert found["int2", "ours"]["bytes"] == 2 * 2 * 2 * (2 * 16 / 8 + 2) + 4


def test_a_conversion_with_a_quantized_cache(small_llama):
    """A conversion that was kept is measured against its source, rounded or not, also trained.

    On random text training gains nothing that lasts; that it lowers the loss is tested in `test_cli.py`.
    """
    path, work = small_llama / "found.json", small_llama / "work"
    common = [str(small_llama / "Llama-3.2-1B"), "--text", str(small_llama / "text"), "--evaluation-tokens", "128"]
    common += ["--length", "32"]
    kept = ["--targets", "mla-1/2", "--methods", "transmla", "--work", str(work), "--json", str(small_llama / "a.json")]
    (converted,) = real_conversion.main([*common, "--tokens", "512", "--dtype", "float32", *kept])
    (folder,) = work.iterdir()
    more = [*common, "--json", str(path), "--converted", str(folder), "--label", "half", "--shares", "0.25"]
    rows = quantized_cache.main(more)
    assert [row["cache"] for row in rows] == ["half, 16 bits", "half, fp8", "half, bits by channel, 0.25"]
    assert rows.pop(1)["share"] == 0.25
    assert rows[0]["share"] == 0.5 and rows[0]["kl"] == pytest.approx(converted["kl"], rel=1e-3)
    assert 0.2 < rows[1]["share"] <= 0.25 and rows[1]["kl"] > 0
    trained = quantized_cache.main([*more, "--polish", "1024"])[-1]
    assert trained["method"] == "coded, 1024 tokens trained" and trained["share"] == rows[1]["share"]
    assert trained["kl"] == pytest.approx(rows[1]["kl"], rel=0.02)
    picture = small_llama / "picture.svg"
    report.plot_caches(read(path), [converted], picture)
    assert all(name in picture.read_text() for name in ("half, then", "TransMLA", "Llama-3.2-1B"))


def test_decoding_over_a_quantized_cache(tmp_path):
    """A row of each format; of MLA's 288 numbers in two layers four bits take 144 bytes and two scales a layer."""
    cells = ["--kinds", "mla", "--cells", "2x70", "--budget", "0", "--output", str(tmp_path)]
    rows = quantized_decode.main(cells)
    assert rows == read(tmp_path / "quantized_decode.json")["rows"]
    found = {row["cache"]: row["bytes_per_token"] for row in rows}
    assert len(found) == 8 and found["own"] == 2 * 288 * 2 and found["4"] == 2 * (144 + 4)
    assert 0.2 < found["coded"] / found["own"] < 0.25
    assert all(row["ratio"] > 0 for row in rows)


def test_a_page_of_wikipedia_becomes_plain_text():
    """Templates, notes, pictures, tables and sources go, also where one holds another; links leave their words."""
    page = """{{Infobox|a={{b}}}}
'''Albedo''' is [[Reflection (physics)|reflected]] light<ref name="x">note {{cite}}</ref> of a [[planet]].<!-- no -->
[[File:a.jpg|thumb|A [[planet]]]]

== Use ==
* see [http://a.org the site] <br/>
{| class="x"
| cell
|}
==References==
gone"""
    assert mixed_text.wiki_text(page) == "Albedo is reflected light of a planet.\n\nUse\n\nsee the site"


def test_a_plain_cache_rounds_to_the_nearest_level():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 16)
    zeros = torch.zeros(1, 1, 5, 16)
    assert torch.equal(quantized_cache.rounded(zeros, 4), zeros)
    plain = quantized_cache.rounded(x, 4)
    assert (plain - x).abs().max() <= (x.abs().amax(-1) / 7 / 2).max() * 1.001


def test_optimizers(small_llama, tmp_path):
    """A run for each row, with the recipe's other options; rows that are there are not run again."""
    sizes = {k: SMALL[k] for k in ("intermediate_size", "num_hidden_layers")} | {"hidden_size": 32, "vocab_size": 300}
    recipe = tmp_path / "recipe.yaml"
    values = {"preset": "tiny-gqa", "model_overrides": sizes, "data_files": [str(small_llama / "text")]}
    recipe.write_text(json.dumps(values | {"sequence_length": 32, "max_eval_blocks": 4}))
    path = tmp_path / "found.json"
    command = ["--recipe", str(recipe), "--json", str(path), "--steps", "2", "--rates", "1e-2"]
    command += ["--optimizers", "muon", "--overrides", "--warmup-steps 1"]
    (first,) = optimizers.main([*command, "--seeds", "1"])
    rows = optimizers.main([*command, "--seeds", "1", "2"])
    assert rows == read(path)["rows"] and rows[0] == first and [row["seed"] for row in rows] == [1, 2]
    assert all(row["tokens"] == 2 * 8 * 32 and row["loss"] > 0 for row in rows)
    table = report.optimizers_table(rows)
    assert "| Muon, --warmup-steps 1 | 2 |" in table and "(2 seeds)" in table
    latent = [*command[:-1], "--preset tiny-mla", "--seeds", "1", "--optimizers", "muon", "muon-apart"]
    whole, apart = optimizers.main(latent)[-2:]
    assert 0 < abs(whole["loss"] - apart["loss"]) < 0.1
    other = recipe.rename(tmp_path / "other.yaml")
    command[1] = str(other)
    assert [row["recipe"] for row in optimizers.main([*command, "--seeds", "1"])] == [str(recipe)] * 4 + [str(other)]


def test_uptraining(small_llama, monkeypatch):
    """What is trained is measured before and after; what is done is not done again, and other settings replace it."""
    path, words = small_llama / "found.json", AutoTokenizer.from_pretrained(small_llama / "Llama-3.2-1B")
    words.eos_token = "100"  # which no text holds
    words.save_pretrained(small_llama / "Llama-3.2-1B")
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")
    command = [str(small_llama / "Llama-3.2-1B"), f"--text={small_llama / 'text'}", f"--work={small_llama / 'work'}"]
    command += ["--targets", "control", "mla-1/4", "--tokens=128", "--calibration-tokens=256", "--length=32"]
    command += ["--evaluation-tokens=128", "--train-length=32", f"--json={path}"]
    given = ["--set", "use_cpu=true", "validation_fraction=0.1", "learning_rate=0.001"]
    rows = uptraining.main([*command, *given])
    assert rows == read(path)["rows"]
    points = {(row["model"], row["tokens"]): row for row in rows}
    assert points.keys() == {(model, tokens) for model in ("control", "mla-1/4") for tokens in (0, 128)}
    assert points["control", 0]["kl"] == pytest.approx(0, abs=1e-6) and points["mla-1/4", 0]["kl"] > 0
    uptrained = points["mla-1/4", 128]
    assert uptrained["set"] == given[1:] and uptrained["tokens_per_second"] > 0 and uptrained["kl_code"] > 0
    assert uptrained["perplexity"] != points["mla-1/4", 0]["perplexity"]
    assert f"{uptrained['perplexity']:.2f} ({uptrained['kl']:.3f}, " in report.uptrained_table(rows)

    with monkeypatch.context() as patched:
        patched.setattr(uptraining, "uptrain", None)
        patched.setattr(uptraining, "polished", None)
        assert uptraining.main([*command, *given]) == rows
        with pytest.raises(SystemExit, match="name another file"):
            uptraining.main([*command, "--train-batch", "3"])
    other = uptraining.main([*command, *given[:-1], "learning_rate=0.01"])
    assert len(other) == len(rows) and other[-1]["kl"] != uptrained["kl"] and other[:2] == rows[:2]


def test_the_floor_is_the_longer_of_reading_and_computing():
    machine = {"read_gb_s": 1.0, "matmul_gflop_s": {"float32": 2.0}}
    assert measure.floor_milliseconds(machine, torch.float32, 3e6, 2e6) == pytest.approx(3)
    assert measure.floor_milliseconds(machine, torch.float32, 3e6, 8e6) == pytest.approx(4)


def test_ratios_are_of_rounds_and_spread_over_them():
    assert measure.ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5}
