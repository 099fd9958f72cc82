"""Statistics of a layer's input that conversions need, as running sums, and values kept in files meanwhile.

Shapes: B rows, T tokens, E hidden size, H query heads, S lags.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from io import BytesIO
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any

import torch

from modeling_gqa_cli.errors import UserError

from .layers.moments import Statistics, product
from .layers.normed import NormedSums

# Attention by lag is taken from one row of a batch, from at most this number of tokens.
LAGS_SEEN = 512
# Bytes of tensors that a `Scratch` keeps in memory before it writes to its file.
IN_MEMORY = 2**28


def require_one_device(*models: torch.nn.Module) -> None:
    """Raise `UserError` for a model that `device_map` or offloading has spread.

    A conversion calls parts of layers by themselves, so the hooks that bring an offloaded weight do not run.
    """
    for model in models:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if "meta" in devices:
            raise UserError(
                "the model's weights are not in memory (offloaded, or on the meta device): load the whole model on "
                "one device, without offloading; what does not fit a GPU fits the processor's memory, device='cpu'"
            )
        if len(devices) > 1:
            raise UserError(
                f"the model's weights are on several devices ({', '.join(devices)}), as device_map places them: load "
                f"the whole model on one, such as {devices[-1]} or cpu"
            )


def not_finite(what: str, dtype: torch.dtype) -> UserError:
    """Return the error for numbers that are nan or infinite; dtypes but float16 have the range of float32, or more."""
    remedy = "choose --dtype float32 or bfloat16" if dtype == torch.float16 else "the weights are damaged"
    return UserError(f"{what} are not finite in {str(dtype).removeprefix('torch.')}: {remedy}")


class Scratch(MutableMapping[int, Any]):
    """A mapping from numbers to tensors, or tuples of them, that takes little memory however much it holds.

    The first `IN_MEMORY` bytes stay in memory; everything else lies in a file.

    Args:
        file: a temporary file without a name, which the system removes however the process ends.
        device: where tensors are read to.
    """

    def __init__(self, file: IO[bytes], device: torch.device) -> None:
        self.file, self.device = file, device
        self.memory: dict[int, Any] = {}
        self.places: dict[int, tuple[int, int]] = {}  # start and length in bytes
        self.room, self.end = IN_MEMORY, 0

    def __setitem__(self, number: int, value: Any) -> None:
        self.room += size(self.memory.pop(number, ()))
        if size(value) <= self.room:
            self.memory[number] = value
            self.room -= size(value)
            return
        content = BytesIO()
        torch.save(value, content)
        start, room = self.places.get(number, (0, 0))
        if content.tell() > room:
            start, self.end = self.end, self.end + content.tell()
        try:
            self.file.seek(start)
            self.file.write(content.getbuffer())
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"temporary files cannot be written to {gettempdir()} ({error.strerror}): set TMPDIR to a folder with "
                "more room"
            ) from error
        self.places[number] = (start, content.tell())

    def __getitem__(self, number: int) -> Any:
        if number in self.memory:
            return self.memory[number]
        start, length = self.places[number]
        self.file.seek(start)
        content = BytesIO(self.file.read(length))
        # Only what this process wrote is read, so pickled objects are safe.
        return torch.load(content, map_location=self.device, weights_only=False)

    def __delitem__(self, number: int) -> None:
        self.room += size(self.memory.pop(number, ()))
        self.places.pop(number, None)

    def __iter__(self) -> Iterator[int]:
        return iter({**self.places, **self.memory})

    def __len__(self) -> int:
        return len({**self.places, **self.memory})


def size(value: torch.Tensor | tuple[torch.Tensor, ...]) -> int:
    """Return the bytes of a tensor, or of several."""
    return value.nbytes if isinstance(value, torch.Tensor) else sum(x.nbytes for x in value)


@contextmanager
def scratch(device: torch.device) -> Iterator[Scratch]:
    """Open a `Scratch`, whose file lies in the folder that the environment variable TMPDIR names."""
    file = TemporaryFile(prefix="modeling-gqa-")  # noqa: SIM115 (closing what a full disk refused fails again)
    try:
        yield Scratch(file, device)
    finally:
        with suppress(OSError):
            file.close()


class Sums:
    """Running sums of one layer's `Statistics`."""

    def __init__(self, heads: int, hidden: int, window: int | None, device: torch.device) -> None:
        self.window = window
        self.second = torch.zeros(hidden, hidden, dtype=torch.float64, device=device)
        self.total = torch.zeros(hidden, dtype=torch.float64, device=device)
        self.lags = torch.zeros(heads, 0, dtype=torch.float64, device=device)
        self.weight, self.tokens, self.length = 0.0, 0, 0
        self.normed: NormedSums | None = None
        self.dtype = torch.float32  # that the model computes in, once it was seen

    def collect(
        self, attention: Any, x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, arguments: dict[str, Any]
    ) -> None:
        """Add the inputs `x` (B, T, E) of `attention` where `kept` (B, T).

        Each counts its `weight` (B, T); `arguments` are those of the attention's forward.
        """
        self.dtype = x.dtype
        root = weight[kept].float().sqrt()[:, None]
        rows = root * x[kept].float()
        self.second += product(rows, rows, x.dtype)
        self.total += (rows.mT @ root)[:, 0].double()
        self.weight += weight[kept].sum(dtype=torch.float64).item()
        self.tokens += len(rows)
        self.length = max(self.length, x.shape[1])
        if self.normed is not None:
            self.normed.add(x[kept], root)
        row = kept.sum(-1).argmax()  # the row with the least padding
        start = kept[row].int().argmax()
        seen = slice(start, min(start + LAGS_SEEN, x.shape[1]))
        weights = attention_weights(attention, x, row, seen, arguments)  # (1, H, t, t)
        self.add_lags(weights[0] * kept[row, seen][:, None])

    def add_lags(self, weights: torch.Tensor) -> None:
        """Add attention weights (H, T, T), summed along their diagonals."""
        length = weights.shape[-1]
        if length > self.lags.shape[1]:
            self.lags = torch.nn.functional.pad(self.lags, (0, length - self.lags.shape[1]))
        # Row i is moved i places to the right, so that what has one lag stands in one column.
        moved = torch.nn.functional.pad(weights.flip(-1), (0, length)).flatten(1)[:, :-length]
        self.lags[:, :length] += moved.unflatten(1, (length, -1))[..., length - 1 :].sum(1).double()

    def statistics(self) -> Statistics:
        """Return the means; raises `UserError` where there are none, or one is not finite."""
        if not self.tokens:
            raise UserError("the calibration text is empty")
        if not (torch.isfinite(self.second).all() and torch.isfinite(self.lags).all()):
            raise not_finite("the activations on the calibration text", self.dtype)
        lags, weight = self.lags / self.lags.sum(-1, keepdim=True), self.weight
        seen = Statistics(self.second / weight, self.total / weight, lags, self.length, self.window)
        seen.normed = None if self.normed is None else self.normed.statistics(seen, weight)
        return seen


def attention_weights(
    attention: Any, x: torch.Tensor, row: torch.Tensor, seen: slice, arguments: dict[str, Any]
) -> torch.Tensor:
    """Return the attention weights (1, H, t, t) over the t tokens `seen` of one row of `x` (B, T, E)."""
    cosine_sine = tuple(part[row if len(part) > 1 else 0, seen][None] for part in arguments["position_embeddings"])
    mask = arguments["attention_mask"]
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        mask = mask[row if len(mask) > 1 else 0, :, seen, seen][None]
    else:  # causal: flash attention's masks, and those of flex attention, say no more of a row without padding
        mask = None
    # Only the eager function returns weights.
    backend, attention.config._attn_implementation = attention.config._attn_implementation, "eager"
    try:
        _, weights = attention(x[row, seen][None], position_embeddings=cosine_sine, attention_mask=mask)
    finally:
        attention.config._attn_implementation = backend
    return weights
