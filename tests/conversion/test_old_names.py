"""Names that were public before still work, with a warning that says what to use."""

import importlib
from types import ModuleType

import pytest
import torch
from small_models import make_batch, make_model

from modeling_gqa import conversion
from modeling_gqa.conversion import compare_predictions, convert_model, target_config

# `__all__` of version 0.1.0, and the public functions of `modeling_gqa.accounting`, which had none.
PUBLIC = {
    "modeling_gqa": (
        "ATTENTION_CLASSES GQAConfig GQAForCausalLM GQAForQuestionAnswering GQAForSequenceClassification "
        "GQAForTokenClassification GQAModel GQAPreTrainedModel"
    ),
    "modeling_gqa.accounting": (
        "cache_bytes cache_bytes_per_token count_parameters decode_flops prefill_flops training_flops"
    ),
    "modeling_gqa.conversion": (
        "METHODS ConversionError allocate convert export_checkpoint export_config import_checkpoint import_config "
        "layer_errors load_source measure target_config"
    ),
}


@pytest.mark.filterwarnings("ignore:modeling_gqa.conversion.measure:FutureWarning")
@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_that_was_public_can_be_had(module):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


def test_convert_is_the_module_and_can_still_be_called():
    """The old call gives what `convert_model` gives, with `split` and `stage` under their old names."""
    module = importlib.import_module("modeling_gqa.conversion.convert")
    assert isinstance(module, ModuleType) and module is conversion.convert and module.convert_model is convert_model
    model = make_model("gqa")
    target = target_config(model.config, "mla", cache_size=24)
    batches = [{"input_ids": make_batch()["input_ids"]}]
    shown = []

    def stage(description):
        shown.append(description)
        return iter

    with pytest.warns(FutureWarning, match=r"convert_model.*share_cache= for split="):
        old, done = module(model, target, batches, method="lowrank", split=True, stage=stage)
    new, again = convert_model(model, target, batches, method="lowrank", share_cache=True)
    assert done == again and shown == ["converting layers"]
    assert all(torch.equal(x, y) for x, y in zip(old.parameters(), new.parameters(), strict=True))


def test_measure_is_compare_predictions():
    """The old name gives what `compare_predictions` gives, with `known` under its old name."""
    model = make_model("gqa")
    batches = [{"input_ids": make_batch()["input_ids"]}]
    with pytest.warns(FutureWarning, match="compare_predictions, with source_states= for known="):
        measure = conversion.measure
    assert measure(model, model, batches, known=None) == compare_predictions(model, model, batches)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        conversion.nonsense  # noqa: B018
