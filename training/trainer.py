"""The Trainer, with exact validation losses, a stop at the first non-finite loss, and checkpoints that are whole."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainerState, default_data_collator
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from .callbacks import Bar, Lines, SaveOnSigterm, Throughput, any_process
from .recipe import Recipe, RecipeError

# Written last: a checkpoint without it was cut short.
COMPLETE = "complete.json"


class NonFiniteLoss(Exception):
    """Training has diverged; the message says where and what to try."""


class PretrainTrainer(Trainer):
    """`Trainer` for packed blocks."""

    # Narrower than the base class's.
    args: Recipe
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(self, model: Any, args: Recipe, **kwargs: Any) -> None:
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
        last = last_checkpoint(self.args.output_dir)
        raise NonFiniteLoss(
            f"non-finite {what} at step {self.state.global_step + 1}, before the weights were changed; "
            f"{f'{last} is kept' if last else 'no checkpoint had been saved'}. Try a lower learning_rate, more "
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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Older checkpoints go only when every process has written its part of the new one and it is marked.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / "complete.tmp").write_text(json.dumps({"processes": self.args.world_size}), encoding="utf-8")
            (folder / "complete.tmp").replace(folder / COMPLETE)
            rotate_checkpoints(self.args.output_dir, limit, self.state.best_model_checkpoint)

    def further_results(self, metrics: dict[str, float]) -> dict[str, Any]:
        """What the final evaluation `metrics` and the log say beyond the loss."""
        return {}

    def run(self, checkpoint: Path | None) -> None:
        """Train, from `checkpoint` if one is given."""
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
    total, tokens = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return {"token_loss": float(total / tokens)}


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the run's checkpoints, oldest first, whole or not."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint that was written to its end."""
    whole = [path for path in checkpoints(output_dir) if (path / COMPLETE).is_file()]
    return whole[-1] if whole else None


def find_resumable(recipe: Recipe) -> Path | None:
    """Return the checkpoint to resume from, having passed over cut-short ones; raises `RecipeError`."""
    newest = last_checkpoint(recipe.output_dir)
    if newest is None:
        return None
    processes = json.loads((newest / COMPLETE).read_text(encoding="utf-8"))["processes"]
    if processes != recipe.world_size:
        raise RecipeError(f"{newest} was written by {processes} processes; resume it with as many")
    return newest


def remove_checkpoints(output_dir: str | Path, only_incomplete: bool) -> None:
    for path in checkpoints(output_dir):
        if not only_incomplete or not (path / COMPLETE).is_file():
            # First the mark, so that a removal cut short does not leave a checkpoint that looks whole.
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)
