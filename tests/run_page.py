"""Runs the code blocks of a page of the documentation, in order, in a temporary folder.

    python tests/run_page.py docs/converting.md
    python tests/run_page.py --docstrings modeling_gqa

The second runs the examples in the docstrings of packages, each in a forked process.

Blocks marked `python` share one namespace. Each command of a `bash` block runs in a forked process, which saves it the
imports. A comment above a block changes how it is tested and renders to nothing:

    <!-- test: not run, REASON -->
    <!-- test: with OLD => NEW; OLD => NEW -->      replacements, which make a command small
    <!-- test: add --max-steps 2 -->                further options of the block's last command
    <!-- test: output -->                          the block is what the one before it prints, but for ends of lines
    <!-- test: file PATH -->                        the block is this file of a copy of the checkout
    <!-- test: edit PATH -->                        the block is a change of this file there
    <!-- test: in the checkout -->                  the block's commands run there

The temporary folder holds what the pages name: a Llama at `meta-llama/Llama-3.2-1B` with that model's key/value heads
but few dimensions, so that the name leads to this folder and not to the Hub, texts in `my_text`, and two small
yardsticks in `yardsticks`.
"""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"(?:<!-- test: (?P<note>.*?) -->\n)?^(?P<ticks>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=ticks)$",
    flags=re.MULTILINE | re.DOTALL,
)
# Options that make a run of the pages small; `add SMALL_RUN` in a note stands for them.
SHORT = "--max-steps 2 --warmup-steps 1 --sequence-length 32 --per-device-eval-batch-size 2 --max-eval-blocks 2"
OPTIONS = {
    "SMALL_RUN": f"{SHORT} --data-files my_text/ --sample-prompt the "
    """--model-overrides '{"hidden_size": 32, "vocab_size": 300, "max_position_embeddings": 64}'""",
    "SMALL_CONVERSION": "--calibration-tokens 1024 --evaluation-tokens 512 --refine 0",
    "SMALL_UPTRAINING": f"{SHORT} --per-device-train-batch-size 2 --gradient-accumulation-steps 1 --bf16 false",
}


class Block(NamedTuple):
    language: str
    code: str
    note: str
    line: int


def find_blocks(text: str) -> list[Block]:
    return [
        Block(
            found["language"].strip(), found["code"], found["note"] or "", text[: found.start("code")].count("\n") + 1
        )
        for found in FENCE.finditer(text)
    ]


def prepared(block: Block) -> str | None:
    """The code as the test runs it; `None` where it is marked as not run, with a reason."""
    code = block.code
    if block.note.startswith("not run, "):
        return None
    if block.note.startswith("with "):
        for pair in block.note.removeprefix("with ").split("; "):
            old, new = pair.split(" => ")
            assert old in code, f"line {block.line}: the test replaces {old!r}, which the block does not have"
            code = code.replace(old, new)
    elif block.note.startswith("add "):
        options = re.sub("|".join(OPTIONS), lambda found: OPTIONS[found[0]], block.note.removeprefix("add "))
        code = f"{code.rstrip()} {options}\n"
    elif not block.note.startswith(("file ", "edit ", "in the checkout", "output")):
        assert not block.note, f"line {block.line}: unknown note {block.note!r}"
    return code


def make_llama(folder: Path, layers: int = 2) -> None:
    """A Llama with the key/value heads of Llama-3.2-1B, a hidden size of 64 and a tokenizer trained on `texts`.

    It has half of that model's query heads: the fits of a conversion take the cube of their number.
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": layers,
    }
    config = LlamaConfig(**sizes, **heads, initializer_range=0.1, bos_token_id=0, eos_token_id=0)
    config.dtype = torch.bfloat16
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(make_texts(), vocab_size=320, special_tokens=["<|end|>"], show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<|end|>", eos_token="<|end|>"
    ).save_pretrained(folder)


def make_texts(count: int = 12) -> list[str]:
    sys.path.insert(0, str(ROOT / "tests" / "training"))
    from training_texts import make_texts

    return make_texts(count)


def set_up(folder: Path) -> None:
    make_llama(folder / "meta-llama" / "Llama-3.2-1B")
    (folder / "my_text").mkdir()
    for number, text in enumerate(make_texts()):
        (folder / "my_text" / f"{number:02}.txt").write_text(text)
    (folder / "yardsticks").mkdir()
    (folder / "yardsticks" / "wikitext2-raw-test.txt").write_text("\n\n".join(text + "\n" for text in make_texts()))
    rows = [json.dumps({"text": text[:40].rpartition(" ")[0]}) for text in make_texts()]
    (folder / "yardsticks" / "lambada_openai_test.jsonl").write_text("\n".join(rows))


def forked(function: Callable[[], Any], output: Path | None = None) -> int:
    """Call `function` in a forked process, which prints to the file `output`; return its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        if output:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        try:
            code = function() or 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_here(words: list[str]) -> int:
    script, *options = words
    if script == "python" and options[0] == "-m":
        sys.argv = options[1:]
        runpy.run_module(options[1], run_name="__main__", alter_sys=True)
        return 0
    if script == "modeling-gqa":
        (command,) = entry_points(group="console_scripts", name="modeling-gqa")
        sys.argv = words
        command.load()()
        return 0
    return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=300).returncode


def change_checkout(checkout: Path, block: Block, code: str) -> None:
    """Write the block's file of the copy of the checkout, or make its change there."""
    if not checkout.exists():
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, checkout / name)
    what, _, name = block.note.partition(" ")
    path = checkout / name
    if what == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return
    lines = code.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
    text = path.read_text()
    old, new = (old, new) if old in text else (old.rstrip("\n"), new.rstrip("\n"))
    assert text.count(old) == 1, f"line {block.line}: {name} does not have once what is changed:\n{old}"
    path.write_text(text.replace(old, new))


def run_block(block: Block, page: str, namespace: dict) -> None:
    code = prepared(block)
    if code is None:
        return
    if block.note.startswith(("file ", "edit ")):
        return change_checkout(Path("checkout").resolve(), block, code)
    if block.note == "in the checkout":
        environment = {**os.environ, "PYTHONPATH": str(Path("checkout").resolve())}
        script = ["bash", "-e", "-c", code.replace("python ", f"{sys.executable} ")]
        returned = subprocess.run(script, cwd="checkout", env=environment, stdin=subprocess.DEVNULL).returncode
        assert returned == 0, f"{page}, line {block.line}: a command failed"
        return
    if block.note == "output":
        printed_text = re.sub(" +$", "", namespace["PRINTED"], flags=re.MULTILINE)
        assert code.strip() == printed_text.strip(), f"{page}, line {block.line}: printed was\n{printed_text}"
    if block.language not in ("python", "bash"):
        return
    if block.language == "python":
        lines = "\n" * block.line  # so that a traceback names the page's line
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(lines + code, page, "exec"), namespace)
        namespace["PRINTED"] = printed.getvalue()
        print(namespace["PRINTED"], end="")
        return
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words:
            exit_code = forked(partial(run_here, words), Path("printed.txt"))
            namespace["PRINTED"] = Path("printed.txt").read_text()
            print(namespace["PRINTED"], end="")
            assert exit_code == 0, f"{page}, line {block.line}: {command.strip()} ended with {exit_code}"


def run_docstrings(packages: list[str]) -> None:
    """Run every `python` block in the docstrings of the modules of `packages`, from the checkout's root."""
    import ast
    import importlib

    os.chdir(ROOT)
    importlib.import_module(packages[0])
    failed, tried = [], 0
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            _, _, example = (ast.get_docstring(node) or "").partition("Example:\n")
            for block in find_blocks(textwrap.dedent(example)):
                if block.language != "python":
                    continue
                tried += 1
                where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                run_python = partial(exec, compile(block.code, where, "exec"), {"__name__": "__main__"})
                if forked(run_python) != 0:
                    failed.append(where)
    assert tried, "no docstring has an example"
    assert not failed, f"examples that fail: {failed}"
    print(f"{tried} examples run")


def main(page: str) -> None:
    path = Path(page).resolve()
    blocks = find_blocks(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        set_up(Path(folder))
        namespace = {"__name__": "__main__", "ROOT": ROOT}
        for block in blocks:
            run_block(block, path.name, namespace)
        os.chdir(ROOT)


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # see conftest.py
    run_docstrings(sys.argv[2:]) if sys.argv[1] == "--docstrings" else main(sys.argv[1])
