"""Checkpoint folders written: configuration, code, weights in shards, and what is carried over from the source.

Nothing that exists is overwritten without force, and with it only a checkpoint.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.paths import is_in

from ..common import cards
from ..common.atomic import read_object, written_aside
from ..common.progress import BySize, Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .checkpoint import meta_model, open_checkpoint
from .files import COMPANIONS, INDEX, TEMPLATES, WEIGHTS, LazyTensor, check_finite, copy_files, is_gguf

MAX_SHARD_SIZE = 4 * 2**30  # bytes of a file; those of a model on another device are in memory while it is written
# Names of weights; model-backup.safetensors, for instance, is somebody's own file.
WEIGHTS_KINDS = tuple(
    f"{stem}{shard}{suffix}"
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"))
    for shard in ("", "-[0-9]*-of-[0-9]*")
)
# Names of all files of a checkpoint but its Python code.
CHECKPOINT_KINDS = (
    "config.json",
    *WEIGHTS_KINDS,
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    *COMPANIONS,
    "README.md",
    "conversion.json",
    ".gitattributes",
)
# Modules that transformers loads by name; others belong to a checkpoint where these import them.
CODE_KINDS = ("modeling_*.py", "configuration_*.py", "tokenization_*.py")
RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


def write_model(folder: Path, model: PreTrainedModel, source: Path, progress: Progress) -> None:
    """Write `model` with its code, and the tokenizer and generation configuration in the folder `source`."""
    tied = model.all_tied_weights_keys
    tensors = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.cpu)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    write_checkpoint(folder, model, tensors, source, progress)


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    source: Path,
    progress: Progress = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a complete repository: configuration, code, weights, tokenizer and licence.

    Args:
        folder: to write to.
        model: whose configuration and code are saved; it may be on the meta device.
        tensors: the weights by name.
        source: folder whose tokenizer, generation configuration and licence are copied.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a file, and of the tensors held in memory at a time.
    """
    with disk_errors(folder):
        model.save_pretrained(folder, state_dict={})
        (folder / WEIGHTS).unlink(missing_ok=True)  # an empty one
        copy_files(source, folder, COMPANIONS)
        write_tensors(folder, tensors, progress, max_shard_size)


def write_tensors(folder: Path, tensors: Mapping[str, LazyTensor], progress: Progress, max_shard_size: int) -> None:
    """Write tensors as safetensors, in shards of at most `max_shard_size` bytes; one shard is in memory at a time."""
    plan = split_state_dict_into_shards_factory(
        dict(tensors),  # type: ignore[arg-type]
        get_storage_size=lambda tensor: tensor.nbytes,  # type: ignore[attr-defined]
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    shard: dict[str, torch.Tensor] = {}
    ordered = [name for names in plan.filename_to_tensors.values() for name in names]
    for name in progress(BySize(ordered, (tensors[name].nbytes for name in ordered))):
        filename = plan.tensor_to_filename[name] if plan.is_sharded else WEIGHTS
        shard[name] = tensors[name].load().contiguous()
        check_finite(name, shard[name])
        if name == plan.filename_to_tensors[filename][-1]:
            save_file(shard, folder / filename, metadata={"format": "pt"})
            shard = {}
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise what safetensors says of a full disk as the `OSError` that it comes from."""
    try:
        yield
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        raise


def import_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    force: bool = False,
    progress: Progress = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
    ignore_fields: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> GQAConfig:
    """Rewrite a checkpoint of a supported family as this package's: weights, configuration, code and tokenizer.

    Weights are copied tensor by tensor in their dtype, those of a GGUF file unpacked; the model computes the same
    function.

    Args:
        source: folder of a checkpoint in safetensors, a GGUF file, or the name of a model on the Hub.
        target: folder to write; it appears complete at the end, or not at all.
        force: whether a checkpoint at `target` is replaced.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a weights file, and of the tensors held in memory at a time; a GGUF file is unpacked
            in memory as a whole.
        ignore_fields: see `load_source`.
        dtype: that the weights of a GGUF file are unpacked to; `None` for bfloat16.

    Returns:
        The configuration that was written.

    Raises:
        UserError: the source is not supported or incomplete, or the target exists.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

        from modeling_gqa.conversion import import_checkpoint

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        with tempfile.TemporaryDirectory() as folder:
            stock, ours = Path(folder, "stock"), Path(folder, "ours")
            LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).save_pretrained(stock)
            config = import_checkpoint(stock, ours)
            model = AutoModelForCausalLM.from_pretrained(ours)
        assert config.attention_kind == "gqa" and model.config.model_type == "gqa"
        ```
    """
    if dtype is not None and not is_gguf(source):
        raise UserError(f"{source} is no GGUF file, and its weights keep their own dtype: leave dtype out")
    checkpoint = open_checkpoint(source, foreign=True, ignore_fields=ignore_fields, dtype=dtype)
    refuse_overlap(Path(source) if checkpoint.gguf else checkpoint.folder, target)
    model = meta_model(GQAForCausalLM, checkpoint.config)
    with new_checkpoint(target, force) as aside:
        write_checkpoint(aside, model, checkpoint.tensors, checkpoint.folder, progress, max_shard_size)
        card = checkpoint.folder / "README.md"
        if cards.kept_metadata(card):
            name, metadata = cards.made_from(str(source), card, checkpoint.config)
            title = Path(target).resolve().name
            cards.write_card(
                aside, metadata, f"# {title}\n\n{name} with its weights as they were, for `modeling_gqa`.\n"
            )
    return checkpoint.config


# -- What may be overwritten


def new_checkpoint(
    target: str | Path, force: bool = False, held: ExitStack | None = None
) -> AbstractContextManager[Path]:
    """Return `written_aside` of a folder; with `force` a checkpoint at `target` is replaced."""
    return written_aside(target, lambda path: check_target(path, force), held)


def check_target(target: Path, force: bool) -> None:
    """Raise `UserError` for a target that cannot be written to.

    An existing one can if `force` is true and it is an empty folder or a checkpoint.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file: give a folder to write to")
    if not force:
        raise UserError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    if os.path.ismount(target):
        raise UserError(f"{target} is a mount point, which cannot be replaced: give a folder in it")
    if Path.cwd().resolve().is_relative_to(target):
        raise UserError(f"{target} is the folder you are in, or holds it: go elsewhere, or give another target")
    if reason := why_kept(target):
        raise UserError(f"{target} {reason}, which force (--force) does not replace: choose another target")


def why_kept(folder: Path) -> str | None:
    """Return why a folder must not be deleted: it is neither empty nor a checkpoint and nothing else."""
    paths, code = sorted(folder.iterdir()), code_names(folder)
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name == TEMPLATES and path.is_dir() and not path.is_symlink():
            paths += sorted(path.iterdir())
        elif not path.is_file() or not (name in code or matches(name, CHECKPOINT_KINDS)):
            return f"holds other things than a checkpoint ({name})"
    model_type = (read_object(folder / "config.json") or {}).get("model_type")
    if paths and not (isinstance(model_type, str) and any(matches(path.name, WEIGHTS_KINDS) for path in paths)):
        return "is no checkpoint (of weights, and a config.json with a model_type)"
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path relative to a folder matches one of the patterns, at the same depth."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def code_names(folder: Path) -> set[str]:
    """Return the names of the Python files that a checkpoint's code consists of, by its relative imports."""
    waiting = [path.name for kind in CODE_KINDS for path in folder.glob(kind)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            waiting += [f"{module}.py" for module in RELATIVE_IMPORT.findall(text)]
    return found


def refuse_overlap(source: Path, target: str | Path, what: str = "source") -> None:
    """Raise `UserError` for a target that is, holds or lies in the `source`, which is read; `what` names it."""
    source, target = source.resolve(), Path(target).resolve()
    if is_in(source, target):
        raise UserError(f"the target {target} is the {what}, or holds it: choose another target")
    if is_in(target, source):
        raise UserError(f"the target {target} lies in the {what} {source}: choose another target")
