"""The plugin's attention over the latent on a CPU, against the formula in float64."""

from types import SimpleNamespace

import pytest
import torch

from modeling_gqa_vllm.cpu import LatentCPUImpl, make_groups, shares

HEADS, RANK, ROPE, BLOCK = 6, 10, 4, 8
LENGTHS = [5, 33, 8, 1, 17]


@pytest.mark.parametrize("window", [None, 1, 7, 8, 100])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("most", "counts"), [(1, [1] * 5), (20, [2, 1, 1, 1]), (40, [3, 1, 1]), (1000, [5])])
def test_decoded_requests_see_their_own_tokens(most, counts, threads, window, monkeypatch):
    """Requests of different lengths attend in one product, and what others left in their blocks does not matter."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    attention = LatentCPUImpl.__new__(LatentCPUImpl)
    attention.window, attention.kv_lora_rank, attention.scale, attention.num_heads = window, RANK, 0.3, HEADS
    tables = torch.randperm(5 * 5).add(1).view(5, 5)
    cache = torch.full((26, BLOCK, RANK + ROPE), torch.inf)
    held = [torch.randn(length, RANK + ROPE) for length in LENGTHS]
    for table, own in zip(tables, held, strict=True):
        for place, latent in enumerate(own):
            cache[table[place // BLOCK], place % BLOCK] = latent
    before = cache.clone()
    tables[3, 1:] = 0  # vLLM's empty block
    metadata = SimpleNamespace(groups=make_groups(LENGTHS, tables, most))
    assert [len(group.rows) for group in metadata.groups] == counts
    query = torch.randn(5, HEADS, RANK + ROPE)
    output, _ = attention.forward_mqa(query, cache, metadata, SimpleNamespace(_k_scale=torch.tensor(1.0)))
    for row, own in enumerate(held):
        seen = own.double()[-(window or len(own)) :]
        weights = (query[row].double() @ seen.T * 0.3).softmax(-1)
        torch.testing.assert_close(output[row].double(), weights @ seen[:, :RANK], rtol=1e-5, atol=1e-6)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_holds_what_was_written_divided_by_the_scale(dtype):
    """Rounded to float8_e4m3fn, in its slots and no others; beyond 448 times the scale is 448 times the scale."""
    torch.manual_seed(0)
    attention, scale = LatentCPUImpl.__new__(LatentCPUImpl), torch.tensor(0.5)
    latent, key_rope = (100 * torch.randn(7, *shape, dtype=dtype) for shape in ((RANK,), (1, ROPE)))
    latent[0, 0], key_rope[1, 0, 0] = 1e4, -1e4
    cache = torch.zeros(3, BLOCK, RANK + ROPE, dtype=torch.uint8)
    slots = torch.tensor([-1, 3, 23, 8, 9, 1, 0])  # the first token is padding
    attention.do_kv_cache_update(latent, key_rope, cache, slots, "fp8", scale)
    tables = torch.tensor([[1, 0], [2, 1]])
    read = attention.copied(cache.view(torch.float8_e4m3fn), tables, 12, dtype, scale)
    assert read.dtype == dtype and read.shape == (2, 12, RANK + ROPE)
    written = torch.zeros(24, RANK + ROPE, dtype=torch.float64)
    for token, slot in enumerate(slots.tolist()[1:], 1):
        row = torch.cat((latent[token], key_rope[token, 0])).double()
        written[slot] = (row / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.5
    assert written[3, RANK] == -224
    expected = torch.stack([torch.cat((written[8:16], written[:4])), torch.cat((written[16:], written[8:12]))])
    assert torch.equal(read.double(), expected)


def test_parts_of_heads():
    """Equal parts of two heads and more, so that no thread has one row, which is slow in bfloat16."""
    assert [shares(12, wanted) for wanted in (1, 2, 5, 6, 64)] == [1, 2, 4, 6, 6]
    assert [shares(heads, 2) for heads in (1, 2, 3, 7)] == [1, 1, 1, 1]
