"""Conversions on a device are those on the processor: `python conversions_on_device.py pretended` or `cuda`."""

import sys
from contextlib import nullcontext
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # as pytest does

import pytest
import torch
from attention_oracle import CALIBRATION, random_model

from modeling_gqa.conversion import (
    UserError,
    allocate,
    compare_predictions,
    convert_model,
    layer_errors,
    sequential,
    streams,
    target_config,
)

# Kind, its fields, the target, and options: each way to convert, once.
CASES: list[tuple[str, dict, dict, dict]] = [
    ("gqa", {"qk_norm": True, "attention_bias": True}, {"attention_kind": "mqa"}, {"refine": 0}),
    ("gqa", {}, {"attention_kind": "mqa"}, {"refit": False, "refine": 0}),
    ("gqa", {}, {"attention_kind": "mqa"}, {"method": "mean"}),
    ("mha", {}, {"attention_kind": "gqa", "num_key_value_heads": 2}, {"regroup": True, "refit": False, "refine": 0}),
    ("gqa", {"attention_bias": True}, {"attention_kind": "mla", "cache_size": 24}, {"method": "auto"}),
    ("mqa", {}, {"attention_kind": "mla", "kv_lora_rank": 66}, {}),
]
TEXT = CALIBRATION[:2]
LAYERS = {"num_hidden_layers": 2}


def converted(name: str, fields: dict, changes: dict, options: dict, device: str):
    """State, logits, report and measures of one conversion, on the processor."""
    model = random_model(name, **fields, **LAYERS).to(device)
    target = target_config(model.config, **changes)
    other, report = convert_model(model, target, TEXT, selection=TEXT[:1], **options)
    assert {tensor.device.type for tensor in other.state_dict().values()} == {device}
    report["measured"] = compare_predictions(model, other, TEXT[:1])
    report["errors"] = layer_errors(model, other, TEXT[:1])
    with torch.no_grad():
        logits = other(**{key: tensor.to(device) for key, tensor in TEXT[0].items()}).logits.cpu()
    return {key: tensor.cpu() for key, tensor in other.state_dict().items()}, logits, report


def compare(name: str, fields: dict, changes: dict, options: dict, device: str) -> None:
    (expected, wanted, on_cpu), (found, logits, on_device) = (
        converted(name, fields, changes, options, x) for x in ("cpu", device)
    )
    # On CUDA eigenvectors may turn, and with them weights, also exact ones, but not what the model computes.
    exactly = device == "pretended"
    steps = (on_cpu["setting"] or {}).get("refine", 0)  # whose small parts may turn, as small gradients do
    for key, tensor in expected.items() if exactly else ():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-3 if steps else 1e-4)
    if not on_cpu["setting"]:  # an exact conversion, which nothing was fitted for
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)
    for key in ("kl", "perplexity_after"):
        torch.testing.assert_close(on_device["measured"][key], on_cpu["measured"][key], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(on_device["errors"], on_cpu["errors"], rtol=1e-3, atol=1e-4)
    assert on_device["exact"] == on_cpu["exact"] and on_device["setting"] == on_cpu["setting"]


def spread(device: str) -> None:
    """A model of which a layer is on another device is refused, and the message names both."""
    model, whole = random_model("mha"), random_model("mha").to(device)
    model.model.layers[1].to(device)
    calls = (
        lambda: convert_model(model, target_config(model.config, "mqa"), CALIBRATION),
        lambda: allocate(model, "gqa", 900, CALIBRATION),
        lambda: compare_predictions(whole, model, CALIBRATION),
        lambda: layer_errors(model, whole, CALIBRATION),
    )
    for call in calls:
        with pytest.raises(UserError, match=rf"on several devices \(cpu, {device}:0\)"):
            call()


def main(device: str) -> None:
    # A bias whose gradient is all but 0 moves by the rate all the same, in a direction that rounding decides.
    vars(sequential)["LEARNING_RATES"] = (5e-4,)
    with context(device):
        spread(device)
        for case in CASES:
            compare(*case, device)
        for kind in ("gqa", "mla"):
            models = [random_model("mha", **LAYERS).to(x) for x in ("cpu", device)]
            sizes = [allocate(model, kind, 600, TEXT).to_dict() for model in models]
            assert sizes[0] == sizes[1]


def context(device: str):
    if device == "cuda":
        return nullcontext()
    from pretended_device import PretendedDevice

    class Kept(dict):
        """In place of `Scratch`, whose files cannot hold these tensors."""

    vars(streams)["Scratch"] = lambda folder, device: Kept()
    return PretendedDevice()


if __name__ == "__main__":
    main(sys.argv[1])
