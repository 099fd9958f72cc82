"""transformers' own tools know our classes, and quantized weights and caches take the sizes that the docs say."""

import copy

import pytest
import torch
import transformers
from small_models import make_batch, make_config, make_model
from test_parity import make_twins
from torch import nn
from transformers import DynamicCache, QuantizedCache, Trainer, TrainingArguments
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_for_generation, get_leaf_tensors
from transformers.modelcard import TrainingSummary
from transformers.models.auto import get_values, modeling_auto

from modeling_gqa import ATTENTION_CLASSES, GQAConfig
from modeling_gqa.modeling_gqa import AUTO_CLASSES

pytestmark = pytest.mark.compat

SMOOTHING = 0.1
TABLES = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}


def smoothed_loss(model, rows) -> float:
    """Cross entropy of each next token, against a tenth of the uniform distribution and nine tenths of the label."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        logs = model(**batch).logits[:, :-1].log_softmax(-1)  # (B, T - 1, vocabulary)
    told = labels[:, 1:] != -100
    target = SMOOTHING / logs.shape[-1] + (1 - SMOOTHING) * nn.functional.one_hot(labels[:, 1:].clamp(min=0), 101)
    return -(target * logs).sum(-1)[told].mean().item()


def train(model, path):
    """Losses of two smoothed steps and of the evaluation before, by stock `Trainer`; and the trainer."""
    batch = make_batch(batch=6, padding="right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    rows = [{name: batch[name][row] for name in ("input_ids", "attention_mask", "labels")} for row in range(6)]
    arguments = TrainingArguments(str(path), label_smoothing_factor=SMOOTHING, max_steps=2, logging_steps=1,
                                  learning_rate=0.05, optim="sgd", per_device_train_batch_size=3, use_cpu=True,
                                  report_to=[], save_strategy="no", disable_tqdm=True, seed=7)  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    expected, evaluated = smoothed_loss(model, rows), trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(expected, rel=1e-5)
    trainer.train()
    return [evaluated, *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)], trainer


@pytest.mark.parametrize("name", ["mha-llama", "mqa-llama", "gqa-llama", "mla-deepseek"])
def test_label_smoothing_is_that_of_the_next_token(name, tmp_path):
    model, twin = make_twins(name)
    losses, trainer = train(model, tmp_path / "ours")
    expected, _ = train(twin, tmp_path / "stock")
    assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-4)
    assert TrainingSummary.from_trainer(trainer).tasks == "text-generation"


@pytest.mark.parametrize("auto_class", TABLES)
def test_names_stand_in_the_tables_and_every_lookup_works(auto_class):
    assert TABLES.keys() == AUTO_CLASSES.keys()
    name, auto, own = TABLES[auto_class], getattr(transformers, auto_class), AUTO_CLASSES[auto_class]
    mapping, names = getattr(modeling_auto, name), getattr(modeling_auto, name + "_NAMES")
    llama = getattr(transformers, own.__name__.replace("GQA", "Llama"))
    assert names["gqa"] == own.__name__
    for config, model_class in ((GQAConfig, own), (transformers.LlamaConfig, llama)):
        assert config in mapping and mapping[config] is model_class
    if auto_class == "AutoModelForQuestionAnswering":  # all values at once: others have many, which all are imported
        assert {own, llama} < set(get_values(mapping)) and GQAConfig in list(mapping)
        assert len(mapping.keys()) == len(mapping.items()) == len(mapping)

    class OwnConfig(transformers.LlamaConfig):
        model_type = "own"

    class OwnModel(llama):
        config_class = OwnConfig

    auto.register(OwnConfig, OwnModel)
    try:
        assert mapping[OwnConfig] is OwnModel and mapping[GQAConfig] is own
        assert type(auto.from_config(make_config("mha"))) is own
    finally:
        del mapping._extra_content[OwnConfig]


@pytest.mark.parametrize(
    ("model_name", "cache"), [(name, "dynamic") for name in (*ATTENTION_CLASSES, "mixed")] + [("mixed", "static")]
)
def test_transformers_exports_prompt_and_decoding(model_name, cache):
    model, batch = make_model(model_name, eos_token_id=None), make_batch(padding="left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    config = model.generation_config
    if cache == "static":
        config.cache_implementation, config.max_cache_len, config.disable_compile = "static", 20, True
    for part, given in decompose_for_generation(model, inputs, generation_config=config).values():
        with torch.no_grad():
            expected = {name: leaf.clone() for name, leaf in get_leaf_tensors(part(**copy.deepcopy(given))).items()}
            # What is an option and no input, it takes out of `given`.
            exported = DynamoExporter().export(part, given, config=DynamoConfig())
            program = getattr(exported, "program", exported)
            leaves = get_leaf_tensors(program.module()(**copy.deepcopy(given)))
        torch.testing.assert_close(leaves, expected, rtol=1e-4, atol=1e-4)


# -- The table "Which sizes do quantized weights and caches take?" of docs/serving.md.

TINY = {"hidden_size": 96, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


@torch.no_grad()
def decode_quantized(name, group, prompt, **overrides):
    """Cosine of the logits of five tokens after a prompt, with quanto's cache and with one that is not quantized."""
    model = make_model(name, **{**TINY, **overrides})
    ids = make_batch(batch=2, length=prompt + 5)["input_ids"]
    outputs = []
    for cache in (
        QuantizedCache("quanto", config=model.config, q_group_size=group, residual_length=3),
        DynamicCache(config=model.config),
    ):
        model(ids[:, :prompt], past_key_values=cache, use_cache=True)
        outputs.append(torch.cat([model(ids[:, [i]], past_key_values=cache).logits for i in range(prompt, prompt + 5)]))
    return torch.cosine_similarity(*outputs, dim=-1).min()


@pytest.mark.parametrize(
    ("name", "sizes", "group"),
    [
        ("mha", {"head_dim": 40}, 32),
        ("gqa", {"head_dim": 40}, 16),
        ("mqa", {"head_dim": 96}, 32),
        ("mla", LATENT, 16),
        ("mla", {**LATENT, "kv_lora_rank": 96, "qk_rope_head_dim": 40}, 8),
    ],
)
def test_quanto_cache_takes_groups_that_divide_what_a_token_stores(name, sizes, group):
    for prompt in (5, 7, 11):
        assert decode_quantized(name, group, prompt, **sizes) > 0.9
    # Twice as large they do not divide it, so an odd number of tokens is refused.
    with pytest.raises(ValueError, match=r"Group size \(\d+\) must be a divisor of \(\d+\)"):
        decode_quantized(name, group * 2, 5, **sizes)


@pytest.mark.parametrize("bits", ["qint4", "qint8"])
@pytest.mark.parametrize("name", ["mha", "mqa", "gqa", "mla", "mla-q-lora"])
def test_quanto_weights_of_any_size(name, bits):
    from optimum import quanto

    model, batch = make_model(name, initializer_range=0.02), make_batch()
    with torch.no_grad():
        expected = model(**batch).logits
        quanto.quantize(model, weights=getattr(quanto, bits))
        quanto.freeze(model)
        actual = model(**batch).logits
    assert 0.8 < torch.cosine_similarity(actual, expected, dim=-1).min() < 0.999999


@pytest.mark.parametrize("name", ["mha", "mqa", "gqa", "mla", "mla-q-lora"])
@pytest.mark.parametrize("whole_rows", [True, False])
def test_torchao_int8_takes_any_size_and_groups_must_divide_inputs(name, whole_rows):
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

    model, batch = make_model(name, initializer_range=0.02), make_batch()
    if not whole_rows:
        with pytest.raises(AssertionError, match="Last dimension of input 66 is not divisible by group size 32"):
            quantize_(model, Int8WeightOnlyConfig(granularity=PerGroup(32)))
        return
    with torch.no_grad():
        expected = model(**batch).logits
        quantize_(model, Int8WeightOnlyConfig())
        actual = model(**batch).logits
    assert 0.99 < torch.cosine_similarity(actual, expected, dim=-1).min() < 0.9999999


def test_torchao_int4_leaves_weights_whole_that_its_groups_do_not_divide():
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = make_model("gqa")
    before = copy.deepcopy(model.state_dict())
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    assert all(type(x) is torch.Tensor and torch.equal(x, before[name]) for name, x in model.state_dict().items())
