"""Text through a model one layer at a time: memory holds a batch, and what lies between two layers is on disk.

Layer by layer as in GPTQ (2210.17323, section 3.3), whose activations of all the text stay in memory.
Shapes: B rows, T tokens, E hidden size.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any

import torch

from .contexts import evaluating
from .errors import ConversionError
from .types import Batch

# What of a batch the model's layers look at; labels, for instance, are none of it.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class Scratch(MutableMapping[int, Any]):
    """What memory should not hold all at once, by number, one after another in a file.

    Args:
        file: a temporary one without a name, which the system removes however the process ends.
        device: where tensors are read to.
    """

    def __init__(self, file: IO[bytes], device: torch.device) -> None:
        self.file, self.device = file, device
        self.places: dict[int, tuple[int, int]] = {}  # start and length
        self.end = 0

    def __setitem__(self, number: int, value: Any) -> None:
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
            raise ConversionError(
                f"temporary files cannot be written to {gettempdir()} ({error.strerror}): set TMPDIR to a folder with "
                "more room"
            ) from error
        self.places[number] = (start, content.tell())

    def __getitem__(self, number: int) -> Any:
        start, length = self.places[number]
        self.file.seek(start)
        content = BytesIO(self.file.read(length))
        return torch.load(content, map_location=self.device, weights_only=False)  # its own

    def __delitem__(self, number: int) -> None:
        del self.places[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def scratch(device: torch.device) -> Iterator[Scratch]:
    """A `Scratch` whose file is made where the environment variable TMPDIR says."""
    file = TemporaryFile(prefix="modeling-gqa-")  # noqa: SIM115 (closing what a full disk refused fails again)
    try:
        yield Scratch(file, device)
    finally:
        with suppress(OSError):
            file.close()


class LayerwiseText:
    """Batches of text on their way through the layers of a model in evaluation mode.

    Attributes:
        kept: (B, T) which tokens of the batch in a layer are not padding, for the hooks that look on.
    """

    def __init__(self, model, batches: Sequence[Batch], states: Scratch) -> None:
        self.model, self.batches, self.states = model, batches, states
        self.layer = 0
        self.kept: torch.Tensor

    @torch.no_grad()
    def advance(self, last: int) -> None:
        """Send all batches through the layers up to and including `last`."""
        for number, batch in enumerate(self.batches):
            inputs = {name: x.to(self.model.device) for name, x in batch.items() if name in MODEL_INPUTS}
            ids = inputs.pop("input_ids")
            hidden = self.states[number] if self.layer else self.model.model.embed_tokens(ids)  # (B, T, E)
            mask = inputs.get("attention_mask")
            self.kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            arguments = self.model.model.layer_arguments(hidden, **inputs)
            for index in range(self.layer, last + 1):
                hidden = self.model.model.layers[index](hidden, **arguments[index])
            self.states[number] = hidden
        self.layer = last + 1


@contextmanager
def layerwise(model, batches: Sequence[Batch]) -> Iterator[LayerwiseText]:
    with evaluating(model), scratch(model.device) as states:
        yield LayerwiseText(model, batches, states)
