"""Checkpoint folders: found, read lazily, and written aside so that a failure leaves nothing behind."""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .errors import ConversionError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_SIZE = 4 * 2**30  # bytes; what is held in memory while writing
# What goes with the weights unchanged; a tokenizer with code of its own needs that code.
COMPANIONS = (
    "generation_config.json",
    "token*.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "tokenization_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LazyTensor(NamedTuple):
    """A tensor that is read or computed when `load` is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def one_line(error: BaseException) -> str:
    """What an exception, or the one that caused it, says, without line breaks."""
    return " ".join(str(error.__cause__ or error).split())


def local_folder(source: str | Path) -> Path:
    """Folder of a checkpoint: `source` itself, or the files of the model that the Hub or its offline cache has.

    Raises:
        ConversionError: there is no such folder, and no such model can be had.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise ConversionError(f"{source} is a file: give the folder of a checkpoint, or the name of a model on the Hub")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(source)):
        raise ConversionError(f"{source} does not exist: give the folder of a checkpoint, or a model's name on the Hub")
    patterns = ["model*.safetensors", "*.json", *COMPANIONS]
    try:
        # Not the folders that some repositories have beside, with the weights in another format.
        return Path(snapshot_download(str(source), allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise ConversionError(
            f"{source} is no folder here, and no model of this name could be had from the Hub or its cache: "
            f"{one_line(error)[:200]}"
        ) from error


@contextmanager
def written_aside(target: str | Path, force: bool = False) -> Iterator[Path]:
    """Give a new folder beside `target`, which takes its place at the end; on any failure all is as it was.

    Raises:
        ConversionError: `target` exists, and not `force`; or it is a file.
    """
    target = Path(target).resolve()
    if target.is_file():
        raise ConversionError(f"{target} is a file: give a folder to write to")
    if target.exists() and not force:
        raise ConversionError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    made = [folder for folder in target.parents if not folder.exists()]
    aside, old = (target.with_name(f".{target.name}.{role}-{uuid.uuid4().hex[:8]}") for role in ("new", "old"))
    try:
        aside.mkdir(parents=True)
        yield aside
        if target.exists():
            target.rename(old)
        aside.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_overlap(source: Path, target: str | Path):
    """Refuse a target that is, or holds, the source: overwriting it would lose what is being read."""
    source, target = source.resolve(), Path(target).resolve()
    if source == target or target in source.parents:
        raise ConversionError(f"the target {target} is the source, or holds it: choose another target")


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        ConversionError: the file is missing or does not hold one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path.parent} has no {path.name}: it is not the folder of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} does not hold a JSON object")
    return content


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Tensors of a checkpoint in safetensors, single or sharded, by name; each is read when it is loaded.

    Raises:
        ConversionError: there are no safetensors, a shard is missing or truncated, or a tensor is quantized.
    """
    weight_map: Mapping[str, str] = {}
    if (folder / WEIGHTS).is_file():
        shards = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        shards = sorted(set(weight_map.values()))
    else:
        raise ConversionError(f"{folder} has no safetensors weights ({WEIGHTS} or {INDEX}){_other_weights(folder)}")
    tensors: dict[str, LazyTensor] = {}
    for shard in shards:
        tensors |= _open_shard(folder / shard)
    missing = next((name for name in weight_map if name not in tensors), None)
    if missing:
        raise ConversionError(f"{folder / INDEX} says that {weight_map[missing]} holds {missing}, but it does not")
    return tensors


def _other_weights(folder: Path) -> str:
    patterns = ("pytorch_model*.bin", "*.pth", "*.gguf")
    other = next((path.name for pattern in patterns for path in folder.glob(pattern)), None)
    if not other:
        return ""
    return (
        f", only {other}: convert it first, with AutoModelForCausalLM.from_pretrained(folder, dtype='auto')"
        ".save_pretrained(new_folder)"
    )


def _open_shard(path: Path) -> dict[str, LazyTensor]:
    if not path.is_file():
        raise ConversionError(f"{path.parent / INDEX} names {path.name}, which is missing: fetch the checkpoint again")
    try:
        # Kept open by the tensors' loaders; pages are mapped when they are read.
        file = safe_open(path, framework="pt")
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is truncated or damaged, fetch it again: {one_line(error)}") from error
    tensors = {}
    for name, header in headers.items():
        kind = header.get_dtype()
        if kind not in FLOATS:
            raise ConversionError(
                f"{name} in {path.name} is stored as {kind}, as quantized weights are: give the checkpoint in float32, "
                "bfloat16 or float16"
            )
        tensors[name] = LazyTensor(tuple(header.get_shape()), FLOATS[kind], partial(file.get_tensor, name))
    return tensors


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    source: Path,
    progress: Callable[[Iterable], Iterable] = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
):
    """Write a complete repository: what `model` saves beside its weights, `tensors`, and the source's companions.

    Args:
        model: the model on the meta device; its configuration, and its code where it has any, are saved.
        source: folder whose tokenizer, generation configuration and licence are copied.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a file, and of the tensors held in memory at a time.
    """
    model.save_pretrained(folder, state_dict={})
    (folder / WEIGHTS).unlink(missing_ok=True)  # an empty one
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, folder / path.name)
    plan = split_state_dict_into_shards_factory(
        dict(tensors),  # type: ignore[arg-type]
        get_storage_size=lambda tensor: tensor.nbytes,  # type: ignore[attr-defined]
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    shard: dict[str, torch.Tensor] = {}
    for name in progress([name for names in plan.filename_to_tensors.values() for name in names]):
        filename = plan.tensor_to_filename[name] if plan.is_sharded else WEIGHTS
        shard[name] = tensors[name].load().contiguous()
        if name == plan.filename_to_tensors[filename][-1]:
            save_file(shard, folder / filename, metadata={"format": "pt"})
            shard = {}
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, vocab_size: int):
    """Refuse a tokenizer that gives token ids beyond the model's embedding."""
    largest, where = -1, ""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name)
        if name == "tokenizer.json":
            model = content.get("model") or {}
            vocabulary = model.get("vocab") or {}
            ids = list(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
            ids += [token["id"] for token in content.get("added_tokens") or []]
        else:
            ids = [token for token in content.values() if isinstance(token, int)]
        if max(ids, default=-1) > largest:
            largest, where = max(ids), name
    if largest >= vocab_size:
        raise ConversionError(
            f"the tokenizer does not match: {where} has the token id {largest}, but vocab_size={vocab_size}"
        )
