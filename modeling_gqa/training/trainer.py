"""The Trainer: exact validation losses, speed and MFU, a stop at the first non-finite loss, whole checkpoints."""

import math
import signal
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerState,
    default_data_collator,
)
from transformers.trainer_utils import EvalLoopOutput

from modeling_gqa_cli.errors import UserError

from ..common.atomic import read_object
from ..common.batches import MODEL_INPUTS
from ..common.console import is_main, say
from ..common.muon import MuonAdamW
from ..costs import cache_bytes_per_token
from ..data.blocks import CheckedStream, PackedBlocks
from .attention_logits import largest_logits
from .callbacks import Bar, Lines, Resumed, SaveOnSigterm, Throughput, any_process
from .recipe import Recipe
from .recipe_model import schedule_options
from .results import FORMAT_VERSION, KEPT, NON_FINITE, RESULTS, Results, bigram_loss, bytes_per_token
from .run_folder import RunFolder, what_is_kept


class NonFiniteLoss(UserError):
    """Training has diverged; the message says where and what to try."""


class PretrainTrainer(Trainer):
    """`Trainer` for packed sequences.

    Args:
        folder: the run's folder, of the main process; other processes have none.
        seconds_before: seconds of training in earlier sessions.
    """

    # Narrower than the base class's.
    args: Recipe
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(
        self, model: Any, args: Recipe, folder: RunFolder | None = None, seconds_before: float = 0.0, **kwargs: Any
    ) -> None:
        self.folder, self.seconds_before, self.began = folder, seconds_before, time.perf_counter()
        self.nothing_left = False  # to train
        self.batch: dict[str, torch.Tensor] = {}  # inputs of the last step
        # Trainer deletes whole folders, whoever wrote what is in them; `RunFolder.rotate` deletes what runs wrote.
        self.checkpoint_limit, args.save_total_limit = args.save_total_limit, None
        # Our own callback answers SIGTERM (see SaveOnSigterm); the Trainer must not install its handler.
        heed_sigterm, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        factory: dict[str, Any] = {"optimizer_cls_and_kwargs": (lambda: self.muon, {})} if args.muon else {}
        super().__init__(
            model=model,
            args=args,
            data_collator=default_data_collator,
            compute_metrics=mean_losses,
            preprocess_logits_for_metrics=losses_of_sequences,
            **factory,
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

    def muon(self, model: Any) -> MuonAdamW:
        args, groups = self.args, muon_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
        betas = (args.adam_beta1, args.adam_beta2)
        return MuonAdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.args.lr_scheduler_kwargs = schedule_options(self.args, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    # -- A step

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        input_ids = inputs["input_ids"]
        loss = super().training_step(model, inputs, *args, **kwargs)
        if any_process(not math.isfinite(loss.item()), self.args):
            self.stop_non_finite("loss")
        self.batch = {name: inputs[name] for name in MODEL_INPUTS if name in inputs}
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
            f"{what_is_kept(self.args.output_dir)}. Try a lower learning_rate, more warmup_steps, a smaller "
            "max_grad_norm, or bf16 in place of fp16"
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.throughput.rates(self.args.device))
            logs["tokens_seen"] = self.state.num_input_tokens_seen
            if speed := logs.get("tokens_per_second"):
                steps = self.state.max_steps - self.state.global_step
                logs["seconds_left"] = steps * self.args.tokens_per_step / speed
            if self.args.log_attention_logits:
                began = time.perf_counter()
                logs.update(self.attention_logits())
                self.throughput.left_out += time.perf_counter() - began
        super().log(logs, *args, **kwargs)

    def attention_logits(self) -> dict[str, float]:
        """Return the largest absolute attention logit in the last batch of all processes, of the model and by layer."""
        model: Any = self.model_wrapped
        config, model = self.accelerator.unwrap_model(model).config, getattr(model, "_orig_mod", model)
        found = largest_logits(model, config, self._prepare_inputs(self.batch))
        by_layer = self.accelerator.gather(found[None]).amax(0).tolist()
        return {"max_logit": max(by_layer)} | {f"max_logit/{layer}": x for layer, x in enumerate(by_layer)}

    # -- Evaluation and checkpoints

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output, prefix = super().evaluation_loop(*args, **kwargs), kwargs.get("metric_key_prefix", "eval")
        # Trainer averages batches of unequal token counts; every token counts the same here.
        loss = output.metrics.pop(f"{prefix}_token_loss")
        output.metrics.update({f"{prefix}_loss": loss, f"{prefix}_perplexity": perplexity(loss)})
        if self.bytes_per_token:
            output.metrics[f"{prefix}_bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return output

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of text that a token of the validation sequences stands for; `None` where that is not known."""
        return bytes_per_token(self.eval_dataset, self.processing_class)

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
            mark["warmup_steps"] = self.args.get_warmup_steps(self.state.max_steps)
            if isinstance(self.train_dataset, CheckedStream) and self.folder:
                blocks = self.state.num_input_tokens_seen // self.args.sequence_length
                mark["stream"] = self.train_dataset.mark(blocks)
        if self.folder:
            self.folder.rotate(self.checkpoint_limit, newest=name, best=self.best_checkpoint())

    def best_checkpoint(self) -> str | None:
        """Return the name of a checkpoint that stays although newer ones exceed the limit."""
        return None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint holds a tied weight once.
        tied: Any = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # -- The whole

    def is_over(self) -> bool:
        """Return whether training ends at the step of `state`."""
        return self.state.global_step >= self.state.max_steps

    @property
    def training_seconds(self) -> float:
        """Seconds of training up to now, those of earlier sessions included."""
        return self.seconds_before + time.perf_counter() - self.began

    def run(self, checkpoint: Path | None) -> Results:
        """Train, from `checkpoint` if one is given, and return the numbers of the run with its last weights.

        It ends the process with exit code 143 where SIGTERM has stopped and saved the training.
        """
        self.began = time.perf_counter()
        if checkpoint:
            self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            self.state.max_steps = self.args.max_steps  # more than then, where a run goes on
            self.nothing_left = self.is_over()
            self.add_callback(Resumed)
        if self.nothing_left:
            # Stopped between the last step and the end of the script; Trainer would take one step more.
            self._load_from_checkpoint(str(checkpoint))
        else:
            try:
                self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            finally:
                self.sigterm.release()
        seconds = self.training_seconds
        if self.sigterm.stopped:
            say(f"Stopped by SIGTERM and saved at step {self.state.global_step}; --resume continues.")
            sys.exit(128 + signal.SIGTERM)
        return self.results(seconds)

    def results(self, seconds: float) -> Results:
        """Return the numbers of the run; the last weights are evaluated unless the last step has been."""
        recipe, model, state = self.args, self.accelerator.unwrap_model(self.model), self.state
        done = [log for log in state.log_history if "eval_loss" in log and log["step"] == state.global_step]
        metrics = done[-1] if done else self.evaluate()
        results: Results = {
            "format_version": FORMAT_VERSION,
            "validation_loss": metrics["eval_loss"],
            "validation_perplexity": metrics["eval_perplexity"],
            **bits_per_byte(metrics),
            **({"bytes_per_token": self.bytes_per_token} if self.bytes_per_token else {}),
            "validation_blocks": len(self.eval_dataset),
            "steps": state.global_step,
            "tokens_seen": state.num_input_tokens_seen,
            "tokens_per_step": state.num_input_tokens_seen // max(state.global_step, 1),
            "training_seconds": round(seconds, 1),
            **self.throughput.rates(recipe.device, whole_run=True),
            **self.further_results(metrics),
            "parameters": model.num_parameters(),
            "cache_bytes_per_token": cache_bytes_per_token(model.config, torch.float32),
            "processes": recipe.world_size,
        }
        if self.folder is not None:
            results["sealing_seconds"] = round(self.folder.sealing_seconds, 2)
        if recipe.bigram_baseline and isinstance(self.train_dataset, PackedBlocks) and is_main():
            results["bigram_loss"] = bigram_loss(self.train_dataset, self.eval_dataset, model.config.vocab_size)
        earlier = read_object(Path(recipe.output_dir) / RESULTS) or {}
        if self.nothing_left and earlier.get("steps") == results["steps"]:
            results |= {name: earlier[name] for name in KEPT if name in earlier}
        return results

    def further_results(self, metrics: dict[str, float]) -> Results:
        """Return results beyond the loss, from the final evaluation `metrics` and the log."""
        return {}

    def outcome(self, results: Results) -> tuple[Results, dict[str, torch.Tensor]]:
        """Return the weights that the run ends with, by their names, after `results`, which are those of the last."""
        return results, self.accelerator.get_state_dict(self.model)  # under FSDP every process takes part


def muon_groups(model: PreTrainedModel, decayed: Collection[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for `MuonAdamW`: Muon for the matrices of the layers, each projection one, and AdamW for the rest.

    Args:
        decayed: names of the parameters that `weight_decay` is for.
    """
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = ".layers." in f".{name}" and parameter.ndim == 2, name in decayed
            groups.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "muon": matrices, "weight_decay": weight_decay if decays else 0.0}
        for (matrices, decays), parameters in groups.items()
    ]


def losses_of_sequences(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Reduce logits (B, T, V) to the number of predicted tokens of every sequence and their summed loss: (B, 2)."""
    targets = labels[:, 1:]  # (B, T - 1)
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")  # (B, T - 1)
    return torch.stack([targets.ne(-100).sum(-1), losses.sum(-1)], dim=-1)  # (B, 2)


def mean_losses(prediction: EvalPrediction) -> dict[str, float]:
    """Return means over all predicted tokens, from the number of tokens and the sums of every sequence.

    The sums are one, the loss, or the three of `prediction_losses`.
    """
    tokens, *sums = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return {name: float(x / tokens) for name, x in zip(("token_loss", "kl", "teacher_loss"), sums, strict=False)}


def bits_per_byte(metrics: dict[str, float]) -> Results:
    """Return the entry of `results.json` for an evaluation in which bits per byte are known; none elsewhere."""
    found = metrics.get("eval_bits_per_byte")
    return {} if found is None else {"validation_bits_per_byte": found}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
