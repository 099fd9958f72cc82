"""Which size a conversion with a rounded cache has, of those that it may have."""

from typing import Any

import pytest
import torch
from small_models import make_config

from modeling_gqa.conversion import UserError
from modeling_gqa.conversion.options import Options, find_goal
from modeling_gqa.conversion.rounded import best_neighbour
from modeling_gqa.conversion.targets import cached_numbers
from modeling_gqa.conversion.transform_coding import least_bytes
from modeling_gqa.costs import cache_bytes_per_token

LOSSES = {
    "first": ([0.2, 0.3, 0.4], 0, 0, {0, 1}),
    "last": ([0.4, 0.3, 0.2], 0, 2, {0, 1, 2}),
    "down": ([0.1, 0.2, 0.3, 0.4, 0.5], 2, 0, {0, 1, 2, 3}),
    "up, and not on": ([0.5, 0.4, 0.1, 0.2, 0.0], 1, 2, {1, 2, 3}),
    "stays": ([0.0, 0.5, 0.4, 0.5, 0.0], 2, 2, {1, 2, 3}),
    "alone": ([0.5], 0, 0, set()),
    "not a number": ([0.5, float("nan"), 0.1], 0, 0, {0, 1}),
}


@pytest.mark.parametrize("case", LOSSES)
def test_neighbours_are_tried_while_they_lose_less(case):
    losses, start, best, expected = LOSSES[case]
    tried: list[int] = []

    def loss(number: int) -> float:
        tried.append(number)
        return losses[number]

    assert best_neighbour(start, len(losses), loss) == best
    assert set(tried) == expected and len(tried) == len(expected)


def goal_of(tmp_path, share: float, method: str = "lowrank", **fields):
    (tmp_path / "text.txt").write_text("words " * 100)
    named: dict[str, Any] = {
        "source": str(tmp_path / "source"),
        "target": tmp_path / "out",
        "text": [tmp_path / "text.txt"],
    }
    kind: dict[str, Any] = {
        "attention_kind": "mla",
        "cache_share": share,
        "cache_bits": "auto",
        "method": method,
        "device": "cpu",
    }
    return find_goal(Options(**named, **kind), make_config("mha", **fields), torch.float32)


def test_sizes_are_shares_of_the_numbers_and_fit_the_budget(tmp_path):
    config = make_config("mha")
    numbers = cached_numbers(config.per_layer_config[0])
    goal = goal_of(tmp_path, 0.2)
    sizes = [cached_numbers(target.per_layer_config[0]) for target in goal.sizes]
    shares = (3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
    assert sizes == sorted(sizes) and set(sizes) <= {int(share * numbers) for share in shares}
    assert goal.target in goal.sizes and goal.later and not goal.exact
    budget = 0.2 * cache_bytes_per_token(config, torch.float32)
    assert all(least_bytes(target, torch.float32) <= budget for target in goal.sizes)


@pytest.mark.parametrize("share", [0.11, 0.2])
def test_what_one_size_is_does_not_speak_for_the_others(share, tmp_path, recwarn):
    """At three quarters this model is MLA exactly, and lossy at all other sizes; no size that is left warns."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    fields = {
        "rope_parameters": rope,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 128,
        "head_dim": 32,
    }
    assert not goal_of(tmp_path, share, **fields).exact
    with pytest.raises(UserError, match="--method=mean merges heads, which MLA does not"):
        goal_of(tmp_path, share, "mean", **fields)
    assert not recwarn.list
