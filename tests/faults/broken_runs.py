"""What the tests of faults share: a small recipe, what a folder holds, and the script in a process to kill."""

import hashlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tqdm.std import TqdmDefaultWriteLock
from training_texts import MODEL, make_texts

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.main import run_script
from training.pretrain import pretrain

# tqdm's lock between processes is shared by all forks: one that is killed while it holds it would stop the next ones.
TqdmDefaultWriteLock.mp_lock = None

ROOT = Path(__file__).resolve().parents[2]
# Dropout draws random numbers, so that a run that goes on with others ends with other weights.
RECIPE = {
    "preset": "tiny-gqa",
    "model_overrides": {**MODEL, "num_hidden_layers": 1},
    "sequence_length": 32,
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 3,
    "warmup_steps": 0,
    "logging_steps": 1,
    "max_eval_blocks": 2,
    "validation_fraction": 0.2,
    "bigram_baseline": False,
}
LAST = 6


def write_texts(folder: Path, count: int = 10) -> Path:
    folder.mkdir(parents=True)
    for number, text in enumerate(make_texts(count)):
        (folder / f"{number}.txt").write_text(text)
    return folder


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below `folder`, with what it holds; less what says who is writing."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".run.lock", "manifest.json")]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights(run: Path) -> str:
    return snapshot(run)["final/model.safetensors"]


def refused(action: Callable[[], Any], match: str, kept: Path | None = None) -> str:
    """The one line in which `action` is refused, with the folder `kept` left as it was."""
    before = kept and snapshot(kept)
    with pytest.raises(UserError, match=match) as error:
        action()
    assert (kept and snapshot(kept)) == before
    assert "\n" not in str(error.value)
    return str(error.value)


class Child:
    """The script in a process of its own, which a fork of this one makes in milliseconds."""

    def __init__(
        self, run: Path, text: Path, *options: str, limit: int | None = None, folder: Path | None = None
    ) -> None:
        recipe, self.log = ((folder or run.parent) / name for name in ("child.yaml", "child.log"))
        recipe.write_text(yaml.safe_dump({**RECIPE, "data_files": [str(text)]}))
        self.pid = os.fork()
        if self.pid == 0:
            self.become(["child", str(recipe), "--output_dir", str(run), *options], limit)

    def become(self, argv: list[str], limit: int | None) -> None:
        code = 99
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
            if limit is not None:
                # A file that grows beyond it fails as on a full disk: the signal is ignored, the write errs.
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = argv
            run_script("pretrain", argv[1:], "pretrain", pretrain)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code)

    def kill(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def wait(self, seconds: float = 60) -> int:
        """Exit code, negative for a signal."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        self.kill(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"hung: {self.said()}")

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < end, self.said()
            time.sleep(0.002)

    def one_line(self) -> str:
        """The one line of an error; nothing like a traceback beside it."""
        lines = [line for line in self.said().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.said(), self.said()
        return lines[0]
