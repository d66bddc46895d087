"""Checkpoints that are marked when complete and ignored otherwise, even after a power cut."""

import shutil
from pathlib import Path

from panjue.prompts.plumbing.files import read_json, sync, sync_names

COMPLETE_MARK = "complete"
"""File that marks a checkpoint as complete; written last, when all other files are on disk."""

TRAINER_STATE = "trainer_state.json"


def is_over(checkpoint: Path, patience: int) -> bool:
    """Say whether the training had ended at this checkpoint, its evaluation included."""
    state = read_json(checkpoint / TRAINER_STATE)
    parts = state["stateful_callbacks"]
    stopping = parts.get("EarlyStoppingCallback", {}).get("attributes", {})
    stopped_early = stopping.get("early_stopping_patience_counter", 0) >= patience
    is_evaluated = not parts["TrainerControl"]["args"]["should_evaluate"]
    return is_evaluated and (state["global_step"] >= state["max_steps"] or stopped_early)


def mark_complete(checkpoint: Path) -> None:
    """Flush a checkpoint to disk, then mark it as complete."""
    sync(checkpoint)
    (checkpoint / COMPLETE_MARK).touch()
    sync_names(checkpoint)
    sync_names(checkpoint.parent)


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint, its mark first, so that a partly deleted one is not used."""
    (checkpoint / COMPLETE_MARK).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def drop_old(checkpoints: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` complete checkpoints and the best one."""
    complete = sorted(_complete(checkpoints), key=_step)
    kept = {path.name for path in complete[-keep:]} | ({Path(best).name} if best else set())
    for path in checkpoints.glob("checkpoint-*"):
        if path.name not in kept:
            drop(path)


def newest_complete(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    return max(_complete(checkpoints), key=_step, default=None)


def _complete(checkpoints: Path) -> list[Path]:
    return [mark.parent for mark in checkpoints.glob(f"checkpoint-*/{COMPLETE_MARK}")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
