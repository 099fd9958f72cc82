"""The new layers of a conversion as they are finished: in memory, or in a folder, from which it can go on later."""

import hashlib
import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..common.errors import ConversionError
from ..common.files import write_text
from .sequential import NewLayer, Setting

PLAN, MEASURED = "plan.json", "measured.json"


class LayerFiles(MutableMapping[int, NewLayer]):
    """New layers by index, each in a file of its own.

    Args:
        folder: holds the files.
        name: that their names begin with.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def path(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index}.safetensors"

    def __getitem__(self, index: int) -> NewLayer:
        try:
            with safe_open(self.path(index), "pt") as file:
                about = json.loads(file.metadata()["layer"])
                return NewLayer({name: file.get_tensor(name) for name in file.keys()}, about["fields"], about["loss"])  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise KeyError(index) from error

    def __setitem__(self, index: int, layer: NewLayer) -> None:
        if self.path(index).exists():
            return
        about = json.dumps({"fields": layer.fields, "loss": layer.loss})
        unfinished = self.path(index).with_suffix(".part")
        save_file(layer.state, unfinished, metadata={"layer": about})
        unfinished.replace(self.path(index))

    def __delitem__(self, index: int) -> None:
        self.path(index).unlink()

    def __iter__(self) -> Iterator[int]:
        found = (path.stem.removeprefix(f"{self.name}-") for path in self.folder.glob(f"{self.name}-*.safetensors"))
        return iter(sorted(int(index) for index in found if index.isdigit()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Kept:
    """The layers of each setting that was tried, of which those of the best and of the last one stay.

    Args:
        folder: where layers and measurements are written; `None` keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.layers: dict[Setting, MutableMapping[int, NewLayer]] = {}
        self.kl: dict[str, float] = {}
        if folder is not None and (folder / MEASURED).is_file():
            self.kl = json.loads((folder / MEASURED).read_text())

    def of(self, setting: Setting) -> MutableMapping[int, NewLayer]:
        """Return where the new layers of a setting are kept."""
        if setting not in self.layers:
            name = hashlib.sha256(str(setting).encode()).hexdigest()[:16]
            self.layers[setting] = {} if self.folder is None else LayerFiles(self.folder, name)
        return self.layers[setting]

    def measured(self, setting: Setting) -> float | None:
        """Return the KL that was measured for a setting."""
        return self.kl.get(str(setting))

    def measure(self, setting: Setting, kl: float) -> None:
        """Note the KL of a setting, and forget the layers of all settings but the best."""
        self.kl[str(setting)] = kl
        if self.folder is not None:
            write_text(self.folder / MEASURED, json.dumps(self.kl))
        best = min(self.kl, key=lambda name: self.kl[name])
        for other in [other for other in self.layers if str(other) != best]:
            self.layers.pop(other).clear()


@contextmanager
def kept_in(folder: Path, plan: Any) -> Iterator[Path]:
    """Make and yield `folder` for a conversion that is described by `plan`, in types that JSON has.

    A folder that an interrupted conversion of the same plan has left is taken up again, one of another plan is emptied.
    It is deleted when the conversion has succeeded, and when it has failed before a layer was finished.

    Raises:
        ConversionError: the folder holds other files than a conversion leaves.
    """
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
    if folder.exists():
        strange = [path.name for path in folder.iterdir() if not is_ours(path)] if folder.is_dir() else [folder.name]
        if strange:
            raise ConversionError(f"{folder} holds other things than converted layers ({strange[0]}): move it")
        if not (folder / PLAN).is_file() or json.loads((folder / PLAN).read_text()) != digest:
            delete(folder)
    folder.mkdir(exist_ok=True)
    write_text(folder / PLAN, json.dumps(digest))
    try:
        yield folder
    except BaseException:
        if not any(folder.glob("*.safetensors")):
            delete(folder)
        raise
    delete(folder)


def is_ours(path: Path) -> bool:
    """Return whether a conversion writes files of this name into its folder."""
    return path.name in (PLAN, MEASURED) or (path.suffix in (".safetensors", ".part") and "-" in path.stem)


def delete(folder: Path) -> None:
    """Delete a folder and the files in it, which are all ours."""
    for path in folder.iterdir():
        path.unlink()
    os.rmdir(folder)
