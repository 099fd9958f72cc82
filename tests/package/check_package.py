"""Build the package, check it, and use it as somebody does who has installed it and has no checkout.

    python tests/package/check_package.py

The wheel is installed in a new virtual environment, with the versions of constraints.txt. From an empty folder it then
pretrains a small model, converts it, uptrains the conversion, loads the result and generates. The script ends with exit
code 1 at the first command that fails, and prints what that command said. It needs `build`, `twine` and
`check-wheel-contents` (the extra `package`), and about 3 GB in the folder for temporary files.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = '{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 400}'
FEW_STEPS = (
    "--max-steps", "4", "--sequence-length", "64", "--per-device-eval-batch-size", "4", "--max-eval-blocks", "8",
    "--data-files", "text", "--bigram-baseline=false", "--save-steps", "2", "--sample-prompt", "def ",
)  # fmt: skip
LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import modeling_gqa

assert modeling_gqa.__file__.startswith(sys.prefix), modeling_gqa.__file__
model = AutoModelForCausalLM.from_pretrained("runs/uptrain-tiny/final")
tokenizer = AutoTokenizer.from_pretrained("runs/uptrain-tiny/final")
assert type(model) is modeling_gqa.GQAForCausalLM and model.config.num_key_value_heads == 2
tokens = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=8, do_sample=False)
print(tokens.tolist())
"""


class Stranger:
    """Runs commands in a folder of its own, without this checkout's environment.

    Args:
        folder: an empty folder; the virtual environment `venv` and the working folder `work` are made in it.
    """

    def __init__(self, folder: Path) -> None:
        self.work, self.bin = folder / "work", folder / "venv" / "bin"
        self.work.mkdir()
        dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_WAIT_POLICY"}
        self.env = {name: value for name, value in os.environ.items() if name not in dropped}
        self.env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}

    def run(self, *command: str | Path, code: int = 0, says: str = "") -> str:
        """Run a command and return its output.

        Raises:
            SystemExit: it ends with another exit code than `code`, or its output lacks `says`.
        """
        begin = time.perf_counter()
        process = subprocess.run(
            [str(part) for part in command], cwd=self.work, env=self.env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        shown = " ".join(["", *map(str, command)]).replace(f" {self.work.parent}/", " ").replace(f" {ROOT}/", " ")
        passed = process.returncode == code and says in process.stdout and "Traceback" not in process.stdout
        seconds = time.perf_counter() - begin
        print(f"{'ok    ' if passed else 'FAILED'} {seconds:5.1f} s  {' '.join(shown.split())[:140]}", flush=True)
        if not passed:
            sys.exit(f"{process.stdout}\nexit code {process.returncode}, not {code}" + (says and f", or no {says!r}"))
        return process.stdout


def check_contents(wheel: Path, source: Path) -> None:
    """Check that the wheel holds code, presets and recipes, and the source distribution all that the tests need."""
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    with tarfile.open(source) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    # Where the files of a pattern are in the wheel, in place of the first folder.
    places = {
        "modeling_gqa/**/*.py": "modeling_gqa",
        "modeling_gqa_cli/*.py": "modeling_gqa_cli",
        "modeling_gqa_vllm/*.py": "modeling_gqa_vllm",
        "training/*.py": "modeling_gqa/scripts",
        "configuration/recipes/*.yaml": "modeling_gqa/configuration",
        "configuration/*/*/config.json": "modeling_gqa/configuration",
    }
    expected = [
        f"{place}/{path.relative_to(ROOT).as_posix().partition('/')[2]}"
        for pattern, place in places.items()
        for path in ROOT.glob(pattern)
    ]
    missing = [name for name in ["modeling_gqa/py.typed", *expected] if name not in installed]
    packages = ("modeling_gqa", "modeling_gqa_cli", "modeling_gqa_vllm", "training")
    for folder in (*packages, "configuration", "tests", "benchmarks"):
        files = (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".json"))
        missing += [name for path in files if (name := path.relative_to(ROOT).as_posix()) not in shipped]
    missing += [name for name in ("LICENSE", "constraints.txt", "Makefile") if name not in shipped]
    if missing:
        sys.exit(f"not in the package: {', '.join(missing)}")


def use(stranger: Stranger, wheel: Path) -> None:
    """Install the wheel and use everything that the README promises to somebody who has installed it."""
    run, command, python = stranger.run, stranger.bin / "modeling-gqa", stranger.bin / "python"
    constraints = ("--quiet", "--constraint", ROOT / "constraints.txt")
    run(sys.executable, "-m", "venv", stranger.bin.parent)
    run(python, "-m", "pip", "install", *constraints, wheel)
    run(python, "-c", "import modeling_gqa; print(modeling_gqa.GQAConfig())", says="attention_kind")
    for start in ((command, "pretrain"), (python, "-m", "modeling_gqa.scripts.pretrain")):
        run(*start, "tiny", code=1, says="pip install '.[training]'")

    run(python, "-m", "pip", "install", *constraints, f"{wheel}[all]")
    text = stranger.work / "text"
    text.mkdir()
    for path in (ROOT / "modeling_gqa").rglob("*.py"):
        (text / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    run(command, "--help", says="uptrain")
    run(command, "--version", says="0.")
    run(command, "pretrain", "--help", says="usage: modeling-gqa pretrain RECIPE")
    run(command, "pretrain", "tinny", code=2, says="did you mean tiny?")
    model = ("--preset", "tiny-mha", "--model-overrides", SMALL)
    run(command, "pretrain", "tiny", *model, *FEW_STEPS, says="Saved runs/tiny-mha/final")
    run(
        stranger.bin / "torchrun", "--standalone", "--nproc_per_node", "2", "-m", "modeling_gqa.scripts.pretrain",
        "tiny", *model, *FEW_STEPS, "--dataloader-num-workers", "1", "--output-dir", "runs/two", "--use-cpu",
        says="on 2 x cpu",
    )  # fmt: skip
    run(command, "inspect", "runs/tiny-mha/final", says="Cache of the whole model")
    tokens = ("--calibration-tokens", "2048", "--evaluation-tokens", "1024", "--sequence-length", "64")
    gqa = ("--attention-kind", "gqa", "--num-key-value-heads", "2")
    run(command, "convert", "runs/tiny-mha/final", "converted", *gqa, "--text", "text", *tokens, says="Saved converted")
    pair = ("--student", "converted", "--teacher", "runs/tiny-mha/final")
    run(command, "uptrain", "uptrain-tiny", *pair, *FEW_STEPS, says="KL divergence from the teacher")
    run(python, "-c", LOAD, says="[[")


def main() -> None:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="modeling_gqa-package-") as temporary:
        folder = Path(temporary)
        stranger = Stranger(folder)
        tools, dist = Path(sys.executable).parent, folder / "dist"
        stranger.run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
        (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        stranger.run(tools / "twine", "check", "--strict", wheel, source)
        packages = "modeling_gqa,modeling_gqa_cli,modeling_gqa_vllm"
        stranger.run(tools / "check-wheel-contents", "--toplevel", packages, wheel)
        check_contents(wheel, source)
        use(stranger, wheel)
    print(f"The package works, in {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
