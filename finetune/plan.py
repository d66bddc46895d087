"""What a run is about to do, said before the first step."""

from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from trl import SFTTrainer

from panjue.finetune.data import IGNORED, Report

GIB = 2**30
ADAM_BYTES = 12
"""Per trained weight: its gradient and Adam's two moments, in float32."""


def print_plan(console: Console, trainer: SFTTrainer, report: Report, held_out: int) -> None:
    """Print examples, token percentiles, trained weights, steps and memory."""
    say = lambda line: console.print(line, highlight=False, markup=False)  # noqa: E731
    say(f"examples     {len(report.tokens)} to train on, {held_out} held out")
    say(f"refused      {len(report.refused)}")
    for line in report.refused[:5]:
        say(f"             id {line}")
    if len(report.refused) > 5:
        say(f"             … and {len(report.refused) - 5} more, all in rows/*/report.json")
    lost = sum(before - after for _, before, after in report.shortened)
    say(f"shortened    {len(report.shortened)} ({lost:,} tokens left out)")
    low, median, high, most = np.percentile(report.tokens, [10, 50, 90, 100]).astype(int)
    say(f"tokens       {sum(report.tokens):,} in all; 10% {low}, 50% {median}, 90% {high}, longest {most}")
    weights = list(trainer.model.parameters())
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    say(f"weights      {trained:,} trained of {total:,} ({trained / total:.2%})")
    say(f"steps        {steps(trainer)} of {batch_size(trainer)} examples or packs")
    held = sum(weight.numel() * weight.element_size() for weight in weights) + trained * ADAM_BYTES
    say(f"memory       {held / GIB:.2f} GiB for weights and optimizer, activations come on top{_gpu_memory()}")


def batch_size(trainer: SFTTrainer) -> int:
    """Return the rows per optimizer step over all processes."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def steps(trainer: SFTTrainer) -> int:
    """Return the number of optimizer steps."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    per_epoch = -(-len(trainer.train_dataset) // batch_size(trainer))
    return int(np.ceil(per_epoch * trainer.args.num_train_epochs))


def _gpu_memory() -> str:
    if not torch.cuda.is_available():
        return ""
    return f" ({torch.cuda.get_device_properties(0).total_memory / GIB:.0f} GiB on the GPU)"


def print_example(console: Console, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print one example as the model sees it: dim where there is no loss, green where there is."""
    text = Text()
    learnt = [label != IGNORED for label in row["labels"]]
    start = learnt.index(True)
    text.append("[no loss] ", style="bold")
    text.append(str(tokenizer.decode(row["input_ids"][:start])), style="dim")
    text.append("\n[loss] ", style="bold")
    text.append(str(tokenizer.decode(row["input_ids"][start:])), style="green")
    console.print(text)
