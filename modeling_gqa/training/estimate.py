"""What a run is going to take: its length, printed before it starts, and by `--dry-run` its time and memory."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel, Trainer

from ..common.batches import free_memory
from ..common.console import say
from ..common.muon import MuonAdamW
from ..common.progress import duration
from ..common.tables import in_bytes, with_prefix
from ..costs import training_flops
from ..costs.measuring import seconds
from .recipe import Recipe
from .trainer import muon_groups

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
    if seconds is None:
        free = in_bytes(free_memory(str(recipe.device)))
        say(f"Time    not measured: a step needs more than the {free} that are free on {recipe.device}")
    elif recipe.max_steps > 0:
        say(f"Time    about {duration(seconds * recipe.max_steps)} of training: {seconds:.2g} s for a step")
    else:
        say(
            f"Time    {seconds:.2g} s for a step of {recipe.tokens_per_step:,} tokens; the text says how many there are"
        )
    parts = " + ".join(f"{what} {in_bytes(part)}" for what, part in memory.items())
    say(f"Memory  about {in_bytes(sum(memory.values()))} on each device: {parts}")
    say("Dry run: nothing was written, and no text was read.")


def measure(recipe: Recipe, model: PreTrainedModel) -> tuple[float | None, dict[str, int]]:
    """Return the seconds of a step, and the bytes of what it holds: weights, gradients, optimizer, activations.

    The seconds are `None` where that is more memory than is free. Activations are what is saved for the backward pass
    of one batch; it is not compiled.
    """
    shape = recipe.train_batch_size, recipe.sequence_length
    ids = torch.randint(model.config.vocab_size, shape, device=model.device)
    precision = torch.bfloat16 if recipe.bf16 else torch.float16 if recipe.fp16 else None
    casts: Any = torch.autocast(model.device.type, precision) if precision else nullcontext()

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with casts:
            return model(input_ids=rows, labels=rows, use_cache=False).loss

    model.train()
    optimizer: Any = MuonAdamW(muon_groups(model, (), 0.0), lr=0.0)
    if not recipe.muon:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(recipe, model)
        optimizer = optimizer_class(model.parameters(), **options)
    parameters = list(model.parameters())
    memory = {
        "weights": sum(x.nbytes for x in parameters),
        "gradients": sum(x.nbytes for x in parameters if x.requires_grad),
        "optimizer": moment_bytes(optimizer),
        "activations": saved_bytes(model, ids, loss_of),
    }
    if sum(memory.values()) - memory["weights"] > free_memory(str(recipe.device)):
        return None, memory

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    device = str(recipe.device)
    times = [(seconds(lambda: loss_of(ids).backward(), device), seconds(update, device)) for _ in range(STEPS)]
    batch, step = (min(parts) for parts in zip(*times, strict=True))
    states = (x for state in optimizer.state.values() for x in state.values())
    memory["optimizer"] = sum(x.nbytes for x in states if isinstance(x, torch.Tensor))
    return batch * recipe.gradient_accumulation_steps + step, memory


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return about the bytes that an optimizer keeps: Muon one number for each weight, others than SGD two."""
    usual = 0 if isinstance(optimizer, torch.optim.SGD) else 2
    groups = optimizer.param_groups
    return sum(x.nbytes * (1 if group.get("muon") else usual) for group in groups for x in group["params"])


def saved_bytes(model: Any, ids: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the bytes that `loss_of(ids)` saves for a backward pass, beside weights, from what its first rows save.

    Nothing stays saved, so it takes little memory. Casts of weights do not grow with the rows, hence a second one.
    """
    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    seen: dict[int, StorageWeakRef] = {}  # a storage that is gone may lend its address to another
    found = [0]

    def count(x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        place = storage.data_ptr()
        if place not in own and (place not in seen or seen[place].expired()):
            seen[place] = StorageWeakRef(storage)
            found[-1] += storage.nbytes()

    at_once, logits = model.logits_at_once, ids.numel() * model.config.vocab_size
    if at_once is not None and logits > at_once:  # then the loss of few rows is in chunks, too
        model.logits_at_once = min(at_once, ids.shape[1] * model.config.vocab_size - 1)
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            loss_of(ids[:1])
            if len(ids) > 1:
                found.append(0)
                loss_of(ids[:2])
    finally:
        model.logits_at_once = at_once
    one, two = found[0], found[-1]
    return one if len(ids) == 1 else one + (two - one) * (len(ids) - 1)
