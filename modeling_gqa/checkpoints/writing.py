"""Checkpoint folders written: configuration, code, weights in shards, and what is carried over from the source."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from modeling_gqa_cli.errors import UserError

from ..common.progress import BySize, Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .checkpoint import meta_model, open_checkpoint
from .files import COMPANIONS, INDEX, WEIGHTS, LazyTensor, check_finite, copy_files, is_gguf
from .overwriting import new_checkpoint, refuse_overlap

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
    return checkpoint.config
