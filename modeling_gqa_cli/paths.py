"""Paths: of presets and recipes, mistyped ones, and whether one lies in another."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import UserError, one_line

# Presets and recipes: in the package where it is installed, and beside it in a checkout.
_ROOT = Path(__file__).resolve().parents[1]
_PLACES = [_ROOT / "modeling_gqa" / "configuration", _ROOT / "configuration"]
CONFIGURATION = next((folder for folder in _PLACES if folder.is_dir()), _PLACES[1])
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
NEARLY = 0.75  # share of characters in common, as difflib counts, at which a name is taken for another one mistyped


def refuse_mistyped(source: str | Path, names: Iterable[str] = ()) -> None:
    """Raise `UserError` where there is nothing at `source` and it looks like a path: the Hub is not asked for it.

    It looks like one if it cannot be a name on the Hub, if the folder before its last slash exists, or if a folder here
    or one of `names` is spelled nearly like it. A name whose model lies in the Hub's cache is none.

    Args:
        source: where a checkpoint or a configuration is looked for.
        names: others that could be meant.
    """
    path = Path(source)
    if os.path.exists(path):
        return
    near = str(nearest(path) or next(iter(difflib.get_close_matches(str(source), list(names), n=1)), ""))
    hint = f" (did you mean {near}?)" if near else ""
    give = "give the folder of a checkpoint, or a model's name on the Hub"
    if not HUB_NAME.fullmatch(str(source)):
        raise UserError(f"{source} does not exist{hint}: {give}")
    nearly = difflib.SequenceMatcher(None, str(source).lower(), near.lower()).ratio() >= NEARLY
    if not nearly and (len(path.parts) == 1 or not path.parent.is_dir()):
        return
    from huggingface_hub import try_to_load_from_cache  # which takes half a second to import

    if not isinstance(try_to_load_from_cache(str(source), "config.json"), str):
        raise UserError(f"{source} does not exist{hint}: {give}; if it is one, fetch it first: hf download {source}")


def nearest(path: Path) -> Path | None:
    """Return the folder or GGUF file whose path is spelled nearly like `path`, which does not exist; `None` without."""
    path = Path(os.path.expanduser(path))
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not os.path.exists(found / part):
            try:
                others = [other.name for other in found.iterdir() if other.is_dir() or other.suffix.lower() == ".gguf"]
            except OSError:
                return None
            by_name = {name.lower(): name for name in others if name != part}
            near = difflib.get_close_matches(part.lower(), by_name, n=1)
            if not near:
                return None
            part = by_name[near[0]]
        found /= part
    return found


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
