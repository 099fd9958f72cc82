"""What a run is going to take: its length, printed before it starts, and by `--dry-run` its time and memory."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

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
    seconds, memory = measure(recipe, model)  # which may take more memory than there is
    if recipe.max_steps > 0:
        say(f"Time    about {duration(seconds * recipe.max_steps)} of training: {seconds:.2g} s for a step")
    else:
        say(
            f"Time    {seconds:.2g} s for a step of {recipe.tokens_per_step:,} tokens; the text says how many there are"
        )
    parts = " + ".join(f"{what} {in_bytes(part)}" for what, part in memory.items())
    say(f"Memory  about {in_bytes(sum(memory.values()))} on each device: {parts}")
    say("Dry run: nothing was written, and no text was read.")


def measure(recipe: Recipe, model: PreTrainedModel) -> tuple[float, dict[str, int]]:
    """Return the seconds of a step, and the bytes of what it holds: weights, gradients, optimizer, activations.

    Activations are what is saved for the backward pass of one batch; it is not compiled.
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

    def step() -> None:
        with casts:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    optimizer: Any = MuonAdamW(muon_groups(model, (), 0.0), lr=0.0)
    if not recipe.muon:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class(model.parameters(), **options)
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        step()
    batches, updates = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        synchronize(model.device)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        batches.append(middle - begin)
        synchronize(model.device)
        updates.append(time.perf_counter() - middle)
    parameters = list(model.parameters())
    trained = sum(x.nbytes for x in parameters if x.requires_grad)
    states = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    memory = {"weights": sum(x.nbytes for x in parameters), "gradients": trained, "optimizer": states}
    memory["activations"] = sum(saved.values())
    return min(batches) * recipe.gradient_accumulation_steps + min(updates), memory
