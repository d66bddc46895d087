"""One process at a time writes into a run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from panjue.prompts.plumbing.errors import UserError

DYING_S = 1.0
"""How long a process that was killed, or a worker that it has just forked, may keep the lock."""


@contextmanager
def exclusive_lock(folder: Path, name: str = ".lock", *, wait: bool = False) -> Iterator[None]:
    """Keep other processes of panjue from writing into a folder while the block runs.

    The lock is the kernel's: it goes with the process, however that ends.

    Args:
        folder: A run folder.
        name: Of the lock, where it is for a part of the folder.
        wait: Whether to wait for a process that has the lock.

    Raises:
        UserError: Another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name, timeout=-1 if wait else DYING_S)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder}: another process is at work there; wait for it, stop it, "
            "or choose another run=FOLDER"
        ) from None
    try:
        yield
    finally:
        lock.release()
