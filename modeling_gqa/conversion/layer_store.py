"""The new layers of a conversion as they are finished: in memory, or in a folder, from which it can go on later."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from modeling_gqa_cli.errors import UserError

from ..checkpoints.writing import disk_errors
from ..common.atomic import read_object, replacing, write_json
from ..configuration_gqa import GQAConfig
from .sequential import NewLayer, Setting

PLAN, TARGET, SIZES, MEASURED = "plan.json", "target.json", "sizes.json", "measured.json"
# Names of the files in a folder of layers, finished or not.
OURS = re.compile(r"\.?((plan|target|sizes|measured)\.json|[0-9a-f]{16}-[0-9]+\.safetensors)(\.part)?")
# Those for which the folder is kept after an interruption.
OF_USE = re.compile(r"(target|sizes)\.json|.*\.safetensors")


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
            content = self.path(index).read_bytes()  # safetensors opens no path that is not UTF-8
            state, header = load(content), content[8 : 8 + int.from_bytes(content[:8], "little")]
        except (OSError, SafetensorError) as error:
            raise KeyError(index) from error
        about = json.loads(json.loads(header)["__metadata__"]["layer"])
        return NewLayer(state, **about)

    def __setitem__(self, index: int, layer: NewLayer) -> None:
        about = json.dumps({name: value for name, value in layer._asdict().items() if name != "state"})
        with replacing(self.path(index)) as part, disk_errors(self.folder):
            save_file(layer.state, part, metadata={"layer": about})

    def __delitem__(self, index: int) -> None:
        self.path(index).unlink()

    def __iter__(self) -> Iterator[int]:
        found = (path.stem.removeprefix(f"{self.name}-") for path in self.folder.glob(f"{self.name}-*.safetensors"))
        return iter(sorted(int(index) for index in found if index.isdigit()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LayerStore:
    """The layers of each setting that was tried, of which those of the best and of the last one stay.

    Args:
        folder: where layers and measurements are written; `None` keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.layers: dict[Setting, MutableMapping[int, NewLayer]] = {}
        self.kl: dict[str, float] = (folder and read_object(folder / MEASURED)) or {}

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
            write_json(self.folder / MEASURED, self.kl)
        best = min(self.kl, key=lambda name: self.kl[name])
        for other in [other for other in self.layers if str(other) != best]:
            layers = self.layers.pop(other)
            for index in list(layers):  # `clear` would read them
                del layers[index]


def layers_folder(target: Path) -> Path:
    """Return the folder beside a conversion's target in which its finished layers are kept."""
    target = target.resolve()
    return target.with_name(f".{target.name}.layers")


@contextmanager
def resumable_folder(folder: Path, plan: Any) -> Iterator[Path]:
    """Make and yield `folder` for a conversion that is described by `plan`, in types that JSON has.

    What an interrupted conversion of the same plan has left there stays, that of another plan is deleted. The folder is
    deleted when the result stands or was refused, and when no layer is finished and no sizes were chosen or tried.

    Raises:
        UserError: the folder holds other files than a conversion leaves.
    """
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
    if folder.exists():
        found = folder.iterdir() if folder.is_dir() else [folder]
        strange = [path.name for path in found if not OURS.fullmatch(path.name)]
        if strange:
            raise UserError(f"{folder} holds other things than converted layers ({strange[0]}): move it")
        if read_object(folder / PLAN) != {"sha256": digest}:
            delete(folder)
    folder.mkdir(exist_ok=True)
    write_json(folder / PLAN, {"sha256": digest})
    try:
        yield folder
    except BaseException as error:
        # What is refused once is refused again, but an interruption or a full disk has an end.
        if isinstance(error, UserError) or not any(OF_USE.fullmatch(path.name) for path in folder.iterdir()):
            delete(folder)
        raise
    delete(folder)


def choose_target(folder: Path, choose: Callable[[], GQAConfig]) -> GQAConfig:
    """Return the target that was chosen before the conversion was interrupted; where there is none, `choose` it."""
    if (known := read_object(folder / TARGET)) is None:
        known = json.loads(choose().to_json_string(use_diff=False))
        write_json(folder / TARGET, known)
    return GQAConfig.from_dict(known)


def delete(folder: Path) -> None:
    """Delete a folder and the files in it, which are all ours."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
