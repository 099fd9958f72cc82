"""Checkpoint folders: found, and read tensor by tensor; the files beside the weights, copied."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from modeling_gqa_cli.errors import UserError, one_line
from modeling_gqa_cli.paths import refuse_missing, within

from ..common.atomic import write_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"  # the only folder in a checkpoint
LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
# Files that are copied with the weights; a tokenizer with code of its own needs that code.
COMPANIONS = (
    "generation_config.json",
    "token*.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    f"{TEMPLATES}/*.jinja",
    "tokenization_*.py",
    *LICENCES,
)
# Entries in which tools keep the path of a tokenizer on somebody's machine.
PATH_FIELDS = (
    "name_or_path",
    "_name_or_path",
    "tokenizer_file",
    "vocab_file",
    "merges_file",
    "special_tokens_map_file",
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


def is_gguf(source: str | Path) -> bool:
    """Return whether `source` is the path of a GGUF file."""
    return Path(source).suffix.lower() == ".gguf" and not Path(source).is_dir()


def local_folder(source: str | Path) -> Path:
    """Return the folder of a checkpoint: `source` itself, or where the model of this name on the Hub is downloaded to.

    Raises:
        UserError: there is no such folder, and no such model on the Hub or in its offline cache.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(
            f"{source} is a file: give the folder of a checkpoint, a .gguf file, or a model's name on the Hub"
        )
    refuse_missing(source)
    patterns = ["model*.safetensors", "*.json", "README.md", *COMPANIONS]
    try:
        # Some repositories have folders with the weights in another format; of files in folders only those are wanted
        # that end in .jinja.
        return Path(snapshot_download(str(source), allow_patterns=patterns, ignore_patterns=["*/*[!a]"]))
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise UserError(
            f"{source} is no folder here, and no model of this name could be had from the Hub or its cache: "
            f"{one_line(error)[:200]}"
        ) from error


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise what a system says of a file that cannot be read as a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or one_line(error)).lower()}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; raises `UserError` where there is none, or a link leads out of the folder."""
    within(path.parent, path)
    if not path.exists():
        raise UserError(f"{path.parent} has no {path.name}: it is not the folder of a checkpoint")
    with read_errors(path):
        encoded = path.read_bytes()
    try:
        content = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint in safetensors, in one file or shards, by name; each is read when loaded.

    Raises:
        UserError: there are no safetensors, a shard is missing, truncated or elsewhere, or a tensor is quantized.
    """
    weight_map: Any = {}
    if (folder / WEIGHTS).is_file():
        shards = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UserError(
                f"{folder / INDEX} is damaged, fetch it again: weight_map does not give each tensor its file"
            )
        shards = sorted(set(weight_map.values()))
    else:
        raise UserError(
            f"{folder} has no safetensors weights ({WEIGHTS} or {INDEX}). Other weights are converted first, with "
            "AutoModelForCausalLM.from_pretrained(folder, dtype='auto').save_pretrained(new_folder); of a GGUF file "
            "give the file itself"
        )
    tensors: dict[str, LazyTensor] = {}
    for shard in shards:
        tensors |= _open_shard(within(folder, folder / shard))
    missing = next((name for name in weight_map if name not in tensors), None)
    if missing:
        raise UserError(f"{folder / INDEX} says that {weight_map[missing]} holds {missing}, but it does not")
    return tensors


def _open_shard(path: Path) -> dict[str, LazyTensor]:
    if not path.is_file():
        raise UserError(f"{path.parent / INDEX} names {path.name}, which is missing: fetch the checkpoint again")
    with read_errors(path):
        path.open("rb").close()  # its error says better what is wrong
    try:
        # Kept open by the tensors' loaders; pages are mapped when they are read.
        file = safe_open(path, framework="pt")
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or damaged, fetch it again: {one_line(error)}") from error
    tensors = {}
    for name, header in headers.items():
        kind = header.get_dtype()
        if kind not in FLOATS:
            raise UserError(
                f"{name} in {path.name} is stored as {kind}, as quantized weights are: give the checkpoint in float32, "
                "bfloat16 or float16"
            )
        tensors[name] = LazyTensor(tuple(header.get_shape()), FLOATS[kind], partial(file.get_tensor, name))
    return tensors


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise `UserError` for a tensor with nan or inf: a single one makes every output of a model nan."""
    # A sum takes one pass and no memory. It can overflow, so the elements are looked at where it is not finite.
    if tensor.sum().isfinite() or tensor.isfinite().all():
        return
    value, dtype = "nan" if tensor.isnan().any() else "inf", str(tensor.dtype).removeprefix("torch.")
    too_small = ", or its numbers are too large for this dtype" if tensor.dtype == torch.float16 else ""
    raise UserError(f"{name} holds {value} in {dtype}: the checkpoint is damaged{too_small}")


def copy_files(source: Path, target: Path, patterns: Iterable[str]) -> None:
    """Copy the files in `source` that match one of `patterns`, other than weights, to the same places in `target`."""
    for path in companions(source, patterns):
        copied = target / path.relative_to(source)
        copied.parent.mkdir(exist_ok=True)
        content = read_json(path) if path.name == "tokenizer_config.json" else {}
        kept = {name: value for name, value in content.items() if name not in PATH_FIELDS}
        if kept == content:
            shutil.copyfile(path, copied)
        else:
            write_text(copied, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def companions(folder: Path, patterns: Iterable[str] = COMPANIONS) -> list[Path]:
    """Return the files in `folder` that match `patterns`, but weights; raises `UserError` for a link out of it."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return [within(folder, path) for path in sorted(paths) if path.is_file() and path.suffix != ".safetensors"]


def check_companions(folder: Path, vocab_size: int) -> None:
    """Raise `UserError` for a file that `copy_files` could not copy, and for a tokenizer that does not fit."""
    for path in companions(folder):
        with read_errors(path):
            path.open("rb").close()
        if path.name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
            read_json(path)
    check_tokenizer_files(folder, vocab_size)


def check_tokenizer_files(folder: Path, vocab_size: int) -> None:
    """Raise `UserError` for a tokenizer with a token id that the model's embedding does not have."""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            ids = _token_ids(content) if name == "tokenizer.json" else content.values()
            largest = max((token for token in ids if isinstance(token, int)), default=-1)
            if largest >= vocab_size:
                raise UserError(
                    f"the tokenizer does not match: {name} has the token id {largest}, but vocab_size={vocab_size}"
                )


def _token_ids(content: dict[str, Any]) -> list[Any]:
    """Return the ids of the tokens in a `tokenizer.json`; malformed entries are left out."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):
        ids = list(range(len(vocabulary)))
    return ids + [token.get("id") for token in (added if isinstance(added, list) else []) if isinstance(token, dict)]
