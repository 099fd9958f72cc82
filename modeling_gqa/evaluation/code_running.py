"""HumanEval: functions that a model writes, and the process with limits in which they are run.

The limits hold for mistakes of a model: endless loops, memory, files. They are no prison: a program can still read the
user's files and use the network. Give code that you do not trust a container of its own.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from ..common.progress import Progress
from .results import TaskResult, mean_score
from .yardsticks import definition

Outcome = Literal["passed", "failed", "timed out"]
# What a program may take: seconds of wall time, as HumanEval's own, and as many, rounded up and one more, of the
# processor; bytes of address space, and of a file that it writes.
SECONDS, MEMORY, FILE_SIZE = 3.0, 2**30, 2**20
# The exit code after the last line of a program. No program ends by it by mistake, as by `sys.exit()`.
PASSED = 77
# What the process runs: it limits itself, reads the program from its input, and runs it.
LIMITED = """
import os, resource, sys
for name, most in zip(("CPU", "AS", "FSIZE", "NPROC", "CORE"), map(int, sys.argv[1:])):
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (most, most))
program = sys.stdin.read()
del sys.argv[1:]
exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
os._exit(%d)
"""


def run_program(program: str) -> Outcome:
    """Run a Python program in a process of its own, in a temporary folder and without environment variables.

    The process and all that it started are killed at the end.

    Args:
        program: its text.

    Returns:
        "passed" if the program came to its last line, "timed out" if it took too long, else "failed".
    """
    numbers = math.ceil(SECONDS) + 1, MEMORY, FILE_SIZE, 0, 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", LIMITED % PASSED, *map(str, numbers)],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode("utf-8", errors="replace"), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == PASSED:
        return "passed"
    return "timed out" if process.returncode == -signal.SIGXCPU else "failed"


def write_functions(lm: Any, problems: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a model writes behind the beginning of each function, greedily, by lm-eval's `humaneval`.

    Args:
        lm: lm-eval's wrapper of the model.
        problems: each with a `prompt`.
    """
    from lm_eval.api.instance import Instance

    # Without its functions, which fetch a package from the Hub.
    how = dict(definition("humaneval", resolve_functions=False)["generation_kwargs"])
    how["max_gen_toks"] = min(how["max_gen_toks"], lm.max_length // 2)  # the rest is the prompt's
    requests = [
        Instance("generate_until", problem, (problem["prompt"], dict(how)), index)
        for index, problem in enumerate(problems)
    ]
    return lm.generate_until(requests)


def human_eval(
    problems: Sequence[dict[str, Any]],
    completions: Sequence[str],
    progress: Progress = iter,
) -> TaskResult:
    """Return pass@1 of completions, the share of problems (2107.03374) whose test passes.

    **This runs what the model wrote**, by `run_program`.

    Args:
        problems: `task_id`, `prompt`, `test` and `entry_point` of each.
        completions: what the model wrote behind each prompt; see `write_functions`.
        progress: wraps the iteration over programs.
    """
    pairs = list(zip(problems, completions, strict=True))
    outcomes = [
        run_program(f"{problem['prompt']}{written}\n{problem['test']}\ncheck({problem['entry_point']})\n")
        for problem, written in progress(pairs)
    ]
    score = mean_score([outcome == "passed" for outcome in outcomes])
    keys = [problem["task_id"] for problem in problems]
    return TaskResult({"pass@1": score}, len(problems), keys, {"type": "openai/openai_humaneval", "split": "test"})
