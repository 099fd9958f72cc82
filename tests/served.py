"""Servers of OpenAI's interface in processes of their own."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import APIConnectionError, OpenAI


@contextmanager
def serving(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[tuple[OpenAI, subprocess.Popen]]:
    """A client of the server that `command` starts on a free port, and its process, which is stopped at the end.

    What the server prints goes to `log`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", port],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        for _ in range(180):
            assert server.poll() is None, log.read_text()[-6000:]
            try:
                client.models.list()
            except APIConnectionError:
                time.sleep(1)
            else:
                break
        yield client, server
    finally:
        server.terminate()
        server.wait(30)
