"""A saved model loads and generates in a release of transformers that has renamed what it never promised."""

import ast
from pathlib import Path

import pytest
import torch
import transformers
from small_models import make_batch, make_model
from test_hub import PACKAGE, run_python, shipped_files

from modeling_gqa import ATTENTION_CLASSES

pytestmark = pytest.mark.compat

# Not exported by `transformers` itself, but documented.
DOCUMENTED = {
    ("transformers", "modeling_utils"),  # whose ALL_ATTENTION_FUNCTIONS is documented
    ("transformers.activations", "ACT2FN"),
    ("transformers.modeling_outputs", "BaseModelOutputWithPast"),
    ("transformers.modeling_outputs", "CausalLMOutputWithPast"),
    ("transformers.utils", "logging"),
    ("huggingface_hub.dataclasses", "strict"),
    ("huggingface_hub.errors", "StrictDataclassError"),
}
LIBRARIES = ("transformers", "huggingface_hub")


def imported(file: str, in_functions: bool) -> set[tuple[str, str]]:
    """(module, name) of the library names that a file imports when it is loaded, or in the bodies of its functions."""
    found: set[tuple[str, str]] = set()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in LIBRARIES:
            if inside == in_functions:
                found.update((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import) and inside == in_functions:
            names = (alias.name for alias in node.names if alias.name.split(".")[0] in LIBRARIES)
            found.update((name, "") for name in names if name != "transformers")
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef))

    visit(ast.parse((PACKAGE / file).read_text()), False)
    return found


def optional_names(file: str) -> set[tuple[str, str]]:
    """(module, name) of each call of `optional`, which is for what transformers does not promise."""
    nodes = ast.walk(ast.parse((PACKAGE / file).read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "optional"]
    return {tuple(ast.literal_eval(argument) for argument in call.args[:2]) for call in calls}  # type: ignore[misc]


OPTIONAL = set().union(*map(optional_names, shipped_files()))
IN_FUNCTIONS = set().union(*(imported(file, in_functions=True) for file in shipped_files()))
TABLES = [f"MODEL_{task}MAPPING_NAMES" for task in ("", "FOR_CAUSAL_LM_", "FOR_TOKEN_CLASSIFICATION_")]
# What is missing, and the number of warnings that one model's code says so with.
MISSING: dict[str, tuple[list[str], int]] = {
    **{f"{module}.{name}": ([f"{module}.{name}"], 1) for module, name in sorted(OPTIONAL)},
    **{f"{module}.{name}": ([f"{module}.{name}"], 0) for module, name in sorted(IN_FUNCTIONS)},
    **{table: ([f"transformers.models.auto.modeling_auto.{table}"], 1) for table in TABLES},
    "tables of PEFT": (["peft.utils.constants"], 1),
    "masks": ([f"transformers.masking_utils.{name}" for name in ("create_causal_mask", "sdpa_mask", "eager_mask")], 0),
}
MISSING["everything"] = (
    [name for names, _ in MISSING.values() for name in names],
    sum(times for _, times in MISSING.values()),
)
NAMES = [*ATTENTION_CLASSES, "mixed-window"]

CODE = """
import contextlib, importlib
from unittest import mock
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

logger = logging.get_logger("transformers.modeling_gqa")

def absent(dotted):
    if not dotted.startswith("transformers."):  # a module of another tool, which holds nothing of what it held
        return mock.patch.dict(sys.modules, {dotted: 3})
    module, name = dotted.rsplit(".", 1)
    module = importlib.import_module(module)
    getattr(module, name)  # it is there, if imported late
    found = dict(vars(module))
    found.pop(name)
    return mock.patch.dict(vars(module), found, clear=True)

def tokens(name):
    for module in [module for module in sys.modules if module.startswith("transformers_modules")]:
        del sys.modules[module]
    logger.warning_once.__func__.cache_clear()
    with CaptureLogger(logger) as said:
        model = AutoModelForCausalLM.from_pretrained(f"models/{name}", trust_remote_code=True)
        ids = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert type(model).__module__.startswith("transformers_modules.")
    tested = "this model's code was tested with"  # said by the canary
    return ids.tolist(), [line for line in said.out.splitlines() if tested not in line]

results = {}
tokens("mixed-window")  # what transformers itself imports late is there from now on
for label, (missing, _) in MISSING.items():
    with contextlib.ExitStack() as stack:
        try:
            for dotted in missing:
                stack.enter_context(absent(dotted))
            results[label] = {name: tokens(name) for name in NAMES}
        except Exception as error:
            results[label] = repr(error)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, dict[str, list[list[int]]]]:
    """A folder with a repository of every model, and the tokens that the installed package generates with each."""
    folder, batch, expected = tmp_path_factory.mktemp("internals"), make_batch(padding="left"), {}
    torch.save(batch, folder / "batch.pt")
    for name in NAMES:
        model = make_model(name)
        model.save_pretrained(folder / "models" / name)
        ids = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        expected[name] = ids.tolist()
    return folder, expected


@pytest.fixture(scope="module")
def loaded(models) -> dict:
    """For each part of transformers that is missing: each model's tokens and warnings, by its own code."""
    return run_python(f"MISSING = {MISSING}\nNAMES = {NAMES}\n{CODE}", models[0])


@pytest.mark.processes
@pytest.mark.parametrize("label", MISSING)
def test_a_saved_model_generates_where_an_internal_is_missing(label, loaded, models):
    missing, times = MISSING[label]
    results, (_, expected) = loaded[label], models
    assert isinstance(results, dict), results
    for name in NAMES:
        tokens, said = results[name]
        assert tokens == expected[name], name
        assert len(said) == times, said
        if times == 1 and missing[0].startswith("transformers."):
            assert missing[0].rsplit(".", 1)[1] in said[0]


@pytest.mark.processes
def test_models_whose_layers_are_alike_need_no_configurations_by_layer(models):
    """In a release without `per_layer_config`, they load and generate; a mixed model says that it cannot."""
    code = """
from transformers import PreTrainedConfig
for cls in PreTrainedConfig.__mro__:
    if "per_layer_config" in vars(cls):
        del cls.per_layer_config
found = {name: tokens(name) for name in NAMES}
try:
    tokens("mixed-window")
except Exception as error:
    print(json.dumps([found, str(error.__cause__ or error)]))
"""
    start = CODE[: CODE.index("results = {}")]
    found, refused = run_python(f"NAMES = {list(ATTENTION_CLASSES)}\n{start}{code}", models[0])
    assert [tokens for tokens, _ in found.values()] == [models[1][name] for name in ATTENTION_CLASSES]
    assert "per_layer_config" in refused


def test_copied_files_import_only_what_is_promised():
    """Names that a release may take away are asked for by `optional`, or where a tool that needs them is used."""
    at_load = set().union(*(imported(file, in_functions=False) for file in shipped_files()))
    promised = {("transformers", name) for name in transformers.__all__} | DOCUMENTED
    assert at_load <= promised, at_load - promised
    assert at_load >= {("transformers", "PreTrainedModel"), ("transformers", "PreTrainedConfig")}
    # None of these is needed before a tool asks for it.
    where = {file for file in shipped_files() if imported(file, in_functions=True)}
    assert where == {"integrations.py"}
    assert len(OPTIONAL) <= 10
