"""Fixtures over all attention kinds and models, and the rule that a skip must be on a list."""

import atexit
import gc
import os
import random
import secrets
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tokens that runs keep, of all test processes; pytest's own process makes and removes the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
# `make faults` draws anew. Set here, before pytest-xdist starts its processes, so that all draw from the one printed.
DRAWS_ANEW = "RANDOM_DRAWS" in os.environ
os.environ.setdefault("FAULTS_SEED", str(secrets.randbits(32)) if DRAWS_ANEW else "0")

import pytest
import torch
from hypothesis import settings
from small_models import MODELS

from modeling_gqa import ATTENTION_CLASSES

# Models this small run slower on more threads, and the test processes share the cores.
torch.set_num_threads(1)
# After a fork PyTorch makes its pool of threads anew at this call, and fails where several threads come to it at once.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

FAULTS_ROUNDS = int(os.environ.setdefault("FAULTS_ROUNDS", "1"))
settings.register_profile("tests", derandomize=not DRAWS_ANEW, deadline=None, print_blob=True)
settings.load_profile("tests")

# The groups of tests that `make test` leaves out, by folder or file; single tests of other files are marked there.
GROUPS = {
    "training": "training/test_pretrain training/test_commands training/test_uptrain training/test_distributed "
    "training/test_compare training/test_going_on training/test_final_evaluation training/test_attention_logits "
    "training/test_kept",
    "docs": "test_docs test_examples test_notebooks test_benchmarks",
    "processes": "test_serve conversion/test_device",
    "ranks": "ranks/",
    "faults": "faults/",
}

# Reasons for which a test may be skipped; any other skip fails.
PERMITTED_SKIPS = {
    "needs CUDA: conversions",
    "needs a torch release with backends in Python",
    "needs make real",
    "needs a transformers release with an fp8 quantized cache",
    "needs a transformers release whose windows take candidates back",
}


# Under nohup and in the background of a script these signals are ignored, which the programs that tests start would
# inherit; a handler, unlike that, is not inherited by a program.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the groups. Put the tests of the real model first: at the end one process would run them alone."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        for group, places in GROUPS.items():
            if path.startswith(tuple(places.split())):
                item.add_marker(group)
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


def pytest_report_header() -> str:
    return f"FAULTS_SEED={os.environ['FAULTS_SEED']} FAULTS_ROUNDS={FAULTS_ROUNDS}"


@pytest.fixture(params=range(FAULTS_ROUNDS), ids=lambda number: f"round{number}")
def draw(request) -> random.Random:
    """Random draws of a test of faults: the same under the same `FAULTS_SEED`, of which `make faults` draws one."""
    return random.Random(f"{os.environ['FAULTS_SEED']} {request.node.nodeid}")


@pytest.fixture
def objects_set_aside():
    """What other tests have left in this process, millions of objects, is not looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=MODELS)
def model_name(request) -> str:
    return request.param


@pytest.fixture(params=ATTENTION_CLASSES)
def kind(request) -> str:
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in PERMITTED_SKIPS:
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/conftest.py does not permit: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole module was skipped: {report.longrepr[2]}"
    return report
