"""A loss computed in chunks is the loss of the full logits, with the same gradients, wherever it is used."""

import copy

import pytest
import torch
from small_models import make_batch, make_model
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from modeling_gqa.layers import chunked_causal_lm_loss

pytestmark = pytest.mark.compat

# 33 tokens of 101 logits come in chunks of 9, 9, 9 and 6 tokens.
AT_ONCE, ROWS = 1000, 9


def make_training_model(model_name: str = "gqa", **overrides):
    return make_model(model_name, **{"num_hidden_layers": 1, **overrides}).train()


def make_inputs(**sizes) -> dict[str, torch.Tensor]:
    """Tokens with right padding; neither padding nor some other tokens have a loss."""
    batch = make_batch(padding="right", **sizes)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, :4] = labels[-1, 5] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def step(model, at_once: int | None, **inputs):
    """Loss and gradients of one training step, which must be chunked just where `at_once` is a number."""
    model.logits_at_once = at_once
    model.zero_grad()
    outputs = model(**inputs)
    assert ("logits" not in outputs) == (at_once is not None)
    outputs.loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return outputs.loss.detach(), gradients


def assert_same_step(chunked, full, tolerance: float = 3e-6):
    (loss, gradients), (expected_loss, expected) = chunked, full
    assert loss.dtype == expected_loss.dtype
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        difference = (gradients[name].float() - gradient.float()).norm()
        assert difference <= tolerance * gradient.float().norm(), name


@pytest.fixture
def chunk_sizes(monkeypatch) -> list[int]:
    """How many tokens a chunk has, for each loss that is computed in chunks."""
    sizes, function = [], nn.functional.linear_cross_entropy

    def spied(*arguments, **kwargs):
        sizes.append(kwargs["options"].batch_chunk_size)
        return function(*arguments, **kwargs)

    monkeypatch.setattr(nn.functional, "linear_cross_entropy", spied)
    return sizes


SHIFTED = make_batch(seed=4)["input_ids"].index_fill(1, torch.tensor([2, 7]), -100)
ARGUMENTS = {
    "labels": {},
    "number of items": {"num_items_in_batch": 17},
    "number of items as a tensor": {"num_items_in_batch": torch.tensor(17)},
    "shifted labels": {"shift_labels": SHIFTED},
    "shifted labels and number of items": {"shift_labels": SHIFTED, "num_items_in_batch": torch.tensor(17)},
    "another label without a loss": {"ignore_index": 5, "labels": make_batch(seed=6)["input_ids"].clamp(max=9)},
    "output_logits=False": {"output_logits": False},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_gradients_equal_those_of_full_logits(tied, arguments, chunk_sizes):
    """The chunked loss and all gradients are those of the full logits, whatever arguments the loss is given."""
    model = make_training_model(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    inputs = {**make_inputs(), **ARGUMENTS[arguments]}
    chunked = step(model, AT_ONCE, **inputs)
    assert chunk_sizes == [ROWS]
    assert_same_step(chunked, step(model, None, **inputs))
    assert len(chunk_sizes) == 1


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_every_model_trains_in_chunks(model_name, checkpointing):
    """The chunked step gives every parameter of every model its gradient, with gradient checkpointing too."""
    model, inputs = make_model(model_name).train(), make_inputs()
    full = step(model, None, **inputs)
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert model.model.gradient_checkpointing == checkpointing
    chunked = step(model, AT_ONCE, **inputs)
    assert chunked[1].keys() == dict(model.named_parameters()).keys()
    assert_same_step(chunked, full, tolerance=1e-5)


@pytest.mark.parametrize(("at_once", "rows"), [(1, 1), (100, 1), (101, 1), (202, 2), (33 * 101 - 1, 32)])
def test_no_more_logits_than_allowed_at_once(at_once, rows, chunk_sizes):
    """A chunk has `logits_at_once // vocabulary` tokens, at least one, and the head module is not called."""
    model, inputs, calls = make_training_model(), make_inputs(), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    chunked = step(model, at_once, **inputs)
    assert chunk_sizes == [rows] and not calls
    assert_same_step(chunked, step(model, None, **inputs))


@pytest.mark.parametrize("items", [None, 17], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_reduced_precision(dtype, items):
    """In bfloat16, float16 and under autocast the chunked step equals the full one to 2e-2, and not the exact one."""
    model, inputs = make_training_model(), make_inputs()
    inputs["num_items_in_batch"] = items
    exact = step(model, None, **inputs)
    model.to(torch.float32 if dtype == "autocast" else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        chunked, full = step(model, AT_ONCE, **inputs), step(model, None, **inputs)
    assert_same_step(chunked, full, tolerance=2e-2)
    assert (full[0] - exact[0]).abs() > 0, "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_over_many_tokens_is_not_rounded(dtype):
    """In float16 the sum over 20000 tokens would be infinite, in bfloat16 it would lose three digits."""
    generator = torch.Generator().manual_seed(0)
    tokens, size, vocabulary = 20_000, 7, 37
    hidden, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((tokens, size), (vocabulary, size))
    )
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    logits = (hidden.double() @ weight.double().T).float()
    expected = ForCausalLMLoss(logits[None], labels, vocabulary, num_items_in_batch=tokens - 1)
    for items in (tokens - 1, None):
        loss = chunked_causal_lm_loss(hidden[None], weight, labels, 64 * vocabulary, num_items_in_batch=items)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)


def test_no_label_with_a_loss():
    """Without any label the mean is nan and a given number of items makes the loss 0, as with full logits."""
    model, inputs = make_training_model(), make_inputs()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    model.logits_at_once = AT_ONCE
    assert model(**inputs).loss.isnan(), "as the mean over nothing is with full logits"
    assert model(**inputs, num_items_in_batch=17).loss == 0


@pytest.mark.parametrize("at_once", [AT_ONCE, 100, None], ids=str)
@pytest.mark.parametrize("arguments", [{"logits_to_keep": 5}, {"shift_labels": SHIFTED[:, :-1].contiguous()}], ids=str)
def test_labels_of_another_number_than_logits_are_refused(arguments, at_once):
    """Labels that do not match the hidden states raise an error, chunked or not."""
    model = make_training_model()
    model.logits_at_once = at_once
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        model(**make_inputs(), **arguments)


@pytest.mark.parametrize("label", [101, -1])
def test_labels_beyond_the_vocabulary_are_refused(label):
    """A label outside the vocabulary raises an error instead of reading other memory."""
    model, inputs = make_training_model(), make_inputs()
    inputs["labels"][1, 3] = label
    model.logits_at_once = AT_ONCE
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        model(**inputs)


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_weights(frozen):
    """A frozen head or a frozen model gets no gradients, and the rest gets the same ones."""
    model, inputs = make_training_model(tie_word_embeddings=False), make_inputs()
    model.get_submodule(frozen).requires_grad_(False)
    chunked = step(model, AT_ONCE, **inputs)
    assert chunked[1] and not any(name.startswith(frozen + ".") for name in chunked[1])
    assert_same_step(chunked, step(model, None, **inputs))


@pytest.mark.parametrize("at_once", [AT_ONCE, None], ids=str)
def test_accumulated_micro_batches_equal_one_batch(at_once):
    """Micro-batches that share `num_items_in_batch` add up to the loss and gradients of one batch."""
    model, inputs = make_training_model(), make_inputs(batch=5)
    items = (inputs["labels"][:, 1:] != -100).sum()
    loss, expected = step(model, at_once, **inputs, num_items_in_batch=items)
    model.logits_at_once = AT_ONCE
    model.zero_grad()
    losses = []
    for rows in (slice(0, 2), slice(2, 5)):
        outputs = model(**{name: tensor[rows] for name, tensor in inputs.items()}, num_items_in_batch=items)
        assert "logits" not in outputs
        outputs.loss.backward()
        losses.append(outputs.loss.detach())
    accumulated = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same_step((sum(losses), accumulated), (loss, expected))
    plain_mean = model(**inputs).loss
    torch.testing.assert_close(plain_mean, loss, rtol=1e-6, atol=0)


def test_given_embeddings_get_the_same_gradients():
    """`inputs_embeds` receive the gradients that full logits give."""
    model, inputs = make_training_model(), make_inputs()
    embeds = model.model.embed_tokens(inputs.pop("input_ids")).detach()
    gradients = []
    for at_once in (AT_ONCE, None):
        leaf = embeds.clone().requires_grad_()
        step(model, at_once, inputs_embeds=leaf, **inputs)
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


class OtherHead(nn.Linear):
    """A head that may do more than its weight says."""


# What makes a training step return its logits: a change of the model, or arguments.
FULL = {
    "evaluation": (lambda model: model.eval(), {}),
    "no limit": (lambda model: setattr(model, "logits_at_once", None), {}),
    "a small step": (lambda model: setattr(model, "logits_at_once", 33 * 101), {}),
    "asked for": (lambda model: None, {"output_logits": True}),
    "no labels": (lambda model: None, {"labels": None}),
    "a head of another class": (lambda model: setattr(model.lm_head, "__class__", OtherHead), {}),
    "a wrapped head": (lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)), {}),
    "a head with a bias": (lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(101))), {}),
}


def test_logits_that_were_not_computed_say_so():
    """Whoever reads them is told how to get them; whoever asks whether there are any is told no."""
    model, inputs = make_training_model(), make_inputs()
    model.logits_at_once = AT_ONCE
    outputs = model(**inputs, use_cache=False)
    with pytest.raises(AttributeError, match=r"loss in chunks.*output_logits=True, or set model\.logits_at_once"):
        outputs.logits[..., :-1, :]
    assert not hasattr(outputs, "logits") and getattr(outputs, "logits", None) is None
    assert list(outputs) == ["loss"] and outputs[0] is outputs.loss is outputs["loss"] and "logits" not in repr(outputs)
    assert copy.copy(outputs).logits is None
    assert type(outputs)((name, x) for name, x in outputs.items()).loss is outputs.loss  # as DataParallel gathers
    assert [x.shape for x in model(**inputs, use_cache=False, return_dict=False)] == [()]


@pytest.mark.parametrize(("change", "arguments"), FULL.values(), ids=FULL)
def test_where_logits_are_returned(change, arguments, chunk_sizes):
    """Evaluation, small steps, `output_logits` and unusual heads return logits and the same loss."""
    model, inputs = make_training_model(tie_word_embeddings=False), make_inputs()
    assert model(**inputs).logits is not None, "the default limit leaves small models' logits in the output"
    model.logits_at_once = AT_ONCE
    expected = model(**inputs)
    assert "logits" not in expected and len(chunk_sizes) == 1
    change(model)
    outputs = model(**{**inputs, **arguments})
    assert outputs.logits.shape == (3, 11, 101) and len(chunk_sizes) == 1
    if arguments == FULL["no labels"][1]:
        assert outputs.loss is None
    else:
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0)


def test_torch_without_a_chunked_loss(monkeypatch):
    """With a torch before 2.13 the model trains through full logits."""
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    model = make_training_model()
    model.logits_at_once = AT_ONCE
    assert model(**make_inputs()).logits.shape == (3, 11, 101)


def test_a_custom_loss_function_is_called_with_logits(chunk_sizes):
    """A loss function of the user's is called with full logits and all its arguments."""
    calls = []

    def own(logits, labels, vocab_size, **kwargs):
        calls.append((logits.shape, labels.shape, vocab_size, kwargs.get("num_items_in_batch")))
        return logits.pow(2).mean()

    model, inputs = make_training_model(), make_inputs()
    model.logits_at_once = AT_ONCE
    model.loss_function = own
    outputs = model(**inputs, num_items_in_batch=17)
    assert calls == [((3, 11, 101), (3, 11), 101, 17)] and not chunk_sizes
    assert torch.equal(outputs.loss, outputs.logits.pow(2).mean())


def test_a_tuple_holds_no_logits():
    """`return_dict=False` gives a tuple of the loss alone, unless logits are asked for."""
    model, inputs = make_training_model(), make_inputs()
    model.logits_at_once = AT_ONCE
    expected = model(**inputs).loss
    outputs = model(**inputs, use_cache=False, return_dict=False)
    assert isinstance(outputs, tuple) and len(outputs) == 1
    assert torch.equal(outputs[0], expected)
    loss, logits = model(**inputs, use_cache=False, return_dict=False, output_logits=True)
    assert logits.shape == (3, 11, 101)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def train(path, at_once: int | None):
    """Weights after two steps, and the shapes of the predictions that the metrics are computed from."""
    model, shapes = make_training_model(tie_word_embeddings=False), []
    model.logits_at_once = at_once
    inputs = make_inputs(batch=13)
    examples = [{name: tensor[row] for name, tensor in inputs.items()} for row in range(13)]

    def compute_metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"logits": float(prediction.predictions.mean())}

    arguments = TrainingArguments(
        output_dir=str(path),
        max_steps=2,
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=examples, eval_dataset=examples[:5], compute_metrics=compute_metrics
    )
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss = trainer.train().training_loss
    metrics = trainer.evaluate()
    moved = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    return moved, loss, metrics, shapes


def test_trainer_trains_in_chunks_and_evaluates_with_logits(tmp_path, chunk_sizes):
    """A Trainer's steps, losses and metrics are those of full logits, and evaluation has logits."""
    moved, loss, metrics, shapes = train(tmp_path / "chunked", AT_ONCE)
    assert chunk_sizes == [ROWS] * 4 and shapes == [(5, 11, 101)]
    expected, expected_loss, expected_metrics, _ = train(tmp_path / "full", None)
    assert len(chunk_sizes) == 4
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name in ("eval_loss", "eval_logits"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4)
    for name, change in expected.items():
        assert change.norm() > 0, name
        assert (moved[name] - change).norm() <= 1e-3 * change.norm(), name
