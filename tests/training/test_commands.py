"""How the scripts are started: names of recipes, spellings of options, the installed package, what is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from modeling_gqa.training.comparison.models import CompareRecipe
from modeling_gqa.training.recipe import Recipe, load_recipe
from modeling_gqa.training.recipe_model import load_config
from modeling_gqa.training.results import FORMAT_VERSION, LABELS, PRINTED
from modeling_gqa.training.uptraining import UptrainRecipe
from modeling_gqa_cli.errors import install_extra
from modeling_gqa_cli.main import run_script
from modeling_gqa_cli.recipes import CONFIGURATION, preset_names, recipe_names
from training.pretrain import pretrain

ON_CPU = ("--bf16=false", "--torch-compile=false", "--fsdp=false")


@pytest.mark.parametrize("name", ["max-steps", "max_steps"])
def test_both_spellings_are_one_option(tmp_path, name):
    path = tmp_path / "mine.yaml"
    path.write_text(f"preset: tiny-gqa\n{name}: 7\nper-device-train-batch-size: 3\n")
    assert load_recipe([str(path)])[0].max_steps == 7 and load_recipe([str(path)])[0].per_device_train_batch_size == 3
    for option in ((f"--{name}", "9"), (f"--{name}=9",)):
        assert load_recipe([str(path), *option])[0].max_steps == 9
    assert load_recipe([str(path), "--no_bigram_baseline"])[0].bigram_baseline is False


@pytest.mark.parametrize("script", ["pretrain", "uptrain", "compare"])
def test_a_packaged_recipe_is_found_by_name(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classes = {"pretrain": Recipe, "uptrain": UptrainRecipe, "compare": CompareRecipe}
    needed = {"pretrain": ON_CPU, "uptrain": [*ON_CPU, "--student", "s", "--teacher", "t"]}
    for name in recipe_names(script):
        path = CONFIGURATION / "recipes" / f"{name}.yaml"
        for named in (name, str(path)):
            recipe = load_recipe([named, *needed.get(script, [])], classes[script])[0]
            assert recipe.script == script and recipe.preset in ("", *preset_names())
            assert script != "pretrain" or load_config(recipe).max_position_embeddings >= recipe.sequence_length


@pytest.mark.parametrize("option", ["--sequence-length", "--sequence_length"])
@pytest.mark.parametrize("length", ["1", "100000"], ids=["by-the-recipe", "by-the-model"])
def test_an_error_names_a_field_as_the_user_wrote_it(option, length, tmp_path, capsys):
    options = ["--preset", "tiny-gqa", "--output-dir", str(tmp_path / "run")]
    (tmp_path / "mine.yaml").write_text(f"sequence_length: {length}\n")
    for argv, name in (
        (["tiny", *options, option, length], "--sequence-length"),
        ([str(tmp_path / "mine.yaml"), *options], "sequence_length"),
    ):
        with pytest.raises(SystemExit):
            run_script("pretrain", argv, "python -m training.pretrain", pretrain)
        assert capsys.readouterr().err.startswith(f"error: {name} is {length}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tokens", "5Q"), "--tokens is 5Q"),
        (("--model-overrides", "{hidden"), "'{hidden' is no JSON object: "),
        (("--output-dir", "FILE"), "FILE is a file: give a folder to write to"),
    ],
)
def test_wrong_values_are_one_line(options, said, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    argv = [x.replace("FILE", str(tmp_path / "file")) for x in ("--output-dir", str(tmp_path / "run"), *options)]
    with pytest.raises(SystemExit):
        run_script("pretrain", ["tiny", "--preset", "tiny-gqa", *ON_CPU, *argv], "modeling-gqa pretrain", pretrain)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: " + said.replace("FILE", str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("preset", [name for name in preset_names() if name != "tiny-gqa"])
def test_the_run_folder_is_named_after_the_preset(preset):
    recipe, values = load_recipe([preset.rpartition("-")[0], "--preset", preset, *ON_CPU])
    assert recipe.output_dir == values["output_dir"] == f"runs/{preset}" and recipe.preset == preset


def test_the_installed_command_trains(script, tmp_path):
    command = [Path(sys.executable).with_name("modeling-gqa"), "pretrain", str(script.recipe)]
    env = {name: value for name, value in script.env.items() if name != "OMP_WAIT_POLICY"}
    options = ["--max_steps", "2", "--warmup-steps", "0"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "runs" / "recipe" / "final" / "config.json").exists(), done.stderr


def run_with(hook: str, *options: str) -> subprocess.CompletedProcess:
    """Start the script in a process in which `hook` has been executed."""
    code = f"{hook}\nimport runpy, sys\nsys.argv = {['pretrain', 'tiny', *options]}\n"
    code += "runpy.run_module('training.pretrain', run_name='__main__', alter_sys=True)"
    root = CONFIGURATION.parent
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("module", "package"), [("accelerate", "accelerate"), ("datasets", "datasets")])
def test_a_missing_package_is_one_line(tmp_path, module, package):
    options = ("--dataset-name", "a/b", "--output-dir", str(tmp_path / "run"))
    process = run_with(f"import sys; sys.modules[{module!r}] = None", *options)
    said = f"error: this needs {package}, which is not installed: {install_extra('training')}"
    assert process.returncode == 1 and process.stderr.splitlines()[-1] == said, process.stderr


def test_only_the_quickstart_deletes_an_earlier_run_unasked():
    recipes = (CONFIGURATION / "recipes").glob("*.yaml")
    assert [path.stem for path in recipes if yaml.safe_load(path.read_text()).get("overwrite")] == ["quickstart"]


def test_results_are_documented(finished):
    results = json.loads((finished[0] / "results.json").read_text())
    assert results["format_version"] == FORMAT_VERSION
    documented = (
        (CONFIGURATION.parent / "docs" / "pretraining.md").read_text().split("## What does results.json hold?")[1]
    )
    assert {*results, *LABELS, *PRINTED, "evaluation"} <= set(re.findall(r"`(\w+)`", documented))
    assert yaml.safe_load((finished[0] / "final" / "recipe.yaml").read_text())["preset"] == "tiny-mixed"
