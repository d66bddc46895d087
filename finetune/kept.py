"""Adapters of other steps than the one with the lowest loss, kept for `panjue choose`."""

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from panjue.finetune.checkpoints import complete_checkpoints
from panjue.prompts.plumbing.files import atomic_folder, delete, restore
from panjue.prompts.plumbing.run import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    KEPT,
    kept_adapters,
    kept_place,
)

FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
"""Files of a checkpoint that are kept; the optimizer is not among them."""


class KeepAdapters(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Keeps the adapters of `keep` evaluated steps: that of the lowest loss and the last ones.

    A kill between a checkpoint and its copy leaves the adapter out. So a run that resumes looks for
    it at its beginning, and at its end, which comes at once if the checkpoint was the last.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._run = run
        self._keep = keep

    def on_save(self, args: TrainingArguments, state: TrainerState, *__: Any, **___: Any) -> None:
        if state.is_world_process_zero:
            # The result of the training has its own folder.
            result = state.best_global_step if args.load_best_model_at_end else state.global_step
            keep_adapters(self._run, self._keep, state, result)

    on_train_begin = on_save
    on_train_end = on_save


def keep_adapters(run: Path, keep: int, state: TrainerState, result: int | None) -> None:
    """Copy the adapters of evaluated checkpoints to RUN/kept; keep `result` and the last others.

    `result` is the step whose weights would be the result if the training ended now.
    """
    # A kill may have left a folder under another name, when its checkpoint is deleted already.
    restore(run / KEPT)
    evaluated = {row["step"] for row in state.log_history if "eval_loss" in row}
    for step, checkpoint in complete_checkpoints(run / "checkpoints").items():
        place = kept_place(run, step)
        if step not in evaluated or place.exists():
            continue
        with atomic_folder(place) as folder:
            for name in FILES:
                shutil.copy(checkpoint / name, folder)
    kept = kept_adapters(run)
    others = [step for step in kept if step != result]  # the oldest first
    too_many = max(0, len(others) - (keep - 1))
    for step in others[:too_many]:
        delete(kept[step])
