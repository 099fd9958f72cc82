"""Train a converted model towards the model that it was converted from: layer by layer, then on its predictions.

Shapes: B batch, T tokens, E hidden size, V vocabulary.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, pad
from torch.utils.checkpoint import checkpoint
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from modeling_gqa.conversion.text.calibration import hooks

from .results import Results
from .trainer import PretrainTrainer
from .uptrain_recipe import UptrainRecipe

# Number of the teacher's logits, and of float32 copies of the student's, that are in memory at a time.
LOGITS_AT_ONCE = 2**25


def choose_parameters(model: PreTrainedModel, trainable: str) -> None:
    """Let gradients change the parameters of the attention (`trainable="attention"`) or all (`"all"`)."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable == "all" or ".self_attn." in name)


@torch.no_grad()
def run_teacher(teacher: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the input and output of every layer's attention, each (B, T, E)."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(attention: nn.Module, arguments: tuple, output: tuple) -> None:
        seen.append((arguments[0], output[0]))

    with hooks(*[layer.self_attn.register_forward_hook(see) for layer in teacher.model.layers]):
        teacher.model(**model_inputs(inputs))
    return seen


def model_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**{name: tensor for name, tensor in inputs.items() if name != "labels"}, "use_cache": False}


def relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared error over the sum of the squared target, as a scalar.

    Layers with large and with small outputs count the same.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    output, target = output.to(dtype), target.to(dtype)
    return (output - target).square().sum() / target.square().sum().clamp(min=torch.finfo(dtype).tiny)


def layerwise_loss(
    model: nn.Module,
    student: PreTrainedModel,
    seen: list[tuple[torch.Tensor, torch.Tensor]],
    inputs: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the relative errors of the attention outputs, summed over layers; each layer is given the teacher's input.

    The student's own forward runs, with its rotations, its masks and the wrappers around it. Its MLPs are given no
    tokens, which saves their time.

    Args:
        model: the student as it is trained, for instance wrapped by DDP.
        seen: what `run_teacher` returns for the same `inputs`.
    """
    losses: list[torch.Tensor] = []

    def feed(source: torch.Tensor, attention: nn.Module, arguments: tuple) -> tuple:
        return (source, *arguments[1:])

    def compare(target: torch.Tensor, attention: nn.Module, arguments: tuple, output: tuple) -> tuple:
        losses.append(relative_error(output[0], target))
        # This loss does not train what follows, which therefore needs no graph.
        return (target, *output[1:])

    def take_no_tokens(mlp: nn.Module, arguments: tuple) -> tuple:
        return (arguments[0][:, :0], *arguments[1:])

    def add_nothing(target: torch.Tensor, mlp: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        return target.new_zeros(()).expand_as(target)

    def answer(*_: Any) -> dict[str, torch.Tensor]:
        # DDP looks for the parameters that were used in the result of the forward.
        return {"loss": torch.stack(losses).sum()}

    handles = [student.register_forward_hook(answer)]
    layers = list(student.model.layers)
    for layer, (source, target) in zip(layers, seen, strict=True):
        handles.append(layer.self_attn.register_forward_pre_hook(partial(feed, source)))
        handles.append(layer.self_attn.register_forward_hook(partial(compare, target)))
        # The next layer is given the teacher's input, and not the result of this MLP.
        handles.append(layer.mlp.register_forward_pre_hook(take_no_tokens))
        handles.append(layer.mlp.register_forward_hook(partial(add_nothing, target)))
    # Checkpointing would compute a layer again without these hooks, and get another graph.
    checkpointed = [layer.gradient_checkpointing for layer in layers]
    with hooks(*handles):
        try:
            for layer in layers:
                layer.gradient_checkpointing = False
            return model(**model_inputs(inputs), logits_to_keep=1)["loss"]
        finally:
            for layer, value in zip(layers, checkpointed, strict=True):
                layer.gradient_checkpointing = value


def prediction_losses(
    logits: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_head: nn.Module,
    labels: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return three sums over the predicted tokens: next-token loss, KL(teacher || student), and the teacher's loss.

    Args:
        logits: the student's (B, T, V).
        teacher_states: (B, T, E), of which `teacher_head` makes logits, a part of the tokens at a time.
        labels: (B, T), shifted here; -100 at the start of a document, which the text before does not predict.
        temperature: both logits are divided by it for the KL, which is multiplied by its square (1503.02531).
    """
    targets = pad(labels[:, 1:], (0, 1), value=-100).flatten()  # (B T,)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    sums = partial(token_sums, teacher_head, temperature)
    total = torch.zeros(3, device=logits.device)
    parts = (x.split(rows) for x in (logits.flatten(0, 1), teacher_states.flatten(0, 1), targets))
    for part in zip(*parts, strict=True):
        # Each part's softmaxes are computed again in the backward pass and never exist together.
        total = total + checkpoint(sums, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def token_sums(
    head: nn.Module, temperature: float, logits: torch.Tensor, teacher_states: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the three sums of `prediction_losses` for n tokens: logits (n, V), states (n, E), targets (n,)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.no_grad():
        teacher_logits = head(teacher_states).to(dtype)  # (n, V)
    logits = logits.to(dtype)  # (n, V)
    loss, teacher_loss = (
        cross_entropy(x, targets, ignore_index=-100, reduction="sum") for x in (logits, teacher_logits)
    )
    student, teacher = (log_softmax(x / temperature, dim=-1) for x in (logits, teacher_logits))
    kl = kl_div(student, teacher, log_target=True, reduction="none").sum(-1)[targets != -100].sum()
    return torch.stack([loss, kl * temperature**2, teacher_loss])


class UptrainTrainer(PretrainTrainer):
    """`PretrainTrainer` with a teacher; without one it trains on the next-token loss alone."""

    args: UptrainRecipe

    def __init__(self, model: Any, args: UptrainRecipe, teacher: Any = None, **kwargs: Any) -> None:
        choose_parameters(model, args.trainable)
        if args.ddp_find_unused_parameters is None:
            # Stage 1 uses only the parameters of the attention.
            args.ddp_find_unused_parameters = args.trainable == "all" and args.layerwise_fraction > 0
        super().__init__(model, args, **kwargs)
        self.teacher = teacher
        if teacher is not None:
            teacher.to(device=args.device).eval().requires_grad_(False)
            self.preprocess_logits_for_metrics, self.compute_metrics = None, mean_losses
            self.add_callback(LogStages(self))
        if teacher is not None or args.trainable != "all":
            self.throughput.config = None

    @property
    def layerwise_steps(self) -> int:
        return round(self.args.layerwise_fraction * self.state.max_steps)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert not return_outputs
        if self.state.global_step < self.layerwise_steps:
            with self.accelerator.autocast():
                seen = run_teacher(self.teacher, inputs)
            loss = layerwise_loss(model, self.accelerator.unwrap_model(model), seen, inputs)
            return loss / self.current_gradient_accumulation_steps  # every micro-batch has as many tokens
        logits = model(**model_inputs(inputs)).logits
        sums = self.compare(logits, self.teacher_states(inputs), inputs["labels"], self.args.temperature)
        loss, kl, _ = sums / num_items_in_batch
        loss = (1 - self.args.kl_weight) * loss + self.args.kl_weight * kl
        # The number of items is that of all processes, over which DDP takes the mean.
        return loss * self.accelerator.num_processes if self.args.average_tokens_across_devices else loss

    def teacher_states(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), self.accelerator.autocast():
            return self.teacher.model(**model_inputs(inputs)).last_hidden_state  # (B, T, E)

    def compare(self, logits: torch.Tensor, states: torch.Tensor, labels: torch.Tensor, temperature: float) -> Any:
        with self.accelerator.autocast():
            return prediction_losses(logits, states, self.teacher.lm_head, labels, temperature)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if self.teacher is None:
            return loss, logits, labels
        # A sum for each row: the Trainer drops the rows that only fill up the last batch.
        rows = zip(
            logits.split(1), self.teacher_states(self._prepare_inputs(inputs)).split(1), labels.split(1), strict=True
        )
        sums = torch.stack([self.compare(*row, temperature=1.0) for row in rows])  # (B, 3)
        return loss, torch.cat([labels[:, 1:].ne(-100).sum(-1, keepdim=True), sums], dim=-1), labels  # (B, 4)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        if "eval_teacher_loss" in output.metrics:
            output.metrics["eval_teacher_perplexity"] = math.exp(min(output.metrics["eval_teacher_loss"], 700.0))
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.args.layerwise_fraction:
            logs["stage"] = 1 if self.state.global_step <= self.layerwise_steps else 2
        super().log(logs, *args, **kwargs)

    def run(self, checkpoint: Any) -> None:
        # For the losses before training; a resumed run finds them in its log.
        self.args.eval_on_start = checkpoint is None
        super().run(checkpoint)

    def further_results(self, metrics: dict[str, float]) -> Results:
        """Return the results of the model before training, and of the teacher, on the same validation text."""
        before = next(log for log in self.state.log_history if "eval_loss" in log and log["step"] == 0)
        results: Results = {
            "initial_validation_loss": before["eval_loss"],
            "initial_validation_perplexity": before["eval_perplexity"],
        }
        if self.teacher is None:
            return results
        results |= {
            "teacher_validation_loss": metrics["eval_teacher_loss"],
            "teacher_validation_perplexity": metrics["eval_teacher_perplexity"],
            "kl": metrics["eval_kl"],
            "initial_kl": before["eval_kl"],
        }
        gap = before["eval_perplexity"] - metrics["eval_teacher_perplexity"]
        if gap > 0:
            results["gap_closed"] = (before["eval_perplexity"] - metrics["eval_perplexity"]) / gap
        return results


def mean_losses(prediction: EvalPrediction) -> dict[str, float]:
    """Return the means over all predicted tokens of the three sums of `prediction_losses`."""
    tokens, *sums = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return dict(zip(("token_loss", "kl", "teacher_loss"), (float(x / tokens) for x in sums), strict=True))


class LogStages(TrainerCallback):
    """Log at the end of stage 1, so that no logged loss is a mean over both stages."""

    def __init__(self, trainer: UptrainTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.trainer.layerwise_steps:
            control.should_log = True
