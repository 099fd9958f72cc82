"""The command `modeling-gqa`, called in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from modeling_gqa_cli.main import main


@dataclass
class Result:
    """How the command ended; `exception` is a defect that it let through."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None = None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def call(*arguments: object) -> Result:
    """Call the command with `arguments`."""
    out, err = io.StringIO(), io.StringIO()
    code, exception = 0, None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except Exception as error:
            code, exception = 1, error
    sys.stdout.flush()
    return Result(code, out.getvalue(), err.getvalue(), exception)


def run(*arguments: object) -> str:
    """Call the command, which must succeed, and return what it printed, without line breaks."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())
