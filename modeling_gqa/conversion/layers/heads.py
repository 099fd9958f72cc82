"""The weights of one attention layer as the matrices of grouped attention, which all conversions compute with.

Shapes: E hidden size, H query heads, G key/value heads, D head size, n rotary planes (a plane is the pair of dimensions
i and i + n of a head), R, P, N, V the sizes of MLA (latent, rotary key, unrotated key, value).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from modeling_gqa_cli.errors import UserError

from ...attention import GroupedAttention
from ...attention_latent import LatentAttention
from ...configuration_gqa import GQAConfig
from ...layers import key_mean_size
from ...modeling_gqa import GQAForCausalLM
from ..targets import check_linear, layer_head_dim


@dataclass(frozen=True)
class Heads:
    """The weights of grouped attention in float64: query head h reads key/value head h // (H / G).

    A bias is zeros where the projection has none.

    Args:
        q, q_bias: (H, D, E) and (H, D).
        k, k_bias, v, v_bias: (G, D, E) and (G, D).
        o, o_bias: (H, E, D) and (E,).
        frequencies: (n,) index of each plane's frequency.
        inv_freq: (n,) the planes' frequencies in radians per token.
        frequency_dim: size of the head whose frequencies `frequencies` counts.
        scaling: factor of the attention scores.
        rotary_scaling: factor of cosine and sine (YaRN and longrope have one other than 1).
        biases: whether the query, the key/value and the output projections have a bias.
        q_norm, k_norm: (D,) factors of the RMSNorm on each head, or (H, D) and (G, D) of that over all heads; `None`
            where there is no norm.
        before_norms: the heads behind whose norms these begin, see `normed.behind_norms`; `None` where these begin at
            the layer's input.
    """

    q: torch.Tensor
    q_bias: torch.Tensor
    k: torch.Tensor
    k_bias: torch.Tensor
    v: torch.Tensor
    v_bias: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor
    frequencies: torch.Tensor
    inv_freq: torch.Tensor
    frequency_dim: int
    scaling: float
    rotary_scaling: float
    biases: tuple[bool, bool, bool]
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    before_norms: "Heads | None" = None

    @cached_property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return len(self.q) // len(self.k)

    @cached_property
    def norms_all_heads(self) -> bool:
        """Whether an RMSNorm is over all heads."""
        return self.k_norm is not None and self.k_norm.ndim == 2

    @cached_property
    def planes(self) -> int:
        """Number n of rotary planes of a head."""
        return len(self.frequencies)

    @cached_property
    def key_heads(self) -> torch.Tensor:
        """The key/value head that each query head reads, (H,)."""
        return torch.arange(len(self.q), device=self.q.device) // self.groups

    @cached_property
    def complex_planes(self) -> dict[str, torch.Tensor]:
        """The rotary planes of queries (H, n, ...) and keys (G, n, ...) and of their biases, as `plane_rows`."""
        return {name: plane_rows(getattr(self, name), self.planes) for name in ("q", "q_bias", "k", "k_bias")}


def weight_and_bias(linear: torch.nn.Linear, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a projection's weight (heads, size, E) and bias (heads, size) in float64."""
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().double()
    return weight.unflatten(0, (heads, -1)), bias.unflatten(0, (heads, -1))


def read_heads(model: GQAForCausalLM, index: int) -> Heads:
    """Return layer `index` of `model` as grouped attention.

    Raises:
        UserError: conversions do not know the layer's kind, it is MLA with a latent norm, or a weight is nan or
            inf.
    """
    attention, layer = model.model.layers[index].self_attn, model.config.per_layer_config[index]
    check_linear(layer, index)
    read = read_latent if layer.attention_kind in LatentAttention.kinds else read_grouped
    rotary = model.model.rotary_emb[model.model.rotary_sizes[index]]
    frequencies = attention.frequency_indices
    if frequencies is None:
        frequencies = torch.arange(len(rotary.original_inv_freq), device=rotary.inv_freq.device)
    if layer.key_mean:
        frequencies = torch.cat((frequencies, torch.arange(len(rotary.original_inv_freq), device=frequencies.device)))
    damaged = [
        name for name, tensor in attention.named_parameters() if not tensor.is_meta and not tensor.isfinite().all()
    ]
    if damaged:
        raise UserError(f"layer {index}: {damaged[0]} is not finite: the checkpoint's weights are damaged")
    device = attention.o_proj.weight.device
    common = {
        "frequencies": frequencies.to(device),
        "inv_freq": rotary.original_inv_freq.double()[frequencies].to(device),
        "frequency_dim": 2 * len(rotary.original_inv_freq),
        "scaling": attention.scaling,
        "rotary_scaling": rotary.attention_scaling,
        "biases": layer.projection_biases,
        "o_bias": weight_and_bias(attention.o_proj, 1)[1].squeeze(0),
    }
    return read(attention, layer, common)


def read_grouped(attention: GroupedAttention, layer: GQAConfig, common: dict[str, Any]) -> Heads:
    """Read MHA, MQA or GQA."""
    heads, key_heads = layer.num_attention_heads, layer.num_key_value_heads
    q, q_bias = weight_and_bias(attention.q_proj, heads)
    k, k_bias = weight_and_bias(attention.k_proj, key_heads)
    v, v_bias = weight_and_bias(attention.v_proj, key_heads)
    o = attention.o_proj.weight.detach().double().unflatten(1, (heads, -1)).transpose(0, 1)  # (H, E, D)
    norms: list[Any] = [attention.q_norm, attention.k_norm]
    norms = [norm if norm is None else norm.weight.detach().double() + norm.offset for norm in norms]
    if layer.norms_all_heads:
        norms = [norm.unflatten(0, (-1, attention.head_dim)) for norm in norms]
    return Heads(q, q_bias, k, k_bias, v, v_bias, o, q_norm=norms[0], k_norm=norms[1], **common)


def read_latent(attention: LatentAttention, layer: GQAConfig, common: dict[str, Any]) -> Heads:
    """MLA without latent norms as MHA, exactly: of each head the rotary dimensions come first, zeros come last.

    A key that all tokens share is a bias of keys. The queries that it meets are then there twice, rotated and not.
    """
    heads, rope, nope, rank = (
        layer.num_attention_heads,
        attention.qk_rope_head_dim,
        layer.qk_nope_head_dim,
        layer.kv_lora_rank,
    )
    if attention.q_lora_rank is None:
        q, q_bias = weight_and_bias(attention.q_proj, heads)
    else:
        (q, _), (q_a, q_a_bias) = weight_and_bias(attention.q_b_proj, heads), weight_and_bias(attention.q_a_proj, 1)
        q, q_bias = q @ q_a[0], q @ q_a_bias[0]
    kv_a, kv_a_bias = (x.squeeze(0) for x in weight_and_bias(attention.kv_a_proj_with_mqa, 1))
    # A rotary key of zeros is that of a layer without rotation, which has no planes.
    if not kv_a.is_meta and not (kv_a[rank:].any() or kv_a_bias[rank:].any()):
        common |= {name: common[name][rope // 2 :] for name in ("frequencies", "inv_freq")}
        rope = 0
    up, _ = weight_and_bias(attention.kv_b_proj, heads)  # (H, N + V, R)
    order = torch.arange(rope, device=q.device)
    if attention.rope_interleave:
        order = torch.cat((order[0::2], order[1::2]))
    o = attention.o_proj.weight.detach().double().unflatten(1, (heads, -1)).transpose(0, 1)  # (H, E, V)

    size, constant = layer_head_dim(layer), key_mean_size(layer)
    mean = kv_a.new_zeros(heads, constant)
    if attention.key_mean is not None:
        mean = attention.key_mean.bias.detach().double().view(heads, constant)
        common["biases"] = (common["biases"][0], True, common["biases"][2])

    def joined(rotary: torch.Tensor, shared: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """(H, P, ...), (H, 2 n, ...) and (H, N, ...) as (H, D, ...)."""
        halves = (part for pair in zip(rotary.chunk(2, 1), shared.chunk(2, 1), strict=True) for part in pair)
        return _padded(torch.cat((*halves, rest), dim=1), size)

    def queries(rows: torch.Tensor) -> torch.Tensor:  # (H, N + P, ...)
        return joined(rows[:, nope:][:, order], rows[:, :constant], rows[:, :nope])

    def keys(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:  # (R + P, ...)
        rotary = rows[rank:][order].expand(heads, rope, *rows.shape[1:])
        return joined(rotary, shared, torch.einsum("hnr,r...->hn...", up[:, :nope], rows[:rank]))

    return Heads(
        q=queries(q),
        q_bias=queries(q_bias),
        k=keys(kv_a, kv_a.new_zeros(heads, constant, kv_a.shape[1])),
        k_bias=keys(kv_a_bias, mean),
        v=_padded(up[:, nope:] @ kv_a[:rank], size),
        v_bias=_padded(up[:, nope:] @ kv_a_bias[:rank], size),
        o=torch.nn.functional.pad(o, (0, size - layer.v_head_dim)),
        **common,
    )


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """`x` (heads, n, ...) with zeros up to `size` in its second dimension."""
    return torch.cat((x, x.new_zeros(len(x), size - x.shape[1], *x.shape[2:])), dim=1)


def write_grouped(heads: Heads) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parameters of a `GroupedAttention`, and the configuration fields that its layer needs."""
    query_bias, key_value_bias, output_bias = heads.biases
    state = {
        "q_proj.weight": heads.q.flatten(0, 1),
        "k_proj.weight": heads.k.flatten(0, 1),
        "v_proj.weight": heads.v.flatten(0, 1),
        "o_proj.weight": heads.o.transpose(0, 1).flatten(1),
    }
    if query_bias:
        state["q_proj.bias"] = heads.q_bias.flatten()
    if key_value_bias:
        state |= {"k_proj.bias": heads.k_bias.flatten(), "v_proj.bias": heads.v_bias.flatten()}
    if output_bias:
        state["o_proj.bias"] = heads.o_bias
    if heads.q_norm is not None:
        state |= {"q_norm.weight": heads.q_norm.flatten(), "k_norm.weight": heads.k_norm.flatten()}
    size = heads.q.shape[1]
    fields = {
        "head_dim": size,
        "qk_norm": heads.q_norm is not None,
        "query_bias": query_bias,
        "key_value_bias": key_value_bias,
        "output_bias": output_bias,
        "softmax_scale": None if heads.scaling == size**-0.5 else heads.scaling,
        **rotary_fields(heads.frequencies, heads.frequency_dim, size),
    }
    return state, fields


def rotary_fields(frequencies: torch.Tensor, frequency_dim: int, size: int) -> dict[str, Any]:
    """Return the configuration fields that give heads of `size` dimensions the frequencies with these indices.

    Both are `None` where they are the frequencies that a head of this size has by default.
    """
    indices = frequencies.tolist()
    usual = indices == list(range(size // 2)) and frequency_dim == size
    return {
        "rope_frequency_indices": None if usual else indices,
        "rope_frequency_dim": None if usual else frequency_dim,
    }


def repeat_heads(heads: Heads, number: int) -> Heads:
    """Return the same function with `number` key/value heads, a multiple of G: each head is repeated."""
    times, names = number // len(heads.k), ("k", "k_bias", "v", "v_bias", *["k_norm"] * heads.norms_all_heads)
    # The mean square over all heads stays what it is.
    repeated = {name: getattr(heads, name).repeat_interleave(times, dim=0) for name in names}
    return replace(heads, **repeated)


def plane_rows(weight: torch.Tensor, planes: int) -> torch.Tensor:
    """Return the rows x_i + j x_(i + n), (heads, n, ...), of the n rotary planes of `weight` (heads, D, ...)."""
    return torch.complex(weight[:, :planes], weight[:, planes : 2 * planes])


def norm_rows(
    weight: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor | None, covariance: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale rows (heads, D, E) and bias (heads, D) as the RMSNorm on each head, or over all, does on average.

    Also returns the scale (heads,) before the norm's own weights; ones where `norm` is `None`.
    """
    if norm is None:
        return weight, bias, torch.ones_like(bias[:, 0])
    power = (weight @ covariance * weight).sum((1, 2)) + (weight @ mean + bias).pow(2).sum(1)
    power = power if norm.ndim == 1 else power.mean().expand_as(power)
    scale = (weight.shape[1] / power).sqrt()
    factor = norm * scale[:, None]  # (heads, D)
    return weight * factor[..., None], bias * factor, scale
