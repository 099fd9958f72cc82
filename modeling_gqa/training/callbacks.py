"""What the Trainer calls meanwhile: speed and MFU, a whole step before SIGTERM ends a run, and the lines of the log."""

import signal
import threading
import time
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..common.console import say
from ..common.progress import duration
from ..costs import training_flops
from ..costs.measuring import matmul_rate


def any_process(flag: bool, args: TrainingArguments) -> bool:
    """Return whether `flag` is set on any process; every process must call this function."""
    if args.world_size == 1:
        return flag
    flags = torch.tensor(int(flag), device=args.device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags)


class Throughput(TrainerCallback):
    """Measures tokens per second and model FLOPs utilisation (MFU) of training.

    Evaluation, saving and the first step (warm-up, compilation) are left out, unlike in `train_tokens_per_second`.
    FLOPs are counted by `training_flops`, which knows each layer's attention, unlike `total_flos`.

    Args:
        config: the model's configuration; `None` where a step is more than one model's forward and backward. Then only
            tokens are counted.
    """

    def __init__(self, config: Any | None) -> None:
        self.config = config
        self.flops_of: dict[torch.Size, float] = {}
        self.peak = 0.0
        self.reset(time.perf_counter())

    def reset(self, now: float) -> None:
        self.window = self.total = (0, 0.0, now)  # tokens, FLOPs, and seconds without those left out
        self.tokens, self.flops, self.left_out, self.step_end = 0, 0.0, 0.0, now

    def count(self, input_ids: torch.Tensor, world_size: int) -> None:
        """Count one micro-batch, of shape (B, T) on each of `world_size` processes."""
        shape = input_ids.shape
        if self.config is not None and shape not in self.flops_of:
            self.flops_of[shape] = training_flops(self.config, batch_size=shape[0], sequence_length=shape[1])
        self.tokens += input_ids.numel() * world_size
        self.flops += self.flops_of.get(shape, 0.0) * world_size

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self.peak = matmul_rate(str(args.device), dtype) * args.world_size if self.config else 0.0
        self.first_step = state.global_step + 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step == self.first_step:
            synchronize(args.device)
            self.reset(time.perf_counter())
        self.step_end = time.perf_counter()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        # The time from the end of a step to the end of an evaluation or a save is not training.
        now = time.perf_counter()
        self.left_out += now - self.step_end
        self.step_end = now

    on_save = on_evaluate

    def rates(self, device: torch.device, whole_run: bool = False) -> dict[str, float]:
        """Return `tokens_per_second`, and `mfu` (a fraction) where FLOPs are counted.

        Args:
            whole_run: of all training so far; otherwise of that since the last call.
        """
        synchronize(device)
        now = (self.tokens, self.flops, time.perf_counter() - self.left_out)
        tokens, flops, seconds = (b - a for a, b in zip(self.total if whole_run else self.window, now, strict=True))
        self.window = now
        if not tokens:
            return {}
        speed = {"tokens_per_second": tokens / seconds}
        return speed | {"mfu": flops / seconds / self.peak} if self.peak else speed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SaveOnSigterm(TrainerCallback):
    """Saves and stops after the step in which SIGTERM arrives; all processes stop after the same step.

    transformers' own callback saves in the middle of a step, when dropout has drawn its numbers and the optimizer has
    not moved: a resumed run then differs. Its processes may also choose different steps.
    """

    def __init__(self) -> None:
        self.requested = self.stopped = False
        self.previous: Any = signal.SIG_DFL

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # others cannot ask for signals
            self.previous = signal.signal(signal.SIGTERM, self.request)

    def request(self, signum: int, frame: Any) -> None:
        self.requested = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if any_process(self.requested, args):
            self.stopped = control.should_save = control.should_training_stop = True

    def release(self) -> None:
        """Give the signal back; training that ends by an error has no `on_train_end`."""
        if signal.getsignal(signal.SIGTERM) == self.request:
            signal.signal(signal.SIGTERM, self.previous)


class Resumed(TrainerCallback):
    """Gives a resumed run the intervals and the rate of its recipe; transformers' are those that the checkpoint had."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, lr_scheduler: Any = None, **__: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
        if not isinstance(lr_scheduler, LambdaLR):  # whose rate does not follow from the step alone
            return
        before, step = lr_scheduler.get_last_lr()[0], lr_scheduler.last_epoch
        lr_scheduler.last_epoch = step - 1
        lr_scheduler.step()
        if (now := lr_scheduler.get_last_lr()[0]) != before:
            say(f"The run has another length: at step {step:,} the learning rate goes from {before:.2e} to {now:.2e}")


# What a line of the log shows of its entries, in this order.
LOGGED = {
    "eval_loss": "validation loss {:.4f}",
    "eval_perplexity": "perplexity {:.2f}",
    "eval_bits_per_byte": "{:.4f} bits per byte",
    "eval_kl": "KL {:.4f}",
    "loss": "loss {:.4f}",
    "max_logit": "largest logit {:.3g}",
    "learning_rate": "lr {:.1e}",
    "tokens_seen": "{:,} tokens",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.0%}",
    "seconds_left": "{} left",
}


def log_line(state: TrainerState, logs: dict[str, float]) -> str | None:
    """Return the line to print for a training log or an evaluation; `None` for other logs."""
    if not {"loss", "eval_loss"} & logs.keys():
        return None
    entries: dict[str, Any] = dict(logs)
    if "seconds_left" in logs:
        entries["seconds_left"] = duration(logs["seconds_left"])
    shown = [form.format(entries[name]) for name, form in LOGGED.items() if name in logs]
    return "  ".join([f"step {state.global_step:>6,}/{state.max_steps:,}", *shown])


class Lines(TrainerCallback):
    """Prints a line for each log."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and (line := log_line(state, logs)):
            print(line, flush=True)


class Bar(ProgressCallback):
    """Draws transformers' progress bar, and prints the same lines above it."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and (line := log_line(state, logs)):
            self.training_bar.write(line)
