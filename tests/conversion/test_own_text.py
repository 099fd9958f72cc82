"""Text that a model writes itself: which tokens it draws."""

import pytest
import torch
from small_models import MODELS, make_model
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from modeling_gqa.conversion import own_text
from modeling_gqa.conversion.own_text import continued, first_tokens
from modeling_gqa_cli.errors import UserError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens_are_those_of_generate(name):
    """With the likeliest token alone, rows are what transformers' greedy search writes; the end of a text is no end."""
    model = make_model(name)
    first = torch.tensor([5, 17, 90])
    rows = continued(model.train(), first, 30, generator(), top_p=1e-6)
    assert model.training
    wanted = model.eval().generate(
        first[:, None], do_sample=False, max_new_tokens=29, eos_token_id=None, attention_mask=torch.ones(3, 1).long()
    )
    torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 1000), (0.95, 1000), (1.0, 1000), (1.0, 6), (0.8, 9)])
def test_tokens_are_drawn_by_their_probability(top_p, top_k, monkeypatch):
    """Of 20,000 draws after one token, each has its share of what makes up `top_p` of the likeliest."""
    monkeypatch.setattr(own_text, "TOP_K", top_k)
    model = make_model("gqa", vocab_size=13)
    with torch.no_grad():
        probabilities = model(torch.tensor([[7]])).logits[0, -1].double().softmax(-1)
    order = probabilities.argsort(descending=True)[:top_k]
    likeliest = probabilities[order] / probabilities[order].sum()
    kept = order[likeliest.cumsum(0) - likeliest < top_p]
    wanted = torch.zeros_like(probabilities)
    wanted[kept] = probabilities[kept] / probabilities[kept].sum()
    drawn = continued(model, torch.full((20000,), 7), 2, generator(), top_p=top_p)[:, 1]
    shares = torch.bincount(drawn, minlength=13) / len(drawn)
    deviation = (wanted * (1 - wanted) / len(drawn)).sqrt()
    assert len(kept) > 1 and ((shares - wanted).abs() <= 4 * deviation).all()


def test_a_seed_says_which():
    model = make_model("mla")
    first = torch.arange(10, 14)
    rows = [continued(model, first, 20, generator(seed)) for seed in (1, 1, 2)]
    assert (rows[0] == rows[1]).all() and (rows[0] != rows[2]).any()


def test_logits_that_are_not_finite_are_refused():
    model = make_model("mha")
    model.lm_head.weight.data[3] = torch.inf
    with pytest.raises(UserError, match="logits"):
        continued(model, torch.tensor([5]), 4, generator())


def test_documents_begin_with_tokens_that_are_text():
    """No special token begins one, also none that has no name, and no token that the model does not have."""
    words = {f"w{i}": i for i in range(40)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w1")
    tokenizer.add_tokens([AddedToken("w7", special=True)])
    tokenizer.add_tokens([AddedToken("w9", special=False)])
    drawn = [first_tokens(tokenizer, 30, 2000, seed) for seed in (0, 0, 1)]
    assert set(drawn[0].tolist()) == {*range(30)} - {1, 7}
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    with pytest.raises(UserError, match="special tokens alone"):
        first_tokens(tokenizer, 0, 1, 0)
