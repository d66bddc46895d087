"""Checkpoints that are marked when complete and ignored otherwise, even after a power cut."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from panjue.prompts.plumbing.files import delete, sync, sync_names

COMPLETE_MARK = "complete"
"""File that marks a checkpoint as complete; written last, when all other files are on disk."""

FULL_DISK_WORDS = (
    "unexpected pos",  # torch
    "file write failed",  # torch
    "os error 28",  # safetensors, ENOSPC
    "os error 27",  # safetensors, EFBIG
)
"""What the errors say with which these libraries report a full disk."""


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turn what torch and safetensors say of a full disk into the error of the system."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        message = str(error)
        if not any(words in message for words in FULL_DISK_WORDS):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None


def mark_complete(checkpoint: Path) -> None:
    """Flush a checkpoint to disk, then mark it as complete."""
    sync(checkpoint)
    (checkpoint / COMPLETE_MARK).touch()
    sync_names(checkpoint)
    sync_names(checkpoint.parent)


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint, its mark first, so that a partly deleted one is not used."""
    delete(checkpoint / COMPLETE_MARK)
    delete(checkpoint)


def drop_old(checkpoints: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` complete checkpoints and the best one."""
    complete = sorted(complete_checkpoints(checkpoints), key=step_of)
    kept = {path.name for path in complete[-keep:]}
    if best:
        kept.add(Path(best).name)
    for path in _all(checkpoints):
        if path.name not in kept:
            drop(path)


def newest_complete(checkpoints: Path) -> Path | None:
    return max(complete_checkpoints(checkpoints), key=step_of, default=None)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    return [path for path in _all(checkpoints) if (path / COMPLETE_MARK).exists()]


def _all(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that a training makes; `checkpoint-best` is somebody's copy."""
    paths = checkpoints.glob("checkpoint-*")
    return [path for path in paths if path.name.removeprefix("checkpoint-").isdecimal()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
