"""Checkpoints of transformers' Llama-like and dense DeepSeek-like families as GQA models, exactly or not at all."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..configuration_gqa import GQAConfig
from ..modeling_gqa import GQAForCausalLM
from .aside import refuse_overlap, written_aside
from .errors import ConversionError
from .families import SHARED, find_family, refuse_fields
from .files import (
    MAX_SHARD_SIZE,
    WEIGHTS,
    LazyTensor,
    check_companions,
    check_finite,
    local_folder,
    one_line,
    open_tensors,
    read_json,
    write_checkpoint,
)
from .types import Progress

MOST_LAYERS = 100_000  # a list of more would fill the memory before anything is compared with the weights


def import_config(config: PreTrainedConfig) -> GQAConfig:
    """Configuration of the GQA model that computes what transformers' model of `config` computes.

    Raises:
        ConversionError: the family is not supported, or a field says something that is not; it is named.
    """
    family = find_family(config.model_type)
    refuse_fields(config, family)
    try:
        fields = {name: copy.deepcopy(getattr(config, name)) for name in SHARED} | family.translate(config)
        fields["attention_dropout"] = fields["attention_dropout"] or 0.0
        if fields.get("pad_token_id") == -1:  # early Llama checkpoints say so that there is none
            fields["pad_token_id"] = None
        return GQAConfig(**fields)
    except Exception as error:  # a wrong value may break any step
        raise ConversionError(f"this {config.model_type} model cannot be imported: {one_line(error)}") from error


def read_config(folder: Path) -> PreTrainedConfig:
    """Configuration in the folder of a checkpoint, a GQA model's or of a supported family; no code of its own is run.

    Raises:
        ConversionError: there is none, its family is not supported, or its class refuses it.
    """
    fields = read_json(folder / "config.json")
    model_type = fields.get("model_type")
    for name in ("num_hidden_layers", "num_nextn_predict_layers"):
        layers = fields.get(name)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            said = f"{layers:.3g}" if layers < 10**300 else "larger than any number that counts something"
            raise ConversionError(
                f"{folder / 'config.json'} is not valid: {name} must be at most {MOST_LAYERS:,}, and is {said}"
            )
    # Of these transformers' loader reads the weights, and the configuration does not say what they hold.
    if (folder / "adapter_config.json").is_file():
        raise ConversionError(
            f"{folder} has an adapter (adapter_config.json): merge it into the weights, or take its files out"
        )
    if fields.get("transformers_weights") is not None:
        raise ConversionError(
            f"{folder / 'config.json'} names other weights (transformers_weights): call them {WEIGHTS}, and remove it"
        )
    if model_type != GQAConfig.model_type:
        find_family(model_type)
    config_class = GQAConfig if model_type == GQAConfig.model_type else CONFIG_MAPPING[model_type]
    try:
        return config_class.from_pretrained(folder)
    except Exception as error:  # each class checks its own way, or not at all
        raise ConversionError(f"{folder / 'config.json'} is not valid: {one_line(error)}") from error


def import_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    force: bool = False,
    progress: Progress = iter,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> GQAConfig:
    """Write the GQA repository of the model in `source`: weights in their dtype, configuration, code and tokenizer.

    Args:
        source: folder of a checkpoint in safetensors, or the name of a model on the Hub.
        target: folder to write; it appears complete at the end, or not at all.
        force: replace `target` where it exists.
        progress: wraps the iteration over the tensors' names.
        max_shard_size: bytes of a weights file, and of the tensors held in memory at a time.

    Raises:
        ConversionError: the source is not supported or incomplete, or the target exists.
    """
    folder = local_folder(source)
    refuse_overlap(folder, target)
    source_config = read_config(folder)
    config = import_config(source_config)
    check_companions(folder, config.vocab_size)
    tensors = open_tensors(folder)
    if config.dtype is None:
        config.dtype = next((tensor.dtype for tensor in tensors.values()), None)
    model = meta_model(GQAForCausalLM, config)
    tensors = own_tensors(model, tensors, further_layers(source_config))
    with written_aside(target, force) as aside:
        write_checkpoint(aside, model, tensors, folder, progress, max_shard_size)
    return config


def load_source(source: str | Path, dtype=None, device=None) -> GQAForCausalLM:
    """A GQA model in memory, from a GQA checkpoint or one of a supported family, read tensor by tensor.

    Args:
        source: folder of a checkpoint in safetensors, or the name of a model on the Hub.
        dtype: of the weights; the checkpoint's own where left out.
        device: where the model goes; the CPU where left out.

    Raises:
        ConversionError: the source is not supported or incomplete, or a weight is nan or inf.
    """
    folder = local_folder(source)
    source_config = read_config(folder)
    ours = source_config.model_type == GQAConfig.model_type
    config = source_config if ours else import_config(source_config)
    own_tensors(meta_model(GQAForCausalLM, config), open_tensors(folder), further_layers(source_config))
    # The names are the same in all families, so transformers' own loader reads any of them.
    try:
        model = GQAForCausalLM.from_pretrained(folder, config=config, dtype=dtype or "auto", local_files_only=True)
        model = model.to(device) if device is not None else model
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # files beside the weights are read as well, and an index's other fields
        raise ConversionError(f"{folder} cannot be loaded: {one_line(error)}") from error
    for name, tensor in model.state_dict().items():
        check_finite(name, tensor)
    return model


def meta_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights: their names and shapes, and what is saved beside them."""
    try:
        with torch.device("meta"):
            return model_class._from_config(config, dtype=config.dtype or torch.float32)
    except Exception as error:  # as above
        raise ConversionError(f"the model of this configuration cannot be built: {one_line(error)}") from error


def own_tensors(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], further_layers: range = range(0)
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint that `model` stores, in its order.

    `further_layers` and the rotary frequencies that early versions of transformers stored are left out.

    Raises:
        ConversionError: a tensor is missing, unknown or of another shape; or one that the configuration ties differs.
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
            raise ConversionError(
                f"{copied} differs from {original}, but tie_word_embeddings=True: set it to false in config.json"
            )
    missing = next((name for name in shapes if name not in tensors and name not in tied), None)
    if missing:
        raise ConversionError(f"the weights have no tensor {missing}, which the configuration asks for")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ConversionError(f"the weights have a tensor {name}, which the configuration has no place for")
        if tensor.shape != shapes[name]:
            raise ConversionError(
                f"{name} has the shape {list(tensor.shape)}, but the configuration asks for {list(shapes[name])}"
            )
    return {name: tensors[name] for name in shapes if name in tensors}


def further_layers(config: PreTrainedConfig) -> range:
    """Indices of DeepSeek-V3's layers for speculative decoding, which transformers' model leaves out as well."""
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    return range(config.num_hidden_layers, config.num_hidden_layers + count)
