"""What vLLM's flags store of a cache, against its description in float64."""

import math

import pytest
import torch
from scipy.linalg import hadamard
from scipy.stats import norm

from modeling_gqa import GQAConfig
from modeling_gqa.conversion.engine_caches import engine_caches, in_turboquant, normal_levels

# Levels for a normal number of variance 1 (Max, Quantizing for minimum distortion, 1960, table I), the positive half.
MAX_1960 = {3: [0.2451, 0.7560, 1.344, 2.152]}
SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 64}


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_of_normal_numbers(bits):
    """Each is the mean of the numbers that are nearest to it."""
    levels = normal_levels(bits).double().numpy()
    assert len(levels) == 2**bits
    for known, found in zip(MAX_1960.get(bits, ()), levels[2 ** (bits - 1) :], strict=False):
        assert found == pytest.approx(known, abs=6e-4)
    edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2), math.inf]
    for level, low, high in zip(levels, edges, edges[1:], strict=False):
        mean = norm.expect(lambda x: x, lb=low, ub=high) / (norm.cdf(high) - norm.cdf(low))
        assert level == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_rounds_rotated_keys_and_the_range_of_values(bits):
    """Head by head and token by token; the first and last layers stay as they are."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, 5, 32) * 7 + 1, torch.randn(2, 3, 5, 16) + 3
    value[0, 0, 0] = 2.5  # all alike
    assert in_turboquant(bits, range(2, 4), 1, (key, value))[0] is key
    found = in_turboquant(bits, range(2, 4), 2, (key, value))
    mixing = torch.from_numpy(hadamard(32)).double() / math.sqrt(32)
    levels = normal_levels(bits).double()
    for place in torch.cartesian_prod(*map(torch.arange, (2, 3, 5))).tolist():
        row, head, token = place
        x = key[row, head, token].double()
        turned = x / x.norm() @ mixing * math.sqrt(32)
        nearest = levels[(turned[:, None] - levels).abs().argmin(1)]
        back = nearest / nearest.norm() @ mixing * x.norm()
        torch.testing.assert_close(found[0][row, head, token].double(), back, rtol=1e-3, atol=1e-3)
        y = value[row, head, token].double()
        step = (y.max() - y.min()).item() / (2**bits - 1)
        assert (found[1][row, head, token] - y).abs().max() <= step / 2 + 0.01


def test_which_flags_a_model_takes_and_how_many_bytes():
    """Layers of half the cache in fp8; TurboQuant where all heads are powers of two without windows and latents."""

    def sizes(**fields):
        return {each.dtype: each.bytes for each in engine_caches(GQAConfig(**SIZES | fields), torch.bfloat16)}

    grouped = {"attention_kind": "gqa", "num_key_value_heads": 2}
    four, three = "turboquant_4bit_nc", "turboquant_3bit_nc"
    assert sizes(**grouped) == {"fp8": 768, four: 4 * 256 + 2 * 2 * (32 + 6), three: 4 * 256 + 2 * 2 * (24 + 6)}
    assert list(sizes(**grouped, head_dim=24)) == ["fp8"]
    assert list(sizes(**grouped, num_hidden_layers=4)) == ["fp8"]  # of which TurboQuant rounds none
    assert list(sizes(**grouped, sliding_window=8)) == ["fp8"]
    assert sizes(attention_kind="mla", kv_lora_rank=40, qk_rope_head_dim=8) == {"fp8": 6 * 48}
