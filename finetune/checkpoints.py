"""Checkpoints that are complete or ignored, whenever the power goes."""

import shutil
from pathlib import Path

from panjue.prompts.plumbing.files import read_json, sync, sync_names

COMPLETE = "complete"
"""The file that marks a checkpoint as whole: written last, when everything else is on the disk."""

TRAINER_STATE = "trainer_state.json"


def is_over(checkpoint: Path, patience: int) -> bool:
    """Say whether the training of a checkpoint had come to its end: trainers would go on."""
    state = read_json(checkpoint / TRAINER_STATE)
    stopping = state["stateful_callbacks"].get("EarlyStoppingCallback", {}).get("attributes", {})
    spent = stopping.get("early_stopping_patience_counter", 0) >= patience
    return bool(state["global_step"] >= state["max_steps"] or spent)


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint when all of it has reached the disk."""
    sync(checkpoint)
    (checkpoint / COMPLETE).touch()
    sync_names(checkpoint)
    sync_names(checkpoint.parent)


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint; the mark goes first, so that none is half deleted and counts."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def drop_old(checkpoints: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` complete checkpoints and the best one."""
    complete = sorted(_complete(checkpoints), key=_step)
    kept = {path.name for path in complete[-keep:]} | ({Path(best).name} if best else set())
    for path in checkpoints.glob("checkpoint-*"):
        if path.name not in kept:
            drop(path)


def newest_complete(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that bears the mark of completeness."""
    return max(_complete(checkpoints), key=_step, default=None)


def _complete(checkpoints: Path) -> list[Path]:
    return [mark.parent for mark in checkpoints.glob(f"checkpoint-*/{COMPLETE}")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
