"""Starts the command `modeling-gqa`.

It lies beside the package because importing anything of the package imports torch, which takes seconds: until then
Ctrl-C ends the command with one line, and `--version` answers at once. Variables that torch reads when it is imported
are set here.
"""

import os
import signal
import sys
from importlib.metadata import version
from typing import Any


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"modeling-gqa {version('modeling_gqa')}")
        return
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background jobs are not
    if interruptible:
        signal.signal(signal.SIGINT, stop)
    if {"pretrain", "uptrain"} & set(sys.argv[1:2]):
        # Threads that wait actively make training on two cores four times slower while another program runs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from modeling_gqa.command_line.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def stop(*_: Any) -> None:
    print("error: stopped by Ctrl-C: nothing was read or written", file=sys.stderr, flush=True)
    # An exception could be swallowed by the module that is being imported.
    os._exit(130)
