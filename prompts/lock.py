"""One process at a time writes into a run folder. Not for Windows, where hand-ins can be scored."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from panjue.prompts.errors import UserError

LOCK = ".lock"


@contextmanager
def alone_in(folder: Path, name: str = LOCK, *, wait: bool = False) -> Iterator[None]:
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is at work there; wait for it, stop it, "
                "or choose another run=FOLDER"
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        yield
