"""Paths: of presets and recipes, of what is not there, and whether one lies in another."""

import os
import re
from pathlib import Path

from .errors import UserError, one_line

# Presets and recipes: in the package where it is installed, and beside it in a checkout.
_ROOT = Path(__file__).resolve().parents[1]
_PLACES = [_ROOT / "modeling_gqa" / "configuration", _ROOT / "configuration"]
CONFIGURATION = next((folder for folder in _PLACES if folder.is_dir()), _PLACES[1])
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def refuse_missing(source: str | Path) -> None:
    """Raise `UserError` where there is nothing at `source` and it looks like a path: the Hub is not asked for it.

    It looks like one if it cannot be a name on the Hub, or if the folder before its last slash exists and the Hub's
    cache has no such model.
    """
    path, advice = Path(source), "give the folder of a checkpoint, or a model's name on the Hub"
    if os.path.exists(path):
        return
    if HUB_NAME.fullmatch(str(source)):
        if len(path.parts) == 1 or not path.parent.is_dir():
            return
        from huggingface_hub import try_to_load_from_cache  # which takes half a second to import

        if isinstance(try_to_load_from_cache(str(source), "config.json"), str):
            return
        advice += f"; if it is one, fetch it first: hf download {source}"
    raise UserError(f"{source} does not exist: {advice}")


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
