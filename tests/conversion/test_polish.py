"""The last step of a conversion: what it trains, on what, and that nothing worse is kept."""

import copy
from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from attention_oracle import LONG_CALIBRATION, random_model

from modeling_gqa import GQAForCausalLM
from modeling_gqa.conversion import compare_predictions, convert_model, target_config
from modeling_gqa.conversion import polish as module
from modeling_gqa.conversion.convert import hold_out
from modeling_gqa.conversion.polish import NOT_PREDICTED, cut, polish
from modeling_gqa_cli.errors import UserError

KINDS: dict[str, dict[str, Any]] = {
    "mqa": {"attention_kind": "mqa"},
    "mla": {"attention_kind": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 8},
}


def packed(seed: int = 0, batches: int = 6) -> list[dict[str, torch.Tensor]]:
    """Batches of two rows, each of two documents, of 10 and of 14 tokens of eight that there are."""
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 11, (batches, 2, 24), generator=generator)
    return [{"input_ids": rows, "position_ids": positions} for rows in tokens]


JUDGES = packed(seed=1, batches=2)


def pair(kind: str = "mqa", layers: list[int] | None = None) -> tuple[GQAForCausalLM, GQAForCausalLM]:
    """A source, and its conversion with as little text as there can be, which shares what does not change."""
    source = random_model("mha").eval()
    wanted = target_config(source.config, **KINDS[kind], layers=layers)
    return source, convert_model(source, wanted, share_weights=True)[0]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def divergence(source: Any, converted: Any, batches: list[dict]) -> float:
    """KL(source || converted) of next tokens, in float64, each document of `packed` alone."""
    documents = [
        row[start:end] for batch in batches for row in batch["input_ids"] for start, end in ((0, 10), (10, 24))
    ]
    total, tokens = 0.0, 0
    for document in documents:
        p, q = (model.double()(document[None]).logits[0, :-1].log_softmax(-1) for model in (source, converted))
        total += (p.exp() * (p - q)).sum().item()
        tokens += len(p)
    for model in (source, converted):
        model.float()
    return total / tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_of_the_text_that_judges_falls(kind):
    """The numbers are those of an independent formula before and after."""
    source, converted = pair(kind)
    before = weights(source)
    expected = divergence(source, copy.deepcopy(converted), JUDGES)
    done = polish(source, converted, packed(), JUDGES, [0, 1, 2], tokens=1500)
    assert done is not None and done["kl_before"] == pytest.approx(expected, rel=1e-4)
    assert done["kl_after"] == pytest.approx(divergence(source, converted, JUDGES), rel=1e-3)
    assert done["kl_after"] < done["kl_before"] and 0 < done["tokens"] <= 1500
    assert done["learning_rate"] / expected**0.5 in [pytest.approx(rate, rel=1e-3) for rate in module.LEARNING_RATES]
    assert all(torch.equal(before[name], x) for name, x in source.named_parameters())


def test_the_chosen_layers_alone_are_trained():
    """What is shared with the source is the source's still, and what gradients reach is as it was."""
    source, converted = pair(layers=[1])
    converted.model.norm.weight.requires_grad_(False)
    before, required = weights(converted), {name: x.requires_grad for name, x in converted.named_parameters()}
    done = polish(source, converted, packed(), JUDGES, [1], tokens=500)
    assert done is not None and done["learning_rate"]
    changed = {name for name, x in converted.named_parameters() if not torch.equal(before[name], x)}
    assert changed == {name for name in before if name.startswith("model.layers.1.self_attn.")}
    assert required == {name: x.requires_grad for name, x in converted.named_parameters()}
    assert all(x.grad is None for model in (source, converted) for x in model.parameters())
    assert converted.model.norm.weight.data_ptr() == source.model.norm.weight.data_ptr()


def test_the_text_that_judges_is_not_trained_on(monkeypatch):
    """Other tokens in it leave the trained weights as they are."""
    monkeypatch.setattr(module, "LEARNING_RATES", (1e-4,))
    found = []
    for seed in (1, 2):
        falling = count(-1, -1)  # what it finds sets the rate, and which weights are kept
        monkeypatch.setattr(module.Run, "divergence", lambda run, falling=falling: 2.0 ** next(falling))
        source, converted = pair()
        done = polish(source, converted, packed(), packed(seed, batches=2), [0, 1, 2], tokens=200)
        assert done is not None and done["learning_rate"] == pytest.approx(1e-4 * 0.5**0.5)
        found.append(weights(converted))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("rates", [(1e3,), (1e38,)], ids=["diverges", "nan"])
def test_what_is_not_better_is_not_kept(rates, monkeypatch):
    monkeypatch.setattr(module, "LEARNING_RATES", rates)
    source, converted = pair()
    before = weights(converted)
    done = polish(source, converted, packed(), JUDGES, [0, 1, 2], tokens=1000)
    assert done is not None and done["learning_rate"] is None and done["tokens"] == 0
    assert done["kl_after"] == done["kl_before"]
    assert all(torch.equal(before[name], x) for name, x in converted.named_parameters())


def test_what_does_not_help_is_taken_back_and_the_next_rate_goes_on(monkeypatch):
    """The first rate is judged early, costs few steps and leaves nothing behind: the run ends better all the same.

    The weights kept are those of the second rate. A run of 22 steps is judged every four, and first after one.
    """
    monkeypatch.setattr(module, "LEARNING_RATES", (1e3, 1e-2, 1e-9))
    source, converted = pair()
    before, judged, rates = weights(converted), [], Counter[str]()
    original = module.Run.step

    def step(run, number, optimizers, rate):
        if not judged or judged[-1] != optimizers:
            judged.append(optimizers)
            assert all(torch.equal(x, before[name]) for name, x in run.model.named_parameters())
        rates["first" if rate > 1 else "second"] += 1
        original(run, number, optimizers, rate)

    monkeypatch.setattr(module.Run, "step", step)
    found = polish(source, converted, packed(), JUDGES, [0, 1, 2], tokens=1000)
    assert found is not None and found["kl_after"] < found["kl_before"]
    assert found["learning_rate"] == pytest.approx(1e-2 * found["kl_before"] ** 0.5)
    assert found["kl_after"] == pytest.approx(divergence(source, converted, JUDGES), rel=1e-3)
    assert len(judged) == 2 and rates == {"first": 1, "second": 21}


def test_which_tokens_are_predicted():
    """Neither a document's first token nor padding is; a piece without any is left out."""
    masked = {
        "input_ids": torch.arange(3, 15).view(2, 6),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]),
    }
    padding = {"input_ids": torch.full((1, 6), 3), "attention_mask": torch.zeros(1, 6, dtype=torch.long)}
    text = [*packed(), masked]
    for batch, piece in zip(text, cut([*text, padding]), strict=True):
        first = batch.get("position_ids", torch.arange(6).expand(2, -1)) == 0
        if "attention_mask" in batch:
            first = first | (batch["attention_mask"] == 0) | (batch["attention_mask"].cumsum(-1) == 1)
        assert torch.equal(piece.labels == NOT_PREDICTED, first)
        assert torch.equal(piece.labels[~first], batch["input_ids"][~first])


def test_rows_of_a_long_batch_are_trained_on_apart():
    """A step takes about `STEP_TOKENS` tokens, and each piece its rows' own mask."""
    ids = torch.randint(3, 101, (4, 700))
    mask = torch.ones_like(ids)
    mask[2, :300] = 0
    pieces = list(cut([{"input_ids": ids, "attention_mask": mask}]))
    assert [piece.inputs["input_ids"].shape for piece in pieces] == [(1, 700)] * 4
    assert torch.equal(pieces[2].inputs["attention_mask"], mask[2:3])
    assert (pieces[2].labels[0, :301] == NOT_PREDICTED).all() and (pieces[2].labels[0, 301:] >= 0).all()


@pytest.mark.parametrize("empty", ["text", "judges"])
def test_nothing_is_done_where_nothing_is_predicted(empty):
    source, converted = pair()
    before = weights(converted)
    text = {"text": packed(), "judges": JUDGES, empty: [{"input_ids": torch.tensor([[3], [4]])}]}
    assert polish(source, converted, text["text"], text["judges"], [0, 1, 2], tokens=100) is None
    assert all(torch.equal(before[name], x) for name, x in converted.named_parameters())


def test_in_bfloat16():
    """Weights are trained in float32, and the model is in bfloat16 before and after."""
    source = random_model("mha").bfloat16().eval()
    converted, _ = convert_model(source, target_config(source.config, "mqa"), share_weights=True)
    done = polish(source, converted, packed(), JUDGES, [0, 1, 2], tokens=2000)
    assert done is not None and done["kl_after"] < done["kl_before"]
    assert {x.dtype for x in converted.parameters()} == {torch.bfloat16}


def test_a_conversion_says_what_it_did():
    """It begins with the layers that the same conversion finds without, and ends nearer to the source."""
    model = random_model("mha").eval()
    wanted = target_config(model.config, "mqa")
    text, judges = LONG_CALIBRATION[:-1], LONG_CALIBRATION[-1:]
    (plain, without), (better, done) = (
        convert_model(model, wanted, text, selection=judges, polish=n) for n in (0, 1500)
    )
    assert without["polish"] is None and done["polish"]["learning_rate"]
    before, after = (compare_predictions(model, x, judges)["kl"] for x in (plain, better))
    assert before == pytest.approx(done["polish"]["kl_before"], rel=1e-4)
    assert after == pytest.approx(done["polish"]["kl_after"], rel=1e-4) and after < before
    again, _ = convert_model(model, wanted, text, selection=judges, polish=1500)
    assert all(torch.equal(a, b) for a, b in zip(better.parameters(), again.parameters(), strict=True))


def test_a_conversion_holds_out_what_judges():
    """Without `selection` it is the last quarter of the text, on which then no layer is fitted."""
    model = random_model("mha").eval()
    wanted = target_config(model.config, "mqa")
    whole, done = convert_model(model, wanted, LONG_CALIBRATION, polish=500)
    text, judges = hold_out(LONG_CALIBRATION)
    parts, same = convert_model(model, wanted, text, selection=judges, polish=500)
    assert done["polish"] == same["polish"] and done["polish"]["learning_rate"]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_exact_conversions_have_nothing_to_train():
    model = random_model("mqa").eval()
    _, done = convert_model(model, target_config(model.config, "mla"), LONG_CALIBRATION, polish=100)
    assert done["exact"] and done["polish"] is None
    wanted = target_config(model.config, "mla", kv_lora_rank=20, qk_rope_head_dim=8)
    for arguments in ({"polish": 100}, {"calibration": LONG_CALIBRATION, "polish": -1}):
        with pytest.raises(UserError):
            convert_model(model, wanted, **arguments)  # type: ignore[arg-type]
