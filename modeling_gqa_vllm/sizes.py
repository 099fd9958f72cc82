"""What vLLM reads of the configuration before it makes the model."""

from vllm.config.model_arch import ModelArchitectureConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from .kernels import stored


class GQASizes(ModelArchConfigConvertorBase):
    """Sizes of a model, by layer where layers differ; the cache's sizes are those of `model.py`'s layers."""

    def convert(self, supports_multimodal: bool = True) -> ModelArchitectureConfig:
        """Return the sizes of the whole model, with those of its layers."""
        layers = self.get_per_layer_hf_configs() or [(self.hf_config, self.hf_text_config)]
        sizes = [type(self)(*configs).convert_layer(supports_multimodal) for configs in layers]
        whole = ModelArchitectureConfig.from_layers(sizes) if len(sizes) > 1 else sizes[0]
        # Where all layers are MLA. vLLM plans blocks and kernels for that; on a CPU it would also turn off caching of
        # prefixes and prefill in chunks, which `cpu.py` can do.
        whole.is_deepseek_mla = all(map(is_latent, layers)) and not current_platform.is_cpu()
        return whole

    def is_deepseek_mla(self) -> bool:
        """No layer is DeepSeek's; `convert` answers for the model."""
        return False

    def get_head_size(self) -> int:
        """Size of a key's head; of MLA R + P, or the next size that vLLM's one check of it permits."""
        if not is_latent((self.hf_config, self.hf_text_config)):
            return super().get_head_size()
        size = self.hf_text_config.kv_lora_rank + stored(self.hf_text_config).qk_rope_head_dim
        permitted = sorted(MLACommonBackend.get_supported_head_sizes())
        return next((larger for larger in permitted if larger >= size), permitted[-1])


def is_latent(configs: tuple) -> bool:
    """Whether a layer with the configurations `(hf_config, hf_text_config)` is MLA."""
    return configs[1].attention_kind == "mla"
