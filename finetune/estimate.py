"""How long a training will take on this machine, by the time of a few rows."""

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from panjue.finetune.trainer import ReplyTrainer, step_size, steps

LONGEST_TRY_S = 5.0
"""The rows that are timed take about so long; one row that takes longer is enough."""

EVALUATING = 0.5
"""Time of losses without gradients, of that with them, where it is not measured."""


def training_seconds(trainer: ReplyTrainer) -> float | None:
    """Return the time of all steps and evaluations; weights and random numbers stay as they are.

    A row of median length warms up; then as many as a process takes at once are timed, or fewer.
    Where the row alone takes long, as on a CPU, no more is done.
    None where weights are sharded: they are whole in no process.
    """
    if trainer.is_fsdp_enabled:
        return None
    args = trainer.args
    lengths = np.array(trainer.train_dataset["length"])
    order = np.argsort(lengths, kind="stable")
    middle = len(order) // 2
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        places = order[middle : middle + 1].tolist()
        learning = seconds_of(trainer, places)
        evaluating = EVALUATING * learning
        if learning < LONGEST_TRY_S:
            count = min(args.train_batch_size, int(LONGEST_TRY_S / learning))
            start = max(0, middle - count // 2)
            places = order[start : start + count].tolist()
            learning = seconds_of(trainer, places)
            with torch.no_grad():
                evaluating = seconds_of(trainer, places)
    of_step = lengths.mean() * step_size(args)
    tokens = steps(trainer) * of_step
    evaluated = 0.0
    if trainer.eval_dataset is not None:
        evaluated = evaluations(trainer) * sum(trainer.eval_dataset["length"])
    timed = lengths[places].sum() * args.world_size
    return float(tokens * learning + evaluated * evaluating) / float(timed)


def seconds_of(trainer: ReplyTrainer, places: Sequence[int]) -> float:
    """Return the time of the losses of some training rows and, where there are any, of gradients.

    The gradients are dropped.
    """
    model = trainer.model
    model.train()
    if trainer.args.gradient_checkpointing:
        model.gradient_checkpointing_enable()  # which training does too
    rows = [trainer.train_dataset[place] for place in places]
    batch = trainer._prepare_inputs(trainer.data_collator(rows))
    start = time.perf_counter()
    with trainer.accelerator.autocast():
        loss = trainer.reply_losses(model, batch).sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def evaluations(trainer: ReplyTrainer) -> int:
    """Return how often the held-out loss is computed, without an early end."""
    args = trainer.args
    all_steps = steps(trainer)
    if args.eval_strategy == "no":
        return 0
    if args.eval_strategy == "epoch":
        apart = len(trainer.train_dataset) / step_size(args)
        return math.ceil(all_steps / math.ceil(apart))
    every = args.eval_steps if args.eval_steps >= 1 else math.ceil(all_steps * args.eval_steps)
    return int(all_steps // every)
