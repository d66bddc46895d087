"""A lock: only one process at a time writes into a run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from panjue.prompts.plumbing.errors import UserError

LOCK_TIMEOUT_S = 1.0
"""A killed process, or a worker that it has just forked, may hold the lock for about this time."""


@contextmanager
def exclusive_lock(folder: Path, name: str = ".lock", *, wait: bool = False) -> Iterator[None]:
    """Keep other processes of panjue from writing into a folder while the block runs.

    The kernel releases the lock when the process ends, in whatever way.

    A lock for a part of the folder has another `name`. With `wait` it waits for its turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name, timeout=-1 if wait else LOCK_TIMEOUT_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder}: another process is at work there; wait for it, stop it, "
            "or choose another run=FOLDER"
        ) from None
    except OSError as error:  # a network file system without locks: then there is none
        if error.filename:
            raise
    try:
        yield
    finally:
        lock.release()
