"""Checkpoints. A complete one has a mark; one without it is ignored, even after a power cut."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from panjue.prompts.plumbing.files import delete, sync, sync_one
from panjue.prompts.plumbing.run import checkpoints_in

COMPLETE_MARK = "complete"
"""File that marks a checkpoint as complete; written last, when all other files are on disk."""

OF_RUST = re.compile(r"\(os error (\d+)\)$")
"""The error code at the end of a message of safetensors or tokenizers."""

OF_TORCH = ("unexpected pos", "file write failed")
"""Words in torch's message about any error in writing."""


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Raise OSError with the system's code if a library cannot save to `folder`.

    Libraries raise other exceptions if the disk is full or fails.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers raises a plain Exception
        message = str(error)
        of_rust = OF_RUST.search(message)
        if of_rust:
            code = int(of_rust[1])
        elif any(words in message for words in OF_TORCH):
            code = error_in_writing(folder)
        else:
            raise
        raise OSError(code, os.strerror(code), str(folder)) from None


def error_in_writing(folder: Path) -> int:
    """Return the error code of a failed write to a folder, found out by writing one MiB.

    Messages of torch do not have the code, see `OF_TORCH`.
    """
    place = folder if folder.is_dir() else folder.parent  # `atomic_folder` renames it at the end
    try:
        with TemporaryFile(dir=place) as trial:
            trial.write(bytes(2**20))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return error.errno or errno.ENOSPC
    return errno.ENOSPC  # there is room for one MiB, but not for the weights


def mark_complete(checkpoint: Path) -> None:
    """Flush a checkpoint to disk, then mark it as complete."""
    sync(checkpoint)
    (checkpoint / COMPLETE_MARK).touch()
    sync_one(checkpoint)
    sync_one(checkpoint.parent)


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint, its mark first, so that nothing uses a partly deleted checkpoint."""
    delete(checkpoint / COMPLETE_MARK)
    delete(checkpoint)


def drop_old(checkpoints: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` complete checkpoints and the best one."""
    complete = [*complete_checkpoints(checkpoints).values()]
    kept = {path.name for path in complete[-keep:]}
    if best:
        kept.add(Path(best).name)
    for path in checkpoints_in(checkpoints).values():
        if path.name not in kept:
            drop(path)


def newest_complete(checkpoints: Path) -> Path | None:
    """Return the checkpoint from which a training resumes; None if there is none."""
    complete = complete_checkpoints(checkpoints)
    return complete[max(complete)] if complete else None


def complete_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints with the mark, the oldest first."""
    found = checkpoints_in(checkpoints)
    return {step: path for step, path in found.items() if (path / COMPLETE_MARK).exists()}
