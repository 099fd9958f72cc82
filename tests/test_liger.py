"""What `Trainer(use_liger_kernel=True)` changes in our models, and what it says where it changes nothing.

Where liger-kernel is installed, its kernels run here in Triton's interpreter: `pip install liger-kernel==0.8.5
triton==3.9.0`, which no other test needs. Elsewhere a module in its place records what would be changed.
"""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_models import make_batch, make_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations import liger as integration

from modeling_gqa import integrations

pytestmark = pytest.mark.compat

INSTALLED = importlib.util.find_spec("liger_kernel") is not None
NAMES = ["gqa", "mla-q-lora", "mixed-window"]


class Recorder(types.ModuleType):
    """In place of Liger's module: its table, its choice by model type, and hooks that record modules."""

    LigerSwiGLUMLP = "swiglu"

    def __init__(self):
        super().__init__(integrations.LIGER)
        self.MODEL_TYPE_TO_APPLY_LIGER_FN, self.norms, self.mlps = {}, {}, {}

    def _patch_rms_norm_module(self, module, **options):
        self.norms[module] = options

    def _patch_swiglu_module(self, module, liger_module):
        self.mlps[module] = liger_module

    def _apply_liger_kernel_to_instance(self, model, **options):
        self.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model, **options)


@pytest.fixture
def recorder(monkeypatch):
    """Liger Kernel as it is found by transformers and our models, on a machine with a GPU."""
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", recorder)
    monkeypatch.setitem(sys.modules, integrations.LIGER, recorder)
    monkeypatch.setattr(integration, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return recorder


@pytest.mark.parametrize("name", ["mha", "mla-q-lora", "mixed"])
def test_norms_of_hidden_states_and_mlps_are_liger_s(name, recorder):
    model = make_model(name, rms_norm_eps=1e-4)
    integration.apply_liger_kernel(model, None)
    norms = {part for part, module in model.named_modules() if module in recorder.norms}
    mlps = {part for part, module in model.named_modules() if module in recorder.mlps}
    expected = {f"model.layers.{index}.{norm}_layernorm" for index in range(3) for norm in ("input", "post_attention")}
    assert norms == {*expected, "model.norm"}
    assert mlps == {f"model.layers.{index}.mlp" for index in range(3)}
    assert all(options["eps"] == 1e-4 for options in recorder.norms.values())


def test_only_what_is_asked_for(recorder):
    integration.apply_liger_kernel(make_model("mqa"), {"rms_norm": False})
    assert not recorder.norms and len(recorder.mlps) == 3


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({"rope": True}, {}, "Liger's rope was not applied"),
        ({"fused_linear_cross_entropy": True}, {}, "Liger's fused_linear_cross_entropy was not applied"),
        ({}, {"hidden_act": "gelu"}, "Liger's swiglu was not applied"),
    ],
)
def test_what_does_not_fit_is_said(options, overrides, message, recorder):
    with pytest.warns(UserWarning, match=message):
        integration.apply_liger_kernel(make_model("gqa", **overrides), options)
    assert len(recorder.norms) == 7 and len(recorder.mlps) == (0 if overrides else 3)


def test_without_a_gpu_nothing_is_applied_and_said(recorder, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.warns(UserWarning, match="^no Liger kernels were applied: they need a GPU$"):
        integration.apply_liger_kernel(make_model("gqa"), None)
    assert not recorder.norms and not recorder.mlps


def test_a_model_is_built_where_liger_cannot_be_imported(recorder, monkeypatch):
    monkeypatch.setitem(sys.modules, integrations.LIGER, None)
    make_model("gqa")
    assert not recorder.MODEL_TYPE_TO_APPLY_LIGER_FN


def test_before_a_model_is_built_nothing_is_applied_and_said(recorder):
    make_model("gqa")
    with pytest.warns(UserWarning, match="they need a model that is built"):
        recorder.MODEL_TYPE_TO_APPLY_LIGER_FN["gqa"]()


# -- Liger's own kernels, in Triton's interpreter. It must be chosen before Triton is imported.

# Two gaps of the interpreter of Triton 3.9: numbers are float32 in a compiled kernel, and libdevice has no rsqrt.
INTERPRETED = """
import numpy, sys
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._implicit_cvt

def convert_floats(argument):
    if not isinstance(argument, float):
        return convert(argument)
    return tl.tensor(interpreter.TensorHandle(numpy.array([argument], numpy.float32), tl.float32), tl.float32)

interpreter._implicit_cvt = convert_floats
import liger_kernel.ops.rms_norm
liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.rsqrt(x)
sys.path.insert(0, sys.argv[1])
import test_liger
test_liger.compare_with_liger(sys.argv[2])
"""


def losses_and_gradients(model):
    """Logits of a padded batch, its loss, and the gradients by the parameters' names."""
    batch = make_batch(padding="left")
    outputs = model.train()(**batch, labels=batch["input_ids"])
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs.logits.detach(), outputs.loss.item(), gradients


def compare_with_liger(folder: str) -> None:
    """Print how far a model that `Trainer` has changed is from ours; gradients relative to the largest of each."""
    found = {}
    for name in NAMES:
        plain = make_model(name, initializer_range=0.05)
        plain.save_pretrained(Path(folder) / name)
        changed = AutoModelForCausalLM.from_pretrained(Path(folder) / name)
        rows = [{"input_ids": row, "labels": row} for row in make_batch()["input_ids"]]
        arguments = TrainingArguments(
            folder, use_liger_kernel=True, max_steps=1, learning_rate=0.0, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(changed, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()  # which asks for no logits, in words of Liger's models
        changed.zero_grad()
        (expected, loss, gradients), (logits, own_loss, own) = map(losses_and_gradients, (plain, changed))
        parts = [str(module.forward.__qualname__) for module in changed.modules()]
        found[name] = {
            "norms": sum("LigerRMSNorm" in part for part in parts),
            "mlps": sum("LigerSwiGLU" in part for part in parts),
            "logits": (logits - expected).abs().max().item(),
            "loss": abs(own_loss - loss),
            "gradients": max(((own[n] - g).abs().max() / g.abs().max()).item() for n, g in gradients.items()),
        }
    print(json.dumps(found))


@pytest.mark.processes
@pytest.mark.skipif(not INSTALLED, reason="needs liger-kernel and triton")
def test_liger_computes_what_our_layers_compute(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(Path(__file__).parent), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found) == NAMES
    for name, numbers in found.items():
        assert (numbers["norms"], numbers["mlps"]) == (7, 3), name
        assert numbers["logits"] < 1e-5 and numbers["loss"] < 1e-5 and numbers["gradients"] < 1e-4, (name, numbers)
