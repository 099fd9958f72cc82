"""The means that a quantized cache takes out, and a model that shares its weights with one whose cache is not rounded.

Shapes: B batch, T tokens, G heads, C channels of a head.
"""

import pytest
import torch
from small_models import make_batch, make_model

from modeling_gqa import GQAQuantizedCache
from modeling_gqa.conversion import compare_predictions, convert_model, target_config
from modeling_gqa.conversion.quantizing import set_cache_constants, with_quantized_cache
from modeling_gqa.conversion.transform_coding import cache_means
from modeling_gqa_cli.errors import UserError


def projected(model, ids):
    """What each layer caches before rotation, (B, T, G C) of both tensors side by side: projections and their norms."""
    found = {}

    def keep(index, name, transform=lambda x: x):
        def hook(module, arguments, output):
            found[index, name] = transform(output)

        return hook

    handles = []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if hasattr(attention, "kv_a_proj_with_mqa"):
            rank, interleaved = attention.kv_lora_rank, attention.rope_interleave

            def latent_and_key(x, rank=rank, interleaved=interleaved, attention=attention):
                latent, key = attention.kv_a_layernorm(x[..., :rank]), x[..., rank:]
                if interleaved:
                    key = torch.cat((key[..., 0::2], key[..., 1::2]), dim=-1)
                return torch.cat((latent, key), dim=-1)

            handles.append(attention.kv_a_proj_with_mqa.register_forward_hook(keep(index, "latent", latent_and_key)))
        else:
            keys = attention.k_proj if attention.k_norm is None else attention.k_norm
            flat = attention.k_proj.out_features
            handles.append(keys.register_forward_hook(keep(index, "key", lambda x, n=flat: x.reshape(*x.shape[:2], n))))
            handles.append(attention.v_proj.register_forward_hook(keep(index, "value")))
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return [
        torch.cat([x for (layer, _), x in found.items() if layer == index], dim=-1)
        for index in range(len(model.model.layers))
    ]


ROPES = {"default": {}, "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_means_are_those_of_the_projections(model_name, rope):
    """Means of cached keys, turned back, are those of keys before rotation; a row's first four tokens do not count."""
    rope = {"rope_parameters": {"rope_theta": 1e4, **ROPES[rope]}} if ROPES[rope] else {}
    model = make_model(model_name, attention_bias=True, **rope).double()
    batches = [{"input_ids": make_batch(length=23, seed=seed)["input_ids"]} for seed in (1, 2)]
    found = cache_means(model, batches)
    for index, mean in enumerate(found):
        parts = [projected(model, batch["input_ids"])[index][:, 4:].flatten(0, 1) for batch in batches]
        torch.testing.assert_close(mean.double(), torch.cat(parts).mean(0), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_weights_are_shared_and_the_source_keeps_its_cache(model_name):
    model, batch = make_model(model_name), make_batch(length=40)
    quantized = with_quantized_cache(model, {"nbits": 4, "means": True})
    set_cache_constants(quantized, cache_means(model, [{"input_ids": batch["input_ids"]}]))
    assert all(x is y for x, y in zip(model.parameters(), quantized.parameters(), strict=True))
    assert model.config.cache_quantization is None and not isinstance(model(**batch).past_key_values, GQAQuantizedCache)
    assert isinstance(quantized(**batch).past_key_values, GQAQuantizedCache)


@torch.no_grad()
def test_a_comparison_sees_the_rounding(model_name):
    """Fewer bits lose more, also in blocks of packed documents, of which none sees another."""
    model = make_model(model_name)
    ids, places = make_batch(length=40)["input_ids"], torch.cat((torch.arange(17), torch.arange(23))).expand(3, -1)
    lost = [
        compare_predictions(
            model, with_quantized_cache(model, {"nbits": bits}), [{"input_ids": ids, "position_ids": places}]
        )["kl"]
        for bits in (8, 4, 2)
    ]
    assert 0 < lost[0] < lost[1] < lost[2]
    alone = with_quantized_cache(model, {"nbits": 4})
    whole = alone(input_ids=ids, position_ids=places).logits[:, 17:]
    if model_name != "mixed-window":  # whose window spans documents by place
        torch.testing.assert_close(whole, alone(ids[:, 17:]).logits, rtol=0.05, atol=0.5)


def test_a_model_with_a_quantized_cache_is_not_converted():
    for options in ({"nbits": 4}, {"nbits": 4, "means": True}):
        model = make_model("gqa", cache_quantization=options)
        with pytest.raises(UserError, match="load it with cache_quantization=None"):
            convert_model(model, target_config(model.config, "mqa"))
