"""A GGUF file, as llama.cpp reads it, opened as a checkpoint; transformers' own loader unpacks its weights."""

import shutil
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext, redirect_stderr, suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils.logging import is_progress_bar_enabled

from modeling_gqa_cli.paths import nearest

from ..common.errors import UserError, install_extra, one_line
from .families import FAMILIES, find_family
from .files import LazyTensor

# Architectures by llama.cpp's names, for which transformers' loader reads all that these families need.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ARCHITECTURE = "general.architecture"  # the entry that names it
# A quantized weight has fewer significant bits than the 8 of bfloat16, and the result is half as large as in float32.
DEFAULT_DTYPE = torch.bfloat16
# Entries below the architecture's name that transformers' loader reads.
READ = (
    "context_length",
    "block_count",
    "feed_forward_length",
    "embedding_length",
    "rope.freq_base",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "vocab_size",
)
# Entries that repeat the size of a head.
HEAD_SIZES = ("rope.dimension_count", "attention.key_length", "attention.value_length")
# Values of further entries that ask for nothing.
NOTHING = (0, 1, "", "none")
CAUSAL = "attention.causal"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def is_gguf(source: str | Path) -> bool:
    """Return whether `source` is the path of a GGUF file."""
    return Path(source).suffix.lower() == ".gguf" and not Path(source).is_dir()


class GGUFFile:
    """The metadata of a GGUF file; its weights are unpacked when the first of them is loaded.

    Args:
        path: of the file.
        dtype: that the weights are unpacked to.

    Raises:
        UserError: there is no such file, it is damaged, or what it holds is not supported.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = DEFAULT_DTYPE) -> None:
        self.path, self.dtype = Path(path), dtype
        if not self.path.is_file():
            near = nearest(self.path)
            raise UserError(f"{path} does not exist" + (f" (did you mean {near}?)" if near else ""))
        reader = self._read(partial(_reader, self.path))
        self.fields: dict[str, Any] = self._read(lambda: {name: _value(field) for name, field in reader.fields.items()})
        # GGUF names a tensor's dimensions from the innermost to the outermost.
        self.shapes = {item.name: tuple(int(size) for size in reversed(item.shape)) for item in reader.tensors}
        parts = self.fields.get("split.count")
        if parts and parts > 1:
            raise UserError(f"{path} is one of {parts} parts: merge them with llama.cpp's `llama-gguf-split`")
        self.architecture = self.fields.get(ARCHITECTURE)
        check_architecture(self.path, self.architecture)

    def _read(self, step: Callable[[], Any]) -> Any:
        """Return what `step` returns; raise `UserError` for whatever it raises."""
        try:
            return step()
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # readers of damaged files fail in any way
            raise UserError(f"{self.path} is damaged, or no GGUF file: {one_line(error)}") from error

    @property
    def location(self) -> dict[str, Any]:
        """The arguments by which transformers finds the file."""
        return {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}

    def read_config(self, ignore_fields: Collection[str] = ()) -> PreTrainedConfig:
        """Return the configuration of transformers' own model.

        Args:
            ignore_fields: names of entries that may be there although transformers' loader does not read them.

        Raises:
            UserError: an entry asks for what transformers' loader leaves out.
        """
        if self.architecture == "llama" and "llama.attention.head_count_kv" not in self.fields:
            raise UserError(
                f"{self.path} has no llama.attention.head_count_kv, without which transformers' loader of GGUF files "
                "leaves queries and keys in llama.cpp's order: give the model's checkpoint in safetensors"
            )
        layers = self.fields.get(f"{self.architecture}.block_count", 0)
        if layers > len(self.shapes):  # a model of so many could fill the memory before its weights are missed
            raise UserError(f"{self.path} is damaged: it has {layers} layers and {len(self.shapes)} tensors")
        config = self._read(lambda: AutoConfig.from_pretrained(**self.location))
        if config.model_type == "mistral":
            config.sliding_window = None  # llama.cpp has no window in this architecture
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name, value in self.fields.items():
            entry = name.removeprefix(f"{self.architecture}.")
            if entry in (name, *READ) or name in ignore_fields:
                continue
            if value != head_dim if entry in HEAD_SIZES else value not in NOTHING or (entry == CAUSAL and not value):
                raise UserError(
                    f"{self.path} has {name}={value!r}, which transformers' loader of GGUF files does not read: give "
                    "the model's checkpoint in safetensors; if it does not change what the model computes, ignore it "
                    f"with --ignore-field {name} (in Python ignore_fields=[{name!r}])"
                )
        config.dtype = self.dtype
        return config

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by the names that transformers gives them; loading one unpacks all of them, once."""
        unpacked = cache(self.unpack)
        return {
            name: LazyTensor(shape, self.dtype, lambda name=name: unpacked()[name])  # type: ignore[misc]
            for name, shape in ((stock_name(name), shape) for name, shape in self.shapes.items())
        }

    def unpack(self) -> dict[str, torch.Tensor]:
        """Return all tensors in `dtype`, by the names that transformers gives them."""
        # Before 5.22 transformers always unpacked.
        has_option = hasattr(transformers, "GgufConfig")
        option: Any = {"quantization_config": transformers.GgufConfig(dequantize=True)} if has_option else {}
        load = partial(AutoModelForCausalLM.from_pretrained, **self.location, **option, output_loading_info=True)
        # A bar is drawn by a library that transformers' own setting does not reach.
        quiet: Any = nullcontext() if is_progress_bar_enabled() else redirect_stderr(StringIO())
        with quiet:
            model, found = self._read(partial(load, dtype=self.dtype))
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"transformers' loader of GGUF files does not find {missing[0]} in {self.path}")
        return model.state_dict()

    def write_tokenizer(self) -> Path:
        """Write the file's tokenizer, if it has one, to a folder that lives as long as this object, and return that."""
        folder = Path(mkdtemp(prefix="modeling-gqa-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        if "tokenizer.ggml.tokens" in self.fields:
            self._read(lambda: AutoTokenizer.from_pretrained(**self.location).save_pretrained(folder))
        return folder


def check_architecture(path: Path, architecture: Any) -> None:
    """Raise `UserError` for an architecture that cannot be imported from a GGUF file."""
    if architecture not in ARCHITECTURES:
        if architecture not in FAMILIES:
            find_family(architecture)
        raise UserError(
            f"{path} holds a model of the architecture {architecture!r}: of GGUF files these can be imported: "
            f"{', '.join(ARCHITECTURES)}"
        )


def stock_name(name: str) -> str:
    """Return the name that transformers gives to a tensor; one that it does not know keeps its own."""
    stem, _, kind = name.rpartition(".")
    block, _, inside = stem.partition(".")
    index, _, part = inside.partition(".")
    if block == "blk" and part in LAYER_NAMES:
        return f"model.layers.{index}.{LAYER_NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _reader(path: Path) -> Any:
    try:
        import accelerate  # noqa: F401  (transformers' loader needs it)
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"reading a GGUF file needs {error.name}, which is not installed: {install_extra('conversion')}"
        ) from error

    class Reader(GGUFReader):
        """Checks the architecture, an early entry, before it reads hundreds of thousands of tokens."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: numpy.memmap) -> None:
            self._data = numpy.asarray(mapped)  # of which slices are made three times as fast

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            if field.name == ARCHITECTURE:
                check_architecture(path, _value(field))
            return super()._push_field(field, skip_sum)

    return Reader(path)


def _value(field: Any) -> Any:
    """Return the value of an entry; of a list, its length."""
    if len(field.types) != 1:
        return len(field.data)
    with suppress(UnicodeDecodeError):
        return field.contents()
    return ""
