"""Statistics of the text: sums that do not depend on batches, without padding, within documents, in constant memory."""

from tempfile import gettempdir

import pytest
import torch
from attention_oracle import CALIBRATION, collected, distance, grouped, layer_inputs, random_model
from small_models import make_batch

from benchmarks.layerwise import collect
from modeling_gqa.conversion import UserError, convert_model, streams, target_config
from modeling_gqa.conversion.layers.moments import mean_rotation, without_data
from modeling_gqa.conversion.streams import Scratch


def rows_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: x[i : i + 1] for name, x in batch.items()} for i in range(len(batch["input_ids"]))]


def lags(weights: torch.Tensor) -> torch.Tensor:
    """Share (H, T) of attention weights (H, T, T) that each lag has."""
    length = weights.shape[-1]
    found = torch.stack([weights.diagonal(-lag, dim1=1, dim2=2).sum(-1) for lag in range(length)], dim=1)
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize("name", ["gqa", "mixed-window"])
def test_sums_are_those_of_all_tokens_whatever_the_batches(name):
    """Moments and length are means over all tokens, however these are split into batches.

    In the moments the first token of a row counts as a tenth of its 24.
    """
    model = random_model(name)
    rows = [row for batch in CALIBRATION[:2] for row in rows_of(batch)]
    splits = [CALIBRATION[:2], rows, [*rows_of(CALIBRATION[1]), CALIBRATION[0]]]
    inputs = layer_inputs(model, CALIBRATION[:2])
    for split in splits:
        for x, found in zip(inputs, collected(model, split), strict=True):
            assert found.second.dtype == found.mean.dtype == found.lags.dtype == torch.float64
            weight = torch.where(torch.arange(len(x)) % 24 == 0, 2.4, 1.0)[:, None]
            assert distance(found.second, x.T @ (weight * x) / weight.sum()) < 1e-6
            assert distance(found.mean, (weight * x).sum(0) / weight.sum()) < 1e-6
            assert found.length == 24


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_not_counted(padding):
    """Statistics of padded rows are those of the rows without padding."""
    model = random_model("gqa")
    batch = make_batch(padding=padding)
    documents = [
        {"input_ids": ids[mask.bool()][None]}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    for padded, alone in zip(collected(model, [batch]), collected(model, documents), strict=True):
        assert distance(padded.second, alone.second) < 1e-5 and distance(padded.mean, alone.mean) < 1e-5
    # Attention is looked at in the row with the least padding; here that has some.
    padded_rows = {name: x[1:] for name, x in batch.items()}
    alone = collected(model, documents[1:2])
    for found, expected in zip(collected(model, [padded_rows]), alone, strict=True):
        size = expected.lags.shape[1]
        assert distance(found.lags[:, :size], expected.lags) < 1e-5 and found.lags[:, size:].abs().sum() < 1e-12


def test_lags_of_rows_that_begin_with_much_padding(monkeypatch):
    """Attention by lag is taken from where the text begins."""
    monkeypatch.setattr(streams, "LAGS_SEEN", 8)
    model = random_model("gqa")
    batch = {name: x[:1] for name, x in make_batch(1, 24).items() if name == "input_ids"}
    mask = (torch.arange(24) >= 14).long()[None]
    ids = batch["input_ids"]
    positions = (torch.arange(24) - 14).clamp(min=0)[None]
    padded = collected(model, [{"input_ids": ids, "attention_mask": mask, "position_ids": positions}])
    for found, expected in zip(padded, collected(model, [{"input_ids": ids[:, 14:]}]), strict=True):
        assert distance(found.lags, expected.lags) < 1e-5


@pytest.mark.parametrize("damage", ["weight", "overflow"])
def test_what_is_not_finite_is_refused(damage):
    """A nan weight and overflowing activations are refused with their causes."""
    model = random_model("gqa")
    if damage == "weight":
        model.model.layers[1].self_attn.k_proj.weight.data[3, 4] = torch.nan
        with pytest.raises(UserError, match=r"layer 1: k_proj\.weight is not finite"):
            convert_model(model, target_config(model.config, "mqa"))
    else:
        model.model.layers[0].mlp.down_proj.weight.data[:] = 3e38
        with pytest.raises(
            UserError, match=r"activations on the calibration text are not finite in float32: the weights"
        ):
            convert_model(model, target_config(model.config, "mqa"), CALIBRATION)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_lags_are_the_attentions(backend):
    """Attention by lag equals the diagonals of the oracle's weights, and the backend is left as it was."""
    model = random_model("gqa", attention_bias=True).double()
    model.set_attn_implementation(backend)
    inputs = layer_inputs(model, CALIBRATION)
    for index, found in enumerate(collected(model, CALIBRATION)):
        x = inputs[index].view(4, 6, 24, -1)[:, 0]  # a row of each batch
        weights = sum(grouped(model, index).weights(row) for row in x)
        assert distance(found.lags, lags(weights)) < 1e-10
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(backend):
    """Packed documents have the statistics of documents alone."""
    model = random_model("gqa")
    model.set_attn_implementation(backend)
    ids = make_batch(1, 12)["input_ids"]
    packed = {"input_ids": ids, "position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None]}
    documents = [{"input_ids": ids[:, :5]}, {"input_ids": ids[:, 5:]}]
    for found, expected in zip(collected(model, [packed]), collected(model, documents), strict=True):
        assert found.lags[:, 7:].abs().max() < 1e-12 and found.lags[:, 6].mean() > 1e-4
        assert distance(found.lags[:, :7], expected.lags) < 1e-5
        assert distance(found.second, expected.second) < 1e-5


def test_the_text_between_layers_has_no_name_on_disk(tmp_path, monkeypatch):
    """So that kill -9 leaves nothing of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = collect(random_model("gqa"), CALIBRATION)
    next(seen)
    assert not any(tmp_path.iterdir())
    seen.close()


@pytest.mark.parametrize("in_memory", [0, 3000])
def test_scratch_is_a_mapping_that_uses_its_room_again(in_memory, tmp_path, monkeypatch):
    """`Scratch` is a mapping, and a value that fits overwrites its predecessor, in memory or in the file."""
    monkeypatch.setattr(streams, "IN_MEMORY", in_memory)
    with open(tmp_path / "file", "w+b") as file:
        files = Scratch(file, torch.device("cpu"))
        expected = {}
        for number, size in ((3, 5), (1, 700), (3, 4), (1, 900), (3, 5), (2, 0)):
            files[number] = expected[number] = torch.rand(size)
            assert files.keys() == expected.keys() and all(torch.equal(files[n], expected[n]) for n in expected)
        length = files.end
        files[1] = expected[1] = torch.rand(900)
        assert files.end == length and torch.equal(files[1], expected[1])
        del files[3]
        assert 3 not in files and len(files) == 2


def test_scratch_takes_no_more_room_with_each_layer(tmp_path, monkeypatch):
    """A batch's states are two tensors, three and two again in every layer."""
    monkeypatch.setattr(streams, "IN_MEMORY", 0)
    with open(tmp_path / "file", "w+b") as file:
        files, ends = Scratch(file, torch.device("cpu")), []
        for _ in range(4):
            for number in (2, 3, 2):
                files[0] = tuple(torch.rand(number, 500).unbind())
            ends.append(files.end)
    assert ends[0] == ends[-1]


def test_a_full_disk_is_said(monkeypatch):
    """A full temporary folder is named in one line."""
    monkeypatch.setattr(streams, "IN_MEMORY", 0)
    with open("/dev/full", "r+b", buffering=0) as full:
        files = Scratch(full, torch.device("cpu"))
        with pytest.raises(UserError, match=f"cannot be written to {gettempdir()} .No space.*: set TMPDIR"):
            files[3] = torch.zeros(4)
        assert 3 not in files


def test_the_models_mode_is_kept():
    """Statistics are those of evaluation mode, and a model in training stays in it."""
    model = random_model("gqa", attention_dropout=0.5)
    expected = collected(model, CALIBRATION[:1])
    model.train()
    assert torch.equal(collected(model, CALIBRATION[:1])[2].second, expected[2].second) and model.training


@pytest.mark.parametrize("batches", [[], [{**make_batch(), "attention_mask": torch.zeros(3, 11, dtype=torch.long)}]])
def test_no_text_is_refused(batches):
    """No batches, or batches of padding, are refused."""
    with pytest.raises(UserError, match="the calibration text is empty"):
        collected(random_model("gqa"), batches)


def test_covariance():
    statistics = collected(random_model("gqa"), CALIBRATION)[1]
    assert torch.allclose(statistics.covariance, statistics.second - torch.outer(statistics.mean, statistics.mean))


@pytest.mark.parametrize(("index", "window"), [(0, 24), (1, 5)])
def test_mean_rotation_is_mostly_that_of_attention_and_else_that_of_all_pairs(index, window):
    """The mean rotation is 0.9 of where attention looks and 0.1 of all pairs, within the window."""
    model = random_model("mixed-window")
    statistics = collected(model, CALIBRATION)[index]
    omega = grouped(model, 0).omega
    pairs = [t - s for t in range(24) for s in range(t + 1) if t - s < window]
    assert not statistics.lags[:, window:].any()
    everywhere = sum(torch.exp(1j * omega * lag) for lag in pairs) / len(pairs)
    looked = sum(share[:, None] * torch.exp(1j * omega * lag) for lag, share in enumerate(statistics.lags.T))
    assert distance(mean_rotation(statistics, omega), 0.1 * everywhere + 0.9 * looked) < 1e-12


def test_without_data_nothing_is_known():
    """Without text inputs are white, and all pairs count alike."""
    statistics = without_data(hidden=5, heads=3, length=4, device=torch.device("cpu"))
    assert torch.equal(statistics.covariance, torch.eye(5, dtype=torch.float64)) and not statistics.mean.any()
    assert torch.allclose(statistics.lags, torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).expand(3, -1))
    omega = torch.tensor([1.0, 0.1], dtype=torch.float64)
    expected = sum(torch.exp(1j * omega * lag) * (4 - lag) / 10 for lag in range(4))
    assert distance(mean_rotation(statistics, omega), expected.expand(3, -1)) < 1e-12
