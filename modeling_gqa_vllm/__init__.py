"""Plugin of vLLM: MLA caches its latent, each layer what its kind stores, and no remote code is trusted.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes. Nothing here
imports vLLM before that.

- `sizes.py`: what vLLM reads of the configuration.
- `model.py`: the model on vLLM's transformers backend, its attention layers, its division over ranks.
- `cpu.py`: attention over the latent on a CPU.
- `prompts.py`: prompts of MLA on NVIDIA GPUs.
- `kernels.py`: the sizes that its kernels take.
"""

import logging

# The releases whose internals `tests/serving` has been run against; of 0.33 the Python code, with 0.32's CPU kernels.
OLDEST, NEWEST = (0, 32), (0, 34)  # the newest is excluded

logger = logging.getLogger("vllm.modeling_gqa")


def register() -> None:
    """Make vLLM know the model; in a release outside the supported range, warn and change nothing."""
    import vllm
    from packaging.version import Version

    if not OLDEST <= Version(vllm.__version__).release[:2] < NEWEST:
        logger.warning(
            "modeling_gqa serves through vLLM %d.%d to below %d.%d and found %s: its plugin stays off, so MLA needs "
            "trust_remote_code and caches expanded heads",
            *OLDEST,
            *NEWEST,
            vllm.__version__,
        )
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from modeling_gqa import GQAConfig  # registers the classes with transformers

    from .sizes import GQASizes

    MODEL_ARCH_CONFIG_CONVERTORS[GQAConfig.model_type] = GQASizes
    # By name, because importing the model would set up devices.
    ModelRegistry.register_model("GQAForCausalLM", "modeling_gqa_vllm.model:GQAForCausalLM")
