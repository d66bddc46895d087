"""Adapters of evaluated steps, kept in RUN/kept for `panjue choose`.

At the end of the training, that of the result, with the lowest loss, is only in RUN/adapter.
"""

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
        """Copy new adapters to RUN/kept and delete old ones; one process does so for all."""
        if state.is_world_process_zero:
            # The step whose weights would be the result, RUN/adapter, if the training ended now.
            step = state.best_global_step if args.load_best_model_at_end else state.global_step
            keep_adapters(self._run, self._keep, state, result=step)

    on_train_begin = on_save
    on_train_end = on_save


def keep_adapters(run: Path, keep: int, state: TrainerState, result: int | None) -> None:
    """Copy the adapters of evaluated checkpoints to RUN/kept; delete the oldest of too many.

    `result` is the step whose weights would be the result if the training ended now. Its adapter
    stays if it is there, and the last `keep - 1` of the others.
    """
    # A kill while a kept folder was replaced may have left it under a temporary name. It cannot be
    # copied again if its checkpoint is deleted by now.
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
