"""Callbacks of the Trainer: they measure the speed, print the log and answer SIGTERM."""

import signal
import time
from typing import Any

import torch
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ...costs import training_flops


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """Return the FLOP/s of a large square matrix product on `device`; an MFU of 1 is this rate.

    It is measured and not looked up, so that an MFU means the same on a laptop, under a cgroup and on a GPU.

    Args:
        seconds: how long to measure; the fastest product counts.
    """
    size = 8192 if device.type == "cuda" else 1024
    # A generator of its own, so that training draws the same numbers as without this measurement.
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, device=device, generator=generator).to(dtype).unbind()  # (size, size)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self.world_size = args.world_size
        self.peak = measure_matmul_flops(args.device, self.dtype) * args.world_size
        self.first_step = state.global_step + 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.first_step:
            synchronize(args.device)
            self.reset(time.perf_counter())
        self.step_end = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The time from the end of a step to the end of an evaluation or a save is not training.
        now = time.perf_counter()
        self.left_out += now - self.step_end
        self.step_end = now

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def rates(self, device: torch.device, whole_run: bool = False) -> dict[str, float]:
        """Return `tokens_per_second`, and `mfu` (a fraction) where FLOPs are counted.

        Args:
            whole_run: of all training so far; otherwise of that since the last call.
        """
        synchronize(device)
        begin = time.perf_counter()
        now = (self.tokens, self.flops, begin - self.left_out)
        if device.type == "cpu" and self.peak:
            # Where another program slowed the last measurement down, the MFU would be too high.
            self.peak = max(self.peak, measure_matmul_flops(device, self.dtype, 0.1) * self.world_size)
            spent = time.perf_counter() - begin
            self.left_out += spent
            self.step_end += spent  # an evaluation that follows must not leave it out again
        tokens, flops, seconds = (b - a for a, b in zip(self.total if whole_run else self.window, now, strict=True))
        self.window = now
        if not tokens or not self.peak:
            return {}
        speed = {"tokens_per_second": tokens / seconds}
        return speed | {"mfu": flops / seconds / self.peak} if flops else speed


class SaveOnSigterm(TrainerCallback):
    """Saves and stops after the step in which SIGTERM arrives; all processes stop after the same step.

    transformers' own callback saves in the middle of a step, when dropout has drawn its numbers and the optimizer has
    not moved: a resumed run then differs. Its processes may also choose different steps.
    """

    def __init__(self) -> None:
        self.requested = self.stopped = False
        self.previous: Any = signal.SIG_DFL

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.previous = signal.signal(signal.SIGTERM, self.request)

    def request(self, signum: int, frame: Any) -> None:
        self.requested = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if any_process(self.requested, args):
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        signal.signal(signal.SIGTERM, self.previous)


def any_process(flag: bool, args: TrainingArguments) -> bool:
    """Return whether `flag` is set on any process; every process must call this function."""
    if args.world_size == 1:
        return flag
    flags = torch.tensor(int(flag), device=args.device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags)


def format_logs(state: TrainerState, logs: dict[str, float]) -> str | None:
    """Return the line to print for a training log or an evaluation; `None` for other logs."""
    step = f"step {state.global_step:>6,}/{state.max_steps:,}"
    if "eval_loss" in logs:
        line = f"{step}  validation loss {logs['eval_loss']:.4f}  perplexity {logs['eval_perplexity']:.2f}"
        return line + (f"  KL {logs['eval_kl']:.4f}" if "eval_kl" in logs else "")
    if "loss" not in logs:
        return None
    stage = f"  stage {logs['stage']}" if "stage" in logs else ""
    line = f"{step}{stage}  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.1e}"
    line += f"  {logs['tokens_seen'] / 1e6:.2f}M tokens"
    if "tokens_per_second" in logs:
        line += f"  {logs['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in logs:
        line += f"  MFU {logs['mfu']:.0%}"
    return line


class Lines(TrainerCallback):
    """Prints a line for each log."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (line := format_logs(state, logs)):
            print(line, flush=True)


class Bar(ProgressCallback):
    """Draws transformers' progress bar, and prints the same lines above it."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and (line := format_logs(state, logs)):
            self.training_bar.write(line)
