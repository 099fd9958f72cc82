"""Models of drawn configurations, all fields of a family at once, are imported as they are or refused by name."""

import json
import re
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stock_models import batch, close, own_model, stock_model
from transformers import CONFIG_MAPPING, DynamicCache

from modeling_gqa.checkpoints.export_blockers import EXPORT_FAMILIES, TWO_ROPES
from modeling_gqa.checkpoints.exporting import export_config
from modeling_gqa.checkpoints.families import FAMILIES, LAYER_TYPES, import_config
from modeling_gqa.checkpoints.files import LazyTensor
from modeling_gqa.checkpoints.stock_tensors import own_names, stock_tensors
from modeling_gqa_cli.errors import UserError

STEPS, VOCABULARY = (9, 1, 1, 2, 1, 1), 61  # a prompt, and what is decoded after it
LATENT = ("deepseek_v2", "deepseek_v3", "youtu")
WHOLE = ("llama", "gemma3_text", "deepseek_v2")  # whose hidden size must be a multiple of the number of heads
HEAD_DIM = (
    "qwen2",
    "granite",
    "granitemoehybrid",
    "smollm3",
    "olmo2",
    "olmo3",
)  # which read it although it is no field of theirs
BOOLEANS, NONE, FEW, TOKENS = st.booleans(), st.none(), st.integers(1, 4), st.integers(0, VOCABULARY - 1)
Drawn = dict[str, Any]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(round(100 * low), round(100 * high)).map(lambda hundredths: hundredths / 100)


def even(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most // 2).map(lambda half: 2 * half)


def lists(values: st.SearchStrategy, least: int, most: int | None = None) -> st.SearchStrategy[list]:
    return st.lists(values, min_size=least, max_size=most or least)


@st.composite
def ropes(draw, size: int, kinds: tuple[str, ...]) -> Drawn:
    """Rotary parameters of one of the `kinds`, for a head of which `size` dimensions are rotated."""
    kind = draw(st.sampled_from(kinds))
    factor, mscale, planes = numbers(0.5, 8.0), NONE | numbers(0.0, 2.0), lists(numbers(0.5, 4.0), size // 2)
    needed: Drawn = {"factor": factor} if kind in ("linear", "dynamic", "yarn", "llama3") else {}
    optional: Drawn = {"rope_theta": st.sampled_from([2.0, 20.0, 500.0, 10_000, 1e6])}
    if kind in ("yarn", "llama3", "longrope", "su"):
        (needed if kind == "su" else optional)["original_max_position_embeddings"] = st.integers(2, 20)
    if kind in ("yarn", "longrope", "su"):
        optional["attention_factor"] = NONE | numbers(0.5, 2.0)
    if kind == "yarn":
        optional |= {"beta_fast": NONE | numbers(0.7, 32.0), "beta_slow": NONE | numbers(0.1, 0.6)}
        optional |= {"mscale": mscale, "mscale_all_dim": mscale, "truncate": NONE | BOOLEANS}
    if kind == "llama3":
        needed |= {"low_freq_factor": numbers(0.3, 1.0), "high_freq_factor": numbers(1.1, 4.0)}
    if kind in ("longrope", "su"):
        needed |= {"short_factor": planes, "long_factor": planes}
        optional["factor"] = factor
    if kind == "proportional":
        optional |= {"factor": factor, "partial_rotary_factor": numbers(0.3, 1.0)}
    return {"rope_type": kind, **draw(st.fixed_dictionaries(needed, optional=optional))}


@st.composite
def rope_parameters(draw, drawn: Drawn) -> Drawn:
    family, heads = drawn["model_type"], drawn["num_attention_heads"]
    size = drawn.get("qk_rope_head_dim") or drawn.get("head_dim") or drawn["hidden_size"] // heads
    if family == "phi3":
        rotated = draw(even(size))
        return draw(ropes(rotated, ("default", "longrope", "su"))) | {"partial_rotary_factor": rotated / size}
    kinds: tuple[str, ...] = ("default", "linear", "yarn", "llama3")
    kinds += ("dynamic",) if size > 2 else ()  # transformers divides by the number of dimensions less 2
    if family in TWO_ROPES:
        own = {"full_attention": draw(ropes(size, (*kinds, "longrope"))), "sliding_attention": draw(ropes(size, kinds))}
        for rope in own.values():  # transformers looks for it beside these, so it is refused
            rope.pop("truncate", None)
        return own
    own = draw(ropes(size, (*kinds, "longrope") if family in LATENT else (*kinds, "longrope", "proportional")))
    if family == "ministral3":
        own = {"original_max_position_embeddings": draw(st.integers(2, 20)), **own}
        own["llama_4_scaling_beta"] = draw(numbers(0.0, 1.0))
    return own


def layer_types(drawn: Drawn) -> st.SearchStrategy[list]:
    if drawn["model_type"] == "granitemoehybrid":
        return lists(st.just("attention"), drawn["num_hidden_layers"])
    windowed = drawn["sliding_window"] is not None and drawn.get("use_sliding_window", True)
    return lists(st.sampled_from(LAYER_TYPES if windowed else LAYER_TYPES[:1]), drawn["num_hidden_layers"])


def hidden_sizes(drawn: Drawn) -> st.SearchStrategy[int]:
    heads = drawn["num_attention_heads"]
    rest = st.just(0) if drawn["model_type"] in WHOLE else st.integers(0, heads - 1)
    return st.builds(lambda size, rest: heads * size + rest, even(14), rest)


def key_value_heads(drawn: Drawn) -> st.SearchStrategy[int]:
    heads = drawn["num_attention_heads"]
    least = heads if drawn["model_type"] in LATENT else 1
    return st.sampled_from([count for count in range(least, heads + 1) if heads % count == 0])


def latent_sizes(drawn: Drawn) -> st.SearchStrategy[int]:
    # DeepSeek-V2's class takes what lies behind them for complex numbers.
    return even(14) if drawn["model_type"] == "deepseek_v2" else st.integers(1, 14)


# What each field may be, in this order: a strategy, or a function of what is drawn before that returns one.
VALUES: Drawn = {
    "num_hidden_layers": st.integers(2, 3),
    "num_attention_heads": st.integers(1, 6),
    "num_key_value_heads": key_value_heads,
    "hidden_size": hidden_sizes,
    "head_dim": even(16),
    "vocab_size": st.just(VOCABULARY),
    "intermediate_size": st.integers(1, 40),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), st.integers(2, 20)),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim"), latent_sizes),
    **dict.fromkeys(("q_lora_rank", "v_head_dim"), st.integers(1, 14)),
    "qk_rope_head_dim": even(10),
    **dict.fromkeys(("hidden_act", "hidden_activation"), st.sampled_from(["silu", "gelu", "relu2", "mish", "tanh"])),
    **dict.fromkeys(("attention_dropout", "embd_pdrop"), st.sampled_from([0.0, 0.3])),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_interleave"), BOOLEANS),
    # Of Granite 4 without experts and state-space layers, whose sizes must fit all the same.
    "num_local_experts": st.just(0),
    "shared_intermediate_size": st.integers(1, 40),
    "position_embedding_type": st.sampled_from(["rope", "nope"]),
    "router_aux_loss_coef": numbers(0.0, 1.0),
    **dict.fromkeys(("mamba_n_heads", "mamba_expand"), st.just(1)),
    "mamba_d_head": st.just("auto"),
    **dict.fromkeys(("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_chunk_size"), FEW),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), BOOLEANS),
    "time_step_limit": st.just([0.0, 1.0]),
    **dict.fromkeys(("use_cache", "output_hidden_states", "norm_topk_prob"), BOOLEANS),
    "output_router_logits": lambda drawn: st.just(False) if "num_local_experts" in drawn else BOOLEANS,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), TOKENS),
    "eos_token_id": TOKENS | lists(TOKENS, 1, 3),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-3, 0.1]),
    **dict.fromkeys(("initializer_range", "embedding_initializer_range"), numbers(0.01, 1.0)),
    "use_sliding_window": BOOLEANS,
    "sliding_window": st.integers(2, 14),  # the text is longer
    "max_window_layers": FEW,
    "layer_types": layer_types,
    "no_rope_layers": lambda drawn: lists(st.integers(0, 1), drawn["num_hidden_layers"], 4),
    "no_rope_layer_interval": FEW,
    **dict.fromkeys(("embedding_multiplier", "logits_scaling"), numbers(0.05, 12.0) | FEW),
    # Larger ones make a choice of the softmax, in which the rounding of two sums decides.
    **dict.fromkeys(("attention_multiplier", "residual_multiplier"), numbers(0.05, 1.0) | st.just(1)),
    "query_pre_attn_scalar": st.integers(1, 300),
    "rope_parameters": rope_parameters,
    "first_k_dense_replace": lambda drawn: st.integers(drawn["num_hidden_layers"], 5),
    **dict.fromkeys(("n_group", "n_routed_experts", "n_shared_experts", "topk_group", "num_experts_per_tok"), FEW),
    **dict.fromkeys(("moe_intermediate_size", "pretraining_tp", "num_mtp_layers", "chunk_size_feed_forward"), FEW),
    "routed_scaling_factor": numbers(0.1, 2.0),
    "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    "architectures": st.just(["SomeModel"]),
    "transformers_version": st.just("5.0.0"),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "id2label": st.just({0: "a", 1: "b"}),
    "label2id": st.just({"a": 0, "b": 1}),
    "problem_type": st.just("regression"),
}
# The values that are not represented, of fields which else have one. Nothing but these may be refused.
REFUSED: Drawn = {"is_encoder_decoder": True, "return_dict": False, "resid_pdrop": 0.1, "attn_logit_softcapping": 30.0}
REFUSED |= {"final_logit_softcapping": 30.0, "use_bidirectional_attention": True}
# Where the classes' types allow `None` and their code compares it or divides by it.
NEVER_NONE = {"attention_dropout", "v_head_dim", "first_k_dense_replace", "time_step_limit", *REFUSED}
NEVER_NONE |= {name for name in VALUES if name.startswith("mamba_") or name.endswith(("_multiplier", "_scaling"))}
# What none of the classes that are exported has.
NOT_EXPORTED = r"deepseek_v3: mlp_bias=True|phi3: head_dim=\d+ is not hidden_size / num_attention_heads"


@st.composite
def configurations(draw, family: str) -> tuple[Drawn, str | None]:
    """All fields of a family's configuration, and the name of the one that is to be refused."""
    types = {field.name: field.type for field in fields(CONFIG_MAPPING[family])}
    types |= {"head_dim": int | None} if family in HEAD_DIM else {}
    drawn: Drawn = {"model_type": family}
    for name in sorted(types.keys() - REFUSED.keys(), key=list(VALUES).index):
        values = VALUES[name] if isinstance(VALUES[name], st.SearchStrategy) else VALUES[name](drawn)
        # By which a mask is made even where no layer has one, or which choose layers of another kind.
        read = {
            **dict.fromkeys(TWO_ROPES, ("sliding_window",)),
            "granitemoehybrid": ("layer_types", "num_local_experts"),
        }
        may_be_none = type(None) in get_args(types[name]) and name not in (*NEVER_NONE, *read.get(family, ()))
        drawn[name] = draw(NONE | values if may_be_none else values)
    refused = draw(st.sampled_from([None] * 20 + sorted(REFUSED.keys() & types.keys())))
    drawn |= {refused: REFUSED[refused]} if refused else {}
    # Where it is no field, a class would take `None` for the size.
    return {k: v for k, v in drawn.items() if k != "model_type" and (k, v) != ("head_dim", None)}, refused


@torch.no_grad()
def all_logits(model) -> list[torch.Tensor]:
    """Logits of a text with padding at once, and piece by piece with a cache."""
    inputs = batch(length=sum(STEPS), vocabulary=VOCABULARY)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    found = [model(**inputs, return_dict=True).logits[mask.bool()]]
    cache, start = DynamicCache(config=model.config), 0
    for end in torch.tensor(STEPS).cumsum(0).tolist():
        step = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        output = model(**step, past_key_values=cache, use_cache=True, return_dict=True)
        found.append(output.logits[mask[:, start:end].bool()])
        start = end
    return found


def check_same(actual, expected) -> None:
    assert all(close(*pair) for pair in zip(all_logits(actual), all_logits(expected), strict=True))


def check_round_trip(stock, config, model) -> None:
    """Exported as its own family a model has its fields and bits; of MLA, which becomes DeepSeek-V3, its logits."""
    family = stock.config.model_type if stock.config.model_type in EXPORT_FAMILIES else "deepseek_v3"
    try:
        exported = export_config(config, family, "transformers")
    except UserError as error:
        if re.search(NOT_EXPORTED, str(error)):
            return
        raise
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    lazy = {name: LazyTensor(tuple(x.shape), x.dtype, x.detach) for name, x in kept.items()}
    written = stock_tensors(config, exported, lazy)
    if family == "deepseek_v3":
        again = stock_model(exported)
        again.load_state_dict({name: tensor.load() for name, tensor in written.items()})
        check_same(again, stock)
        return
    assert import_config(exported).to_dict() == config.to_dict()
    read = own_names(config, family, written)
    assert read.keys() == kept.keys()
    assert all(torch.equal(read[name].load(), tensor) for name, tensor in kept.items())


def check(family: str, drawn: Drawn, refused: str | None) -> None:
    config = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(drawn)))  # as it is read from a file
    if refused:
        with pytest.raises(UserError, match=f"^{refused}[= ]"):
            import_config(config)
        return
    imported = import_config(config)
    config.dtype = imported.dtype = None  # the same function in float32
    stock = stock_model(config)
    model = own_model(stock, imported)
    check_same(model, stock)
    check_round_trip(stock, imported, model)


@pytest.mark.filterwarnings("ignore:.* is larger than the .* dimensions that it compresses")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(data=st.data())
def test_a_drawn_model_is_imported_exactly_or_refused_by_name(family, data):
    check(family, *data.draw(configurations(family)))


def test_every_field_has_values():
    """A field that a new transformers has is drawn only when it is said here what it may be."""
    names = {field.name for family in FAMILIES for field in fields(CONFIG_MAPPING[family])}
    assert names == VALUES.keys() | REFUSED.keys()
