"""Layers with an RMSNorm on queries and keys, as Qwen3 has it on each head and OLMo 2 over all, on their way to MLA.

A norm on each head lets no linear map of the layer's input mix keys of several heads, and none over all is linear.
What attention reads behind the norms is linear again: with y = [k; v] of all heads, and q of one head, every step of
the conversion to MLA holds when y takes the place of the input for keys and values, and q its place for queries.

A norm over all heads divides a token's heads by one number. Heads behind it can be merged by any linear maps, and what
these make of the heads before it is divided by another number, which is right on average.

Shapes: E hidden size, H query heads, G key/value heads, D head size, M = 2 G D size of y, P, N and R those of MLA.
"""

from dataclasses import replace
from typing import Any

import torch

from ...attention import GroupedAttention
from .heads import Heads, norm_rows
from .moments import Statistics, product


class NormedSums:
    """Running sums over y and over the normed queries of a layer with qk_norm.

    Args:
        attention: the layer.
    """

    def __init__(self, attention: GroupedAttention) -> None:
        self.attention = attention
        heads = attention.q_proj.out_features // attention.head_dim
        size, device = 2 * attention.k_proj.out_features, attention.q_proj.weight.device
        self.second = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.queries = torch.zeros(heads, *(attention.head_dim,) * 2, dtype=torch.float64, device=device)

    def add(self, rows: torch.Tensor, root: torch.Tensor) -> None:
        """Add what the layer makes of its inputs `rows` (tokens, E); `root` (tokens, 1) of what each token counts."""
        layer = self.attention
        query, key, value = (
            linear(rows).unflatten(-1, (-1, layer.head_dim)) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )  # (tokens, heads, D)
        assert layer.q_norm is not None and layer.k_norm is not None
        query = root * layer.q_norm(query).transpose(0, 1).float()  # (H, tokens, D)
        y = root * torch.cat((layer.k_norm(key), value), dim=1).flatten(1).float()  # (tokens, M)
        self.second += product(y, y, rows.dtype)
        self.total += (root * y).sum(0, dtype=torch.float64)
        self.queries += product(query, query, rows.dtype)

    def statistics(self, of_input: Statistics, weight: float) -> Statistics:
        """Return the statistics of y, with the lags and lengths of those `of_input`.

        `weight` is what all tokens count together.
        """
        second, mean, queries = (total / weight for total in (self.second, self.total, self.queries))
        return replace(of_input, second=second, mean=mean, queries=queries)


def seen_behind(heads: Heads, statistics: Statistics) -> Statistics:
    """Return the statistics of y and the queries, as they were seen on text or as the weights let expect."""
    return statistics.normed or assumed(heads, statistics)


def behind_norms(heads: Heads) -> Heads:
    """Return heads whose keys and values are parts of y, k = [I 0] y and v = [0 I] y, and whose queries are normed."""
    groups, size, _ = heads.k.shape
    parts = torch.eye(2 * groups * size, dtype=heads.k.dtype, device=heads.k.device).view(2, groups, size, -1)
    bias = torch.zeros_like(heads.k_bias)
    query = torch.eye(size, dtype=heads.q.dtype, device=heads.q.device).repeat(len(heads.q), 1, 1)
    return replace(
        heads,
        q=query,
        q_bias=torch.zeros_like(heads.q_bias),
        k=parts[0],
        k_bias=bias,
        v=parts[1],
        v_bias=bias,
        q_norm=None,
        k_norm=None,
        biases=(False, False, heads.biases[2]),
        before_norms=heads,
    )


def assumed(heads: Heads, statistics: Statistics) -> Statistics:
    """Return the statistics of y and the queries where norms scale as they do on average.

    Args:
        heads: the layer's weights.
        statistics: of its input.
    """
    covariance, mean = statistics.covariance, statistics.mean
    query, query_bias, _ = norm_rows(heads.q, heads.q_bias, heads.q_norm, covariance, mean)
    key, key_bias, _ = norm_rows(heads.k, heads.k_bias, heads.k_norm, covariance, mean)
    rows = torch.cat((key, heads.v)).flatten(0, 1)  # (M, E)
    query_mean = query @ mean + query_bias  # (H, D)
    y_mean = rows @ mean + torch.cat((key_bias, heads.v_bias)).flatten()
    return replace(
        statistics,
        second=rows @ covariance @ rows.T + torch.outer(y_mean, y_mean),
        mean=y_mean,
        queries=query @ covariance @ query.mT + query_mean[:, :, None] * query_mean[:, None, :],
    )


def add_norms(
    heads: Heads, state: dict[str, torch.Tensor], fields: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parameters and fields of an MLA layer with qk_norm, from those of one that starts behind the norms.

    Args:
        heads: the layer's weights, before the norms.
        state: parameters written for `behind_norms(heads)`, whose queries are maps of each head's normed query.
        fields: the configuration fields that go with `state`.
    """
    query_bias, key_value_bias, _ = heads.biases
    projections = {"q": (heads.q, heads.q_bias), "k": (heads.k, heads.k_bias), "v": (heads.v, heads.v_bias)}
    own = {f"{name}_proj.weight": weight.flatten(0, 1) for name, (weight, _) in projections.items()}
    for name, (_, bias) in projections.items():
        if query_bias if name == "q" else key_value_bias:
            own[f"{name}_proj.bias"] = bias.flatten()
    assert heads.q_norm is not None and heads.k_norm is not None
    own |= {"q_norm.weight": heads.q_norm.flatten(), "k_norm.weight": heads.k_norm.flatten()}
    kept = {name: tensor for name, tensor in state.items() if name != "q_proj.weight"}
    sizes = {"qk_norm": True, "qk_norm_head_dim": heads.k.shape[1], "qk_norm_key_value_heads": len(heads.k)}
    return (
        {**own, "q_head_proj.weight": state["q_proj.weight"], **kept},
        {**fields, **sizes, "query_bias": query_bias, "key_value_bias": key_value_bias},
    )


def before_norms_of_all(heads: Heads, merged: Heads, seen: Statistics, partition: list[list[int]]) -> Heads:
    """Return merged heads with an RMSNorm over all of them, from those that begin behind such norms.

    The weights of the new norms are chosen such that each plane before them has the mean power of the planes that it is
    made of, so that the power of a token's heads is about what it was, and its norm divides by about the same number.

    Args:
        heads: the layer's weights, with G key/value heads.
        merged: what became of `behind_norms(heads)`.
        seen: statistics of y and the queries, see `seen_behind`.
        partition: groups of indices of the key/value heads that were merged, some of which may be repeated.
    """
    assert heads.q_norm is not None and heads.k_norm is not None and seen.queries is not None
    rows = heads.k.shape[:2].numel()
    members = torch.tensor(partition, device=heads.q.device)  # (G', m)
    order = torch.arange(len(heads.q), device=heads.q.device).view(members.numel(), -1)[members.flatten()].flatten()
    keys, values = merged.k[..., :rows], merged.v[..., rows:]  # (G', D, G D)
    second, queries = seen.second[:rows, :rows], seen.queries[order]  # (G D, G D), (H, D, D)
    before = members // (members.numel() // len(heads.k))  # of a head that was repeated, the head
    power, weight = second.diagonal().view_as(heads.k_norm)[before], heads.k_norm[before]  # (G', m, D)
    k_norm = norm_weights((keys @ second * keys).sum(-1), (power / weight.square()).mean(1), heads.planes)
    power = (merged.q @ queries * merged.q).sum(-1)
    q_norm = norm_weights(power, queries.diagonal(dim1=1, dim2=2) / heads.q_norm[order].square(), heads.planes)
    query, query_bias = heads.q_norm[..., None] * heads.q, heads.q_norm * heads.q_bias
    key, key_bias = heads.k_norm[..., None] * heads.k, heads.k_norm * heads.k_bias
    return replace(
        heads,
        q=merged.q @ query[order] / q_norm[..., None],
        q_bias=torch.einsum("hij,hj->hi", merged.q, query_bias[order]) / q_norm,
        k=keys @ key.flatten(0, 1) / k_norm[..., None],
        k_bias=keys @ key_bias.flatten() / k_norm,
        v=values @ heads.v.flatten(0, 1),
        v_bias=values @ heads.v_bias.flatten(),
        o=merged.o,
        o_bias=merged.o_bias,
        q_norm=q_norm,
        k_norm=k_norm,
        biases=(*heads.biases[:2], merged.biases[2]),
    )


def norm_weights(behind: torch.Tensor, before: torch.Tensor, planes: int) -> torch.Tensor:
    """Return weights (heads, D) of a norm, from the power (heads, D) behind it and that wanted before it.

    The two dimensions of a plane get the same weight, and so do all that are not rotated.
    """

    def shared(power: torch.Tensor) -> torch.Tensor:
        pair = (power[:, :planes] + power[:, planes : 2 * planes]) / 2
        rest = power[:, 2 * planes :]
        return torch.cat((pair, pair, rest.mean(1, keepdim=True).expand_as(rest)), dim=1)

    ratio = (shared(behind) / shared(before)).nan_to_num(0.0, 0.0)
    return ratio.clamp(min=1e-8 * ratio.max()).sqrt()
