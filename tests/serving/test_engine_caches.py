"""What we say of vLLM's flags for its cache, against vLLM's own code."""

import pytest
import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.backends.turboquant_attn import _build_hadamard

from modeling_gqa import GQAConfig
from modeling_gqa.cache_formats import orthogonal_matrix
from modeling_gqa.conversion.engine_caches import TURBOQUANT, engine_caches, normal_levels


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", TURBOQUANT)
def test_turboquant(name, head_dim):
    """The bytes of a head, the levels of keys, and the matrix that mixes them."""
    theirs = TurboQuantConfig.from_cache_dtype(name, head_dim)
    config = GQAConfig(num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim)
    found = {cache.dtype: cache.bytes for cache in engine_caches(config, torch.bfloat16)}
    assert found[name] == 4 * 2 * 2 * head_dim * 2 + 5 * 2 * theirs.slot_size_aligned
    levels = normal_levels(theirs.key_mse_bits) / head_dim**0.5
    torch.testing.assert_close(levels, get_centroids(head_dim, theirs.key_mse_bits), rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(orthogonal_matrix(head_dim).float(), _build_hadamard(head_dim, "cpu"))
