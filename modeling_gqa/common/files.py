"""Paths: whether one lies in another."""

import os
from pathlib import Path

from modeling_gqa_cli.errors import UserError, one_line


def within(folder: Path, path: Path) -> Path:
    """Return `path`, which a checkpoint in `folder` names; raises `UserError` where it leads out of the folder.

    Otherwise the author of a checkpoint could make this package read any of the user's files. Links into the blobs of a
    Hub cache are followed.
    """
    try:
        home, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, and strings that are no path
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise UserError(
            f"{path} leads out of the checkpoint, to {real}: put the file itself into {folder} if you trust it"
        )
    return path


def is_in(path: Path, folder: Path) -> bool:
    """Return whether `path` is `folder` or lies in it, also where a folder has several names."""
    return any(
        above == folder or (os.path.exists(above) and os.path.exists(folder) and above.samefile(folder))
        for above in (path, *path.parents)
    )
