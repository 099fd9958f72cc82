"""What is known of a layer: statistics of its input, and from them what an error in a key or a value costs its output.

Shapes: E hidden size, H query heads, G key/value heads, D head size, n rotary planes (dimensions i and i + n of a
head), S lags.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from ...configuration_gqa import GQAConfig
from .heads import Heads, norm_rows, plane_rows

# A mean rotation is a mean over lags. This share of its weight follows the attention that was seen on the text; the
# rest is spread over all lags, for texts on which attention differs.
LOOKED_SHARE = 0.9
# Share of the mean eigenvalue that is added to a metric before its root is inverted.
DAMPING = 1e-4
LONGEST_ASSUMED = 2048  # tokens of a row, where there is no text


@dataclass
class Statistics:
    """Statistics of one layer's input, in float64.

    Args:
        second: (E, E) mean of x x^T over the tokens, the first of a document counting more.
        mean: (E,) mean of x likewise.
        lags: (H, S) each head's attention by distance in tokens; a row sums to 1.
        length: tokens of the longest row.
        window: number of tokens that a token attends to; `None` for all before it.
        normed: of a layer with qk_norm the same for its normed keys and its values, 2 G D numbers in place of E.
        queries: (H, D, D) mean of q q^T over the tokens, for queries that are no linear function of x.
    """

    second: torch.Tensor
    mean: torch.Tensor
    lags: torch.Tensor
    length: int
    window: int | None = None
    normed: "Statistics | None" = None
    queries: torch.Tensor | None = None

    @property
    def covariance(self) -> torch.Tensor:
        """The covariance (E, E) of the input."""
        return self.second - torch.outer(self.mean, self.mean)


def windows(config: GQAConfig) -> list[int | None]:
    """Return how many tokens each layer's attention sees; `None` for all that come before."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def blank_statistics(config: GQAConfig, index: int, device: torch.device) -> Statistics:
    """Return the statistics of layer `index` where there is no text."""
    length = min(config.max_position_embeddings, LONGEST_ASSUMED)
    heads = config.per_layer_config[index].num_attention_heads
    return without_data(config.hidden_size, heads, length, device, windows(config)[index])


def without_data(hidden: int, heads: int, length: int, device: torch.device, window: int | None = None) -> Statistics:
    """Return the statistics of unknown inputs: uncorrelated, of mean zero, with attention spread over all lags."""
    second = torch.eye(hidden, dtype=torch.float64, device=device)
    lags = causal_lags(length, window).to(device).expand(heads, -1)
    return Statistics(second, second.new_zeros(hidden), lags, length, window)


def causal_lags(length: int, window: int | None) -> torch.Tensor:
    """Return the share of each lag (S,) among all pairs of a token and one that it attends to."""
    counts = torch.arange(length, 0, -1, dtype=torch.float64)[:window]
    return counts / counts.sum()


def mean_rotation(statistics: Statistics, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return each head's mean of e^{j omega lag} (H, n) for the frequencies omega `inv_freq` (n,)."""
    lags = statistics.lags
    uniform = causal_lags(statistics.length, statistics.window).to(lags.device)
    size, pad = max(len(uniform), lags.shape[1]), torch.nn.functional.pad
    uniform, lags = pad(uniform, (0, size - len(uniform))), pad(lags, (0, size - lags.shape[1]))
    share = (1 - LOOKED_SHARE) * uniform + LOOKED_SHARE * lags  # (H, S)
    angles = torch.outer(torch.arange(size, dtype=torch.float64, device=lags.device), inv_freq)  # (S, n)
    return share.to(torch.complex128) @ torch.polar(torch.ones_like(angles), angles)


@dataclass(frozen=True)
class Moments:
    """Second moments of one layer's queries, keys and values, in float64 or complex128.

    A metric is the matrix M for which an error e of a vector changes the layer's output by the square e^T M e.

    Args:
        mean_key: (G, D) mean of the keys.
        key_rest: (G, D - 2 n, G, D - 2 n) covariance of the key dimensions that are not rotated.
        plane_covariance: (n, G, G) covariance over the heads of the keys' complex planes z_i = x_i + j x_(i + n).
        plane_mean: (n, G) mean of these planes.
        value_covariance: (G, D, G, D) covariance of the values, or their second moments: see `compute_moments`.
        value_offset: (G, D) the values' mean.
        query_metric: (H, D, D) metric of the key that a query head reads: scale^2 T_h E[q q^T].
        key_metric: (G, D, D) the same summed over the query heads that read a key.
        value_metric: (G, D, D) metric of a value: the sum of W_o^T W_o over its query heads.
        plane_weight: (G, n) metric of a complex plane of a key: scale^2 / 2 sum T_h E|q|^2.
        rotation: (H, n) mean of e^{j omega lag} over the lags that a head looks at.
        key_scale: (G,) what brings keys to a mean square of one, as their RMSNorm does; ones without a norm.
        input_covariance: (E, E) of the layer's input.
        input_mean: (E,) of the layer's input.
    """

    mean_key: torch.Tensor
    key_rest: torch.Tensor
    plane_covariance: torch.Tensor
    plane_mean: torch.Tensor
    value_covariance: torch.Tensor
    value_offset: torch.Tensor
    query_metric: torch.Tensor
    key_metric: torch.Tensor
    value_metric: torch.Tensor
    plane_weight: torch.Tensor
    rotation: torch.Tensor
    key_scale: torch.Tensor
    input_covariance: torch.Tensor
    input_mean: torch.Tensor

    @cached_property
    def value_root(self) -> torch.Tensor:
        """The square root (G, D, D) of `value_metric`."""
        return square_root(self.value_metric, DAMPING)

    @cached_property
    def rest_metric(self) -> torch.Tensor:
        """The part (G, D - 2 n, D - 2 n) of `key_metric` for the key dimensions that are not rotated."""
        rotated = 2 * self.plane_weight.shape[1]
        return self.key_metric[:, rotated:, rotated:]

    @cached_property
    def rest_root(self) -> torch.Tensor:
        """The square root of `rest_metric`."""
        return square_root(self.rest_metric, DAMPING)


def compute_moments(heads: Heads, statistics: Statistics, weighted: bool = True, centered: bool = True) -> Moments:
    """Compute the moments of a layer's queries, keys and values.

    Args:
        heads: the layer's weights.
        statistics: of its input.
        weighted: whether keys count by the queries that read them; else all count alike.
        centered: whether the values' mean is left out of `value_covariance`, because an output bias takes it up.
    """
    covariance, mean = statistics.covariance, statistics.mean
    n, groups = heads.planes, heads.groups
    k, k_bias, key_scale = norm_rows(heads.k, heads.k_bias, heads.k_norm, covariance, mean)
    if statistics.queries is not None:
        query_second = statistics.queries  # (H, D, D)
    else:
        q, q_bias, _ = norm_rows(heads.q, heads.q_bias, heads.q_norm, covariance, mean)
        query_mean = q @ mean + q_bias  # (H, D)
        query_second = q @ covariance @ q.mT + query_mean[:, :, None] * query_mean[:, None, :]  # (H, D, D)
    value_covariance = _covariance(heads.v, covariance)
    value_offset = heads.v @ mean + heads.v_bias
    value_metric = heads.o.mT @ heads.o  # (H, D, D)
    own = value_covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)[heads.key_heads]  # (H, D, D)
    if not centered:
        value_covariance = value_covariance + torch.einsum("ai,bj->aibj", value_offset, value_offset)
    importance = (value_metric * own).sum((1, 2))  # T_h, (H,)
    if not weighted:
        importance = torch.ones_like(importance)
        query_second = torch.eye(query_second.shape[1], dtype=mean.dtype, device=mean.device).expand_as(query_second)
    query_metric = heads.scaling**2 * importance[:, None, None] * query_second  # (H, D, D)
    power = query_metric.diagonal(dim1=1, dim2=2).unflatten(0, (-1, groups)).sum(1)  # (G, D)
    # Of a plane, cosine and sine scale both query and key.
    plane_weight = heads.rotary_scaling**4 * (power[:, :n] + power[:, n : 2 * n]) / 2  # (G, n)
    key_covariance, key_mean = _covariance(k, covariance), k @ mean + k_bias
    return Moments(
        mean_key=key_mean,
        key_rest=key_covariance[:, 2 * n :, :, 2 * n :],
        plane_covariance=_plane_covariance(key_covariance, n),
        plane_mean=plane_rows(key_mean, n).mT,
        value_covariance=value_covariance,
        value_offset=value_offset,
        query_metric=query_metric,
        key_metric=query_metric.unflatten(0, (len(key_mean), -1)).sum(1),
        value_metric=value_metric.unflatten(0, (-1, groups)).sum(1),
        plane_weight=plane_weight + 1e-6 * plane_weight.mean(),  # a plane that nothing reads must not divide by zero
        rotation=mean_rotation(statistics, heads.inv_freq),
        key_scale=key_scale,
        input_covariance=covariance,
        input_mean=mean,
    )


def _covariance(weight: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return the covariance (G, D, G, D) of what `weight` (G, D, E) makes of the input."""
    rows = weight.flatten(0, 1)
    return (rows @ covariance @ rows.mT).reshape(*weight.shape[:2], *weight.shape[:2])


def _plane_covariance(covariance: torch.Tensor, n: int) -> torch.Tensor:
    """Return the covariance (n, G, G) of complex planes from that of their dimensions (G, D, G, D)."""
    aa, bb, ab = covariance[:, :n, :, :n], covariance[:, n : 2 * n, :, n : 2 * n], covariance[:, :n, :, n : 2 * n]
    aa, bb, ab = (x.diagonal(dim1=1, dim2=3).permute(2, 0, 1) for x in (aa, bb, ab))  # (n, G, G)
    return torch.complex(aa + bb, ab.mT - ab)


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return left^T right (..., a, b) in float64, summed over the tokens of (..., tokens, a) and (..., tokens, b).

    It is multiplied and summed in float32. Where the model computes in bfloat16 (`dtype`), a CPU that has products of
    bfloat16 takes these, three to six times as fast: they are exact where the factors are what the model gave, and of
    factors that are weighted since, 8 bits count.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        return (left.mT.float() @ right.float()).double()
    finally:
        settings.fp32_precision = before


def square_root(matrix: torch.Tensor, damping: float = 0.0) -> torch.Tensor:
    """Return the square root of symmetric positive matrices (..., m, m).

    Args:
        matrix: the matrices.
        damping: this share of the mean eigenvalue is added to every eigenvalue first.
    """
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0) + damping * values.mean(-1, keepdim=True)
    return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
