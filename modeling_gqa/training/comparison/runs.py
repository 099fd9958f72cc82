"""Runs that the launches of one command share through a folder: claimed by files, resumed, and noted where they fail.

The folder holds the recipe in `recipe.json`, the runs in `runs/`, and in `logs/`, `claims/` and `failed/` what is known
of them. Each run is a process of its own: forked from a server that has imported the libraries, or started by a
launcher.
"""

import json
import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock, Timeout

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import as_arguments

from ...common.atomic import read_object, write_text
from ...common.console import Interrupted, failed_to_write, say
from ...common.pictures import new_figure
from ...common.progress import duration
from ..recipe import FREE_ON_RESUME
from ..results import NON_FINITE, RESULTS
from ..run_folder import SAVED_RECIPE
from .plan import FREE, Comparison, Trial

RECIPE = "recipe.json"
LIBRARIES = ("run_setup", "trainer", "publish")  # that the server imports
WAIT = 2.0  # seconds between looks at runs that other launches have claimed
LAST_LINES = 5  # of a failed run's log, which are shown
ELSEWHERE = " is writing to "  # what a run says whose folder another process has open


class Runs:
    """The runs of a comparison, in its folder."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.folder, self.jobs = comparison, comparison.folder, comparison.recipe.jobs
        self.seconds: list[float] = []  # that runs of this launch took
        self.started = time.time()  # runs that failed before are tried again
        self.processes: set[subprocess.Popen | ForkServerProcess] = set()
        self.stopped = 0  # the signal that has stopped this launch

    # -- the folder

    def begin(self, values: dict[str, Any], values_of_runs: Mapping[str, Any]) -> None:
        """Open the folder: write what all runs need into an empty one, or check that it holds the same recipe.

        Args:
            values: of the recipe; those in `FREE` may differ when a launch goes on.
            values_of_runs: of the recipe of its runs; those that may change when a run resumes may change here.

        Raises:
            UserError: the folder holds something else, or another recipe; or matplotlib is not installed.
        """
        new_figure()  # with which the report's pictures are drawn in the end
        kept = {name: value for name, value in values_of_runs.items() if name not in FREE_ON_RESUME}
        folder, values = self.folder, values | {f"runs.{name}": value for name, value in kept.items()}
        present = set(os.listdir(folder)) if folder.is_dir() else set()
        ours = {f".{RECIPE}.part", "claims", "tokenizer"} if "claims" in present else set()
        if RECIPE not in present and (foreign := sorted(present - ours)):
            raise UserError(f"{folder} holds {foreign[0]} and no comparison: choose another --output-dir")
        with self.claim("begin").acquire(timeout=-1):
            saved = read_object(folder / RECIPE)
            if saved is None:
                if (folder / RECIPE).exists():
                    raise UserError(f"{folder / RECIPE} is damaged, or of no comparison: choose another --output-dir")
                self.comparison.write_tokenizer()
                write_text(folder / RECIPE, json.dumps(values, indent=1) + "\n")
                return
        changed = [
            f"{name} ({saved.get(name)!r} then, {value!r} now)"
            for name, value in json.loads(json.dumps(values)).items()
            if name not in FREE and saved.get(name) != value
        ]
        if changed:
            raise UserError(
                f"{folder} holds a comparison with another recipe: {', '.join(changed)}; go on with the earlier "
                "values, or choose another --output-dir"
            )

    def finish(self, report: Path, write: Callable[[], None]) -> None:
        """Write a report, unless another launch wrote it while this one waited; raise `UserError` for failures."""
        before = report.stat().st_mtime_ns if report.exists() else 0
        with self.claim(f"report-{report.stem}").acquire(timeout=-1):
            if not report.exists() or report.stat().st_mtime_ns == before:
                write()
        say(f"\nThe report is {report}.")
        if failures := self.failures():
            raise UserError(f"{len(failures)} runs failed, which {report} names; the same command tries them again")

    def claim(self, name: str) -> FileLock:
        """Return a lock by which one process of all launches does something; the system frees it where it is killed."""
        (self.folder / "claims").mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / "claims" / f"{name}.lock", timeout=0, thread_local=False)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the operating system refuses to write into `UserError`."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{failed_to_write(error, self.folder)}; the same command goes on") from error

    # -- what has ended

    def ended(self) -> dict[str, float]:
        """Return the validation loss of each run that has ended.

        It is inf of one that diverged, and nan of one that failed in this launch or beside it.
        """
        losses = {path.parent.name: self.loss(path.parent.name) for path in (self.folder / "runs").glob(f"*/{RESULTS}")}
        finished = {name: loss for name, loss in losses.items() if loss is not None}
        diverged = {name: math.inf for name, note in self.notes().items() if diverges(str(note.get("said", "")))}
        return dict.fromkeys(self.failures(), math.nan) | diverged | finished

    def loss(self, name: str) -> float | None:
        """Return the validation loss of a run that has finished, inf where it is no number; else `None`."""
        found = read_object(self.folder / "runs" / name / RESULTS) or {}
        if "validation_loss" not in found:
            return None
        loss = found["validation_loss"]  # null where it is no finite number
        return math.inf if loss is None else loss

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return what is noted of runs that failed or diverged and have not finished since, by name."""
        notes = {path.stem: read_object(path) or {} for path in sorted((self.folder / "failed").glob("*.json"))}
        return {name: note for name, note in notes.items() if self.loss(name) is None}

    def failures(self) -> dict[str, str]:
        """Return the last words of the runs that failed in this launch or beside it, by name."""
        recent = {name: note for name, note in self.notes().items() if note.get("time", 0) >= self.started}
        said = {name: str(note.get("said", "")) for name, note in recent.items()}
        return {name: words for name, words in said.items() if not diverges(words)}

    def left(self) -> int:
        """Return how many runs are left."""
        ended = self.ended()
        needed = len(self.comparison.needed(ended))
        return needed + self.comparison.later(ended) if needed else 0

    def time_left(self) -> str:
        """Return how many runs are left and about how long they take, at the pace of those of this launch."""
        if not (left := self.left()):
            return "the last"
        return f"{left} left, about {duration(fmean(self.seconds) * left / min(self.jobs, left))}"

    # -- running

    def run_all(self) -> None:
        """Run what is needed until every run has ended, here or in another launch.

        Raises:
            Interrupted: by Ctrl-C; runs that have begun are kept.
        """
        if left := self.left():
            say(f"{left} runs to go, {len(self.ended())} have ended; the time that is left follows after the first")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in handlers:
                signal.signal(number, lambda number, _: self.stop(number))
            with ThreadPoolExecutor(self.jobs) as pool:
                for worker in [pool.submit(self.work, number) for number in range(self.jobs)]:
                    worker.result()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.stopped:
            stopped = Interrupted(f"stopped by a signal; the same command goes on with what is left in {self.folder}")
            stopped.exit_code = 128 + self.stopped
            raise stopped

    def stop(self, number: int) -> None:
        """Pass a signal on to the runs, which save where they are, and begin no further one."""
        self.stopped = number
        for process in list(self.processes):
            process.terminate()

    def work(self, worker: int) -> None:
        """Claim and run one run after another, until none is needed, on the worker's GPU."""
        waiting = False
        while not self.stopped:
            needed = self.comparison.needed(self.ended())
            if not needed:
                return
            if any(self.try_claimed(run, worker) for run in needed):
                waiting = False
                continue
            if not waiting and not self.processes:
                say("Waiting for runs that other processes have claimed ...")
            waiting = True
            time.sleep(WAIT)

    def try_claimed(self, run: Trial, worker: int) -> bool:
        """Run it unless another process runs it, or has ended it meanwhile; return whether it was run."""
        if self.stopped:
            return False
        try:
            with self.claim(run.name):
                if run.name in self.ended():
                    return False
                self.start(run, worker)
                return True
        except Timeout:
            return False

    def start(self, run: Trial, worker: int) -> None:
        """Start a run, or resume it where it has begun, and note where it fails."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        log, path = self.folder / "logs" / f"{run.name}.log", self.folder / "runs" / run.name
        before = log.stat().st_size if log.exists() else 0
        begin = time.perf_counter()
        threads = max(1, torch.get_num_threads() // self.jobs) if self.jobs > 1 else 0
        options = {**self.comparison.options(run), "output_dir": str(path), "resume": (path / SAVED_RECIPE).is_file()}
        recipe = self.comparison.recipe
        arguments = [recipe.pretraining, *as_arguments(options)]
        process = start_process(arguments, recipe.launcher, log, threads, gpu_of(worker))
        self.processes.add(process)
        if self.stopped:  # a signal that came while it was started
            process.terminate()
        code = wait_for(process)
        self.processes.discard(process)
        loss, seconds = self.loss(run.name), time.perf_counter() - begin
        if code == 0 and loss is not None:
            self.seconds.append(seconds)
            say(f"{run.name:<40} validation loss {loss:.4f}, {seconds:.0f} s; {self.time_left()}")
            return
        said = last_words(log, before)
        if self.stopped or ELSEWHERE in said:  # of a launch that was killed, whose run has not ended yet
            time.sleep(WAIT)
            return
        ending = "diverged" if diverges(said) else f"failed with exit code {code}"
        say(f"{run.name:<40} {ending}: {said[:300]}")
        (self.folder / "failed").mkdir(exist_ok=True)
        note = {"time": time.time(), "exit_code": code, "said": said[:1000], "log": log.name}
        write_text(self.folder / "failed" / f"{run.name}.json", json.dumps(note, indent=1) + "\n")


def last_words(log: Path, start: int) -> str:
    """Return the error that a run has printed behind the first `start` bytes of its log, or its last lines."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("error: ")), " / ".join(lines[-LAST_LINES:]))


def diverges(said: str) -> bool:
    """Return whether the last words of a run say that training has diverged, which it would do again."""
    return NON_FINITE in said


# -- A run's process


def start_process(
    arguments: list[str], launcher: str, log: Path, threads: int, gpu: str
) -> subprocess.Popen | ForkServerProcess:
    """Start a run.

    Args:
        arguments: of `pretrain`.
        launcher: what starts it, such as `torchrun -m`; "": a fork, which saves the seconds that imports take.
        log: file to which what it prints is added.
        threads: of torch, in a fork; 0 leaves them as they are.
        gpu: which one a fork sees; "": as this process.
    """
    if not launcher:
        context = get_context("forkserver")
        context.set_forkserver_preload([f"modeling_gqa.training.{name}" for name in LIBRARIES])
        process = context.Process(target=run_here, args=(arguments, str(log), threads, gpu))
        process.start()
        return process
    command = [*shlex.split(launcher), "modeling_gqa.scripts.pretrain", *arguments]
    with log.open("ab") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        # In a session of its own: Ctrl-C reaches the comparison alone, which lets the run save.
        return subprocess.Popen(command, start_new_session=True, **streams)


def wait_for(process: subprocess.Popen | ForkServerProcess) -> int:
    """Wait for the end of a run, and return its exit code."""
    if isinstance(process, subprocess.Popen):
        return process.wait()
    process.join()
    return process.exitcode or 0


def run_here(arguments: list[str], log: str, threads: int, gpu: str) -> None:
    """Pretrain in this process, which ends itself where the comparison that started it is killed."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if gpu:  # before CUDA begins; with several GPUs the Trainer would spread one run over all of them
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    from modeling_gqa_cli.main import run_script

    if threads:
        torch.set_num_threads(threads)
    run_script("pretrain", arguments, "modeling-gqa pretrain")


def end_with_parent() -> None:
    """Send this process SIGTERM, upon which it saves, when its parent has ended."""
    wait([parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def gpu_of(worker: int) -> str:
    """Return the name of the GPU for the runs of a worker, from 0; "" without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    return gpus[worker % len(gpus)] if gpus else ""
