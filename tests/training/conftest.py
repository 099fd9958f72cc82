"""A small text, a tiny recipe, and the script run as users run it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_texts import MODEL, make_texts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `training` is the checkout's folder, `modeling_gqa.training` the installed one
RECIPE = {
    "preset": "tiny-mixed",
    "model_overrides": MODEL,
    "sequence_length": 64,
    "per_device_train_batch_size": 4,
    "max_steps": 24,
    "warmup_steps": 3,
    "logging_steps": 1,
    "save_steps": 7,
    "eval_strategy": "steps",
    "eval_steps": 8,
    "max_eval_blocks": 4,
    "validation_fraction": 0.1,
    "sample_prompt": "the ",
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(make_texts(40)):
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def yardsticks(tmp_path_factory) -> Path:
    """Files of two yardsticks, small ones, as `evaluate --data` reads them."""
    folder = tmp_path_factory.mktemp("yardsticks")
    words = [text.split()[2:9] for text in make_texts(5, seed=1)]
    rows = (json.dumps({"text": " ".join(line)}) + "\n" for line in words)
    (folder / "lambada_openai_test.jsonl").write_text("".join(rows))
    (folder / "wikitext2-raw-test.txt").write_text(f" = Title = \n\n\n{' '.join(make_texts(3, seed=2))}\n")
    return folder


class Script:
    """Runs `python -m training.pretrain` on the tiny recipe."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump({**RECIPE, "data_files": [str(corpus)]}))
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def command(self, output: Path, *options: str, processes: int = 0, module: str = "training.pretrain") -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        start = [sys.executable, *(torchrun if processes else [])]
        return [*start, "-m", module, str(self.recipe), "--output_dir", str(output), *options]

    def run(self, output: Path, *options: str, **how: Any) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(output, *options, **how),
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def stop(self, output: Path, step: int, signum: signal.Signals, *options: str) -> tuple[int, str]:
        """Start a run and send it a signal once it has logged `step`; return its exit code and output."""
        process = subprocess.Popen(
            self.command(output, *options),
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step") and int(line.split()[1].split("/")[0]) >= step and signum:
                process.send_signal(signum)
                signum = None
        return process.wait(timeout=60), "".join(lines)


@pytest.fixture(scope="session")
def script(tmp_path_factory, corpus) -> Script:
    return Script(tmp_path_factory.mktemp("script"), corpus)


@pytest.fixture(scope="session")
def finished(script, tmp_path_factory) -> tuple[Path, str]:
    """A run that nothing interrupted, and what it printed."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    process = script.run(output)
    assert process.returncode == 0, process.stderr
    return output, process.stdout


def losses(output: Path) -> list[float]:
    """The training losses that a run logged, step by step."""
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(name="losses", scope="session")
def losses_fixture():
    return losses
