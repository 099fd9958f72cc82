"""Numbers of a few bits, packed into bytes: what a quantized cache stores of one token and head.

Channels are divided into blocks that share a scale. Before rounding, the numbers of a block are mixed by an orthogonal
matrix, which spreads large channels over all of them (QuaRot, 2404.00456). Blocks of different bits are of a basis that
the layer has of its own, in which all heads stand together and the blocks are mixed already.

Shapes: C channels of a head, N bytes of a token's row; leading dimensions are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from .compatibility import is_tracing

# Bits of a number: 16 is bfloat16, "fp8" is float8_e4m3fn without a scale.
FORMATS: tuple[int | str, ...] = (2, 3, 4, 6, 8, 16, "fp8")
# Widths of the fields, in bits, into which codes are cut, so that fields of one width fill bytes.
FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}
# Shares of the largest number at which the outermost level may lie; of these the least squared error decides. With many
# bits nothing is won by cutting numbers off.
CLIPS, CLIPPED_BITS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 4
# Numbers that are rounded at once; of each the candidates for a scale are in memory.
PACKED_AT_ONCE = 2**19
# Scales of numbers that are all zero; bfloat16 has it.
TINY = 1e-30
# Smallest and largest value of the options that are numbers. Room for all exact tokens is taken at once.
RANGES = {"q_group_size": (8, 2**24), "exact_tokens": (0, 1024), "residual_length": (0, 2**31)}
# Fields of `CacheQuantization` with the bits of one of the tensors that a kind caches, and the buffers of an attention
# layer that hold the basis of this tensor.
BASES = {"key_bits": "key_basis", "value_bits": "value_basis", "latent_bits": "latent_basis", "rope_bits": "rope_basis"}
CACHE_BUFFERS = ("cache_mean", *BASES.values())  # which a quantized cache alone uses
# Mixing matrices that have been used, by sizes, dtype and device.
_MATRICES: dict[tuple, torch.Tensor] = {}
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Formats of the blocks of a basis of the layer's own. By bits, the step between levels with which normal numbers of
# variance 1 lose least (Max, Quantizing for minimum distortion, 1960).
STEPS = {2: 0.9957, 3: 0.586, 4: 0.3352, 6: 0.1041, 8: 0.0308}
# Factors of the scale that a token has by its power; of these the least squared error decides.
SPREADS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.12, 1.26, 1.5)


class Levels(NamedTuple):
    """Some channels of n tokens.

    Args:
        levels: (..., channels, n); `None`: all are zero.
        scales: (..., 1, n): a number is (level + 0.5) scale; `None`: the levels are the numbers.
        channels: their number.
    """

    levels: torch.Tensor | None
    scales: torch.Tensor | None
    channels: int


class Rows:
    """How the C channels of one token are stored in bytes: scales, then codes. What both formats share.

    Tokens come last in what is read, so that a byte of many tokens is one stretch of memory: on a CPU operations on a
    few bytes of each token take several times as long.

    Attributes:
        own_basis: whether these are the channels of all heads together, in the layer's own basis.
    """

    own_basis: ClassVar[bool] = False

    @property
    def channels(self) -> int:
        """Their number C."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Bytes N of a token's row, an even number."""
        raise NotImplementedError

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Round `x` (..., n, C), which is in the basis of the cache, and return rows (..., n, N) of bytes.

        A level lies at each half step, -(2^bits - 1) / 2 to (2^bits - 1) / 2 scales. Scales are bfloat16.
        """
        parts = x.split(max(PACKED_AT_ONCE * x.shape[-2] // max(x.numel(), 1), 1), dim=-2)
        packed = [self._pack(part) for part in parts]
        return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-2)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        """`pack` of few tokens."""
        raise NotImplementedError

    def levels(self, rows: torch.Tensor, dtype: torch.dtype) -> list[Levels]:
        """Return what `rows` (..., n, N) hold, in new memory."""
        raise NotImplementedError

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers (..., n, C) that `rows` (..., n, N) hold, in the basis of the cache."""
        parts = []
        for levels, scales, channels in self.levels(rows, dtype):
            if levels is None:
                parts.append(rows.new_zeros(*rows.shape[:-1], channels, dtype=dtype))
            else:
                parts.append((levels if scales is None else (levels + 0.5) * scales).mT)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows (..., N) of bytes."""
        missing = self.row_bytes - sum(part.shape[-1] for part in parts)
        return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], missing)], dim=-1)


@dataclass(frozen=True)
class RowFormat(Rows):
    """The channels of one head in blocks of the same bits, each with a scale.

    Args:
        bits: one of `FORMATS`.
        sizes: channels of each block; all but the last have as many.

    Example:
        ```python
        import torch
        from modeling_gqa.cache_formats import RowFormat

        stored = RowFormat(bits=4, sizes=(64, 64))
        rows = stored.pack(torch.randn(2, 10, 128))  # (2, 10, 68), uint8
        print(stored.unpack(rows, torch.float32).shape, stored.row_bytes)  # (2, 10, 128) and 68
        ```
    """

    bits: int | str
    sizes: tuple[int, ...]

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def row_bytes(self) -> int:
        total = sum(2 * self.scaled + _code_bytes(self.bits, size) for size in self.sizes)
        return total + total % 2

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.bits in FIELDS

    def mixing_matrix(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """The orthogonal symmetric matrix (C, C) that mixes each block; `None` without scales."""
        return _mixing_matrix(self.sizes, dtype, device) if self.scaled else None

    def _runs(self) -> list[tuple[int, int]]:
        """Number and size of the blocks that are alike."""
        return [(self.sizes.count(size), size) for size in dict.fromkeys(self.sizes)]

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        if self.bits == 16:
            return x.bfloat16().view(torch.uint8)
        if self.bits == "fp8":
            x = x.float().clamp(-LARGEST_FP8, LARGEST_FP8)
            return self._joined([x.to(torch.float8_e4m3fn).view(torch.uint8)])
        scales, codes = [], []
        runs = self._runs()
        for (count, size), part in zip(runs, x.float().split([count * size for count, size in runs], -1), strict=True):
            scale, code = _rounded(part.unflatten(-1, (count, size)), int(self.bits))
            scales.append(scale.squeeze(-1).bfloat16().view(torch.uint8))
            codes.append(_pack_codes(code, int(self.bits)).flatten(-2))
        return self._joined([*scales, *codes])

    def levels(self, rows: torch.Tensor, dtype: torch.dtype) -> list[Levels]:
        """As in `Rows`; what has several scales for a token is scaled already."""
        if self.bits == 16:
            return [Levels(rows.view(torch.bfloat16).to(dtype).mT, None, self.channels)]
        if self.bits == "fp8":
            return [Levels(rows[..., : self.channels].view(torch.float8_e4m3fn).to(dtype).mT, None, self.channels)]
        first_code, bits = 2 * len(self.sizes), int(self.bits)
        scales = rows[..., :first_code].view(torch.bfloat16).to(dtype).mT  # (..., blocks, n)
        # Whole bytes need no operations that are slow on a few of them.
        codes = rows[..., first_code:].mT if bits == 8 else rows[..., first_code:].mT.contiguous()  # (..., bytes, n)
        found, start, block = list[Levels](), 0, 0
        for count, size in self._runs():
            stop = start + count * _code_bytes(bits, size)
            stored = codes[..., start:stop, :].unflatten(-2, (count, -1)).view(torch.int8)
            if bits == 8:
                levels = stored[..., :size, :].mT.to(dtype, memory_format=torch.contiguous_format).mT
            else:
                levels = rows.new_empty(*rows.shape[:-2], count, size, rows.shape[-2], dtype=dtype)
                _unpack_codes(stored, bits, levels)
            own = scales[..., block : block + count, :]
            if count > 1:
                levels = (levels + 0.5) * own.unsqueeze(-2)
            found.append(Levels(levels.flatten(-3, -2), own if count == 1 else None, count * size))
            start, block = stop, block + count
        return found


@dataclass(frozen=True)
class CodedFormat(Rows):
    """The channels of all heads in a basis in which levels lie alike, with one scale for a token.

    Args:
        blocks: channels and bits of each, one of `STEPS` or, at the end, 0.

    Raises:
        ValueError: no bit of any block would be kept, or a block that is dropped comes before one that is not.
    """

    blocks: tuple[tuple[int, int], ...]
    own_basis: ClassVar[bool] = True

    def __post_init__(self):
        if not self.kept:
            raise ValueError("keeps no bit of any block: give one block 2 bits or more")
        if self.blocks[: len(self.kept)] != self.kept:
            raise ValueError("has a block of 0 bits before others: these come last")

    @property
    def channels(self) -> int:
        return sum(size for size, _ in self.blocks)

    @property
    def row_bytes(self) -> int:
        total = 2 + sum(_code_bytes(bits, size) for size, bits in self.kept)
        return total + total % 2

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """The blocks that are not dropped."""
        return tuple(block for block in self.blocks if block[1])

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        # The scale is the token's power times one of `SPREADS`.
        sizes = [size for size, _ in self.kept]
        x = x[..., : sum(sizes)].float()
        repeats = torch.tensor(sizes, device=x.device)
        outermost, usual = (
            torch.tensor([of(bits) for _, bits in self.kept], device=x.device).repeat_interleave(repeats)
            for of in (_outermost, STEPS.__getitem__)
        )
        power = (x * usual).square().mean(-1, keepdim=True).sqrt()
        scale, code = _nearest(x, power * torch.tensor(SPREADS, device=x.device), outermost)
        parts = code.split(sizes, -1)
        codes = [_pack_codes(part, bits) for part, (_, bits) in zip(parts, self.kept, strict=True)]
        return self._joined([scale.bfloat16().view(torch.uint8), *codes])

    def levels(self, rows: torch.Tensor, dtype: torch.dtype) -> list[Levels]:
        """As in `Rows`: the channels that are kept, and those that are dropped."""
        scales, codes = rows[..., :2].view(torch.bfloat16).to(dtype).mT, rows[..., 2:].mT.contiguous()
        kept = sum(size for size, _ in self.kept)
        levels = rows.new_empty(*rows.shape[:-2], kept, rows.shape[-2], dtype=dtype)
        start = channel = 0
        for size, bits in self.kept:
            stop = start + _code_bytes(bits, size)
            stored = codes[..., start:stop, :].view(torch.int8)
            _unpack_codes(stored, bits, levels[..., channel : channel + size, :])
            start, channel = stop, channel + size
        dropped = self.channels - kept
        return [Levels(levels, scales, kept), *([Levels(None, None, dropped)] if dropped else [])]


class Tile:
    """The numbers of n tokens as they come from rows.

    What has one scale for a token is multiplied before it is scaled, because there are fewer products than numbers.

    Args:
        levels: as `Rows.levels` returns them, of rows (B, G, n, N).
    """

    def __init__(self, levels: Sequence[Levels]):
        self.levels = levels

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """Products of `x` (B, G, M, C) with each token, (B, G, M, n), in at least float32."""
        dtype, found = torch.promote_types(x.dtype, torch.float32), []
        parts = x.split([own.channels for own in self.levels], -1)
        for (levels, scales, _), part in zip(self.levels, parts, strict=True):
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
        for levels, scales, channels in self.levels:
            if levels is None:
                found.append(weights.new_zeros(*weights.shape[:-1], channels))
                continue
            own = weights if scales is None else weights * scales
            part = _product(own.to(levels.dtype), levels.mT).to(weights.dtype)
            found.append(part if scales is None else part + 0.5 * own.sum(-1, keepdim=True))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The matrix products of (B, G, ...); of a single one torch would copy `y` where it is transposed."""
    return (x[0, 0] @ y[0, 0])[None, None] if y.shape[:2].numel() == 1 else x @ y


def _code_bytes(bits: int | str, size: int) -> int:
    """Bytes of the numbers of `size` channels; codes of a few bits come in eights."""
    if bits in FIELDS:
        return int(bits) * -(-size // 8)
    return {16: 2 * size, "fp8": size}[bits]


def _outermost(bits: int) -> float:
    """The highest level, by scales."""
    return (2**bits - 1) / 2


def _rounded(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (..., 1) and codes (..., size), from 0 to 2^bits - 1, of `x` (..., size)."""
    clips = torch.tensor(CLIPS if bits <= CLIPPED_BITS else CLIPS[:1], device=x.device)
    return _nearest(x, x.abs().amax(-1, keepdim=True) / _outermost(bits) * clips, _outermost(bits))


def _nearest(
    x: torch.Tensor, scales: torch.Tensor, outermost: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale (..., 1) of `scales` (..., K) with the least squared error, and the codes (..., C) of `x` with it."""
    scales = scales.bfloat16().float().clamp(min=TINY).unsqueeze(-1)  # (..., K, 1)
    x = x.unsqueeze(-2)
    levels = (x / scales + outermost).round().clamp(min=0) - outermost
    levels = levels.minimum(torch.as_tensor(outermost, dtype=x.dtype, device=x.device))
    if scales.shape[-2] > 1:
        best = (levels * scales - x).square().sum(-1, keepdim=True).argmin(-2, keepdim=True)  # (..., 1, 1)
        levels, scales = levels.take_along_dim(best, dim=-2), scales.take_along_dim(best, dim=-2)
    return scales.squeeze(-2), (levels + outermost).squeeze(-2).to(torch.uint8)


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
    """Write to `levels` (..., size, n) the signed numbers in `stored` (..., bytes, n), int8, of `_pack_codes`."""
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


def _mixing_matrix(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Orthogonal (C, C), block by block."""
    key = sizes, dtype, device
    if key in _MATRICES:
        return _MATRICES[key]
    with torch.inference_mode(False):  # the matrix is used in both modes
        matrix = torch.block_diag(*map(orthogonal_matrix, sizes)).to(device, dtype)
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
        layers: for each layer `None`, or both its fields of bits with blocks, `{"key_bits": [[96, 4], [32, 0]],
            "value_bits": [[128, 3]]}`: channels and bits of each, 0 at the end for those that are dropped. They are of
            a basis that the checkpoint has, of all heads together (`modeling-gqa quantize-cache --cache-share`), in
            place of what the other options say of bits.
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
        if not isinstance(options, dict):
            raise ValueError(f"cache_quantization={options!r} must be a dict of options, such as {{'nbits': 4}}")
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ValueError(
                    f"cache_quantization has no option {name!r}: there are {', '.join(cls.__dataclass_fields__)} "
                    "(a 'backend' in cache_config, quanto, hqq or fp8, asks for a cache of transformers' own)"
                )
        found = cls(**options)
        for name in ("nbits", *BASES):
            if getattr(found, name) is not None or name == "nbits":
                _check_bits(name, getattr(found, name))
        _check_layers(found.layers)
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

    def by_layer(self, number: int) -> list["CacheQuantization"]:
        """What holds for each of `number` layers; raises `ValueError` where `layers` has another number of entries."""
        layers = [None] * number if self.layers is None else self.layers
        if len(layers) != number:
            raise ValueError(f"cache_quantization['layers'] has {len(layers)} entries, and the model {number} layers")
        return [replace(self, layers=None, **(layer or {})) for layer in layers]

    def formats(
        self, names: Sequence[str], shapes: Sequence[tuple[int, int]]
    ) -> tuple[RowFormat | CodedFormat, RowFormat | CodedFormat]:
        """Formats of the two tensors that a layer caches.

        Args:
            names: of the fields with their bits, such as "key_bits" and "value_bits".
            shapes: heads of each, and channels of a head.

        Raises:
            ValueError: blocks are of what the layer does not cache, or have not the tensor's channels.
        """
        blocks = [name for name in BASES if isinstance(getattr(self, name), list | tuple)]
        if blocks and blocks != list(names):
            raise ValueError(f"has blocks for {' and '.join(blocks)}, and the layer caches {' and '.join(names)}")
        found: list[RowFormat | CodedFormat] = []
        for name, (heads, size) in zip(names, shapes, strict=True):
            bits = self.nbits if getattr(self, name) is None else getattr(self, name)
            if not blocks or not size:  # MLA may have no rotary key
                block = self.q_group_size or max(size, 1)
                sizes = tuple(min(block, size - start) for start in range(0, size, block))
                found.append(RowFormat(bits if size else "fp8", sizes))
                continue
            try:
                found.append(CodedFormat(tuple((channels, n) for channels, n in bits)))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
            if found[-1].channels != heads * size:
                raise ValueError(f"{name} has {found[-1].channels} channels in its blocks, and not {heads * size}")
        return found[0], found[1]


def _check_bits(name: str, value: Any) -> None:
    if not isinstance(value, int | str) or isinstance(value, bool) or value not in FORMATS:
        raise ValueError(f"cache_quantization[{name!r}]={value!r} must be one of {', '.join(map(str, FORMATS))}")


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, list | tuple | None):
        raise ValueError("cache_quantization['layers'] must be a list with a dict or None for each layer")
    for index, layer in enumerate(layers or ()):
        where = f"cache_quantization['layers'][{index}]"
        if layer is not None and not (isinstance(layer, dict) and len(layer) == 2 and layer.keys() <= BASES.keys()):
            raise ValueError(f"{where} must be a dict with two of {', '.join(BASES)}")
        for name, blocks in (layer or {}).items():
            if not (isinstance(blocks, list | tuple) and all(map(_is_block, blocks))):
                known = ", ".join(map(str, (0, *STEPS)))
                raise ValueError(f"{where}[{name!r}]={blocks!r} must be pairs: channels, and as bits one of {known}")


def _is_block(block: Any) -> bool:
    whole = isinstance(block, list | tuple) and len(block) == 2 and all(type(number) is int for number in block)
    return whole and block[0] > 0 and block[1] in (0, *STEPS)
