"""The command `modeling-gqa`: its commands, their help, and how it starts."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from .errors import UsageError, UserError, did_you_mean, missing_package, stop
from .paths import refuse_missing

SUMMARY = """usage: modeling-gqa COMMAND [options]     modeling-gqa COMMAND --help     modeling-gqa --version

Change the attention of a trained language model: between MHA, MQA, GQA and MLA, and to and from transformers' classes.

{commands}

A SOURCE is a folder with a checkpoint in safetensors, a GGUF file, or a model's name on the Hub. Commands change
nothing in it (but evaluate --card its README.md) and read no file outside it. A TARGET is the folder to write. It is
written aside and renamed at the end, so TARGET is complete or untouched. A TARGET that exists is refused; --force
replaces a checkpoint or an empty folder, and nothing else. Exit codes: 0 done, 1 an error that the message explains,
2 wrong usage, 129, 130, 141 or 143 stopped by a signal.
"""
FORCE = "Replace the checkpoint at TARGET once the new one is complete."
WRITES = """A run writes into --output-dir, and tokens into datasets' cache. It deletes only what manifest.json lists
there. Every option is a field of a recipe's YAML file, too: `max_steps: 600`. --help-all shows those of
TrainingArguments."""


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        summary: what it does, in a line.
        module: that holds the function of its name, which is called with the options.
        positional: help of its arguments that are no options, by name.
        switches: help of options that take no value, by name.
        groups: names of dataclasses in `.options`, whose fields are its options.
        more: what help says beyond that.
    """

    summary: str
    module: str
    positional: dict[str, str] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    more: str = ""


SOURCE = {"source": "Folder of a checkpoint, a .gguf file, or a model's name on the Hub."}
TARGET = {"target": "Folder to write: a complete Hub repository."}
OURS, SCRIPTS = "modeling_gqa_cli.", "modeling_gqa.scripts."
COMMANDS = {
    "convert": Command(
        "Give a trained model another attention, measure what that cost, and save it.",
        OURS + "conversion",
        SOURCE | TARGET,
        {"dry-run": "Show what would be done, and write nothing.", "force": FORCE},
        ("NewAttention", "HowToConvert", "Text", "Running"),
        "Exact: to a multiple of the key/value heads, to MLA that caches as much, from MLA without a latent norm to "
        "MHA. All else is lossy: uptrain it. Example: modeling-gqa convert llama/ out/ "
        "--attention-kind mla --cache-size 128 --text corpus/",
    ),
    "import": Command(
        "Rewrite a checkpoint of another family, such as Llama, Qwen, Phi or OLMo, as ours, exactly.",
        OURS + "conversion",
        SOURCE | TARGET,
        {"force": FORCE},
        ("ImportOptions",),
    ),
    "export": Command(
        "Rewrite a checkpoint of ours as one of transformers' own classes, or as a file NAME.gguf for llama.cpp.",
        OURS + "conversion",
        SOURCE | {"target": "Folder to write: a complete Hub repository. Or a file NAME.gguf."},
        {"force": FORCE},
        ("ExportOptions",),
    ),
    "inspect": Command(
        "Show each layer's attention and cache, and which conversions are exact, lossy or impossible.",
        OURS + "conversion",
        SOURCE,
        {"json": "Print JSON."},
        ("InspectOptions",),
    ),
    "quantize-cache": Command(
        "Let generate round what a model caches to a few bits, measure what that costs, and save it.",
        OURS + "conversion",
        SOURCE | TARGET,
        {"force": FORCE},
        ("WhatToRound", "Text", "Running"),
        "With --text the means of what is cached are measured, and taken out before rounding; without, less is kept. "
        "Example: modeling-gqa quantize-cache llama/ out/ --cache-share 0.2 --text corpus/",
    ),
    "frontier": Command(
        "Show what a model loses on your text with smaller caches, by flags and by bits that are chosen.",
        OURS + "conversion",
        SOURCE,
        {"json": "Print JSON."},
        ("Frontier", "Text", "Running"),
        "Nothing is trained, and nothing written but the picture. "
        "Example: modeling-gqa frontier llama/ --text corpus/ --picture frontier.png",
    ),
    "write-text": Command(
        "Let a model write text to calibrate on, for when you have none.",
        OURS + "conversion",
        SOURCE | {"file": "File NAME.jsonl to write, for --text of convert."},
        {"force": "Replace FILE."},
        ("WhatToWrite", "WhereToWrite"),
        "Each document begins with a random token. Example: modeling-gqa write-text llama/ own.jsonl, then "
        "modeling-gqa convert llama/ out/ --attention-kind mla --cache-size 128 --text own.jsonl",
    ),
    "report": Command(
        "Show what models cost by their configurations: parameters, FLOPs, cache, bytes read, bounds on speed.",
        OURS + "report",
        {"configs": "Presets, folders or files with a config.json, or names on the Hub; ratios are to the first."},
        {"measure": "Measure this machine, and decoding with random weights on it.", "json": "Print JSON."},
        ("Sizes", "Asked", "MachineOptions", "Output"),
        "Example: modeling-gqa report llama-3-8b --attention-kind mla --memory 80 --bandwidth 3350 --rate 989",
    ),
    "evaluate": Command(
        "Evaluate a checkpoint by lm-eval's tasks or on text in files, alone or against another one.",
        OURS + "evaluation",
        {"checkpoint": SOURCE["source"]},
        {"run-code": "Let humaneval run code that the model writes.", "card": "Write the scores into its README.md."},
        ("WhatToEvaluate", "WhereToEvaluate"),
        "Files: wikitext2-raw-test.txt, lambada_openai_test.jsonl, hellaswag_val.txt.bz2, HumanEval.jsonl.gz. Example: "
        "modeling-gqa evaluate out/ --against llama/ --data yardsticks/ --limit 300",
    ),
    "pretrain": Command("Train a new model from a RECIPE.", SCRIPTS + "pretrain", more=WRITES),
    "uptrain": Command(
        "Train back what a conversion lost, from a RECIPE.",
        SCRIPTS + "uptrain",
        more=WRITES.replace("--output-dir,", "--output-dir (and a missing --teacher-logits),", 1),
    ),
    "compare": Command(
        "Train models that differ in their attention alone, and compare them, from a RECIPE.",
        SCRIPTS + "compare",
        more="A comparison writes into --output-dir: runs/NAME/, which is a pretraining run each, report.md, "
        "comparison.json and pictures. The same command goes on where it was stopped. Several launches of it, on "
        "machines that share the folder, divide the runs.",
    ),
    "serve": Command("Serve a checkpoint by `transformers serve`, with an OpenAI-compatible API.", OURS + "serving"),
    "chat": Command("Chat with a model that is served, by `transformers chat`.", OURS + "serving"),
}


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """End the process without a word, as the signal would, where nobody reads what it prints."""
    try:
        try:
            yield
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)  # of SIGPIPE


@quiet_pipe()
def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command that `argv`, or `sys.argv`, holds; ends the process by its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        print(f"modeling-gqa {version('modeling_gqa')}")
        sys.exit()
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(SUMMARY.format(commands="\n".join(f"  {name:<10} {x.summary}" for name, x in COMMANDS.items())))
        sys.exit(0 if argv else 2)
    name, *rest = argv
    if name not in COMMANDS:
        stop(f"there is no command {name}{did_you_mean(name, COMMANDS)}; see modeling-gqa --help", 2)
    command = COMMANDS[name]
    if command.module.startswith(SCRIPTS):
        run_script(name, rest, f"modeling-gqa {name}")
    try:
        values = read_options(name, rest) if command.groups else {"name": name, "arguments": rest}
        sources: list[Any] = [values.get(source) for source in ("source", "checkpoint", "against")]
        if name == "serve" and rest and not rest[0].startswith("-"):
            sources = rest[:1]
        for source in filter(None, sources):  # before seconds of imports
            refuse_missing(str(source))
    except UserError as error:
        stop(str(error), error.exit_code)
    run = imported(command.module, name)
    if command.groups:
        imported("modeling_gqa.common.console", "quiet")()
    run(**values)
    sys.exit(0)


@quiet_pipe()
def run_script(name: str, argv: list[str], prog: str, script: Callable[..., None] | None = None) -> NoReturn:
    """Run a training script; ends the process by its exit code.

    Args:
        name: `pretrain`, `uptrain` or `compare`.
        argv: its arguments.
        prog: how it was started.
        script: the function, where it is imported already.
    """
    # OpenMP reads this when torch is imported. Threads that wait actively slow each other down several times over as
    # soon as another program wants a core, and gain little on an idle machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        check_script(name, argv, prog)
    except UsageError as error:
        stop(str(error), 2)
    script = script or imported(SCRIPTS + name, name)
    try:
        from modeling_gqa.common.console import user_errors
    except ImportError as error:
        stop(missing_package(error) or str(error))
    with user_errors(argv=argv):
        script(argv, prog)
    sys.exit(0)


def imported(module: str, name: str) -> Callable[..., None]:
    """Import the function of a command; ends the process where a package is missing."""
    try:
        return getattr(import_module(module), {"import": "import_", "chat": "serve"}.get(name, name.replace("-", "_")))
    except ImportError as error:
        if (said := missing_package(error)) is None:
            raise
        stop(said)


def read_options(name: str, argv: list[str]) -> dict[str, Any]:
    """Return the values of a command's options and arguments; raises `UsageError`."""
    from . import options
    from .parser import Parser

    command = COMMANDS[name]
    positional = ["[CONFIG ...]" if x == "configs" else x.upper() for x in command.positional]
    groups = [getattr(options, x) for x in command.groups]
    texts = " ".join([*positional, "[options]"]), command.summary, command.more
    parser = Parser(groups, f"modeling-gqa {name}", *texts)
    for argument, said in command.positional.items():
        shape: dict[str, Any] = {"nargs": "*"} if argument == "configs" else {}
        parser.add_argument(argument, help=said, metavar=argument.upper(), **shape)
    for switch, said in command.switches.items():
        parser.add_argument(f"--{switch}", action="store_true", help=said, dest=switch.replace("-", "_"))
    for switch in ("regroup", "refit", "key_mean") if name == "convert" else ():
        names = dict.fromkeys((f"--no-{switch.replace('_', '-')}", f"--no_{switch}"))
        parser.add_argument(*names, action="store_false", dest=switch, help=argparse.SUPPRESS)
    if {"--help", "-h"} & set(argv):
        print(parser.format_help())
        sys.exit()
    values = parser.parse(argv)
    if values.get("layers") is not None:
        values["layers"] = options.parse_layers(values["layers"])
    return values


def check_script(name: str, argv: list[str], prog: str) -> None:
    """Show the help of a script, or raise `UsageError` where there is no such recipe; `read_values` checks the rest."""
    from . import recipes
    from .parser import Parser

    command, groups = COMMANDS[name], recipes.GROUPS[name]
    trains = name in ("pretrain", "uptrain")
    if {"--help", "-h", "--help-all"} & set(argv):
        if trains and "--help-all" in argv:
            from modeling_gqa.training.recipe import recipe_class

            groups = (recipe_class(name),)
        more = f"RECIPE: {', '.join(recipes.recipe_names(name))}, or the path of a YAML file. {command.more}"
        print(Parser(groups, prog, "RECIPE [options]", command.summary, more).format_help())
        sys.exit()
    recipes.first_argument(name, argv, prog)
