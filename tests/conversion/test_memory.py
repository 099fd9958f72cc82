"""The accounting of a conversion's memory, against the tensors that live while a model is converted and measured."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_gqa import GQAConfig, GQAForCausalLM
from modeling_gqa.common import batches as common_batches
from modeling_gqa.common.batches import free_memory
from modeling_gqa.conversion import compare_predictions, convert_model, memory, target_config
from modeling_gqa.conversion import polish as module
from modeling_gqa.conversion.memory import GIB, count_memory
from modeling_gqa.conversion.options import Goal, expected_target
from modeling_gqa.conversion.text import LONGEST_SEQUENCE
from modeling_gqa.costs import cache_bytes_per_token

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 1000,
}
MLA: dict[str, Any] = {"attention_kind": "mla", "cache_size": 128}
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


class Living(TorchDispatchMode):
    """Follows the bytes of all tensors but those of a model; `peak` is the most that there were at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.kept = [tensor.untyped_storage() for tensor in model.state_dict().values()]
        self.sizes, self.bytes, self.peak = {storage._cdata: 0 for storage in self.kept}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[override]
        result = function(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.gone, storage._cdata)
        return result

    def gone(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key)


def options(**values) -> Any:
    return SimpleNamespace(**{"budget": None, "layers": None, "divides_cache": False, **values})


def expected(config: GQAConfig, kind: str, dtype: torch.dtype = torch.bfloat16, **changes) -> GQAConfig:
    """The configuration by which the command counts a conversion with text."""
    target = target_config(config, kind, **changes)
    asked = options(attention_kind=kind, divides_cache=kind == "mla")
    return expected_target(Goal(asked, target, exact=False), config, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 16), torch.bfloat16), ((4, 16), torch.float32), ((8, 256), torch.float32)],
    ids=["few tokens", "few tokens in float32", "many tokens in float32"],
)
@pytest.mark.parametrize(
    "changes",
    [MLA, {"attention_kind": "gqa", "num_key_value_heads": 2}, {**MLA, "num_attention_heads": 8}],
    ids=["mla", "gqa", "mla of mha"],
)
def test_what_lives_is_at_most_what_is_counted(changes, shape, dtype, monkeypatch):
    """And not much less. Tensors inside torch's own functions are not seen."""
    own = {name: changes[name] for name in changes if name in SIZES and name != "num_key_value_heads"}
    changes = {name: value for name, value in changes.items() if name not in own}
    torch.manual_seed(0)
    model: Any = GQAForCausalLM(GQAConfig(**{**SIZES, **own})).to(dtype).eval()
    text = [{"input_ids": torch.randint(1000, shape)} for _ in range(2)]
    states = (
        dtype.itemsize * len(text) * text[0]["input_ids"].numel() * (2 * 256 + model.config.num_attention_heads * 16)
    )
    monkeypatch.setattr(memory, "IN_MEMORY", states)
    kind = changes.pop("attention_kind")
    count = count_memory(model.config, expected(model.config, kind, dtype, **changes), dtype, *shape)
    counted = count.peak - count.source - memory.PROGRAM
    target = target_config(model.config, kind, **changes)
    with Living(model) as living:
        converted, _ = convert_model(model, target, text, divide_cache=kind == "mla", share_weights=True)
    attention = sum(x.nbytes for layer in converted.model.layers for x in layer.self_attn.parameters())
    # The text chooses R and P, so the count is of what it chose; an output bias may be new.
    chosen = count_memory(model.config, converted.config, dtype, *shape)
    assert attention == pytest.approx(chosen.attention, rel=0.01)
    # Without a folder the new layers are in memory too; the model without weights that takes them is never written to.
    empty = 4 * converted.num_parameters()
    most = max(counted + count.attention, empty + count.attention)
    assert 0.4 * counted < living.peak < most, (living.peak, counted, empty)
    measuring = Living(model)
    with measuring:
        compare_predictions(model, converted, text)
    assert measuring.peak < counted


def test_log_probabilities_are_counted(monkeypatch):
    """What is measured with a large vocabulary takes most there; two comparisons in turn take no more than one."""
    monkeypatch.setattr(memory, "IN_MEMORY", 0)
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 32768}
    model = GQAForCausalLM(GQAConfig(**sizes)).bfloat16().eval()
    text = [{"input_ids": torch.randint(1000, (1, 513))}]
    with Living(model) as living:
        compare_predictions(model, model, text)
    counted = count_memory(model.config, expected(model.config, "mqa"), torch.bfloat16, 1, 513)
    assert 0.7 * (counted.peak - counted.source - memory.PROGRAM - counted.attention) < living.peak
    assert living.peak < counted.peak - counted.source - memory.PROGRAM


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 8192}, {"num_hidden_layers": 4}], ids=["", "words", "layers"])
def test_polishing_is_counted(changes, monkeypatch):
    """A step of the rate that is tried, a step of the run, and two copies of the weights."""
    monkeypatch.setattr(memory, "IN_MEMORY", 0)
    monkeypatch.setattr(module, "LEARNING_RATES", (1e-4,))
    monkeypatch.setattr("modeling_gqa.conversion.fitting.STEP_TOKENS", 256)
    monkeypatch.setattr(memory, "STEP_TOKENS", 256)
    model = GQAForCausalLM(GQAConfig(**{**SIZES, **changes})).bfloat16().eval()
    target = target_config(model.config, "gqa", num_key_value_heads=2)
    converted, _ = convert_model(model, target, share_weights=True)
    text = [{"input_ids": torch.randint(1000, (1, 256))} for _ in range(2)]
    with Living(model) as living:
        module.polish(model, converted, text, text[:1], range(model.config.num_hidden_layers), 250)
    more, less = (
        count_memory(model.config, target, torch.bfloat16, 1, 256, polished).peak for polished in (True, False)
    )
    counted = more - model.num_parameters() * 2 - memory.PROGRAM
    assert more > less and 0.5 * counted < living.peak < counted, (living.peak, counted)


def test_sizes_chosen_later_are_guessed():
    """Under a budget the new attention is about that of equal shares, and gqa's is no larger than the source's."""
    config = GQAConfig(**SIZES)
    half = cache_bytes_per_token(config) // 2
    goal = Goal(options(attention_kind="mla"), None, False, budget=half)
    guess = expected_target(goal, config, torch.bfloat16)
    assert guess.per_layer_config[1].attention_kind == "mla" and cache_bytes_per_token(guess) == half
    goal = Goal(options(attention_kind="gqa"), None, False, budget=half)
    guess = expected_target(goal, config, torch.bfloat16)
    assert guess.per_layer_config[1].num_key_value_heads < 8


def test_llama_8b_as_the_docs_say():
    """The numbers of docs/converting.md, in bfloat16 by the command's defaults."""
    config = GQAConfig(**LLAMA_8B)
    count = count_memory(config, expected(config, "mla", cache_size=1024), torch.bfloat16, 4, LONGEST_SEQUENCE)
    assert [round(x / GIB, 1) for x in count] == [15.0, 4.6, 21.1]
    polished = count_memory(config, expected(config, "mla", cache_size=1024), torch.bfloat16, 4, LONGEST_SEQUENCE, True)
    assert round(polished.peak / GIB, 1) == 74.8
    assert str(count).startswith(
        "about 21.1 GiB by accounting, of which the source takes 15.0 and the new attention 4."
    )


def test_a_containers_memory_is_what_is_free(tmp_path, monkeypatch):
    """Its limit less what it uses; a container without a limit has what the machine has."""
    monkeypatch.setattr(common_batches, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("3000\n")
    for limit, free in (("8000\n", 5000), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        found = free_memory("cpu")
        assert found == free if free else found > 2**20
