"""A model of one of the classes of `ARCHITECTURES`, which transformers has, as a GGUF file.

What llama.cpp would compute otherwise is refused.
"""

import errno
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modeling_gqa_cli.errors import UserError, install_extra

from ..common.atomic import written_aside
from ..common.progress import BySize, Progress
from ..configuration_checks import QUERY_SCALING
from ..configuration_gqa import GQAConfig
from .export_blockers import softmax_scale
from .files import LazyTensor, check_finite
from .gguf import names_in_file


class Architecture(NamedTuple):
    """What llama.cpp's architecture of a family computes.

    Args:
        name: in GGUF files.
        pairs_neighbours: whether the two rows of a rotary plane are neighbours, where transformers pairs halves.
        biases: whether it adds the biases that the class may have.
        windows: whether all but every n-th layer may have a window.
        frequencies: values of `rope_type` that it has beside "default" and "linear".
        activations: of its MLP, by transformers' names.
    """

    name: str
    pairs_neighbours: bool = False
    biases: bool = False
    windows: bool = False
    frequencies: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu", "swish")


LLAMA = Architecture("llama", pairs_neighbours=True, biases=True, frequencies=("llama3",))
GRANITE = Architecture("granite", pairs_neighbours=True, biases=True)
# By transformers' families.
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral3": Architecture("mistral3", pairs_neighbours=True, frequencies=("yarn",)),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "granite": GRANITE,
    "smollm3": Architecture("smollm3", pairs_neighbours=True),
    "granitemoehybrid": GRANITE,
    "olmo2": Architecture("olmo2", frequencies=("yarn",)),
    "olmo3": Architecture("olmo2", windows=True, frequencies=("yarn",)),
    "gemma3_text": Architecture("gemma3", windows=True, activations=("gelu_pytorch_tanh",)),
}
UNROTATED_STEP = 4  # of llama.cpp's SmolLM3 every fourth layer does not rotate
# Dtypes by GGUF's names, and what GGUF calls a file of them.
DTYPES = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
GGUF_MAGIC = b"GGUF"  # with which such a file begins
# Divides the frequency of each rotary plane; of these architectures llama.cpp reads it in Llama's alone.
FREQUENCY_FACTORS = "rope_freqs.weight"


def new_gguf(target: str | Path, force: bool = False) -> AbstractContextManager[Path]:
    """Return `written_aside` of a file; with `force` a GGUF file at `target` is replaced."""
    return written_aside(target, lambda path: check_file(path, force), is_file=True)


def check_file(target: Path, force: bool) -> None:
    """Raise `UserError` for a target that no file can be written to; GGUF files are replaced if `force` is."""
    if not target.exists():
        return
    if target.is_dir():
        raise UserError(f"{target} is a folder: give a file to write to")
    if not force:
        raise UserError(f"{target} exists already: choose another target, or overwrite it with force (--force)")
    begins = b""
    if target.is_file():
        with target.open("rb") as file:
            begins = file.read(len(GGUF_MAGIC))
    if begins != GGUF_MAGIC:
        raise UserError(f"{target} is no GGUF file, which force (--force) does not replace: choose another target")


def refuse_for_llama_cpp(config: GQAConfig, stock: PreTrainedConfig) -> None:
    """Raise `UserError` for a model that llama.cpp would compute otherwise; `stock` is what it is exported as."""
    family = stock.model_type
    if family not in ARCHITECTURES:
        raise UserError(
            f"this model cannot be written as a GGUF file: it exports to {family}, and only "
            f"{', '.join(ARCHITECTURES)} are written"
        )
    kind, layers = ARCHITECTURES[family], range(stock.num_hidden_layers)
    rope, sliding = _rotary_parameters(stock)
    rope_type, yarn = rope["rope_type"], rope["rope_type"] == "yarn"
    windowed, period = [x == "sliding_attention" for x in config.layer_types], _window_period(config.layer_types)
    olmo, beta = kind.name == "olmo2", (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    biases = any(getattr(stock, bias, False) for bias in ("attention_bias", "mlp_bias"))
    activation = getattr(stock, "hidden_activation", None) or stock.hidden_act
    # The largest Gemma 3, which llama.cpp knows by its number of layers, scales scores by another size than a head's.
    scale = (stock.hidden_size / stock.num_attention_heads if len(layers) == 62 else config.head_dim) ** -0.5
    checks = (
        (
            any(windowed) and not kind.windows,
            "its layers have windows (sliding_window), which the architecture has not",
        ),
        (
            any(windowed) and windowed != [index % period < period - 1 for index in layers],
            "its layers without a window are not every n-th one (layer_types)",
        ),
        (
            activation not in kind.activations,
            f"hidden_act={activation!r}, and the architecture computes {kind.activations[0]}",
        ),
        (biases and not kind.biases, "it has biases (attention_bias, mlp_bias), which the architecture has not"),
        (
            rope_type not in ("default", "linear", *kind.frequencies),
            f"rope_type={rope_type!r} is not written for {family}",
        ),
        (
            yarn and not rope.get("truncate", True),
            "truncate=False in rope_parameters: llama.cpp rounds the range of frequencies",
        ),
        (
            yarn and _yarn_log_multiplier(stock) not in ((0.0,) if olmo else (0.0, 1.0)),
            "attention_factor, or mscale and mscale_all_dim, in rope_parameters: the architecture scales otherwise",
        ),
        (
            yarn and olmo and beta != (32, 1),
            f"beta_fast, beta_slow={beta} in rope_parameters, and the architecture takes 32 and 1",
        ),
        (
            any(windowed) and sliding["rope_type"] != "default",
            "its layers with a window have scaled frequencies (sliding_rope_parameters)",
        ),
        (
            any(windowed) and olmo and sliding["rope_theta"] != rope["rope_theta"],
            "its layers with a window have another rope_theta (sliding_rope_parameters)",
        ),
        (
            olmo and stock.tie_word_embeddings,
            "its output layer is its embeddings (tie_word_embeddings), and the architecture has another",
        ),
        (
            olmo and config.head_dim * stock.num_attention_heads != stock.hidden_size,
            f"head_dim={config.head_dim} is not hidden_size / num_attention_heads",
        ),
        (
            family == "smollm3" and stock.no_rope_layers != [int((i + 1) % UNROTATED_STEP != 0) for i in layers],
            f"its layers without rotation are not every {UNROTATED_STEP}th one (no_rope_layers)",
        ),
        (
            kind.name == "gemma3" and not math.isclose(softmax_scale(config), scale, rel_tol=1e-6),
            f"softmax_scale={softmax_scale(config)}, and the architecture takes {scale}",
        ),
    )
    if reason := next((reason for holds, reason in checks if holds), None):
        raise UserError(f"this model cannot be written as a GGUF file of the architecture {kind.name}: {reason}")


def _rotary_parameters(stock: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of layers without a window, and of those with one."""
    rope = stock.rope_parameters
    return rope.get("full_attention", rope), rope.get("sliding_attention", rope)


def _window_period(types: Sequence[str]) -> int:
    """Return the n of which llama.cpp gives all but every n-th layer a window."""
    return (list(types).index("full_attention") if "full_attention" in types else len(types)) + 1


def _yarn_log_multiplier(stock: PreTrainedConfig) -> float | None:
    """Return the entry with which llama.cpp scales rotated queries and keys as the class does; `None` without one."""
    kind = {"layer_type": "full_attention"} if "full_attention" in stock.rope_parameters else {}
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](stock, torch.device("cpu"), **kind)
    usual = 1 + 0.1 * math.log(max(1.0, _rotary_parameters(stock)[0]["factor"]))
    return next((entry for entry, x in ((0.0, usual), (1.0, 1.0)) if math.isclose(scale, x, rel_tol=1e-6)), None)


def write_gguf(
    path: Path,
    stock: PreTrainedConfig,
    tensors: Mapping[str, LazyTensor],
    vocabulary: dict[str, Any],
    progress: Progress,
) -> None:
    """Write a GGUF file; one tensor is in memory at a time.

    Args:
        path: of the file.
        stock: configuration of transformers' own model.
        tensors: the weights by transformers' names.
        vocabulary: what `read_vocabulary` returns.
        progress: wraps the iteration over the tensors' names.

    Raises:
        UserError: the package gguf is missing, or a weight is nan, inf or of a dtype that llama.cpp has not.
        OSError: the disk is full.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    except ImportError as error:
        raise UserError(
            f"writing a GGUF file needs {error.name}, which is not installed: {install_extra('conversion')}"
        ) from error
    architecture = ARCHITECTURES[stock.model_type].name
    names = names_in_file(architecture, tensors, stock.num_hidden_layers)
    if _rotary_parameters(stock)[0]["rope_type"] == "llama3":
        names[FREQUENCY_FACTORS] = FREQUENCY_FACTORS
        tensors = {FREQUENCY_FACTORS: _frequency_factors(stock), **tensors}
    writer = GGUFWriter(path, architecture)
    try:
        _add_sizes(writer, stock)
        for entry, value in vocabulary.items():
            getattr(writer, f"add_{entry}")(value)
        # Names, shapes and dtypes stand before the data.
        for name, tensor in tensors.items():
            dtype = _dtype(tensor.shape, tensor.dtype)
            if dtype not in DTYPES:
                raise UserError(f"{name} is stored in {dtype}, which llama.cpp has not: save it in float32 first")
            kind, size = GGMLQuantizationType[DTYPES[dtype][0]], torch.Size(tensor.shape).numel() * dtype.itemsize
            writer.add_tensor_info(names[name], tensor.shape, numpy.dtype(numpy.float32), size, raw_dtype=kind)
        matrices = [tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1]
        writer.add_file_type(LlamaFileType[DTYPES[max(matrices, key=matrices.count)][1]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in progress(BySize(tensors, (tensor.nbytes for tensor in tensors.values()))):
            loaded = tensors[name].load()
            check_finite(name, loaded)
            loaded = _as_in_file(name, loaded, stock)
            loaded = loaded.to(_dtype(tuple(loaded.shape), loaded.dtype)).contiguous()
            writer.write_tensor_data((loaded.view(torch.int16) if loaded.dtype == torch.bfloat16 else loaded).numpy())
    except OSError as error:
        if error.errno is None:  # numpy says how many numbers it wrote, and not why it stopped
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        writer.close()


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
    rope, sliding = _rotary_parameters(stock)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    architecture = ARCHITECTURES[stock.model_type]
    if architecture is GRANITE:
        writer.add_attention_scale(stock.attention_multiplier)
        writer.add_embedding_scale(stock.embedding_multiplier)
        writer.add_residual_scale(stock.residual_multiplier)
        writer.add_logit_scale(stock.logits_scaling)  # which llama.cpp divides by, as the class does
        if getattr(stock, "position_embedding_type", "rope") != "rope":
            writer.add_rope_scaling_finetuned(False)  # by which llama.cpp's Granite does not rotate
    if architecture.windows and "sliding_attention" in stock.layer_types:
        writer.add_sliding_window(stock.sliding_window)
        writer.add_sliding_window_pattern(_window_period(stock.layer_types))
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    if rope.get(QUERY_SCALING) is not None:
        writer.add_attn_temperature_scale(rope[QUERY_SCALING])
    if rope.get(QUERY_SCALING) is not None or rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] in ("linear", "yarn"):
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)  # transformers' default values
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
        writer.add_rope_scaling_yarn_log_mul(_yarn_log_multiplier(stock))


def _dtype(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the file: llama.cpp takes norms and biases in float32 alone."""
    return torch.float32 if len(shape) == 1 and dtype in DTYPES else dtype


def _as_in_file(name: str, tensor: torch.Tensor, stock: PreTrainedConfig) -> torch.Tensor:
    """Return a tensor as llama.cpp takes it: queries and keys in its order of rows, norms as what they multiply by."""
    architecture = ARCHITECTURES[stock.model_type]
    if architecture.name == "gemma3" and name.endswith("norm.weight"):
        return tensor.float() + 1
    heads = {"q_proj": stock.num_attention_heads, "k_proj": stock.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not architecture.pairs_neighbours:
        return tensor
    rows = tensor.view(heads, 2, -1, *tensor.shape[1:])  # heads, half, plane, ...
    return rows.transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(stock: PreTrainedConfig) -> LazyTensor:
    """Return by how much each rotary plane turns slower than by default, as transformers computes it."""
    frequencies, _ = ROPE_INIT_FUNCTIONS[stock.rope_parameters["rope_type"]](stock, torch.device("cpu"))
    planes = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    factors = (stock.rope_parameters["rope_theta"] ** -planes / frequencies.double()).float()
    return LazyTensor(tuple(factors.shape), factors.dtype, lambda: factors)
