"""Attention over the latent on a CPU, for every size, dtype and block size; the cache may be in fp8.

vLLM's own backends on a CPU take R + P = 576 alone, one of them in float32 with blocks of 16 tokens and without cached
prefixes, the other in bfloat16 where the CPU has AMX.

Shapes: T tokens, S tokens of a request so far, H query heads, R latent, P rotary key, N unrotated part, V value.
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of float8_e4m3fn


class LatentCPUBackend(MLACommonBackend):
    """What vLLM asks of a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return "GQA_CPU_MLA"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """All."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type["LatentCPUMetadataBuilder"]:
        return LatentCPUMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["LatentCPUImpl"]:
        return LatentCPUImpl


# Tokens of decoded requests that attend in one product: as many as a copy of them is worth keeping in memory.
TOGETHER = 8192


class Group(NamedTuple):
    """Decoded requests that attend in one product, padded to the longest.

    Args:
        rows: their places in the batch, (B,).
        lengths: their numbers of tokens, ascending.
        tables: the places of their blocks in the cache, (B, n).
    """

    rows: torch.Tensor
    lengths: list[int]
    tables: torch.Tensor


class LatentCPUMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's metadata of a batch, with the lengths of its requests as numbers."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build: bool = False) -> MLACommonMetadata:
        """Return the metadata; `lengths` and `starts` are those of decoded requests and then of prefilled ones.

        `groups` holds the decoded requests, those of similar lengths together.
        """
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.lengths = common_attn_metadata.seq_lens[: metadata.num_reqs].tolist()
        metadata.starts = metadata.query_start_loc[: metadata.num_reqs + 1].tolist()
        tables = metadata.decode.block_table if metadata.num_decodes else None
        metadata.groups = make_groups(metadata.lengths[: metadata.num_decodes], tables, TOGETHER)
        return metadata


def make_groups(lengths: list[int], tables: torch.Tensor | None, most: int) -> list[Group]:
    """Return requests of these lengths in groups of at most so many tokens with their padding, or of one request."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[row] <= most:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [Group(torch.tensor(rows), [lengths[row] for row in rows], tables[rows]) for rows in groups]


class LatentCPUImpl(CPUMLAImpl):
    """Attention of a batch by torch's fused kernel: decoded requests in groups, prefilled ones one by one."""

    # Holds the latents of a group; memory that is new in each call would cost more than the attention.
    scratch: ClassVar[torch.Tensor] = torch.empty(0)

    def __init__(self, *args, sliding_window: int | None = None, **kwargs):
        super().__init__(*args, sliding_window=None, **kwargs)
        self.window = sliding_window

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer) -> tuple[torch.Tensor, None]:
        """Attend from one token of each decoded request, (T, H, R + P), over its latents; return (T, H, R)."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        for rows, lengths, tables in attn_metadata.groups:
            held = self.copied(kv_c_and_k_pe_cache, tables, lengths[-1], query.dtype, layer._k_scale)
            unseen = 0 if self.window is None else max(0, lengths[0] - self.window)
            held = held[:, None, unseen:]  # (B, 1, S, R + P)
            mask = self.mask(held, [length - unseen for length in lengths])
            # torch's kernel gives a thread at least the heads that are together.
            parts = shares(self.num_heads, -(-torch.get_num_threads() // len(rows)))
            held = held.expand(-1, parts, -1, -1)
            attended = nn.functional.scaled_dot_product_attention(
                query[rows].unflatten(1, (parts, -1)), held, held, attn_mask=mask, scale=self.scale
            )  # (B, parts, H / parts, R + P)
            output[rows] = attended.flatten(1, 2)[..., : self.kv_lora_rank]
        return output, None

    def mask(self, held: torch.Tensor, lengths: list[int]) -> torch.Tensor | None:
        """Return what requests of `lengths` see, (B, 1, 1, S), and clear in `held` what is not theirs."""
        longest = lengths[-1]
        if lengths[0] == longest and (self.window is None or self.window >= longest):
            return None
        for row, length in enumerate(lengths):
            held[row, :, length:] = 0  # of other requests, where it might be infinite
        place, end = torch.arange(longest), torch.tensor(lengths)[:, None]
        seen = place < end
        seen = seen if self.window is None else seen & (place >= end - self.window)
        return seen[:, None, None]

    @classmethod
    def copied(
        cls, cache: torch.Tensor, tables: torch.Tensor, length: int, dtype: torch.dtype, scale: torch.Tensor
    ) -> torch.Tensor:
        """Return a copy of the first tokens of requests in `dtype`, (B, S, R + P), which the next call overwrites."""
        size, numbers = cache.shape[1:]
        blocks = tables[:, : -(-length // size)]
        shape = (blocks.numel(), size, numbers)
        if cls.scratch.dtype != dtype or cls.scratch.numel() < math.prod(shape):
            cls.scratch = torch.empty(math.prod(shape), dtype=dtype)
        held = cls.scratch[: math.prod(shape)].view(shape)
        if cache.dtype == dtype:
            torch.index_select(cache, 0, blocks.flatten(), out=held)
        else:
            held.copy_(cache[blocks.flatten()]).mul_(scale)
        return held.view(len(tables), -1, numbers)[:, :length]

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype: str, k_scale, skip_scale: bool = False
    ) -> None:
        """Write latents, (T, R), and rotary keys, (T, 1, P), of tokens into their slots; in fp8 divided by `k_scale`.

        What lies outside of float8_e4m3fn becomes its largest number, 448, as in vLLM's own kernels. vLLM 0.33 says
        where the scale is 1 (`skip_scale`).
        """
        if kv_cache_dtype in FP8:
            kv_cache, most = kv_cache.view(torch.float8_e4m3fn), torch.finfo(torch.float8_e4m3fn).max
            kv_c_normed, k_pe = (x.div(k_scale).clamp(-most, most) for x in (kv_c_normed, k_pe))
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)

    def forward_mha(
        self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None
    ) -> None:
        """Attend from the tokens of each prefilled request, (T, H, N + P), over what is rebuilt from its latents."""
        first = attn_metadata.num_decodes
        begin = attn_metadata.starts[first]
        tables = attn_metadata.prefill.block_table
        for row in range(attn_metadata.num_prefills):
            start, end = (place - begin for place in attn_metadata.starts[first + row : first + row + 2])
            length = attn_metadata.lengths[first + row]
            held = self.copied(kv_c_and_k_pe_cache, tables[row : row + 1], length, q.dtype, k_scale)[0]
            attended = self.attend(q[start:end], held)  # (T, H, V)
            output[start:end] = attended.flatten(1)

    def attend(self, query: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Attend from the last tokens, (T, H, N + P), over `held` (S, R + P); return (T, H, V)."""
        tokens, length = len(query), len(held)
        latent, key_rope = held.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        up = self.kv_b_proj(latent.contiguous())[0].unflatten(-1, (self.num_heads, -1))  # (S, H, N + V)
        key, value = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat((key, key_rope.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1)  # (S, H, N + P)
        # torch's fused kernel wants values as wide as keys.
        value = nn.functional.pad(value, (0, max(0, key.shape[-1] - self.v_head_dim)))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None
        if self.window is not None or tokens != length:
            place = torch.arange(length)
            distance = place[-tokens:, None] - place
            mask = distance >= 0
            mask = mask if self.window is None else mask & (distance < self.window)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )  # (1, H, T, V, or N + P where that is more)
        return attended[0, ..., : self.v_head_dim].transpose(0, 1)


def shares(heads: int, wanted: int) -> int:
    """Return into how many equal parts of at least two heads they divide, at most as many as are wanted."""
    return next(parts for parts in range(min(wanted, max(1, heads // 2)), 0, -1) if heads % parts == 0)
