"""Models that device_map or offloading has spread: refused by all functions that compute with them, and why.

Several devices need a second one: `conversions_on_device.py` has that case.
"""

import accelerate
import pytest
from attention_oracle import CALIBRATION, random_model

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import UserError, allocate, compare_predictions, convert_model, layer_errors, target_config


def disk_map(model) -> dict[str, str]:
    """Everything on the processor but the last layer, which is on disk."""
    last = f"model.layers.{len(model.model.layers) - 1}"
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return places | {f"model.layers.{i}": "cpu" for i in range(len(model.model.layers))} | {last: "disk"}


SPREAD = {
    "meta": lambda model, _: model.to("meta"),
    "cpu_offload": lambda model, _: accelerate.cpu_offload(model, "cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "device_map": lambda model, folder: accelerate.dispatch_model(
        model, disk_map(model), main_device="cpu", offload_dir=folder
    ),
}
ENTRIES = {
    "convert_model": lambda model: convert_model(model, target_config(model.config, "mqa"), CALIBRATION),
    "convert_model, weights alone": lambda model: convert_model(model, target_config(model.config, "mqa")),
    "allocate": lambda model: allocate(model, "mla", 900, CALIBRATION),
    "compare_predictions, source": lambda model: compare_predictions(model, random_model("mha"), CALIBRATION),
    "compare_predictions, converted": lambda model: compare_predictions(random_model("mha"), model, CALIBRATION),
    "layer_errors, source": lambda model: layer_errors(model, random_model("mha"), CALIBRATION),
    "layer_errors, converted": lambda model: layer_errors(random_model("mha"), model, CALIBRATION),
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
    for device_map in ("cpu", {"": "cpu"}):
        model = GQAForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        converted, _ = ENTRIES["convert_model"](model)
        assert compare_predictions(model, converted, CALIBRATION)["kl"] > 0
