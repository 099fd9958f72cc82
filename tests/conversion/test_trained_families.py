"""Trained models of every family: what conversions lose, beside what they lose of a Llama of the same size.

`python -m pytest tests/conversion/test_trained_families.py -rP` prints the table of docs/adding-a-family.md.
"""

import copy

import pytest
import torch
from stock_models import MULTIPLIERS, PARTIAL, YARN
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from modeling_gqa.conversion import convert_model, target_config

pytestmark = pytest.mark.training

FACTOR = 6.0  # the largest KL that a conversion may have, as a multiple of the mean of three Llamas
WORDS, TOPICS, CHOICES = 10, 3, 4
LENGTH, STEPS, ROWS = 40, 240, 16
SIZES = {
    "vocab_size": WORDS + TOPICS * CHOICES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
WINDOW = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = {
    **{"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "rope_parameters": {"full_attention": {**DEFAULT, "rope_theta": 1e6}, "sliding_attention": DEFAULT},
}
NO_EXPERTS = {
    **{"num_local_experts": 0, "shared_intermediate_size": 128, "mamba_n_heads": 1},
    "layer_types": ["full_attention"] * 2,
}
SCALED_QUERIES = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 10}
GRANITE = {**MULTIPLIERS, "embedding_multiplier": 4.0, "attention_multiplier": 0.25}
FAMILIES = {
    "llama": {},
    "phi3": {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5}},
    "granite": GRANITE,
    "granitemoehybrid": GRANITE | NO_EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": WINDOW,
    "gemma3_text": WINDOW | GEMMA3,
    "ministral3": {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e4} | SCALED_QUERIES},
}
# The source caches 2 x 2 x 16 = 64 numbers per token and layer.
TARGETS = {"mla, 1/2": ("mla", 32), "mla, 1/4": ("mla", 16), "mqa, 1/2": ("mqa", None)}


def text(rows: int, seed: int) -> torch.Tensor:
    """Rows (rows, LENGTH) that begin with one of the choices of each topic.

    A word follows either from the word before it and the choice of any topic, or from a word 2 to 4 before it.
    """
    tables, draw = torch.Generator().manual_seed(3), torch.Generator().manual_seed(seed)
    by_topic = torch.randint(WORDS, (TOPICS, CHOICES, WORDS), generator=tables)
    by_distance = torch.randint(WORDS, (5, WORDS), generator=tables)
    chosen = torch.randint(CHOICES, (rows, TOPICS), generator=draw)
    tokens, every = torch.randint(WORDS, (rows, LENGTH), generator=draw), torch.arange(rows)
    for place in range(TOPICS + 1, LENGTH):
        topic, distance = (torch.randint(*ends, (rows,), generator=draw) for ends in ((0, TOPICS), (2, 5)))
        follows = by_topic[topic, chosen[every, topic], tokens[:, place - 1]]
        recalled = by_distance[distance, tokens[every, (place - distance).clamp(min=TOPICS)]]
        tokens[:, place] = torch.where(torch.rand(rows, generator=draw) < 0.6, follows, recalled)
    tokens[:, :TOPICS] = WORDS + CHOICES * torch.arange(TOPICS) + chosen
    return tokens


def trained(family: str, seed: int):
    """A model of transformers' own class, trained on `text`."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**SIZES, **copy.deepcopy(FAMILIES[family])})
    model, rows = AutoModelForCausalLM.from_config(config), text(4000, 0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (ROWS,))]
        logits = model(batch).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def log_probabilities(model, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).logits.double().log_softmax(-1)


def measured(family: str, seed: int = 0) -> tuple[float, dict[str, float]]:
    """The loss of a trained model on other text, and by target the KL of its conversion from it in nats per token."""
    source, rows, found = trained(family, seed), text(100, 1), {}
    expected = log_probabilities(source, rows)
    loss = -expected[:, TOPICS:-1].gather(-1, rows[:, TOPICS + 1 :, None]).mean().item()
    calibration = [{"input_ids": batch} for batch in text(96, 2).split(ROWS)]
    for name, (kind, size) in TARGETS.items():
        target = target_config(source.config, kind, cache_size=size)
        converted, _ = convert_model(source, target, calibration, divide_cache=size is not None)
        change = expected - log_probabilities(converted.eval(), rows)
        found[name] = (expected.exp() * change).sum(-1).mean().item()
    return loss, found


def row(name: str, loss: float, kls: dict[str, float], of_llama: dict[str, float]) -> str:
    cells = (f"{kl:.5f} ({kl / of_llama[target]:.2f})" for target, kl in kls.items())
    return f"| {name} | {loss:.2f} | {' | '.join(cells)} |"


@pytest.fixture(scope="module")
def llama():
    """The mean of three: which of them is taken changes their KL by several times."""
    runs = [measured("llama", seed) for seed in range(3)]
    mean = {target: sum(kls[target] for _, kls in runs) / 3 for target in TARGETS}
    print(*(row(f"llama, seed {seed}", *run, mean) for seed, run in enumerate(runs)), sep="\n")
    return sum(loss for loss, _ in runs) / 3, mean


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_a_family_loses_what_a_llama_of_its_size_does(family, llama):
    loss, found = measured(family)
    print(row(family, loss, found, llama[1]))
    # A model that had only the frequencies of words would have a loss of about log(10) = 2.3.
    assert loss < 2.1 and loss < 1.25 * llama[0]
    for name, kl in found.items():
        assert kl <= FACTOR * llama[1][name], name
