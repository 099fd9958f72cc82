"""Interrupted conversions go on from the layers that they finished, and only from their own."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_gqa.conversion import UserError, allocation, job, sequential
from modeling_gqa.conversion.job import Job
from modeling_gqa.conversion.layer_store import LayerFiles, LayerStore, resumable_folder
from modeling_gqa.conversion.sequential import NewLayer, Setting

GQA: dict[str, Any] = {"attention_kind": "gqa", "num_key_value_heads": 3}
MLA: dict[str, Any] = {"attention_kind": "mla", "cache_size": 30}
BUDGET: dict[str, Any] = {"attention_kind": "mla", "budget": 400}
ROUNDED: dict[str, Any] = {"attention_kind": "mla", "cache_share": 0.2, "cache_bits": "auto"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model of three layers with a tokenizer, in `model`, and `text.txt`."""
    folder = tmp_path_factory.mktemp("source")
    make_model("mha").save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({str(number): number for number in range(101)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "model")
    numbers = torch.randint(3, 101, (60, 30), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text("\n".join(" ".join(map(str, row.tolist())) for row in numbers))
    return folder


def convert(source: Path, target: Path, **options) -> None:
    tokens: dict[str, Any] = {"sequence_length": 32, "calibration_tokens": 512, "evaluation_tokens": 128, "polish": 0}
    options = tokens | options
    Job(source=str(source / "model"), target=target, device="cpu", text=[source / "text.txt"], **options).run(
        False, lambda _: iter
    )


def counted(monkeypatch, stop: int = 0) -> list[int]:
    """The layers that are converted from now on; before the one of number `stop`, Ctrl-C is pressed."""
    reached: list[int] = []
    original = sequential.convert_layer

    def convert_layer(model, index, *arguments):
        if reached[-1:] != [index]:  # a layer's sizes may be tried one after another
            reached.append(index)
        if len(reached) == stop:
            raise KeyboardInterrupt
        return original(model, index, *arguments)

    monkeypatch.setattr(sequential, "convert_layer", convert_layer)
    return reached


def interrupt(source: Path, target: Path, monkeypatch, stop: int, **options) -> Path:
    """Interrupt a conversion and return the folder that it leaves."""
    with monkeypatch.context() as patch:
        counted(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, **options)
    assert [path.name for path in target.parent.iterdir()] == [f".{target.name}.layers"]
    return target.parent / f".{target.name}.layers"


def results(target: Path) -> dict[str, Any]:
    """All files of a result by name; the report without its times."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in target.iterdir()}
    report = json.loads(files["conversion.json"])
    return files | {"conversion.json": {name: value for name, value in report.items() if name != "seconds"}}


def require_same_as_fresh(source: Path, folder: Path, **options) -> None:
    """`one/out` holds what a conversion without interruptions writes, and nothing is left beside it."""
    convert(source, folder / "two" / "out", **options)
    assert results(folder / "one" / "out") == results(folder / "two" / "out")
    assert [path.name for path in (folder / "one").iterdir()] == ["out"]


CASES: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "gqa": ({**GQA, "refine": 2}, 2, [1, 2]),
    "mla": (MLA, 3, [2]),
    "mean": ({**GQA, "method": "mean"}, 3, [2]),
    # One of four settings is measured, and of the second one layer is finished; the best is converted with refinement.
    "auto": ({**GQA, "method": "auto"}, 5, [1, 2, *3 * [0, 1, 2]]),
    # Of the sizes that are tried one is measured.
    "rounded": (ROUNDED, 5, [0, 1, 2, 0, 1, 2]),
}


@pytest.mark.parametrize(("options", "stop", "left"), CASES.values(), ids=CASES)
def test_an_interrupted_conversion_goes_on_to_the_same_bits(options, stop, left, source, tmp_path, monkeypatch):
    """Finished layers are not converted again, files are those of an uninterrupted conversion, nothing else is left."""
    interrupt(source, tmp_path / "one" / "out", monkeypatch, stop, **options)
    reached = counted(monkeypatch)
    convert(source, tmp_path / "one" / "out", **options)
    assert reached == left
    require_same_as_fresh(source, tmp_path, **options)


@pytest.mark.parametrize("stop", [1, 2])
def test_chosen_sizes_are_not_chosen_again(stop, source, tmp_path, monkeypatch):
    """An interruption while the first or the second layer is converted leaves the sizes that a budget chose."""
    allocated, sizes = allocation.allocate, []

    def allocate(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(sequential, "convert_layer", original)
            sizes.append(allocated(*arguments, **options))
        return sizes[-1]

    original = sequential.convert_layer
    monkeypatch.setattr(allocation, "allocate", allocate)
    left = interrupt(source, tmp_path / "one" / "out", monkeypatch, stop, **BUDGET)
    assert (left / "target.json").is_file() and len(sizes) == 1
    reached = counted(monkeypatch)
    convert(source, tmp_path / "one" / "out", **BUDGET)
    assert len(sizes) == 1 and reached == list(range(stop - 1, 3))
    require_same_as_fresh(source, tmp_path, **BUDGET)
    assert len(sizes) == 2 and len({layer.kv_lora_rank for layer in sizes[0].per_layer_config}) > 1


@pytest.mark.parametrize("step", ["compare_predictions", "layer_errors", "write_model"])
@pytest.mark.parametrize("options", [MLA, {**GQA, "method": "auto"}], ids=["mla", "auto"])
def test_after_the_last_layer_no_layer_is_converted_again(step, options, source, tmp_path, monkeypatch):
    """Nor does the calibration text pass through the model again, and candidates are not measured again."""

    def stop(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, step, stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "one" / "out", **options)
    assert [path.name for path in (tmp_path / "one").iterdir()] == [".out.layers"]
    reached = counted(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(sequential, "streams", stop)
        patch.setattr("modeling_gqa.conversion.convert.compare_predictions", stop)
        convert(source, tmp_path / "one" / "out", **options)
    assert reached == []
    require_same_as_fresh(source, tmp_path, **options)


def spoil(change: str, folder: Path) -> dict[str, Any]:
    """Change what a conversion of `folder` reads, and return options that differ; files keep their sizes and times."""
    if change == "text":
        (folder / "text.txt").write_text((folder / "text.txt").read_text()[::-1])
    if change == "configuration":
        config = json.loads((folder / "model" / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] *= 50
        (folder / "model" / "config.json").write_text(json.dumps(config))
    if change == "weights":
        path = folder / "model" / "model.safetensors"
        before, state = path.stat(), load_file(path)
        state["model.layers.1.mlp.up_proj.weight"][2, 3] += 1
        save_file(state, path, metadata={"format": "pt"})
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    return {"seed": 1} if change == "options" else {}


@pytest.mark.parametrize(
    ("change", "kind", "stop"),
    [*((change, GQA, 3) for change in ("options", "text", "configuration")), ("weights", MLA, 3), ("text", BUDGET, 6)],
    ids=["options", "text", "configuration", "weights-mla", "text-budget"],
)
def test_another_plan_does_not_take_the_layers(change, kind, stop, source, tmp_path, monkeypatch):
    """With anything changed that decides them, all layers are converted again, to what a fresh conversion gives."""
    shutil.copytree(source, tmp_path / "source")
    interrupt(tmp_path / "source", tmp_path / "one" / "out", monkeypatch, stop, **kind)
    assert len(list((tmp_path / "one" / ".out.layers").glob("*.safetensors"))) == 2
    options = kind | spoil(change, tmp_path / "source")
    with monkeypatch.context() as patch:
        reached = counted(patch)
        convert(tmp_path / "source", tmp_path / "one" / "out", **options)
    assert reached[-3:] == [0, 1, 2]
    require_same_as_fresh(tmp_path / "source", tmp_path, **options)


def test_a_copy_of_the_source_takes_the_layers(source, tmp_path, monkeypatch):
    """What the files hold counts, and not when they were written."""
    shutil.copytree(source, tmp_path / "source")
    interrupt(tmp_path / "source", tmp_path / "one" / "out", monkeypatch, 3, **GQA)
    os.utime(tmp_path / "source" / "model" / "model.safetensors")
    reached = counted(monkeypatch)
    convert(tmp_path / "source", tmp_path / "one" / "out", **GQA)
    assert reached == [2]


def test_what_was_damaged_is_converted_again(source, tmp_path, monkeypatch):
    """A damaged file of a layer counts as none, and a damaged plan as another one."""
    for name, expected in (("*-0.safetensors", [0, 2]), ("plan.json", [0, 1, 2])):
        folder = interrupt(source, tmp_path / name[:4] / "out", monkeypatch, 3, **GQA)
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[:9])
        (folder / ".0123456789abcdef-7.safetensors.part").write_bytes(b"half")
        with monkeypatch.context() as patch:
            reached = counted(patch)
            convert(source, tmp_path / name[:4] / "out", **GQA)
        assert reached == expected and not folder.exists()


@pytest.mark.parametrize("strange", ["notes.txt", "model-00001-of-00002.safetensors", "a folder", "no folder"])
def test_other_peoples_files_are_kept(strange, source, tmp_path):
    """A folder with a file that no conversion wrote is refused, and stays as it was."""
    folder = tmp_path / ".out.layers"
    if strange == "no folder":
        folder.write_text("mine")
    else:
        (folder / strange).mkdir(parents=True) if strange == "a folder" else folder.mkdir()
        if strange != "a folder":
            (folder / strange).write_text("mine")
    with pytest.raises(UserError, match=r"holds other things than converted layers .*: move it") as error:
        convert(source, tmp_path / "out", **GQA)
    assert (".out.layers" if strange == "no folder" else strange) in str(error.value)
    assert folder.exists() and (strange == "no folder" or [path.name for path in folder.iterdir()] == [strange])
    assert not (tmp_path / "out").exists()


def test_a_refused_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    """A layer that cannot be converted will not be with the next command either."""
    original = sequential.convert_layer

    def convert_layer(model, index, *arguments):
        if index == 1:
            raise UserError("layer 1 is dead")
        return original(model, index, *arguments)

    monkeypatch.setattr(sequential, "convert_layer", convert_layer)
    with pytest.raises(UserError, match="layer 1 is dead"):
        convert(source, tmp_path / "out", **GQA)
    assert not list(tmp_path.iterdir())


def test_layers_in_files_are_a_mapping(tmp_path):
    """Layers come back bit for bit with their fields and losses."""
    with resumable_folder(tmp_path / "kept", {"plan": 1}) as folder:
        files, expected = LayerFiles(folder, "0123456789abcdef"), {}
        for index, dtype in ((10, torch.float32), (2, torch.bfloat16)):
            state = {"k_proj.weight": torch.rand(3, 4).to(dtype)}
            files[index] = expected[index] = NewLayer(state, {"attention_kind": "gqa", "output_bias": None}, None)
        assert list(files) == [2, 10] and len(files) == 2 and 3 not in files
        for index, layer in files.items():
            assert layer[1:] == expected[index][1:]
            assert torch.equal(layer.state["k_proj.weight"], expected[index].state["k_proj.weight"])
        del files[2]
        assert list(files) == [10]
    assert not folder.exists()


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_the_layers_of_the_best_setting_stay(on_disk, tmp_path):
    """Those of a worse one are forgotten once both are measured, and measurements are read again."""
    kept = LayerStore(tmp_path if on_disk else None)
    settings = [Setting(seed=seed, refine=seed) for seed in (1, 2, 3)]
    for setting, kl in zip(settings, (0.3, 0.2, 0.4), strict=True):
        kept.of(setting)[0] = NewLayer({"weight": torch.full((2,), kl)}, {}, kl)
        kept.measure(setting, kl)
    assert [len(kept.of(setting)) for setting in settings] == [0, 1, 0]
    assert kept.of(settings[1])[0].loss == 0.2
    if on_disk:
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        assert [LayerStore(tmp_path).measured(setting) for setting in settings] == [0.3, 0.2, 0.4]
