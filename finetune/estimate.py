"""Estimate how long a training will take on this machine, from the time of a few rows."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from panjue.finetune.model import CHECKPOINTING, compute_activations_again
from panjue.finetune.trainer import ReplyTrainer, step_size, steps

LONGEST_TRY_S = 5.0
"""About how long the timed rows may take; if one row takes longer, it is the only one."""

EVALUATING = 0.5
"""Time of losses without gradients relative to the time with them, if it is not measured."""

BUSY = 0.6
"""A busy machine gives threads less than this share of the time that they could run."""

WAITED = 0.1
"""There, threads also wait for a core for more than this share. On many idle cores they sleep."""


class Timed(NamedTuple):
    """The time that the losses of some rows took."""

    seconds: float
    processor_s: float = 0.0  # processor time that all threads of this process got
    waited_s: float = 0.0  # time that its threads waited for a core while others ran


def estimate(trainer: ReplyTrainer) -> tuple[float, str] | None:
    """Return the seconds of all steps and evaluations, and a line if other programs use the CPU.

    A row of median length warms up. Then at most as many rows as a process takes at once are timed.
    If the first row takes long, as on a CPU, no other row is timed. Each token of the training is
    taken to need the same time. Weights and random states stay unchanged. None if weights are
    sharded, because no process has them whole.
    """
    if trainer.is_fsdp_enabled:
        return None
    args = trainer.args
    lengths = np.array(trainer.train_dataset["length"])
    order = np.argsort(lengths, kind="stable")
    middle = len(order) // 2
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        places = order[middle : middle + 1].tolist()  # of the timed rows
        learning = timed(trainer, places)
        evaluating_s = EVALUATING * learning.seconds  # a usual share, unless it is measured below
        if learning.seconds < LONGEST_TRY_S:
            count = min(args.train_batch_size, int(LONGEST_TRY_S / learning.seconds))
            start = max(0, middle - count // 2)
            places = order[start : start + count].tolist()
            learning = timed(trainer, places)
            with torch.no_grad():
                evaluating_s = timed(trainer, places).seconds
    step_tokens = lengths.mean() * step_size(args)
    learnt_tokens = steps(trainer) * step_tokens
    evaluated_tokens = 0.0
    if trainer.eval_dataset is not None:
        evaluated_tokens = evaluations(trainer) * sum(trainer.eval_dataset["length"])
    # Each of the processes computes as many tokens in this time.
    timed_tokens = lengths[places].sum() * args.world_size
    all_s = float(learnt_tokens * learning.seconds + evaluated_tokens * evaluating_s)
    seconds = all_s / float(timed_tokens)
    on_cpu = not torch.accelerator.is_available()
    busy_line = busy(learning, torch.get_num_threads()) if on_cpu else ""
    return seconds, busy_line


def busy(step: Timed, threads: int) -> str:
    """Return a line that other programs use the processor and what helps; empty if they do not.

    After every matrix product, all threads wait for the slowest. A single thread does not wait.
    """
    possible_s = step.seconds * threads
    is_busy = step.processor_s < BUSY * possible_s and step.waited_s > WAITED * possible_s
    if threads == 1 or not is_busy:
        return ""
    return (
        f"busy: {threads} threads got {step.processor_s / possible_s:.0%} of their time, other "
        "programs have the rest; OMP_NUM_THREADS=1 may be faster"
    )


def timed(trainer: ReplyTrainer, places: Sequence[int]) -> Timed:
    """Return the time of the losses of the training rows at `places`, and of their gradients.

    The gradients are discarded; under `torch.no_grad` there are none.
    """
    model = trainer.model
    model.train()
    if getattr(trainer.args, CHECKPOINTING):
        compute_activations_again(model, trainer.args)  # as training does
    rows = [trainer.train_dataset[place] for place in places]
    batch = trainer._prepare_inputs(trainer.data_collator(rows))

    def compute() -> Timed:
        start = time.perf_counter()
        processor_before = time.process_time()  # of all threads
        waited_before = waited_s()  # for a core that runs something else
        with trainer.accelerator.autocast():
            loss = trainer.reply_losses(model, batch).sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        return Timed(seconds, time.process_time() - processor_before, waited_s() - waited_before)

    # If the GPU's memory is too small, this turns on gradient checkpointing and computes again.
    step = trainer.saving_memory(compute, again=compute)
    model.zero_grad(set_to_none=True)
    return step


def waited_s() -> float:
    """Return how long the threads of this process have waited for a core; 0 if unknown."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread has ended, or the kernel has no such files
            _, waiting, _ = task.read_text("ascii").split()
            waited_ns += int(waiting)
    return waited_ns / 1e9


def evaluations(trainer: ReplyTrainer) -> int:
    """Return how often the held-out loss is computed if training does not stop early."""
    args = trainer.args
    all_steps = steps(trainer)
    if args.eval_strategy == "no":
        return 0
    if args.eval_strategy == "epoch":
        steps_per_epoch = math.ceil(len(trainer.train_dataset) / step_size(args))
        return math.ceil(all_steps / steps_per_epoch)
    # Below 1, it is a share of all steps.
    every = args.eval_steps if args.eval_steps >= 1 else math.ceil(all_steps * args.eval_steps)
    return int(all_steps // every)
