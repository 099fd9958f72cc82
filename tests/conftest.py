"""Fixtures over all attention kinds and models, and the rule that a skip must be on a list."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from small_models import MODELS

from modeling_gqa import ATTENTION_CLASSES

# Models this small run slower on more threads, and the test processes share the cores.
torch.set_num_threads(1)

# Reasons for which a test may be skipped; any other skip fails.
PERMITTED_SKIPS = {
    "needs CUDA: flash attention",
    "needs CUDA: offloaded caches",
    "needs CUDA: conversions",
    "needs a torch release with backends in Python",
    "needs a transformers release with an fp8 quantized cache",
}


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
