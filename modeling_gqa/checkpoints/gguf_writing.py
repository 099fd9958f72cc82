"""A model of Llama's, Mistral's, Qwen2's or Qwen3's class, written as a GGUF file for llama.cpp."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..common.errors import UserError, install_extra
from ..common.progress import BySize, Progress
from ..configuration_gqa import GQAConfig
from .files import LazyTensor, check_finite
from .gguf import LAYER_NAMES, NAMES
from .gguf_tokenizer import MODEL, Vocabulary

# llama.cpp's architectures, by transformers' families.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Dtypes by GGUF's names, and what GGUF calls a file of them.
DTYPES = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
FILE_LAYER_NAMES = {stock: name for name, stock in LAYER_NAMES.items()}
FILE_NAMES = {stock: name for name, stock in NAMES.items()}
# Divides the frequency of each rotary plane; of these architectures llama.cpp reads it in Llama's alone.
FREQUENCY_FACTORS = "rope_freqs.weight"


def refuse_for_llama_cpp(config: GQAConfig, stock: PreTrainedConfig) -> None:
    """Raise `UserError` for a model that llama.cpp would compute otherwise.

    Args:
        config: of the model.
        stock: what `export_config` returns for it.
    """
    family, rope = stock.model_type, stock.rope_parameters["rope_type"]
    reason = None
    if family not in ARCHITECTURES:
        reason = f"it exports to {family}, and only {', '.join(ARCHITECTURES)} are written"
    elif set(config.layer_types) != {"full_attention"}:
        reason = "its layers have windows (sliding_window), which llama.cpp's architecture has not"
    elif stock.hidden_act not in ("silu", "swish"):
        reason = f"hidden_act={stock.hidden_act!r}, and llama.cpp's architecture computes silu"
    elif family == "qwen3" and stock.attention_bias:
        reason = "it has biases beside norms of queries and keys (qk_norm), which llama.cpp's architecture has not"
    elif rope not in ("default", "linear") and not (rope == "llama3" and ARCHITECTURES[family] == "llama"):
        reason = f"rope_type={rope!r} is not written for {family}"
    if reason:
        raise UserError(f"this model cannot be written as a GGUF file: {reason}")


def write_gguf(
    path: Path,
    stock: PreTrainedConfig,
    tensors: Mapping[str, LazyTensor],
    vocabulary: Vocabulary,
    progress: Progress,
) -> None:
    """Write a GGUF file; one tensor is in memory at a time.

    Args:
        path: of the file.
        stock: configuration of transformers' own model.
        tensors: the weights by transformers' names.
        vocabulary: the tokenizer.
        progress: wraps the iteration over the tensors' names.

    Raises:
        UserError: the package gguf is missing, or a weight is nan, inf or of a dtype that llama.cpp has not.
        OSError: the disk is full.
    """
    writer = _writer(path, ARCHITECTURES[stock.model_type])
    if stock.rope_parameters["rope_type"] == "llama3":
        tensors = {FREQUENCY_FACTORS: _frequency_factors(stock), **tensors}
    try:
        _add_sizes(writer, stock)
        _add_vocabulary(writer, vocabulary)
        _add_dtypes(writer, tensors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in progress(BySize(tensors, (tensor.nbytes for tensor in tensors.values()))):
            tensor = tensors[name].load()
            check_finite(name, tensor)
            writer.write_tensor_data(_array(_in_file_order(name, tensor, stock)))
    except OSError as error:
        if error.errno is None:  # numpy says how many numbers it wrote, and not why it stopped
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        writer.close()


def _writer(path: Path, architecture: str) -> Any:
    try:
        from gguf import GGUFWriter
    except ImportError as error:
        raise UserError(
            f"writing a GGUF file needs {error.name}, which is not installed: {install_extra('conversion')}"
        ) from error
    return GGUFWriter(path, architecture)


def _add_sizes(writer: Any, stock: PreTrainedConfig) -> None:
    head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
    writer.add_context_length(stock.max_position_embeddings)
    writer.add_embedding_length(stock.hidden_size)
    writer.add_block_count(stock.num_hidden_layers)
    writer.add_feed_forward_length(stock.intermediate_size)
    writer.add_head_count(stock.num_attention_heads)
    writer.add_head_count_kv(stock.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(stock.rms_norm_eps)
    writer.add_vocab_size(stock.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(stock.rope_parameters["rope_theta"])
    if stock.rope_parameters["rope_type"] == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(stock.rope_parameters["factor"])


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    for purpose, index in vocabulary.special.items():
        getattr(writer, f"add_{purpose}_token_id")(index)
    writer.add_add_bos_token(vocabulary.adds["bos"])
    writer.add_add_eos_token(vocabulary.adds["eos"])
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _add_dtypes(writer: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Add the tensors' names, shapes and dtypes, which stand before their data."""
    from gguf import GGMLQuantizationType, LlamaFileType

    matrices = [tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1]
    for name, tensor in tensors.items():
        dtype = _dtype(tensor.shape, tensor.dtype)
        if dtype not in DTYPES:
            raise UserError(f"{name} is stored in {dtype}, which llama.cpp has not: save it in float32 first")
        kind, size = GGMLQuantizationType[DTYPES[dtype][0]], torch.Size(tensor.shape).numel() * dtype.itemsize
        writer.add_tensor_info(file_name(name), tensor.shape, numpy.dtype(numpy.float32), size, raw_dtype=kind)
    writer.add_file_type(LlamaFileType[DTYPES[max(matrices, key=matrices.count)][1]])


def _dtype(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the file: llama.cpp takes norms and biases in float32 alone."""
    return torch.float32 if len(shape) == 1 and dtype in DTYPES else dtype


def _array(tensor: torch.Tensor) -> numpy.ndarray:
    tensor = tensor.to(_dtype(tuple(tensor.shape), tensor.dtype)).contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def file_name(name: str) -> str:
    """Return llama.cpp's name of a tensor that transformers calls `name`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{FILE_NAMES[stem]}.{kind}" if stem in FILE_NAMES else name
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{FILE_LAYER_NAMES[part]}.{kind}"


def _in_file_order(name: str, tensor: torch.Tensor, stock: PreTrainedConfig) -> torch.Tensor:
    """Return a tensor with the rows of Llama's queries and keys where llama.cpp looks for them.

    transformers pairs the first half of a head with the second; llama.cpp's Llama pairs neighbours.
    """
    heads = {"q_proj": stock.num_attention_heads, "k_proj": stock.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or ARCHITECTURES[stock.model_type] != "llama":
        return tensor
    rows = tensor.view(heads, 2, -1, *tensor.shape[1:])  # heads, half, plane, ...
    return rows.transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(stock: PreTrainedConfig) -> LazyTensor:
    """Return by how much each rotary plane turns slower than by default, as transformers computes it."""
    frequencies, _ = ROPE_INIT_FUNCTIONS[stock.rope_parameters["rope_type"]](stock, torch.device("cpu"))
    planes = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    factors = (stock.rope_parameters["rope_theta"] ** -planes / frequencies.double()).float()
    return LazyTensor(tuple(factors.shape), factors.dtype, lambda: factors)
