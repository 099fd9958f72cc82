"""Uptraining: its recipe, and its Trainer, which trains a student on a teacher's predictions.

Shapes: B batch, T tokens, E hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState

from modeling_gqa_cli.errors import UserError
from modeling_gqa_cli.recipes import UptrainOptions, public_name

from ..checkpoints.checkpoint import load_source
from ..common.console import warn
from ..conversion.losses import prediction_losses, top_prediction_losses
from .distillation import choose_parameters, model_inputs
from .recipe import UNUSED, Recipe
from .results import Results
from .run_folder import is_whole
from .teacher_logits import FIELDS
from .trainer import PretrainTrainer, bits_per_byte, perplexity

METHOD = """- Parameters trained: {0.trainable}. The loss is {0.kl_weight:g} times the KL divergence from the teacher
  and {1:g} times the next-token loss.
"""


@dataclass
class UptrainRecipe(UptrainOptions, Recipe):  # type: ignore[misc]
    """Every option of an uptraining run: those of pretraining without the model's, then those of uptraining."""

    script = "uptrain"
    unused = UNUSED | dict.fromkeys(("preset", "model_overrides", "init_from"), "the student is the model")
    unused |= {
        "dry_run": "uptraining is not estimated",
        "label_smoothing_factor": "the teacher's predictions are learned",
    }
    alternatives = ((*Recipe.budgets, "num_train_epochs"),)

    # Fields of pretraining with other defaults: the model is already trained.
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of AdamW."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay; not applied to norms and biases."})
    bigram_baseline: bool = field(default=False, metadata={"help": "Report the loss of a bigram model as well."})
    # Often enough to see in time that training harms the model; a checkpoint with each, so that the best can be kept.
    eval_strategy: str = field(default="steps", metadata={"help": "no, steps or epoch. Default: steps."})
    eval_steps: float | None = field(default=0.1, metadata={"help": "Steps, or a share below 1. Default: 0.1."})
    save_steps: float = field(default=0.1, metadata={"help": "Steps, or a share below 1. Default: 0.1."})

    def __post_init__(self) -> None:
        if not self.student:
            raise ValueError("no student given: name the converted model, --student FOLDER or a Hub name")
        if not self.teacher:
            raise ValueError(
                "no teacher given: name the model that the student was converted from, --teacher FOLDER or a Hub name; "
                "modeling-gqa pretrain RECIPE --init-from STUDENT trains without one"
            )
        if self.teacher_logits:
            self.check_teacher_logits()
        if not 0 <= self.kl_weight <= 1:
            raise ValueError(f"kl_weight is {self.kl_weight}; it must lie between 0 and 1")
        super().__post_init__()
        if self.teacher_top_k != type(self).teacher_top_k and not self.teacher_logits:
            raise ValueError("teacher_top_k has no effect without teacher_logits: leave it out")
        for name in ("eval_steps", "save_steps"):
            # As transformers would; a resumption then compares equal numbers of steps.
            if self.max_steps > 0 and 0 < (getattr(self, name) or 0) < 1:
                setattr(self, name, math.ceil(getattr(self, name) * self.max_steps))

    def check_teacher_logits(self) -> None:
        """Raise `ValueError` for options that do not go with `teacher_logits`."""
        if self.streaming:
            raise ValueError(
                "teacher_logits needs all of the text before training, and streaming tokenizes it meanwhile: leave one "
                "of them out"
            )
        if self.teacher_top_k < 1:
            raise ValueError(f"teacher_top_k is {self.teacher_top_k}; it must be at least 1")
        self.remove_unused_columns = False  # the model does not take what is known of its teacher

    def inputs(self) -> list[tuple[str, str]]:
        """Return student, teacher and the teacher's logits beside what pretraining reads."""
        logits = [("teacher_logits", self.teacher_logits)] if self.teacher_logits else []
        return [*logits, *super().inputs()]

    # -- What depends on the kind of recipe.

    @property
    def start(self) -> str:
        return self.student

    def models(self) -> dict[str, str]:
        return {"student": self.student, "teacher": self.teacher}

    def origin(self, results: Results) -> str:
        source = f", a conversion of `{public_name(self.teacher)}`,"
        if results.get("result_step") == 0:
            return f"`{self.model_name}`{source} as it was, which uptraining with `modeling_gqa` did not improve"
        tokens = results["tokens_seen"]
        if "result_step" in results:  # the best weights, and not the last
            tokens = results["result_step"] * results["tokens_per_step"]
        return f"`{self.model_name}`{source} uptrained with `modeling_gqa` on {tokens:,} tokens"

    def method(self) -> str:
        return METHOD.format(self, 1 - self.kl_weight)


class UptrainTrainer(PretrainTrainer):
    """`PretrainTrainer` with a teacher, or with blocks that hold its logits."""

    args: UptrainRecipe

    def __init__(self, model: Any, args: UptrainRecipe, teacher: Any = None, **kwargs: Any) -> None:
        choose_parameters(model, args.trainable)
        super().__init__(model, args, **kwargs)
        self.teacher = teacher
        if teacher is not None:
            teacher.to(device=args.device).eval().requires_grad_(False)
        self.preprocess_logits_for_metrics = None
        self.add_callback(WatchDivergence(self))
        if teacher is not None or args.trainable != "all":
            self.throughput.config = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert not return_outputs
        teacher = self.teacher_predictions(inputs)
        logits = model(**model_inputs(inputs)).logits
        sums = self.prediction_sums(logits, teacher, inputs["labels"])
        loss, kl, _ = sums / num_items_in_batch
        loss = (1 - self.args.kl_weight) * loss + self.args.kl_weight * kl
        # The number of items is that of all processes, over which DDP takes the mean.
        return loss * self.accelerator.num_processes if self.args.average_tokens_across_devices else loss

    def teacher_predictions(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the teacher's last hidden states (B, T, E); or its `FIELDS`, which are taken out of `inputs`."""
        if self.teacher is None:
            return tuple(inputs.pop(name) for name in FIELDS)
        with torch.no_grad(), self.accelerator.autocast():
            return (self.teacher.model(**model_inputs(inputs)).last_hidden_state,)

    def prediction_sums(
        self, logits: torch.Tensor, teacher: tuple[torch.Tensor, ...], labels: torch.Tensor
    ) -> torch.Tensor:
        if self.teacher is None:
            ids, log_probs, rest, target_log_probs = teacher
            return top_prediction_losses(logits, ids, log_probs, rest, target_log_probs, labels)
        with self.accelerator.autocast():
            return prediction_losses(logits, teacher[0], self.teacher.lm_head, labels)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        teacher = self.teacher_predictions(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        # A sum for each sequence: the Trainer drops those that only fill up the last batch.
        sequences = zip(logits.split(1), zip(*(x.split(1) for x in teacher), strict=True), labels.split(1), strict=True)
        sums = torch.stack([self.prediction_sums(*x) for x in sequences])  # (B, 3)
        return loss, torch.cat([labels[:, 1:].ne(-100).sum(-1, keepdim=True), sums], dim=-1), labels  # (B, 4)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_teacher_perplexity"] = perplexity(output.metrics["eval_teacher_loss"])
        return output

    def run(self, checkpoint: Path | None) -> Results:
        # For the losses before training; a resumed run finds them in its log.
        self.args.eval_on_start = checkpoint is None
        return super().run(checkpoint)

    @property
    def measure(self) -> str:
        """By what the model is held against that before training: the KL, or the loss where no KL is trained on."""
        return "kl" if self.args.kl_weight else "loss"

    def worse_steps(self) -> list[int]:
        """Return the newest evaluated steps in a row, newest first, whose KL is above that before training."""
        kl = {int(log["step"]): log["eval_kl"] for log in self.state.log_history if "eval_kl" in log}
        if self.measure != "kl" or not math.isfinite(kl.get(0, math.nan)):
            return []
        return list(takewhile(lambda step: step and not kl[step] <= kl[0], sorted(kl, reverse=True)))

    def is_stopped(self) -> bool:
        """Return whether training ends at the step of `state` because two evaluations in a row were worse.

        Training that keeps its last weights, also where they are worse, goes on to its last step.
        """
        return self.args.keep_best and self.state.global_step < self.state.max_steps and len(self.worse_steps()) >= 2

    def is_over(self) -> bool:
        return super().is_over() or self.is_stopped()

    def best_evaluations(self) -> list[dict[str, Any]]:
        """Return the logs of all evaluations, the best first; of two alike the earlier one."""
        measure = f"eval_{self.measure}"
        known = (log for log in self.state.log_history if math.isfinite(log.get(measure, math.nan)))
        return sorted(known, key=lambda log: log[measure])

    def best_checkpoint(self) -> str | None:
        """Return the best checkpoint that was evaluated; `None` where the student as it was is better."""
        better = takewhile(lambda log: log["step"], self.best_evaluations() if self.args.keep_best else ())
        names = (f"checkpoint-{log['step']}" for log in better)
        return next((name for name in names if (Path(self.args.output_dir) / name).is_dir()), None)

    def outcome(self, results: Results) -> tuple[Results, dict[str, torch.Tensor]]:
        """Return the last weights, or the best that are left where the last are worse than those training began with.

        These are the student's own, or a checkpoint's that has been evaluated. The results are theirs then.
        """
        name = "kl" if self.measure == "kl" else "validation_loss"
        last, first = results[name], results[f"initial_{name}"]
        if last <= first or not math.isfinite(first):
            return super().outcome(results)
        said = f"the {'KL to the teacher' if name == 'kl' else 'validation loss'} was {first:.4f} and is {last:.4f}"
        said = f"training made the model worse ({said})"
        if not self.is_stopped():  # which has said so
            said += "; try a lower learning_rate"
        if not self.args.keep_best:
            warn(f"{said}. The last weights are the result, as keep_best false says")
            return super().outcome(results)
        best = self.best_that_is_left()
        step = best["step"]
        of_step = f"has the weights of step {step:,}" if step else "is the student as it was"
        warn(f"{said}. The result {of_step}")
        results = results | {
            **self.further_results(best),
            "validation_loss": best["eval_loss"],
            "validation_perplexity": best["eval_perplexity"],
            **bits_per_byte(best),
            "result_step": step,
            f"last_{name}": last,
        }
        if step == 0:
            try:
                return results, load_source(self.args.student).state_dict() if self.folder else {}
            except (UserError, OSError) as error:
                raise UserError(f"the student cannot be loaded again: {error}; bring it back, and --resume") from error
        self._load_from_checkpoint(str(Path(self.args.output_dir) / f"checkpoint-{step}"))
        return super().outcome(results)

    def best_that_is_left(self) -> dict[str, Any]:
        """Return the log of the best weights that can still be had, the same on every process."""
        folder = Path(self.args.output_dir)
        whole = (
            log for log in self.best_evaluations() if log["step"] == 0 or is_whole(folder / f"checkpoint-{log['step']}")
        )
        return broadcast_object_list([next(whole) if self.folder else {}])[0]

    def further_results(self, metrics: dict[str, float]) -> Results:
        """Return the results of the model before training, and of the teacher, on the same validation text."""
        before = next(log for log in self.state.log_history if "eval_loss" in log and log["step"] == 0)
        results: Results = {
            "initial_validation_loss": before["eval_loss"],
            "initial_validation_perplexity": before["eval_perplexity"],
            "teacher_validation_loss": metrics["eval_teacher_loss"],
            "teacher_validation_perplexity": metrics["eval_teacher_perplexity"],
            "kl": metrics["eval_kl"],
            "initial_kl": before["eval_kl"],
        }
        if self.args.teacher_logits:
            results["kl_top_k"] = self.eval_dataset.top_k
        gap = before["eval_perplexity"] - metrics["eval_teacher_perplexity"]
        if gap > 0:
            results["gap_closed"] = (before["eval_perplexity"] - metrics["eval_perplexity"]) / gap
        if self.is_stopped():
            results["stopped_step"] = self.state.global_step
        return results


class WatchDivergence(TrainerCallback):
    """Warns of a KL above that before training, and stops training where it stays so."""

    def __init__(self, trainer: UptrainTrainer) -> None:
        self.trainer = trainer

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        steps = self.trainer.worse_steps()
        if state.global_step == state.max_steps or state.global_step not in steps:
            return
        first = next(log["eval_kl"] for log in state.log_history if "eval_kl" in log)
        said = f"the KL to the teacher was {first:.4g} before training and is {metrics['eval_kl']:.4g}"
        said = f"step {state.global_step:,}: {said}, with --learning-rate {args.learning_rate:g}"
        if self.trainer.is_stopped():
            warn(f"{said}; training stops, since it was above at two evaluations: try a smaller --learning-rate")
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        elif len(steps) == 1:
            warn(f"{said}; the model is worse than it was")
