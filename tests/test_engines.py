"""What serving engines and transformers read in the text of the model's files is there, read as they read it."""

import ast
import inspect
import re
import textwrap

import pytest
import torch
from small_models import make_model
from torch import nn
from transformers.modeling_utils import AttentionInterface

from modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM, attention_functions, modeling_gqa

pytestmark = pytest.mark.compat


def interface_call(forward) -> ast.Call | None:
    """The one call of what was looked up in `ALL_ATTENTION_FUNCTIONS`, as vLLM 0.32 finds it; `None` for 0 or more."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            lookup = node.value.func if isinstance(node.value, ast.Call) else node.value
            if (
                isinstance(lookup, ast.Attribute | ast.Subscript)
                and isinstance(lookup.value, ast.Name)
                and lookup.value.id == "ALL_ATTENTION_FUNCTIONS"
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    return calls[0] if len(calls) == 1 else None


@pytest.mark.parametrize("cls", dict.fromkeys(ATTENTION_CLASSES.values()), ids=lambda cls: cls.__name__)
def test_forward_calls_the_attention_interface_once(cls):
    """vLLM refuses a layer whose class's `forward` does not look the interface up by name and call it once."""
    call = interface_call(cls.forward)
    assert call is not None
    assert [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "scaling"] == ["self.scaling"]
    assert ast.unparse(call.args[0]) == "self"


def test_each_layer_has_one_module_that_engines_can_serve(model_name):
    """vLLM takes the layer's index, scale, causality and implementation from the one module that dispatches."""
    model = make_model(model_name)
    served = [module for module in model.modules() if interface_call(type(module).forward) is not None]
    assert [module.layer_idx for module in served] == list(range(model.config.num_hidden_layers))
    for module in served:
        assert isinstance(module.scaling, float) and module.is_causal is True
        assert module.config is model.config
        assert type(module).__name__.endswith("Attention")
    model.set_attn_implementation("eager")
    assert {module.config._attn_implementation for module in served} == {"eager"}


def test_mla_expands_in_one_call_that_engines_can_leave_out():
    """vLLM's latent cache replaces the one call of a method `(latent, rotary key) -> (key, value)` by its arguments."""
    cls = ATTENTION_CLASSES["mla"]
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    assert calls.count("self.expand_kv(latent, key_rope)") == 1
    assert cls.expand_kv.__code__.co_argcount == 3 and "kv_b_proj" in cls.expand_kv.__code__.co_names
    expansion = ast.parse(textwrap.dedent(inspect.getsource(cls.expand_kv)))
    returned = [node.value for node in ast.walk(expansion) if isinstance(node, ast.Return)]
    assert returned and all(isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returned)


@pytest.mark.parametrize("name", ["own", "sdpa"])
def test_an_engine_that_registers_its_own_function_is_called(kind, name, monkeypatch):
    """A function that an engine registers with transformers computes every layer's attention, in place of ours."""
    calls = []

    def own(module, query, key, value, attention_mask, scaling=None, **kwargs):
        calls.append((module.layer_idx, scaling))
        return torch.zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]), None

    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping, name: own})
    model = make_model(kind)
    model.config._attn_implementation = name
    model(torch.tensor([[1, 5, 7]]))
    assert calls == [(index, layer.self_attn.scaling) for index, layer in enumerate(model.model.layers)]


def test_transformers_lets_the_implementation_be_set():
    """`set_attn_implementation` reads the model's file: a class of attention there would have to call the interface."""
    code = inspect.getsource(modeling_gqa)
    assert not re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    assert GQAForCausalLM._can_set_attn_implementation()
    assert GQAForCausalLM._supports_attention_backend
    assert "ALL_ATTENTION_FUNCTIONS = " in inspect.getsource(attention_functions)


def test_norms_are_named_but_not_fused():
    """vLLM must not fuse the latent norm: it would take the layer for DeepSeek's, and fail at its head size."""
    norm = make_model("mla").model.layers[0].self_attn.kv_a_layernorm
    assert isinstance(norm, nn.Module) and type(norm).__name__.endswith("RMSNorm")
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(norm)
