"""Transform coding of a cache: for what each layer caches a basis of its own, and bits for the channels in it.

An error e in a number that is cached costs the predictions KL(source || rounded) = e^T F e / 2 to second order, where F
is their Fisher information: the mean of g g^T for the gradient g of the log-probability of a token that is drawn from
the predictions. The basis is that in which the numbers are uncorrelated and F is the identity, so a channel matters as
much as it varies. Bits go to where one more saves most, over all channels of all layers (reverse water-filling; Cover
and Thomas, Elements of Information Theory, section 10.3.3). KVTC (2511.01815) does this for storage, by the error of
the cache itself.

Shapes: B rows, T tokens, G heads of size D, n tokens that count, C = G D channels, E hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from modeling_gqa_cli.errors import UserError

from ..cache_formats import STEPS, CodedFormat, orthogonal_matrix
from ..common.batches import MODEL_INPUTS, Batch, evaluating
from ..common.progress import Progress
from ..configuration_checks import changing_rope
from ..configuration_gqa import GQAConfig
from ..costs.counts import POSITION_BYTES, CostedModel
from ..layers import rotate, select_frequencies
from ..modeling_gqa import ATTENTION_CLASSES, GQAForCausalLM
from .divergence import not_finite, predicted_positions
from .layers.moments import product, square_root
from .losses import tokens_at_once

# Squared error of rounded normal numbers of variance 1, by bits. What is dropped errs alike in all tokens, which adds
# up: on SmolLM2-135M anything from 3 to 6 in place of 1 lost about the same.
DISTORTION = {0: 4.0, 2: 0.119, 3: 0.0374, 4: 0.0115, 6: 0.00104, 8: 0.0001}
# Share of its mean eigenvalue that is added to F, because texts differ.
DAMPING = 0.1
# Channels that get the same bits; codes of a few bits come in eights.
STEP = 8


class Statistics(NamedTuple):
    """What text shows of one tensor that a layer caches, over the tokens that count.

    Args:
        covariance: (C, C) of the numbers, less their mean.
        information: (C, C), F of the predictions per token.
    """

    covariance: torch.Tensor
    information: torch.Tensor


class Coding(NamedTuple):
    """The basis of one tensor that a layer caches.

    Args:
        encoder: (C, C); numbers x become x @ encoder, whose channels matter less and less.
        variances: (C,), what each channel costs where it is dropped, falling.
    """

    encoder: torch.Tensor
    variances: torch.Tensor


@contextmanager
def intercepted(model: GQAForCausalLM, change: Callable[[int, Sequence[torch.Tensor]], Any]) -> Iterator[None]:
    """Let each layer attend to what `change` returns for its index and the two tensors (B, G, T, D) that it caches."""

    def through(index: int, attend_to: Any) -> Any:
        def attend(hidden: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *rest: Any, **options: Any) -> Any:
            return attend_to(hidden, *change(index, (first, second)), *rest, **options)

        return attend

    attentions: list[Any] = [layer.self_attn for layer in model.model.layers]
    for index, attention in enumerate(attentions):
        attention.attend_to = through(index, attention.attend_to)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.attend_to


@contextmanager
def watched(model: GQAForCausalLM, differentiable: bool = False) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Yield a dict that holds, after a forward pass without a cache, what each layer would cache, by its index.

    These are two tensors (B, G, T, D). With `differentiable` two zeros follow that have been added to them, whose
    gradients are those of the two.
    """
    seen: dict[int, list[torch.Tensor]] = {}

    def watch(index: int, pair: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        seen[index] = [x.detach() for x in pair]
        if not differentiable:
            return pair
        zeros = [torch.zeros_like(x, requires_grad=True) for x in pair]
        seen[index] += zeros
        return [x + zero for x, zero in zip(pair, zeros, strict=True)]

    with intercepted(model, watch):
        yield seen


def positions(batch: Batch) -> torch.Tensor:
    """The position (B, T) of each token in its document."""
    ids = batch["input_ids"]
    return batch.get("position_ids", torch.arange(ids.shape[1], device=ids.device)).expand(ids.shape)


@torch.no_grad()
def cache_means(
    model: GQAForCausalLM, batches: Iterable[Batch], skipped: int = 4, progress: Progress = iter
) -> list[torch.Tensor]:
    """Return each layer's mean of its keys before rotation and its values, of MLA its latent and rotary key.

    The first tokens of each document, which a quantized cache keeps as they are, do not count: their keys are unlike
    others.

    Args:
        model: any model of this package.
        batches: `input_ids` (B, T) of blocks without padding, and their `position_ids` where documents are packed.
        skipped: number of first tokens.
        progress: wraps the iteration over the batches.

    Returns:
        For each layer G D numbers of the first cached tensor and then those of the second, float32.

    Raises:
        UserError: no document has more than `skipped` tokens, or the activations are not finite.
    """
    sums: list[Any] = [0.0] * len(model.model.layers)
    tokens = 0
    with evaluating(model), watched(model) as seen:
        for batch in progress(batches):
            inputs = {name: x.to(model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            model.model(**inputs, use_cache=False)
            places = positions(inputs)
            kept = places >= skipped
            tokens += int(kept.sum())
            for index, rotation in enumerate(_rotations(model, places)):
                rotary, held = model.model.layers[index].self_attn.rotary_place, seen[index]
                cos, sin = rotation
                norm = cos.square() + sin.square()  # above one where the rotation scales, as YaRN's
                held[rotary] = rotate(held[rotary], cos / norm, -sin / norm)
                means = [x.transpose(1, 2)[kept].float().sum(0).flatten() for x in held]  # (n, G, D) to (G D,)
                sums[index] = sums[index] + torch.cat(means)
    means = [x / max(tokens, 1) for x in sums]
    _check_text(model, tokens, means)
    return means


def _check_text(model: GQAForCausalLM, tokens: int, found: Iterable[torch.Tensor]) -> None:
    if not tokens:
        raise UserError("no document of the text goes beyond the first tokens, which are not rounded")
    if not all(x.isfinite().all() for x in found):
        raise not_finite("the activations on the text", model.dtype)


def _rotations(model: GQAForCausalLM, places: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each layer's cosine and sine (B, T, P) at `places` (B, T)."""
    like = model.model.embed_tokens.weight[:1]
    by_size = {size: rotary(like, places) for size, rotary in model.model.rotary_emb.items()}
    for layer, size in zip(model.model.layers, model.model.rotary_sizes, strict=True):
        yield select_frequencies(by_size[size], layer.self_attn.frequency_indices)


def cache_codings(
    model: GQAForCausalLM,
    batches: Iterable[Batch],
    means: Sequence[torch.Tensor],
    skipped: int = 4,
    progress: Progress = iter,
) -> list[tuple[Coding, Coding]]:
    """Return the coding of both tensors that each layer caches; arguments and errors as in `cache_statistics`."""
    found = cache_statistics(model, batches, means, skipped, progress)
    return [(coding(*first), coding(*second)) for first, second in found]


def cache_statistics(
    model: GQAForCausalLM,
    batches: Iterable[Batch],
    means: Sequence[torch.Tensor],
    skipped: int = 4,
    progress: Progress = iter,
) -> list[tuple[Statistics, Statistics]]:
    """Return the statistics of both tensors that each layer caches, on one draw from the predictions.

    Args:
        model: any model of this package.
        batches: as for `cache_means`; 8,192 tokens or more.
        means: as `cache_means` returns them.
        skipped: number of first tokens of a document that do not count.
        progress: wraps the iteration over the batches.

    Raises:
        UserError: no document has more than `skipped` tokens, or activations or gradients are not finite.
    """
    takes_out = changing_rope(model.config) is None  # a constant out of what is rotated
    sums: list[Any] = [[0.0] * 4 for _ in model.model.layers]  # of x^T x and g^T g, for both tensors
    required = [x for x in model.parameters() if x.requires_grad]
    tokens, generator = 0, torch.Generator(model.device).manual_seed(0)
    try:
        model.requires_grad_(False)
        with evaluating(model), watched(model, differentiable=True) as seen:
            for batch in progress(batches):
                for row in range(len(batch["input_ids"])):  # one at a time, for memory
                    own = {name: x[row : row + 1] if len(x) > 1 else x for name, x in batch.items()}
                    inputs = {name: x.to(model.device) for name, x in own.items() if name in MODEL_INPUTS}
                    with torch.enable_grad():
                        states = model.model(**inputs, use_cache=False).last_hidden_state
                    states.backward(_drawn_gradient(model, states.detach(), predicted_positions(inputs), generator))
                    kept = positions(inputs) >= skipped
                    tokens += int(kept.sum())
                    for index, rotation in enumerate(_rotations(model, positions(inputs))):
                        attention = model.model.layers[index].self_attn
                        turned = rotation if takes_out else None
                        _add(sums[index], seen[index], attention, means[index], turned, kept)
                    seen.clear()
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
    _check_text(model, tokens, (x for layer in sums for x in layer))
    most = max(len(x) for layer in sums for x in layer)
    if tokens < most or not any(layer[place].any() for layer in sums for place in (1, 3)):
        raise UserError(
            f"the text has {tokens} tokens beyond the first {skipped} of their documents, and {most} are the least for "
            "what this model's layers cache: give more --calibration-tokens, or longer documents"
        )
    found = []
    for index, layer in enumerate(sums):
        pair = [Statistics(layer[place] / tokens, layer[place + 1] / tokens) for place in (0, 2)]
        rotary = model.model.layers[index].self_attn.rotary_place
        pair[rotary] = Statistics(*(over_positions(model, index, x) for x in pair[rotary]))
        found.append((pair[0], pair[1]))
    return found


@torch.no_grad()
def _drawn_gradient(
    model: GQAForCausalLM, states: torch.Tensor, predicted: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gradients of -log p(y) by the last hidden states (1, T, E), for tokens y drawn from the predictions p.

    Zero where `predicted` (1, T - 1) says that nothing is predicted.
    """
    head = model.lm_head
    parts = []
    for part in states[0].split(tokens_at_once(states.device, head.out_features)):
        chances = head(part).float().softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator)
        chances.scatter_add_(1, drawn, -torch.ones_like(drawn, dtype=chances.dtype))
        parts.append(chances.to(head.weight.dtype) @ head.weight)
    gradient = torch.cat(parts)[None]
    return gradient * torch.nn.functional.pad(predicted.to(gradient), (0, 1)).unsqueeze(-1)


def _add(
    sums: list[Any], seen: list[torch.Tensor], attention: Any, mean: torch.Tensor, rotation: Any, kept: torch.Tensor
) -> None:
    """Add one row of what `watched` saw of a layer to its sums of products; without `rotation` keys have no mean."""
    means = mean.split([heads * size for heads, size in attention.cached_shapes])
    for place, (x, zero, part) in enumerate(zip(seen[:2], seen[2:], means, strict=True)):
        part = part.view(x.shape[1], 1, x.shape[3]).to(x).expand(1, -1, x.shape[2], -1)
        if place == attention.rotary_place:
            part = torch.zeros_like(part) if rotation is None else rotate(part, *rotation)
        rows = [y.transpose(1, 2)[kept].flatten(1) for y in (x - part, zero.grad)]  # (n, C)
        for number, y in enumerate(rows):
            sums[2 * place + number] = sums[2 * place + number] + product(y, y, torch.float32)


def over_positions(model: GQAForCausalLM, index: int, matrix: torch.Tensor) -> torch.Tensor:
    """Return the mean of R M R^T for a matrix M (C, C) of what layer `index` caches rotated, over rotations R.

    These are by 0 to `max_position_embeddings` tokens. Rotated keys of late positions vary as early ones do that are
    turned further, and a basis from short documents alone would not hold there.
    """
    attention: Any = model.model.layers[index].self_attn
    frequencies = model.model.rotary_emb[model.model.rotary_sizes[index]].original_inv_freq.double()
    if attention.frequency_indices is not None:
        frequencies = frequencies[attention.frequency_indices]
    heads, size = attention.cached_shapes[attention.rotary_place]
    planes, longest = len(frequencies), model.config.max_position_embeddings
    # In the complex numbers z and conj(z) of each plane a rotation multiplies by e^(j w t) and e^(-j w t).
    eye = torch.eye(planes, dtype=torch.complex128, device=matrix.device) / 2**0.5
    unitary = torch.eye(size, dtype=torch.complex128, device=matrix.device)
    unitary[: 2 * planes, : 2 * planes] = torch.cat((torch.cat((eye, 1j * eye), 1), torch.cat((eye, -1j * eye), 1)))
    unitary = torch.block_diag(*[unitary] * heads)
    speeds = torch.cat((frequencies, -frequencies, frequencies.new_zeros(size - 2 * planes))).repeat(heads)
    angles = (speeds[:, None] - speeds) * longest
    kept = torch.polar(torch.sinc(angles / (2 * torch.pi)), angles / 2)  # the mean of e^(j w t) for t from 0 on
    turned = unitary @ matrix.to(unitary.dtype) @ unitary.mH
    return (unitary.mH @ (turned * kept.to(turned.device)) @ unitary).real


def coding(covariance: torch.Tensor, information: torch.Tensor) -> Coding:
    """Return the coding for what `Statistics` has."""
    size = len(covariance)
    if not (covariance.diagonal().sum() > 0 and information.diagonal().sum() > 0):  # a layer that does nothing
        same = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
        return Coding(same, covariance.new_zeros(size))
    root = square_root(information, DAMPING)
    variances, vectors = torch.linalg.eigh(root @ covariance @ root)
    variances, vectors = variances.flip(0).clamp(min=0), vectors.flip(1)
    # Numbers stay about as large as they were, so that any dtype has them.
    scale = (covariance.diagonal().sum() / variances.sum()).sqrt()
    return Coding(root @ vectors * scale, variances)


def choose_bits(
    model: GQAForCausalLM, codings: Sequence[tuple[Coding, Coding]], budget: int, dtype: torch.dtype | None = None
) -> list[Any]:
    """Return `cache_quantization["layers"]` with which the cache takes at most `budget` bytes per token.

    `dtype` is that of numbers which are not rounded, the model's by default.

    Raises:
        UserError: the budget is too small. One that allows 8 bits for all channels gets these.
    """
    costed = CostedModel(model.config)
    rounded = [index for index, layer in enumerate(costed.layers) if layer.window is None]
    dtype = dtype or model.dtype
    kept = (layer.token_bytes(dtype) for layer in costed.layers if layer.window is not None)
    fixed = sum(kept) + POSITION_BYTES
    pieces = [piece for index in rounded for own in codings[index] for piece in own.variances.split(STEP)]
    lost = torch.stack([piece.sum().cpu() for piece in pieces])  # of a piece that is dropped
    bits, factors = torch.tensor(list(DISTORTION)), torch.tensor(list(DISTORTION.values()), dtype=lost.dtype)
    eights = torch.tensor([-(-len(piece) // 8) for piece in pieces])

    def chosen(price: float) -> tuple[int, list[Any]]:
        """Bytes and layers where each piece has the bits with which its loss and the price of its bytes are least."""
        which = (lost[:, None] * factors + price * eights[:, None] * bits).argmin(1)
        places, layers, total = iter(bits[which].tolist()), list[Any]([None] * len(codings)), fixed
        for index in rounded:
            attention: Any = model.model.layers[index].self_attn
            layers[index] = {}
            for name, own in zip(attention.bits_fields, codings[index], strict=True):
                blocks: list[list[int]] = []
                for piece in own.variances.split(STEP):
                    found = max(next(places), 0 if blocks else 2)  # nothing is dropped whole
                    if blocks and blocks[-1][1] == found:
                        blocks[-1][0] += len(piece)
                    else:
                        blocks.append([len(piece), found])
                layers[index][name] = blocks = [block for block in blocks if block[0]]  # MLA may have no rotary key
                total += CodedFormat(tuple((size, n) for size, n in blocks)).row_bytes if blocks else 0
        return total, layers

    require_bytes(model.config, budget, dtype)
    low, high = 0.0, 8 * float(lost.max()) + 1e-30
    smallest = chosen(high)[1]
    most, largest = chosen(low)
    if most <= budget:
        return largest
    for _ in range(60):
        price = (low * high) ** 0.5 if low else high / 1e3
        total, layers = chosen(price)
        if total <= budget:
            high, smallest = price, layers
        else:
            low = price
    return smallest


def least_bytes(config: GQAConfig, dtype: torch.dtype) -> int:
    """Return the bytes per token below which `choose_bits` cannot go."""
    least = POSITION_BYTES
    for layer in CostedModel(config).layers:
        if layer.window is not None:
            least += layer.token_bytes(dtype)
            continue
        for size in ATTENTION_CLASSES[layer.config.attention_kind].cache_sizes(layer.config):
            if size:
                least += CodedFormat(((min(size, STEP), 2), (max(size - STEP, 0), 0))).row_bytes
    return least


def require_bytes(config: GQAConfig, budget: int, dtype: torch.dtype) -> None:
    """Raise `UserError` where `budget` bytes per token are too small for `choose_bits`."""
    if (least := least_bytes(config, dtype)) > budget:
        raise UserError(f"a cache of {budget:,} bytes per token is too small: the least is {least:,}")


def folded(own: Coding, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the encoder (C, C) for blocks of bits: each block is mixed, and steps between levels are alike in all."""
    size = len(own.variances)
    mixing = torch.eye(size, dtype=own.encoder.dtype, device=own.encoder.device)
    widths, start = own.variances.new_ones(size), 0
    for channels, bits in blocks:
        block = slice(start, start + channels)
        if bits:
            mixing[block, block] = orthogonal_matrix(channels).to(mixing)
            widths[block] = STEPS[bits] * own.variances[block].mean().sqrt()
        start += channels
    kept = sum(channels for channels, bits in blocks if bits)
    widths[:kept] = (widths[:kept] / widths[:kept].max().clamp(min=1e-30)).clamp(min=1e-3)
    return own.encoder @ mixing / widths
