"""A run in a process of its own: forked from a server that has imported the libraries, or started by a launcher."""

import os
import shlex
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

LIBRARIES = ("run_setup", "trainer", "uptraining", "publish")


class RunProcess:
    """A run that has been started.

    Args:
        script: "pretrain" or "uptrain".
        arguments: of the script.
        launcher: what starts it, such as `torchrun -m`; "": a fork, which saves the seconds that imports take.
        log: file to which what it prints is added.
        threads: of torch, in a fork; 0 leaves them as they are.
        gpu: which one a fork sees; "": as this process.
    """

    def __init__(self, script: str, arguments: Sequence[str], launcher: str, log: Path, threads: int, gpu: str) -> None:
        self.process: subprocess.Popen | ForkServerProcess
        if launcher:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*shlex.split(launcher), f"modeling_gqa.scripts.{script}", *arguments],
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C reaches the comparison alone, which lets the run save
                )
            return
        context = get_context("forkserver")
        context.set_forkserver_preload([f"modeling_gqa.training.{name}" for name in LIBRARIES])
        self.process = context.Process(target=run_here, args=(script, list(arguments), str(log), threads, gpu))
        self.process.start()

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait()
        self.process.join()
        return self.process.exitcode or 0

    def terminate(self) -> None:
        """Let the run save and end."""
        self.process.terminate()


def run_here(script: str, arguments: list[str], log: str, threads: int, gpu: str) -> None:
    """Run a script in this process, which ends itself where the comparison that started it is killed."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if gpu:  # before CUDA begins; with several GPUs the Trainer would spread one run over all of them
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from modeling_gqa_cli.main import run_script

    if threads:
        torch.set_num_threads(threads)
    run_script(script, arguments, f"modeling-gqa {script}")


def gpu_of(worker: int) -> str:
    """Return the name of the GPU for the runs of a worker, from 0; "" without GPUs."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    return gpus[worker % len(gpus)] if gpus else ""


def end_with_parent() -> None:
    """Send this process SIGTERM, upon which it saves, when its parent has ended."""
    import signal

    wait([parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
