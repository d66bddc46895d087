"""Checkpoints that are complete or ignored, whenever the power goes."""

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

COMPLETE = "complete"
"""The file that marks a checkpoint as whole: written last, when everything else is on the disk."""


class Checkpoints(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Marks every checkpoint once it is whole, and only then drops old ones.

    The trainer itself would drop them before anybody could mark the new one.
    """

    def __init__(self, keep: int | None) -> None:
        """Keep the newest `keep`, and the best beside them; None keeps all."""
        self._keep = keep

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Mark the one that was just written."""
        PartialState().wait_for_everyone()  # each process has written its random state
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir))
            mark_complete(folder / f"checkpoint-{state.global_step}")
            best = state.best_model_checkpoint
            if self._keep:
                drop_old(folder, self._keep, Path(best) if best else None)


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint when all of it has reached the disk."""
    for path in sorted(checkpoint.rglob("*")):
        _sync(path)
    (checkpoint / COMPLETE).touch()
    for path in (checkpoint / COMPLETE, checkpoint, checkpoint.parent):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_old(checkpoints: Path, keep: int, best: Path | None) -> None:
    """Delete all but the newest `keep` complete checkpoints and the best one.

    The mark goes first: what a kill leaves half deleted is no checkpoint.
    """
    complete = sorted(_complete(checkpoints), key=_step)
    kept = {path.name for path in complete[-keep:]} | ({best.name} if best else set())
    for path in checkpoints.glob("checkpoint-*"):
        if path.name not in kept:
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)


def newest_complete(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that bears the mark of completeness."""
    return max(_complete(checkpoints), key=_step, default=None)


def _complete(checkpoints: Path) -> list[Path]:
    return [mark.parent for mark in checkpoints.glob(f"checkpoint-*/{COMPLETE}")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
