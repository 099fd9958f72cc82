"""Recipes: the options of `pretrain`, `uptrain` and `compare`, and where their values come from.

Defaults come first, then a YAML file, then the command line; the later one wins.
"""

import json
import os
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from .errors import UsageError, did_you_mean
from .parser import Parser, option
from .paths import CONFIGURATION

SCRIPTS = ("pretrain", "uptrain", "compare")
# Options that name a text and say what holds for it alone.
TEXT = ("data_files", "dataset_name", "dataset_config_name", "dataset_split", "license")


def filled(help: str, default: Iterable[Any] = (), **more: Any) -> Any:
    """Return a field whose default is a list."""
    return field(default_factory=lambda: list(default), metadata={"help": help, **more})


@dataclass
class ModelOptions:
    _argument_group_name = "Model"

    preset: str = option("Packaged preset, or folder with a config.json; random weights.", "")
    init_from: str | None = option("Trained model to go on from, in place of a preset; folder or Hub name.")
    model_overrides: dict | str | None = option("JSON object: fields that replace the preset's.", metavar="JSON")


@dataclass
class PretrainOptions:
    """What `uptrain` takes as well but does not show, except `dry_run`."""

    _argument_group_name = "Length and optimizer"

    tokens: str | None = option("Tokens in all, such as 2B, in place of steps.")
    tokens_per_parameter: float | None = option("Tokens for each parameter, in place of steps.")
    muon: bool = option("Muon for the matrices of the layers.", False)
    dry_run: bool = option("Print length, time and memory, and stop.", False)


@dataclass
class RunningOptions:
    _argument_group_name = "How the model runs"

    attn_implementation: str | None = option("eager, sdpa, flash_attention_2, ...")
    tokenizer: str | None = option("Hub name or path. Default: BPE of bytes, trained on the text.")


@dataclass
class TextOptions:
    _argument_group_name = "Text"

    data_files: list[str] = filled("Text, JSON(L) or Parquet files, also packed; folders, globs.")
    dataset_name: str | None = option("Hub data set. With neither: Python's standard library.")
    dataset_config_name: str | None = option("Its configuration.")
    dataset_split: str = option("Its split. Default: train.", "train")
    text_column: str = option("Field that holds the text. Default: text.", "text")
    streaming: bool = option("Tokenize while training, and not before.", False)
    license: str | None = option("Licence of the text, for the model card.")
    sequence_length: int = option("Tokens in a packed sequence. Default: 256.", 256)
    validation_fraction: float = option("Share of the documents that is held out. Default: 0.05.", 0.05)
    max_eval_blocks: int = option("Sequences to validate on, at most. Default: 256.", 256)


@dataclass
class TrainOptions:
    """Fields of `TrainingArguments` that every run sets, with our defaults."""

    _argument_group_name = "Training"

    max_steps: int = option("Optimizer steps; or give num_train_epochs.", -1)
    learning_rate: float = option("Peak learning rate. Default: 3e-3.", 3e-3)
    warmup_steps: float = option("Steps, or a share below 1, in which the rate rises.", 0)
    weight_decay: float = option("Not applied to norms and biases. Default: 0.1.", 0.1)
    adam_beta2: float = option("Decay of AdamW's second moment. Default: 0.95.", 0.95)
    per_device_train_batch_size: int = option("Sequences in a step of one device. Default: 8.", 8)
    gradient_accumulation_steps: int = option("Batches added up in a step. Default: 1.", 1)
    bf16: bool = option("Compute in bfloat16.", False)
    torch_compile: bool = option("Compile the model.", False)
    seed: int = option("Of weights and order. Default: 42.", 42)


@dataclass
class RunOptions:
    _argument_group_name = "Run"

    output_dir: str | None = option("Folder of the run. Default: runs/RECIPE.")
    resume: bool = option("Continue the run in output_dir.", False)
    overwrite: bool = option("Delete the run in output_dir: what manifest.json lists.", False)
    save_total_limit: int | None = option("Checkpoints that are kept. Default: 2.", 2)
    logging_steps: float = option("Steps between log lines. Default: 20.", 20)
    report_to: list[str] = filled("Trackers, such as tensorboard wandb; files in output_dir.", ["none"])
    log_attention_logits: bool = option("Log the largest attention logit of each layer.", False)
    bigram_baseline: bool = option("Leave out the loss of a bigram model.", True)
    sample_prompt: str = option("Prompt of the sample printed at the end.", "")
    eval_tasks: list[str] = filled("At the end: wikitext2, lambada, hellaswag, or lm-eval's tasks.")
    eval_data: str | None = option("Folder with the files of these three.")
    eval_limit: int | None = option("Items of each task, at most. Default: all.")
    publish: bool = option("Save no final/, and print no sample.", True)


@dataclass
class UptrainOptions:
    _argument_group_name = "Student and teacher"

    student: str = option("The converted model: folder or Hub name.", "")
    teacher: str = option("The model it was converted from: folder or Hub name.", "")
    teacher_logits: str | None = option("Folder of its top logits; made if missing, then read.")
    teacher_top_k: int = option("Most likely tokens that are kept there. Default: 64.", 64)
    trainable: Literal["attention", "all"] = option("Parameters to train. Default: attention.", "attention")
    kl_weight: float = option("Weight of KL in the loss; the rest is next-token loss. Default: 0.9.", 0.9)
    keep_best: bool = option("Train to the end and keep the last weights, even if worse.", True)


@dataclass
class CompareOptions:
    _argument_group_name = "Comparison"

    pretraining: str = option("Recipe of each run: text, steps, schedule. Default: tiny.", "tiny")
    preset: str = option("Model whose attention is replaced. Default: tiny-mha.", "tiny-mha")
    options: dict | str | None = option("JSON object: options of pretraining for all runs.", metavar="JSON")
    kinds: dict | str | None = option(
        "JSON object: name of each model, and its fields; the first is what others are matched with.", metavar="JSON"
    )
    match: Literal["parameters", "flops", "nothing"] = option(
        "What all models have alike. Default: parameters.", "parameters"
    )
    learning_rates: list[float] = filled(
        "Peak rates for each model, at least 3; more are added at an edge.", [1.5e-3, 3e-3, 6e-3, 1.2e-2]
    )
    seeds: int = option("Runs of each model at its best rate. Default: 3.", 3)
    seed: int = option("First seed. Default: 42.", 42)
    jobs: int = option("Runs at once on this machine; each has a GPU of its own. Default: 1.", 1)
    launcher: str = option("What starts a run, such as `torchrun --nproc_per_node 8 -m`.", "")
    contexts: list[int] = filled("Contexts at which decoding is measured, in tokens.", [128, 512, 1024])
    output_dir: str | None = option("Folder of the comparison. Default: runs/RECIPE.")
    dry_run: bool = option("Print models, runs, time and memory, and stop.", False)


TRAINING = (RunningOptions, TextOptions, TrainOptions, RunOptions)
GROUPS: dict[str, tuple[Any, ...]] = {
    "pretrain": (ModelOptions, PretrainOptions, *TRAINING),
    "uptrain": (UptrainOptions, *TRAINING),
    "compare": (CompareOptions,),
}


# -- Names


def recipe_names(script: str = "pretrain") -> list[str]:
    """Return the names of the packaged recipes for `pretrain`, `uptrain` or `compare`, sorted."""
    names = sorted(path.stem for path in (CONFIGURATION / "recipes").glob("*.yaml"))
    others = [f"{other}-" for other in SCRIPTS[1:]]
    if script == "pretrain":
        return [name for name in names if not name.startswith(tuple(others))]
    return [name for name in names if name.startswith(f"{script}-")]


def preset_names() -> list[str]:
    """Return the names of the packaged model presets, sorted."""
    return sorted(path.parent.name for path in (CONFIGURATION / "models").glob("*/config.json"))


def preset_folder(preset: str) -> Path:
    """Return the folder of a preset: a packaged one for its name, any other for its path."""
    folder = CONFIGURATION / "models" / preset
    return folder if preset and folder.is_dir() else Path(preset)


def find_recipe(name: str, script: str, prog: str) -> Path:
    """Return the YAML file of a recipe.

    Args:
        name: of a packaged recipe, such as `tiny`, or the path of a file. A packaged recipe comes first; write
            `./tiny` for a file of that name.
        script: `pretrain`, `uptrain` or `compare`.
        prog: how the script was started, for the errors.

    Raises:
        UsageError: there is no such recipe, or it is another script's.
    """
    names = recipe_names(script)
    if name in names:
        return CONFIGURATION / "recipes" / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    for other in SCRIPTS:
        if other != script and name in recipe_names(other):
            raise UsageError(f"{name} is a recipe for {other}: {prog.replace(script, other)} {name}")
    hint = did_you_mean(Path(name).stem, names) or f"; there are {', '.join(names)}, and paths of YAML files"
    raise UsageError(f"no recipe at {name}{hint}")


def public_name(name: str) -> str:
    """Return the name of a model, tokenizer or data set as others may read it: of a path, the last part alone."""
    path = os.path.abspath(os.path.expanduser(name))
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.lexists(path)
    return os.path.basename(path) if is_path else name


# -- Values


def first_argument(script: str, argv: list[str], prog: str) -> Path:
    """Return the file of the recipe that `argv` begins with."""
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"give a recipe first: {prog} RECIPE [options]; {', '.join(recipe_names(script))}, or a path")
    return find_recipe(argv[0], script, prog)


def names_of(group: Any) -> list[str]:
    return [item.name for item in fields(group) if item.init]


def read_yaml(path: Path, known: list[str]) -> dict[str, Any]:
    """Return the fields of a YAML recipe; raises `UsageError` where it is none, or names an unknown field."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise UsageError(f"{path} must hold `field: value` lines")
    values = {checkpointing_name(str(key).replace("-", "_"), known): value for key, value in recipe.items()}
    for key in values:
        if key not in known:
            raise UsageError(f"{path}: unknown field {key}{did_you_mean(key, known)}")
    return values


def checkpointing_name(key: str, known: Container[str]) -> str:
    """Return the name that this release of transformers has for activation checkpointing; any other key as it is."""
    new = key.replace("gradient_checkpointing", "activation_checkpointing")
    return new if new in known else key.replace("activation_checkpointing", "gradient_checkpointing")


def read_values(argv: list[str], recipe_class: Any, prog: str) -> dict[str, Any]:
    """Return the value of every field of a recipe: its option's, else the YAML file's, else its default.

    An option of `argv` that sets one of a group of `recipe_class.alternatives` replaces what the YAML file says of the
    others.

    Args:
        argv: a recipe's name or path, and options.
        recipe_class: a dataclass; its `unused` are fields that are refused, with the reason.
        prog: how the script was started.

    Raises:
        UsageError: an unknown recipe, field or option, a value of the wrong type, or a field without effect.
    """
    path = first_argument(recipe_class.script, argv, prog)
    parser, known = Parser([recipe_class], prog, "RECIPE [options]", ""), names_of(recipe_class)
    defaults, options = parser.parse([]), [as_declared(argument, known) for argument in argv[1:]]
    told = parser.parse(options)  # the command line alone
    arguments, unchecked = [], {}
    hints = get_type_hints(recipe_class)
    for key, value in read_yaml(path, known).items():
        if value is None and defaults[key] is not None:
            raise UsageError(f"{path}: {key} has no value; give one, or leave the line out")
        if value is None or value == [] or (value is True and {bool, str} <= set(get_args(hints[key]))):
            unchecked[key] = value
        elif isinstance(value, list) and not isinstance(defaults[key], list):
            arguments.append(f"--{key}={','.join(map(str, value))}")
        else:
            arguments += as_arguments({key: value})
    parser.set_defaults(**unchecked)  # values that no option can be given
    # The recipe's values go in front of the command line's, so that types are checked alike and the latter win.
    values = {name: getattr(value, "value", value) for name, value in parser.parse([*arguments, *options]).items()}
    for name, reason in recipe_class.unused.items():
        if values[name] != getattr(defaults[name], "value", defaults[name]):
            raise UsageError(f"{name} has no effect here: {reason}")
    for group in recipe_class.alternatives:
        if chosen := {way for way in group if is_set(told[way])}:
            values |= {way: defaults[way] for way in group if way not in chosen}
    if is_set(told.get("data_files")) or is_set(told.get("dataset_name")):
        values |= {name: told[name] for name in TEXT}  # the recipe's are those of its own text
    if is_set(told.get("init_from")) and not is_set(told["tokenizer"]):
        values["tokenizer"] = defaults["tokenizer"]  # the model's own, and not that of the recipe's model
    for role in ("init_from", "student", "teacher"):
        if values.get(role) and os.path.exists(model := os.path.expanduser(values[role])):
            values[role] = os.path.abspath(model)  # so that the run can be resumed from another folder
    name = values.get("preset") or values.get("init_from") or path.stem
    output = values["output_dir"] or str(Path("runs") / path.stem)
    values["output_dir"] = os.path.expanduser(output.replace("{preset}", public_name(name)))
    return values


def is_set(value: Any) -> bool:
    """Return whether an option has a value: no number up to 0, no empty text."""
    return bool(value) and not (isinstance(value, int | float) and value < 0)


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Return options as arguments, such as `["--max_steps=5", "--data_files", "a", "b"]`."""
    arguments: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def as_declared(argument: str, known: Container[str]) -> str:
    """Return an option of activation checkpointing by the name that this release has; any other as it is."""
    name, equals, value = argument.partition("=")
    declared = checkpointing_name(name[2:].replace("-", "_"), known)
    return f"--{declared}{equals}{value}" if name.startswith("--") and "checkpointing" in name else argument
