"""Where a model's weights are: conversions and measurements want all of them in memory, on one device."""

import torch

from ..common.errors import UserError


def check_placement(*models: torch.nn.Module) -> None:
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
