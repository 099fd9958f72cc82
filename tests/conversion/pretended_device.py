"""A device whose tensors are the processor's, and which refuses others as a GPU does: for machines without a GPU.

`PretendedDevice()` is a context in which the device "pretended" exists. Registering it changes what torch takes for
this machine's accelerator, so it belongs into a process of its own.
"""

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

backend_registration._setup_privateuseone_for_python_backend("pretended")
DEVICE = torch.device("pretended:0")
# Operations that move tensors, and those whose indices may be on the processor.
MIXED = {"aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_"}


class PretendedTensor(torch.Tensor):
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner.resolve_conj().resolve_neg()  # the wrapper has no such bits

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        return call(function, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return call(function, args, kwargs or {})


def call(function, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute on the processor what is asked of either device; raises `RuntimeError` where the two are mixed."""
    name, device = function._schema.name, kwargs.get("device")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [isinstance(x, PretendedTensor) for x in tensors]
    if name not in MIXED and any(ours) and any(x.ndim and not own for x, own in zip(tensors, ours, strict=True)):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, and some are on the processor")
    args, kwargs = tree_map_only(PretendedTensor, lambda x: x.inner, (args, kwargs))
    if device is not None:
        ours = [torch.device(device).type == DEVICE.type]
        kwargs["device"] = "cpu" if ours[0] else device
    result = function(*args, **kwargs)
    if not function._schema.returns:  # as of steps on lists of tensors
        return None
    if tensors and function._schema.is_mutable and function._schema.arguments[0].alias_info is not None:
        return tensors[0]
    return tree_map_only(torch.Tensor, PretendedTensor, result) if any(ours) else result


def copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    call(torch.ops.aten.copy_.default, (to, source), {})
    return to


# What C++ asks of a device without asking the modes first, for instance to index by a list.
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_copy_from", copy_from, "PrivateUse1")
for operation in (torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format):
    LIBRARY.impl(operation, lambda *args, of=operation, **kwargs: call(of, args, kwargs), "PrivateUse1")
