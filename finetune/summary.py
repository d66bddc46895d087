"""The summary of a finished training: steps, held-out loss, tokens, time and memory."""

import resource
import sys
from datetime import date

import torch

from panjue.finetune.data import count_examples
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.plumbing.records import TrainingSummary


def finished(begun: TrainingSummary, trainer: ReplyTrainer, seconds: float) -> TrainingSummary:
    """Return the summary of a training, with the numbers that are known at its end."""
    state = trainer.state
    held_out = trainer.eval_dataset
    memory, device = peak_memory()
    results = {
        "finished": date.today().isoformat(),
        "steps": state.global_step,
        "kept_step": kept_step(trainer),
        "held_out": 0 if held_out is None else count_examples(held_out),
        "held_out_loss": kept_loss(trainer),
        "tokens": state.num_input_tokens_seen,
        "seconds": round(seconds, 1),
        "memory": memory,
        "device": device,
    }
    return begun.model_copy(update=results)


def kept_step(trainer: ReplyTrainer) -> int:
    """Return the step whose weights are kept: that of the lowest held-out loss, or the last."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    return int(best or trainer.state.global_step)


def kept_loss(trainer: ReplyTrainer) -> float | None:
    """Return the held-out loss of the kept weights; None if they were not evaluated."""
    kept = kept_step(trainer)
    for row in reversed(trainer.state.log_history):
        if row["step"] == kept and "eval_loss" in row:
            return float(row["eval_loss"])
    return None


def peak_memory() -> tuple[int, str]:
    """Return the peak memory of this process in bytes, and whether of its GPU or the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved(), torch.cuda.get_device_name()
    kib = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib, "CPU"
