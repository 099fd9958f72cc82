"""Recipes: what a run does, from defaults, then a YAML file, then the command line (the later wins)."""

import difflib
import json
import math
import os
import sys
from argparse import Action
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import yaml
from accelerate.utils import DynamoBackend
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

import modeling_gqa  # noqa: F401  (registers model_type "gqa")

from .recipe_fields import FREE_ON_RESUME, NUMBERS, UNUSED, WHAT_A_RUN_WRITES

CONFIGURATION = Path(__file__).resolve().parents[1] / "configuration"
SAVED_RECIPE, SAVED_MODEL = "recipe.yaml", "model.json"


class RecipeError(Exception):
    """Something the user can put right; its message is one line, shown without a traceback."""

    exit_code = 1

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


@dataclass
class Recipe(TrainingArguments):
    """Every option of a pretraining run: transformers' `TrainingArguments` and the fields below."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_overrides"]
    script, unused = "training.pretrain", UNUSED

    preset: str = field(default="", metadata={"help": "Model: a folder of configuration/models, or a path."})
    model_overrides: dict | str | None = field(default=None, metadata={"help": "JSON: fields changed in the preset."})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Hub name or path; a byte-level BPE tokenizer is trained if left out."}
    )
    data_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Text, JSONL, JSON or Parquet files (.gz, .bz2, .xz and .zst too), folders or globs."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub data set; without it and data_files, Python's standard library is read."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the Hub data set."})
    streaming: bool = field(default=False, metadata={"help": "Tokenize while training instead of before it."})
    text_column: str = field(
        default="text", metadata={"help": "Field that holds the text (JSONL, JSON, Parquet, Hub)."}
    )
    license: str | None = field(default=None, metadata={"help": "Licence of the text, for the model card."})
    sequence_length: int = field(default=256, metadata={"help": "Tokens in a packed block."})
    validation_fraction: float = field(default=0.05, metadata={"help": "Share of the documents held out."})
    max_eval_blocks: int = field(default=256, metadata={"help": "Most blocks used for validation."})
    bigram_baseline: bool = field(default=True, metadata={"help": "Report the loss of a bigram model as well."})
    sample_prompt: str = field(default="", metadata={"help": "Prompt of the sample printed at the end."})
    resume: bool = field(default=False, metadata={"help": "Continue the run in output_dir."})
    overwrite: bool = field(
        default=False, metadata={"help": "Delete the run that output_dir holds: the files in its manifest.json."}
    )

    # Defaults of TrainingArguments that pretraining wants otherwise.
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Decay of AdamW's second moment."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay; not applied to norms and biases."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between log lines."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    # The filter would show an average in place of a NaN; training stops at the first one instead.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses in the log."})
    enable_jit_checkpoint: bool = field(default=True, metadata={"help": "Save and exit on SIGTERM."})

    def __post_init__(self) -> None:
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        if isinstance(self.report_to, str):
            self.report_to = self.report_to.split(",")
        # Unless told, accelerate does not join CPU processes into a group.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.check_numbers()
        super().__post_init__()
        self.check_options()

    def check_options(self) -> None:
        """Raise `ValueError` for options that do not go together, or cannot work here."""
        name = self.output_dir or ""
        if not name.isprintable() or any(len(part.encode()) > 255 for part in Path(name).parts):
            raise ValueError(f"output_dir is {ascii(name)[:100]}; a name must be printable and of at most 255 bytes")
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            raise ValueError(f"num_train_epochs is {self.num_train_epochs} and max_steps is not given; set one of them")
        if self.save_strategy == "best":
            raise ValueError("save_strategy best has no effect here: the last weights are the result of a run")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; it must lie between 0 and 1")
        if self.data_files and self.dataset_name:
            raise ValueError("data_files and dataset_name are both given; name one source of text")
        if self.streaming and self.max_steps <= 0:
            raise ValueError("streaming has no end, so max_steps must say how long to train")
        if self.streaming and self.dataloader_num_workers:
            raise ValueError(
                f"dataloader_num_workers is {self.dataloader_num_workers}, and each would stream all of the text; "
                "streaming needs 0"
            )
        if self.fsdp and self.world_size == 1:
            raise ValueError("fsdp shards a model over several processes, and there is one: start it with torchrun")
        if self.use_liger_kernel and not is_liger_kernel_available():
            raise ValueError("use_liger_kernel needs the package liger-kernel: install it, or leave the option out")
        if self.torch_compile and str(self.torch_compile_backend).upper() not in DynamoBackend.__members__:
            backends = ", ".join(sorted(DynamoBackend.__members__)).lower()
            raise ValueError(f"torch_compile_backend is {self.torch_compile_backend}; there are {backends}")
        if self.torch_compile and self.torch_compile_mode:
            from torch._inductor import list_mode_options  # slow to import, and only this needs it

            if self.torch_compile_mode not in (modes := list_mode_options()):
                raise ValueError(f"torch_compile_mode is {self.torch_compile_mode}; there are {', '.join(modes)}")
        if self.push_to_hub and self.hub_model_id:
            validate_repo_id(self.hub_model_id)
        try:
            for tracker in get_reporting_integration_callbacks(self.report_to):
                tracker()
        except Exception as error:  # an unknown name, a missing package: each tracker has its own class
            raise ValueError(f"report_to {', '.join(self.report_to)}: {error}") from error

    def check_numbers(self) -> None:
        """Raise `ValueError` for a number that is not finite, or beyond its bounds."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{item.name} is {value}; it must be a finite number")
        for names, permitted, words in NUMBERS:
            for name in names:
                value = getattr(self, name, None)
                if isinstance(value, int | float) and not permitted(value):
                    raise ValueError(f"{name} is {value}; it must be {words}")

    def inputs(self) -> list[tuple[str, str]]:
        """What the run reads, each in words and as it was named; Hub names and paths look alike."""
        preset = str(preset_folder(self.preset)) if self.preset else None
        texts = [("text", name) for name in (*self.data_files, self.dataset_name)]
        return [(what, name) for what, name in (*texts, ("preset", preset), ("tokenizer", self.tokenizer)) if name]


def public_name(name: str) -> str:
    """Return a Hub name as it is, and of a path of this machine its last part alone."""
    path = os.path.abspath(os.path.expanduser(name))
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or os.path.lexists(path)
    return os.path.basename(path) if is_path else name


class RecipeParser(HfArgumentParser):
    def __init__(self, recipe_class: type[Recipe]) -> None:
        parsed: Any = recipe_class
        prog = f"python -m {recipe_class.script}"
        texts = {"description": recipe_class.__doc__, "epilog": WHAT_A_RUN_WRITES}
        super().__init__(parsed, allow_abbrev=False, prog=prog, **texts)
        example = f"configuration/recipes/{recipe_names(recipe_class)[-1]}.yaml"
        self.add_argument("recipe", nargs="?", help=f"YAML file, for instance {example}")

    def error(self, message: str) -> Any:
        # argparse would print every option that TrainingArguments has.
        raise RecipeError(message)


def suggestion(word: str, words: Any) -> str:
    """Return ` (did you mean X?)`, or nothing where no word is near."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def load_recipe(argv: list[str], recipe_class: type[Any] = Recipe) -> tuple[Any, dict[str, Any]]:
    """Parse a command line into a recipe of the script whose recipes are of `recipe_class`.

    Returns the recipe and its resolved values, which `save_recipe` writes and `compare_recipes` reads. Raises
    `RecipeError` for an unknown key, a value of the wrong type or a combination that cannot work.
    """
    parser = RecipeParser(recipe_class)
    argv = [renamed_option(argument, {item.name for item in fields(recipe_class)}) for argument in argv]
    defaults = vars(parser.parse_known_args([])[0])
    path = parser.parse_known_args(argv)[0].recipe
    if path is None:
        raise RecipeError(
            f"no recipe given; there are {', '.join(recipe_names(recipe_class))} in configuration/recipes"
        )
    options = {name: action for action in parser._actions for name in action.option_strings}
    # The recipe's values go in front of the command line's, so that types are checked alike and the latter win.
    namespace, unknown = parser.parse_known_args([*yaml_arguments(Path(path), parser, options, recipe_class), *argv])
    if unknown:
        name = unknown[0].partition("=")[0]
        raise RecipeError(f"unknown option {name}{suggestion(name, options)}")
    values = {name: getattr(value, "value", value) for name, value in vars(namespace).items() if name != "recipe"}
    for name, reason in recipe_class.unused.items():
        if values.get(name) != defaults.get(name):
            raise RecipeError(f"{name} has no effect here: {reason}")
    values["output_dir"] = os.path.expanduser(values["output_dir"] or str(Path("runs") / Path(path).stem))
    try:
        return recipe_class(**values), values
    except Exception as error:  # TrainingArguments reads files, asks packages and devices: each has its own classes
        raise RecipeError(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error


def recipe_names(recipe_class: type[Recipe] = Recipe) -> list[str]:
    """Return the names of the script's recipes in this repository: uptraining's begin with `uptrain-`."""
    names = sorted(path.stem for path in (CONFIGURATION / "recipes").glob("*.yaml"))
    return [name for name in names if name.startswith("uptrain-") == (recipe_class is not Recipe)]


def yaml_arguments(
    path: Path, parser: RecipeParser, options: dict[str, Action], recipe_class: type[Recipe]
) -> list[str]:
    """Turn a YAML recipe into command-line arguments."""
    if not path.is_file():
        raise RecipeError(f"no recipe at {path}{suggestion(path.stem, recipe_names(recipe_class))}")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{path} must hold `field: value` lines")
    known = {item.name for item in fields(recipe_class) if item.init}
    hints = get_type_hints(recipe_class)
    arguments = []
    for key, value in recipe.items():
        key = checkpointing_name(str(key), known)
        if key not in known:
            raise RecipeError(f"{path}: unknown field {key}{suggestion(key, known)}")
        if value is None and parser.get_default(key) is not None:
            raise RecipeError(f"{path}: {key} has no value; give one, or leave the line out")
        if value is None or (value is True and options[f"--{key}"].type is str and bool in get_args(hints[key])):
            parser.set_defaults(**{key: value})
        elif isinstance(value, list) and options[f"--{key}"].nargs == "+":
            # As arguments they would swallow a positional one behind them.
            parser.set_defaults(**{key: [str(item) for item in value]})
        elif isinstance(value, list):
            arguments.append(f"--{key}={','.join(map(str, value))}")
        else:
            arguments.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def checkpointing_name(key: str, known: set[str]) -> str:
    """Map transformers' old and new names of activation checkpointing to the one that this release has."""
    new = key.replace("gradient_checkpointing", "activation_checkpointing")
    return new if new in known else key.replace("activation_checkpointing", "gradient_checkpointing")


def renamed_option(argument: str, known: set[str]) -> str:
    name, equals, value = argument.partition("=")
    return f"--{checkpointing_name(name[2:], known)}{equals}{value}" if name.startswith("--") else argument


def preset_folder(preset: str) -> Path:
    """Return the folder of a preset: one of this repository's by its name, any other by its path."""
    folder = CONFIGURATION / "models" / preset
    return folder if preset and folder.is_dir() else Path(preset)


def check_length(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise `RecipeError` where blocks are longer than the model's positions reach."""
    if recipe.sequence_length > config.max_position_embeddings:
        raise RecipeError(
            f"sequence_length is {recipe.sequence_length}, and the model's max_position_embeddings is "
            f"{config.max_position_embeddings}; make the one smaller or the other larger"
        )


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """Build the model's configuration from the recipe's preset and overrides."""
    names = sorted(path.parent.name for path in (CONFIGURATION / "models").glob("*/config.json"))
    path = preset_folder(recipe.preset) / "config.json"
    if not recipe.preset or not path.is_file():
        hint = suggestion(recipe.preset, names) or f"; there are {', '.join(names)}"
        raise RecipeError(f"no model preset named {recipe.preset!r}{hint}")
    values = json.loads(path.read_text(encoding="utf-8"))
    overrides = recipe.model_overrides or {}
    if not isinstance(overrides, dict):
        raise RecipeError(f"model_overrides must be a JSON object, not {overrides!r}")
    config_class = type(AutoConfig.for_model(values["model_type"]))
    known = {item.name for item in fields(config_class)}
    for key in overrides:
        if key not in known | {"per_layer_config"}:
            raise RecipeError(f"model_overrides: unknown field {key}{suggestion(key, known)}")
    try:
        # Not from_pretrained, which would write this machine's path into the run and refuse to resume it elsewhere.
        config = config_class.from_dict(values, **overrides)
    except Exception as error:  # strict configurations wrap what was wrong in classes of their own
        raise RecipeError(f"model preset {recipe.preset}: {error.__cause__ or error}") from error
    check_length(recipe, config)
    return config


def save_recipe(folder: Path, values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Write the resolved recipe and model configuration of a run; both can be loaded again."""
    kept = {name: value for name, value in values.items() if name not in ("hub_token", "local_rank")}
    (folder / SAVED_RECIPE).write_text(yaml.safe_dump(kept), encoding="utf-8")
    (folder / SAVED_MODEL).write_text(config.to_json_string(use_diff=False), encoding="utf-8")


def compare_recipes(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise `RecipeError` naming the keys in which the run in `output_dir` differs from this one."""
    folder = Path(values["output_dir"])
    if not (folder / SAVED_RECIPE).is_file() or not (folder / SAVED_MODEL).is_file():
        raise RecipeError(f"nothing to resume in {folder}: it holds no {SAVED_RECIPE}")
    try:
        saved = dict(yaml.safe_load((folder / SAVED_RECIPE).read_text(encoding="utf-8")))
        model = dict(json.loads((folder / SAVED_MODEL).read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{folder / SAVED_RECIPE} or {SAVED_MODEL} is damaged: {error}") from error
    ours = json.loads(config.to_json_string(use_diff=False))
    pairs = [(key, saved.get(key, value), value) for key, value in values.items() if key not in FREE_ON_RESUME]
    pairs += [
        (f"model {key}", model.get(key), ours.get(key)) for key in sorted({*model, *ours} - {"transformers_version"})
    ]
    changed = [f"{key} ({then!r} then, {now!r} now)" for key, then, now in pairs if then != now]
    if changed:
        raise RecipeError(f"the run in {folder} has another recipe: {', '.join(changed)}")
