"""How the key/value heads of a group become one.

A group of m heads is merged by an encoder and a decoder. Per rotary plane the new key is the sum of encoder * z over
the heads, and head g's key is restored as decoder_g times it (complex numbers commute with rotation). Values, and key
dimensions that are not rotated, use real matrices. Decoders are multiplied into the query and output weights.

Sources: mean pooling (Ainslie et al., 2305.13245); `lowrank` keeps the leading subspace of the group in the metric of
the layer's output (low-rank key/value compression: 2406.07056, whitening: 2403.07378).

Shapes: m heads of a group, D head size, n rotary planes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .moments import Moments


@dataclass(frozen=True)
class Group:
    """What merging a group of m key/value heads has to keep.

    Args:
        planes: (n, m, m) second moments of the keys' complex planes.
        plane_weight: (n, m) their metric.
        values, value_metric, value_root: (m, D, m, D), (m, D, D) and (m, D, D) covariance of the values, their metric
            and its square root.
        rest, rest_metric, rest_root: the same of the D - 2 n key dimensions that are not rotated; often there are none.
    """

    planes: torch.Tensor
    plane_weight: torch.Tensor
    values: torch.Tensor
    value_metric: torch.Tensor
    value_root: torch.Tensor
    rest: torch.Tensor
    rest_metric: torch.Tensor
    rest_root: torch.Tensor

    @classmethod
    def of(cls, moments: Moments, heads: list[int]) -> "Group":
        """Return the group of these key/value heads of a layer."""
        mean, varies = moments.plane_mean[:, heads], 1 - moments.rotation.mean(0).abs().pow(2)
        # The keys' mean is rotated by the lag, which varies: only the share of it that varies can be lost.
        constant = varies[:, None, None] * mean[:, :, None] * mean[:, None, :].conj()
        return cls(
            planes=moments.plane_covariance[:, heads][:, :, heads] + constant,
            plane_weight=moments.plane_weight[heads].mT,
            values=moments.value_covariance[heads][:, :, heads],
            value_metric=moments.value_metric[heads],
            value_root=moments.value_root[heads],
            rest=moments.key_rest[heads][:, :, heads],
            rest_metric=moments.rest_metric[heads],
            rest_root=moments.rest_root[heads],
        )

    def lowrank_loss(self) -> float:
        """Return what the `lowrank` merge of this group loses: the eigenvalues that it drops."""
        planes = weigh_planes(self.planes, self.plane_weight.sqrt())
        loss = torch.linalg.eigvalsh(planes)[:, :-1].sum()
        for covariance, root in ((self.values, self.value_root), (self.rest, self.rest_root)):
            count, size = covariance.shape[:2]
            weighed = weigh(covariance, root).reshape(count * size, count * size)
            loss = loss + torch.linalg.eigvalsh(weighed)[: (count - 1) * size].sum()
        return float(loss)


@dataclass(frozen=True)
class Merge:
    """How a group's m heads become one.

    Args:
        keys, key_decoder: (n, m), complex.
        rest, rest_decoder: (D - 2 n, m, D - 2 n) and (m, D - 2 n, D - 2 n), for key dimensions that are not rotated.
        values, value_decoder: (D, m, D) and (m, D, D).
    """

    keys: torch.Tensor
    key_decoder: torch.Tensor
    rest: torch.Tensor
    rest_decoder: torch.Tensor
    values: torch.Tensor
    value_decoder: torch.Tensor


# -- methods: Group -> Merge


def mean(group: Group) -> Merge:
    """Average the heads in equal shares; all queries read the average as it is."""
    count, size = group.values.shape[:2]
    share = group.values.new_full((count,), 1 / count)
    identity = torch.eye(size, dtype=share.dtype, device=share.device)
    unrotated = group.rest.shape[1]
    rest = identity[:unrotated, :unrotated]
    planes = share.expand(len(group.planes), -1).to(torch.complex128)
    return Merge(
        planes,
        torch.ones_like(planes),
        torch.einsum("m,ij->imj", share, rest),
        rest.expand(count, -1, -1),
        torch.einsum("m,ij->imj", share, identity),
        identity.expand(count, -1, -1),
    )


def align_phases(covariance: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Return phases (n, m) that turn the heads of `covariance` (n, m, m) towards their mean, found by iteration."""
    phases = torch.ones(covariance.shape[:2], dtype=torch.complex128, device=covariance.device)
    for _ in range(rounds):
        towards = torch.einsum("nij,nj->ni", covariance, phases.conj())  # E[z_i conj(mean)]
        phases = torch.where(towards.abs() > 0, torch.polar(torch.ones_like(towards.abs()), -towards.angle()), phases)
    return phases


def lowrank(group: Group) -> Merge:
    """Keep each plane's leading component and the values' leading subspace in the metric of the layer's output."""
    keys, key_decoder = leading_component(group.planes, group.plane_weight)
    values, value_decoder = leading_subspace(group.values, group.value_root)
    rest, rest_decoder = leading_subspace(group.rest, group.rest_root)
    return Merge(keys, key_decoder, rest, rest_decoder, values, value_decoder)


MERGES: dict[str, Callable[[Group], Merge]] = {
    "mean": mean,
    "lowrank": lowrank,
}


def weigh_planes(covariance: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return the covariance (n, m, m) of complex planes after each is multiplied by its factor in `root` (n, m)."""
    return root[:, :, None] * covariance * root[:, None, :]


def weigh(covariance: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return the covariance (m, D, m, D) of vectors after each is multiplied by its block of `root` (m, D, D)."""
    return torch.einsum("aij,ajbk,blk->aibl", root, covariance, root)


def leading_component(covariance: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return encoder and decoder (n, m) of the complex component that loses least of `covariance` (n, m, m).

    The loss under the metric `weight` (n, m) is the sum of the other eigenvalues. The component gets the heads' mean
    power, so that it quantizes and trains as they do.
    """
    root = weight.sqrt()
    values, vectors = torch.linalg.eigh(weigh_planes(covariance, root))
    leading = vectors[..., -1]
    power = covariance.diagonal(dim1=1, dim2=2).real.mean(-1)
    factor = (power / values[:, -1].clamp(min=torch.finfo(values.dtype).tiny)).sqrt()[:, None]
    return leading.conj() * root * factor, leading / root / factor


def leading_subspace(covariance: torch.Tensor, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return encoder (D, m, D) and decoder (m, D, D) of the D components that lose least of `covariance` (m, D, m, D).

    The loss is taken under a block-diagonal metric, whose square root is `root` (m, D, D). Every component gets the
    heads' mean power.
    """
    count, size = covariance.shape[:2]
    if not size:
        return covariance.new_zeros(0, count, 0), root
    values, vectors = torch.linalg.eigh(weigh(covariance, root).reshape(count * size, -1))
    leading = vectors[:, count * size - size :].unflatten(0, (count, size))  # (m, D, D)
    power = covariance.reshape(count * size, -1).diagonal().mean()
    kept = values[count * size - size :]
    factor = (power / kept.clamp(min=1e-12 * kept[-1])).sqrt()
    encoder = torch.einsum("mic,mij->cmj", leading, root) * factor[:, None, None]
    return encoder, torch.linalg.solve(root, leading) / factor


def with_norm(method: Callable[[Group], Merge]) -> Callable[[Group], Merge]:
    """Return `method` for keys behind an RMSNorm on each head: it merges the values, and keys are turned and averaged.

    Of the maps that merging uses, only turning a plane by a phase commutes with such a norm.
    """

    def merge(group: Group) -> Merge:
        phases, averaged = align_phases(group.planes), mean(group)
        return replace(
            method(group),
            keys=phases / len(group.values),
            key_decoder=phases.conj(),
            rest=averaged.rest,
            rest_decoder=averaged.rest_decoder,
        )

    return merge


def merging_error(group: Group, merge: Merge) -> float:
    """Return the mean squared error of a group's keys and values after `merge`, in the metric of the layer's output.

    For `lowrank` it is the sum of the eigenvalues that are dropped, `Group.lowrank_loss`.
    """
    kept = torch.einsum("na,nb->nab", merge.key_decoder, merge.keys)  # (n, m, m)
    lost = torch.eye(len(group.values), device=kept.device) - kept
    keys = lost @ group.planes @ lost.mH
    error = (keys.diagonal(dim1=1, dim2=2).real * group.plane_weight).sum()
    for covariance, metric, encoder, decoder in (
        (group.values, group.value_metric, merge.values, merge.value_decoder),
        (group.rest, group.rest_metric, merge.rest, merge.rest_decoder),
    ):
        count, size = covariance.shape[:2]
        lost = torch.eye(count * size, dtype=metric.dtype, device=metric.device).view(count, size, count, size)
        lost = lost - torch.einsum("aij,jbk->aibk", decoder, encoder)
        left = torch.einsum("aibk,bkcl,djcl->aidj", lost, covariance, lost)
        error = error + torch.einsum("aiaj,aij->", left, metric)
    return float(error)
