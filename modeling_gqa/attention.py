"""The attention kinds and the class that computes each.

To add a kind: write `attention_NAME.py` with a class that takes `(config, layer_idx)` and has `GroupedAttention`'s
forward, `kinds`, `tp_plan` and operation counts; enter it below; give `GQAConfig` its name, its fields and a check; add
a preset to `configuration/models`. The tests iterate this dictionary and the presets.
"""

from .attention_grouped import GroupedAttention
from .attention_latent import LatentAttention

ATTENTION_CLASSES: dict[str, type[GroupedAttention | LatentAttention]] = {
    "mha": GroupedAttention,
    "mqa": GroupedAttention,
    "gqa": GroupedAttention,
    "mla": LatentAttention,
}
