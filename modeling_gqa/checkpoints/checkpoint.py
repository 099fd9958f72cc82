"""A checkpoint opened once: its configuration, as this package's too, its family, its dtype and its tensors."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from modeling_gqa_cli.errors import UserError, one_line
from modeling_gqa_cli.paths import refuse_missing

from ..cache_formats import CACHE_BUFFERS
from ..cache_quantized import rounds_cache
from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .files import (
    WEIGHTS,
    LazyTensor,
    check_companions,
    check_finite,
    is_gguf,
    local_folder,
    open_tensors,
    read_json,
)
from .stock_tensors import RENAMED, own_names

if TYPE_CHECKING:
    from .gguf import GGUFFile


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of this package or of a family that can be imported; `open_checkpoint` makes it.

    Args:
        folder: where its files lie.
        stock_config: what its `config.json` holds; of this package's own checkpoints the same as `config`.
        config: the configuration as this package's.
        dtype: of its weights.
        tensors: its tensors by name, each read when it is loaded; empty where only `config.json` was fetched.
        gguf: the file that it is unpacked from, whose tokenizer lies in `folder`; `None` for other checkpoints.
    """

    folder: Path
    stock_config: PreTrainedConfig
    config: GQAConfig
    dtype: torch.dtype
    tensors: Mapping[str, LazyTensor]
    gguf: "GGUFFile | None" = None

    @property
    def family(self) -> str:
        """The `model_type` in its `config.json`: "gqa" for this package's own, else a family such as "llama"."""
        return self.stock_config.model_type

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GQAForCausalLM:
        """Read the model into memory; `None` is for the checkpoint's own dtype, and for the CPU.

        Raises `UserError` where files cannot be read, or a weight is nan or inf.
        """
        path: Any = self.folder
        options: dict[str, Any] = {"dtype": dtype or "auto", "local_files_only": True}
        if self.gguf or self.family in RENAMED:  # transformers' own loader reads only tensors of the same names
            state = self.gguf.unpack() if self.gguf else {name: x.load() for name, x in self.tensors.items()}
            path, options = None, {"dtype": dtype or self.dtype, "state_dict": state}
        try:
            model: Any = GQAForCausalLM.from_pretrained(path, config=self.config, **options)
            model = model.to(device) if device is not None else model
            if path is None and (self.folder / GENERATION_CONFIG_NAME).is_file():
                model.generation_config = GenerationConfig.from_pretrained(self.folder)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # files beside the weights are read as well, and an index's other fields
            source = self.gguf.path if self.gguf else self.folder
            raise UserError(f"{source} cannot be loaded: {one_line(error)}") from error
        for name, tensor in model.state_dict().items():
            check_finite(name, tensor)
        return model


def open_checkpoint(
    source: str | Path,
    *,
    download: bool = True,
    companions: bool = True,
    foreign: bool = False,
    quantized_cache: bool = False,
    ignore_fields: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """Open a checkpoint and check that configuration, weights and tokenizer fit each other; weights are not read.

    No code of the checkpoint is run.

    Args:
        source: folder of a checkpoint in safetensors, a GGUF file, or the name of a model on the Hub.
        download: whether a model on the Hub is downloaded; else its `config.json` alone is fetched and checked.
        companions: whether the tokenizer and the other files beside the weights are checked.
        foreign: whether a checkpoint of this package is refused.
        quantized_cache: whether a `cache_quantization` is kept, with its means and bases. Without, what is made from
            the checkpoint has none; it changes no weight.
        ignore_fields: see `import_config`; of a GGUF file also entries of its metadata.
        dtype: that the weights of a GGUF file are unpacked to, `None` for bfloat16; others keep their own.

    Raises:
        UserError: there is no such checkpoint, it is not supported, or its weights do not fit.
    """
    if is_gguf(source):
        return _open_gguf(source, dtype, companions, ignore_fields)
    folder, complete = Path(source), download or Path(source).exists()
    if complete:
        folder = local_folder(source)
    else:
        refuse_missing(source)
        try:
            folder = Path(hf_hub_download(str(source), "config.json")).parent
        except (HfHubHTTPError, ValueError, OSError):
            folder = local_folder(source)  # which says what is wrong
    stock_config = read_config(folder)
    config: Any = stock_config
    if foreign or not isinstance(stock_config, GQAConfig):
        from .families import import_config

        config = import_config(stock_config, ignore_fields=ignore_fields)
    elif ignore_fields:
        raise UserError(f"{source} is a modeling_gqa model, of which no field is refused: ignore none")
    if not quantized_cache and rounds_cache(config):
        config = copy.deepcopy(config)
        config.cache_quantization = None
    tensors: dict[str, LazyTensor] = {}
    if complete:
        if companions:
            check_companions(folder, config.vocab_size)
        tensors = open_tensors(folder)
        if not quantized_cache:
            tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[-1] not in CACHE_BUFFERS}
        if config.dtype is None:
            config.dtype = next((tensor.dtype for tensor in tensors.values()), None)
        # DeepSeek-V3's layers for speculative decoding, which transformers' model leaves out too.
        further = getattr(stock_config, "num_nextn_predict_layers", None) or 0
        further_layers = range(config.num_hidden_layers, config.num_hidden_layers + further)
        tensors = own_names(config, stock_config.model_type, tensors)
        tensors = own_tensors(meta_model(GQAForCausalLM, config), tensors, further_layers)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return Checkpoint(folder, stock_config, config, dtype, tensors)


def _open_gguf(
    source: str | Path, dtype: torch.dtype | None, companions: bool, ignore_fields: Collection[str]
) -> Checkpoint:
    from .families import import_config
    from .gguf import GGUFFile

    file = GGUFFile(source, dtype)
    stock_config = file.read_config(ignore_fields)
    config = import_config(stock_config, ignore_fields=[name for name in ignore_fields if name not in file.fields])
    folder = file.path.parent
    if companions:
        folder = file.write_tokenizer()
        check_companions(folder, config.vocab_size)
    model = meta_model(GQAForCausalLM, config)
    tensors = own_tensors(model, file.tensors(model.state_dict(), config.num_hidden_layers))
    return Checkpoint(folder, stock_config, config, file.dtype, tensors, file)


def load_source(
    source: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    ignore_fields: Collection[str] = (),
) -> GQAForCausalLM:
    """Load a checkpoint of this package or of a supported family as this package's model.

    Args:
        source: folder of a checkpoint in safetensors, a GGUF file, or the name of a model on the Hub.
        dtype: of the weights; `None` for the checkpoint's own, and bfloat16 for a GGUF file.
        device: where the model goes; `None` for the CPU.
        ignore_fields: names of fields of the configuration that no family has, and that do not change what the model
            computes; without, they are refused.

    Raises:
        UserError: the source is not supported or incomplete, or a weight is nan or inf.

    Example:
        ```python
        import tempfile

        from transformers import LlamaConfig, LlamaForCausalLM

        from modeling_gqa.conversion import load_source

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
            model = load_source(folder)
        assert model.config.attention_kind == "mha"
        ```
    """
    return open_checkpoint(source, companions=False, ignore_fields=ignore_fields, dtype=dtype).load(dtype, device)


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration in the folder of a checkpoint; raises `UserError` where it is missing or not supported."""
    path = folder / "config.json"
    if not path.exists() and (files := sorted(folder.glob("*.gguf"))):
        raise UserError(f"{folder} has no config.json, but a GGUF file: give the file itself, {files[0]}")
    fields = read_json(path)
    model_type = fields.get("model_type")
    # With either of these, transformers' loader reads weights that the configuration does not describe.
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} has an adapter (adapter_config.json): merge it into the weights, or take its files out"
        )
    if fields.get("transformers_weights") is not None:
        raise UserError(f"{path} names other weights (transformers_weights): call them {WEIGHTS}, and remove the field")
    from .families import stock_class, text_part

    config_class = GQAConfig if model_type == GQAConfig.model_type else stock_class(model_type)
    try:
        return text_part(config_class.from_pretrained(folder))
    except Exception as error:  # each class checks its own way, or not at all
        raise UserError(f"{path} is not valid: {one_line(error)}") from error


def meta_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model without memory for its weights: it has their names and shapes, and can save all but them."""
    try:
        with torch.device("meta"):
            return model_class._from_config(config, dtype=config.dtype or torch.float32)
    except Exception as error:  # each class fails in its own way
        raise UserError(f"the model of this configuration cannot be built: {one_line(error)}") from error


def own_tensors(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], further_layers: range = range(0)
) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint that `model` stores, in the model's order.

    Rotary frequencies, which early versions of transformers stored, and `further_layers` are left out.

    Raises:
        UserError: a tensor is missing, unknown or of another shape; or one that the configuration ties differs.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    left_out = tuple(f"model.layers.{index}." for index in further_layers)
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(left_out) and not name.endswith("rotary_emb.inv_freq")
    }
    tied = model.all_tied_weights_keys
    for copied, original in tied.items():
        if copied not in tensors:
            continue
        kept, dropped = tensors.setdefault(original, tensors[copied]), tensors.pop(copied)
        if kept.shape != dropped.shape or not torch.equal(kept.load(), dropped.load()):
            raise UserError(
                f"{copied} differs from {original}, but tie_word_embeddings=True: set it to false in config.json"
            )
    missing = next((name for name in shapes if name not in tensors and name not in tied), None)
    if missing:
        raise UserError(f"the weights have no tensor {missing}, which the configuration asks for")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise UserError(f"the weights have a tensor {name}, which the configuration has no place for")
        if tensor.shape != shapes[name]:
            raise UserError(
                f"{name} has the shape {list(tensor.shape)}, but the configuration asks for {list(shapes[name])}"
            )
    return {name: tensors[name] for name in shapes if name in tensors}
