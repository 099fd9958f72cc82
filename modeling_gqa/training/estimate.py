"""What a run is going to take: its length, printed before it starts, and by `--dry-run` its time and memory."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ..common.batches import free_memory
from ..common.console import say
from ..common.muon import MuonAdamW
from ..common.progress import duration
from ..common.tables import in_bytes, with_prefix
from ..costs import training_flops
from .recipe import Recipe
from .trainer import muon_groups, synchronize

STEPS = 3  # that are timed


def describe_length(recipe: Recipe, model: PreTrainedModel, steps: int) -> str:
    """Return the steps, tokens and FLOPs of a run, such as `1,600 steps of 1,024 tokens: 1.64 M tokens, ...`."""
    tokens, parameters = steps * recipe.tokens_per_step, model.num_parameters()
    config: Any = model.config
    flops = training_flops(config, batch_size=1, sequence_length=recipe.sequence_length)
    total = flops * tokens / recipe.sequence_length
    return (
        f"{steps:,} steps of {recipe.tokens_per_step:,} tokens: {with_prefix(tokens)} tokens, "
        f"{tokens / parameters:.3g} for each parameter, {with_prefix(total, 'FLOP')}"
    )


def dry_run(recipe: Recipe, model: PreTrainedModel) -> None:
    """Print what the run is going to take, by some steps of `model` on random tokens."""
    say(f"Model   {recipe.model_name}: {with_prefix(model.num_parameters())} parameters")
    if recipe.max_steps > 0:
        say(f"Length  {describe_length(recipe, model, recipe.max_steps)}")
    seconds, memory = measure(recipe, model)
    needed, free = sum(memory.values()), free_memory(str(recipe.device))
    if seconds is None:
        say(f"Time    not measured: a step needs more than the {in_bytes(free)} that are free on {recipe.device}")
    elif recipe.max_steps > 0:
        say(f"Time    about {duration(seconds * recipe.max_steps)} of training: {seconds:.2g} s for a step")
    else:
        say(
            f"Time    {seconds:.2g} s for a step of {recipe.tokens_per_step:,} tokens; the text says how many there are"
        )
    parts = " + ".join(f"{what} {in_bytes(part)}" for what, part in memory.items())
    say(f"Memory  about {in_bytes(needed)} on each device: {parts}")
    say("Dry run: nothing was written, and no text was read.")


def measure(recipe: Recipe, model: PreTrainedModel) -> tuple[float | None, dict[str, int]]:
    """Return the seconds of a step, and the bytes of what it holds: weights, gradients, optimizer, activations.

    The seconds are `None` where that is more memory than is free. Activations are what is saved for the backward pass
    of one batch, from what an eighth and a quarter of a row save; it is not compiled.
    """
    shape = recipe.train_batch_size, recipe.sequence_length
    ids = torch.randint(model.config.vocab_size, shape, device=model.device)
    precision = torch.bfloat16 if recipe.bf16 else torch.float16 if recipe.fp16 else None
    casts: Any = torch.autocast(model.device.type, precision) if precision else nullcontext()
    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with casts:
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    model.train()
    few = list[int]()
    lengths = recipe.sequence_length // 8 + 1, recipe.sequence_length // 4 + 2
    for length in lengths:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss_of(ids[:1, :length])
        few.append(sum(saved.values()))
    of_token = (few[1] - few[0]) / (lengths[1] - lengths[0])  # casts of weights do not grow with the tokens
    parameters = list(model.parameters())
    trained = [x for x in parameters if x.requires_grad]
    optimizer: Any = MuonAdamW(muon_groups(model, (), 0.0), lr=0.0)
    if not recipe.muon:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class(model.parameters(), **options)
    memory = {
        "weights": sum(x.nbytes for x in parameters),
        "gradients": sum(x.nbytes for x in trained),
        "optimizer": sum(x.nbytes for x in trained) * 2,
        "activations": round(few[0] + of_token * (ids.numel() - lengths[0])),
    }
    if sum(memory.values()) - memory["weights"] > free_memory(str(recipe.device)):
        return None, memory
    batches, updates = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss_of(ids).backward()
        synchronize(model.device)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        batches.append(middle - begin)
        synchronize(model.device)
        updates.append(time.perf_counter() - middle)
    states = (x for state in optimizer.state.values() for x in state.values())
    memory["optimizer"] = sum(x.nbytes for x in states if isinstance(x, torch.Tensor))
    return min(batches) * recipe.gradient_accumulation_steps + min(updates), memory
