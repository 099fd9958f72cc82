"""Second moments of a layer's queries, keys and values, and what an error in them costs in the layer's output.

Shapes: E hidden size, H query heads, G key/value heads, D head size, n rotary planes
(dimensions i and i + n of a head).
"""

from dataclasses import dataclass

import torch

from .calibration import Statistics, mean_rotation
from .matrices import Heads


@dataclass(frozen=True)
class Moments:
    """Of one layer, all float64 or complex128.

    Args:
        key_covariance, value_covariance: (G, D, G, D) and key_mean: (G, D), all under the chosen metric.
        value_offset: (G, D) the values' mean over the text itself.
        query_metric, value_metric: (H, D, D) and (G, D, D), the squared error of the layer's output for one of the key
            that a query head reads, scale^2 T_h E[q q^T], and of a value, the sum of W_o^T W_o over its query heads.
        plane_weight: (G, n), the same for a complex plane of a key: scale^2 / 2 sum T_h E|q|^2.
        rotation: (H, n) mean of e^{j omega lag} over the lags that a head looks at.
        key_scale: (G,) what brings keys to a mean square of one, as their RMSNorm does; ones without a norm.
        input_covariance: (E, E), under the metric; input_mean: (E,), over the text itself.
    """

    key_covariance: torch.Tensor
    key_mean: torch.Tensor
    value_covariance: torch.Tensor
    value_offset: torch.Tensor
    query_metric: torch.Tensor
    value_metric: torch.Tensor
    plane_weight: torch.Tensor
    rotation: torch.Tensor
    key_scale: torch.Tensor
    input_covariance: torch.Tensor
    input_mean: torch.Tensor

    @property
    def planes(self) -> int:
        return self.plane_weight.shape[1]

    @property
    def key_metric(self) -> torch.Tensor:
        """The squared error of the layer's output for one of a key (G, D, D)."""
        return self.query_metric.unflatten(0, (len(self.key_mean), -1)).sum(1)

    def plane_covariance(self) -> torch.Tensor:
        """Covariance (n, G, G) of the keys' complex planes z_i = x_i + j x_{i+n} over the heads."""
        n = self.planes
        covariance = self.key_covariance
        aa, bb, ab = covariance[:, :n, :, :n], covariance[:, n : 2 * n, :, n : 2 * n], covariance[:, :n, :, n : 2 * n]
        aa, bb, ab = (x.diagonal(dim1=1, dim2=3).permute(2, 0, 1) for x in (aa, bb, ab))  # (n, G, G)
        return torch.complex(aa + bb, ab.mT - ab)

    def plane_mean(self) -> torch.Tensor:
        """Mean (n, G) of the keys' complex planes."""
        n = self.planes
        return torch.complex(self.key_mean[:, :n], self.key_mean[:, n : 2 * n]).mT


def plane_rows(weight: torch.Tensor, planes: int) -> torch.Tensor:
    """The complex rows (heads, n, ...) of the rotary planes of `weight` (heads, D, ...)."""
    return torch.complex(weight[:, :planes], weight[:, planes : 2 * planes])


def compute_moments(
    heads: Heads, statistics: Statistics, metric: str = "full", weighted: bool = True, centered: bool = True
) -> Moments:
    """Moments of a layer under `Statistics.metric(metric)`.

    Args:
        weighted: keys count as the queries that read them do, instead of all alike.
        centered: an output bias takes up the values' mean; else it belongs to what must be kept of them.
    """
    covariance, mean = statistics.metric(metric)
    (q, q_bias, _), (k, k_bias, key_scale) = (
        _normed(heads.q, heads.q_bias, heads.q_norm, covariance, mean),
        _normed(heads.k, heads.k_bias, heads.k_norm, covariance, mean),
    )
    query_mean = q @ mean + q_bias  # (H, D)
    query_second = q @ covariance @ q.mT + query_mean[:, :, None] * query_mean[:, None, :]  # (H, D, D)
    value_covariance = _covariance(heads.v, covariance)
    value_mean = heads.v @ mean + heads.v_bias
    value_metric = heads.o.mT @ heads.o  # (H, D, D)
    own = value_covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)[heads.key_heads]  # (H, D, D)
    if not centered:
        value_covariance = value_covariance + torch.einsum("ai,bj->aibj", value_mean, value_mean)
    importance = (value_metric * own).sum((1, 2)) if weighted else torch.ones_like(query_mean[:, 0])  # T_h, (H,)
    if not weighted:
        query_second = torch.eye(q.shape[1], dtype=q.dtype, device=q.device).expand_as(query_second)
    query_metric = heads.scaling**2 * importance[:, None, None] * query_second  # (H, D, D)
    n, power = heads.planes, query_metric.diagonal(dim1=1, dim2=2).unflatten(0, (-1, heads.groups)).sum(1)  # (G, D)
    # Of a plane, cosine and sine scale both query and key.
    plane_weight = heads.rotary_scaling**4 * (power[:, :n] + power[:, n : 2 * n]) / 2  # (G, n)
    return Moments(
        key_covariance=_covariance(k, covariance),
        key_mean=k @ mean + k_bias,
        value_covariance=value_covariance,
        value_offset=heads.v @ statistics.mean + heads.v_bias,
        query_metric=query_metric,
        value_metric=value_metric.unflatten(0, (-1, heads.groups)).sum(1),
        plane_weight=plane_weight + 1e-6 * plane_weight.mean(),  # a plane that nothing reads must not divide by zero
        rotation=mean_rotation(statistics, heads.inv_freq),
        key_scale=key_scale,
        input_covariance=covariance,
        input_mean=statistics.mean,
    )


def _covariance(weight: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Covariance (G, D, G, D) of what `weight` (G, D, E) makes of the input."""
    rows = weight.flatten(0, 1)
    return (rows @ covariance @ rows.mT).reshape(*weight.shape[:2], *weight.shape[:2])


def _normed(weight, bias, norm, covariance, mean):
    """Rows (heads, D, E) and bias as the RMSNorm on a head scales them on average, and the scale (heads,) before the
    norm's own weights; as they are without a norm."""
    if norm is None:
        return weight, bias, torch.ones_like(bias[:, 0])
    power = (weight @ covariance * weight).sum((1, 2)) + (weight @ mean + bias).pow(2).sum(1)
    scale = (weight.shape[1] / power).sqrt()
    factor = norm * scale[:, None]  # (heads, D)
    return weight * factor[..., None], bias * factor, scale
