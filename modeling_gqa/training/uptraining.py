"""The Trainer of uptraining: stage 1 layer by layer, stage 2 on predictions, and the measures before and after.

Shapes: B batch, T tokens, E hidden size, V vocabulary.
"""

import math
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState

from modeling_gqa_cli.errors import UserError

from ..checkpoints.checkpoint import load_source
from ..common.console import warn
from .distillation import choose_parameters, layerwise_loss, model_inputs, prediction_losses, run_teacher
from .results import Results
from .run_folder import is_whole
from .trainer import PretrainTrainer, perplexity
from .uptrain_recipe import UptrainRecipe


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
        sums = self.prediction_sums(logits, self.teacher_states(inputs), inputs["labels"], self.args.temperature)
        loss, kl, _ = sums / num_items_in_batch
        loss = (1 - self.args.kl_weight) * loss + self.args.kl_weight * kl
        # The number of items is that of all processes, over which DDP takes the mean.
        return loss * self.accelerator.num_processes if self.args.average_tokens_across_devices else loss

    def teacher_states(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), self.accelerator.autocast():
            return self.teacher.model(**model_inputs(inputs)).last_hidden_state  # (B, T, E)

    def prediction_sums(
        self, logits: torch.Tensor, states: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> Any:
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
        sums = torch.stack([self.prediction_sums(*row, temperature=1.0) for row in rows])  # (B, 3)
        return loss, torch.cat([labels[:, 1:].ne(-100).sum(-1, keepdim=True), sums], dim=-1), labels  # (B, 4)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        if "eval_teacher_loss" in output.metrics:
            output.metrics["eval_teacher_perplexity"] = perplexity(output.metrics["eval_teacher_loss"])
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.args.layerwise_fraction:
            logs["stage"] = 1 if self.state.global_step <= self.layerwise_steps else 2
        super().log(logs, *args, **kwargs)

    def run(self, checkpoint: Path | None) -> Results:
        # For the losses before training; a resumed run finds them in its log.
        self.args.eval_on_start = checkpoint is None
        return super().run(checkpoint)

    @property
    def measure(self) -> str:
        """By what the model is held against that before training: the KL, or the loss where no KL is trained on."""
        return "kl" if self.args.kl_weight else "loss"

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
        last, first = results[name], results[f"initial_{name}"]  # type: ignore[literal-required]
        if last <= first or not math.isfinite(first):
            return super().outcome(results)
        said = f"the {'KL to the teacher' if name == 'kl' else 'validation loss'} was {first:.4f} and is {last:.4f}"
        said = f"training made the model worse ({said}); try a lower learning_rate"
        if not self.args.keep_best:
            warn(f"{said}. The last weights are the result, as keep_best false says")
            return super().outcome(results)
        best = self.best_that_is_left()
        step = best["step"]
        of_step = f"has the weights of step {step:,}" if step else "is the student as it was"
        warn(f"{said}. The result {of_step}")
        results = results | {  # type: ignore[assignment]
            **self.further_results(best),
            "validation_loss": best["eval_loss"],
            "validation_perplexity": best["eval_perplexity"],
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
        found = [next(whole) if self.folder else {}]
        if self.args.world_size > 1:
            torch.distributed.broadcast_object_list(found)
        return found[0]

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
