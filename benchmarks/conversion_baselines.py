"""Two simpler ways to MLA, to compare with: they share the layout of the result and nothing of how it is found."""

import torch

from modeling_gqa.conversion.layers.heads import Heads, read_heads
from modeling_gqa.conversion.layers.latent import Latent, RotaryKey, leading_vectors, unrotated_keys, write_latent
from modeling_gqa.conversion.layers.moments import Statistics


def mean_key(heads: Heads, statistics: Statistics, rank: int, size: int) -> tuple[RotaryKey, Latent]:
    """The heads' mean key, rotated, and a truncated SVD of the remaining key and the value weights; no data."""
    count, planes = len(heads.k), size // 2
    if planes != heads.planes:
        raise ValueError(f"the mean key has {2 * heads.planes} rotary dimensions, not {size}")
    share = torch.full((planes, count), 1 / count, dtype=torch.complex128)
    rotary = RotaryKey(torch.arange(planes), share, torch.ones_like(share), 0.0)
    rows = torch.cat((unrotated_keys(heads, rotary), heads.v), dim=1)  # (G, N + V, E)
    _, vectors = leading_vectors(rows.flatten(0, 1), torch.eye(rows.shape[2], dtype=rows.dtype), rank)
    return rotary, plain_latent(rows, vectors, heads)


def real_rotation(heads: Heads, statistics: Statistics, rank: int, size: int) -> tuple[RotaryKey, Latent]:
    """Real rotations of each frequency across heads that gather variance in few of them, then PCA of the remaining
    keys, scaled to the values' power, and the values (the recipe of TransMLA, 2502.07864, sections 4.2 and 4.3)."""
    n, count, second = heads.planes, len(heads.k), statistics.second
    real, imaginary = heads.k[:, :n].transpose(0, 1), heads.k[:, n : 2 * n].transpose(0, 1)  # (n, G, E)
    values, vectors = torch.linalg.eigh(real @ second @ real.mT + imaginary @ second @ imaginary.mT)
    kept = values.flatten().argsort(descending=True)[: size // 2].sort().values
    turn = vectors.mT.flatten(0, 1)[kept].to(torch.complex128)  # (C, G), real
    rotary = RotaryKey(kept // count, turn, turn, 0.0)
    keys = unrotated_keys(heads, rotary)  # (G, N, E)
    power = [torch.einsum("gde,ef,gdf->", rows, second, rows) for rows in (keys, heads.v)]
    balance = (power[1] / power[0]).sqrt()
    rows = torch.cat((keys * balance, heads.v), dim=1)
    _, vectors = leading_vectors(rows.flatten(0, 1), second, rank)
    latent = plain_latent(rows, vectors, heads)
    latent.restore[:, : keys.shape[1]] /= balance
    return rotary, latent


def plain_latent(rows: torch.Tensor, vectors: torch.Tensor, heads: Heads) -> Latent:
    """The orthogonal projection of `rows` (G, N + V, E) on `vectors` (G (N + V), R)."""
    restore = vectors.unflatten(0, (len(rows), -1)).clone()  # (G, N + V, R)
    return Latent(vectors.T @ rows.flatten(0, 1), restore, torch.zeros_like(heads.v[:, :, 0]))


def convert_baseline(model, index: int, find, statistics: Statistics, rank: int, size: int) -> tuple[dict, dict]:
    """The parameters and configuration fields of layer `index` as MLA by `find`, one of the functions above."""
    heads = read_heads(model, index)
    rotary, latent = find(heads, statistics, rank, size)
    turn = torch.eye(heads.q.shape[1], dtype=heads.q.dtype).expand(len(heads.q), -1, -1)
    return write_latent(heads, rotary, latent, turn * heads.rotary_scaling**2)
