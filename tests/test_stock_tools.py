"""transformers' own tools tell our classes' tasks by name, and do with them what they do with transformers' models."""

import copy

import pytest
import torch
import transformers
from small_models import make_batch, make_config, make_model
from test_parity import make_twins
from torch import nn
from transformers import Trainer, TrainingArguments
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
