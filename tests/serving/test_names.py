"""The names inside vLLM that the plugin leans on: a new release that moves one fails here first, and says which."""

import inspect
import logging

import pytest
import vllm
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    vllm_attention_forward,
    vllm_mla_attention_forward,
)
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

import modeling_gqa_vllm

CALLED = {
    ModelArchConfigConvertorBase.convert: {"supports_multimodal"},
    ModelArchConfigConvertorBase.convert_layer: {"supports_multimodal"},
    ModelArchConfigConvertorBase.get_per_layer_hf_configs: set(),
    ModelArchConfigConvertorBase.get_head_size: set(),
    ModelArchConfigConvertorBase.is_deepseek_mla: set(),
    ModelArchitectureConfig.from_layers: {"layers"},
    TransformersForCausalLM.recursive_replace: set(),
    TransformersForCausalLM._create_attention_instances: {"prefix"},
    ReplicatedLinear.weight_loader: {"param", "loaded_weight"},
    ReplicatedLinear.__init__: {"input_size", "output_size", "bias", "quant_config", "prefix", "return_bias"},
    replace_linear_class: {"linear", "style", "quant_config", "prefix"},
    Attention.__init__: {"num_heads", "head_size", "scale", "num_kv_heads", "per_layer_sliding_window", "prefix"},
    MLAAttention.__init__: {
        "num_heads", "scale", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank",
        "kv_b_proj", "sliding_window", "attn_backend", "prefill_backend_cls", "prefix",
    },
    MLACommonMetadataBuilder.build: {"common_prefix_len", "common_attn_metadata", "fast_build"},
    MLACommonBackend.get_supported_head_sizes: set(),
    CPUMLAImpl.forward_mqa: {"q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"},
    CPUMLAImpl.forward_mha: {
        "q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output", "output_scale",
    },
    CPUMLAImpl.do_kv_cache_update: {"kv_c_normed", "k_pe", "kv_cache", "slot_mapping"},
    vllm_attention_forward: {"module", "query", "key", "value", "attention_mask"},
    vllm_mla_attention_forward: {"module", "query", "kv_c_normed", "k_pe", "attention_mask"},
    get_tensor_model_parallel_rank: set(),
    kv_cache_dtype_str_to_dtype: {"kv_cache_dtype", "model_config"},
    ModelRegistry.register_model: {"model_arch", "model_cls"},
}  # fmt: skip


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__qualname__)
def test_functions_take_what_the_plugin_gives(function):
    assert CALLED[function] <= inspect.signature(function).parameters.keys()


def test_fields_that_the_plugin_reads():
    assert {"num_reqs", "num_decodes", "num_prefills", "query_start_loc", "prefill", "decode"} <= (
        MLACommonMetadata.__dataclass_fields__.keys()
    )
    assert {"is_deepseek_mla", "head_size"} <= ModelArchitectureConfig.__dataclass_fields__.keys()
    assert "text_config._attn_implementation" in inspect.getsource(TransformersForCausalLM._patch_config)


def test_registered():
    """vLLM loads the model by its architecture's name."""
    modeling_gqa_vllm.register()
    assert "GQAForCausalLM" in ModelRegistry.get_supported_archs()
    assert MODEL_ARCH_CONFIG_CONVERTORS["gqa"].__module__ == "modeling_gqa_vllm.sizes"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_another_release_gets_one_line(version, monkeypatch, caplog):
    """Outside the range that was tested nothing is registered."""
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(ModelRegistry, "register_model", lambda *_: pytest.fail("registered"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        modeling_gqa_vllm.register()
    (record,) = [record for record in caplog.records if record.name == "vllm.modeling_gqa"]
    assert version in record.getMessage() and "trust_remote_code" in record.getMessage()
