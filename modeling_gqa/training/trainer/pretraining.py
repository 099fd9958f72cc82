"""The Trainer: exact validation losses, a stop at the first non-finite loss, and checkpoints marked as whole."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainerState, default_data_collator
from transformers.trainer_utils import EvalLoopOutput

from ...common.errors import UserError
from ...data.blocks import CheckedStream
from ..errors import NON_FINITE
from ..folder.checkpoint import what_is_kept
from ..folder.run_folder import RunFolder
from ..recipe.model import shorten_warmup
from ..recipe.pretraining import Recipe
from ..results import Results
from .callbacks import Bar, Lines, SaveOnSigterm, Throughput, any_process


class NonFiniteLoss(UserError):
    """Training has diverged; the message says where and what to try."""


class PretrainTrainer(Trainer):
    """`Trainer` for packed blocks.

    Args:
        folder: the run's folder, of the main process; other processes have none.
    """

    # Narrower than the base class's.
    args: Recipe
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(self, model: Any, args: Recipe, folder: RunFolder | None = None, **kwargs: Any) -> None:
        self.folder = folder
        self.seconds_before, self.began = 0.0, time.perf_counter()  # of training: in earlier sessions, and in this one
        # Trainer deletes whole folders, whoever wrote what is in them; `RunFolder.rotate` deletes what runs wrote.
        self.checkpoint_limit, args.save_total_limit = args.save_total_limit, None
        # Our own callback answers SIGTERM (see SaveOnSigterm); the Trainer must not install its handler.
        heed_sigterm, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        super().__init__(
            model=model,
            args=args,
            data_collator=default_data_collator,
            compute_metrics=sum_losses,
            preprocess_logits_for_metrics=row_losses,
            **kwargs,
        )
        args.enable_jit_checkpoint = heed_sigterm
        self.throughput, self.sigterm = Throughput(model.config), SaveOnSigterm()
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(Lines if args.disable_tqdm else Bar)
        self.add_callback(self.throughput)
        if heed_sigterm:
            self.add_callback(self.sigterm)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        shorten_warmup(self.args, num_training_steps)  # where the number of epochs decides, it is known only now
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        input_ids = inputs["input_ids"]
        loss = super().training_step(model, inputs, *args, **kwargs)
        if any_process(not math.isfinite(loss.item()), self.args):
            self.stop_non_finite("loss")
        self.throughput.count(input_ids, self.args.world_size)
        self.state.num_input_tokens_seen += input_ids.numel() * self.args.world_size
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # A finite loss can have non-finite gradients; the step must not be taken, nor its weights saved.
        norm = super()._get_grad_norm(model, grad_norm)
        # Under fp16 the loss scaler expects overflows and skips such steps.
        if norm is not None and not self.args.fp16 and not math.isfinite(norm):
            self.stop_non_finite("gradient")
        return norm

    def stop_non_finite(self, what: str) -> None:
        raise NonFiniteLoss(
            f"{NON_FINITE} {what} at step {self.state.global_step + 1}, before the weights were changed; "
            f"{what_is_kept(self.args.output_dir)}. Try a lower learning_rate, more "
            "warmup_steps or a smaller max_grad_norm" + (", or bf16 in place of fp16" if self.args.fp16 else "")
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.throughput.rates(self.args.device))
            logs["tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output, prefix = super().evaluation_loop(*args, **kwargs), kwargs.get("metric_key_prefix", "eval")
        # Trainer averages batches of unequal token counts; every token counts the same here.
        loss = output.metrics.pop(f"{prefix}_token_loss")
        output.metrics.update({f"{prefix}_loss": loss, f"{prefix}_perplexity": math.exp(min(loss, 700.0))})
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # Every loader draws a seed, which would make the numbers that dropout draws depend on when one evaluates.
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        writing: Any = self.folder.checkpoint(name) if self.folder else nullcontext({})
        with writing as mark:
            self.accelerator.wait_for_everyone()  # until the main process has claimed the name
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # until every process has written its part
            mark["processes"] = self.args.world_size
            mark["training_seconds"] = round(self.training_seconds, 1)
            if isinstance(self.train_dataset, CheckedStream) and self.folder:
                blocks = self.state.num_input_tokens_seen // self.args.sequence_length
                mark["stream"] = self.train_dataset.mark(blocks)
        if self.folder:
            self.folder.rotate(self.checkpoint_limit, newest=name, best=self.best_checkpoint())

    def best_checkpoint(self) -> str | None:
        """Return the name of a checkpoint that stays although newer ones exceed the limit."""
        return None

    def further_results(self, metrics: dict[str, float]) -> Results:
        """Return results beyond the loss, from the final evaluation `metrics` and the log."""
        return {}

    def outcome(self, results: Results) -> tuple[Results, dict[str, torch.Tensor]]:
        """Return the weights that the run ends with, by their names, after `results`, which are those of the last."""
        return results, self.accelerator.get_state_dict(self.model)  # under FSDP every process takes part

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint holds a tied weight once.
        tied: Any = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    @property
    def training_seconds(self) -> float:
        """Seconds of training up to now, those of earlier sessions included."""
        return self.seconds_before + time.perf_counter() - self.began

    def run(self, checkpoint: Path | None) -> None:
        """Train, from `checkpoint` if one is given."""
        self.began = time.perf_counter()
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            if state.global_step >= state.max_steps:
                # Stopped between the last step and the end of the script; Trainer would take one step more.
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Reduce logits (B, T, vocabulary) to the summed loss and the number of predicted tokens of every row: (B, 2)."""
    targets = labels[:, 1:]  # (B, T - 1)
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")  # (B, T - 1)
    return torch.stack([losses.sum(-1), targets.ne(-100).sum(-1)], dim=-1)  # (B, 2)


def sum_losses(prediction: EvalPrediction) -> dict[str, float]:
    """Return the mean loss over all predicted tokens, from the sums of every row."""
    total, tokens = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return {"token_loss": float(total / tokens)}
