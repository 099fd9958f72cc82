"""A GGUF file, as llama.cpp reads it, opened as a checkpoint; transformers' own loader unpacks its weights."""

import shutil
import weakref
from collections.abc import Callable, Collection, Iterable
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

from modeling_gqa_cli.errors import UserError, install_extra, one_line

from .families import FAMILIES, find_family
from .files import LazyTensor

# Architectures by llama.cpp's names, for which transformers' loader reads all that these families need.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
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
WINDOW = "attention.sliding_window"
# Size of the heads of most Gemma 3. The loader takes it for that of all where it scales the scores.
GEMMA_HEAD = 256
# Entries of Gemma 3 of which the loader takes these values for granted.
GEMMA_DEFAULTS = {"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0}
# Entries that repeat the size of a head.
HEAD_SIZES = ("rope.dimension_count", "attention.key_length", "attention.value_length")
# Values of further entries that ask for nothing.
NOTHING = (0, 1, "", "none")
CAUSAL = "attention.causal"


class GGUFFile:
    """The metadata of a GGUF file; all its weights are unpacked when the first of them is loaded.

    Args:
        path: of the file.
        dtype: that the weights are unpacked to; `None` for bfloat16.

    Raises:
        UserError: there is no such file, it is damaged, or what it holds is not supported.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = Path(path), dtype or DEFAULT_DTYPE
        self.location: Any = {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}
        if not self.path.is_file():
            raise UserError(f"{path} does not exist")
        reader = self._read(partial(_reader, self.path))
        self.fields: dict[str, Any] = self._read(lambda: {name: _value(field) for name, field in reader.fields.items()})
        # GGUF names a tensor's dimensions from the innermost to the outermost.
        self.shapes = {item.name: tuple(int(size) for size in reversed(item.shape)) for item in reader.tensors}
        parts = self.fields.get("split.count")
        if parts and parts > 1:
            raise UserError(f"{path} is one of {parts} parts: merge them with llama.cpp's `llama-gguf-split`")
        self.architecture: Any = self.fields.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            if self.architecture not in FAMILIES:
                find_family(self.architecture)
            raise UserError(
                f"{path} holds a model of the architecture {self.architecture!r}: of GGUF files these can be imported: "
                f"{', '.join(ARCHITECTURES)}"
            )

    def _read(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # readers of damaged files fail in any way
            raise UserError(f"{self.path} is damaged, or no GGUF file: {one_line(error)}") from error

    def read_config(self, ignore_fields: Collection[str] = ()) -> PreTrainedConfig:
        """Return the configuration of transformers' own model.

        Raises `UserError` for an entry that transformers' loader does not read, unless it is in `ignore_fields`.
        """
        if self.architecture == "llama" and "llama.attention.head_count_kv" not in self.fields:
            raise UserError(
                f"{self.path} has no llama.attention.head_count_kv, without which transformers' loader of GGUF files "
                "leaves queries and keys in llama.cpp's order: give the model's checkpoint in safetensors"
            )
        if self.architecture == "gemma3":
            for entry, wanted in ((WINDOW, None), ("attention.key_length", GEMMA_HEAD)):
                found = self.fields.get(f"gemma3.{entry}")
                if found is None or wanted not in (None, found):
                    raise UserError(
                        f"{self.path} has gemma3.{entry}={found}, of which transformers' loader of GGUF files makes "
                        "another model: give the model's checkpoint in safetensors"
                    )
        config = self._read(lambda: AutoConfig.from_pretrained(**self.location))
        if config.model_type == "mistral":
            config.sliding_window = None  # llama.cpp has no window in this architecture
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        read = (*READ, WINDOW) if self.architecture == "gemma3" else READ
        for name, value in self.fields.items():
            entry = name.removeprefix(f"{self.architecture}.")
            taken = self.architecture == "gemma3" and GEMMA_DEFAULTS.get(entry) == value
            if entry in (name, *read) or taken or name in ignore_fields:
                continue
            if value != head_dim if entry in HEAD_SIZES else value not in NOTHING or (entry == CAUSAL and not value):
                raise UserError(
                    f"{self.path} has {name}={value!r}, which transformers' loader of GGUF files does not read: give "
                    "the model's checkpoint in safetensors; if it does not change what the model computes, ignore it "
                    f"with --ignore-field {name} (in Python ignore_fields=[{name!r}])"
                )
        config.dtype = self.dtype
        return config

    def tensors(self, names: Iterable[str], layers: int) -> dict[str, LazyTensor]:
        """Return the tensors by `names` that transformers gives them, others by the file's; one unpacks all, once."""
        unpacked = cache(self.unpack)
        stock_names = {known: name for name, known in names_in_file(self.architecture, names, layers).items()}
        return {
            name: LazyTensor(shape, self.dtype, lambda name=name: unpacked()[name])  # type: ignore[misc]
            for name, shape in ((stock_names.get(name, name), shape) for name, shape in self.shapes.items())
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


def names_in_file(architecture: str, names: Iterable[str], layers: int) -> dict[str, str]:
    """Return llama.cpp's names of tensors by the names that transformers gives them."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    known = get_tensor_name_map(MODEL_ARCH[architecture.upper()], layers)
    return {name: known.get_name(name, (".weight", ".bias")) or name for name in names}


def _reader(path: Path) -> Any:
    try:
        import accelerate  # noqa: F401  (transformers' loader needs it)
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            f"reading a GGUF file needs {error.name}, which is not installed: {install_extra('conversion')}"
        ) from error

    class Reader(GGUFReader):
        # Slices of an array are made three times as fast as those of a map.
        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", numpy.asarray(mapped)))

    return Reader(path)


def _value(field: Any) -> Any:
    """Return the value of an entry; of a list, its length."""
    if len(field.types) != 1:
        return len(field.data)
    with suppress(UnicodeDecodeError):
        return field.contents()
    return ""
