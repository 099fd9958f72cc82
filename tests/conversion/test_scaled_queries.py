"""Queries that are longer the later their token stands, as in Ministral 3: texts longer than those of its training."""

import math

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, YARN, distance, random_model
from small_models import SCALING, make_batch
from stock_models import batch, close, own_model, randomise, stock_config, stock_model
from stock_models import logits as logits_of
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.checkpoints.families import import_config
from modeling_gqa.conversion import allocate, convert_model, layer_errors, target_config
from modeling_gqa.conversion.streams import attention_weights
from modeling_gqa.layers import query_factors
from modeling_gqa_cli.errors import UserError

ROPE = {**YARN, **SCALING}
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}


def test_factors_are_those_of_the_formula():
    rope, positions = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 7}, range(-1, 60)
    found = query_factors(rope, torch.tensor([positions]), torch.float64)
    expected = [1 + 0.3 * math.log(1 + max(0, position) // 7) for position in positions]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))
    for rope in ({"rope_type": "default"}, {**ROPE, "llama_4_scaling_beta": 0}, {**ROPE, "llama_4_scaling_beta": None}):
        assert query_factors(rope, torch.tensor([positions]), torch.float32) is None


def test_factors_beyond_the_exact_integers_of_bfloat16():
    """They are computed in float32 and rounded at the end."""
    rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
    positions = torch.tensor([[0, 16383, 16384, 262143]])
    expected = torch.tensor([[1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(16)]])
    torch.testing.assert_close(query_factors(rope, positions, torch.float32), expected)
    assert torch.equal(query_factors(rope, positions, torch.bfloat16), expected.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["ministral3", "ministral3-window-tied"])
def test_a_prompt_and_single_tokens_are_those_of_transformers(name, implementation):
    """Ministral 3's own class, on texts that are four times as long as those that it was trained on."""
    stock = stock_model(stock_config(name))
    model = own_model(stock)
    stock.set_attn_implementation(implementation), model.set_attn_implementation(implementation)
    ids = torch.randint(3, 103, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = stock(ids).logits
    assert close(model(ids).logits, expected)
    steps = [model(ids[:, :11], use_cache=True)]
    for token in range(11, 30):
        steps.append(model(ids[:, token : token + 1], past_key_values=steps[-1].past_key_values))
    assert close(torch.cat([step.logits for step in steps], dim=1), expected)


@torch.no_grad()
@pytest.mark.parametrize("half_split", [False, True])
def test_mla_is_that_of_transformers(half_split):
    """Of Mistral 4 with dense layers, expanded for the prompt and absorbed for single tokens."""
    sizes = {"kv_lora_rank": 22, "q_lora_rank": 17, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 13}
    sizes |= {"vocab_size": 103, "hidden_size": 66, "intermediate_size": 58, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "max_position_embeddings": 256, "rope_interleave": not half_split}
    given = {**sizes, "pad_token_id": 0, "num_key_value_heads": 6, "first_k_dense_replace": 3}
    stock = Mistral4ForCausalLM(Mistral4Config(**given, rope_parameters=dict(ROPE))).eval()
    randomise(stock)
    model = GQAForCausalLM(GQAConfig(attention_kind="mla", **sizes, rope_parameters=dict(ROPE))).eval()
    model.load_state_dict(stock.state_dict())
    ids = torch.randint(3, 103, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = stock(ids).logits
    assert close(model(ids).logits, expected)
    cache = model(ids[:, :-5], use_cache=True).past_key_values
    found = [model(ids[:, token : token + 1], past_key_values=cache).logits for token in range(25, 30)]
    assert close(torch.cat(found, dim=1), expected[:, -5:])


@torch.no_grad()
def test_packed_documents_begin_at_the_first_factor():
    model = random_model("gqa", rope_parameters=dict(ROPE))
    ids = make_batch(1, 20)["input_ids"]
    positions = torch.cat((torch.arange(9), torch.arange(11)))[None]
    found = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(part).logits for part in (ids[:, :9], ids[:, 9:])], dim=1)
    assert distance(found, apart) < 1e-5


# -- conversions


@pytest.mark.parametrize("text", [None, CALIBRATION], ids=["weights", "text"])
@pytest.mark.parametrize("name", ["ministral3", "ministral3-window-tied"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ministral_is_mha_and_mla_exactly(name, kind, text):
    """Logits and tokens are those of transformers' class, beyond the lengths of its training."""
    stock = stock_model(stock_config(name))
    source = own_model(stock)
    size = source.config.num_key_value_heads * source.config.head_dim
    sizes = {"kv_lora_rank": size, "qk_rope_head_dim": size} if kind == "mla" else {}
    other, report = convert_model(source, target_config(source.config, kind, **sizes), text)
    assert report["exact"] and other.config.attention_kind == kind and other.config.format_version == 4
    assert other.config.rope_parameters["llama_4_scaling_beta"] == 0.7
    assert close(logits_of(other), logits_of(stock))
    assert torch.equal(other.generate(**batch(), **GREEDY), stock.generate(**batch(), **GREEDY))


@pytest.mark.parametrize(
    ("kind", "sizes", "fields", "options"),
    [
        ("mqa", {}, {}, {"refine": 0}),
        ("gqa", {"num_key_value_heads": 2}, {}, {"refine": 1}),
        ("mla", {"cache_size": 56}, {}, {"refine": 1}),
        ("mla", {"cache_size": 56}, {"qk_norm": True}, {"refine": 0}),
    ],
    ids=["mqa", "gqa", "mla", "mla-norms"],
)
def test_conversions_that_lose(kind, sizes, fields, options):
    model = random_model("mha", attention_bias=True, rope_parameters=dict(ROPE), **fields)
    converted, _ = convert_model(model, target_config(model.config, kind, **sizes), LONG_CALIBRATION, **options)
    assert converted.config.rope_parameters["llama_4_scaling_beta"] == 0.5
    assert all(0 < error < 1 for error in layer_errors(model, converted, CALIBRATION))


@torch.no_grad()
def test_weights_that_are_collected_are_those_of_scaled_queries():
    model = random_model("gqa", rope_parameters=dict(ROPE))
    model.set_attn_implementation("eager")
    inputs = make_batch(2, 24)
    outputs = model(inputs["input_ids"], output_attentions=True, output_hidden_states=True)
    hidden = outputs.hidden_states[0]
    arguments = model.model.layer_arguments(hidden)[0]
    x = model.model.layers[0].attention_input(hidden)
    found = attention_weights(model.model.layers[0].self_attn, x, torch.tensor(1), slice(0, 24), arguments)
    torch.testing.assert_close(found, outputs.attentions[0][1:])


def test_sizes_by_layer():
    model = random_model("mha", rope_parameters=dict(ROPE))
    target = allocate(model, "mla", 8 * 3 * 70, CALIBRATION)
    assert convert_model(model, target, CALIBRATION)[0].config.rope_parameters == model.config.rope_parameters


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_cache_has_the_same_tokens(kind):
    """Of 48 tokens, twelve times the length."""
    model = random_model(kind, rope_parameters=dict(ROPE), attention_bias=True).double()
    prompt = make_batch(2, 40)["input_ids"]
    expected = model.generate(prompt, **GREEDY, use_cache=False)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(prompt, **GREEDY, **options), expected)
    rounded = {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "residual_length": 4}}
    tiles = model.generate(prompt, **GREEDY, **rounded)
    model.set_attn_implementation("eager")  # reads all numbers at once
    assert torch.equal(model.generate(prompt, **GREEDY, **rounded), tiles)


# -- checkpoints for text and images


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_is_taken_out_of_one_for_images(tied, tmp_path):
    """As the page says, whether its text alone says that embeddings are tied or not."""
    text = stock_config("ministral3", tie_word_embeddings=not tied)
    whole = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=text.to_dict(),
            vision_config={"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "head_dim": 4, "image_size": 28, "patch_size": 14},
            tie_word_embeddings=tied,
        )
    ).eval()
    with pytest.raises(UserError, match="model_type='mistral3' is not supported, because it has weights for images"):
        import_config(whole.config)
    alone = Ministral3ForCausalLM(whole.config.text_config).eval()
    alone.model, alone.lm_head = whole.model.language_model, whole.lm_head
    alone.config.tie_word_embeddings = whole.lm_head.weight is whole.get_input_embeddings().weight
    assert alone.config.tie_word_embeddings == tied
    alone.save_pretrained(tmp_path)
    loaded = Ministral3ForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.config) is Ministral3Config
    assert close(logits_of(own_model(loaded)), logits_of(whole))
