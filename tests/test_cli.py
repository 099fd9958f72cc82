"""The command `modeling-gqa`, called as its users call it; and every wrong input, which must leave nothing behind."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call, run
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_models import SIZES, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import modeling_gqa
from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.checkpoints.checkpoint import Checkpoint
from modeling_gqa.common import console
from modeling_gqa.conversion import job
from modeling_gqa.conversion.fitting import PASSES
from modeling_gqa.conversion.frontier import recommendation
from modeling_gqa.conversion.options import Options
from modeling_gqa.conversion.report import FORMAT_VERSION
from modeling_gqa.costs import cache_bytes_per_token
from modeling_gqa_cli import conversion as commands
from modeling_gqa_cli.errors import install_extra
from modeling_gqa_cli.main import COMMANDS

BYTES = 256
KEYS = "model.layers.0.self_attn.k_proj.weight"
SMALL = {"vocab_size": BYTES, "head_dim": 12}
LAYERS, HEADS, HEAD_DIM = SIZES["num_hidden_layers"], SIZES["num_attention_heads"], SMALL["head_dim"]


def byte_tokenizer(size: int = BYTES) -> PreTrainedTokenizerFast:
    """A token for every byte, and fillers beyond."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet += [f"<{i}>" for i in range(len(alphabet), size)]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Folders of small models, `mha`, `gqa` and so on, with a tokenizer and a licence."""
    root = tmp_path_factory.mktemp("checkpoints")
    overrides: dict[str, dict[str, Any]] = {
        "mha-qk-norm": {"qk_norm": True},
        "mla-free": {"latent_norm": False},
        "mla-qk-norm": {"qk_norm": True, "qk_norm_head_dim": 15, "qk_norm_key_value_heads": 2},
        "mqa-bf16": {"tie_word_embeddings": True},
    }
    for name in ("mha", "gqa", "mqa", "mixed-window", *overrides):
        model = make_model(
            next(k for k in ("mixed-window", "mha", "gqa", "mqa", "mla") if name.startswith(k)),
            **{**SMALL, **overrides.get(name, {})},
        )
        model.generation_config.max_new_tokens = 17
        model.to(torch.bfloat16 if name.endswith("bf16") else torch.float32).save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
        (root / name / "README.md").write_text("---\nlicense: mit\n---\n")
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(0)
    for i in range(40):
        letters = torch.randint(97, 123, (100,), generator=generator).tolist()
        (folder / f"{i}.txt").write_bytes(bytes(letters))
    return folder


TEXT_OPTIONS = ("--sequence-length", 32, "--calibration-tokens", 640, "--evaluation-tokens", 320, "--polish", 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name not in ("serve", "chat"))])
def test_help_fits_a_screen(name, monkeypatch):
    """Ours first; TrainingArguments' options are behind `--help-all`."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = call(*filter(None, [name]), "--help")
    assert shown.exit_code == 0 and shown.stdout.startswith("usage: modeling-gqa")
    assert shown.stdout.count("\n") <= 65 and max(map(len, shown.stdout.splitlines())) <= 120
    options = set(re.findall(r"^  (?:--[a-z-]+, )?(--[\w-]+)", shown.stdout, re.MULTILINE))
    assert not [option for option in options if "_" in option] and "--hub-token" not in options
    if name == "convert":
        fields = {item.name for item in dataclasses.fields(Options)} - {"source", "target", "engine"}
        assert {f"--{item.replace('_', '-')}" for item in fields} | {"--for", "--force", "--dry-run"} == options


def test_options_are_read_in_both_spellings(checkpoints, tmp_path):
    reports = []
    for name, spelled in (("kebab", "{}".format), ("snake", lambda option: "--" + option[2:].replace("-", "_"))):
        run(
            "convert", checkpoints / "mha", tmp_path / name, spelled("--attention-kind"), "gqa",
            spelled("--num-key-value-heads"), 2, spelled("--no-regroup"), spelled("--batch-size"), 2,
        )  # fmt: skip
        reports.append(json.loads((tmp_path / name / "conversion.json").read_text())["command"])
    assert reports[0] | {"target": ""} == reports[1] | {"target": ""} and reports[0]["regroup"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "no command frob"),
        (["covert"], "did you mean convert?"),
        (["convert", "a", "b", "--attention-kind", "gaq"], "invalid choice: 'gaq'"),
        (["convert", "a", "b", "--attention-kind", "gqa", "--num-key-valu-heads", "2"], "--num-key-value-heads"),
        (["convert", "a", "b", "c", "--attention-kind", "gqa"], "unexpected argument c"),
        (["inspect"], "SOURCE"),
        *(
            (["convert", "a", "b", "--attention-kind", "mqa", *options], options[0])
            for options in (
                ("--dtype", "float99"), ("--layers", "3-1"), ("--layers", "a"), ("--layers", "0-999999999999"),
                ("--method", "magic"), ("--for", "tgi"), ("--for", ""), ("--no-such-option",), ("--seed", "1.5"),
            )
        ),
        (["pretrain"], "quickstart"),
        (["pretrain", "tinny"], "no recipe at tinny (did you mean tiny?)"),
        (["pretrain", "a/b"], "no recipe at a/b; there are base-124m, base-1b, quickstart, tiny, and paths"),
        (["pretrain", "tiny", "--max-step", "3"], "did you mean --max-steps?"),
        (["pretrain", "tiny", "--adam-beta3=1"], "did you mean --adam-beta"),
        (["pretrain", "tiny", "--max-steps", "soon"], "invalid int value: 'soon'"),
        (["uptrain", "tiny"], "tiny is a recipe for pretrain: modeling-gqa pretrain tiny"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_usage_is_one_line(arguments, said):
    result = call(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert said in result.stderr and result.stdout == ""


@pytest.mark.processes
def test_help_version_and_wrong_usage_need_no_torch():
    code = """if True:
    import sys
    sys.modules.update(dict.fromkeys(["torch", "modeling_gqa", "accelerate"], None))
    from modeling_gqa_cli.main import main
    for arguments in (["--version"], ["--help"], ["convert", "--help"], ["report", "--help"], ["pretrain", "--help"],
                      ["frob"], ["convert", "a"], ["pretrain", "tinny"]):
        try:
            main(arguments)
        except SystemExit as ended:
            print(ended.code or 0)
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall(r"^\d$", process.stdout, re.MULTILINE) == list("00000222"), process.stdout
    assert f"modeling-gqa {modeling_gqa.__version__}" in process.stdout


def test_convert_measures_reports_and_saves_a_repository(checkpoints, corpus, tmp_path):
    target, held_out = tmp_path / "deep" / "small-gqa", tmp_path / "held-out.txt"
    held_out.write_text("the quick brown fox jumps over the lazy dog, and so on; the end.")  # two blocks of 32
    printed = run(
        "convert", checkpoints / "mha", target, "--attention-kind", "gqa", "--num-key-value-heads", 2,
        "--method", "lowrank", "--text", corpus, "--evaluation-text", held_out, *TEXT_OPTIONS,
    )  # fmt: skip
    report = json.loads((target / "conversion.json").read_text())

    # The numbers again, from the saved folders, by transformers' own loss, on the blocks that the text has.
    blocks = torch.tensor(AutoTokenizer.from_pretrained(target)(held_out.read_text())["input_ids"]).view(2, 32)
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (checkpoints / "mha", target)]
    perplexities = [model(blocks, labels=blocks).loss.exp().item() for model in models]
    assert [report["perplexity_before"], report["perplexity_after"]] == pytest.approx(perplexities, rel=1e-4)
    assert report["tokens"] == 62 and report["kl"] > 0 and 0 <= report["top1_agreement"] <= 1
    assert report["text"]["calibration_tokens"] == 640 and report["text"]["evaluation_tokens"] == 64

    assert report["format_version"] == FORMAT_VERSION == 1 and report.keys() == {
        *("format_version", "source", "source_family", "dtype", "device", "command", "versions", "seconds", "serving"),
        *(
            f"{name}_{when}"
            for name in ("cache_bytes_per_token", "parameters", "perplexity")
            for when in ("before", "after")
        ),
        *("kl", "top1_agreement", "tokens", "text", "exact", "method", "setting", "layers", "candidates", "polish"),
    }
    tokens = {f"{part}_tokens" for part in ("calibration", "selection", "evaluation")}
    assert report["text"].keys() == {"files", "evaluation_files", "sequence_length", *tokens}
    assert report["method"] == "lowrank" and not report["exact"] and report["source_family"] == "gqa"
    per_head = 2 * HEAD_DIM * 4 * LAYERS  # bytes of keys and values
    assert report["cache_bytes_per_token_before"] == HEADS * per_head
    assert report["cache_bytes_per_token_after"] == 2 * per_head
    assert [report[f"parameters_{when}"] for when in ("before", "after")] == [m.num_parameters() for m in models]
    assert len(report["layers"]) == LAYERS and all(0 < row["error"] < 2 and row["loss"] > 0 for row in report["layers"])
    assert report["command"]["num_key_value_heads"] == 2 and report["command"]["text"] == [corpus.name]
    assert {"converting", "measuring", "saving"} <= report["seconds"].keys() and "torch" in report["versions"]

    for text in (f"{report['perplexity_after']:.4f}", f"{report['kl']:.3g}", f"{2 * per_head:,}", "lowrank"):
        assert text in printed
        assert text in (target / "README.md").read_text()
    assert "license: mit" in (target / "README.md").read_text()
    for name in ("tokenizer.json", "generation_config.json"):
        assert (target / name).read_bytes() == (checkpoints / "mha" / name).read_bytes()
    assert (target / "modeling_gqa.py").exists()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith(".")) == []


@pytest.mark.parametrize("name", ["convert", "import", "export"])
def test_what_is_saved_tells_nothing_of_this_machine(name, checkpoints, corpus, tmp_path, monkeypatch):
    """Of what a command was given, the result holds the last part of each path and no more."""
    home = tmp_path / "TELLTALE-home" / "TELLTALE-work"
    shutil.copytree(checkpoints / "mha", home / "source")
    if name == "import":
        run("export", home / "source", home / "llama")
        shutil.rmtree(home / "source")
        (home / "llama").rename(home / "source")
    shutil.copytree(corpus, home / "TELLTALE-texts" / "corpus")
    rows = [json.dumps({"text": path.read_text()}) for path in corpus.iterdir()]
    (home / "TELLTALE-texts" / "rows.jsonl").write_text("\n".join(rows))
    for file, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        content = json.loads((home / "source" / file).read_text())
        (home / "source" / file).write_text(json.dumps({**content, key: str(home / "source")}))
    monkeypatch.chdir(home)
    monkeypatch.setenv("USER", "TELLTALE-user")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("platform.node", lambda: "TELLTALE-host")
    monkeypatch.setattr("socket.gethostname", lambda: "TELLTALE-host")
    texts = ("--text", "TELLTALE-texts/rows.jsonl", "--evaluation-text", home / "TELLTALE-texts" / "corpus")
    run(
        name,
        "source",
        "TELLTALE-results/out",
        *((*MQA, *texts, "--method", "mean", *TEXT_OPTIONS) * (name == "convert")),
    )

    files = [path for path in (home / "TELLTALE-results" / "out").rglob("*") if path.is_file()]
    assert {"config.json", "tokenizer_config.json", "model.safetensors"} <= {path.name for path in files}
    for path in files:
        # None of these is packed, so that their bytes are what they say.
        assert path.suffix in (".json", ".md", ".py", ".safetensors"), path
        assert b"TELLTALE" not in path.read_bytes() and str(tmp_path).encode() not in path.read_bytes(), path
    if name == "convert":
        report = json.loads((home / "TELLTALE-results" / "out" / "conversion.json").read_text())
        assert report["source"] == report["command"]["source"] == "source" and report["command"]["target"] == "out"
        assert report["command"]["text"] == report["text"]["files"] == ["rows.jsonl"]
        assert report["command"]["evaluation_text"] == report["text"]["evaluation_files"] == ["corpus"]
        assert "base_model" not in (home / "TELLTALE-results" / "out" / "README.md").read_text()
    assert inspected(home / "TELLTALE-results" / "out")["source"] == "out"


@pytest.fixture
def cached(checkpoints, tmp_path, monkeypatch) -> Path:
    """Folder of org/name in an offline Hub cache: a model in bfloat16, whose configuration does not say so."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    folder = repository / "snapshots" / ("1" * 40)
    shutil.copytree(checkpoints / "mqa-bf16", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in config if name != "dtype"}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    return folder


def test_a_name_on_the_hub_is_converted_as_its_folder(cached, tmp_path):
    for name, source in (("by-name", "org/name"), ("by-path", cached)):
        run("convert", source, tmp_path / name, "--attention-kind", "mha")
        assert {x.dtype for x in load_file(tmp_path / name / "model.safetensors").values()} == {torch.bfloat16}
    report = json.loads((tmp_path / "by-name" / "conversion.json").read_text())
    assert report["dtype"] == "bfloat16" and report["source"] == report["command"]["source"] == "org/name"
    assert "base_model: org/name" in (tmp_path / "by-name" / "README.md").read_text()
    large_tokenizer(cached)
    result = call("convert", "org/name", tmp_path / "out", "--attention-kind", "mha")
    assert result.exit_code == 1 and "error: the tokenizer does not match" in result.stderr
    assert not (tmp_path / "out").exists()


def test_qk_norm_to_mla_and_what_that_is_exported_to(checkpoints, corpus, tmp_path):
    """Through Qwen3's class and back to MLA: the report's sizes, and a model that answers as it is loaded."""
    run("export", checkpoints / "mha-qk-norm", tmp_path / "qwen3")
    options = ("--attention-kind", "mla", "--cache-size", 72, "--method", "lowrank", "--text", corpus, *TEXT_OPTIONS)
    run("convert", tmp_path / "qwen3", tmp_path / "mla", *options)
    report = json.loads((tmp_path / "mla" / "conversion.json").read_text())
    assert report["source_family"] == "qwen3" and report["cache_bytes_per_token_after"] == 72 * 4 * LAYERS
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mla")
    assert model.config.qk_norm and model.config.qk_norm_key_value_heads == HEADS
    assert model.config.format_version == 4 and report["parameters_after"] == model.num_parameters()
    assert "no conversion begins" in call("convert", tmp_path / "mla", tmp_path / "x", *MQA).stderr
    assert "qk_norm=True" in call("export", tmp_path / "mla", tmp_path / "x").stderr


def test_auto_tries_candidates_and_keeps_the_least_kl(checkpoints, corpus, tmp_path):
    printed = run("convert", checkpoints / "mha", tmp_path / "out", "--attention-kind", "mqa", "--no-regroup",
                  "--method", "auto", "--text", corpus, *TEXT_OPTIONS)  # fmt: skip
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    kls = [candidate["kl"] for candidate in report["candidates"]]
    tried = report["setting"] | {"refine": 0}  # gradient steps come when the setting is chosen
    chosen = " ".join(f"{name}={value}" for name, value in tried.items() if name != "seed")
    assert len(kls) == 2 and chosen == report["candidates"][kls.index(min(kls))]["name"]
    assert re.search(r"sizes and settings tried +2\b", printed)
    assert report["text"]["selection_tokens"] == 160


def test_refining_is_an_option_that_needs_text(checkpoints, corpus, tmp_path):
    """Gradient steps are the default; they the report names and which change the result."""
    options = ("--text", corpus, *TEXT_OPTIONS, *MQA)
    run("convert", checkpoints / "gqa", tmp_path / "plain", *options, "--refine", 0)
    run("convert", checkpoints / "gqa", tmp_path / "refined", *options)
    reports = [json.loads((tmp_path / name / "conversion.json").read_text()) for name in ("plain", "refined")]
    assert [report["setting"]["refine"] for report in reports] == [0, PASSES]
    assert reports[0]["method"] == "lowrank" and all(report["setting"]["refit"] for report in reports)
    keys = [load_file(tmp_path / name / "model.safetensors")[KEYS] for name in ("plain", "refined")]
    assert not torch.equal(*keys)
    for option in (("--refine", 3), ("--refit",), ("--polish", 3)):
        result = call("convert", checkpoints / "gqa", tmp_path / "out", *MQA, *option)
        assert result.exit_code == 1 and result.stderr.startswith(f"error: {option[0]} needs --text"), result.stderr
    for option in (("--refine", -1), ("--polish", -1), ("--batch-size", 0), ("--batch-size", 2**70)):
        assert call("convert", checkpoints / "gqa", tmp_path / "out", *options, *option).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_polishing_is_reported(checkpoints, corpus, tmp_path):
    """The first line names the memory with it and without, and the card what it did."""
    options = ("--text", corpus, *TEXT_OPTIONS, *MQA, "--polish", 600)
    printed = run("convert", checkpoints / "gqa", tmp_path / "polished", *options)
    report = json.loads((tmp_path / "polished" / "conversion.json").read_text())
    done = report["polish"]
    assert done["kl_after"] <= done["kl_before"] and done["tokens"] <= 600 and report["command"]["polish"] == 600
    assert "with --polish 0" in printed
    assert f"| tokens trained on at the end | {done['tokens']:,} |" in (tmp_path / "polished" / "README.md").read_text()


def test_polishing_is_the_default_where_memory_allows(checkpoints, corpus, tmp_path, monkeypatch):
    """It takes twice the tokens that calibrate. No method of the GQA paper is trained, and no exact conversion."""
    options = ("--text", corpus, *TEXT_OPTIONS[:-2])
    mean = (*MQA, "--method", "mean")
    exact = ("--attention-kind", "mha")
    for name, arguments, tokens in (("default", MQA, 1280), ("mean", mean, 0), ("exact", exact, 0)):
        run("convert", checkpoints / "gqa", tmp_path / name, *options, *arguments)
        report = json.loads((tmp_path / name / "conversion.json").read_text())
        assert report["command"]["polish"] == tokens and bool(report["polish"]) == bool(tokens)
    monkeypatch.setattr("modeling_gqa.conversion.job.free_memory", lambda device: 2**20)
    printed = run("convert", checkpoints / "gqa", tmp_path / "small", *options, *MQA)
    report = json.loads((tmp_path / "small" / "conversion.json").read_text())
    assert report["command"]["polish"] == 0 and report["polish"] is None and "--polish TOKENS" in printed


def test_polishing_takes_more_tokens_on_a_gpu(checkpoints, corpus, tmp_path, monkeypatch):
    """Eight times as many as calibrate, where memory allows."""
    monkeypatch.setattr("modeling_gqa.conversion.job.free_memory", lambda device: 2**40)
    asked = {"source": str(checkpoints / "gqa"), "target": tmp_path / "out", "attention_kind": "mqa"}
    for device, tokens in (("cpu", 1280), ("cuda", 5120), ("cuda:1", 5120)):
        planned = job.Job(**asked, text=[corpus], calibration_tokens=640, sequence_length=32, device="cpu")
        planned.device = device
        checkpoint = planned.open(download=False)
        planned.choose_polish(checkpoint, job.find_goal(planned, checkpoint.config, checkpoint.dtype), print)
        assert planned.polish == tokens


def test_a_conversion_that_changes_much_ends_with_a_warning(checkpoints, corpus, tmp_path):
    """It names the KL and ways to lose less; an exact conversion has none, and neither is an error."""
    options = ("--text", corpus, *TEXT_OPTIONS)
    printed = run("convert", checkpoints / "mha", tmp_path / "much", *MQA, "--method", "mean", *options)
    report = json.loads((tmp_path / "much" / "conversion.json").read_text())
    assert report["kl"] > 0.1 and "Warning: KL is more than 0.1 nats" in printed
    assert "--polish TOKENS" in printed and "modeling-gqa uptrain" in printed
    assert "Warning: the weights alone decided" in run("convert", checkpoints / "mha", tmp_path / "blind", *MQA)
    assert "Warning" not in run("convert", checkpoints / "gqa", tmp_path / "none", "--attention-kind", "mha", *options)


def test_exact_conversion_calibrates_on_nothing_and_is_measured(checkpoints, corpus, tmp_path):
    arguments = ("convert", checkpoints / "mqa", tmp_path / "out", "--attention-kind", "mha", "--text", corpus)
    assert "calibrated" not in run(*arguments, *TEXT_OPTIONS)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["exact"] and report["kl"] < 1e-6 and report["tokens"] > 0
    assert "evaluation_tokens" in report["text"] and "calibration_tokens" not in report["text"]


def test_exact_conversion_without_text_says_what_was_not_measured(checkpoints, tmp_path):
    printed = run("convert", checkpoints / "gqa", tmp_path / "out", "--attention-kind", "mha")
    assert "exact" in printed and "nothing was measured" in printed and "Warning" not in printed
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["exact"] and report["tokens"] == 0 and report["perplexity_after"] is None and report["text"] is None
    assert "nothing was measured" in (tmp_path / "out" / "README.md").read_text()
    torch.testing.assert_close(logits(tmp_path / "out"), logits(checkpoints / "gqa"), rtol=1e-5, atol=1e-5)


def test_chosen_layers_alone_change(checkpoints, tmp_path):
    run("convert", checkpoints / "mha", tmp_path / "out", "--attention-kind", "mla", "--cache-bytes", 4 * 21,
        "--layers", "0,2-2", "--method", "lowrank")  # fmt: skip
    config = GQAConfig.from_pretrained(tmp_path / "out")
    assert [layer.attention_kind for layer in config.per_layer_config] == ["mla", "mha", "mla"]
    sizes = [layer.kv_lora_rank + layer.qk_rope_head_dim for layer in config.per_layer_config if layer.kv_lora_rank]
    assert sizes == [21, 21]
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints / "mha", tmp_path / "out"))
    kept = [name for name in before if "self_attn" not in name or "layers.1." in name]
    assert all(torch.equal(before[name], after[name]) for name in kept) and len(kept) < len(before)
    assert "vLLM 0.32 or 0.33 caches the latent" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("budget", [1200, 0.695])
def test_budget_is_kept_and_layers_that_were_not_chosen_too(budget, checkpoints, corpus, tmp_path):
    """In bytes, or as a share of the source's 1,728."""
    arguments = ("convert", checkpoints / "mha", tmp_path / "out", "--attention-kind", "gqa", "--budget", budget)
    options = ("--layers", "0-1", "--method", "lowrank", "--text", corpus, *TEXT_OPTIONS)
    assert "1,200" in run(*arguments, *options, "--dry-run")
    run(*arguments, *options)
    layers = GQAConfig.from_pretrained(tmp_path / "out").per_layer_config
    size = 2 * HEAD_DIM * 4  # bytes of a key/value head
    heads = [layer.num_key_value_heads for layer in layers]
    assert heads[2] == HEADS and sum(heads) * size <= 1200
    assert (sum(heads) + 1) * size > 1200 or sorted(heads[:2]) == [3, 3]  # no head more would fit
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["cache_bytes_per_token_after"] == sum(heads) * size and report["command"]["budget"] == budget


def test_a_budget_counts_the_tokens_of_a_window(checkpoints, corpus, tmp_path):
    """The dry run and the report compare it with the source's own mean over a text of full length."""
    before = inspected(checkpoints / "mixed-window")["mean_cache_bytes_per_token"]
    arguments = ("convert", checkpoints / "mixed-window", tmp_path / "out", "--attention-kind", "gqa")
    options = ("--layers", "0-1", "--method", "lowrank", "--text", corpus, *TEXT_OPTIONS)
    planned = run(*arguments, "--budget", before - 20, *options, "--dry-run")
    assert f"{before:,} (" in planned and f"{before - 20:,} (" in planned
    run(*arguments, "--budget", before - 20, *options)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["mean_cache_bytes_per_token_before"] == before
    assert report["mean_cache_bytes_per_token_after"] <= before - 20
    refused = call(*arguments, "--budget", before, *options, "--force")
    assert refused.exit_code == 1 and f"{before} bytes per token changes nothing" in refused.stderr


def test_dtype_of_the_result(checkpoints, tmp_path):
    run("convert", checkpoints / "mqa-bf16", tmp_path / "own", "--attention-kind", "mha")
    run("convert", checkpoints / "mqa-bf16", tmp_path / "float", "--attention-kind", "mha", "--dtype", "float32")
    for name, dtype in (("own", torch.bfloat16), ("float", torch.float32)):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype} and "lm_head.weight" not in tensors
        assert GQAConfig.from_pretrained(tmp_path / name).dtype == dtype
        report = json.loads((tmp_path / name / "conversion.json").read_text())
        assert report["cache_bytes_per_token_after"] == 2 * HEADS * HEAD_DIM * LAYERS * dtype.itemsize


def test_a_cpu_that_is_slow_in_the_dtype_computes_in_float32(checkpoints, corpus, tmp_path, monkeypatch):
    """The result is that of `--dtype float32`, rounded. With AVX-512 it computes in bfloat16."""
    source, options = checkpoints / "mqa-bf16", ("--attention-kind", "mla", "--cache-size", 12, "--text", corpus)
    found = {}
    for name, instructions, more in (
        ("slow", "AVX2", ()),
        ("fast", "AVX512", ()),
        ("float", "AVX2", ("--dtype", "float32")),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda instructions=instructions: instructions)
        printed = run("convert", source, tmp_path / name, *options, *TEXT_OPTIONS, *more)
        assert ("Computing in float32" in printed) is (name == "slow")
        found[name] = load_file(tmp_path / name / "model.safetensors")
    assert {x.dtype for name in ("slow", "fast") for x in found[name].values()} == {torch.bfloat16}
    assert all(torch.equal(x, found["float"][name].bfloat16()) for name, x in found["slow"].items())
    assert any(not torch.equal(x, found["fast"][name]) for name, x in found["slow"].items())
    assert GQAConfig.from_pretrained(tmp_path / "slow").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [("gqa", "--num-key-value-heads", 3), ("mla", "--cache-size", 24)], ids=["gqa", "mla"]
)
def test_dry_run_announces_and_touches_nothing(options, checkpoints, corpus, tmp_path, monkeypatch):
    arguments = ("convert", checkpoints / "mha", tmp_path / "out", "--attention-kind", *options, "--method", "lowrank")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: pytest.fail("a dry run reads no weights"))
        planned = run(*arguments, "--dry-run", "--text", corpus, *TEXT_OPTIONS)
    assert "Nothing was written" in planned and not list(tmp_path.iterdir())
    assert "by accounting, of which the source takes" in " ".join(planned.split())
    assert "Memory on cpu: about 0.5 GiB by accounting" in run(*arguments)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert f"{report['cache_bytes_per_token_before']:,}" in planned
    assert f"{report['cache_bytes_per_token_after']:,}" in planned


def test_a_model_without_text_writes_its_own(checkpoints, tmp_path):
    """As many documents as the tokens fill, the same ones for a seed; a conversion calibrates and measures on them."""
    size = ("--tokens", 1500, "--sequence-length", 32, "--batch-size", 20, "--device", "cpu")
    files = [tmp_path / "new" / f"{number}.jsonl" for number in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert f"{file}: 47 documents, 1,504 tokens" in run(
            "write-text", checkpoints / "mha", file, *size, "--seed", seed
        )
    rows = [[json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files]
    assert [len(x) for x in rows] == [47] * 3 and rows[0] == rows[1] != rows[2]
    assert len({row["text"] for row in rows[0]}) == 47 and all(set(row) == {"text"} for row in rows[0])
    run("convert", checkpoints / "mha", tmp_path / "out", *MQA, "--text", files[0], *TEXT_OPTIONS)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["text"]["files"] == ["0.jsonl"] and report["kl"] > 0
    refused = {
        (files[0],): "exists already: name another file, or replace it by --force",
        (tmp_path, "--force"): "NAME.jsonl",
        (tmp_path / "a.txt",): "must be named NAME.jsonl",
        (tmp_path / "b.jsonl", "--tokens", 0): "--tokens=0 must be from 1",
        (
            tmp_path / "b.jsonl",
            "--sequence-length",
            257,
        ): "--sequence-length=257 is more than max_position_embeddings=256",
        (tmp_path / "b.jsonl", "--batch-size", -1): "--batch-size=-1 must be from 1",
        (tmp_path / "b.jsonl", "--seed", 2**70): f"--seed={2**70} must be from 0",
    }
    before = contents(tmp_path)
    for arguments, said in refused.items():
        result = call("write-text", checkpoints / "mha", *arguments)
        assert result.exit_code and result.exception is None and said in result.stderr
    assert contents(tmp_path) == before
    run("write-text", checkpoints / "mha", files[0], *size, "--seed", 2, "--force")
    assert files[0].read_bytes() == files[2].read_bytes()


def test_a_cache_of_a_share_of_the_bytes(checkpoints, corpus, tmp_path):
    """Bases and bits by layer and channel are saved, and what is loaded rounds its cache by them."""
    out = tmp_path / "out"
    run("quantize-cache", checkpoints / "gqa", out, "--cache-share", 0.2, "--text", corpus, *TEXT_OPTIONS[:6])
    source, made = (GQAForCausalLM.from_pretrained(folder) for folder in (checkpoints / "gqa", out))
    before, after = (cache_bytes_per_token(model.config, model.dtype) for model in (source, made))
    assert 0.15 * before < after <= 0.2 * before
    options = made.config.cache_quantization
    assert options["means"] and "nbits" not in options and len(options["layers"]) == made.config.num_hidden_layers
    for layer, own in zip(made.model.layers, options["layers"], strict=True):
        for name in ("key", "value"):
            encoder, decoder = getattr(layer.self_attn, f"{name}_basis").float()
            assert sum(size for size, _ in own[f"{name}_bits"]) == len(encoder)
            torch.testing.assert_close(encoder @ decoder, torch.eye(len(encoder)), rtol=0, atol=0.05)
    ids = torch.tensor([[5, 9, 2, 7, 5, 3]])
    assert made.generate(ids, max_new_tokens=8, do_sample=False).shape == (1, 14)
    with torch.no_grad():
        ids = torch.randint(3, made.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
        found, expected = (model(ids, use_cache=True).logits for model in (made, source))
    assert 0.001 < (found - expected).std() / expected.std() < 0.3
    run("quantize-cache", out, tmp_path / "again", "--nbits", 8)
    plain = load_file(checkpoints / "gqa" / "model.safetensors")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == plain.keys()


@pytest.mark.parametrize("kind", ["gqa", "mla-free"])
def test_a_frontier_of_caches(checkpoints, corpus, tmp_path, kind):
    """Each choice with its bytes and its loss, the smallest within a loss, and a picture; nothing else is written."""
    picture, source = tmp_path / "picture.svg", checkpoints / kind
    arguments = ("--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu", "--shares", 0.3, 0.2)
    found = json.loads(run("frontier", source, *arguments, "--picture", picture, "--json"))
    assert list(tmp_path.iterdir()) == [picture] and "bits by channel" in picture.read_text()
    choices = {choice["name"]: choice for choice in found["choices"]}
    assert list(choices) == sorted(choices, key=lambda name: -choices[name]["bytes"]) and len(choices) == 5
    config = GQAConfig.from_pretrained(source)
    assert found["bytes"] == cache_bytes_per_token(config, torch.float32)
    assert choices["fp8 of vLLM"]["bytes"] == found["bytes"] // 4
    for name, options in {"8 bits": {"nbits": 8}, "4 bits": {"nbits": 4}}.items():
        rounded = GQAConfig.from_pretrained(source, cache_quantization=options)
        assert choices[name]["bytes"] == cache_bytes_per_token(rounded, torch.float32)
        assert f"TARGET --nbits {options['nbits']} --text {corpus} --calibration-tokens" in choices[name]["command"]
    assert 0 < choices["8 bits"]["kl"] < choices["4 bits"]["kl"] and found["tokens"] > 0
    for share in (0.3, 0.2):
        assert choices[f"bits by channel, {share}"]["share"] <= share
        assert f"--cache-share {share} " in choices[f"bits by channel, {share}"]["command"]
    assert found["smallest"] == [name for name, x in choices.items() if x["kl"] <= 0.02][-1]
    said = " ".join(run("frontier", source, *arguments, "--loss", 1e-9).split())
    assert "No choice loses at most 1e-09 nats" in said and "as it is" in said
    for more, refused in (
        ((), "frontier needs --text"),
        (("--text", corpus, "--shares", 1), "--shares 1 must be between 0 and 1"),
        (("--text", corpus, "--loss", 0), "--loss=0.0 must be positive"),
        (("--text", corpus, "--picture", tmp_path / "a.txt"), "names no picture"),
        (("--text", corpus, "--shares", 1e-3, "--device", "cpu"), "is too small: the least is"),
    ):
        result = call("frontier", source, *more)
        assert result.exit_code and result.exception is None and refused in " ".join(result.stderr.split())


@pytest.mark.parametrize(("argv", "option"), [((), "--batch-size"), (("tiny",), "--per-device-train-batch-size")])
def test_too_little_memory_names_options_that_there_are(argv, option, capsys):
    with pytest.raises(SystemExit), console.user_errors(argv=argv):
        raise MemoryError
    assert f"a smaller {option} or" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "emulated"), [("turboquant_4bit_nc", True), ("fp8", False)])
def test_a_recommended_flag_that_was_emulated(name, emulated):
    choice = {"name": f"{name} of vLLM", "command": "vllm serve it", "bytes": 1, "kl": 0.01}
    said = recommendation({"choices": [choice], "smallest": choice["name"], "loss": 0.02, "bytes": 4})
    first, *more = said.splitlines()
    assert first.endswith(": vllm serve it") and ["on GPUs alone" in line for line in more] == [True] * emulated


def measured_kl(card: str) -> float:
    """The KL in the table of a model card."""
    return float(re.search(r"nats per token \|  \| (\S+) \|", card)[1])


def test_the_attention_is_trained_with_its_cache_rounded(checkpoints, corpus, tmp_path):
    """Training lowers the loss of a 2-bit cache; the attention changes, and nothing else but that."""
    source, text = checkpoints / "gqa", ("--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu")
    losses = {}
    for name, tokens in (("plain", 0), ("trained", 2560)):
        run("quantize-cache", source, tmp_path / name, "--nbits", 2, *text, "--polish", tokens)
        card = (tmp_path / name / "README.md").read_text()
        losses[name] = measured_kl(card)
        assert ("was trained on" in card) == bool(tokens) and ("weights are the source's" in card)
    assert losses["trained"] < losses["plain"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "trained"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".self_attn." in name for name in changed)
    result = call("quantize-cache", source, tmp_path / "no", "--polish", 100)
    assert result.exit_code and "--polish needs --text" in result.stderr


def test_a_conversion_whose_cache_is_rounded_too(checkpoints, corpus, tmp_path):
    """One command gives what `convert` and then `quantize-cache` give, measured against the first source."""
    source, text = checkpoints / "gqa", ("--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu")
    arguments = ("--attention-kind", "mla", "--cache-share", 0.2, "--cache-bits", "auto", *text)
    before = cache_bytes_per_token(GQAConfig.from_pretrained(source), torch.float32)
    assert f"{int(0.2 * before):,}" in run("convert", source, tmp_path / "one", *arguments, "--dry-run")
    said = run("convert", source, tmp_path / "one", *arguments, "--polish", 0)
    report = json.loads((tmp_path / "one" / "conversion.json").read_text())
    assert 0.15 * before < report["cache_bytes_per_token_after"] <= 0.2 * before
    assert report["cache_bytes_per_token_before"] == before
    assert f"has a KL of {report['kl_source_quantized']:.3g}" in " ".join(said.split())
    assert "No engine but generate" in (tmp_path / "one" / "README.md").read_text()
    whole = report["cache_bytes_per_token_after"] / before + 1e-6  # what the source is compared at
    run("quantize-cache", source, tmp_path / "source", "--cache-share", whole, *text)
    kl = measured_kl((tmp_path / "source" / "README.md").read_text())
    assert kl == float(f"{report['kl_source_quantized']:.3g}")
    # Tried first is half of the numbers, since three quarters do not fit; the size that lost least was taken.
    sizes = GQAConfig.from_pretrained(tmp_path / "one").per_layer_config[0]
    size, (largest, *others) = sizes.kv_lora_rank + sizes.qk_rope_head_dim, report["candidates"]
    assert largest["name"] == f"R + P = {2 * HEAD_DIM}" and others
    assert min(report["candidates"], key=lambda tried: tried["kl"])["name"] == f"R + P = {size}"
    alone = ("--attention-kind", "mla", "--cache-size", size, *text, "--polish", 0)
    run("convert", source, tmp_path / "unrounded", *alone)
    used = cache_bytes_per_token(GQAConfig.from_pretrained(tmp_path / "unrounded"), torch.float32)
    share = (0.2 * before + 0.5) / used
    run("quantize-cache", tmp_path / "unrounded", tmp_path / "two", "--cache-share", share, *text)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    configs = [GQAConfig.from_pretrained(tmp_path / name).cache_quantization for name in ("one", "two")]
    assert configs[0]["layers"] == configs[1]["layers"]
    assert "size chosen by loss" in run("convert", source, tmp_path / "no", *arguments, "--dry-run")
    run("convert", source, tmp_path / "trained", *arguments, "--polish", 5120)
    trained = json.loads((tmp_path / "trained" / "conversion.json").read_text())
    assert trained["polish"]["tokens"] > 0 and trained["kl"] < report["kl"]
    assert trained["kl_source_quantized"] == report["kl_source_quantized"]


def test_a_rounded_conversion_of_a_model_with_windows(checkpoints, corpus, tmp_path):
    """Its source cannot be had in as few bytes, where windowed layers stay whole; an exact conversion is not exact."""
    text = ("--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu", "--polish", 0, "--cache-bits", "auto")
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]}
    make_model("mha", **SMALL, **windows).save_pretrained(tmp_path / "windows")
    byte_tokenizer().save_pretrained(tmp_path / "windows")
    for source, kind, share, compared in (
        (tmp_path / "windows", "mqa", 0.35, False),
        (checkpoints / "mqa", "mha", 0.4, True),
    ):
        out = tmp_path / kind
        said = run("convert", source, out, "--attention-kind", kind, "--cache-share", share, *text)
        report = json.loads((out / "conversion.json").read_text())
        assert (report["kl_source_quantized"] is not None) == compared and not report["exact"] and report["kl"] > 0
        assert ("rounded to as many bytes" in " ".join(said.split())) == compared


def test_the_size_may_be_a_share(checkpoints, corpus, tmp_path):
    run("convert", checkpoints / "mha", tmp_path / "gqa", "--attention-kind", "gqa", "--cache-share", 0.5)
    assert GQAConfig.from_pretrained(tmp_path / "gqa").num_key_value_heads == HEADS // 2
    two = {"1": {"attention_kind": "gqa", "num_key_value_heads": 2}}
    make_model("mha", **SMALL, per_layer_config=two).save_pretrained(tmp_path / "two")
    run("convert", tmp_path / "two", tmp_path / "less", "--attention-kind", "gqa", "--cache-share", 0.5)
    heads = [layer.num_key_value_heads for layer in GQAConfig.from_pretrained(tmp_path / "less").per_layer_config]
    assert heads == [2 if index == 1 else HEADS // 2 for index in range(LAYERS)]
    before = contents(tmp_path)
    text, bits = ("--text", corpus), ("--cache-bits", "auto")
    for more, refused in (
        (("gqa", "--cache-share", 0.3), "leaves 1.8 key/value heads"),
        (("mqa", "--cache-share", 0.5), "--cache-share has nothing to choose for mqa"),
        (("mla", "--cache-share", 1.5), "--cache-share=1.5 must be between 0 and 1"),
        (("mla", "--cache-share", 0.005), "--cache-share=0.005 leaves no room for a latent and a rotary key: 3 is the"),
        (("gqa", "--num-key-value-heads", 2, "--no-key-mean"), "--no-key-mean has no effect on gqa"),
        (("mla", "--cache-size", 12, "--regroup"), "--regroup has no effect on mla"),
        (("mla", "--cache-share", 0.5, "--kv-lora-rank", 8), "leave --kv-lora-rank out"),
        (("mla", "--cache-share", 0.5, "--cache-size", 8), "--cache-size and --cache-share say the same"),
        (("mla", "--cache-share", 0.5, *bits), "--cache-bits needs --text"),
        (("mla", *bits, *text), "--cache-bits needs --cache-share"),
        (("mla", "--budget", 900, "--cache-share", 0.2, *bits, *text), "leave"),
        (("mla", "--layers", 0, "--cache-share", 0.2, *bits, *text), "leave --layers out"),
        (("mla", "--for", "vllm", "--cache-share", 0.2, *bits, *text), "leave --for out"),
        (("gqa", "--cache-share", 0.2, *bits, *text), "--cache-bits with gqa needs --num-key-value-heads"),
        (("mha", "--cache-share", 0.2, *bits, *text), "quantize-cache rounds its cache"),
        (("mqa", "--cache-share", 1e-9, *bits, *text, "--dry-run"), "is too small: the least is"),
        (("mla", "--cache-share", 0.01, *bits, *text), "is too small: the least is"),
    ):
        result = call("convert", checkpoints / "mha", tmp_path / "no", "--attention-kind", *more)
        assert result.exit_code and result.exception is None and refused in " ".join(result.stderr.split())
    assert contents(tmp_path) == before


def test_a_frontier_of_a_conversion(checkpoints, corpus, tmp_path):
    """A conversion stands beside its source, as it is and rounded; sizes are shares of the source's bytes."""
    source, made, picture = checkpoints / "gqa", tmp_path / "mla", tmp_path / "picture.svg"
    text = ("--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu")
    run("convert", source, made, "--attention-kind", "mla", "--cache-size", 32, *text, "--polish", 0)
    arguments = ("frontier", source, *text, "--converted", made, "--shares", 0.3)
    found = json.loads(run(*arguments, "--picture", picture, "--json"))
    choices = {choice["name"]: choice for choice in found["choices"]}
    assert "bits by channel of mla" in picture.read_text()
    config = GQAConfig.from_pretrained(made)
    assert choices[str(made)]["bytes"] == cache_bytes_per_token(config, torch.float32)
    assert choices[str(made)]["command"] is None and choices[str(made)]["kl"] > 0
    assert choices[f"{made}, 8 bits"]["command"].startswith(f"modeling-gqa quantize-cache {made} TARGET --nbits 8 ")
    both = choices[f"{made}, bits by channel, 0.3"]
    assert both["share"] <= 0.3 and both["kl"] > choices[str(made)]["kl"] / 2
    share = float(re.search(r"--cache-share (\S+)", both["command"])[1])
    assert share == pytest.approx(0.3 * found["bytes"] / choices[str(made)]["bytes"], abs=0.003)
    assert int(share * choices[str(made)]["bytes"]) == int(0.3 * found["bytes"])  # the command makes this row
    rounded = tmp_path / "rounded"
    run("quantize-cache", made, rounded, "--nbits", 8, *text)
    again = json.loads(run(*arguments[:-2], "--converted", rounded, "--shares", 0.3, "--json"))["choices"]
    (found,) = [choice for choice in again if choice["name"].startswith(str(rounded))]
    assert found["bytes"] == choices[f"{made}, 8 bits"]["bytes"]
    assert found["kl"] == pytest.approx(choices[f"{made}, 8 bits"]["kl"], rel=1e-3)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    GQAForCausalLM(GQAConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "other")
    for folder, refused in ((tmp_path / "other", "is no conversion of"), (tmp_path / "none", "none")):
        result = call("frontier", source, *text, "--converted", folder)
        assert result.exit_code and result.exception is None and refused in " ".join(result.stderr.split())


def test_a_cache_is_quantized_and_measured(checkpoints, corpus, tmp_path):
    """With text the means are saved and the loss is measured; without, neither. What is made from it has neither."""
    out, plain = tmp_path / "out", tmp_path / "plain"
    arguments = ("--value-bits", 8, "--text", corpus, *TEXT_OPTIONS[:6], "--device", "cpu")
    said = run("quantize-cache", checkpoints / "gqa", out, "--nbits", 3, *arguments)
    assert "held-out tokens" in said
    config = json.loads((out / "config.json").read_text())
    assert config["cache_quantization"] == {
        "nbits": 3, "value_bits": 8, "exact_tokens": 4, "residual_length": 0, "means": True
    }  # fmt: skip
    assert "license: mit" in (out / "README.md").read_text() and measured_kl((out / "README.md").read_text()) > 0
    source, made = (load_file(folder / "model.safetensors") for folder in (checkpoints / "gqa", out))
    means = made.keys() - source.keys()
    assert len(means) == config["num_hidden_layers"] and all(
        made[name].any() and name.endswith(".self_attn.cache_mean") for name in means
    )
    assert all(torch.equal(made[name], source[name]) for name in source)
    assert "Cache per token" in run("quantize-cache", checkpoints / "gqa", plain, "--nbits", "fp8")
    assert "means" not in json.loads((plain / "config.json").read_text())["cache_quantization"]
    run("export", out, tmp_path / "stock")
    run("quantize-cache", out, tmp_path / "again", "--nbits", 8)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == source.keys()
    refused = {
        (out,): "exists already",
        (tmp_path / "a", "--nbits", 5): "--nbits: invalid choice",
        (tmp_path / "a", "--q-group-size", 3): "cache_quantization['q_group_size']=3 must be a whole number from 8",
        (tmp_path / "a", "--rope-bits", 8): "--rope-bits is for MLA, which no layer of the model has",
        (tmp_path / "a", "--text", corpus, "--sequence-length", 4): "have none beyond the first 4, which",
        (tmp_path / "a", "--evaluation-text", corpus): "--evaluation-text needs --text",
        (tmp_path / "a", "--text", corpus, "--sequence-length", 257): "is more than max_position_embeddings=256",
        (tmp_path / "a", "--text", corpus, "--batch-size", 0): "--batch-size=0 must be from 1",
        (tmp_path / "a", "--cache-share", 0.2): "--cache-share needs --text",
        (tmp_path / "a", "--cache-share", 2, "--text", corpus): "--cache-share=2.0 must be between 0 and 1",
        (tmp_path / "a", "--cache-share", 0.2, "--text", corpus, "--nbits", 4): "leave --nbits out",
        (tmp_path / "a", "--cache-share", 1e-3, "--text", corpus, "--device", "cpu"): "is too small: the least is",
    }
    before = contents(tmp_path)
    for more, said in refused.items():
        result = call("quantize-cache", checkpoints / "gqa", *more)
        assert result.exit_code and result.exception is None and said in result.stderr
    assert contents(tmp_path) == before


def test_export_and_import_are_inverse(checkpoints, tmp_path):
    assert "a llama model" in run("export", checkpoints / "gqa", tmp_path / "llama")
    run("import", tmp_path / "llama", tmp_path / "back")
    source, back = (load_file(folder / "model.safetensors") for folder in (checkpoints / "gqa", tmp_path / "back"))
    assert source.keys() == back.keys() and all(torch.equal(source[name], back[name]) for name in source)
    run("convert", tmp_path / "llama", tmp_path / "mha", "--attention-kind", "mha")  # imports on the way
    assert json.loads((tmp_path / "mha" / "conversion.json").read_text())["source_family"] == "llama"
    torch.testing.assert_close(logits(tmp_path / "mha"), logits(checkpoints / "gqa"), rtol=1e-5, atol=1e-5)


def inspected(folder: Path) -> dict:
    return json.loads(call("inspect", folder, "--json").stdout)


def test_inspect_says_what_is_exact_lossy_and_impossible(checkpoints):
    gqa, mqa, qk_norm, mla, free, normed = (
        inspected(checkpoints / n) for n in ("gqa", "mqa", "mha-qk-norm", "mixed-window", "mla-free", "mla-qk-norm")
    )
    rotary = 2 * HEAD_DIM  # of the two key/value heads
    assert gqa["conversions"]["exact"].keys() == {"mha", f"mla with R = {rotary} and P = {rotary}"}
    assert gqa["conversions"]["exact"][f"mla with R = {rotary} and P = {rotary}"] == gqa["cache_bytes_per_token"]
    assert gqa["conversions"]["exact"]["mha"] == 2 * HEADS * HEAD_DIM * 4 * LAYERS
    assert "mqa" in gqa["conversions"]["lossy"]
    assert "gqa with 3 key/value heads" in gqa["conversions"]["impossible"]
    assert "mla of the same cache size" in mqa["conversions"]["exact"]
    assert mqa["conversions"]["exact"]["mla of the same cache size"] == mqa["cache_bytes_per_token"]
    assert not qk_norm["conversions"]["impossible"]
    assert any(name.startswith("mla of a chosen cache size") for name in qk_norm["conversions"]["lossy"])
    assert not normed["conversions"]["exact"] and not normed["conversions"]["lossy"]
    assert all("qk_norm" in reason for reason in normed["conversions"]["impossible"].values())
    assert normed["export"]["family"] is None and "qk_norm=True" in normed["export"]["reason"]
    assert normed["layers"][0]["attention"].endswith("+ 6, qk-norm")
    assert (normed["layers"][0]["qk_norm_head_dim"], normed["layers"][0]["qk_norm_key_value_heads"]) == (15, 2)
    assert qk_norm["export"]["family"] == "qwen3"
    impossible = mla["conversions"]["impossible"]
    assert "loses something in layer 0" in impossible.pop("gqa with 3 key/value heads")
    assert all("latent_norm" in reason for reason in impossible.values())
    assert impossible and mla["export"]["family"] is None and mla["export"]["reason"]
    assert "mha" in free["conversions"]["exact"]


def test_equal_layers_are_one_row(checkpoints, tmp_path):
    shown = run("convert", checkpoints / "mha", tmp_path / "out", *MQA, "--dry-run")
    assert f"0-{LAYERS - 1}" in shown and shown.count("→") == 1
    shown = run("convert", checkpoints / "mha", tmp_path / "out", *MQA, "--layers", "1", "--dry-run")
    assert re.findall(r" ([0-9-]+) m[hq]a, ", shown)[:LAYERS] == ["0", "1", "2"]


def test_a_cache_larger_than_the_sources_is_refused(checkpoints, tmp_path):
    """The most is named, it can be had, and it is exact."""
    most = 2 * 2 * HEAD_DIM
    for option, unit in (("--cache-size", 1), ("--cache-bytes", 4)):
        arguments = ("convert", checkpoints / "gqa", tmp_path / "out", *MLA, option)
        said = " ".join(call(*arguments, (most + 2) * unit).stderr.split())
        assert f"{option}={(most + 2) * unit} is more than layer 0 caches now, which is {most * unit}" in said
        assert f"choose at most {most * unit}, where MLA can be exact" in said
        assert "would convert exactly" in run(*arguments, most * unit, "--dry-run")


def test_inspect_counts_what_the_model_has(checkpoints):
    for name in ("gqa", "mixed-window", "mqa-bf16"):
        found, model = inspected(checkpoints / name), AutoModelForCausalLM.from_pretrained(checkpoints / name)
        assert found["parameters"] == model.num_parameters()
        cache = model(torch.tensor([[1]])).past_key_values
        sizes = [x.keys.numel() + x.values.numel() for x in cache.layers]
        assert [row["cache_bytes_per_token"] for row in found["layers"]] == [n * model.dtype.itemsize for n in sizes]
        assert found["cache_bytes_per_token"] == sum(sizes) * model.dtype.itemsize
        length = model.config.max_position_embeddings
        kept = [min(row["sliding_window"] or length, length) for row in found["layers"]]
        full = sum(n * tokens for n, tokens in zip(sizes, kept, strict=True)) * model.dtype.itemsize
        assert found["mean_cache_bytes_per_token"] == math.ceil(full / length)
        assert found["dtype"] == str(model.dtype).removeprefix("torch.")
    printed = run("inspect", checkpoints / "mixed-window")
    assert f"{inspected(checkpoints / 'mixed-window')['mean_cache_bytes_per_token']:,} bytes per token" in printed
    assert "mla" in printed and "latent_norm" in printed


def test_sizes_of_caches_are_bytes_then_numbers_then_a_share(checkpoints, tmp_path):
    """Those of `inspect` and `convert`, each from the JSON beside it; the models are in float32."""
    found = inspected(checkpoints / "mha")
    whole, lossy = found["cache_bytes_per_token"], found["conversions"]["lossy"]
    assert whole == 2 * HEADS * HEAD_DIM * LAYERS * 4
    shown = " ".join(run("inspect", checkpoints / "mha").split())
    assert f"{whole:,} bytes ({whole // 4:,} numbers)" in shown
    assert f"{whole // LAYERS:,} ({whole // LAYERS // 4:,})" in shown
    assert f"mqa with loss {lossy['mqa']:,} ({lossy['mqa'] // 4:,}) {100 / HEADS:.1f}" in shown
    half = HEADS * HEAD_DIM
    assert any(f"{4 * half} bytes ({half} numbers) a layer" in name for name in lossy)
    shown = " ".join(run("convert", checkpoints / "mha", tmp_path / "out", *MQA, "--dry-run").split())
    assert f"{whole:,} ({whole // 4:,}) {lossy['mqa']:,} ({lossy['mqa'] // 4:,}) {100 / HEADS:.1f}" in shown


def old_checkpoint(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "precious"}')
    (folder / "model.safetensors").write_text("precious")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def large_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def linked_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/passwd")


def damaged_generation(folder):
    (folder / "generation_config.json").write_text("[" * 100_000)


def large_tokenizer(folder):
    byte_tokenizer(BYTES + 9).save_pretrained(folder)


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def wrong_field(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))


GQA = ("--attention-kind", "gqa", "--num-key-value-heads")
MQA = ("--attention-kind", "mqa")
MLA = ("--attention-kind", "mla")
BLOCKS = ("--text", "CORPUS", "--sequence-length")
# name: (what is done to the source, the source, options, message)
WRONG = {
    "heads that do not divide": (None, "mha", (*GQA, 4), "num_key_value_heads=4 does not divide the 6 query heads"),
    "negative cache": (None, "mha", (*MLA, "--cache-bytes", -4), "--cache-bytes=-4 must be at least 1"),
    "two sizes": (None, "mha", (*MLA, "--cache-size", 8, "--cache-bytes", 32), "--cache-size and --cache-bytes say"),
    "budget and size": (None, "mha", (*MLA, "--budget", 99, "--kv-lora-rank", 8), "leave --kv-lora-rank out"),
    "mean to MLA": (None, "mha", (*MLA, "--cache-size", 24, "--method", "mean"), "--method=mean merges heads"),
    "refit without text": (None, "mha", (*MQA, "--refit"), "--refit needs --text"),
    "budget without text": (None, "mha", (*MLA, "--budget", 99), "--budget needs --text"),
    "small budget": (None, "mha", (*MLA, "--budget", 9, *BLOCKS, 32), "a budget of 9 bytes per token is too small"),
    "dry run": (None, "mha", (*MLA, "--budget", 9, *BLOCKS, 32, "--dry-run"), "a budget of 9 bytes per token is too"),
    "large budget": (None, "mha", (*MLA, "--budget", 1728, *BLOCKS, 32), "changes nothing: the source takes 1728"),
    "large, dry run": (None, "mha", (*MLA, "--budget", 9999, *BLOCKS, 32, "--dry-run"), "of 9999 bytes per token cha"),
    "negative budget": (None, "mha", (*MLA, "--budget", -0.5, *BLOCKS, 32), "--budget=-0.5 must be positive"),
    "endless budget": (None, "mha", (*MLA, "--budget", "nan", *BLOCKS, 32), "--budget=nan must be positive"),
    "budget for mqa": (None, "mha", (*MQA, "--budget", 99), "--budget has nothing to choose for mqa"),
    "latent norm": (None, "mixed-window", MQA, "latent_norm=True"),
    "truncated": (truncated, "mha", MQA, "is truncated or damaged"),
    "large tokenizer": (large_tokenizer, "mha", MQA, "the tokenizer does not match"),
    "few bytes": (
        None,
        "mha",
        (*MLA, "--cache-bytes", 8),
        "--cache-bytes=8 leaves no room for a latent",
    ),
    "no tokenizer, dry run": (no_tokenizer, "mha", (*MQA, *BLOCKS, 32, "--dry-run"), "cannot load the tokenizer"),
    "short, dry run": (None, "mha", (*MQA, "--text", "CORPUS/0.txt", "--dry-run"), "the text is too short"),
    "no tokenizer": (no_tokenizer, "mha", (*MQA, *BLOCKS, 32), "cannot load the tokenizer"),
    "wrong field": (wrong_field, "mha", MQA, "num_attention_heads=0 must be positive"),
    "no text": (None, "mha", (*MQA, "--text", "missing.txt"), "nothing to read at missing.txt"),
    "short text": (None, "mha", (*MQA, "--text", "CORPUS/0.txt", "--sequence-length", 64), "the text is too short"),
    "long blocks": (None, "mha", (*MQA, *BLOCKS, 257), "--sequence-length=257 is more than max_position_embeddings="),
    "evaluation alone": (None, "mha", (*MQA, "--evaluation-text", "CORPUS"), "--evaluation-text needs --text"),
    "huge latent": (None, "mha", (*MLA, "--kv-lora-rank", 10**9), "a latent of 1000000000 is larger than layer 0's"),
    "huge cache": (None, "mha", (*MLA, "--cache-bytes", 10**12), "--cache-bytes=1000000000000 is more than"),
    "huge seed": (None, "mha", (*MQA, "--seed", 2**70), f"--seed={2**70} must be from 0 to 2**63 - 1"),
    "negative seed": (None, "mha", (*MQA, "--seed", -1), "--seed=-1 must be from 0"),
    "no memory": (None, "mha", (*MQA, "--device", "meta"), "--device=meta cannot be used"),
    "two devices": (None, "mha", (*MQA, "--device", "cuda:0,cuda:1"), "cannot be used: give one device, such as cpu"),
    "large for float16": (
        large_weight,
        "mha",
        (*MQA, "--dtype", "float16"),
        "norm.weight holds inf in float16: the checkpoint is damaged, or",
    ),
    "linked tokenizer": (linked_tokenizer, "mha", MQA, "tokenizer.json leads out of the checkpoint, to /"),
    "damaged generation": (damaged_generation, "mha", MQA, "generation_config.json cannot be read: maximum recursion"),
    "no such device": (None, "mha", (*MQA, "--device", "abacus"), "--device=abacus cannot be used"),
}


@pytest.mark.parametrize(("damage", "name", "options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_leaves_all_as_it_was(
    damage, name, options, message, checkpoints, corpus, tmp_path
):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(checkpoints / name, source)
    if damage:
        damage(source)
    old_checkpoint(target)
    before = contents(tmp_path)
    options = [str(option).replace("CORPUS", str(corpus)) for option in options]
    result = call("convert", source, target, *options, "--force")
    errors = result.stderr.splitlines()
    assert result.exit_code == 1, result.output
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0], result.stderr
    assert result.stdout == "" and contents(tmp_path) == before


def test_a_field_that_nobody_knows_can_be_ignored(checkpoints, tmp_path):
    source = tmp_path / "llama"
    run("export", checkpoints / "gqa", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"alibi": False, "unk_token_id": 0}))
    target = ("--attention-kind", "gqa", "--num-key-value-heads", 1)
    for name, *arguments in (("inspect",), ("import", tmp_path / "ours"), ("convert", tmp_path / "mqa", *target)):
        assert "--ignore-field alibi" in " ".join(call(name, source, *arguments).stderr.split())
        run(name, source, *arguments, "--ignore-field", "alibi")
    assert "of which no field is refused" in call("inspect", tmp_path / "ours", "--ignore-field", "alibi").stderr


def test_targets_that_are_refused(checkpoints, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gqa", source)
    (tmp_path / "full").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("text")
    (tmp_path / "loop").symlink_to("loop")
    before = contents(tmp_path)
    to_mha = ("--attention-kind", "mha")
    for target, options, message in (
        (source, ("--force",), "is the source, or holds it"),
        (source / ".." / "source", ("--force",), "is the source, or holds it"),
        (tmp_path, ("--force",), "is the source, or holds it"),
        (tmp_path / "full", (), "exists already"),
        (tmp_path / "texts", ("--force",), "holds other things than a checkpoint"),
        (tmp_path / "texts", ("--force", "--text", str(tmp_path / "texts")), "is the text, or holds it"),
        (tmp_path / "file", ("--force",), "is a file"),
        (tmp_path / "loop", (), "loop" if sys.version_info < (3, 13) else "cannot be written"),
        (tmp_path / "file" / "out", (), "file is a file"),
    ):
        for further in ((), ("--dry-run",)) if target.parent.is_dir() else ((),):
            result = call("convert", source, target, *to_mha, *options, *further)
            assert result.exit_code == 1 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert call("import", checkpoints / "gqa", tmp_path / "out").exit_code == 1  # no import of what is imported
    assert call("export", checkpoints / "mixed-window", tmp_path / "out").exit_code == 1
    assert call("inspect", tmp_path).exit_code == 1
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == 5


def test_what_takes_long_is_named_on_the_bars(checkpoints, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "err", Console(stderr=True, force_terminal=True, width=120))
    options = ("--text", corpus, *TEXT_OPTIONS, *MQA, "--method", "auto")
    shown = call("convert", checkpoints / "gqa", tmp_path / "out", *options).stderr
    named = ("trying settings", "converting layers", "measuring", "measuring layers", "saving")
    assert all(name in shown for name in named), shown


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_warning_is_one_line(checkpoints, tmp_path):
    arguments = ("convert", checkpoints / "mha", tmp_path / "out", *MLA, "--kv-lora-rank", 99)
    (warning,) = [line for line in call(*arguments, "--dry-run").stderr.splitlines() if line]
    assert warning.startswith("warning: kv_lora_rank=99 is larger than the"), warning


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(errno.ENOSPC, "No space left on device"), 1), (KeyboardInterrupt(), 130), (RuntimeError("a defect"), 1)],
    ids=["disk full", "Ctrl-C", "defect"],
)
def test_interrupted_while_writing(error, code, checkpoints, tmp_path, monkeypatch):
    def write_half(folder, *_):
        (folder / "model.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(job, "write_model", write_half)
    old_checkpoint(tmp_path / "old")
    before = contents(tmp_path)
    for target in ("old", "new", "deep/new"):
        result = call("convert", checkpoints / "gqa", tmp_path / target, "--attention-kind", "mha", "--force")
        assert result.exit_code == code
    # Finished layers stay, for the same command to go on from.
    assert {name: x for name, x in contents(tmp_path).items() if ".layers/" not in name} == before
    assert {path.name for path in tmp_path.iterdir()} == {"old", "deep", ".old.layers", ".new.layers"}
    if not isinstance(error, RuntimeError):
        said = "No space left on device" if isinstance(error, OSError) else "stopped by Ctrl-C"
        (line,) = [line for line in result.stderr.splitlines() if line and "━" not in line]
        assert line.startswith(f"error: {said}: {tmp_path / target} is as it was, nothing half-written is left")
    if isinstance(error, RuntimeError):
        assert result.exception is error  # not dressed up as the user's mistake


@pytest.mark.parametrize("name", ["[red]x", "[bad", "a\nb", "a\x1b[31mb", ":smile:", "-x", "é 日本", "x" * 200])
def test_odd_names(name, checkpoints, tmp_path):
    shutil.copytree(checkpoints / "gqa", tmp_path / name)
    shown = ascii(name)[1:-1] if not name.isprintable() else name
    assert f"Saved {tmp_path}/out {shown}:" in call("export", tmp_path / name, tmp_path / f"out {name}").stdout
    assert shown in call("inspect", tmp_path / name).stdout
    said = call("convert", tmp_path / name, tmp_path / f"out {name}", *MQA).stderr
    assert shown.replace("\\n", " ") in said and said.count("\n") == 1


def test_names_that_are_not_utf_8(checkpoints, corpus, tmp_path):
    text, target = (tmp_path / os.fsdecode(name) for name in (b"text\xff.txt", b"out\xff"))
    text.write_text(" ".join(path.read_text() for path in sorted(corpus.iterdir())))
    run("convert", checkpoints / "gqa", target, *MQA, "--method", "mean", *TEXT_OPTIONS, "--text", text)
    assert json.loads((target / "conversion.json").read_text())["text"]["files"][-1] == text.name
    assert "out\\udcff" in (target / "README.md").read_text()


def test_output_that_cannot_be_written(checkpoints, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commands, "show_inspection", refuse)
    monkeypatch.setattr(commands, "print", refuse, raising=False)
    for options in ((), ("--json",)):
        result = call("inspect", checkpoints / "gqa", *options)
        assert result.exit_code == 1 and result.stderr.startswith("error: No space left on device")


@pytest.mark.processes
def test_a_process_of_its_own(checkpoints, tmp_path):
    """stderr is the one line and nothing else, apart from what the libraries say when they are imported."""
    process = subprocess.run(
        [sys.executable, "-m", "modeling_gqa_cli", "convert", checkpoints / "mha", tmp_path / "out", *MLA],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        cwd=Path(__file__).parents[1], timeout=120,
    )  # fmt: skip
    assert process.returncode == 1 and process.stdout == "" and "Traceback" not in process.stderr
    assert re.findall("^error: .*", process.stderr, re.MULTILINE) == [process.stderr.splitlines()[-1]]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["inspect", "--help"], ["convert", "SOURCE", "TARGET", "--attention-kind", "mqa"]]
)
def test_a_reader_that_leaves(arguments, checkpoints, tmp_path):
    """Nothing is said of it, and what was to be written is written."""
    names = {"SOURCE": str(checkpoints / "mha"), "TARGET": str(tmp_path / "out")}
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "modeling_gqa_cli", *(names.get(x, x) for x in arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE,
        text=True, cwd=Path(__file__).parents[1], timeout=120,
    )  # fmt: skip
    os.close(writer)
    converts = "TARGET" in arguments
    assert process.returncode == (0 if converts else 141)
    assert "Broken pipe" not in process.stderr and "error: " not in process.stderr
    assert (tmp_path / "out" / "config.json").is_file() == converts


# What runs before the command, the package that is then missing, and what is said of the file that needs it.
MISSING = {
    "rich": ("rich", "error: this needs rich, which"),
    "parquet": ("pyarrow", "error: {text} needs pyarrow, which"),
    "zst": ("pyarrow", "error: {text} needs pyarrow, which"),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(case, checkpoints, tmp_path):
    """Without the extra `conversion` a command is refused in one line, and nothing is written.

    Every package that only extras install is blocked, `datasets` too: other formats of text are read without it.
    """
    package, said = MISSING[case]
    text = tmp_path / (f"text.{case}" if package == "pyarrow" else "text.jsonl")
    text.write_bytes(b"PAR1 or anything else")
    blocked = [package, "datasets", "pyarrow"]
    code = f"""import sys
sys.modules.update(dict.fromkeys({blocked}, None))
from modeling_gqa_cli.main import main
main()"""
    options = ["--attention-kind", "mha", "--text", str(text)]
    process = subprocess.run(
        [sys.executable, "-c", code, "convert", str(checkpoints / "gqa"), str(tmp_path / "out"), *options],
        capture_output=True,
        text=True,
    )
    *_, last = process.stderr.strip().splitlines()
    assert last == f"{said.format(text=text)} is not installed: {install_extra('conversion')}"
    assert process.returncode == 1 and not (tmp_path / "out").exists() and "Traceback" not in process.stderr


@pytest.mark.processes
def test_conversion_is_imported_without_what_only_extras_install():
    """`filelock` is not blocked: torch, transformers and huggingface_hub need it themselves."""
    code = "import sys; sys.modules.update(dict.fromkeys(['rich', 'datasets', 'pyarrow'], None))"
    subprocess.run([sys.executable, "-c", f"{code}; import modeling_gqa.conversion"], check=True, capture_output=True)
