"""transformers' continuous batching for every kind and mix, over a paged cache that takes what the layers store."""

import asyncio
import dataclasses
import math

import pytest
import torch
from small_models import MODELS, ROPES, make_model
from test_cache_quantized import model_with_constants
from transformers import ContinuousBatchingConfig, GenerationConfig

from modeling_gqa.attention_latent import LatentAttention
from modeling_gqa.costs.counts import CostedModel
from modeling_gqa.integrations import choose_rows, indexed_by_group
from modeling_gqa.layers import key_mean_size

pytestmark = pytest.mark.compat

PAGE = 32
LENGTHS = (5, 70, 150, 301)
# No token ends a request; -1 says so to both ways of generating.
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
LAID_OUT = [name for name in MODELS if "mla" in name or "mixed" in name]


def options(**given) -> ContinuousBatchingConfig:
    """Pages of 32 tokens, and batches of 128, so that longer prompts come in parts."""
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = "page_size" if "page_size" in names else "block_size"  # as transformers 5.17 says
    return ContinuousBatchingConfig(**{page: PAGE, "num_blocks": 64, "max_batch_tokens": 128, **given})


def prompts(lengths=LENGTHS, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 101, (length,), generator=generator).tolist() for length in lengths]


def model_and_greedy(name: str, inputs: list[list[int]], implementation: str = "sdpa"):
    """A model in float64, in which rounding decides no token, and its greedy continuations of each input alone."""
    model = make_model(name, max_position_embeddings=512).double()
    model.set_attn_implementation(implementation)
    config = GenerationConfig(**GREEDY)
    found = [model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist() for ids in inputs]
    return model, found


def batched(model, inputs: list[list[int]], **given) -> list[list[int]]:
    done = model.generate_batch(
        inputs,
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=options(**given),
        progress_bar=False,
    )
    assert [output.error for output in done.values()] == [None] * len(inputs)
    return [output.generated_tokens for output in done.values()]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_requests_of_several_pages_equal_generate(name, implementation):
    """Requests of 5 to 301 tokens, batched, have the tokens that each has alone; the model's backend is as before."""
    inputs = prompts()
    model, expected = model_and_greedy(name, inputs, implementation)
    assert batched(model, inputs) == expected
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_prefix(name):
    """The second of two requests that share three pages computes only its own; with a window it computes all."""
    start = prompts((3 * PAGE,))[0]
    inputs = [start + tail for tail in prompts((9, 17), seed=5)]
    model, expected = model_and_greedy(name, inputs)
    found, sharing, computed = [], [], []
    with model.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), continuous_batching_config=options()
    ) as manager:
        model.model.embed_tokens.register_forward_hook(lambda module, args, output: computed.append(args[0].numel()))
        for ids in inputs:  # one after the other, so that the first one's pages are complete
            request = manager.add_request(ids, max_new_tokens=12)
            found.append(manager.get_result(request_id=request, timeout=60).generated_tokens)
            sharing.append(manager.batch_processor.cache.use_prefix_sharing)
    assert found == expected
    shares = "sliding_attention" not in model.config.layer_types
    assert sharing == [shares] * 2
    first, second = (len(ids) + 11 for ids in inputs)  # the last of 12 tokens is not computed
    assert sum(computed) == first + second - 3 * PAGE * shares


def test_streaming():
    """A handler sees a request grow token by token, to the tokens that the model has alone."""
    inputs = prompts((20,))
    model, expected = model_and_greedy("mla", inputs)
    seen: list[list[int]] = []

    async def stream() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()

        def take(output) -> None:
            seen.append(list(output.generated_tokens))
            if output.is_finished():
                loop.call_soon_threadsafe(over.set)

        with model.continuous_batching_context_manager(
            GenerationConfig(**GREEDY), continuous_batching_config=options()
        ) as manager:
            manager.register_result_handler("request", take)
            manager.add_request(inputs[0], request_id="request", streaming=True, max_new_tokens=12)
            await asyncio.wait_for(over.wait(), 60)

    asyncio.run(stream())
    assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen})
    assert len(seen) > 2 and seen[-1] == expected[0]


@pytest.mark.parametrize("name", LAID_OUT)
def test_the_cache_takes_what_the_layers_store(name):
    """Its bytes for a token are those of the layers' numbers, and of what rows of one width leave empty."""
    model = make_model(name)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), options())
    cache = manager._create_batch_processor().cache
    rows = cache.config.rows
    layers = zip(model.model.layers, model.config.per_layer_config, strict=True)
    numbers = [sum(layer.self_attn.cache_sizes(config)) for layer, config in layers]
    for index, kind in enumerate(model.config.layer_types):  # a window keeps other tokens, and angles of a mean key
        numbers[index] += key_mean_size(model.config.per_layer_config[index]) * (kind == "sliding_attention")
    numbers += [1] * rows.positions
    assert rows.positions == any(layer.key_mean for layer in model.config.per_layer_config)
    assert all(count * rows.width >= n for count, n in zip(rows.counts, numbers, strict=True))
    for kind, allocator in ({} if indexed_by_group() else cache.cache_allocators).items():
        kinds = [*model.config.layer_types, *["full_attention"] * rows.positions]
        count = sum(n for n, own in zip(rows.counts, kinds, strict=True) if own == kind)
        assert allocator.bytes_per_block == PAGE * count * rows.width * 4  # float32
    if set(numbers) == {28}:
        assert rows.width == 28 and rows.counts == (1, 1, 1)


def test_decoding_attends_over_the_latent(monkeypatch):
    """MLA absorbs where requests decode."""
    model, calls = make_model("mla"), []
    absorb = LatentAttention.absorb
    monkeypatch.setattr(LatentAttention, "absorb", lambda *given: calls.append(1) or absorb(*given))
    batched(model, prompts((5, 9)))
    assert len(calls) >= 3 * 11  # layers, and tokens after the first


ROUNDED = {"nbits": 2, "exact_tokens": 0}


@torch.no_grad()
def rounded_model(name: str, bases: bool = False):
    """A model in float64 with biases, and with means and bases if these are asked for."""
    if bases:
        model = model_with_constants(name, True, True, max_position_embeddings=512)
        model.config.cache_quantization |= {"exact_tokens": 0}
        return model
    model = make_model(name, attention_bias=True, max_position_embeddings=512).double()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    model.config.cache_quantization = dict(ROUNDED)
    return model


@pytest.mark.parametrize(
    ("name", "bases"), [*((name, False) for name in MODELS), ("mla", True), ("gqa", True)], ids=str
)
def test_rounded_numbers_are_those_of_generate(name, bases):
    """The paged cache holds bytes, and attention reads what `generate` without exact tokens reads; windows stay."""
    model, inputs = rounded_model(name, bases), prompts()
    config = GenerationConfig(**GREEDY)
    expected, plain = (
        [model.generate(torch.tensor([ids]), generation_config=config, **own)[0, len(ids) :].tolist() for ids in inputs]
        for own in ({}, {"use_cache": False})
    )
    assert batched(model, inputs) == expected
    assert expected != plain or name not in ("mha", "mqa", "gqa", "mla"), "nothing was rounded"


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "mixed", "mixed-window"])
def test_a_rounded_cache_takes_bytes_and_positions(name):
    model = make_model(name, cache_quantization=ROUNDED).bfloat16()
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), options())
    rows = manager._create_batch_processor().cache.config.rows
    sizes = [layer.token_bytes(torch.bfloat16) for layer in CostedModel(model.config).layers]
    assert len(rows.counts) == len(sizes) + 1
    for count, size in zip(rows.counts, [*sizes, 4], strict=True):
        assert 2 * rows.width * count >= size
    assert indexed_by_group() or 2 * rows.width * sum(rows.counts) < 1.3 * (sum(sizes) + 4)


@pytest.mark.parametrize(
    ("numbers", "width", "counts"),
    [
        ((28, 28, 28), 28, (1, 1, 1)),
        ((577, 577), 578, (1, 1)),
        ((512, 256), 256, (2, 1)),
        ((576, 1024), 576, (1, 2)),
        ((28, 168, 56), 56, (1, 3, 1)),
        ((3, 3), 4, (1, 1)),
    ],
)
def test_widths_of_rows(numbers, width, counts):
    """The width with the smallest cache, and with fewer rows where caches are about equal; 5.17 has one row a layer."""
    rows = choose_rows(numbers)
    if indexed_by_group():
        width, counts = 2 * math.ceil(max(numbers) / 2), (1,) * len(numbers)
    assert (rows.width, rows.counts) == (width, counts)
    assert [rows.first(index) for index in range(len(counts))] == [sum(counts[:i]) for i in range(len(counts))]


def test_the_options_given_are_not_changed():
    """What a model of rows switches off is switched off in a copy."""
    given = options()
    before = dataclasses.asdict(given)
    make_model("mla").init_continuous_batching(GenerationConfig(**GREEDY), given)
    assert dataclasses.asdict(given) == before


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_change_with_the_length_are_refused(kind):
    """Those of a short request would be the ones of the longest beside it."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **ROPES[kind]}
    model = make_model("gqa", rope_parameters=rope)
    with pytest.raises(ValueError, match=kind):
        model.init_continuous_batching()
