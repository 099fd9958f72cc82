"""How the key/value heads of a group become one, by any of several methods.

A group of m heads is merged by an encoder and a decoder: per rotary plane the new key is the sum of encoder * z over
the heads and head g's key is restored as decoder_g times it (complex numbers commute with rotation); values, and key
dimensions that are not rotated, use real matrices. Decoders go into the queries and the output. Baselines: mean pooling
(Ainslie et al., 2305.13245), orthogonal alignment before it (2412.20677); `lowrank` keeps the leading subspace of the
group in the metric of the layer's output (low-rank key/value compression: 2406.07056, whitening: 2403.07378).

Shapes: E hidden size, H query heads, G key/value heads, m heads of a group, D head size, n rotary planes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .calibration import square_root
from .moments import Moments

# Share of the mean eigenvalue that is added to a metric before its root is inverted.
DAMPING = 1e-4


@dataclass(frozen=True)
class Merge:
    """How a group's m heads become one: `keys` and `key_decoder` (n, m) complex; `rest` (D - 2 n, m, D - 2 n) and
    `rest_decoder` (m, D - 2 n, D - 2 n) for unrotated key dimensions; `values` (D, m, D), `value_decoder` (m, D, D)."""

    keys: torch.Tensor
    key_decoder: torch.Tensor
    rest: torch.Tensor
    rest_decoder: torch.Tensor
    values: torch.Tensor
    value_decoder: torch.Tensor


# -- methods: (moments, the group's heads) -> Merge


def choose(moments: Moments, group: list[int], share: torch.Tensor) -> Merge:
    """The average of the heads in shares (m,), read by all queries as it is."""
    size, n = moments.key_mean.shape[1], moments.planes
    identity = torch.eye(size, dtype=share.dtype, device=share.device)
    rest = identity[: size - 2 * n, : size - 2 * n]
    planes = share.expand(n, -1).to(torch.complex128)
    return Merge(
        planes,
        torch.ones_like(planes),
        torch.einsum("m,ij->imj", share, rest),
        rest.expand(len(group), -1, -1),
        torch.einsum("m,ij->imj", share, identity),
        identity.expand(len(group), -1, -1),
    )


def mean(moments: Moments, group: list[int]) -> Merge:
    return choose(moments, group, moments.key_mean.new_full((len(group),), 1 / len(group)))


def first(moments: Moments, group: list[int]) -> Merge:
    share = moments.key_mean.new_zeros(len(group))
    share[0] = 1
    return choose(moments, group, share)


def procrustes(moments: Moments, group: list[int]) -> Merge:
    """The mean of the heads after each is turned towards it: planes by a phase, values by an orthogonal matrix."""
    count = len(group)
    phases = align_phases(key_planes(moments, group))
    values, rest = (align(covariance) for covariance, _ in real_parts(moments, group))
    return Merge(
        phases / count,
        phases.conj(),
        rest.transpose(0, 1) / count,
        rest.mT,
        values.transpose(0, 1) / count,
        values.mT,
    )


def align_phases(covariance: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Phases (n, m) that turn the heads of `covariance` (n, m, m) towards their mean, found by iteration."""
    phases = torch.ones(covariance.shape[:2], dtype=torch.complex128, device=covariance.device)
    for _ in range(rounds):
        towards = torch.einsum("nij,nj->ni", covariance, phases.conj())  # E[z_i conj(mean)]
        phases = torch.where(towards.abs() > 0, torch.polar(torch.ones_like(towards.abs()), -towards.angle()), phases)
    return phases


def align(covariance: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Orthogonal matrices (m, D, D) that turn vectors of `covariance` (m, D, m, D) towards their mean, by iteration."""
    count, size = covariance.shape[:2]
    turns = torch.eye(size, dtype=covariance.dtype, device=covariance.device).repeat(count, 1, 1)
    for _ in range(rounds if size else 0):
        for j in range(count):
            towards = torch.einsum("iab,ibc->ac", turns, covariance[:, :, j])  # E[sum of the turned, v_j^T]
            u, _, vh = torch.linalg.svd(towards)
            turns[j] = u @ vh
    return turns


def lowrank(moments: Moments, group: list[int]) -> Merge:
    """The leading component of each plane and the leading subspace of the values, in the output's metric."""
    keys, key_decoder = leading_component(key_planes(moments, group), moments.plane_weight[group].mT)
    (values, value_decoder), (rest, rest_decoder) = (leading_subspace(*part) for part in real_parts(moments, group))
    return Merge(keys, key_decoder, rest, rest_decoder, values, value_decoder)


MERGES: dict[str, Callable[[Moments, list[int]], Merge]] = {
    "mean": mean,
    "first": first,
    "random": mean,  # shapes only: keys and values are drawn afterwards
    "procrustes": procrustes,
    "lowrank": lowrank,
}


def leading_component(covariance: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoder and decoder (n, m) of one complex component that lose least of `covariance` (n, m, m) under `weight`
    (n, m); the loss is the sum of the other eigenvalues. The component gets the heads' mean power."""
    root = weight.sqrt()
    values, vectors = torch.linalg.eigh(weigh_planes(covariance, root))
    leading = vectors[..., -1]
    power = covariance.diagonal(dim1=1, dim2=2).real.mean(-1)
    factor = (power / values[:, -1].clamp(min=torch.finfo(values.dtype).tiny)).sqrt()[:, None]
    return leading.conj() * root * factor, leading / root / factor


def leading_subspace(covariance: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoder (D, m, D) and decoder (m, D, D) of D components that lose least of `covariance` (m, D, m, D) under the
    block-diagonal `metric` (m, D, D); every component gets the heads' mean power."""
    count, size = covariance.shape[:2]
    if not size:
        return covariance.new_zeros(0, count, 0), metric
    root = square_root(metric, DAMPING)
    values, vectors = torch.linalg.eigh(weigh(covariance, root).reshape(count * size, -1))
    leading = vectors[:, count * size - size :].unflatten(0, (count, size))  # (m, D, D)
    power = covariance.reshape(count * size, -1).diagonal().mean()
    kept = values[count * size - size :]
    factor = (power / kept.clamp(min=1e-12 * kept[-1])).sqrt()
    encoder = torch.einsum("mic,mij->cmj", leading, root) * factor[:, None, None]
    return encoder, torch.linalg.solve(root, leading) / factor


def weigh_planes(covariance: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """`covariance` (n, m, m) of what the factors `root` (n, m) make of each head's planes."""
    return root[:, :, None] * covariance * root[:, None, :]


def weigh(covariance: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """`covariance` (m, D, m, D) of what the blocks of `root` (m, D, D) make of each head."""
    return torch.einsum("aij,ajbk,blk->aibl", root, covariance, root)


def real_parts(moments: Moments, group: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Covariance (m, D, m, D) and metric (m, D, D) of a group's values, and of the dimensions of its keys that are not
    rotated, of which there may be none."""
    rotated = 2 * moments.planes
    values = moments.value_covariance, moments.value_metric
    rest = moments.key_covariance[:, rotated:, :, rotated:], moments.key_metric[:, rotated:, rotated:]
    return [(covariance[group][:, :, group], metric[group]) for covariance, metric in (values, rest)]


def key_planes(moments: Moments, group: list[int]) -> torch.Tensor:
    """What a group's planes (n, m, m) must keep: their covariance, and of their mean what rotation does not cancel."""
    mean, varies = moments.plane_mean()[:, group], 1 - moments.rotation.mean(0).abs().pow(2)
    constant = varies[:, None, None] * mean[:, :, None] * mean[:, None, :].conj()
    return moments.plane_covariance()[:, group][:, :, group] + constant


def merge_with_norm(merge_group: Callable[[Moments, list[int]], Merge]) -> Callable[[Moments, list[int]], Merge]:
    """The method's values, but keys that an RMSNorm on each head lets through: turned by phases, then averaged."""

    def merge(moments: Moments, group: list[int]) -> Merge:
        phases, average = align_phases(key_planes(moments, group)), mean(moments, group)
        values = merge_group(moments, group)
        return replace(
            values,
            keys=phases / len(group),
            key_decoder=phases.conj(),
            rest=average.rest,
            rest_decoder=average.rest_decoder,
        )

    return merge


def merging_error(moments: Moments, group: list[int], merge: Merge) -> float:
    """The mean squared error of a group's keys and values after `merge`, in the metric of the layer's output; for
    `lowrank` that is the sum of the eigenvalues it drops."""
    kept = torch.einsum("na,nb->nab", merge.key_decoder, merge.keys)  # (n, m, m)
    lost = torch.eye(len(group), device=kept.device) - kept
    keys = lost @ key_planes(moments, group) @ lost.mH
    error = (keys.diagonal(dim1=1, dim2=2).real * moments.plane_weight[group].mT).sum()
    codes = (merge.values, merge.value_decoder), (merge.rest, merge.rest_decoder)
    for (covariance, metric), (encoder, decoder) in zip(real_parts(moments, group), codes, strict=True):
        count, size = covariance.shape[:2]
        lost = torch.eye(count * size, dtype=metric.dtype, device=metric.device).view(count, size, count, size)
        lost = lost - torch.einsum("aij,jbk->aibk", decoder, encoder)
        left = torch.einsum("aibk,bkcl,djcl->aidj", lost, covariance, lost)
        error = error + torch.einsum("aiaj,aij->", left, metric)
    return float(error)


def merging_loss(moments: Moments, group: list[int]) -> float:
    """`merging_error` of `lowrank`, without its merge: the eigenvalues that it drops."""
    planes = weigh_planes(key_planes(moments, group), moments.plane_weight[group].mT.sqrt())
    loss = torch.linalg.eigvalsh(planes)[:, :-1].sum()
    for covariance, metric in real_parts(moments, group):
        count, size = covariance.shape[:2]
        weighed = weigh(covariance, square_root(metric, DAMPING)).reshape(count * size, count * size)
        loss = loss + torch.linalg.eigvalsh(weighed)[: (count - 1) * size].sum()
    return float(loss)
