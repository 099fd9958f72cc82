"""Training that goes on: from trained weights, and runs that are made longer; and what is said before it begins."""

import json
import math
import re

import pytest
import torch
import yaml
from jinja2 import TemplateError
from safetensors.torch import load_file
from training_texts import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from modeling_gqa import GQAForCausalLM
from modeling_gqa.data.blocks import load_blocks
from modeling_gqa.data.tokenizer import train_tokenizer
from modeling_gqa.training import estimate, publish
from modeling_gqa.training.recipe import load_recipe, parse_tokens
from modeling_gqa.training.recipe_model import load_config, new_model
from modeling_gqa_cli.errors import UserError
from training.pretrain import pretrain

SHAPE = {**MODEL, "attention_dropout": 0.0}


@pytest.fixture
def train(corpus, tmp_path, monkeypatch):
    """Pretrains a tiny model here, in folder `name`; returns its results."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")

    def train(name, *options, **values):
        recipe = {
            "preset": "tiny-mixed", "model_overrides": SHAPE, "data_files": [str(corpus)], "sequence_length": 64,
            "per_device_train_batch_size": 4, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "max_steps": 4,
            "save_steps": 2, "logging_steps": 1, "max_eval_blocks": 4, "output_dir": str(tmp_path / name),
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**recipe, **values}))
        pretrain([str(path), *options])
        return json.loads((tmp_path / name / "results.json").read_text())

    return train


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "tokens"), [("500000", 5e5), ("1_000", 1e3), ("3k", 3e3), ("500M", 5e8), ("2.5B", 2.5e9), ("1e9", 1e9)]
)
def test_numbers_of_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["many", "-3M", "0", "nanM", "inf", "M", "3 MB"])
def test_no_numbers_of_tokens(text):
    with pytest.raises(ValueError, match="it must be a positive number, such as 500000, 500M or 2B"):
        parse_tokens(text)


@pytest.mark.parametrize(
    "values", [{}, {"muon": True}, {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2}], ids=str
)
def test_a_run_that_is_made_longer_ends_as_if_it_had_been_so(train, tmp_path, values):
    """Bit for bit; its recipe then says the new length."""
    train("short", **values)
    longer = train("short", "--resume", "--tokens", str(8 * 256), **values)
    whole = train("whole", **values | {"max_steps": 8})
    assert longer["steps"] == whole["steps"] == 8 and longer["tokens_seen"] == 8 * 256
    assert longer["validation_loss"] == whole["validation_loss"]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(x, expected[name]) for name, x in weights(tmp_path / "short").items())
    saved = yaml.safe_load((tmp_path / "short" / "recipe.yaml").read_text())
    assert (saved["max_steps"], saved["tokens"], saved["resume"]) == (-1, str(8 * 256), False)


def test_runs_that_cannot_be_made_longer(train):
    """One whose schedule ends with it, one that has taken more steps, and one that differs in more than its length."""
    train("cosine", lr_scheduler_type="cosine")
    with pytest.raises(UserError, match=r"4 steps then, 8 now.*its schedule, cosine, ends with it"):
        train("cosine", "--resume", "--max-steps", "8", lr_scheduler_type="cosine")
    train("flat")
    with pytest.raises(UserError, match="has taken 4 steps, and 3 are asked for"):
        train("flat", "--resume", "--max-steps", "3")
    with pytest.raises(UserError, match=r"has another recipe: .*learning_rate"):
        train("flat", "--resume", "--max-steps", "8", "--learning-rate", "1e-3")


def test_a_length_in_other_words_is_the_same(train):
    """Also under a schedule that ends with the run: steps are compared, and not how they are given."""
    train("run", lr_scheduler_type="cosine")
    for options in (("--tokens", "1024"), ("--tokens", "1.024K")):
        assert train("run", "--resume", *options, lr_scheduler_type="cosine")["steps"] == 4


def test_epochs_are_steps_on_the_text(train, tmp_path, capsys):
    """They are counted as the Trainer counts them, and a run of one is made longer by another."""
    options = {"max_steps": -1, "num_train_epochs": 0.5, "per_device_train_batch_size": 3, "save_steps": 100}
    options |= {"gradient_accumulation_steps": 2}
    half = train("run", **options)["steps"]
    sequences = len(load_blocks(tmp_path / "run" / "data", "train"))
    assert half == math.ceil(0.5 * math.ceil(math.ceil(sequences / 3) / 2))
    assert f"Length  {half:,} steps of 384 tokens" in capsys.readouterr().out
    whole = train("run", "--resume", "--num-train-epochs", "1", **options)
    assert whole["steps"] == math.ceil(math.ceil(sequences / 3) / 2) > half
    assert (tmp_path / "run" / f"checkpoint-{whole['steps']}").is_dir()


def rates(folder, steps):
    log = json.loads((folder / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    return [entry["learning_rate"] for entry in log if "learning_rate" in entry]


def test_a_longer_run_keeps_its_warmup_and_decays_at_its_own_end(train, tmp_path, capsys):
    """Shares of the run as they were; the first step has the new rate, and the command says where it goes up."""
    values = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 0.5, "learning_rate": 1.0e-3}
    values["lr_scheduler_kwargs"] = {"num_decay_steps": 0.5, "decay_type": "linear"}
    train("run", **values)
    assert rates(tmp_path / "run", 4) == pytest.approx([0, 5e-4, 1e-3, 5e-4])
    train("run", "--resume", "--max-steps", "8", **values)
    assert "at step 4 the learning rate goes from 0.00e+00 to 1.00e-03" in capsys.readouterr().out
    assert rates(tmp_path / "run", 8)[4:] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    train("run", "--resume", "--max-steps", "12", **values)  # whose warm-up is still that of four steps
    assert rates(tmp_path / "run", 12)[8:] == pytest.approx([6.67e-4, 5e-4, 3.33e-4, 1.67e-4], rel=1e-2)


def test_intervals_of_a_resumed_run_are_the_new_ones(train, tmp_path):
    train("run")
    options = ("--logging-steps", "2", "--save-steps", "3", "--eval-strategy", "steps", "--eval-steps", "5")
    train("run", "--resume", "--max-steps", "10", "--save-total-limit", "9", *options)
    log = json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 6, 8, 10]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [5, 10]
    saved = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}" for step in (2, 4, 6, 9, 10)}


def test_training_begins_with_trained_weights(train, tmp_path):
    """At a rate of zero nothing changes; the tokenizer is the model's; a longer context needs no other weights."""
    train("first")
    first = tmp_path / "first" / "final"
    (first / "LICENSE").write_text("terms")
    longer = json.dumps({"max_position_embeddings": 128})
    options = ("--init-from", str(first), "--learning-rate", "0", "--model-overrides", longer)
    train("second", *options, lr_scheduler_type="linear")
    second, before = weights(tmp_path / "second"), weights(tmp_path / "first")
    assert all(torch.equal(second[name], x) for name, x in before.items()) and second.keys() == before.keys()
    final = tmp_path / "second" / "final"
    assert AutoModelForCausalLM.from_pretrained(final).config.max_position_embeddings == 128
    texts = [AutoTokenizer.from_pretrained(folder)("document 3") for folder in (first, final)]
    assert texts[0]["input_ids"] == texts[1]["input_ids"] and (final / "LICENSE").read_text() == "terms"
    assert "`final` trained further with `modeling_gqa`" in " ".join((final / "README.md").read_text().split())
    (first / "model.safetensors").rename(first / "gone.safetensors")
    with pytest.raises(UserError):
        train("second", *options, "--resume", lr_scheduler_type="linear")


def test_a_stock_model_is_trained_further_in_its_dtype(train, tmp_path):
    """A Llama in bfloat16, with Muon: it learns, and stays bfloat16."""
    train("first", preset="tiny-gqa")
    model = GQAForCausalLM.from_pretrained(tmp_path / "first" / "final", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tmp_path / "first" / "final").save_pretrained(tmp_path / "half")
    options = ("--init-from", str(tmp_path / "half"), "--muon", "--model-overrides", "{}")
    recipe, _ = load_recipe([str(tmp_path / "first.yaml"), *options])
    assert {x.dtype for x in new_model(recipe, load_config(recipe)).parameters()} == {torch.float32}
    results = train("second", *options)
    before = json.loads((tmp_path / "first" / "results.json").read_text())
    assert results["validation_loss"] < before["validation_loss"]
    assert {x.dtype for x in weights(tmp_path / "second").values()} == {torch.bfloat16}


def test_the_weights_that_a_run_begins_with_stay(train, tmp_path):
    """They are not overwritten, whatever the tokenizer is; settings of sampling that cannot be saved do not matter."""
    train("first")
    first = tmp_path / "first" / "final"
    options = ("--init-from", str(first), "--tokenizer", str(tmp_path / "first" / "tokenizer"))
    with pytest.raises(UserError, match=f"output_dir .* overlaps the model {first}"):
        train("first", *options, "--overwrite", "--model-overrides", "{}")
    assert (first / "model.safetensors").is_file()
    settings = json.loads((first / "generation_config.json").read_text())
    (first / "generation_config.json").write_text(json.dumps(settings | {"temperature": 0.6, "top_p": 0.9}))
    train("second", *options, "--model-overrides", "{}")
    assert (tmp_path / "second" / "final" / "model.safetensors").is_file()


def test_what_a_recipe_says_of_its_own_model_is_left_out(tmp_path, monkeypatch):
    """The tokenizer, and the name in the folder of the run."""
    monkeypatch.chdir(tmp_path)
    recipe, _ = load_recipe(["base-124m", "--init-from", "a/mine", "--bf16", "false", "--torch-compile", "false"])
    assert (recipe.tokenizer, recipe.output_dir) == (None, "runs/a/mine")  # a name on the Hub


def test_wrong_beginnings(train, tmp_path, capsys):
    with pytest.raises(UserError, match="cannot load the model /nowhere"):
        train("run", "--init-from", "/nowhere/m")
    with pytest.raises(UserError, match="preset and init_from are both given; choose one"):
        train("run", "--init-from", "a", "--preset", "tiny-mla")
    train("first")
    final = str(tmp_path / "first" / "final")
    with pytest.raises(UserError, match=r"with these model_overrides the weights of .* do not fit"):
        train("run", "--init-from", final, "--model-overrides", json.dumps({"intermediate_size": 64}))
    tied = GQAForCausalLM.from_pretrained(final).config.tie_word_embeddings
    with pytest.raises(UserError, match=r"do not fit: lm_head\.weight"):
        train("run", "--init-from", final, "--model-overrides", json.dumps({"tie_word_embeddings": not tied}))
    train("run", "--preset", final, "--model-overrides", "{}")
    assert f"To train these further: --init-from {final}" in " ".join(capsys.readouterr().err.split())


def test_a_run_finds_the_model_that_it_began_with(train, tmp_path, monkeypatch):
    """From another folder; and where it has been moved, if it is named again."""
    train("first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train("second", "--init-from", "first/final", "--model-overrides", "{}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    command = [str(tmp_path / "second" / "recipe.yaml"), "--resume", "--max-steps", "6"]
    pretrain(command)
    assert (tmp_path / "second" / "checkpoint-6").is_dir()
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=f"cannot load the model {tmp_path / 'first' / 'final'}"):
        pretrain(command)
    pretrain([*command[:-1], "8", "--init-from", "../moved/final"])
    assert (tmp_path / "second" / "checkpoint-8").is_dir()


def test_a_quantized_cache_is_not_trained_further(train, tmp_path, capsys):
    """It is left out, which a warning says: its constants are those of the old weights."""
    train("first")
    final = tmp_path / "first" / "final"
    config = GQAForCausalLM.from_pretrained(final).config
    config.cache_quantization = {"nbits": 4}
    config.save_pretrained(final)
    capsys.readouterr()
    train("second", "--init-from", str(final), "--model-overrides", "{}")
    assert f"the cache of {final} is quantized" in " ".join(capsys.readouterr().err.split())
    assert GQAForCausalLM.from_pretrained(tmp_path / "second" / "final").config.cache_quantization is None


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(train, tmp_path, capsys, monkeypatch):
    """Twenty tokens for each parameter, and four bytes of weights."""
    for options, state in (((), 8), (("--muon",), 4), (("--optim", "sgd"), 0)):  # bytes for a parameter, mostly
        with pytest.raises(FileNotFoundError):  # of results.json
            train("run", "--dry-run", "--tokens-per-parameter", "20", *options)
        said = capsys.readouterr().out
        assert not (tmp_path / "run").exists() and "20 for each parameter" in said and "Time    about" in said
        model = GQAForCausalLM(load_config(load_recipe([str(tmp_path / "run.yaml")])[0]))
        size = model.num_parameters()
        assert f"weights {size * 4 / 1024:.0f} KiB" in said
        found = re.search(r"optimizer ([\d.]+) (K?)i?B", said)
        assert float(found[1]) * (1024 if found[2] else 1) == pytest.approx(state * size, rel=0.5)
    monkeypatch.setattr(estimate, "free_memory", lambda device: 2**10)
    with pytest.raises(FileNotFoundError):
        train("run", "--dry-run")
    said = capsys.readouterr().out
    assert "Time    not measured: a step needs more than the 1 KiB" in said and "Memory  about" in said


def test_a_finished_model_can_be_finetuned_on_chats(train, tmp_path):
    """Turns are tokens of their own, generation stops at their end, and the assistant's tokens are known."""
    train("run")
    final = tmp_path / "run" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    )
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, own in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(said) == "c<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(final).eos_token_id == [tokenizer.eos_token_id, end]
    other = GenerationConfig.from_pretrained(final, eos_token_id=[7, end])
    other.save_pretrained(final)
    train("again", "--init-from", str(final), "--model-overrides", "{}")  # keeps what the model stopped at
    again = GenerationConfig.from_pretrained(tmp_path / "again" / "final")
    assert set(again.eos_token_id) == {7, end, tokenizer.eos_token_id}
    options = ("--tokenizer", str(tmp_path / "run" / "tokenizer"), "--init-from", str(final))
    train("other", *options, "--model-overrides", "{}")  # in which they may be other tokens
    other = GenerationConfig.from_pretrained(tmp_path / "other" / "final")
    assert set(other.eos_token_id) == {end, tokenizer.eos_token_id}


def test_contents_of_messages():
    """A text, or parts that are text; anything else is refused."""
    tokenizer = train_tokenizer(["a b c"], 300)

    def rendered(content):
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)

    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b\n"}]
    assert rendered(parts) == rendered(" ab\n") == "<|im_start|>user\n ab\n<|im_end|>\n"
    for content in (None, [], 3, [{"type": "image"}], ["a"], [{"type": "text", "text": "a"}, {"type": "image"}]):
        with pytest.raises(TemplateError, match="must be a text, or a list of parts of the type text"):
            rendered(content)
