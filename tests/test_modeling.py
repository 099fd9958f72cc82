"""The model beside its attention: Auto classes, heads, backends, masks, packed documents, training, wrapped weights."""

import itertools
import re
from contextlib import nullcontext

import pytest
import torch
import transformers
from pairs import all_pairs
from small_models import MODELS, make_batch, make_config, make_model
from transformers import DynamicCache, modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HEADS = {
    "AutoModelForCausalLM": lambda ids: {"labels": ids},
    "AutoModelForSequenceClassification": lambda ids: {"labels": ids[:, 0] % 2},
    "AutoModelForTokenClassification": lambda ids: {"labels": ids % 2},
    "AutoModelForQuestionAnswering": lambda ids: {"start_positions": ids[:, 0] % 5, "end_positions": ids[:, 1] % 9},
}


def build(auto_class: str, model_name: str, **overrides):
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(make_config(model_name, **overrides))


def assert_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def real(logits, batch):
    return logits[batch["attention_mask"].bool()]


def gradients(model) -> dict:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("auto_class", HEADS)
def test_two_steps_move_every_parameter(auto_class, model_name):
    """Every parameter gets a gradient that is not zero, and two steps of an optimizer change it."""
    model = build(auto_class, model_name, attention_bias=True, mlp_bias=True).train()
    batch = make_batch(padding="right")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss = model(**batch, **HEADS[auto_class](batch["input_ids"])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Weight decay alone would move a parameter that has no gradient.
    still = [name for name, grad in gradients(model).items() if grad is None or not grad.abs().sum() > 0]
    assert not still
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


@pytest.mark.parametrize(("fields", "rate"), [({}, 0.1), ({"classifier_dropout": 0.0}, 0.0)], ids=str)
def test_the_dropout_of_a_classifier_is_the_configured_one(fields, rate):
    assert build("AutoModelForTokenClassification", "gqa", **fields).dropout.p == rate


def test_sequence_classification_reads_the_last_token_of_each_row():
    model, batch = build("AutoModelForSequenceClassification", "mixed").eval(), make_batch(padding="right")
    logits = model(**batch).logits
    for row, mask in enumerate(batch["attention_mask"].bool()):
        assert_close(logits[row : row + 1], model(batch["input_ids"][row : row + 1, mask]).logits)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_backends_agree(model_name, padding):
    model, batch = make_model(model_name), make_batch(padding=padding)
    logits = {}
    # Uncompiled, flex_attention runs on the CPU (forward only) and needs no compiler.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for backend in ("eager", "sdpa", "flex_attention"):
            model.set_attn_implementation(backend)
            cache = DynamicCache(config=model.config)
            first = model(batch["input_ids"][:, :9], attention_mask=batch["attention_mask"][:, :9],
                          position_ids=batch["position_ids"][:, :9], past_key_values=cache).logits  # fmt: skip
            second = model(batch["input_ids"][:, 9:], attention_mask=batch["attention_mask"],
                           position_ids=batch["position_ids"][:, 9:], past_key_values=cache).logits  # fmt: skip
            logits[backend] = real(torch.cat((first, second), dim=1), batch)
    assert_close(logits["sdpa"], logits["eager"], 1e-4)
    assert_close(logits["flex_attention"], logits["eager"], 1e-4)


def test_eager_and_sdpa_have_the_same_gradients(model_name):
    results = []
    for backend in ("eager", "sdpa"):
        model, batch = make_model(model_name).train().double(), make_batch(padding="left")
        model.set_attn_implementation(backend)
        # A padding token's own prediction depends on how a backend treats a row without keys.
        labels = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        assert_close(results[1][name], gradient, 1e-9)


@pytest.mark.parametrize("model_name", ["gqa", "mla", "mixed", "mixed-window"])
@pytest.mark.parametrize("rows", [1, 2])
def test_flash_attention_is_told_of_packed_documents(rows, model_name, monkeypatch):
    """transformers' flash attention, with a kernel of its own kind written here, keeps documents apart in each row."""

    def kernel(query, key, value, cu_seqlens_q, cu_seqlens_k, scale, window, longest):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and longest == 7
        parts = []
        for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
            mask = mask.triu(1 - window) if window else mask
            k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
            scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
            parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(parts)

    def options(softmax_scale=None, sliding_window=None, max_seqlen_q=None, **others):
        return {"scale": softmax_scale, "window": sliding_window, "longest": max_seqlen_q}

    class Both(tuple):  # two functions in transformers 5.24, one in 5.17
        def __call__(self, **given):
            return self[0](**given)

    found = (kernel, kernel, None, None, None), Both((options, options))
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_, **__: found)
    model = make_model(model_name)
    ids = make_batch(batch=rows, length=12)["input_ids"]
    packed = {"position_ids": torch.cat((torch.arange(5), torch.arange(7))).expand(rows, -1), "use_cache": False}
    with torch.no_grad():
        expected = model(ids, **packed).logits
        model.config._attn_implementation = "flash_attention_2"
        assert_close(model(ids, **packed).logits, expected, 1e-4)


@pytest.mark.parametrize("model_name", ["gqa", "mla", "mixed", "mixed-window"])
def test_flash_attention_dispatch(model_name, monkeypatch):
    """A stand-in for flash attention sees what the kernel must see, in every layer, while reading and decoding."""
    calls = []

    def stand_in(module, query, key, value, attention_mask, scaling, dropout=0.0, sliding_window=None, **kwargs):
        calls.append((module, query, key, value, attention_mask, sliding_window, kwargs))
        length, total = query.shape[2], key.shape[2]
        mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
        if sliding_window is not None:
            mask = mask.triu(total - length - sliding_window + 1)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, -total:].bool()
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.mT * scaling).masked_fill(~mask, torch.finfo(query.dtype).min)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", stand_in)
    model, batch = make_model(model_name), make_batch(padding="left")
    with torch.no_grad():
        expected = real(model(**batch).logits, batch)
        model.config._attn_implementation = "flash_attention_2"
        cache, logits = DynamicCache(config=model.config), []
        for part in (slice(0, 10), slice(10, 11)):
            step = {"input_ids": batch["input_ids"][:, part], "position_ids": batch["position_ids"][:, part]}
            step["attention_mask"] = batch["attention_mask"][:, : part.stop]
            logits.append(model(**step, past_key_values=cache).logits)
    assert_close(real(torch.cat(logits, 1), batch), expected, 1e-4)
    assert [call[0] for call in calls] == [layer.self_attn for layer in model.model.layers] * 2
    for index, (module, query, key, value, mask, window, kwargs) in enumerate(calls):
        layer = model.config.per_layer_config[index % 3]
        size = 16 if layer.attention_kind == "mla" else 14
        assert query.shape == (3, 6, 10 if index < 3 else 1, size)
        assert key.shape[1] == layer.num_key_value_heads
        assert key.shape == value.shape
        if layer.attention_kind == "mla":
            assert not value[..., 13:].any()
        # A mask of ones is left out: decoding, the padding lies outside the window.
        assert mask.ndim == 2 if window is None or index < 3 else mask is None
        assert window == (5 if model.config.layer_types[index % 3] == "sliding_attention" else None)
        assert "position_ids" in kwargs
        assert module.is_causal


@pytest.mark.parametrize("model_name", ["mixed", "mixed-window"])
def test_set_attn_implementation_reaches_every_layer(model_name, monkeypatch):
    model, batch, seen = make_model(model_name), make_batch(), []
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    stand_in = lambda module, *args, **kwargs: seen.append(module) or stock(module, *args, **kwargs)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", stand_in)
    for backend, layers in (("eager", 0), ("sdpa", 3), ("eager", 0)):
        seen.clear()
        model.set_attn_implementation(backend)
        model(**batch)
        assert len({id(module) for module in seen}) == layers


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_finished_masks(model_name, backend):
    """A mask (B, 1, T, S), boolean or additive, gives the logits of the padding mask that it was made from."""
    model, batch = make_model(model_name), make_batch(padding="left")
    if model.config.sliding_window:
        model.config.sliding_window = 100  # a finished mask replaces the window's
    model.set_attn_implementation(backend)
    expected = real(model(**batch).logits, batch)
    allowed = batch["attention_mask"].bool()[:, None, None, :] & torch.ones(11, 11, dtype=torch.bool).tril()
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, additive):
        assert_close(real(model(**{**batch, "attention_mask": mask}).logits, batch), expected)


def test_holes_in_the_padding_mask_are_not_documents(model_name):
    """Positions that stand still at padding do not begin a document: logits are those with a cache, which has none."""
    model, ids = make_model(model_name), make_batch(batch=1)["input_ids"]
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=positions).logits
        cache = DynamicCache(config=model.config)
        cached = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    assert_close(full[mask.bool()], cached[mask.bool()])


@pytest.mark.compat
@pytest.mark.parametrize(
    ("model_name", "mask", "backend", "training", "use_cache"),
    all_pairs(MODELS, ["no mask", "mask of ones", "right padding"], ["eager", "sdpa"], [True, False], [True, False]),
)
def test_packed_documents_do_not_see_each_other(model_name, mask, backend, training, use_cache):
    """Logits of a packed document are those of the document alone, and no gradient reaches the others."""
    model, ids = make_model(model_name).train(training), make_batch(batch=2)["input_ids"]
    model.set_attn_implementation(backend)
    # Documents begin at another place in each row.
    positions = torch.stack([torch.cat((torch.arange(n), torch.arange(11 - n))) for n in (4, 6)])
    attention_mask = torch.ones_like(ids) if mask != "no mask" else None
    if mask == "right padding":
        attention_mask[1, -2:] = 0
    changed = ids.clone()
    changed[0, :4] = ids[0, :4].flip(0) + 1
    arguments = {"attention_mask": attention_mask, "position_ids": positions, "use_cache": use_cache}
    logits, other = (model(tokens, **arguments).logits for tokens in (ids, changed))
    assert not torch.allclose(logits[0, :4], other[0, :4])
    assert_close(logits[0, 4:], other[0, 4:])
    assert_close(logits[1, :9], other[1, :9])
    for row, begin, end in ((0, 4, 11), (1, 0, 6), (1, 6, 9)):
        assert_close(logits[row, begin:end], model(ids[row : row + 1, begin:end]).logits[0], 1e-4)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, **arguments).logits[0, 4:].square().sum().backward()
    assert embeds.grad[0, 4:].abs().sum() > 0
    assert not embeds.grad[0, :4].any()
    assert not embeds.grad[1].any()


def test_attentions_and_hidden_states(model_name):
    model, ids = make_model(model_name), make_batch()["input_ids"]
    model.set_attn_implementation("eager")
    cache, request = DynamicCache(config=model.config), {"output_attentions": True, "output_hidden_states": True}
    full = model(ids, **request)
    model(ids[:, :10], past_key_values=cache)
    step = model(ids[:, 10:], past_key_values=cache, **request)  # latent layers absorb
    assert len(full.attentions) == len(step.attentions) == 3
    assert len(full.hidden_states) == len(step.hidden_states) == 4
    for index, (weights, decoded) in enumerate(zip(full.attentions, step.attentions, strict=True)):
        window = model.config.sliding_window if model.model.layers[index].self_attn.sliding_window else 11
        assert weights.shape == (3, 6, 11, 11)
        assert_close(weights.sum(-1), torch.ones(3, 6, 11))
        assert not weights.triu(1).any()
        assert_close(decoded, weights[:, :, 10:, -window:])
    assert_close(full.hidden_states[0], model.get_input_embeddings()(ids) * model.config.embedding_multiplier)
    assert_close(model.lm_head(full.hidden_states[3]), full.logits)
    for states, decoded in zip(full.hidden_states, step.hidden_states, strict=True):
        assert_close(decoded, states[:, 10:], 1e-4)


def test_gradient_checkpointing_and_accumulation_change_nothing(model_name):
    """Loss and gradients agree to 1e-5 with a plain step; the count of calls shows that each variant was active."""
    batch, results = make_batch(batch=4), []
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    for variant in ("plain", "checkpointed", "accumulated"):
        model, blocks = make_model(model_name).train(), []
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, blocks=blocks: blocks.append(1))
        if variant == "checkpointed":
            model.gradient_checkpointing_enable()
        loss = 0.0
        for part in parts if variant == "accumulated" else [batch]:
            labels = part["input_ids"].masked_fill(part["input_ids"] % 3 == 0, -100)
            predicted = (batch["input_ids"][:, 1:] % 3 != 0).sum()
            part_loss = model(**part, labels=labels, num_items_in_batch=predicted).loss
            part_loss.backward()
            loss += part_loss.detach()
        assert len(blocks) == (1 if variant == "plain" else 2)
        results.append((loss, gradients(model)))
    for loss, grads in results[1:]:
        assert_close((loss, grads), results[0], 1e-5)


@pytest.mark.parametrize("model_name", ["gqa", "mixed"])
def test_logits_to_keep_and_inputs_embeds(model_name):
    model, ids = make_model(model_name), make_batch()["input_ids"]
    full = model(ids).logits
    for keep, expected in ((0, full), (3, full[:, -3:]), (torch.tensor([0, 7]), full[:, [0, 7]])):
        assert_close(model(ids, logits_to_keep=keep).logits, expected)
    assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, full)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize("auto_class", HEADS)
def test_plans_name_existing_modules(auto_class, model_name):
    """A rule for tensor, pipeline or FSDP parallelism that names no module would be ignored in silence."""
    model = build(auto_class, model_name)
    names = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in model.named_modules()}
    for plan in (model._tp_plan, model._pp_plan, model._fsdp_plan):
        assert len(plan) > 2
        assert plan.keys() <= names
    split = {name.rsplit(".", 1)[1] for name in model._tp_plan if "self_attn" in name}
    rules = [set(layer.self_attn.tp_plan) for layer in model.base_model.layers]
    whole = [layer.norms_all_heads for layer in model.config.per_layer_config]  # no rank has all heads
    assert all(len(names) >= 4 or (each and not names) for names, each in zip(rules, whole, strict=True))
    mixed = len({layer.attention_kind for layer in model.config.per_layer_config}) > 1
    assert split == (set() if mixed else rules[0])  # a rule cannot name a single layer


def test_float64_is_float64_throughout(model_name):
    """A rounding to float32 anywhere would be an error of 0.1 in a difference quotient over 1e-6."""
    model = make_model(model_name).double()
    embeds = torch.randn(1, 7, 66, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model(inputs_embeds=x).logits, (embeds,), atol=1e-5, fast_mode=True)
    for rotary in model.model.rotary_emb.values():
        cos, sin = rotary(embeds, torch.arange(7)[None])
        assert_close(cos**2 + sin**2, torch.full_like(cos, rotary.attention_scaling**2), 1e-14)


def test_lora_on_every_linear_layer_trains_adapters_alone(model_name):
    import peft  # not installed beside the oldest transformers

    model, ids = make_model(model_name), make_batch()["input_ids"]
    linear = {name for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    targets = {name.partition(".lora_A")[0] for name in model.state_dict() if ".lora_A" in name}
    assert targets == {f"base_model.model.model.{name}" for name in linear}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_what_lora_adapts_by_default(model_name):
    """Without `target_modules` it adapts queries, and values or MLA's latent, in every layer."""
    import peft  # not installed beside the oldest transformers

    model = peft.get_peft_model(make_model(model_name), peft.LoraConfig(r=3, task_type="CAUSAL_LM"))
    adapted: dict[str, set[str]] = {}
    for name in model.state_dict():
        if ".lora_A" in name:
            layer, module = re.search(r"layers\.(\d)\.self_attn\.(\w+)\.", name).groups()
            adapted.setdefault(layer, set()).add(module)
    for index, layer in enumerate(model.base_model.model.config.per_layer_config):
        query = "q_b_proj" if layer.attention_kind == "mla" and layer.q_lora_rank else "q_proj"
        rest = {"kv_a_proj_with_mqa"} if layer.attention_kind == "mla" else {"v_proj"}
        rest |= {"v_proj"} if layer.qk_norm else set()
        assert adapted[str(index)] == {query, *rest}


def test_prefix_tuning(model_name):
    """It trains grouped models whose layers are alike; MLA and mixed models refuse its keys, by what can adapt them."""
    import peft  # not installed beside the oldest transformers

    model, ids = make_model(model_name), make_batch()["input_ids"]
    alike = {layer.attention_kind for layer in model.config.per_layer_config} in ({"mha"}, {"mqa"}, {"gqa"})
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with nullcontext() if alike else pytest.raises(ValueError, match="of prefix tuning, which"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert alike == any(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "prompt" in name)


def test_tuples_by_the_configuration(model_name):
    """`config.return_dict = False` turns the outputs of the model and of its base into tuples of the same tensors."""
    model, ids = make_model(model_name), make_batch()["input_ids"]
    expected = model(ids, use_cache=False).logits
    model.config.return_dict = False
    assert torch.equal(model(ids, use_cache=False)[0], expected)
    assert torch.equal(model(ids, use_cache=False, return_dict=True).logits, expected)
    assert isinstance(model.model(ids, use_cache=False), tuple)
