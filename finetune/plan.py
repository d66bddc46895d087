"""The plan of a run, printed before the first step."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from trl import SFTTrainer

from panjue.finetune.data import IGNORED, Report
from panjue.finetune.trainer import PartsTrainer

GIB = 2**30
ADAM_BYTES = 12
"""Bytes per trained weight: its gradient and Adam's two moments, in float32."""

MAX_SHOWN_EXAMPLES = 5
"""Refused examples, and notes, printed to the console; the report file has all."""


def print_plan(
    console: Console, trainer: PartsTrainer, report: Report, held_out: Report, mixed: int
) -> None:
    """Print the examples, token percentiles, trained weights, steps and memory."""
    for name, text in (*data_plan(report, held_out, mixed), *training_plan(trainer)):
        console.print(f"{name:12s} {text}", highlight=False, markup=False)


def data_plan(report: Report, held_out: Report, mixed: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) about the examples."""
    yield "examples", f"{len(report.tokens)} to train on, {len(held_out.tokens)} held out"
    if mixed:
        yield "", f"{mixed} of the training examples come from the mix file"
    if held_out.refused or held_out.shortened:
        changed = f"{len(held_out.refused)} more refused, {len(held_out.shortened)} shortened"
        yield "", f"held out: {changed} (label not in the training set, or too long)"
    yield "refused", str(len(report.refused))
    yield from (("", f"id {line}") for line in report.refused[:MAX_SHOWN_EXAMPLES])
    if max(len(report.refused), len(report.notes)) > MAX_SHOWN_EXAMPLES:
        yield "", "… all in the run's rows/*/report.json"
    if report.notes:
        yield "notes", f"{len(report.notes)}; these examples are still used"
        yield from (("", f"id {line}") for line in report.notes[:MAX_SHOWN_EXAMPLES])
    lost = sum(before - after for _, before, after in report.shortened)
    yield "shortened", f"{len(report.shortened)} ({lost:,} tokens left out)"
    low, median, high, longest = np.percentile(report.tokens, [10, 50, 90, 100]).astype(int)
    percentiles = f"10% {low}, 50% {median}, 90% {high}, longest {longest}"
    yield "tokens", f"{sum(report.tokens):,} in all; {percentiles}"


def training_plan(trainer: PartsTrainer) -> Iterator[tuple[str, str]]:
    """Yield (name, text) about weights, steps and memory."""
    weights = list(trainer.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = trainer.model.num_parameters()  # counts four-bit weights, which are stored in pairs
    yield "weights", f"{trained:,} trained of {total:,} ({trained / total:.2%})"
    if trainer.accelerator.num_processes > 1:
        yield "processes", processes_plan(trainer)
    yield "steps", f"{steps(trainer)} of {batch_size(trainer)} examples or packs"
    yield "evaluations", evaluation_plan(trainer)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    args, shards = trainer.args, trainer.is_fsdp_enabled
    if args.load_best_model_at_end:
        yield "adapter", f"the best by {args.metric_for_best_model}"
    else:
        yield "adapter", "the last one; for the best, make eval_strategy and save_strategy equal"
    memory = (weight_bytes + trained * ADAM_BYTES) / GIB / (args.world_size if shards else 1)
    each = " on each device" if args.world_size > 1 else ""
    yield "memory", f"{memory:.2f} GiB for weights and optimizer{each}, without activations"
    if torch.accelerator.is_available():
        _, size = torch.accelerator.get_memory_info()
        yield "", f"{size / GIB:.0f} GiB on the accelerator"


def processes_plan(trainer: PartsTrainer) -> str:
    """Return how many processes train, and how they share weights and examples."""
    args, state = trainer.args, trainer.accelerator.state
    strategy = {"DEEPSPEED": "DeepSpeed"}.get(state.distributed_type.name, "DDP")
    if trainer.is_fsdp_enabled:
        strategy = f"FSDP{state.fsdp_plugin.fsdp_version}, sharded weights"
    each = f"{args.train_batch_size} × {args.gradient_accumulation_steps} examples of each step"
    return f"{args.world_size}, {strategy}; each has {each}"


def evaluation_plan(trainer: PartsTrainer) -> str:
    """Return how many evaluations there are at most, and what each does."""
    count, args = evaluations(trainer), trainer.args
    if not count:
        return "none"
    every = f"{args.eval_steps:g} steps" if args.eval_strategy == "steps" else "epoch"
    text = f"{count}, after every {every}: the loss of {len(trainer.eval_dataset)} held-out cases"
    if trainer.score:
        scored = len(trainer.score.questions)
        text += f"; {scored} of them are answered, without the schema, and scored"
    return text


def evaluations(trainer: PartsTrainer) -> int:
    """Return the number of evaluations, if training does not stop early."""
    args, last = trainer.args, steps(trainer)
    if args.eval_strategy == "no":
        return 0
    if args.eval_strategy == "epoch":
        every = steps_per_epoch(trainer)
        delay = args.eval_delay * every
    else:  # below 1, `eval_steps` is a share of all steps
        every = int(args.eval_steps if args.eval_steps >= 1 else np.ceil(last * args.eval_steps))
        delay = args.eval_delay
    points = {*range(every, last + 1, every), last}
    count = sum(1 for point in points if point >= delay)
    return count + int(args.eval_on_start)


def batch_size(trainer: SFTTrainer) -> int:
    """Return the number of rows per optimizer step, over all processes."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def steps(trainer: SFTTrainer) -> int:
    """Return the number of optimizer steps."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    return int(np.ceil(steps_per_epoch(trainer) * trainer.args.num_train_epochs))


def steps_per_epoch(trainer: SFTTrainer) -> int:
    """Return the number of optimizer steps of one pass over the training rows."""
    return -(-len(trainer.train_dataset) // batch_size(trainer))


def print_example(console: Console, row: dict[str, Any], tokenizer: Any) -> None:
    """Print one row as the model sees it: tokens with loss in green, tokens without in dim."""
    text = Text()
    pairs = zip(row["labels"], row["input_ids"], strict=True)
    for has_loss, run in groupby(pairs, key=lambda pair: pair[0] != IGNORED):
        text.append("[loss] " if has_loss else "[no loss] ", style="bold")
        ids = [token for _, token in run]
        text.append(tokenizer.decode(ids) + "\n", style="green" if has_loss else "dim")
    console.print(text, end="")
