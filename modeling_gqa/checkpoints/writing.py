"""Checkpoint folders written: configuration, code, weights in shards, and what is carried over from the source."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..common.progress import BySize, Progress
from .files import COMPANIONS, INDEX, WEIGHTS, LazyTensor, check_finite, copy_files

MAX_SHARD_SIZE = 4 * 2**30  # bytes of a file; those of a model on another device are in memory while it is written


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
        model: whose configuration is saved, and its code where it has any; it may be on the meta device.
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
