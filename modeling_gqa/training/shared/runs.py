"""Runs that launches share through a folder: claimed by files, resumed, and noted where they fail."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ...common.console import Interrupted, failed_to_write, say
from ...common.errors import UserError
from ...common.progress import duration
from ..folder.listing import read_object, write_text
from ..folder.manifest import SAVED_RECIPE
from ..recipe import as_arguments
from ..results import NON_FINITE, RESULTS
from .processes import RunProcess, gpu_of

WAIT = 2.0  # seconds between looks at runs that other launches have claimed
LAST_LINES = 5  # of a failed run's log, which are shown
ELSEWHERE = " is writing to "  # what a run says whose folder another process has open


@dataclass(frozen=True)
class Run:
    """A run that is needed.

    Args:
        name: of its folder.
        script: "pretrain" or "uptrain".
        recipe: that it runs.
        options: of the recipe, without output_dir and resume.
        size: how long it trains, in any unit that all runs of a folder share.
    """

    name: str
    script: str
    recipe: str
    options: dict[str, Any]
    size: float = 1.0


class Runs:
    """The runs in a folder.

    Args:
        folder: `runs/` in it holds the runs, and `logs/`, `claims/` and `failed/` what is known of them.
        needed: returns the runs that are needed and have not ended, of the validation losses by name of those that
            have; a loss is nan where the run failed, and inf where it diverged.
        jobs: number of runs at once.
        launcher: what starts each; "": a fork of this process.
        later: returns, of the same losses, how many runs of size 1 will be needed beyond these.
    """

    def __init__(
        self,
        folder: Path,
        needed: Callable[[Mapping[str, float]], Sequence[Run]],
        jobs: int,
        launcher: str,
        later: Callable[[Mapping[str, float]], int] = lambda ended: 0,
    ) -> None:
        self.folder, self.needed, self.jobs, self.launcher, self.later = folder, needed, jobs, launcher, later
        self.seconds: list[tuple[float, float]] = []  # that runs of this launch took, each with their size
        self.started = time.time()  # runs that failed before are tried again
        self.processes: set[RunProcess] = set()
        self.stopped = 0  # the signal that has stopped this launch

    # -- what has ended

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

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
        found = read_object(self.path(name) / RESULTS)
        if found is None or "validation_loss" not in found:
            return None
        loss = found["validation_loss"]
        return float(loss) if is_finite(loss) else math.inf

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return what is noted of runs that failed or diverged and have not finished since, by name."""
        notes = {path.stem: read_object(path) or {} for path in sorted((self.folder / "failed").glob("*.json"))}
        return {name: note for name, note in notes.items() if self.loss(name) is None}

    def failures(self) -> dict[str, str]:
        """Return the last words of the runs that failed in this launch or beside it, by name."""
        recent = {
            name: str(note.get("said", ""))
            for name, note in self.notes().items()
            if note.get("time", 0) >= self.started
        }
        return {name: said for name, said in recent.items() if not diverges(said)}

    # -- running

    def run_all(self) -> None:
        """Run what is needed until every run has ended, here or in another launch.

        Raises:
            Interrupted: by Ctrl-C; runs that have begun are kept.
        """
        if left := self.left():
            say(f"{left[0]} runs to go, {len(self.ended())} have ended; the time that is left follows after the first")
        with ThreadPoolExecutor(self.jobs) as pool, stopping(self.stop):
            for worker in [pool.submit(self.work, number) for number in range(self.jobs)]:
                worker.result()
        if self.stopped:
            stopped = Interrupted(f"stopped by a signal; the same command goes on with what is left in {self.folder}")
            stopped.exit_code = 128 + self.stopped
            raise stopped

    def left(self) -> tuple[int, float] | None:
        """Return how many runs are left, and the sum of their sizes; `None` where none is."""
        ended = self.ended()
        needed, later = self.needed(ended), self.later(ended)
        return (len(needed) + later, sum(run.size for run in needed) + later) if needed else None

    def time_left(self) -> str:
        """Return how many runs are left and about how long they take, at the pace of those of this launch."""
        if (left := self.left()) is None:
            return "the last"
        spent, size = map(sum, zip(*self.seconds, strict=True))
        return f"{left[0]} left, about {duration(spent / size * left[1] / min(self.jobs, left[0]))}"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the operating system refuses to write into `UserError`."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{failed_to_write(error, self.folder)}; the same command goes on") from error

    def work(self, worker: int) -> None:
        """Claim and run one run after another, until none is needed, on the worker's GPU."""
        waiting = False
        while not self.stopped:
            needed = self.needed(self.ended())
            if not needed:
                return
            if any(self.try_claimed(run, worker) for run in needed):
                waiting = False
                continue
            if not waiting and not self.processes:
                say("Waiting for runs that other processes have claimed ...")
            waiting = True
            time.sleep(WAIT)

    def try_claimed(self, run: Run, worker: int) -> bool:
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

    def claim(self, name: str) -> FileLock:
        """Return a lock by which one process of all launches does something; the system frees it where it is killed."""
        (self.folder / "claims").mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / "claims" / f"{name}.lock", timeout=0, thread_local=False)

    def start(self, run: Run, worker: int) -> None:
        """Start or resume a run, and note where it fails."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        log = self.folder / "logs" / f"{run.name}.log"
        before = log.stat().st_size if log.exists() else 0
        begin = time.perf_counter()
        threads = max(1, torch.get_num_threads() // self.jobs) if self.jobs > 1 else 0
        process = RunProcess(run.script, self.arguments(run), self.launcher, log, threads, gpu_of(worker))
        self.processes.add(process)
        if self.stopped:  # a signal that came while it was started
            process.terminate()
        code = process.wait()
        self.processes.discard(process)
        loss, seconds = self.loss(run.name), time.perf_counter() - begin
        if code == 0 and loss is not None:
            self.seconds.append((seconds, run.size))
            say(f"{run.name:<40} validation loss {loss:.4f}, {seconds:.0f} s; {self.time_left()}")
            return
        said = last_words(log, before)
        if self.stopped or ELSEWHERE in said:  # of a launch that was killed, whose run has not ended yet
            time.sleep(WAIT)
            return
        ending = "diverged" if diverges(said) else f"failed with exit code {code}"
        say(f"{run.name:<40} {ending}: {said[:300]}")
        (self.folder / "failed").mkdir(parents=True, exist_ok=True)
        note = {"time": time.time(), "exit_code": code, "said": said[:1000], "log": log.name}
        write_text(self.folder / "failed" / f"{run.name}.json", json.dumps(note, indent=1) + "\n")

    def arguments(self, run: Run) -> list[str]:
        """Return the arguments of a run; it resumes where it has begun."""
        path = self.path(run.name)
        options = {**run.options, "output_dir": str(path), "resume": (path / SAVED_RECIPE).is_file()}
        return [run.recipe, *as_arguments(options)]

    def stop(self, number: int) -> None:
        """Pass a signal on to the runs, which save where they are, and begin no further one."""
        self.stopped = number
        for process in list(self.processes):
            process.terminate()


def last_words(log: Path, start: int) -> str:
    """Return the error that a run has printed behind the first `start` bytes of its log, or its last lines."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("error: ")), " / ".join(lines[-LAST_LINES:]))


def diverges(said: str) -> bool:
    """Return whether the last words of a run say that training has diverged, which it would do again."""
    return NON_FINITE in said


def is_finite(loss: Any) -> bool:
    return isinstance(loss, int | float) and math.isfinite(loss)


@contextmanager
def stopping(stop: Callable[[int], None]) -> Iterator[None]:
    """While it is entered, Ctrl-C and SIGTERM call `stop` and nothing else."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda number, _: stop(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
