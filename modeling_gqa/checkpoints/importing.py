"""Checkpoints of transformers' Llama-like and dense DeepSeek-like families rewritten as this package's, exactly."""

from collections.abc import Collection
from pathlib import Path

import torch

from ..common.errors import UserError
from ..common.progress import Progress
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .checkpoint import meta_model, open_checkpoint
from .gguf import is_gguf
from .overwriting import new_checkpoint, refuse_overlap
from .writing import MAX_SHARD_SIZE, write_checkpoint


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
