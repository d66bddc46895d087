"""One process at a time writes into a run folder. Not for Windows, where hand-ins can be scored."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from panjue.prompts.plumbing.errors import UserError

LOCK = ".lock"

DYING_S = 1.0
"""How long a process that was killed, or a worker that it has just forked, may keep the lock."""


@contextmanager
def exclusive_lock(folder: Path, name: str = LOCK, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes of panjue from writing into a folder while the block runs.

    The lock is the kernel's: it goes with the process, however that ends.

    Args:
        folder: A run folder.
        name: Of the lock, where it is for a part of the folder.
        wait: For a process that has the lock; else it is told.

    Raises:
        UserError: Another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        os.register_at_fork(after_in_child=file.close)  # a loader's worker may outlive us a while
        until = time.monotonic() + DYING_S
        while not _locked(file, wait=wait):
            if time.monotonic() > until:
                raise UserError(
                    f"{folder}: another process is at work there; wait for it, stop it, "
                    "or choose another run=FOLDER"
                )
            time.sleep(0.05)
        yield


def _locked(file: IO[str], *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network file systems have no locks
    return True
