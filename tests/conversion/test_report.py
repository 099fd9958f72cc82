"""What the report measures, against float64 formulas written out token by token; and what it saves."""

import json
from itertools import pairwise

import pytest
import torch
from huggingface_hub import metadata_load
from small_models import make_batch, make_config, make_model

from modeling_gqa.common.cards import serving_note
from modeling_gqa.common.tables import runs
from modeling_gqa.conversion import UserError, divergence
from modeling_gqa.conversion.divergence import compare_predictions, layer_errors, predicted_states
from modeling_gqa.conversion.report import (
    MUCH,
    MUCH_KL,
    QUANTIZED,
    UNMEASURED,
    advice,
    cost_table,
    warning,
    write_conversion_card,
    write_report,
)

UNROTATED = {"rope_frequency_indices": [], "rope_frequency_dim": 6}


def packed_batch(batch: int = 2, length: int = 13) -> dict[str, torch.Tensor]:
    """Rows of three documents whose lengths differ by row."""
    input_ids = make_batch(batch, length)["input_ids"]
    positions = torch.stack(
        [torch.cat([torch.arange(4 + i), torch.arange(5), torch.arange(4 - i)]) for i in range(batch)]
    )
    return {"input_ids": input_ids, "position_ids": positions}


def documents(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each document's token ids alone, without padding."""
    found = []
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], masks.bool(), strict=True)):
        ids, starts = ids[mask], [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row][mask] == 0).nonzero().flatten().tolist()
        found += [ids[a:b] for a, b in pairwise([*starts, len(ids)])]
    return found


def expected_measurement(source, converted, batches) -> dict[str, float]:
    """Every document run alone in float64, every token's terms summed in Python."""
    losses: list[list[float]] = [[], []]
    kls, agreements = [], []
    models = [model.double() for model in (source, converted)]
    for ids in (ids for batch in batches for ids in documents(batch)):
        logits = [model(ids[None]).logits[0] for model in models]
        for position, target in enumerate(ids[1:].tolist()):
            p, q = (torch.softmax(x[position], 0) for x in logits)
            losses[0].append(-p[target].log().item())
            losses[1].append(-q[target].log().item())
            kls.append(sum((p[v] * (p[v] / q[v]).log()).item() for v in range(len(p))))
            agreements.append(float(p.argmax() == q.argmax()))

    def mean(values):
        return sum(values) / len(values)

    return {
        "perplexity_before": torch.tensor(mean(losses[0])).double().exp().item(),
        "perplexity_after": torch.tensor(mean(losses[1])).double().exp().item(),
        "kl": mean(kls),
        "top1_agreement": mean(agreements),
        "tokens": len(kls),
    }


BATCHES = {
    "packed": [packed_batch(), packed_batch(1)],
    "left padding": [make_batch(padding="left")],
    "right padding": [make_batch(padding="right")],
    "no positions": [{name: make_batch(padding="left")[name] for name in ("input_ids", "attention_mask")}],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_measure_is_the_formula(batches, monkeypatch):
    """Perplexities, KL and agreement equal sums over tokens in Python, each document computed alone in float64."""
    monkeypatch.setattr(divergence, "TOKENS_AT_ONCE", 7)  # several chunks, the last one shorter
    source, converted = make_model("mha"), make_model("mla", seed=3)
    measured = compare_predictions(source, converted, batches)
    assert measured == pytest.approx(expected_measurement(source, converted, batches), rel=1e-4)
    known = [predicted_states(source, batch) for batch in batches]
    for parameter in source.model.parameters():  # which is not run again
        parameter.data.zero_()
    assert compare_predictions(source, converted, batches, source_states=known) == pytest.approx(measured, rel=1e-5)


def test_measure_of_the_same_model_and_modes():
    """A model has KL 0 from itself, and models keep their modes."""
    model, other = make_model("gqa").train(), make_model("gqa")
    measured = compare_predictions(model, other, [packed_batch()])
    assert measured["kl"] == 0 and measured["top1_agreement"] == 1
    assert model.training and not other.training


def test_measure_refuses_what_says_nothing():
    """Text without a token to predict, and logits or perplexities that are not finite, are refused."""
    model = make_model("gqa")
    lonely = {"input_ids": torch.tensor([[5, 6]]), "position_ids": torch.zeros(1, 2, dtype=torch.long)}
    with pytest.raises(UserError, match="no token to measure on"):
        compare_predictions(model, model, [lonely])
    broken = make_model("gqa")
    broken.lm_head.weight.data[7] = torch.inf
    for dtype, whose, remedy in (
        ("float32", "result", "damaged"),
        ("bfloat16", "source", "damaged"),
        ("float16", "source", "--dtype float32 or bfloat16"),
    ):
        pair = [x.to(getattr(torch, dtype)) for x in ((model, broken) if whose == "result" else (broken, model))]
        with pytest.raises(UserError, match=f"{whose}'s logits.* are not finite in {dtype}: .*{remedy}"):
            compare_predictions(*pair, [packed_batch()])
    model.float()
    certain = make_model("gqa")
    certain.lm_head.weight.data *= 1e6
    with pytest.raises(UserError, match="result's logits, or the perplexity,"):
        compare_predictions(model, certain, [packed_batch()])


@pytest.mark.parametrize("batch", [packed_batch(), make_batch(padding="left")], ids=["packed", "padded"])
def test_layer_errors_find_the_changed_layer(batch, model_name):
    """Scaling an output projection, or the norm behind it, by 1.25 gives that layer the error 0.25 and the others 0."""
    source, converted = make_model(model_name), make_model(model_name)
    assert layer_errors(source, converted, [batch]) == [0, 0, 0]
    # The attention output is linear in this weight, so the relative error is that of the weight.
    layer = converted.model.layers[1]
    behind = layer.get_submodule(layer.norm_names[1])
    scaled = layer.self_attn.o_proj if layer.norm_names[1] == "no_norm" else behind
    offset = getattr(scaled, "offset", 0.0)  # what a norm adds to its weight
    scaled.weight.data = 1.25 * (scaled.weight.data + offset) - offset
    assert layer_errors(source, converted, [batch, batch]) == pytest.approx([0, 0.25, 0], rel=1e-5)
    assert not any(layer._forward_pre_hooks for layer in source.model.layers)


def test_layer_errors_between_kinds_are_of_the_attention_alone():
    """MLA in place of MHA, each layer called by hand on the hidden states that transformers records."""
    source, converted, batch = make_model("mha"), make_model("mla", seed=3), make_batch()
    inputs = source(**batch, output_hidden_states=True).hidden_states
    expected = []
    for index in range(3):
        outputs = []
        for model in (source, converted):
            layer, rotary = model.model.layers[index], model.model.rotary_emb[model.model.rotary_sizes[index]]
            rotation = rotary(inputs[index], batch["position_ids"])
            outputs.append(layer.self_attn(layer.input_layernorm(inputs[index]), rotation)[0])
        expected.append(((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item())
    assert layer_errors(source, converted, [batch]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_layer_errors_leave_padding_out(padding):
    """Tokens in the padding do not change the errors."""
    source, converted, batch = make_model("mha"), make_model("mla", seed=3), make_batch(padding=padding)
    other = {**batch, "input_ids": batch["input_ids"].where(batch["attention_mask"].bool(), 77)}
    assert layer_errors(source, converted, [other]) == pytest.approx(layer_errors(source, converted, [batch]), rel=1e-5)


def test_layer_errors_want_one_attention_implementation():
    """Two attention implementations are refused."""
    source, converted = make_model("mha"), make_model("mha")
    converted.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="one attention implementation"):
        layer_errors(source, converted, [make_batch()])


REPORT = {
    "source": "org/some-llama",
    "command": {"cache_bits": None},
    "source_family": "llama",
    "dtype": "bfloat16",
    "exact": False,
    "method": "lowrank",
    "candidates": [{"name": "lowrank", "kl": 0.25}],
    "cache_bytes_per_token_before": 1008,
    "cache_bytes_per_token_after": 168,
    "parameters_before": 123456,
    "parameters_after": 120000,
    "perplexity_before": 3.5,
    "perplexity_after": 4.25,
    "kl": 0.1875,
    "top1_agreement": 0.75,
    "tokens": 4321,
    "setting": {"refine": 1, "refit": True},
    "polish": {"learning_rate": 1e-4, "tokens": 765, "kl_before": 0.375, "kl_after": 0.3125},
    "layers": [
        {"layer": i, "from": "mha", "to": "mla", "loss": 0.5, "learning_rate": rate, "ridge": 0.1, "error": 0.0625}
        | {"gain": 0.5 if rate else 0.0, "alpha": 1.0, "key_mean": None, "mean_share": None}
        for i, rate in enumerate((None, 1e-4, 1e-3))
    ],
    "text": {"calibration_tokens": 999, "sequence_length": 64},
    "serving": ["vLLM, layers 0-2: GPUs: none; CPU: yes."],
}


def test_a_quantized_cache_is_named_where_memory_shrinks_with_loss():
    assert advice({**REPORT, "exact": False}) == QUANTIZED
    assert advice({**REPORT, "exact": True}) is None
    assert advice({**REPORT, "exact": False, "cache_bytes_per_token_after": 1008}) is None


def test_card_has_every_number_and_the_licence(tmp_path):
    """The card holds each number of the report and the source's licence and language."""
    model = make_model("mla", latent_norm=False)
    source_card = tmp_path / "source.md"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    source_card.write_text("---\nlicense: apache-2.0\nlanguage: [de]\npipeline_tag: x\n---\ntext")
    write_conversion_card(tmp_path, "small", REPORT, model.config, source_card)
    card = (tmp_path / "README.md").read_text()
    metadata = metadata_load(tmp_path / "README.md")
    assert metadata["license"] == "apache-2.0" and metadata["language"] == ["de"]
    assert metadata["base_model"] == "org/some-llama" and metadata["base_model_relation"] == "finetune"
    assert metadata["tags"] == ["modeling_gqa", "kv-cache", "mla"]
    assert 'tokenizer = AutoTokenizer.from_pretrained("small"' in card
    for text in (
        "1,008",
        "168",
        "123,456",
        "3.5000",
        "4.2500",
        "0.188",
        "75.00%",
        "4,321",
        "999",
        "765",
        "0.375",
        "0.0625",
        "lowrank",
    ):
        assert text in card, text
    assert "\n- vLLM, layers 0-2: GPUs: none; CPU: yes.\n" in card
    rows = dict(cost_table(REPORT).rows)
    assert (rows["layers with gradient steps"], rows["layers with an output fit"]) == ("2 of 3", "3 of 3")
    assert cost_table(REPORT).to_markdown() in card
    assert "vLLM 0.32 or 0.33 caches the latent" in card and "transformers 5.17" in card
    assert "R + P = 22 + 6, no latent norm" in card


def test_card_without_measurement_says_so(tmp_path):
    """Without text the card says that nothing was measured, and it holds no path of this machine."""
    broken_card = tmp_path / "source.md"
    broken_card.write_text("---\n: [\n---\n")
    written = {**REPORT, "source": str(tmp_path), "text": None, "tokens": 0, "method": "mean"}
    write_conversion_card(tmp_path, "small", written, make_model("mixed").config, broken_card)
    card = (tmp_path / "README.md").read_text()
    assert "AutoTokenizer" not in card
    assert "nothing was measured" in card and "perplexity" not in card
    assert (
        "vLLM does not serve it, because its layers differ" in card
        and str(tmp_path) not in card
        and tmp_path.name in card
    )


@pytest.mark.parametrize(
    ("fields", "numbers", "said"),
    [
        ({}, 28, "with expanded keys and values: 384 bytes"),
        ({"key_mean": True}, 34, "does not serve it, because it keeps the mean of its keys"),
        ({"qk_rope_head_dim": 0, "v_head_dim": 10, **UNROTATED}, 30, "with expanded keys and values"),
        ({"v_head_dim": 40}, 28, "does not serve it, because its values are larger than its keys"),
    ],
)
def test_a_card_says_what_engines_cache(fields, numbers, said):
    """vLLM's cache holds angles for the mean of the keys, and zeros where there is no rotary key."""
    config = make_config("mla", kv_lora_rank=22, qk_nope_head_dim=10, **{"qk_rope_head_dim": 6} | fields)
    note = serving_note(config)
    assert f"({numbers} numbers) a token and layer" in note and said in note


def test_report_is_strict_json(tmp_path):
    """The file holds the report, and nan is refused."""
    write_report(tmp_path, REPORT)
    assert json.loads((tmp_path / "conversion.json").read_text()) == REPORT
    with pytest.raises(ValueError, match="JSON"):
        write_report(tmp_path, {"kl": float("nan")})


def test_equal_neighbours_are_one_entry():
    assert runs("aab") == [("0-1", "a"), ("2", "b")] and runs([]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl": MUCH_KL}, None),
        ({"kl": MUCH_KL * 1.01}, MUCH),
        ({"kl": None, "text": None}, UNMEASURED),
        ({"kl": None, "text": None, "exact": True}, None),
    ],
)
def test_a_warning_begins_beyond_its_bound(changes, said):
    """Up to `MUCH_KL` there is none, and none of exact conversions."""
    assert warning({**REPORT, **changes}) == said
