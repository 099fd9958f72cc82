"""The largest attention logits of a training, against the formulas of attention in float64."""

import json
from pathlib import Path

import pytest
import test_attention
import torch
import yaml
from safetensors.torch import load_file
from small_models import MODELS, make_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_texts import MODEL

from modeling_gqa.attention_functions import ALL_ATTENTION_FUNCTIONS
from modeling_gqa.training import attention_logits, publish
from modeling_gqa.training.attention_logits import largest_logits
from training.pretrain import pretrain

# Two rows of packed documents.
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((4, 11, 1, 7), (23,))])
VARIANTS = {**{name: {} for name in MODELS}, "gqa-qk-norm": {"qk_norm": True}}


def build(name: str, **fields):
    model = make_model(name.removesuffix("-qk-norm") if name == "gqa-qk-norm" else name, **VARIANTS[name], **fields)
    return model.to(torch.float64)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 101, POSITIONS.shape, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "position_ids": POSITIONS}


def by_formula(model, inputs: dict[str, torch.Tensor], monkeypatch) -> list[float]:
    """Of each layer, from what its attention reads: scores of all pairs in one document, in the layer's window."""
    read: dict = {}
    found = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: read.__setitem__(module.layer_idx, (*args, kwargs)), with_kwargs=True
        )
    with torch.no_grad():
        model(**inputs)
    document = (POSITIONS == 0).cumsum(-1)
    distance = torch.arange(POSITIONS.shape[1])[:, None] - torch.arange(POSITIONS.shape[1])
    for index, layer in enumerate(model.model.layers):
        attention, (*args, kwargs) = layer.self_attn, read[index]
        x = kwargs["hidden_states"] if not args else args[0]
        cosine, sine = (part[..., : part.shape[-1] // 2] for part in kwargs["position_embeddings"])
        allowed = (document[:, :, None] == document[:, None]) & (distance >= 0)
        if attention.sliding_window:
            allowed &= distance < attention.sliding_window
        scores: list[float] = []

        def attend(query, key, value, allowed, bias, scores=scores):
            score = torch.einsum("btd,bsd->bts", query, key) * query.shape[-1] ** -0.5 + bias
            scores.append(score[allowed].abs().max().item())
            return value

        angles = torch.atan2(sine, cosine).expand(len(x), -1, -1).double()
        config = model.config.per_layer_config[index]
        if config.rope_frequency_indices == []:
            angles = None
        rope = config.rope_parameters
        lengths = (POSITIONS // rope.get("original_max_position_embeddings", 1)).double()
        factors = 1 + rope.get("llama_4_scaling_beta", 0) * torch.log(1 + lengths)[..., None]
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(test_attention, "attend", attend)
            patch.setattr(attention, "config", config)
            test_attention.FORMULAS[config.attention_kind](attention, x, allowed, angles=angles, factors=factors)
        found.append(max(scores))
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_largest_logits_are_those_of_the_formula(name, implementation, monkeypatch):
    """Of every kind, some rows at a time; the model is as before."""
    model, inputs = build(name, attention_dropout=0.5), batch()
    model.set_attn_implementation(implementation)
    monkeypatch.setattr(attention_logits, "AT_ONCE", 2 * 6 * 23 * 5)
    expected, model = by_formula(model, inputs, monkeypatch), model.train()
    assert largest_logits(model, model.config, inputs).tolist() == pytest.approx(expected, rel=1e-6)
    assert model.training and model.config._attn_implementation == implementation
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_one_document_needs_no_mask(monkeypatch):
    """Tokens that follow are not seen, though their scores are larger."""
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    scores = torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(2, 1)).tril().abs()
    assert scores.max() < torch.einsum("bhtd,bhsd->bhts", query, 9 * key.repeat_interleave(2, 1)).abs().max()
    for at_once in (1, 200, 2**20):
        monkeypatch.setattr(attention_logits, "AT_ONCE", at_once)
        torch.testing.assert_close(attention_logits.largest_logit(query, key, None), scores.max())


@pytest.fixture
def train(corpus, tmp_path, monkeypatch):
    """Pretrains a tiny model with dropout in folder `name`; returns its log."""
    monkeypatch.setattr(publish, "load_in_clean_process", lambda folder, prompt: "a sample")

    def train(name: str, **values) -> list[dict]:
        recipe = {
            "preset": "tiny-mixed", "model_overrides": MODEL, "data_files": [str(corpus)], "sequence_length": 64,
            "max_steps": 4, "logging_steps": 2, "max_eval_blocks": 4, "output_dir": str(tmp_path / name),
        }  # fmt: skip
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe | values))
        pretrain([str(tmp_path / "mine.yaml")])
        state = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        return [log for log in state["log_history"] if "loss" in log]

    return train


def test_a_training_logs_them_and_ends_with_the_same_weights(train, tmp_path, capsys):
    """Also in the tracker's files, beside what else a training is watched by."""
    logs = train("logged", log_attention_logits=True, report_to=["tensorboard"])
    for log in logs:
        by_layer = [log[f"max_logit/{layer}"] for layer in range(4)]
        assert log["max_logit"] == max(by_layer) and min(by_layer) > 0 and "max_logit/4" not in log
    assert f"largest logit {logs[-1]['max_logit']:.3g}" in capsys.readouterr().out
    events = EventAccumulator(str(next(tmp_path.glob("logged/runs/*")))).Reload()
    for name in (
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens_seen",
        "max_logit",
        *(f"max_logit/{i}" for i in range(4)),
    ):
        written = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert written == pytest.approx({log["step"]: log[name] for log in logs}), name
    assert [event.value for event in events.Scalars("train/tokens_per_second")][-1] > 0
    assert {"eval/loss", "eval/bits_per_byte"} <= set(events.Tags()["scalars"])
    assert not any("max_logit" in log for log in train("plain"))
    ours, theirs = (load_file(Path(tmp_path, name, "final", "model.safetensors")) for name in ("logged", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
