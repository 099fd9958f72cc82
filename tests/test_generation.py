"""`generate` and the text-generation pipeline give the same tokens whatever the cache and the way of decoding."""

import re

import pytest
import torch
from pairs import all_pairs
from small_models import MODELS, ROPES, SIZES, make_batch, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
    set_seed,
)

from modeling_gqa import ATTENTION_CLASSES

pytestmark = pytest.mark.compat

NEW_TOKENS = 7
# Each fills the cache in its own way; `use_cache=False` needs none and is what they are compared with.
CACHE_ARGUMENTS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "dynamic-chunked": {"prefill_chunk_size": 3},
    "static-chunked": {"prefill_chunk_size": 3, "cache_implementation": "static"},
}
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.95},
    "beam": {"num_beams": 3},
    "beam-sampling": {"num_beams": 3, "do_sample": True, "temperature": 1.5},
}


def make_endless_model(model_name: str, **overrides):
    """Model that never stops early, so that every comparison covers all tokens."""
    return make_model(model_name, eos_token_id=None, **overrides)


def generate(model, batch, **arguments) -> torch.Tensor:
    """New tokens (B, T) for the prompts of a batch."""
    set_seed(3)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens = model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, **arguments})
    assert torch.equal(tokens[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    return tokens[:, inputs["input_ids"].shape[1] :]


@torch.no_grad()
def greedy_tokens(model, batch) -> torch.Tensor:
    """Reference without `generate`: the likeliest next token of a full forward, again and again."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for _ in range(NEW_TOKENS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return ids[:, -NEW_TOKENS:]


@pytest.mark.parametrize(
    ("model_name", "cache", "padding"), all_pairs(MODELS, ["none", *CACHE_ARGUMENTS], ["none", "left"])
)
def test_greedy_equals_full_forwards(model_name, cache, padding):
    model, batch = make_endless_model(model_name), make_batch(padding=padding)
    arguments = {"use_cache": False} if cache == "none" else CACHE_ARGUMENTS[cache]
    assert generate(model, batch, **arguments).tolist() == greedy_tokens(model, batch).tolist()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "greedy"])
def test_every_cache_gives_the_same_tokens(model_name, strategy):
    model, batch = make_endless_model(model_name), make_batch(padding="left")
    expected = generate(model, batch, use_cache=False, **STRATEGIES[strategy])
    assert expected.tolist() != generate(model, batch, use_cache=False).tolist(), "the strategy changes nothing"
    for cache, arguments in CACHE_ARGUMENTS.items():
        tokens = generate(model, batch, **arguments, **STRATEGIES[strategy])
        assert tokens.tolist() == expected.tolist(), cache


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_rows_equal_each_row_alone(model_name, cache):
    """Each row of a left-padded batch generates the tokens that it generates alone, without padding."""
    model, batch = make_endless_model(model_name), make_batch(padding="left")
    together = generate(model, batch, **CACHE_ARGUMENTS[cache])
    assert batch["attention_mask"].sum(-1).tolist() == [11, 9, 8]
    for row, mask in enumerate(batch["attention_mask"].bool()):
        alone = {name: tensor[row : row + 1, mask] for name, tensor in batch.items()}
        assert generate(model, alone, **CACHE_ARGUMENTS[cache]).tolist() == together[row : row + 1].tolist()


def test_rows_stop_at_their_own_end_token(model_name):
    model, batch = make_endless_model(model_name), make_batch()
    endless = generate(model, batch)
    end = endless[1, 2].item()
    for arguments in CACHE_ARGUMENTS.values():
        stopped = generate(model, batch, eos_token_id=end, **arguments)
        for row, expected in zip(stopped.tolist(), endless.tolist(), strict=True):
            length = expected.index(end) + 1 if end in expected else NEW_TOKENS
            assert row[:length] == expected[:length]
            assert set(row[length:]) <= {SIZES["pad_token_id"]}
        assert stopped[1, 3:].tolist() == [SIZES["pad_token_id"]] * (stopped.shape[1] - 3)


@pytest.mark.parametrize("assistant", ["prompt lookup", "gqa", "mla", "mixed"])
def test_assisted_equals_greedy(model_name, assistant):
    model, batch = make_endless_model(model_name), make_batch(batch=1)
    if assistant == "prompt lookup":  # a repeated prompt, so that there is something to look up
        batch = {name: batch[name].repeat(1, 2) for name in ("input_ids", "attention_mask")}
        arguments = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    else:
        arguments = {"assistant_model": make_endless_model(assistant, seed=5, intermediate_size=26)}
    calls = count_forwards(model)
    tokens = generate(model, batch, **arguments)
    assert calls[0] > batch["input_ids"].shape[1], "nothing was proposed"
    assert tokens.tolist() == greedy_tokens(model, batch).tolist()


# transformers 5.17 cannot draft several tokens with a sliding cache.
# In transformers 5.17 layers with a window cannot take candidates back, those of its own Mistral neither.
@pytest.mark.parametrize("model_name", [name for name in MODELS if name not in ("mixed-window", "options", "gemma")])
def test_assistant_that_is_right_is_accepted(model_name):
    """An assistant with the model's own weights has every candidate accepted, so the model runs only twice."""
    model, batch = make_endless_model(model_name), make_batch(batch=1)
    helper = make_endless_model(model_name)
    helper.generation_config.num_assistant_tokens = 3
    helper.generation_config.assistant_confidence_threshold = 0.0
    calls = count_forwards(model)
    tokens = generate(model, batch, assistant_model=helper)
    assert calls == [11 + 3, 1 + 2], "3 candidates and a token of its own, then the rest"
    assert tokens.tolist() == greedy_tokens(model, batch).tolist()


def count_forwards(model) -> list[int]:
    """List to which each forward of the model adds the number of tokens it was given."""
    calls = []

    def record(module, arguments, keywords):
        calls.append((arguments[0] if arguments else keywords["input_ids"]).shape[1])

    model.register_forward_pre_hook(record, with_kwargs=True)
    return calls


@pytest.mark.parametrize(
    ("cache", "kind"),
    [({}, DynamicCache), ({"cache_implementation": "static"}, StaticCache)],
    ids=["dynamic", "static"],
)
def test_prompt_is_read_once(model_name, cache, kind):
    """Counts the tokens of each forward: the prompt at once, or in chunks of 4, and then one token at a time."""
    model, batch = make_endless_model(model_name), make_batch()
    calls = count_forwards(model)
    outputs = model.generate(batch["input_ids"], max_new_tokens=4, return_dict_in_generate=True, **cache)
    assert calls == [11, 1, 1, 1]
    assert isinstance(outputs.past_key_values, kind)
    calls.clear()
    generate(model, batch, prefill_chunk_size=4, max_new_tokens=3, **cache)
    assert calls == [4, 4, 3, 1, 1]


def test_scores_and_attentions_of_generated_tokens(model_name):
    model, batch = make_endless_model(model_name), make_batch()
    model.set_attn_implementation("eager")
    outputs = model.generate(
        batch["input_ids"],
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_logits=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    with torch.no_grad():
        full = model(outputs.sequences[:, :-1], output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(torch.stack(outputs.logits, 1), full.logits[:, 10:], rtol=1e-4, atol=1e-4)
    for step in (1, 2):
        assert len(outputs.attentions[step]) == 3
        for weights, expected, states, expected_states in zip(
            outputs.attentions[step], full.attentions, outputs.hidden_states[step], full.hidden_states, strict=False
        ):
            position = 10 + step
            # A sliding cache has dropped the keys outside its window.
            expected = expected[:, :, position : position + 1, : position + 1][..., -weights.shape[-1] :]
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states, expected_states[:, position : position + 1], rtol=1e-4, atol=1e-4)


def test_weights_of_a_static_cache_are_as_wide_as_stock_ones(model_name):
    """Attention weights have a column for each place of a static cache, as Llama's have; unfilled places get 0."""
    model, batch = make_endless_model(model_name), make_batch(padding="left")
    stock = LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": 14, "eos_token_id": None}))
    arguments = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_attentions": True}
    static = {"cache_implementation": "static"}
    for one in (model, stock):
        one.set_attn_implementation("eager")
    widths = [layers[0].shape[2:] for layers in stock.generate(**batch, **arguments, **static).attentions]
    assert widths == [(11, 14), (1, 14), (1, 14), (1, 14)]
    held = model.generate(**batch, **arguments).attentions
    for step, layers in enumerate(model.generate(**batch, **arguments, **static).attentions):
        real = slice(3, None) if step == 0 else slice(None)  # what padding sees means nothing
        for weights, expected, kind in zip(layers, held[step], model.config.layer_types, strict=True):
            if kind == "full_attention":
                assert weights.shape[2:] == widths[step]
                used = weights[:, :, real, : 11 + step]
                torch.testing.assert_close(used, expected[:, :, real], rtol=1e-4, atol=1e-5)
                assert weights[:, :, real, 11 + step :].eq(0).all()


# In float32 the tokens of the dynamic cache, too; bfloat16 rounds them differently.
@pytest.mark.parametrize(
    ("model_name", "dtype"),
    [(name, torch.bfloat16) for name in ATTENTION_CLASSES]
    + [(name, torch.float32) for name in ("mla-q-lora", "mixed", "mixed-window")],
    ids=str,
)
def test_static_cache_decodes_in_one_graph_that_is_not_compiled_again(model_name, dtype):
    """A second generation reuses the graphs of the first."""
    model, batch = make_endless_model(model_name).to(dtype), make_batch(padding="left")
    expected = generate(model, batch)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    first = generate(model, batch, cache_implementation="static")
    assert dtype == torch.bfloat16 or first.tolist() == expected.tolist()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert generate(model, batch, cache_implementation="static").tolist() == first.tolist()


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_prompt_without_tokens_is_refused_in_one_line(kind, rows, given):
    model, tokens = make_model(kind), 5 if rows == 0 else 0
    empty = torch.zeros(rows, tokens, dtype=torch.long)
    if given == "inputs_embeds":
        empty = torch.zeros(rows, tokens, SIZES["hidden_size"])
    cache = model(make_batch(batch=rows or 1)["input_ids"], use_cache=True).past_key_values
    calls = [{}, {"use_cache": False}, {"past_key_values": cache}, {"attention_mask": torch.ones(rows, tokens)}]
    message = rf"^{given} has shape {re.escape(str(tuple(empty.shape)))}, which holds no token .*bos_token_id=1$"
    for call in calls:
        for function in (model, model.model):
            with pytest.raises(ValueError, match=message):
                function(**{given: empty}, **call)
    for arguments in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=message):
            model.generate(**{given: empty}, max_new_tokens=3, **arguments)
    model.config.bos_token_id = None
    with pytest.raises(ValueError, match=r"give at least one$"):
        model(**{given: empty})


def test_without_a_prompt_generation_begins_with_bos():
    model = make_endless_model("mixed")
    assert torch.equal(model.generate(max_new_tokens=3)[:, 0], torch.tensor([1]))
    embeddings = model.model.embed_tokens(make_batch()["input_ids"])
    expected = model.generate(inputs_embeds=embeddings, max_new_tokens=3)
    assert torch.equal(model.generate(torch.zeros(3, 0).long(), inputs_embeds=embeddings, max_new_tokens=3), expected)


def test_generation_config_survives_saving(tmp_path):
    model, batch = make_endless_model("mixed"), make_batch()
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, max_new_tokens=5, pad_token_id=0)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert (again.generation_config.top_k, again.generation_config.max_new_tokens) == (7, 5)
    set_seed(0)
    expected = model.generate(batch["input_ids"])
    set_seed(0)
    assert again.generate(batch["input_ids"]).tolist() == expected.tolist()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, SIZES["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


@pytest.mark.parametrize("model_name", MODELS)
def test_pipeline(model_name, tokenizer):
    model = make_endless_model(model_name)
    texts = ["w7 w9 w30 w4", "w50 w51"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    expected = greedy_tokens(model, batch)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    for batch_size in (1, 2):
        outputs = generator(
            texts, batch_size=batch_size, return_full_text=False, do_sample=False, max_new_tokens=NEW_TOKENS
        )
        assert [output["generated_text"] for [output] in outputs] == tokenizer.batch_decode(
            expected, skip_special_tokens=True
        )


LONGROPES: dict[str, tuple[str, int, dict]] = {
    "gqa": ("gqa", 7, {}),
    "quantized": ("gqa", 7, {"cache_quantization": {"residual_length": 64}}),
    "window": ("gqa", 7, {"sliding_window": 5, "layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    "mla": ("mla", 3, {}),
}


def longrope_model(name: str):
    """A model whose frequencies change between 12 and 19 tokens, in float64."""
    kind, planes, fields = LONGROPES[name]
    factors = {"short_factor": [1.0] * planes, "long_factor": [2.0 + plane for plane in range(planes)]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **ROPES["longrope"], **factors}
    return make_endless_model(kind, rope_parameters=rope, **fields).double()


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, arguments) for name in ("gqa", "mla") for arguments in ({}, {"num_beams": 3})),
        ("gqa", {"cache_implementation": "static"}),
        ("window", {}),
        ("quantized", {}),
    ],
    ids=str,
)
def test_a_text_that_grows_long_has_long_frequencies(name, arguments, padding):
    """Keys that were cached with the short ones are computed anew, as if there were no cache."""
    model, batch = longrope_model(name), make_batch(length=13, padding=padding)
    expected = generate(model, batch, use_cache=False, do_sample=False, **{**arguments, "cache_implementation": None})
    assert torch.equal(generate(model, batch, do_sample=False, **arguments), expected)


def test_a_text_that_grows_long_is_given_whole():
    model, ids = longrope_model("gqa"), make_batch(length=20)["input_ids"]
    cache = DynamicCache(config=model.config)
    model.generate(ids[:, :10], past_key_values=cache, max_new_tokens=1)
    for given in (
        {"inputs_embeds": model.get_input_embeddings()(ids[:, :14]), "max_new_tokens": 6},
        {"input_ids": ids, "prefill_chunk_size": 6, "max_new_tokens": 2},
    ):
        with pytest.raises(ValueError, match="longrope"):
            model.generate(**given)
    again = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))
