"""A model's masks against transformers' own, and packed documents against the documents alone, plain and compiled."""

import pytest
import torch
from small_models import MODELS, make_batch, make_config, make_model
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from modeling_gqa import ATTENTION_CLASSES, attention_functions, masks

pytestmark = pytest.mark.compat

THEIRS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
CACHES = {
    "none": lambda config: None,
    "dynamic": lambda config: DynamicCache(config=config),
    "plain dynamic": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config, max_cache_len=16),
}
# Documents begin at another place in each row.
DOCUMENTS = ((0, 0, 4), (0, 4, 11), (1, 0, 6), (1, 6, 11))
POSITIONS = torch.stack([torch.cat((torch.arange(n), torch.arange(11 - n))) for n in (4, 6)])


@pytest.mark.parametrize("padding", [None, "none", "left", "right"])
@pytest.mark.parametrize(("cache", "is_causal"), [*((cache, True) for cache in CACHES), ("none", False)])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_attention_2", "an engine's"])
def test_masks_are_those_of_transformers(backend, cache, padding, is_causal):
    """Each chunk over each cache has transformers' mask, full and with a window."""
    model = make_model("mixed-window")
    config, batch = model.config, make_batch(padding=padding or "none")
    config.is_causal = is_causal
    past, start = CACHES[cache](config), 0
    for length in (11,) if past is None else (4, 3, 1, 3):
        ids = batch["input_ids"][:, start : start + length]
        mask = None if padding is None else batch["attention_mask"][:, : start + length]
        embeds = model.model.embed_tokens(ids)
        config._attn_implementation = backend
        own = masks.model_masks(config, embeds, mask, past, None)
        assert own.keys() == THEIRS.keys()
        for kind, theirs in THEIRS.items():
            expected = theirs(config, embeds, mask, past, None)
            assert (own[kind] is None) == (expected is None), (kind, start)
            if expected is not None:
                assert own[kind].dtype == expected.dtype
                assert torch.equal(own[kind], expected), (kind, start)
        config._attn_implementation = "sdpa"  # flash attention is not installed everywhere
        model(ids, attention_mask=mask, past_key_values=past)
        start += length


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_columns_of_a_mask_beyond_the_tokens_count_nothing(backend):
    """As in transformers' Llama."""
    model, ids = make_model("mixed-window", attn_implementation=backend), make_batch()["input_ids"][:, :5]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 5 + [0] * 2, [1] * 7])
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask[:, :5]).logits)


def packed_arguments(mask: str, ids: torch.Tensor) -> dict:
    return {"position_ids": POSITIONS, "attention_mask": torch.ones_like(ids) if mask == "mask of ones" else None}


def apart(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of each document by itself, in the places that it has in the packed rows."""
    rows: list[list[torch.Tensor]] = [[], []]
    for row, begin, end in DOCUMENTS:
        rows[row].append(model(ids[row : row + 1, begin:end]).logits[0])
    return torch.stack([torch.cat(parts) for parts in rows])


@pytest.mark.parametrize("mode", ["plain", "compiled"])
@pytest.mark.parametrize("mask", ["no mask", "mask of ones"])
@pytest.mark.parametrize(
    ("name", "backend"), [*((kind, "sdpa") for kind in (*ATTENTION_CLASSES, "mixed-window")), ("mixed-window", "eager")]
)
def test_packed_documents_equal_documents_apart(name, backend, mask, mode):
    """Logits and gradients; compiled without inductor, which takes the graph as dynamo records it."""
    model, ids = make_model(name).double(), make_batch(batch=2)["input_ids"]
    model.set_attn_implementation(backend)
    weights = torch.randn(2, 11, 101, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True) if mode == "compiled" else model
    for packed in (True, False):
        model.zero_grad()
        arguments = packed_arguments(mask, ids)
        found = compiled(ids, use_cache=False, **arguments).logits if packed else apart(model, ids)
        (found * weights).sum().backward()
        results.append((found.detach(), {part: tensor.grad.clone() for part, tensor in model.named_parameters()}))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("window", "alone"), [(7, True), (6, False)])
def test_documents_attend_by_themselves_only_where_a_mask_says_no_more(window, alone, monkeypatch):
    """The longest document has 7 tokens: a window of 6 cuts it, and layers without a window do not care."""
    model, ids = make_model("mixed-window"), make_batch(batch=2)["input_ids"]
    model.config.sliding_window, counted = window, []
    one_by_one = attention_functions.attention_by_document

    def count(query, key, value, documents, *arguments):
        counted.append([row.unique_consecutive(return_counts=True)[1].tolist() for row in documents])
        return one_by_one(query, key, value, documents, *arguments)

    monkeypatch.setattr(attention_functions, "attention_by_document", count)
    model(ids, position_ids=POSITIONS)
    windows = model.config.layer_types.count("sliding_attention")
    assert 0 < windows < len(model.config.layer_types)
    assert counted == [[[4, 7], [6, 5]]] * (len(model.config.layer_types) - (0 if alone else windows))
    counted.clear()
    for arguments in (
        {"attention_mask": torch.ones_like(ids), "position_ids": POSITIONS},
        {"position_ids": torch.arange(11).repeat(2, 1)},
    ):
        model(ids, **arguments)
    model.set_attn_implementation("eager")
    model(ids, position_ids=POSITIONS)
    assert counted == []


def test_with_an_argument_of_transformers_alone_documents_keep_their_mask(monkeypatch):
    """What only the stock function knows, such as a bias of positions, is not lost on packed rows."""
    model, ids, given = make_model("gqa"), make_batch(batch=2)["input_ids"], []

    def stock(module, query, key, value, attention_mask, **options):
        given.append((attention_mask, options["softcap"], "documents" in options))
        return query.transpose(1, 2), None

    monkeypatch.setattr(attention_functions, "stock_sdpa_attention_forward", stock)
    arguments = model.model.layer_arguments(model.model.embed_tokens(ids), position_ids=POSITIONS)[0]
    query, key, value = (torch.randn(2, heads, 11, 8) for heads in (4, 2, 2))
    mask, documents = arguments["attention_mask"], arguments["documents"]
    attention_functions.sdpa_attention_forward(None, query, key, value, mask, documents=documents, softcap=3.0)
    assert len(given) == 1 and given[0][0] is mask and given[0][1:] == (3.0, False)


def test_one_compiled_graph_serves_rows_packed_and_not():
    model, ids = make_model("mixed").double(), make_batch(batch=2)["input_ids"]
    plain = torch.arange(11).repeat(2, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for positions, expected in ((plain, model(ids).logits), (POSITIONS, apart(model, ids))):
        arguments = {"attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(ids, **arguments).logits, expected, rtol=1e-9, atol=1e-9)


def test_over_a_cache_no_documents_are_looked_for(monkeypatch):
    """A compiled decoding step over a static cache has no comparison of documents in its graph."""
    model, batch = make_model("mixed"), make_batch(padding="left")
    monkeypatch.setattr(masks, "packed_documents", None)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    tokens = model.generate(**batch, cache_implementation="static", max_new_tokens=3, min_new_tokens=3)
    assert tokens.shape == (3, 14)


@pytest.mark.parametrize("mask", ["no mask", "mask of ones"])
def test_a_compiled_trainer_has_the_losses_of_a_plain_one(mask, tmp_path):
    """A training step and an evaluation on packed rows; aot_eager in place of inductor, which compiles for minutes."""
    ids = make_batch(batch=2)["input_ids"]
    rows = [{"input_ids": row, "labels": row, "position_ids": where} for row, where in zip(ids, POSITIONS, strict=True)]
    rows = [row | ({"attention_mask": torch.ones(11, dtype=torch.long)} if mask != "no mask" else {}) for row in rows]
    losses = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, per_device_train_batch_size=2, remove_unused_columns=False, seed=3, **options,
        )  # fmt: skip
        trainer = Trainer(make_model("mixed"), arguments, train_dataset=rows, eval_dataset=rows)
        losses.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
    assert losses[0][0] != losses[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_every_kind_of_layer_is_compared():
    types = {kind for name in MODELS for kind in make_config(name).layer_types}
    assert types == THEIRS.keys()
