"""Where something is computed."""

import torch

from .errors import UserError, one_line


def usable_device(device: str | None) -> str:
    """Return the device that is named, or "cuda" where it is, else "cpu"; raises `UserError`."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(
            f"--device={device} cannot be used: give one device, such as cpu or cuda:1 ({one_line(error)})"
        ) from error
    return device
