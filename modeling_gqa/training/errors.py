"""Errors that end in one line, and the words of these lines. Nothing here imports a library that is slow to import."""

import errno
import re
import shutil
from pathlib import Path

from ..common.errors import UserError

# How tokenizers, safetensors and torch report that a file could not be written; each has an exception class of its own.
WRITE_FAILURES = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error")
NON_FINITE = "non-finite"  # what a run says that has diverged
# The packages of the extra `training`, by the names that they are imported by.
PACKAGES = {"accelerate": "accelerate", "datasets": "datasets", "filelock": "filelock", "yaml": "PyYAML"}
# What `modeling_gqa.common.errors.install_extra` returns, which cannot be imported where one of them is missing.
INSTALL = "pip install '.[training]' in a checkout of modeling_gqa"


class Interrupted(UserError):
    """The user has pressed Ctrl-C; the message says which checkpoint is kept."""

    exit_code = 130


def failed_to_write(error: Exception, folder: Path) -> str | None:
    """Return what the operating system refused to write below `folder`, in one line; `None` for any other error."""
    said = " ".join(str(error).split())
    if isinstance(error, OSError):
        reason = f"{error.strerror or said}" + (f": {error.filename}" if error.filename else "")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return reason
    elif WRITE_FAILURES.search(said):
        reason = f"a file could not be written: {said[:200]}"
    else:
        return None
    while not folder.exists():
        folder = folder.parent
    return f"{reason} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder})"


def missing_package(error: ImportError) -> str | None:
    """Return the command that installs the missing package, in one line; `None` for any other failed import."""
    cause: BaseException | None = error
    while cause is not None:  # transformers raises an error of its own from that of the import
        package = PACKAGES.get((getattr(cause, "name", None) or "").partition(".")[0])
        if package is not None and isinstance(cause, ModuleNotFoundError):
            return f"training needs {package}, which is not installed: {INSTALL}"
        cause = cause.__cause__
    return None
