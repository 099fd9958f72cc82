"""Models that device_map or offloading has spread: refused by all functions that compute with them, and why.

Several devices need a second one: `conversions_on_device.py` has that case.
"""

import accelerate
import pytest
from attention_oracle import CALIBRATION, random_model

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import UserError, allocate, compare_predictions, convert_model, layer_errors, target_config

SPREAD = {
    "meta": lambda model, _: model.to("meta"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
}
ENTRIES = {
    "convert_model": lambda model: convert_model(model, target_config(model.config, "mqa"), CALIBRATION),
    "allocate": lambda model: allocate(model, "mla", 900, CALIBRATION),
    "compare_predictions": lambda model: compare_predictions(random_model("mha"), model, CALIBRATION),
    "layer_errors": lambda model: layer_errors(model, random_model("mha"), CALIBRATION),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("spread", SPREAD.values(), ids=SPREAD)
def test_spread_models_are_refused(spread, entry, tmp_path):
    model = spread(random_model("mha"), tmp_path)
    with pytest.raises(UserError, match=r"not in memory \(offloaded, .* load the whole model on one device"):
        entry(model)


def test_a_device_map_of_one_device_is_none(tmp_path):
    """`device_map` leaves a model whole where it names one device."""
    random_model("mha").save_pretrained(tmp_path)
    model = GQAForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    converted, _ = convert_model(model, target_config(model.config, "mqa"))
    assert compare_predictions(model, converted, CALIBRATION)["kl"] > 0
