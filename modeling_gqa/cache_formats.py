"""Numbers of a few bits, packed into bytes: what a quantized cache stores of one token and head.

Channels are divided into blocks that share a scale. Before rounding, the numbers of a block are mixed by an orthogonal
matrix, which spreads large channels over all of them (QuaRot, 2404.00456). Blocks of different bits are of a basis that
the layer has of its own, in which all heads stand together and the blocks are mixed already.

Shapes: C channels of a head, N bytes of a token's row; leading dimensions are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .compatibility import is_tracing

# Bits of a number: 0 drops a block, 16 keeps it as bfloat16, "fp8" is float8_e4m3fn without a scale.
FORMATS: tuple[int | str, ...] = (0, 2, 3, 4, 6, 8, 16, "fp8")
# Widths of the fields, in bits, into which codes are cut, so that fields of one width fill bytes.
FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}
# Shares of the largest number at which the outermost level may lie; of these the least squared error decides. With many
# bits nothing is won by cutting numbers off.
CLIPS, CLIPPED_BITS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 4
# Scales of numbers that are all zero; bfloat16 has it.
TINY = 1e-30
# Smallest and largest value of the options that are numbers. Room for all exact tokens is taken at once.
RANGES = {"q_group_size": (8, 2**24), "exact_tokens": (0, 1024), "residual_length": (0, 2**31)}
# Fields of `CacheQuantization` with the bits of one of the tensors that a kind caches, and the buffers of an attention
# layer that hold the basis of this tensor.
BASES = {"key_bits": "key_basis", "value_bits": "value_basis", "latent_bits": "latent_basis", "rope_bits": "rope_basis"}
CACHE_BUFFERS = ("cache_mean", *BASES.values())  # which a quantized cache alone uses
# Mixing matrices that have been used, by formats, dtype and device.
_MATRICES: dict[tuple, torch.Tensor] = {}
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Levels and scales of a run of blocks, see `RowFormat.levels`.
Levels = tuple[torch.Tensor | None, torch.Tensor | None]


class Run(NamedTuple):
    """Neighbouring blocks of one size and format."""

    bits: int | str
    blocks: int
    size: int


@dataclass(frozen=True)
class RowFormat:
    """How the C channels of one head and token are stored: scales, then whole numbers, then codes.

    Args:
        bits: of each block, one of `FORMATS`.
        sizes: channels of each block.
        own_basis: whether the channels are those of all heads together, in the layer's own basis.

    Attributes:
        runs: neighbouring blocks that are alike.
        row_bytes: bytes N of a token's row, an even number.

    Example:
        ```python
        import torch
        from modeling_gqa.cache_formats import RowFormat

        stored = RowFormat.of(heads=2, size=128, bits=4, block=64)
        rows = stored.pack(torch.randn(2, 10, 128))  # (2, 10, 68), uint8
        print(stored.unpack(rows, torch.float32).shape, stored.row_bytes)  # (2, 10, 128) and 68
        ```
    """

    bits: tuple[int | str, ...]
    sizes: tuple[int, ...]
    own_basis: bool = False
    runs: tuple[Run, ...] = field(init=False, compare=False, repr=False)
    row_bytes: int = field(init=False, compare=False)

    def __post_init__(self):
        # Not `cached_property`: vLLM pickles the configuration's class, and in Python 3.11 that would hold a lock.
        runs: list[Run] = []
        for bits, size in zip(self.bits, self.sizes, strict=True):
            if runs and (runs[-1].bits, runs[-1].size) == (bits, size):
                runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + 1)
            else:
                runs.append(Run(bits, 1, size))
        total = sum(run.blocks * (2 * _has_scale(run.bits) + _code_bytes(run)) for run in runs)
        object.__setattr__(self, "runs", tuple(runs))
        object.__setattr__(self, "row_bytes", total + total % 2)

    @classmethod
    def of(cls, heads: int, size: int, bits: Any, block: int | None) -> "RowFormat":
        """The format of `heads` heads of `size` channels, for `bits` as in `CacheQuantization`.

        One number of bits is for blocks of `block` channels of each head, of which the last may be smaller.

        Raises:
            ValueError: `bits` is a list whose blocks have not the channels of all heads together, or keep nothing.
        """
        if not isinstance(bits, list | tuple):
            sizes = tuple(min(block or size, size - start) for start in range(0, size, block or size))
            form = cls((bits,) * len(sizes), sizes)
        else:
            form = cls(tuple(each[1] for each in bits), tuple(each[0] for each in bits), own_basis=True)
            if sum(form.sizes) != heads * size:
                raise ValueError(f"has blocks of {sum(form.sizes)} channels in all, and there are {heads * size}")
        if not form.row_bytes:
            raise ValueError("keeps no bit of any block: give one block 2 bits or more")
        return form

    def mixing_matrix(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """The orthogonal symmetric matrix (C, C) that mixes each block that has a scale; `None` where none has."""
        if self.own_basis or not any(map(_has_scale, self.bits)):
            return None
        return _mixing_matrix(self.bits, self.sizes, dtype, device)

    # -- rows

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Round `x` (..., C), which is in the basis of the cache, and return rows (..., N) of bytes.

        A level lies at each half step, -(2^bits - 1) / 2 to (2^bits - 1) / 2 scales. Scales are bfloat16.
        """
        scales, codes = [], []
        of_runs = x.float().split([run.blocks * run.size for run in self.runs], dim=-1)
        for run, channels in zip(self.runs, of_runs, strict=True):
            part = channels.unflatten(-1, (run.blocks, run.size))
            if run.bits == 16:
                codes.append(part.bfloat16().view(torch.uint8).flatten(-2))
            elif run.bits == "fp8":
                bounded = part.clamp(-LARGEST_FP8, LARGEST_FP8)
                codes.append(bounded.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2))
            elif run.bits:
                scale, code = _rounded(part, int(run.bits))
                scales.append(scale.squeeze(-1).bfloat16().view(torch.uint8))
                codes.append(_pack_codes(code, int(run.bits)).flatten(-2))
        rows = [*scales, *codes] or [x.new_zeros(*x.shape[:-1], 0, dtype=torch.uint8)]
        missing = self.row_bytes - sum(part.shape[-1] for part in rows)
        return torch.cat([*rows, rows[0].new_zeros(*x.shape[:-1], missing)], dim=-1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers (..., C) that `rows` (..., N) hold, in the basis of the cache."""
        parts = []
        for run, (levels, scales) in zip(self.runs, self.levels(rows, dtype), strict=True):
            if levels is None:
                parts.append(rows.new_zeros(*rows.shape[:-1], run.blocks * run.size, dtype=dtype))
            else:
                parts.append((levels if scales is None else (levels + 0.5) * scales).mT)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def levels(self, rows: torch.Tensor, dtype: torch.dtype) -> list["Levels"]:
        """Return what `rows` (..., n, N) hold, run by run, in new memory; a run of one block is not scaled.

        Tokens come last, so that a byte of many tokens is one stretch of memory: on a CPU operations on a few bytes of
        each token take five to nine times as long.

        Returns:
            Levels (..., channels, n) and scales (..., 1, n): a number is (level + 0.5) scale. Without scales the levels
            are the numbers; without levels, of a run that is dropped, these are zeros.
        """
        first_code = 2 * sum(run.blocks for run in self.runs if _has_scale(run.bits))
        if first_code:
            all_scales = rows[..., :first_code].view(torch.bfloat16).to(dtype).mT  # (..., blocks, n)
        codes = rows[..., first_code:].mT.contiguous()  # (..., bytes, n)
        start, scale, found = 0, 0, list[Levels]()
        for run in self.runs:
            if run.bits == 0:
                found.append((None, None))
                continue
            stop, scales = start + run.blocks * _code_bytes(run), None
            stored = codes[..., start:stop, :].unflatten(-2, (run.blocks, _code_bytes(run)))
            levels = rows.new_empty(*rows.shape[:-2], run.blocks, run.size, rows.shape[-2], dtype=dtype)
            if run.bits == 16:
                pairs = stored.unflatten(-2, (run.size, 2)).movedim(-2, -1).contiguous()
                levels.copy_(pairs.view(torch.bfloat16).squeeze(-1))
            elif run.bits == "fp8":
                levels.copy_(stored.view(torch.float8_e4m3fn))
            else:
                _unpack_codes(stored.view(torch.int8), int(run.bits), levels)
                scales = all_scales[..., scale : scale + run.blocks, :]
                scale += run.blocks
                if run.blocks > 1:
                    levels.add_(0.5).mul_(scales.unsqueeze(-2))
                    scales = None
            found.append((levels.flatten(-3, -2), scales))
            start = stop
        return found


class Tile:
    """The numbers of n tokens as they come from rows.

    What has one scale for a token is multiplied before it is scaled, because there are fewer products than numbers.

    Args:
        levels: as `RowFormat.levels` returns them, of rows (B, G, n, N).
        sizes: channels of each of them.
    """

    def __init__(self, levels: Sequence["Levels"], sizes: Sequence[int]):
        self.levels, self.sizes = levels, sizes

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """Products of `x` (B, G, M, C) with each token, (B, G, M, n), in at least float32."""
        dtype, found = torch.promote_types(x.dtype, torch.float32), []
        for (levels, scales), part in zip(self.levels, x.split(self.sizes, -1), strict=True):
            if levels is None:
                continue
            product = _product(part.to(levels.dtype), levels).to(dtype)
            if scales is not None:
                product = (product + 0.5 * part.sum(-1, keepdim=True, dtype=dtype)) * scales
            found.append(product)
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """The sums of all tokens by `weights` (B, G, M, n): (B, G, M, C), in the dtype of `weights`."""
        found = []
        for (levels, scales), size in zip(self.levels, self.sizes, strict=True):
            if levels is None:
                found.append(weights.new_zeros(*weights.shape[:-1], size))
                continue
            own = weights if scales is None else weights * scales
            part = _product(own.to(levels.dtype), levels.mT).to(weights.dtype)
            found.append(part if scales is None else part + 0.5 * own.sum(-1, keepdim=True))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The matrix products of (B, G, ...); of a single one torch would copy `y` where it is transposed."""
    return (x[0, 0] @ y[0, 0])[None, None] if y.shape[:2].numel() == 1 else x @ y


def _has_scale(bits: int | str) -> bool:
    return bits in FIELDS


def _code_bytes(run: Run) -> int:
    """Bytes of a block's numbers; codes of a few bits come in eights."""
    if run.bits in FIELDS:
        return int(run.bits) * -(-run.size // 8)
    return {0: 0, 16: 2 * run.size, "fp8": run.size}[run.bits]


def _rounded(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (..., 1) and codes (..., size), from 0 to 2^bits - 1, of `x` (..., size)."""
    outermost = (2**bits - 1) / 2
    most = x.abs().amax(-1, keepdim=True)
    best_scale = best_code = least = None
    for clip in CLIPS if bits <= CLIPPED_BITS else CLIPS[:1]:
        scale = (clip * most / outermost).bfloat16().float().clamp(min=TINY)
        code = (x / scale + outermost).round().clamp(0, 2**bits - 1)
        error = ((code - outermost) * scale - x).square().sum(-1, keepdim=True)
        if least is None:
            best_scale, best_code, least = scale, code, error
        else:
            better = error < least
            best_scale, best_code = torch.where(better, scale, best_scale), torch.where(better, code, best_code)
            least = torch.minimum(error, least)
    return best_scale, best_code.to(torch.uint8)


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes (..., bits * size / 8) of `codes` (..., size), which are stored as signed numbers from -2^(bits - 1) on.

    Channels that share a byte lie far from each other.
    """
    codes = torch.nn.functional.pad(codes ^ 2 ** (bits - 1), (0, -codes.shape[-1] % 8))
    packed, low = [], bits
    for width in FIELDS[bits]:
        low -= width
        fields = (codes >> low) & (2**width - 1)
        fields = fields.unflatten(-1, (8 // width, -1))  # (..., fields of a byte, bytes)
        packed.append(sum(fields[..., place, :] << (width * place) for place in range(8 // width)))
    return torch.cat(packed, dim=-1)


def _unpack_codes(stored: torch.Tensor, bits: int, levels: torch.Tensor) -> None:
    """Write to `levels` (..., size, n) the signed numbers in `stored` (..., bytes, n), int8, as `_pack_codes` made them."""
    first, *rest = FIELDS[bits]
    size, boundary = levels.shape[-2], -(-levels.shape[-2] // 8) * first
    parts = _fields(stored[..., :boundary, :], first)
    if rest:
        (width,) = rest
        low = [(stored[..., boundary:, :] >> place) & (2**width - 1) for place in range(0, 8, width)]
        parts = [torch.cat(parts, dim=-2).mul_(2**width).bitwise_or_(torch.cat(low, dim=-2))]
    place = 0
    for part in parts:
        count = min(part.shape[-2], size - place)
        levels[..., place : place + count, :].copy_(part[..., :count, :])
        place += count


def _fields(stored: torch.Tensor, width: int) -> list[torch.Tensor]:
    """The signed fields of bytes, int8, from the lowest on."""
    if width == 8:
        return [stored]
    # A product moves a field to the highest bits, because shifts to the left are slow on a CPU. A shift to the right
    # keeps the sign.
    moved = [stored * 2 ** (8 - place) for place in range(width, 8, width)]
    return [*(field >> (8 - width) for field in moved), stored >> (8 - width)]


def _mixing_matrix(
    bits: tuple[int | str, ...], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Orthogonal (C, C), block by block; a block without a scale is not mixed."""
    key = bits, sizes, dtype, device
    if key in _MATRICES:
        return _MATRICES[key]
    with torch.inference_mode(False):  # the matrix is used in both modes
        blocks = [
            orthogonal_matrix(size) if _has_scale(n) else torch.eye(size, dtype=torch.float64, device="cpu")
            for n, size in zip(bits, sizes, strict=True)
        ]
        matrix = torch.block_diag(*blocks).to(device, dtype)
    if type(matrix) is torch.Tensor and not is_tracing(matrix):  # a stand-in would stay for the whole process
        _MATRICES[key] = matrix
    return matrix


def orthogonal_matrix(size: int) -> torch.Tensor:
    """A symmetric orthogonal matrix whose numbers are about alike: Hadamard's, of an odd factor Hartley's.

    Returns:
        (size, size), float64.
    """
    odd = size // (size & -size)
    places = torch.arange(odd, dtype=torch.float64, device="cpu")
    angles = places.outer(places) * (2 * torch.pi / odd)
    matrix = (angles.cos() + angles.sin()) * odd**-0.5
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu") * 2**-0.5
    while matrix.shape[0] < size:
        matrix = torch.kron(pair, matrix)
    return matrix


@dataclass(frozen=True)
class CacheQuantization:
    """What `GQAConfig.cache_quantization` says; names that transformers' `QuantizedCache` has as well mean the same.

    Args:
        nbits: format of all that is cached, one of `FORMATS`.
        key_bits, value_bits: of keys and values of MHA, MQA and GQA, in place of `nbits`.
        latent_bits, rope_bits: of MLA's latent and its rotary key, in place of `nbits`.
        layers: for each layer `None`, or its own bits in place of all these. There they may be a list of blocks,
            `[[96, 4], [32, 0]]`: channels and bits of each, in a basis that the checkpoint has for the layer, of all
            heads together (`modeling-gqa quantize-cache --cache-share`).
        q_group_size: channels of a block, which are mixed and share a scale; `None`: all of a head, or of the latent.
        exact_tokens: first tokens of each row that are kept as they are, because most attention goes to them
            (StreamingLLM, 2309.17453).
        residual_length: last tokens that are kept as they are.
        means: the checkpoint has a measured mean of what each layer caches (`modeling-gqa quantize-cache`).

    Raises:
        ValueError: a name or a value is unknown.

    Example:
        ```python
        from modeling_gqa.cache_formats import CacheQuantization

        print(CacheQuantization.of({"nbits": 8, "rope_bits": 16}).rope_bits)
        ```
    """

    nbits: Any = 4
    key_bits: Any = None
    value_bits: Any = None
    latent_bits: Any = None
    rope_bits: Any = None
    layers: list[dict[str, Any] | None] | None = None
    q_group_size: int | None = None
    exact_tokens: int = 4
    residual_length: int = 0
    means: bool = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> "CacheQuantization":
        """Check `options` and fill in what they leave out."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ValueError(
                    f"cache_quantization has no option {name!r}: there are {', '.join(cls.__dataclass_fields__)} "
                    "(a 'backend' in cache_config, quanto, hqq or fp8, asks for a cache of transformers' own)"
                )
        found = cls(**options)
        for name in ("nbits", *BASES):
            if getattr(found, name) is not None or name == "nbits":
                _check_bits(f"cache_quantization[{name!r}]", getattr(found, name))
        if not isinstance(found.layers, list | tuple | None):
            raise ValueError("cache_quantization['layers'] must be a list with a dict or None for each layer")
        for index, layer in enumerate(found.layers or ()):
            if layer is not None and not (isinstance(layer, dict) and layer and layer.keys() <= BASES.keys()):
                raise ValueError(f"cache_quantization['layers'][{index}] must be a dict of {', '.join(BASES)}")
            for name, value in (layer or {}).items():
                _check_bits(f"cache_quantization['layers'][{index}][{name!r}]", value, may_be_list=True)
        for name, (least, most) in RANGES.items():
            value = getattr(found, name)
            if value is None and name == "q_group_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                limits = f"from {least} to {most}"
                raise ValueError(f"cache_quantization[{name!r}]={value!r} must be a whole number {limits}")
        if not isinstance(found.means, bool):
            raise ValueError(f"cache_quantization['means']={found.means!r} must be True or False")
        return found

    def of_layer(self, index: int) -> "CacheQuantization":
        """What holds for layer `index`; raises `ValueError` where `layers` does not reach it."""
        if self.layers is None:
            return self
        if index >= len(self.layers):
            raise ValueError(f"cache_quantization['layers'] has {len(self.layers)} entries, and there is layer {index}")
        return replace(self, layers=None, **(self.layers[index] or {}))

    def formats(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> tuple[RowFormat, RowFormat]:
        """Formats of the two tensors that a layer caches.

        Args:
            names: of the fields with their bits, such as "key_bits" and "value_bits".
            shapes: heads of each, and channels of a head.

        Raises:
            ValueError: nothing of a tensor would be kept, or the blocks of a list have not the tensor's channels.
        """
        given = [self.nbits if getattr(self, name) is None else getattr(self, name) for name in names]
        found = []
        for name, shape, bits in zip(names, shapes, given, strict=True):
            try:
                found.append(RowFormat.of(*shape, bits, self.q_group_size))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        return found[0], found[1]


def _check_bits(name: str, value: Any, may_be_list: bool = False) -> None:
    blocks = value if may_be_list and isinstance(value, list | tuple) else [(1, value)]
    for block in blocks:
        if not (isinstance(block, list | tuple) and len(block) == 2):
            raise ValueError(f"{name}={value!r} must be a list of pairs, the channels and the bits of each block")
        channels, bits = block
        if not isinstance(bits, int | str) or isinstance(bits, bool) or bits not in FORMATS:
            known = ", ".join(map(str, FORMATS))
            raise ValueError(f"{name}={value!r} must be one of {known}" + ", or pairs of them" * (blocks is value))
        if not isinstance(channels, int) or isinstance(channels, bool) or channels < 1:
            raise ValueError(f"{name}={value!r} has a block of {channels!r} channels")
