"""HumanEval: right, wrong and harmful programs, and what its limits keep them from."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from modeling_gqa.evaluation.code_running import human_eval, run_program, write_functions
from modeling_gqa.evaluation.harness import find_tasks, open_subject

RIGHT, WRONG, ENDLESS = "    return a + b\n", "    return a * b\n", "    while True: pass\n"


def test_pass_at_1_is_the_share_of_right_functions(problems):
    """The model is asked for what follows the beginning, greedily, until lm-eval's words."""
    asked = []

    def generate_until(requests):
        asked.extend(request.args for request in requests)
        return [RIGHT, WRONG, ENDLESS]

    written = write_functions(SimpleNamespace(generate_until=generate_until, max_length=512), problems)
    result = human_eval(problems, written)
    score = result.scores["pass@1"]
    assert score.value == 1 / 3 and result.items == 3 and abs(score.stderr - (2 / 9 / 2) ** 0.5) < 1e-12
    assert list(result.keys) == [problem["task_id"] for problem in problems]
    assert [prompt for prompt, _ in asked] == [problem["prompt"] for problem in problems]
    assert all(not how["do_sample"] and how["max_gen_toks"] == 256 and "\ndef" in how["until"] for _, how in asked)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("x = 1", "passed"),
        ("assert False", "failed"),
        ("import sys; sys.exit(0)", "failed"),  # which is before the test
        ("import os; os._exit(0)", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("this is no Python", "failed"),
        ("print('x' * 10 ** 6)", "passed"),
        ("input()", "failed"),
        ("x = bytearray(2 ** 31)", "failed"),
        ("open('large', 'wb').write(bytes(2 ** 21))", "failed"),
        ("open('small', 'wb').write(bytes(2 ** 19))", "passed"),
        ("import time; time.sleep(60)", "timed out"),
        ("while True: pass", "timed out"),
        ("import os; assert 'PATH' not in os.environ and 'HOME' not in os.environ", "passed"),
        ("'\ud800'", "passed"),  # a half character, which a model can write
    ],
)
def test_limits_hold(program, outcome):
    start = time.perf_counter()
    assert run_program(program) == outcome
    assert time.perf_counter() - start < 10


def test_nothing_is_left(tmp_path):
    """Of files in the program's folder, and of a process that it has started."""
    note = tmp_path / "note"
    start = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    program = f"""
import os, resource, subprocess
open("file", "w").write("x")
try:
    child = {start}.pid
except OSError:  # where the limit of processes holds, which it does not for root
    child = 0
open({str(note)!r}, "w").write(f"{{os.getcwd()}} {{child}}")
"""
    assert run_program(program) == "passed"
    folder, child = note.read_text().split()
    assert not Path(folder).exists() and Path(folder) != Path.cwd()
    deadline = time.monotonic() + 5
    while int(child) and alive(int(child)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_a_model_writes_and_its_programs_are_run(models_folder, data):
    """A random model's bytes are no function."""
    tasks = find_tasks(["humaneval"], data, run_code=True, limit=2, batch_size=2)
    subject = open_subject(str(models_folder / "ours"))
    before = os.listdir(".")
    found = tasks.run(subject.load(None, "cpu"), subject)
    assert found["humaneval"].items == 2 and found["humaneval"].scores["pass@1"].value == 0
    assert os.listdir(".") == before
