"""Conversions on another device than the processor."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

SCRIPT = Path(__file__).with_name("conversions_on_device.py")


@pytest.mark.parametrize("device", ["pretended", "cuda"])
def test_what_a_conversion_finds_does_not_depend_on_the_device(device):
    """Conversions on a device have the losses, settings and weights of those on the processor."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA: conversions")
    if device == "pretended" and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("needs a torch release with backends in Python")
    done = subprocess.run([sys.executable, SCRIPT, device], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
