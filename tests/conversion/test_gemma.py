"""Gemma 3: exact conversions and fits with norms that multiply by 1 + weight, and checkpoints that could see images.

Shapes: T tokens, E hidden size.
"""

import copy
import json

import pytest
import torch
from attention_oracle import CALIBRATION, LONG_CALIBRATION, distance, random_model
from safetensors.torch import load_file, save_file
from small_models import GEMMA, make_batch
from stock_models import batch, close, logits, own_model, stock_config, stock_model
from transformers import Gemma3Config

from modeling_gqa import GQAForCausalLM
from modeling_gqa.checkpoints.exporting import export_config
from modeling_gqa.conversion import compare_predictions, convert_model, layer_errors, load_source, target_config
from modeling_gqa.conversion.steps import centred
from modeling_gqa.costs import count_parameters
from modeling_gqa_cli.errors import UserError

pytestmark = pytest.mark.compat


@torch.no_grad()
def pair(**fields) -> tuple[GQAForCausalLM, GQAForCausalLM]:
    """A model with Gemma 3's norms and embeddings, and one of the same function without them, in float64."""
    fields = {"qk_norm": True, **fields}
    model = random_model("mha", **GEMMA, **fields).double().eval()
    plain = random_model("mha", norm_position="both", **fields).double().eval()
    state = copy.deepcopy(model.state_dict())
    for name, tensor in state.items():
        if "norm" in name:
            tensor += 1
    state["model.embed_tokens.weight"] *= model.config.hidden_size**0.5
    plain.load_state_dict(state)
    return model, plain


@pytest.mark.parametrize("text", [False, True], ids=["weights", "text"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_random_gemma_is_mha_and_mla_exactly(kind, text):
    """Logits and tokens are those of transformers' class, beyond the window: with each head repeated, and as MLA."""
    stock = stock_model(stock_config("gemma3"))
    source = own_model(stock)
    size = source.config.num_key_value_heads * source.config.head_dim
    sizes = {"kv_lora_rank": size, "qk_rope_head_dim": size} if kind == "mla" else {}
    other, report = convert_model(
        source, target_config(source.config, kind, **sizes), [make_batch(4, 24)] if text else None
    )
    assert report["exact"] and other.config.attention_kind == kind
    assert all(getattr(other.config, name) == value for name, value in GEMMA.items())
    assert other.config.format_version == 4 and other.num_parameters() == count_parameters(other.config)
    assert close(logits(other), logits(stock))
    options = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(other.generate(**batch(), **options), stock.generate(**batch(), **options))
    for index, layer in enumerate(source.model.layers):
        new = other.model.layers[index].self_attn
        assert torch.equal(new.q_norm.weight, layer.self_attn.q_norm.weight)
        assert torch.equal(new.k_norm.weight, layer.self_attn.k_norm.weight)
    if kind == "mha":
        assert export_config(other.config).model_type == "gemma3_text"
    else:
        with pytest.raises(UserError, match="qk_norm=True: the latent is taken from normed keys"):
            export_config(other.config)


@pytest.mark.parametrize("options", [{"refine": 0}, {"refine": 2}], ids=["fit", "refine"])
@pytest.mark.parametrize(("kind", "sizes"), [("gqa", {"num_key_value_heads": 2}), ("mla", {"cache_size": 56})])
def test_conversions_are_those_of_a_model_whose_norms_have_the_one(kind, sizes, options):
    """Fits behind norms, merged heads and losses see what a norm multiplies by, not its weight alone."""
    model, plain = pair(attention_bias=True)
    assert distance(model(**CALIBRATION[0]).logits, plain(**CALIBRATION[0]).logits) < 1e-9
    found, expected = (
        convert_model(each, target_config(each.config, kind, **sizes), LONG_CALIBRATION, **options)[0]
        for each in (model, plain)
    )
    assert found.config.zero_centered_norms and found.config.scale_embeddings
    # The fits' products are in float32.
    assert distance(found(**CALIBRATION[0]).logits, expected(**CALIBRATION[0]).logits) < 1e-3
    assert layer_errors(model, found, CALIBRATION) == pytest.approx(
        layer_errors(plain, expected, CALIBRATION), rel=1e-2
    )


def test_steps_of_a_norm_are_as_large_as_what_it_multiplies_by():
    model, plain = pair()
    for number in range(3):
        one, other = (each.model.layers[number].self_attn for each in (model, plain))
        with centred(one, {}) as sizes, centred(other, {}) as expected:
            assert sizes[one.q_norm.weight] == pytest.approx(expected[other.q_norm.weight])
            assert sizes[one.o_proj.weight] == pytest.approx(expected[other.o_proj.weight])


def test_transformers_gemma_is_compared_by_its_logits():
    stock = stock_model(stock_config("gemma3"))
    assert compare_predictions(stock, own_model(stock), CALIBRATION)["kl"] < 1e-6


def test_given_embeddings_are_not_scaled():
    """As in transformers' class, which scales in its embedding."""
    stock = stock_model(stock_config("gemma3"))
    model, x = own_model(stock), torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    assert close(model(inputs_embeds=x).logits, stock(inputs_embeds=x).logits)
    ids = batch()["input_ids"]
    for dtype in (torch.float32, torch.bfloat16):
        embeddings = [each.to(dtype).model.embed_tokens(ids) for each in (model, stock)]
        assert torch.equal(*embeddings)


# -- checkpoints for text and images


def save_multimodal(folder, name_of, extra=()):
    """Save a small Gemma 3 as the text part of a `gemma3` checkpoint, whose tensors are called `name_of` the usual."""
    stock = stock_model(stock_config("gemma3"))
    stock.save_pretrained(folder)
    config = Gemma3Config(text_config=stock.config.to_dict(), vision_config={"model_type": "siglip_vision_model"})
    config.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gemma3"
    tensors = {name_of(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= dict.fromkeys(extra, torch.zeros(3))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return stock


NAMES = {
    "present": lambda name: name.replace("model.", "model.language_model.", 1),
    "earlier": lambda name: f"language_model.{name}",
    "plain": lambda name: name,
}


@pytest.mark.parametrize("name_of", NAMES.values(), ids=NAMES)
def test_the_text_part_alone_is_imported(name_of, tmp_path):
    stock = save_multimodal(tmp_path, name_of)
    model = load_source(tmp_path)
    assert close(logits(model), logits(stock)) and model.dtype == torch.float32


@pytest.mark.parametrize("extra", ["vision_tower.embeddings.weight", "model.multi_modal_projector.norm.weight"])
def test_weights_for_images_are_refused_by_name(extra, tmp_path):
    save_multimodal(tmp_path, NAMES["present"], [extra])
    with pytest.raises(UserError, match=f"weights for images \\({extra}\\), which this package's models do not see"):
        load_source(tmp_path)
