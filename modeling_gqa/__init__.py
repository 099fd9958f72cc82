"""A transformers language model whose attention is a configuration choice: MHA, MQA, GQA or MLA, layer by layer."""

import importlib
from typing import Any

import transformers

from .cache_quantized import GQAQuantizedCache
from .configuration_gqa import GQAConfig
from .modeling_gqa import (
    ATTENTION_CLASSES,
    AUTO_CLASSES,
    GQAForCausalLM,
    GQAForQuestionAnswering,
    GQAForSequenceClassification,
    GQAForTokenClassification,
    GQAModel,
    GQAPreTrainedModel,
)

__version__ = "0.1.0"

transformers.AutoConfig.register(GQAConfig.model_type, GQAConfig, exist_ok=True)
for _auto_class, _model_class in AUTO_CLASSES.items():
    getattr(transformers, _auto_class).register(GQAConfig, _model_class, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Import `costs` when it is first asked for; models need none of it."""
    if name == "costs":
        return importlib.import_module(".costs", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ATTENTION_CLASSES",
    "GQAConfig",
    "GQAForCausalLM",
    "GQAForQuestionAnswering",
    "GQAForSequenceClassification",
    "GQAForTokenClassification",
    "GQAModel",
    "GQAPreTrainedModel",
    "GQAQuantizedCache",
    "costs",
]
