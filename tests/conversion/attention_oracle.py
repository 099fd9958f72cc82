"""Attention written from its formulas in float64, and what tests of conversions share.

Shapes: T tokens, E hidden size, H query heads, G key/value heads, D head size, n rotary planes (i and i + n).
"""

import math
from dataclasses import dataclass

import torch
from small_models import make_batch, make_model

from benchmarks.layerwise import collect
from modeling_gqa.conversion.layers.moments import LOOKED_SHARE, Statistics

BIASES = {"query_bias": True, "key_value_bias": True, "output_bias": False}  # Qwen2's
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6}  # 4 planes and 6 more dimensions
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 0.7,
}
CALIBRATION = [make_batch(6, 24, seed=seed) for seed in range(10, 14)]
# Enough that what is fitted to three quarters of it helps on the last.
LONG_CALIBRATION = [make_batch(16, 24, seed=seed) for seed in range(20, 32)]


def random_model(name: str, seed: int = 0, **fields):
    """A small model whose biases are not zero and whose norms are not one, as they are where training begins."""
    model = make_model(name, seed, **fields)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def in_dtype(model, dtype: torch.dtype):
    """`model` with its parameters in another dtype, and its frequencies as they were."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def logits(model, **arguments) -> torch.Tensor:
    """Logits (tokens, vocabulary) of the tokens that are not padding."""
    batch = make_batch(padding="left", **arguments)
    return model(**batch).logits[batch["attention_mask"].bool()]


@torch.no_grad()
def layer_output(model, index: int, x: torch.Tensor) -> torch.Tensor:
    """Attention output (B, T, E) of a layer alone for its input `x` (B, T, E)."""
    positions = torch.arange(x.shape[1])[None]
    rotation = model.model.rotary_emb[model.model.rotary_sizes[index]](x, positions)
    return model.model.layers[index].self_attn(x, position_embeddings=rotation)[0]


def inputs(rows: int = 2, length: int = 13, hidden: int = 66, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, length, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value expected."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def collected(model, batches) -> list[Statistics]:
    """The statistics of all layers."""
    return [statistics for _, statistics in collect(model, batches)]


def layer_inputs(model, batches) -> list[torch.Tensor]:
    """What each layer's attention reads (tokens, E) of all tokens that are not padding, in float64."""
    found: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    kept: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(args[0][kept[-1]].double()), with_kwargs=True
        )
        for layer, seen in zip(model.model.layers, found, strict=True)
    ]
    for batch in batches:
        kept.append(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool())
        model.model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(seen) for seen in found]


@dataclass
class Grouped:
    """Weights of a grouped layer: q (H, D, E), k and v (G, D, E), o (H, E, D), biases without E, omega (n,), and norms
    (D,) of queries and keys where it has them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_bias: torch.Tensor
    k_bias: torch.Tensor
    v_bias: torch.Tensor
    o_bias: torch.Tensor
    omega: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def planes(self) -> int:
        return len(self.omega)

    @property
    def shared(self) -> list[int]:
        """The key/value head that each query head reads."""
        return [h // (len(self.q) // len(self.k)) for h in range(len(self.q))]

    def complex_planes(self, x: torch.Tensor) -> torch.Tensor:
        """Complex planes (heads, n, ...) of `x` (heads, D, ...)."""
        return torch.complex(x[:, : self.planes], x[:, self.planes : 2 * self.planes])

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Queries, keys or values ("q", "k", "v") of `x` (T, E): (heads, T, D)."""
        found = torch.einsum("hde,te->htd", getattr(self, name), x) + getattr(self, f"{name}_bias")[:, None]
        if (norm := getattr(self, f"{name}_norm", None)) is not None:
            found = norm * found / (found.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return found

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Attention (H, T, T) within `x` (T, E): scores are Re(q conj(k) e^{j omega (t - s)}) summed over planes."""
        time = torch.arange(len(x), dtype=torch.float64)
        lag, found = time[:, None] - time, []
        queries, keys = self.heads(x, "q"), self.heads(x, "k")
        zq, zk = (self.complex_planes(y.mT) for y in (queries, keys))  # (heads, n, T)
        turned = torch.exp(1j * self.omega[:, None, None] * lag)  # (n, T, T)
        for h, g in enumerate(self.shared):
            score = torch.einsum("nt,ns,nts->ts", zq[h], zk[g].conj(), turned).real
            score = score + queries[h, :, 2 * self.planes :] @ keys[g, :, 2 * self.planes :].T
            found.append((score / math.sqrt(self.q.shape[1])).masked_fill(lag < 0, -math.inf).softmax(-1))
        return torch.stack(found)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Output (T, E) for `x` (T, E)."""
        mixed = self.weights(x) @ self.heads(x, "v")[self.shared]  # (H, T, D)
        return torch.einsum("htd,hed->te", mixed, self.o) + self.o_bias


def grouped(model, index: int) -> Grouped:
    """The weights of a grouped layer of standard frequencies, read for `Grouped`."""
    layer = model.config.per_layer_config[index]
    attention = model.model.layers[index].self_attn
    size, partial = layer.head_dim, model.config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotary = int(size * partial)

    def rows(linear):
        bias = linear.bias if linear.bias is not None else torch.zeros(len(linear.weight))
        return (x.detach().double().clone().unflatten(0, (-1, size)) for x in (linear.weight, bias))

    (q, q_bias), (k, k_bias), (v, v_bias) = map(rows, (attention.q_proj, attention.k_proj, attention.v_proj))
    weight, bias = attention.o_proj.weight.detach().double().clone(), attention.o_proj.bias
    # The model's frequencies are computed in float32.
    omega = (1 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, rotary, 2).float() / rotary)).double()
    return Grouped(
        q,
        k,
        v,
        weight.unflatten(1, (-1, size)).movedim(1, 0),
        q_bias,
        k_bias,
        v_bias,
        torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.detach().double().clone(),
        omega,
        *(norm if norm is None else norm.weight.detach().double() for norm in (attention.q_norm, attention.k_norm)),
    )


@torch.no_grad()
def write(layer: Grouped, model, index: int):
    """Put weights back into a grouped layer; biases only where it has them."""
    attention = model.model.layers[index].self_attn
    for name in "qkv":
        linear = getattr(attention, f"{name}_proj")
        linear.weight.copy_(getattr(layer, name).flatten(0, 1))
        if linear.bias is not None:
            linear.bias.copy_(getattr(layer, f"{name}_bias").flatten())
    attention.o_proj.weight.copy_(layer.o.movedim(0, 1).flatten(1))
    if attention.o_proj.bias is not None:
        attention.o_proj.bias.copy_(layer.o_bias)


def change_gauge(layer: Grouped, planes: torch.Tensor, values: torch.Tensor, rest: torch.Tensor | None = None):
    """The same function: key planes times `planes` (G, n) complex, queries divided by their conjugate; unrotated key
    dimensions by `rest` (G, D - 2 n, D - 2 n), values by `values` (G, D, D), what reads them by the inverses."""
    n, shared = layer.planes, layer.shared
    if rest is None:
        rest = torch.eye(layer.k.shape[1] - 2 * n, dtype=torch.float64).expand(len(layer.k), -1, -1)

    def changed(x, factor, matrix):
        z = layer.complex_planes(x) * (factor if x.ndim == 2 else factor[..., None])
        other = torch.einsum("gij,gj...->gi...", matrix, x[:, 2 * n :])
        return torch.cat((z.real, z.imag, other), dim=1)

    reading = (1 / planes.conj()[shared], torch.linalg.inv(rest)[shared].mT)
    return Grouped(
        *(changed(layer.q, *reading), changed(layer.k, planes, rest), values @ layer.v),
        layer.o @ torch.linalg.inv(values)[shared],
        *(changed(layer.q_bias, *reading), changed(layer.k_bias, planes, rest)),
        torch.einsum("gij,gj->gi", values, layer.v_bias),
        layer.o_bias,
        layer.omega,
    )


def random_gauge(layer: Grouped, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of `change_gauge`: phases and scales of planes, and matrices that are no rotations."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, size, n = len(layer.k), layer.k.shape[1], layer.planes
    planes = torch.polar((0.5 * draw(heads, n)).exp(), 3 * draw(heads, n))

    def invertible(width):
        turn = torch.linalg.qr(draw(heads, width, width)).Q
        return turn * (0.5 * draw(heads, 1, width)).exp()

    return planes, invertible(size), invertible(size - 2 * n)


def mean_rotation(layer: Grouped, rows: list[torch.Tensor]) -> torch.Tensor:
    """Mean of e^{j omega lag} (n,) over heads: mostly where they look in `rows`, the rest over all causal pairs."""
    length = len(rows[0])
    lag = torch.arange(length)[:, None] - torch.arange(length)
    turned = torch.exp(1j * layer.omega[:, None, None] * lag)  # (n, T, T)
    uniform = torch.ones(length, length, dtype=torch.float64).tril()
    seen = torch.stack([layer.weights(x) for x in rows]).sum(0).mean(0)  # (T, T)
    parts = ((1 - LOOKED_SHARE, uniform), (LOOKED_SHARE, seen))
    return torch.stack([part * (turned * share / share.sum()).sum((1, 2)) for part, share in parts]).sum(0)


def covariance(x: torch.Tensor, centered: bool = True) -> torch.Tensor:
    """E[x^H x] of the samples (N, m), real or complex: entry (i, j) is E[x_i conj(x_j)]."""
    x = x - x.mean(0) if centered else x
    return x.T @ x.conj() / len(x)


def metrics(layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Errors in units of the output's: of keys (H, D, D) and values (H, D, D) as each query head reads them, and of
    the planes of keys (H, n)."""
    queries, values = layer.heads(x, "q"), layer.heads(x, "v")
    read = layer.o.mT @ layer.o  # (H, D, D)
    heard = torch.stack([(read[h] * covariance(values[g])).sum() for h, g in enumerate(layer.shared)])  # T_h
    scale = layer.q.shape[1] ** -0.5
    keys = torch.stack([covariance(q, centered=False) for q in queries]) * (scale**2 * heard)[:, None, None]
    power = layer.complex_planes(queries.mT).abs().square().mean(-1)  # (H, n)
    return keys, read, scale**2 / 2 * heard[:, None] * power
