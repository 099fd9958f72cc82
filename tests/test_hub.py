"""A saved model is a complete repository: where the package is missing it loads, trains and is saved again."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from small_models import MODELS, SIZES, make_batch, make_config, make_model
from test_stock_tools import TABLES, smoothed_loss
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports

import modeling_gqa
from modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM

pytestmark = pytest.mark.compat

PACKAGE = Path(modeling_gqa.__file__).parent
PRESETS = sorted(path.parent for path in PACKAGE.parent.glob("configuration/models/*/config.json"))
CLASSES = {
    "AutoConfig": "GQAConfig",
    "AutoModel": "GQAModel",
    "AutoModelForCausalLM": "GQAForCausalLM",
    "AutoModelForSequenceClassification": "GQAForSequenceClassification",
    "AutoModelForTokenClassification": "GQAForTokenClassification",
    "AutoModelForQuestionAnswering": "GQAForQuestionAnswering",
}
ALLOWED_IMPORTS = {"torch", "transformers", "huggingface_hub", "packaging", *sys.stdlib_module_names}
REVISIONS = {"main": "1" * 40, "v1": "2" * 40}

WITHOUT_PACKAGE = """
import sys
sys.modules["modeling_gqa"] = None  # it may be installed in this environment
try:
    import modeling_gqa
except ImportError:
    pass
else:
    raise AssertionError("modeling_gqa can be imported")
"""
PRELUDE = """
import json, sys, torch, transformers
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
batch = torch.load("batch.pt")
"""


def run_python(code: str, folder: Path, package: bool = False):
    """Run code in a fresh process in `folder`, offline, with stdin closed; return the JSON that it prints last."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_MODULES_CACHE"] = str(folder / "modules")
    if package:
        environment["PYTHONPATH"] = str(PACKAGE.parent)
    command = [sys.executable, "-c", ("" if package else WITHOUT_PACKAGE) + PRELUDE + code]
    result = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def shipped_files() -> set[str]:
    return {"modeling_gqa.py", *(Path(path).name for path in get_relative_import_files(PACKAGE / "modeling_gqa.py"))}


def assert_complete(repository: Path):
    auto_map = json.loads((repository / "config.json").read_text())["auto_map"]
    for auto_class, reference in auto_map.items():
        module, name = reference.split(".")
        assert re.search(rf"^class {name}\(", (repository / f"{module}.py").read_text(), flags=re.MULTILINE)
        assert CLASSES[auto_class] == name
    assert auto_map.keys() == CLASSES.keys()
    for path in repository.glob("*.py"):
        for name in get_relative_imports(path):
            assert (repository / f"{name}.py").is_file(), (path.name, name)
    assert {path.name for path in repository.glob("*.py")} == shipped_files()


def test_saved_files_are_those_at_the_top_of_the_package(tmp_path):
    """`ls modeling_gqa/*.py` shows what a saved repository holds, and that is little enough to read."""
    make_model("mixed").save_pretrained(tmp_path)
    saved = {path.name for path in tmp_path.glob("*.py")}
    assert saved == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    # Fourteen, and one more for each kind that comes with a file of its own.
    kinds = {Path(inspect.getfile(cls)).name for cls in ATTENTION_CLASSES.values()}
    assert len(saved - kinds) <= 12 and kinds >= {"attention.py", "attention_latent.py"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Folder with a repository of every model, one of them also twice in an offline Hub cache, and expected logits."""
    folder = tmp_path_factory.mktemp("hub")
    batch = make_batch(padding="left")
    expected = {}
    for name in MODELS:
        model = make_model(name)
        model.save_pretrained(folder / "models" / name)
        expected[name] = model(**batch).logits.detach()
    cached = folder / "home" / "hub" / "models--org--name"
    for seed, (revision, commit) in enumerate(REVISIONS.items()):
        model = make_model("mixed", seed=seed)
        model.save_pretrained(cached / "snapshots" / commit)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / revision).write_text(commit)
        expected[revision] = model(**batch).logits.detach()
    assert not torch.allclose(expected["main"], expected["v1"])
    torch.save(batch, folder / "batch.pt")
    torch.save(expected, folder / "expected.pt")
    return folder


LOAD = """
expected = torch.load("expected.pt")
def check(name, source, **arguments):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, **arguments)
    modules = {type(module).__module__ for module in (model, model.config, model.model.layers[0].self_attn)}
    assert all(module.startswith("transformers_modules.") for module in modules), modules
    assert torch.equal(model(**batch).logits, expected[name]), name
    assert model.generate(batch["input_ids"], max_new_tokens=3).shape == (3, 14)
    return model
"""


@pytest.mark.processes
def test_a_configuration_saved_alone_brings_all_code(workplace):
    """Tensors that a tool copies beside it make a repository; so does a configuration that was loaded from one."""
    folder = workplace / "copied"
    model = make_model("mixed")
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert_complete(folder)
    code = """
check("mixed", "copied")
AutoConfig.from_pretrained("copied", trust_remote_code=True).save_pretrained("configuration")
print(json.dumps("saved"))
"""
    assert run_python(LOAD + code, workplace) == "saved"
    assert_complete(workplace / "configuration")


@pytest.mark.processes
def test_loads_and_saves_where_the_package_is_missing(workplace):
    for name in MODELS:
        assert_complete(workplace / "models" / name)
    code = """
for name in sorted(path.name for path in Path("models").iterdir()):
    check(name, f"models/{name}").save_pretrained(f"again/{name}")
for revision in ("main", "v1"):
    check(revision, "org/name", revision=revision).save_pretrained(f"again/{revision}")
check("v1", "org/name", revision="2" * 40).save_pretrained("again/commit")
check("main", "org/name").save_pretrained("again/sharded", max_shard_size="60KB")
print(json.dumps(sorted(path.name for path in Path("again").iterdir())))
"""
    names = run_python(LOAD + code, workplace)
    assert names == sorted([*MODELS, *REVISIONS, "commit", "sharded"])
    for name in names:
        assert_complete(workplace / "again" / name)
    assert len(list((workplace / "again" / "sharded").glob("*.safetensors"))) > 2

    # Once more, without the first repositories and the code that was copied from them.
    fresh = workplace / "fresh"
    fresh.mkdir()
    for name in ("again", "batch.pt", "expected.pt"):
        (fresh / name).symlink_to(workplace / name)
    code = """
for name in NAMES:
    check({"sharded": "main", "commit": "v1"}.get(name, name), f"again/{name}")
print(len(NAMES))
"""
    assert run_python(f"NAMES = {names}\n{LOAD}{code}", fresh) == len(names)


@pytest.mark.processes
def test_heads_load_where_the_package_is_missing(workplace):
    code = """
tensors = AutoModelForCausalLM.from_pretrained("models/mixed", trust_remote_code=True).state_dict()
names = {}
for auto_class in HEADS:
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained("models/mixed", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    for name, tensor in model.base_model.state_dict().items():
        assert torch.equal(tensor, tensors["model." + name]), name
    model.save_pretrained("heads/" + auto_class)
    again = auto.from_pretrained("heads/" + auto_class, trust_remote_code=True)
    first, second = model.eval()(**batch), again(**batch)
    assert all(torch.equal(first[key], second[key]) for key in first if key not in ("past_key_values", "cache"))
    names[auto_class] = type(again).__name__
print(json.dumps(names))
"""
    heads = {name: cls for name, cls in CLASSES.items() if name not in ("AutoConfig", "AutoModelForCausalLM")}
    names = run_python(f"HEADS = {list(heads)}\n{code}", workplace)
    assert names == heads
    for auto_class in names:
        assert_complete(workplace / "heads" / auto_class)


@pytest.mark.processes
def test_trainer_resumes_where_the_package_is_missing(workplace):
    code = """
from transformers import Trainer, TrainingArguments, set_seed
torch.manual_seed(5)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 101, (8, 10))]
def train(output, **resume):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained("org/name", trust_remote_code=True, attention_dropout=0.2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(output, max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
                                  learning_rate=1e-2, report_to=[], disable_tqdm=True, seed=7)
    Trainer(model, arguments, train_dataset=rows).train(**resume)
    assert not [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    return model
full = train("run")
resumed = train("resumed", resume_from_checkpoint="run/checkpoint-2")
stored = AutoModelForCausalLM.from_pretrained("run/checkpoint-4", trust_remote_code=True)
for model in (resumed, stored):
    for name, tensor in full.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
arguments = TrainingArguments("smoothed", label_smoothing_factor=0.1, use_cpu=True, report_to=[], disable_tqdm=True)
smoothed = Trainer(stored, arguments, eval_dataset=rows).evaluate()["eval_loss"]
names = {name: table["gqa"] for name, table in vars(transformers.models.auto.modeling_auto).items()
         if name.endswith("MAPPING_NAMES") and "gqa" in table}
print(json.dumps({"module": type(stored).__module__, "dropout": stored.config.attention_dropout,
                  "smoothed": smoothed, "names": names}))
"""
    result = run_python(code, workplace)
    assert result["module"].startswith("transformers_modules.")
    assert result["dropout"] == 0.2
    assert_complete(workplace / "run" / "checkpoint-2")
    # Transformers' tools know the copied classes by name: labels are shifted under label smoothing, as Llama's are.
    assert result["names"] == {f"{table}_NAMES": CLASSES[auto_class] for auto_class, table in TABLES.items()}
    torch.manual_seed(5)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 101, (8, 10))]
    stored = GQAForCausalLM.from_pretrained(workplace / "run" / "checkpoint-4")
    assert result["smoothed"] == pytest.approx(smoothed_loss(stored, rows), rel=1e-5)


@pytest.mark.processes
def test_installed_package_and_remote_code_save_each_other(workplace):
    code = """
import modeling_gqa
from transformers.dynamic_module_utils import get_class_from_dynamic_module
expected = torch.load("expected.pt")["mixed"]
remote_class = get_class_from_dynamic_module("modeling_gqa.GQAForCausalLM", "models/mixed")
remote_config = get_class_from_dynamic_module("configuration_gqa.GQAConfig", "models/mixed")
assert remote_class is not modeling_gqa.GQAForCausalLM and remote_class.__module__.startswith("transformers_modules.")
models = {
    "remote": remote_class.from_pretrained("models/mixed"),
    "installed": AutoModelForCausalLM.from_pretrained("models/mixed", trust_remote_code=True),
    "installed, hub": AutoModelForCausalLM.from_pretrained("org/name", trust_remote_code=True),
    "installed class, remote config": modeling_gqa.GQAForCausalLM.from_pretrained(
        "models/mixed", config=remote_config.from_pretrained("models/mixed")),
    "remote class, installed config": remote_class.from_pretrained(
        "models/mixed", config=modeling_gqa.GQAConfig.from_pretrained("models/mixed")),
}
for name, model in models.items():
    assert torch.equal(model(**batch).logits, expected), name
    model.save_pretrained("crossed/" + name)
for name in models:
    installed = modeling_gqa.GQAForCausalLM.from_pretrained("crossed/" + name)
    assert torch.equal(installed(**batch).logits, expected), name
print(json.dumps({name: type(model).__module__ for name, model in models.items()}))
"""
    modules = run_python(code, workplace, package=True)
    for name, module in modules.items():
        assert module.startswith("transformers_modules." if name.startswith("remote") else "modeling_gqa."), name
        assert_complete(workplace / "crossed" / name)


@pytest.mark.parametrize("file", sorted(shipped_files()))
def test_shipped_file_imports_siblings_and_core_dependencies_only(file):
    path = PACKAGE / file
    siblings, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert node.module, "`from . import name` is not followed"
            siblings.add(node.module)
    assert others <= ALLOWED_IMPORTS
    # Also those that only look like imports, in docstrings, count for transformers.
    assert set(get_relative_imports(path)) == siblings
    assert not [name for name in siblings if "." in name or not (PACKAGE / f"{name}.py").is_file()]


@pytest.mark.parametrize("auto_class", [name for name in CLASSES if name != "AutoConfig"])
def test_auto_classes_build_save_and_load(auto_class, tmp_path):
    auto = getattr(transformers, auto_class)
    model = auto.from_config(make_config("mixed"))
    assert type(model) is getattr(modeling_gqa, CLASSES[auto_class])
    model.save_pretrained(tmp_path)
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert type(loaded.config) is modeling_gqa.GQAConfig
    assert not any(report.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_are_saved(tied, tmp_path):
    model, ids = make_model("mixed", tie_word_embeddings=tied), make_batch()["input_ids"]
    full = model(ids).logits
    model.resize_token_embeddings(SIZES["vocab_size"] + 6)
    model.save_pretrained(tmp_path)
    for resized in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert (resized.lm_head.weight is resized.model.embed_tokens.weight) is tied
        assert resized(ids, labels=ids).logits.shape[-1] == resized.config.vocab_size == 107
        torch.testing.assert_close(resized(ids).logits[..., :101], full)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_device_map_and_dtype(device_map, model_name, workplace):
    batch, expected = torch.load(workplace / "batch.pt"), torch.load(workplace / "expected.pt")[model_name]
    folder, mask = workplace / "models" / model_name, batch["attention_mask"].bool()
    loaded = GQAForCausalLM.from_pretrained(folder, device_map=device_map)
    assert torch.equal(loaded(**batch).logits, expected)
    half = GQAForCausalLM.from_pretrained(folder, device_map=device_map, dtype=torch.bfloat16)
    logits = half(**batch).logits
    assert logits.dtype == torch.bfloat16
    assert torch.cosine_similarity(logits[mask].float(), expected[mask], dim=-1).min() > 0.98
    assert half.generate(**batch, max_new_tokens=4, min_new_tokens=4).shape == (3, 15)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_buffers_may_lie_on_the_disk(kind, tmp_path):
    model, ids = make_model(kind, cache_quantization={"nbits": 3, "means": True}), make_batch()["input_ids"]
    model.save_pretrained(tmp_path)
    devices = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    devices |= {f"model.layers.{index}": "disk" if index else "cpu" for index in range(3)}
    places = {"device_map": devices, "offload_folder": tmp_path / "disk", "offload_buffers": True}
    assert torch.equal(GQAForCausalLM.from_pretrained(tmp_path, **places)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_build(preset):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(preset))
        ids, mask = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert model(ids, attention_mask=mask).logits.shape == (1, 3, model.config.vocab_size)
